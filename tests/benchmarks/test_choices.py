"""Choices that can be taken back: each takes something back, and puts it there again."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from echograph.models.stacks import load_stack, stack_names
from echograph.profiler.costs import estimate, power, releases
from echograph.profiler.costs.device import PowerModel
from echograph.workflow.system import System
from echograph.workflow.validation import run, trainers
from echograph.workflow.validation.table import MeasuredStep

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def choices() -> Any:
    spec = importlib.util.spec_from_file_location("choices", ROOT / "benchmarks" / "choices.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["choices"] = module  # where dataclasses look for the types of fields
    spec.loader.exec_module(module)
    yield module
    del sys.modules["choices"]


def state() -> tuple[Any, ...]:
    """All that a choice can take back."""
    table = trainers._read()
    return (
        [repr(load_stack(name)) for name in stack_names()],
        msgspec.to_builtins(table),
        (power.slowest_of, estimate.sustained_clock, dict(estimate.SPLIT_ACCUMULATION)),
        (PowerModel.joules_of, System._exposed, dict(releases.RELEASES)),
    )


def test_each_choice_is_taken_back_and_put_there_again(choices: Any) -> None:
    made = state()
    for choice in choices.CHOICES:
        with choice.without():
            assert state() != made, choice.name
        assert state() == made, choice.name
    assert len({choice.name for choice in choices.CHOICES}) == len(choices.CHOICES)
    assert all(choice.source and choice.families for choice in choices.CHOICES)


def test_rows_are_drawn_evenly_and_no_more_than_asked(choices: Any) -> None:
    rows = [MeasuredStep({"id": f"{name}-{n}"}) for name, count in (("a", 100), ("b", 3)) for n in range(count)]
    drawn = choices.sample(rows, 7)
    assert [row.id for row in drawn["a"]] == [f"a-{n}" for n in range(0, 100, 15)]
    assert len(drawn["b"]) == 3


def test_errors_stand_beside_those_with_the_choice(choices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Outcome:
        def __init__(self, row: MeasuredStep) -> None:
            self.id, self.family = row.id, row.family
            self.error = None if row.id == "mlperf-1" else 0.5 if load_stack("nemo").tp_comm_sms else 0.25

    monkeypatch.setattr(run, "predict_rows", lambda rows: [Outcome(row) for row in rows])
    choice = next(one for one in choices.CHOICES if "multiprocessors" in one.name)
    rows = {name: [MeasuredStep({"id": f"{name}-{n}"}) for n in range(2)] for name in ("mlperf", "dgxc", "bloom")}
    known = {row.id: 0.125 for family in rows.values() for row in family}
    found = choices.without(choice, rows, known)
    assert found == {"dgxc": ([0.125] * 2, [0.25] * 2), "mlperf": ([0.125], [0.25])}
