"""Tasks a second of the engines, beside the floor: one numpy.cumsum over as many durations, in the same run.

python -m benchmarks.engines [--tasks 2000000]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks import contended
from echograph.ir.columns import Ragged
from echograph.simulator.engine import events, static
from echograph.simulator.engine.columns import apart
from echograph.simulator.engine.static import topological_order
from echograph.simulator.tasks import DEVICE, HOST, TaskGraph

RESOURCES = 64
SMALL_TASKS = 100_000
PROGRAMS = 8
RANKS = 128
MEETING_EVERY = 700
LAYERS = 40
JITTER = 0.05


def tasks(count: int) -> TaskGraph:
    """Random tasks on 64 resources, each with two dependencies among the thousand before it."""
    rng = np.random.default_rng(0)
    index = np.arange(count)
    back = rng.integers(1, 1000, (count, 2))
    deps = np.maximum(index[:, None] - back, 0).ravel().astype(np.int32)
    offsets = 2 * np.arange(count + 1, dtype=np.int64)
    offsets[1:] -= 2  # the first task depends on nothing
    zeros = np.zeros(count, np.int32)
    return TaskGraph(
        resource=rng.integers(0, RESOURCES, count).astype(np.int32),
        duration=rng.integers(1, 10**9, count),
        deps=Ragged(offsets, deps[2:]),
        rendezvous=zeros - 1, program=zeros, lane=zeros.astype(np.uint8), op=zeros.astype(np.int64),
        instance=zeros, micro_batch=zeros, resources=RESOURCES,
    )  # fmt: skip


def meeting_tasks(count: int) -> TaskGraph:
    """Eight programs, each a host that issues to a compute stream, whose streams meet now and then."""
    each = count // (2 * PROGRAMS)
    program = np.repeat(np.arange(PROGRAMS, dtype=np.int32), 2 * each)
    lane = np.tile(np.array([HOST, DEVICE], np.uint8), PROGRAMS * each)
    rendezvous = np.full(len(lane), -1, np.int32)
    meets = np.arange(1, 2 * each, 2 * MEETING_EVERY)
    for first in range(0, len(lane), 2 * each):
        rendezvous[first + meets] = np.arange(len(meets))
    zeros = np.zeros(len(lane), np.int32)
    return TaskGraph(
        resource=2 * program + lane,
        duration=np.random.default_rng(0).integers(1, 10**9, len(lane)),
        deps=Ragged(np.append(0, np.cumsum(lane, dtype=np.int64)), np.arange(0, len(lane), 2, dtype=np.int32)),
        rendezvous=rendezvous, program=program, lane=lane, op=zeros.astype(np.int64),
        instance=zeros, micro_batch=zeros, resources=2 * PROGRAMS,
    )  # fmt: skip


def main() -> None:
    """Prints million tasks a second, median of five."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=2_000_000)
    count = parser.parse_args().tasks
    large, small = tasks(count), tasks(SMALL_TASKS)
    meeting, meeting_small = meeting_tasks(count), meeting_tasks(static.COMPILE_FROM // 5)
    order = topological_order(meeting)
    ranks = apart(meeting, meeting.program, np.full((PROGRAMS, RANKS), 1.0))
    static.run(large), static.run_columns(meeting, ranks, order=order)  # compiles
    rows: list[tuple[str, int, Callable[[], object]]] = [
        ("numpy.cumsum (the floor)", count, lambda: np.cumsum(large.duration)),
        ("static pass, compiled", count, lambda: static.run(large)),
        ("static pass, interpreted", SMALL_TASKS, lambda: static.run(small)),
        ("programs that meet: topological order", count, lambda: topological_order(meeting)),
        ("  with the static pass", count, lambda: static.run(meeting)),
        ("  interpreted", len(meeting_small), lambda: static.run(meeting_small)),
        (f"  {RANKS} ranks of each", RANKS * count, lambda: static.run_columns(meeting, ranks, order=order)),
    ]
    for name, size, run in rows:
        print(f"{name:<30} {size / _median(run) / 1e6:10.3f} M tasks/s")
    print(f"event engine, {contended.RANKS * (1 + len(contended.STREAMS)):,} resources (seconds of this process)")
    _contended("rings of 16, over 16 leaves", group=16, stride=32)
    _contended("pairs, over two leaves", group=2, stride=16)


def _contended(name: str, *, group: int, stride: int) -> None:
    """Million tasks a second where ranks share uplinks, without and with jitter, and where they share nothing."""
    work = contended.tasks(LAYERS)
    for jitter in (0.0, JITTER):
        ranks = contended.ranks(work, group, stride, jitter)
        sharing = contended.uplinks(work, ranks)
        found = events.run_columns(work, ranks, sharing, 0)
        across = work.resource == contended.ACROSS
        longer = found.duration[across].mean() / work.duration[across].mean()
        full = (found.carried / sharing.capacity).max() / (found.end.max() / 1e12)
        shared, free = (
            contended.RANKS
            * len(work)
            / _median(partial(events.run_columns, work, ranks, links), time.process_time)
            for links in (sharing, None)
        )
        print(
            f"  {name}, jitter {jitter:3.0%}: {shared / 1e6:6.3f} M tasks/s; collectives take {longer:.2f} times "
            f"as long, the fullest link is {full:.0%} full; sharing nothing {free / 1e6:.3f} M tasks/s"
        )


def _median(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    seconds = []
    for _ in range(5):
        began = clock()
        run()
        seconds.append(clock() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
