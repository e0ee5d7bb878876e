from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import reference_engine as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from layered import layered_step, timed
from random_tasks import random_meetings, random_tasks, seeded_meetings, task_graph
from reference_engine import Starts

from echograph.errors import DeadlockError, SimulationError, UnknownNameError
from echograph.ir.passes.data_parallel import DataParallel
from echograph.simulator import engine
from echograph.simulator.clusters import load_cluster
from echograph.simulator.durations import durations
from echograph.simulator.engine import Roles, events, static
from echograph.simulator.engine.columns import causes
from echograph.simulator.engine.static import WINDOW, topological_order
from echograph.simulator.host import IssueTimes
from echograph.simulator.tasks import HOST, TaskGraph

ONE_BY_ONE = (static.run, events.run, lambda tasks: reference.run(tasks).start)


def outcome(run: Callable[[TaskGraph], np.ndarray], tasks: TaskGraph) -> Starts | DeadlockError:
    """When tasks start and why, or who waits for ever."""
    try:
        return Starts(start := run(tasks), causes(tasks, start))
    except DeadlockError as error:
        return error


def expected(tasks: TaskGraph) -> Starts | DeadlockError:
    try:
        return reference.run(tasks)
    except DeadlockError as error:
        return error


def assert_same(one: Starts | DeadlockError, other: Starts | DeadlockError) -> None:
    assert type(one) is type(other)
    if isinstance(one, DeadlockError) and isinstance(other, DeadlockError):
        assert str(one) == str(other)
        assert one.tasks == other.tasks
    elif isinstance(one, Starts) and isinstance(other, Starts):
        assert np.array_equal(one.start, other.start)
        assert np.array_equal(one.cause, other.cause)


@given(st.one_of(random_tasks(), random_meetings(), random_meetings(crossed=True)))
def test_the_static_pass_and_the_event_engine_agree_to_the_picosecond(tasks: TaskGraph) -> None:
    assert_same(outcome(static.run, tasks), expected(tasks))


@pytest.mark.parametrize("window", [2, WINDOW])
@pytest.mark.parametrize("crossed", [False, True])
def test_they_agree_on_thousands_of_programs_that_meet(
    crossed: bool, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static, "WINDOW", window)
    deadlocks = 0
    for seed in range(600):
        tasks = seeded_meetings(seed, events=4 + seed % 90, crossed=crossed)
        one, other = outcome(static.run, tasks), expected(tasks)
        assert_same(one, other)
        deadlocks += isinstance(one, DeadlockError)
    assert (deadlocks > 100) == crossed
    assert crossed or not deadlocks


@settings(max_examples=80, deadline=None)
@given(st.one_of(random_tasks(), random_meetings()))
def test_makespan_is_at_least_the_critical_path_and_the_busiest_resource(tasks: TaskGraph) -> None:
    start = static.run(tasks)
    end = start + tasks.duration
    longest = [0] * len(tasks)
    for task in range(len(tasks)):
        longest[task] = int(tasks.duration[task]) + max((longest[d] for d in tasks.deps[task]), default=0)
    busiest = np.bincount(tasks.resource, weights=tasks.duration).max()
    assert end.max() >= max(longest)
    assert end.max() >= busiest
    for task in range(len(tasks)):
        assert all(start[task] >= end[d] for d in tasks.deps[task])
        assert (
            np.all(start[tasks.rendezvous == tasks.rendezvous[task]] == start[task]) or tasks.rendezvous[task] < 0
        )


@settings(max_examples=60, deadline=None)
@given(st.one_of(random_tasks(), random_meetings()))
def test_a_task_starts_exactly_when_its_cause_ends(tasks: TaskGraph) -> None:
    start = static.run(tasks)
    end = start + tasks.duration
    for task, cause in enumerate(causes(tasks, start).tolist()):
        assert start[task] == (0 if cause < 0 else end[cause])


@settings(max_examples=60, deadline=None)
@given(random_meetings())
def test_each_number_comes_after_all_that_it_waits_for(tasks: TaskGraph) -> None:
    order = topological_order(tasks)
    place = np.argsort(order)
    assert sorted(order.tolist()) == list(range(len(tasks)))
    for resource in range(tasks.resources):
        assert np.all(np.diff(place[tasks.resource == resource]) > 0)
    assert np.all(place[tasks.deps.values] < place[tasks.deps.rows])
    for rendezvous in set(tasks.rendezvous.tolist()) - {-1}:
        assert np.ptp(place[tasks.rendezvous == rendezvous]) == (tasks.rendezvous == rendezvous).sum() - 1


