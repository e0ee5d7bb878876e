"""Engines: task graph in, start times out. All of them give the same times, to the picosecond.

`reference` is the event-driven engine that one reads; `static` is one pass over tasks in program order, compiled
where there are many. The static pass is exact where rates do not change while work runs and no task waits for
another program: CUDA streams and NCCL queues fix the order of work on each resource.
"""

from __future__ import annotations

from collections.abc import Callable

from echograph.errors import UsageError
from echograph.registry import Table
from echograph.simulator.engine.schedule import Starts
from echograph.simulator.tasks import TaskGraph

Engine = Callable[[TaskGraph], Starts]

ENGINES = Table(
    "engine",
    {
        "reference": "echograph.simulator.engine.reference:run",
        "static": "echograph.simulator.engine.static:run",
    },
)


def run(tasks: TaskGraph, engine: str = "auto") -> tuple[Starts, str]:
    """Start times of all tasks, and the engine that computed them.

    Args:
        tasks: what to run.
        engine: a name of `ENGINES`, or "auto": the static pass where it is exact, else the reference.

    Raises:
        UnknownNameError: no such engine.
        UsageError: the engine cannot run this graph.
        SimulationError: tasks wait for each other for ever.
    """
    name = engine if engine != "auto" else "reference" if tasks.joined else "static"
    chosen: Engine = ENGINES[name]
    if name == "static" and tasks.joined:
        raise UsageError("engine 'static' cannot run programs that wait for each other: use --engine reference")
    return chosen(tasks), name
