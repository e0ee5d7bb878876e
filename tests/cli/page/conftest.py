"""Makes the reader of pages importable, and predictions of a small graph available."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from echograph.ir import serde
from echograph.ir.graph import JobGraph
from echograph.simulator.result import Result
from echograph.workflow.plan import Plan
from echograph.workflow.predict import predict

sys.path.insert(0, str(Path(__file__).parents[2] / "profiler" / "page"))


@pytest.fixture(scope="session")
def staged(graph: Path) -> tuple[Result, JobGraph]:
    """A prediction of a pipeline of three stages, whose layers two ranks share."""
    return predict(serde.load(graph), Plan(gpus=12, tp=2, pp=3, micro_batch=1, global_batch=8))