def one_stream_each(count: int, rendezvous: dict[tuple[int, int], int]) -> TaskGraph:
    """Two programs of a host and two streams, between which operations alternate; (program, op) -> meeting."""
    resources = [4 * p + lane for p in (0, 1) for n in range(count) for lane in (0, 1 + n % 2)]
    deps = [[task - 1] if task % 2 else [] for task in range(4 * count)]
    rendezvous = [
        rendezvous.get((p, n), -1) if lane else -1 for p in (0, 1) for n in range(count) for lane in (0, 1)
    ]
    return task_graph(
        resources, [1] * len(resources), deps, rendezvous, [p for p in (0, 1) for _ in range(2 * count)]
    )


def test_a_host_is_numbered_near_its_streams() -> None:
    meetings = {(p, n): n for p in (0, 1) for n in range(0, 4 * WINDOW, 50)}
    tasks = one_stream_each(4 * WINDOW, meetings)
    issued = np.where(tasks.lane[topological_order(tasks)] == HOST, 1, -1)
    assert np.cumsum(issued).max() <= WINDOW


def test_a_host_goes_far_ahead_where_streams_wait_for_it() -> None:
    late = 3 * WINDOW + 1
    tasks = one_stream_each(4 * WINDOW, {(0, 0): 0, (0, late): 1, (1, 0): 1, (1, 2): 0})
    assert_same(outcome(static.run, tasks), expected(tasks))


@given(st.lists(st.integers(0, 10**15), min_size=1, max_size=50))
def test_one_resource_sums_exactly(durations: list[int]) -> None:
    start = static.run(task_graph([0] * len(durations), durations, [[] for _ in durations]))
    assert int(start[-1]) + durations[-1] == sum(durations)


@pytest.mark.parametrize("crossed", [False, True])
def test_the_compiled_pass_equals_the_interpreted_one(monkeypatch: pytest.MonkeyPatch, crossed: bool) -> None:
    for seed in range(20):
        tasks = seeded_meetings(seed, 2000, crossed=crossed)
        alone = replace(tasks, rendezvous=np.full_like(tasks.rendezvous, -1))
        for graph in (tasks, alone):
            monkeypatch.setattr(static, "COMPILE_FROM", 10**9)
            interpreted = outcome(static.run, graph)
            monkeypatch.setattr(static, "COMPILE_FROM", 0)
            assert_same(interpreted, outcome(static.run, graph))


def test_joined_tasks_start_together_when_the_last_is_ready() -> None:
    tasks = task_graph([0, 1, 0, 1, 0], [5, 9, 3, 3, 1], [[] for _ in range(5)], [-1, -1, 0, 0, -1])
    start = static.run(tasks)
    assert start.tolist() == [0, 0, 9, 9, 12]
    assert causes(tasks, start).tolist() == [-1, -1, 1, 1, 2]


def test_an_asynchronous_meeting_holds_up_only_its_stream() -> None:
    # Program 0: compute (resource 1) goes on while its stream (2) waits for program 1; its last task needs both.
    tasks = task_graph(
        [2, 1, 1, 1, 5, 6], [7, 5, 5, 1, 100, 7], [[], [], [], [0], [], [4]], [0, -1, -1, -1, -1, 0],
        [0, 0, 0, 0, 1, 1],
    )  # fmt: skip
    for run in ONE_BY_ONE:
        assert run(tasks).tolist() == [100, 0, 5, 107, 0, 100]


def test_a_deadlock_names_who_waits() -> None:
    crossed = task_graph([0, 0, 1, 1], [1, 1, 1, 1], [[] for _ in range(4)], [0, 1, 1, 0])
    for run in ONE_BY_ONE:
        with pytest.raises(DeadlockError, match=r"deadlock: task 0, task 2 and 0 more wait"):
            run(crossed)


def test_engines_are_chosen_and_refused_by_name() -> None:
    job = timed(DataParallel(replicas=2)(layered_step(2)), "h100-sxm", 1000)
    roles = Roles(
        job=job,
        times=durations(job, load_cluster()),
        issue=np.zeros(len(job.ops), np.int64),
        host=IssueTimes(op_ps=0, launch_ps=0),
    )
    assert engine.simulate_roles(roles)[1] == "static"
    assert engine.simulate_roles(roles, "events")[1] == "events"
    with pytest.raises(SimulationError, match="engine 'segments': this job's operations do not repeat"):
        engine.simulate_roles(roles, "segments")
    with pytest.raises(UnknownNameError, match="static"):
        engine.simulate_roles(roles, "sttic")
