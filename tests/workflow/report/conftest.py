"""A prediction that its parts are held against."""

from __future__ import annotations

from pathlib import Path

import pytest

import echograph as eg

GRAPHS = Path(__file__).resolve().parents[2] / "golden" / "predictions" / "graphs"


@pytest.fixture(scope="session")
def staged() -> tuple[eg.Result, eg.JobGraph]:
    """A prediction of a pipeline of three stages, whose layers two ranks share."""
    step, plan = eg.load(GRAPHS / "bert.pb"), eg.Plan(gpus=12, tp=2, pp=3, global_batch=256)
    result = eg.simulate(eg.lower(step, plan))
    assert result.job is not None
    return result, result.job
