"""The benchmark of searches: which pairs it judges, and what it holds a search against."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echograph.workflow.plan import Plan
from echograph.workflow.validation.table import MeasuredStep

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def benchmark() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("of_searches", ROOT / "benchmarks" / "search.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["of_searches"] = module  # where dataclasses look for the types of fields
    spec.loader.exec_module(module)
    yield module
    del sys.modules["of_searches"]


def row(name: str, seconds: float, **columns: str) -> MeasuredStep:
    return MeasuredStep({"id": name, "model": "m", "n_gpus": "8", "step_time_s": str(seconds)} | columns)


def test_pairs_are_of_one_work_and_of_plans_that_differ(benchmark: Any) -> None:
    rows = [
        row("a-1", 1.0, tp="1"),
        row("a-2", 2.0, tp="2"),
        row("a-3", 2.04, tp="4"),  # as fast as the second: no pair of these two
        row("a-4", 3.0, tp="1"),  # the plan of the first: no pair of these two
        row("a-5", 9.0, tp="8", global_batch="2"),  # other work
        row("b-1", 9.0, tp="8"),  # another family
        row("a-6", 5.0, tp="8"),  # without a prediction
    ]
    predicted = {"a-1": 1.0, "a-2": 2.0, "a-3": 0.5, "a-4": 3.0, "a-5": 1.0, "b-1": 1.0}
    found = benchmark.ranking(rows, predicted)
    assert {name: (order.pairs, order.right) for name, order in found.items()} == {"a": (4, 3)}


def test_a_published_plan_is_among_its_neighbours(benchmark: Any) -> None:
    plan = Plan(gpus=64, global_batch=64, tp=4, pp=2, zero=1, micro_batch=1, stack="nemo", recompute="selective")
    over = benchmark.neighbours(plan, 24)
    for name, values in over.items():
        assert getattr(plan, name) in values
    assert over["tp"] == (2, 4, 8) and over["stack"] == ("nemo",)
    assert over["recompute"] == ("none", "selective")
