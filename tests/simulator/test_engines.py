from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echograph.errors import SimulationError, UnknownNameError, UsageError
from echograph.ir.columns import Ragged
from echograph.simulator import engine
from echograph.simulator.engine import reference, static
from echograph.simulator.tasks import TaskGraph


def task_graph(
    resources: list[int], durations: list[int], deps: list[list[int]], joins: list[int] | None = None
) -> TaskGraph:
    count = len(resources)
    offsets = np.cumsum([0, *(len(d) for d in deps)]).astype(np.int64)
    zeros = np.zeros(count, np.int64)
    return TaskGraph(
        resource=np.array(resources, np.int32), duration=np.array(durations, np.int64),
        deps=Ragged(offsets, np.array([x for d in deps for x in d], np.int64)),
        join=np.array(joins if joins is not None else [-1] * count, np.int32), program=zeros.astype(np.int32),
        lane=zeros.astype(np.uint8), op=zeros, instance=zeros.astype(np.int32), micro_batch=zeros.astype(np.int32),
        resources=max(resources, default=0) + 1,
    )  # fmt: skip


@st.composite
def random_tasks(draw: st.DrawFn) -> TaskGraph:
    count = draw(st.integers(1, 60))
    resources = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    # Few distinct durations, zero among them, make ties; ties are where engines part.
    durations = draw(st.lists(st.sampled_from([0, 1, 2, 3, 10**12]), min_size=count, max_size=count))
    deps = [sorted(draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else [] for i in range(count)]
    return task_graph(resources, durations, deps)


@settings(max_examples=400, deadline=None)
@given(random_tasks())
def test_the_static_pass_and_the_event_engine_agree_to_the_picosecond(tasks: TaskGraph) -> None:
    one, other = static.run(tasks), reference.run(tasks)
    assert np.array_equal(one.start, other.start)
    assert np.array_equal(one.cause, other.cause)


@settings(max_examples=200, deadline=None)
@given(random_tasks())
def test_makespan_is_at_least_the_critical_path_and_the_busiest_resource(tasks: TaskGraph) -> None:
    start = static.run(tasks).start
    end = start + tasks.duration
    longest = [0] * len(tasks)
    for task in range(len(tasks)):
        longest[task] = int(tasks.duration[task]) + max((longest[d] for d in tasks.deps[task]), default=0)
    busiest = np.bincount(tasks.resource, weights=tasks.duration).max()
    assert end.max() >= max(longest)
    assert end.max() >= busiest
    for task in range(len(tasks)):
        assert all(start[task] >= end[d] for d in tasks.deps[task])


@settings(max_examples=100, deadline=None)
@given(random_tasks())
def test_a_task_starts_exactly_when_its_cause_ends(tasks: TaskGraph) -> None:
    starts = static.run(tasks)
    end = starts.start + tasks.duration
    for task, cause in enumerate(starts.cause.tolist()):
        assert starts.start[task] == (0 if cause < 0 else end[cause])


@given(st.lists(st.integers(0, 10**15), min_size=1, max_size=50))
def test_one_resource_sums_exactly(durations: list[int]) -> None:
    starts = static.run(task_graph([0] * len(durations), durations, [[] for _ in durations]))
    assert int(starts.start[-1]) + durations[-1] == sum(durations)


def test_the_compiled_pass_equals_the_interpreted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    count = 5000
    deps = [sorted(rng.integers(0, i, 2).tolist()) if i else [] for i in range(count)]
    tasks = task_graph(rng.integers(0, 7, count).tolist(), rng.integers(0, 100, count).tolist(), deps)
    interpreted = static.run(tasks)
    monkeypatch.setattr(static, "COMPILE_FROM", 0)
    compiled = static.run(tasks)
    assert np.array_equal(interpreted.start, compiled.start)
    assert np.array_equal(interpreted.cause, compiled.cause)


def test_joined_tasks_start_together_when_the_last_is_ready() -> None:
    tasks = task_graph([0, 1, 0, 1, 0], [5, 9, 3, 3, 1], [[] for _ in range(5)], [-1, -1, 0, 0, -1])
    starts, chosen = engine.run(tasks)
    assert chosen == "reference"
    assert starts.start.tolist() == [0, 0, 9, 9, 12]


def test_a_deadlock_names_who_waits() -> None:
    crossed = task_graph([0, 0, 1, 1], [1, 1, 1, 1], [[] for _ in range(4)], [0, 1, 1, 0])
    with pytest.raises(SimulationError, match=r"deadlock: task 0, task 2"):
        engine.run(crossed)


def test_engines_are_chosen_and_refused_by_name() -> None:
    free = task_graph([0], [1], [[]])
    assert engine.run(free)[1] == "static"
    with pytest.raises(UnknownNameError, match="reference"):
        engine.run(free, "refrence")
    with pytest.raises(UsageError, match="--engine reference"):
        engine.run(task_graph([0, 1], [1, 1], [[], []], [0, 0]), "static")
