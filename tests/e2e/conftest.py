"""What the tests from model to prediction share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("torch", reason="needs the [torch] extra")
pytest.importorskip("transformers", reason="needs the [torch] extra")
sys.path.insert(0, str(Path(__file__).parent))

from families import shallow

from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir.graph import StepGraph
from echograph.models import get_model
from echograph.workflow.compile import compile_entry
from echograph.workflow.plan import Plan
from echograph.workflow.predict import predict
from echograph.workflow.system import System


@pytest.fixture(scope="session")
def compiled() -> Callable[..., StepGraph]:
    """`compiled(name, layers=None, **options of build)`: the model's folded step graph, each made once."""

    @cache
    def make(name: str, layers: int | None = None, **options: Any) -> StepGraph:
        entry = get_model(name)
        return compile_entry(entry if layers is None else shallow(entry, layers), StepSpec(), **options)

    return make


@pytest.fixture(scope="session")
def simulated() -> Callable[..., dict[str, Any]]:
    """`simulated(graph, gpus, cluster="dgx-h100", settings=None)`: the JSON record of a prediction."""

    def run(
        graph: StepGraph,
        gpus: int,
        cluster: str = "dgx-h100",
        settings: Mapping[str, str] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        system = System(cluster, settings=settings or {})
        return predict(graph, Plan(cluster=cluster, gpus=gpus, **options), system)[0].to_json()

    return run
