"""Tasks a second of the engines, beside the floor: one numpy.cumsum over as many durations, in the same run.

python -m benchmarks.engines [--tasks 2000000]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from echograph.ir.columns import Ragged
from echograph.simulator.engine import reference, static
from echograph.simulator.tasks import TaskGraph

RESOURCES = 64
REFERENCE_TASKS = 100_000


def tasks(count: int) -> TaskGraph:
    """Random tasks on 64 resources, each with two dependencies among the thousand before it."""
    rng = np.random.default_rng(0)
    index = np.arange(count)
    back = rng.integers(1, 1000, (count, 2))
    deps = np.maximum(index[:, None] - back, 0).ravel()
    offsets = 2 * np.arange(count + 1, dtype=np.int64)
    offsets[1:] -= 2  # the first task depends on nothing
    zeros = np.zeros(count, np.int32)
    return TaskGraph(
        resource=rng.integers(0, RESOURCES, count).astype(np.int32),
        duration=rng.integers(1, 10**9, count),
        deps=Ragged(offsets, deps[2:]),
        join=zeros - 1, program=zeros, lane=zeros.astype(np.uint8), op=zeros.astype(np.int64), instance=zeros,
        micro_batch=zeros, resources=RESOURCES,
    )  # fmt: skip


def main() -> None:
    """Prints million tasks a second, median of five."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=2_000_000)
    count = parser.parse_args().tasks
    large, small = tasks(count), tasks(REFERENCE_TASKS)
    static.run(large)  # compiles
    rows: list[tuple[str, int, Callable[[], object]]] = [
        ("numpy.cumsum (the floor)", count, lambda: np.cumsum(large.duration)),
        ("static pass, compiled", count, lambda: static.run(large)),
        ("static pass, interpreted", REFERENCE_TASKS, lambda: static.run(small)),
        ("reference (event heap)", REFERENCE_TASKS, lambda: reference.run(small)),
    ]
    for name, size, run in rows:
        print(f"{name:<28} {size / _median(run) / 1e6:10.3f} M tasks/s")


def _median(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
