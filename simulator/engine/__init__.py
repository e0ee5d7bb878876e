"""Engines: task graph in, start times out. All of them give the same times, to the picosecond.

`reference` is the event-driven engine that one reads; `static` numbers tasks in an order in which each comes after
all that it waits for, and makes one pass over them, compiled where they are many. The pass is exact where rates
do not change while work runs: CUDA streams and NCCL queues fix the order of work on each resource. `columns` makes
it for every rank. `events` is for what is dynamic: ranks whose collectives share links, at rates that change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from echograph.ir.columns import Int32, Int64
from echograph.registry import Table
from echograph.simulator.engine.loops import COMPILE_FROM, effort
from echograph.simulator.engine.numbering import number
from echograph.simulator.engine.schedule import Starts
from echograph.simulator.tasks import TaskGraph

if TYPE_CHECKING:
    from echograph.simulator.engine.columns import Factors

Engine = Callable[[TaskGraph], Starts]

ENGINES = Table(
    "engine",
    {
        "reference": "echograph.simulator.engine.reference:run",
        "static": "echograph.simulator.engine.static:run",
        "events": "echograph.simulator.engine.events:run",
    },
)


def run(tasks: TaskGraph, engine: str = "auto") -> tuple[Starts, str]:
    """Start times of all tasks, and the engine that computed them.

    Args:
        tasks: what to run.
        engine: a name of `ENGINES`, or "auto": the static pass.

    Raises:
        UnknownNameError: no such engine.
        DeadlockError: tasks wait for each other for ever.
    """
    name = "static" if engine == "auto" else engine
    chosen: Engine = ENGINES[name]
    return chosen(tasks), name


def finishes(tasks: TaskGraph, kind: Int32, factor: Factors) -> Int64:
    """The end of the last task, picoseconds, in scenarios that differ in durations.

    Args:
        tasks: what to run in each of them.
        kind: int32 [tasks], the row of `factor` for each task.
        factor: float64 [kinds, scenarios]: durations are multiplied with it and rounded to the picosecond.

    Raises:
        DeadlockError: tasks wait for each other for ever.
    """
    if not len(tasks):
        return np.zeros(factor.shape[1], np.int64)
    if effort(tasks) * factor.shape[1] >= COMPILE_FROM:
        from echograph.simulator.engine import columns

        found = columns.run(tasks, number(tasks), columns.alone(tasks, kind, factor)).end
        latest: Int64 = found.max(axis=0)
        return latest
    ends = []
    for scenario in factor.T:
        duration = np.rint(tasks.duration * scenario[kind]).astype(np.int64)
        starts, _ = run(replace(tasks, duration=duration))
        ends.append(int((starts.start + duration).max()))
    return np.array(ends, np.int64)
