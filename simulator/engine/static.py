"""The static pass: tasks in the order of their numbers, each after its resource and its dependencies.

One source, run by the interpreter where tasks are few and compiled by numba where they are many, since loading
the compiler costs more than some ten thousand tasks.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from echograph.simulator.engine.schedule import Starts
from echograph.simulator.tasks import TaskGraph

COMPILE_FROM = 200_000


def run(tasks: TaskGraph) -> Starts:
    """Start times of all tasks; no task may wait for another program."""
    columns = (tasks.resource, tasks.duration, tasks.deps.offsets, tasks.deps.values)
    start, cause = np.zeros(len(tasks), np.int64), np.zeros(len(tasks), np.int64)
    free, last = np.zeros(tasks.resources, np.int64), np.full(tasks.resources, -1, np.int64)
    if len(tasks) < COMPILE_FROM:
        resource, duration, offsets, deps = (c.tolist() for c in columns)
        _pass(resource, duration, offsets, deps, free.tolist(), last.tolist(), start, cause)
    else:
        _compiled()(*(np.ascontiguousarray(c, np.int64) for c in columns), free, last, start, cause)
    return Starts(start=start, cause=cause)


def _pass(
    resource: Any, duration: Any, offsets: Any, deps: Any, free: Any, last: Any, start: Any, cause: Any
) -> None:
    for task in range(len(resource)):
        on = resource[task]
        now, why = free[on], last[on]
        for at in range(offsets[task], offsets[task + 1]):
            end = start[deps[at]] + duration[deps[at]]
            if end > now:
                now, why = end, deps[at]
        start[task] = now
        cause[task] = why
        free[on] = now + duration[task]
        last[on] = task


@cache
def _compiled() -> Any:
    import numba

    return numba.njit(cache=True, nogil=True)(_pass)
