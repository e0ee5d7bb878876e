"""Engines: the roles of a job in, a simulated step out. All of them give the same times, to the picosecond.

`static` makes one pass over the tasks in topological order, with a column for each rank or scenario; interpreted
where they are few, compiled where they are many. It is exact where rates do not change while work runs: CUDA
streams and NCCL queues fix the order of work on each resource. `segments` makes that pass over whole calls, each
worked out once, where programs repeat them. `events` is for what is dynamic: ranks whose collectives share links,
at rates that change.

`Roles` is what an engine is given, a job with the durations of its operations; `StepRun` is what it gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from echograph.errors import DeadlockError, SimulationError
from echograph.ir.columns import Float64, Int64
from echograph.ir.graph import JobGraph
from echograph.ir.timeline import Lane, Timeline
from echograph.registry import Table
from echograph.simulator.breakdown import Breakdown, breakdown, breakdowns
from echograph.simulator.durations import Durations
from echograph.simulator.engine.columns import Columns, apart, causes
from echograph.simulator.engine.static import run_columns
from echograph.simulator.host import IssueTimes
from echograph.simulator.limits import limits, scenarios
from echograph.simulator.tasks import DEVICE, TaskGraph, expand

MAX_COLUMN_TASKS = 200_000_000
"""Tasks of all scenarios together that are run one by one, about a second's; beyond, the critical path stands for
them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Roles:
    """The roles of a job.

    Attributes:
        job: an annotated job graph.
        times: how long its operations take on the device.
        issue: int64 [ops], picoseconds that the host takes to issue each, or for `IssueTimes` work to do it.
        host: the host.
    """

    job: JobGraph
    times: Durations
    issue: Int64
    host: IssueTimes

    @cached_property
    def tasks(self) -> TaskGraph:
        """The roles written out, operation by operation."""
        return expand(self.job, self.times.picoseconds, self.issue, threads=self.host.threads)

    @cached_property
    def factor(self) -> Float64:
        """float64 [ops + 1, 1 + scenarios]: factors on durations, the host last: the step, and its interval's."""
        return scenarios(self.job, self.times, self.host)

    @cached_property
    def columns(self) -> Columns:
        """The step and the scenarios of its interval, for the tasks; the step alone where that were too many."""
        tasks, factor = self.tasks, self.factor
        # An operation has one error, and so has the host.
        kind = np.where(tasks.lane == DEVICE, tasks.op, len(self.job.ops)).astype(np.int32)
        return apart(tasks, kind, factor if len(tasks) * factor.shape[1] <= MAX_COLUMN_TASKS else factor[:, :1])

    def step(self, start: Int64, scenario_ends: Int64 | None = None) -> StepRun:
        """The step of tasks that ran one by one.

        Args:
            start: int64 [tasks], picoseconds, when each started.
            scenario_ends: as of `StepRun`.
        """
        return of_tasks(self.job, write_timeline(self.job, self.tasks, start), scenario_ends)

    def who_waits(self, error: DeadlockError) -> DeadlockError:
        """Which programs stand still, and at which communication each of them waits for others."""
        job, waits, stuck = self.job, [], error.tasks
        for task in stuck:
            if self.tasks.rendezvous[task] >= 0:
                program, op = int(self.tasks.program[task]), int(self.tasks.op[task])
                name = job.programs[program].role or f"program {program}"
                waits.append(f"{name} at operation {op} ({job.strings[job.ops.name[op]]})")
        programs = ", ".join(waits[:4]) or "tasks"
        return DeadlockError(f"deadlock: {programs} wait for each other; {len(stuck)} streams stand still", stuck)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRun:
    """What ran.

    Attributes:
        end_ps: when the last task ends.
        last: the program that ends last.
        breakdown: of that program.
        breakdowns: works out those of all programs.
        limits: picoseconds of each family on the critical path.
        busy: float64 [rows], picoseconds that the devices of all programs work on each row.
        busy_of_last: the same of the last program.
        write: writes down what ran when.
        scenario_ends: int64 [scenarios], picoseconds, when the step ends in each scenario of `Roles.factor`, where
            the engine ran them beside the step; None where it did not, empty where they were too many.
    """

    end_ps: int
    last: int
    breakdown: Breakdown
    breakdowns: Callable[[], list[Breakdown]]
    limits: dict[str, int]
    busy: Float64
    busy_of_last: Float64
    write: Callable[[], Timeline]
    scenario_ends: Int64 | None = None


def of_tasks(job: JobGraph, timeline: Timeline, scenario_ends: Int64 | None = None) -> StepRun:
    """A step of tasks that ran one by one."""
    last = int(timeline.program[np.argmax(timeline.end)]) if len(timeline) else 0
    device = timeline.lane == Lane.DEVICE
    busy, mine = (
        np.bincount(timeline.op[rows], timeline.duration[rows], len(job.ops)).astype(np.float64)
        for rows in (device, device & (timeline.program == last))
    )
    return StepRun(
        end_ps=timeline.makespan,
        last=last,
        breakdown=breakdown(job, timeline, last),
        breakdowns=lambda: breakdowns(job, timeline),
        limits=limits(job, timeline),
        busy=busy,
        busy_of_last=mine,
        write=lambda: timeline,
        scenario_ends=scenario_ends,
    )


def write_timeline(job: JobGraph, tasks: TaskGraph, start: Int64) -> Timeline:
    """What ran when, and why not sooner.

    Args:
        job: the job.
        tasks: its tasks, with the durations that they took.
        start: int64 [tasks], picoseconds.
    """
    return Timeline(
        program=tasks.program,
        lane=tasks.lane,
        stream=job.ops.stream[tasks.op],
        op=tasks.op,
        instance=tasks.instance,
        micro_batch=tasks.micro_batch,
        start=start,
        duration=tasks.duration,
        cause=causes(tasks, start),
        programs=tuple(map(job.role_name, range(len(job.programs)))),
        streams=job.streams,
    )


Engine = Callable[[Roles], StepRun | None]
"""None: it cannot simulate these roles, or another one is quicker."""
ENGINES = Table(
    "engine",
    {
        "segments": "echograph.simulator.engine.segments:simulate",
        "static": "echograph.simulator.engine.static:simulate",
        "events": "echograph.simulator.engine.events:simulate",
    },
)
AUTO = ("segments", "static")
"""The engines that are tried where none is asked for; the last one simulates every job."""


def simulate_roles(roles: Roles, engine: str = "auto") -> tuple[StepRun, str]:
    """One step with the scenarios of its interval, and the engine that simulated it.

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
        if step is not None and step.scenario_ends is None:
            # They differ from the step in durations alone, so one static pass has them all.
            step = replace(step, scenario_ends=run_columns(roles.tasks, roles.columns).last[1:])
        if step is not None:
            return step, name
    raise SimulationError(f"engine '{engine}': this job's operations do not repeat alike: choose static")
