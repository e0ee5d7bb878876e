"""Engines: the roles of a job in, a simulated step out. All of them give the same times, to the picosecond.

`static` makes one pass over the tasks in topological order, with a column for each rank or scenario; interpreted
where they are few, compiled where they are many. It is exact where rates do not change while work runs: CUDA
streams and NCCL queues fix the order of work on each resource. `segments` makes that pass over whole calls, each
worked out once, where programs repeat them. `events` is for what is dynamic: ranks whose collectives share links,
at rates that change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from echograph.errors import DeadlockError, SimulationError
from echograph.registry import Table

if TYPE_CHECKING:
    from echograph.simulator.roles import Roles, StepRun

    Engine = Callable[[Roles], StepRun | None]
    """None: it cannot simulate these roles, or another one is quicker."""

ENGINES = Table(
    "engine",
    {
        "segments": "echograph.simulator.engine.segments.engine:simulate",
        "static": "echograph.simulator.engine.static:simulate",
        "events": "echograph.simulator.engine.events:simulate",
    },
)
AUTO = ("segments", "static")
"""The engines that are tried where none is asked for; the last one simulates every job."""


def simulate_roles(roles: Roles, engine: str = "auto") -> tuple[StepRun, str]:
    """One step, and the engine that simulated it.

    Args:
        roles: what to simulate.
        engine: a name of `ENGINES`, or "auto": the first of `AUTO` that can.

    Raises:
        UnknownNameError: no such engine.
        SimulationError: the engine that is asked for cannot simulate this job.
        DeadlockError: tasks wait for each other for ever; says which programs wait, and at what.
    """
    for name in AUTO if engine == "auto" else (engine,):
        chosen: Engine = ENGINES[name]
        try:
            step = chosen(roles)
        except DeadlockError as error:
            raise roles.who_waits(error) from None
        if step is not None:
            return step, name
    raise SimulationError(f"engine '{engine}': this job's operations do not repeat alike: choose static")
