"""Why tasks did not start sooner, read off the times."""

from __future__ import annotations

from typing import Any

import numpy as np

from echograph.ir.columns import NONE, Int64
from echograph.simulator.engine.loops import effort, execute
from echograph.simulator.tasks import TaskGraph


def causes(tasks: TaskGraph, start: Int64, end: Int64) -> Int64:
    """The cause of each start, as `Starts.cause` has it; -1 also where none of these tasks ended just then.

    Args:
        tasks: what ran.
        start: picoseconds.
        end: picoseconds.
    """
    joins = int(tasks.join.max(initial=NONE)) + 1
    cause, last = np.zeros(len(tasks), np.int64), np.full(tasks.resources, NONE, np.int64)
    execute(
        _causes,
        effort(tasks),
        (tasks.resource, tasks.deps.offsets, tasks.deps.values, tasks.join, end),
        (cause, last, np.full(joins, NONE, np.int64), np.zeros(joins, np.int64)),
    )
    began: Int64 = np.where((cause != NONE) & (end[cause] == start), cause, NONE)
    return began


def _causes(
    resource: Any, offsets: Any, deps: Any, join: Any, end: Any, cause: Any, last: Any, ready: Any, who: Any
) -> None:
    """What ended last before each task; those that meet take over the cause of the one that was ready last."""
    for task in range(len(resource)):
        latest, why = 0, last[resource[task]]
        if why >= 0:
            latest = end[why]
        for k in range(offsets[task], offsets[task + 1]):
            if end[deps[k]] > latest:
                latest, why = end[deps[k]], deps[k]
        cause[task], last[resource[task]] = why, task
        if join[task] >= 0 and latest > ready[join[task]]:
            ready[join[task]], who[join[task]] = latest, task
    for task in range(len(resource)):
        if join[task] >= 0:
            cause[task] = cause[who[join[task]]]
