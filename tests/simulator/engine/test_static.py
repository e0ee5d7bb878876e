"""Columns that never meet are runs of their own; those that meet are tested with the ranks of a job."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import reference_engine as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from random_sharing import random_columns
from random_tasks import random_meetings, random_tasks, seeded_meetings, task_graph

from echograph.ir.columns import Ragged
from echograph.simulator.engine import static
from echograph.simulator.engine.columns import apart, causes
from echograph.simulator.tasks import TaskGraph

KINDS = 3


def scenarios(tasks: TaskGraph, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    factor = rng.choice([0.0, 0.5, 1.0, 1.0, 1.37], (KINDS, 5))
    factor[:, 0] = 1.0
    return rng.integers(0, KINDS, len(tasks)).astype(np.int32), factor


def one_by_one(tasks: TaskGraph, kind: np.ndarray, factor: np.ndarray) -> list[TaskGraph]:
    return [replace(tasks, duration=np.rint(tasks.duration * f[kind]).astype(np.int64)) for f in factor.T]


@settings(max_examples=40, deadline=None)
@given(st.one_of(random_tasks(), random_meetings()), st.integers(0, 2**32 - 1))
def test_each_column_is_the_event_engine_with_its_durations(tasks: TaskGraph, seed: int) -> None:
    kind, factor = scenarios(tasks, seed)
    every = apart(tasks, kind, factor)
    for column, alone in enumerate(one_by_one(tasks, kind, factor)):
        ends, starts = static.run_columns(tasks, every, column), reference.run(alone)
        assert np.array_equal(ends.start, starts.start)
        assert np.array_equal(ends.duration, alone.duration)
        last = np.zeros(tasks.resources, np.int64)
        np.maximum.at(last, tasks.resource, starts.start + alone.duration)
        assert np.array_equal(ends.end[:, column], last)
        assert not ends.waited.any()


@pytest.mark.parametrize("compile_from", [0, 10**9])
def test_scenarios_end_when_each_of_them_does(monkeypatch: pytest.MonkeyPatch, compile_from: int) -> None:
    monkeypatch.setattr(static, "COMPILE_FROM", compile_from)
    for seed in range(20):
        tasks = seeded_meetings(seed, 30)
        kind, factor = scenarios(tasks, seed)
        expected = [int((reference.run(t).start + t.duration).max()) for t in one_by_one(tasks, kind, factor)]
        assert static.run_columns(tasks, apart(tasks, kind, factor)).last.tolist() == expected


def test_columns_that_meet_are_the_same_compiled_and_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(40):
        rng = np.random.default_rng(seed)
        tasks = seeded_meetings(seed, 4 + seed)
        every, found = random_columns(tasks, rng), []
        for compile_from in (0, 10**9):
            monkeypatch.setattr(static, "COMPILE_FROM", compile_from)
            found.append(static.run_columns(tasks, every, record=0))
        for name in ("end", "waited", "start", "duration"):
            assert np.array_equal(getattr(found[0], name), getattr(found[1], name)), name


def test_who_starts_apart_in_one_rendezvous_has_a_cause_of_its_own() -> None:
    """A rank's send meets one neighbour, its receive another: in its column the two need not start together."""
    tasks = task_graph([0, 1, 0, 1], [5, 9, 3, 3], [[] for _ in range(4)], [-1, -1, 0, 0])
    assert causes(tasks, np.array([0, 0, 9, 9])).tolist() == [-1, -1, 1, 1]
    assert causes(tasks, np.array([0, 0, 5, 9])).tolist() == [-1, -1, 0, 1]
    assert causes(tasks, np.array([0, 0, 7, 9])).tolist() == [-1, -1, -1, 1]


def test_no_task_takes_no_time() -> None:
    tasks = seeded_meetings(0, 30)
    nothing = replace(
        tasks,
        **{name: getattr(tasks, name)[:0] for name in ("resource", "duration", "rendezvous", "lane")},
        deps=Ragged(np.zeros(1, np.int64), np.zeros(0, np.int32)),
    )
    assert (
        static.run_columns(nothing, apart(nothing, np.zeros(0, np.int32), np.ones((1, 5)))).last.tolist()
        == [0] * 5
    )


def test_what_is_remembered_does_not_grow_with_the_tasks() -> None:
    live = []
    for repeats in (10, 100):
        # A host that issues to a stream, again and again.
        deps = [[task - 1] if task % 2 else [] for task in range(2 * repeats)]
        tasks = task_graph([0, 1] * repeats, [1, 2] * repeats, deps)
        live.append(int(static._slots(static._work(tasks), static.topological_order(tasks)).max()))
    assert live[0] == live[1] < 10
