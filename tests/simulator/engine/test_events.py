"""The event engine: the times of the others where nothing is slowed, else those of the oracle."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import reference_engine as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from random_sharing import random_columns, random_scene, random_sharing
from random_tasks import random_meetings, random_tasks, seeded_meetings, task_graph
from sharing_oracle import Oracle

from echograph.errors import DeadlockError, SimulationError
from echograph.ir.columns import Ragged
from echograph.simulator.engine import columns, events, static
from echograph.simulator.engine.columns import causes
from echograph.simulator.engine.sharing import Sharing
from echograph.simulator.tasks import TaskGraph

MANY = 1e9
"""Times the capacity with which no link is saturated."""
ROUNDED_PS = 2
"""Ends are whole picoseconds here and in the oracle, but a rate is a fraction there."""


def outcome(run: Callable[[TaskGraph], np.ndarray], tasks: TaskGraph) -> np.ndarray | DeadlockError:
    try:
        return run(tasks)
    except DeadlockError as error:
        return error


def assert_same(one: events.SharedEnds, other: columns.Ends) -> None:
    for name in ("end", "waited", "start", "duration"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name


def flows(
    starts: list[int], durations: list[int], loads: list[float], routes: list[list[int]], capacity: list[float]
) -> tuple[TaskGraph, columns.Columns, Sharing]:
    """One flow each on a resource of its own, after work that takes until it starts."""
    count = len(starts)
    tasks = task_graph(
        [r for r in range(count) for _ in range(2)],
        [t for pair in zip(starts, durations, strict=True) for t in pair],
        [[] for _ in range(2 * count)],
    )
    sharing = Sharing(
        capacity=np.array(capacity),
        load=np.array([x for load in loads for x in (0.0, load)]),
        route=np.array([x for row in range(count) for x in (-1, row)], np.int32),
        routes=np.arange(count, dtype=np.int32)[:, None],
        links=Ragged(
            np.cumsum([0, *(len(r) for r in routes)]), np.array([x for r in routes for x in r], np.int32)
        ),
        weight=np.ones(sum(len(r) for r in routes)),
    )
    return tasks, columns.alone(tasks), sharing


def ends(scene: tuple[TaskGraph, columns.Columns, Sharing]) -> list[int]:
    return [int(end) for end in events.run_columns(*scene).end[:, 0]]


@pytest.mark.parametrize("crossed", [False, True])
def test_it_agrees_with_the_reference_on_thousands_of_programs(crossed: bool) -> None:
    for seed in range(1000):
        tasks = seeded_meetings(seed, events=4 + seed % 60, crossed=crossed)
        one, other = outcome(lambda its: reference.run(its).start, tasks), outcome(events.run, tasks)
        assert type(one) is type(other)
        if isinstance(one, DeadlockError) and isinstance(other, DeadlockError):
            assert (str(one), one.tasks) == (str(other), other.tasks)
        else:
            assert np.array_equal(one, other)


@given(st.one_of(random_tasks(), random_meetings(), random_meetings(crossed=True)))
def test_it_agrees_with_the_static_pass(tasks: TaskGraph) -> None:
    one, other = outcome(static.run, tasks), outcome(events.run, tasks)
    assert type(one) is type(other)
    if not isinstance(one, DeadlockError):
        assert np.array_equal(one, other)


def test_causes_follow_from_the_times_that_an_engine_found() -> None:
    for seed in range(200):
        tasks = seeded_meetings(seed, 4 + seed)
        expected = reference.run(tasks)
        assert np.array_equal(causes(tasks, expected.start), expected.cause)


@pytest.mark.parametrize("jitter", [0.0, 0.2])
def test_columns_that_share_nothing_or_enough_are_those_of_the_sweep(jitter: float) -> None:
    for seed in range(400):
        rng = np.random.default_rng(seed)
        tasks = seeded_meetings(seed, 4 + seed % 90)
        every = random_columns(tasks, rng, jitter)
        count = every.factor.shape[1]
        record = int(rng.integers(-1, count))
        expected = static.run_columns(tasks, every, record)
        assert_same(events.run_columns(tasks, every, record=record), expected)
        assert_same(events.run_columns(tasks, every, random_sharing(tasks, count, rng, MANY), record), expected)


@pytest.mark.parametrize("seeds", [range(50), pytest.param(range(50, 500), marks=pytest.mark.slow)])
def test_rates_are_those_of_the_oracle(seeds: range) -> None:
    slowed = 0
    for seed in seeds:
        tasks, every, sharing = random_scene(seed, 4 + seed % 40)
        oracle = Oracle(tasks, every, sharing)
        free = events.run_columns(tasks, every)
        for column in range(every.factor.shape[1]):
            found = events.run_columns(tasks, every, sharing, column)
            assert np.abs(found.start - oracle.start[:, column]).max() <= ROUNDED_PS
            assert np.abs(found.start + found.duration - oracle.end[:, column]).max() <= ROUNDED_PS
        assert np.allclose(found.carried, [float(x) for x in oracle.carried], rtol=1e-9, atol=1e-9)
        slowed += bool((found.end > free.end).any())
    assert slowed > len(seeds) / 2


def test_two_flows_on_one_link_take_exactly_twice() -> None:
    for duration in (1, 3, 10**6 + 1, 10**12 + 7):
        assert ends(flows([0, 0], [duration] * 2, [5.0, 5.0], [[0], [0]], [5.0])) == [2 * duration] * 2


def test_one_that_needs_less_than_its_share_is_not_slowed() -> None:
    # Of 10 bytes/s one needs 2; the others have 4 of the 8 that each could use, and 5 once it has ended.
    assert ends(flows([0] * 3, [1000] * 3, [2.0, 8.0, 8.0], [[0]] * 3, [10.0])) == [1000, 1800, 1800]


def test_who_is_stopped_elsewhere_leaves_the_rest_to_others() -> None:
    # Three share a link of 6; one of them a second link of 10 with a fourth, which gets the 8 that are left there.
    scene = flows([0] * 4, [1000] * 4, [10.0] * 4, [[0], [0], [0, 1], [1]], [6.0, 10.0])
    assert ends(scene)[3] == 1250
    # Then the third goes on with 2 until the first two have ended, as all three do at the same time.
    assert ends(scene)[:3] == [5000] * 3


def test_rates_change_when_others_begin_and_end() -> None:
    # Alone until 400, half until the second has had its 500 at 1400; the first then has had 900.
    assert ends(flows([0, 400], [1000, 500], [1.0, 1.0], [[0], [0]], [1.0])) == [1500, 1400]


def test_the_parking_lot() -> None:
    # One flow over all links, one of its own on each: every link is halved, whoever uses it.
    links = 5
    scene = flows([0] * (links + 1), [100] * (links + 1), [1.0] * (links + 1),
                  [list(range(links)), *([k] for k in range(links))], [1.0] * links)  # fmt: skip
    assert ends(scene) == [200] * (links + 1)


def test_a_link_used_twice_is_loaded_twice() -> None:
    assert ends(flows([0], [100], [1.0], [[0, 0]], [1.0])) == [200]


def test_one_more_flow_than_a_link_carries_slows_all_by_that_much() -> None:
    # More than any table begins with, all crossing a second link that never gets saturated.
    many = 300
    scene = flows([0] * many, [10**9] * many, [1.0] * many, [[0, 1]] * many, [many - 1, 10.0 * many])
    assert ends(scene) == [-(-(10**9) * many // (many - 1))] * many


def test_flows_that_come_one_by_one_to_a_saturated_link_are_those_of_the_oracle() -> None:
    count = 120
    scene = flows(list(range(count)), [10**6] * count, [1.0] * count, [[0]] * count, [50.0])
    oracle = Oracle(*scene)
    assert np.abs(np.array(ends(scene)) - oracle.end[1::2, 0]).max() <= ROUNDED_PS


def test_shares_that_add_up_to_the_capacity_do_not_crowd() -> None:
    assert ends(flows([0] * 3, [10**12 + 1] * 3, [1 / 3] * 3, [[0]] * 3, [1.0])) == [10**12 + 1] * 3


def test_members_of_a_meeting_share_one_route_and_end_each_in_its_time() -> None:
    # Two programs meet for 100 and 300; the flow of the second one's route goes at half its rate.
    tasks = task_graph([0, 1], [100, 300], [[], []], [0, 0])
    sharing = Sharing(
        capacity=np.array([2.0]),
        load=np.array([0.0, 4.0]),
        route=np.array([-1, 0], np.int32),
        routes=np.zeros((1, 1), np.int32),
        links=Ragged(np.array([0, 1]), np.zeros(1, np.int32)),
        weight=np.ones(1),
    )
    alone = columns.alone(tasks)
    found = events.run_columns(tasks, alone, sharing, 0)
    assert found.duration.tolist() == [200, 600]
    assert found.carried.tolist() == [4.0 * 300 / 1e12]


@given(st.integers(0, 2**32 - 1), st.integers(1, 60))
def test_nothing_is_faster_than_its_work_its_links_or_the_run_without_sharing(seed: int, size: int) -> None:
    tasks, every, sharing = random_scene(seed, size)
    record = seed % every.factor.shape[1]
    found = events.run_columns(tasks, every, sharing, record)
    free = events.run_columns(tasks, every, None, record)
    assert (found.duration >= free.duration).all()
    longest = [0] * len(tasks)
    for task in range(len(tasks)):
        longest[task] = int(free.duration[task]) + max((longest[d] for d in tasks.deps[task]), default=0)
    assert found.end.max() >= max(longest)
    busy = np.bincount(tasks.resource, weights=found.duration, minlength=tasks.resources)
    assert (found.end[:, record] >= busy * (1 - 1e-12)).all()
    assert (found.carried <= sharing.capacity * (found.end.max() / 1e12) * (1 + 1e-8)).all()
    for task in range(len(tasks)):
        assert all(found.start[task] >= found.start[d] + found.duration[d] for d in tasks.deps[task])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_links_carry_what_tasks_put_on_them(seed: int) -> None:
    tasks, _, _ = random_scene(seed, 30)
    tasks = replace(tasks, rendezvous=np.full_like(tasks.rendezvous, -1))
    alone = columns.alone(tasks)
    sharing = random_sharing(tasks, 1, np.random.default_rng(seed))
    expected = [Fraction(0)] * len(sharing.capacity)
    for task in range(len(tasks)):
        row = int(sharing.routes[sharing.route[task], 0]) if sharing.route[task] >= 0 else -1
        for k in range(*sharing.links.offsets[row : row + 2]) if row >= 0 else ():
            byte = Fraction(float(sharing.load[task])) * Fraction(float(sharing.weight[k]))
            expected[sharing.links.values[k]] += byte * int(tasks.duration[task]) / 10**12
    found = events.run_columns(tasks, alone, sharing)
    assert np.allclose(found.carried, [float(x) for x in expected], rtol=1e-9)


def test_two_runs_give_the_same_bytes() -> None:
    for seed in range(20):
        tasks, every, sharing = random_scene(seed, 60)
        every = replace(every, jitter=0.1)
        one, other = (events.run_columns(tasks, every, sharing, 0) for _ in range(2))
        assert_same(one, other)
        assert one.carried.tobytes() == other.carried.tobytes()


def test_memory_follows_what_runs_not_tasks_times_columns() -> None:
    peaks = []
    for repeats in (50, 1000):
        deps = [[task - 1] if task % 2 else [] for task in range(2 * repeats)]
        tasks = task_graph([0, 1] * repeats, [1, 2] * repeats, deps)
        every = columns.apart(tasks, np.zeros(2 * repeats, np.int32), np.ones((1, 500)))
        events.run_columns(tasks, every)
        tracemalloc.start()
        events.run_columns(tasks, every)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 2 * 950 * 200


def test_a_deadlock_in_columns_names_who_waits() -> None:
    crossed = task_graph([0, 0, 1, 1], [1, 1, 1, 1], [[] for _ in range(4)], [0, 1, 1, 0])
    every = columns.apart(crossed, np.zeros(4, np.int32), np.ones((1, 3)))
    with pytest.raises(DeadlockError, match=r"deadlock: task 0, task 2 and 0 more wait"):
        events.run_columns(crossed, every)


def test_a_step_beyond_the_clock_is_refused() -> None:
    with pytest.raises(SimulationError, match="more than 53 days"):
        events.run_columns(*flows([0], [10**12], [1e12], [[0]], [1.0]))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"capacity": np.array([0.0])}, "a link without capacity: give"),
        ({"capacity": np.array([np.inf])}, "a link without capacity: give"),
        ({"load": np.array([0.0, -1.0])}, "a load that is no amount: give"),
        ({"weight": np.zeros(1)}, "does not load: give"),
        ({"load": np.zeros(3)}, "3 loads of 2 routed tasks and 1 weights on 1 links: give one each"),
    ],
)
def test_sharing_that_makes_no_sense_is_refused(wrong: dict[str, Any], message: str) -> None:
    sharing = flows([0], [1], [1.0], [[0]], [1.0])[2]
    with pytest.raises(SimulationError, match=message):
        replace(sharing, **wrong)
