"""What an engine is given, the roles of a job with their durations, and what it gives: one simulated step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from echograph.errors import DeadlockError
from echograph.ir.columns import Float64, Int64
from echograph.ir.graph import JobGraph
from echograph.ir.timeline import Lane, Timeline
from echograph.simulator.breakdown import Breakdown, breakdown, breakdowns
from echograph.simulator.durations import Durations
from echograph.simulator.engine.schedule import Starts
from echograph.simulator.host import IssueTimes
from echograph.simulator.interval import scenarios
from echograph.simulator.limits import limits
from echograph.simulator.tasks import TaskGraph, expand


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
        """float64 [ops + 1, scenarios]: factors on durations, the host last, in the scenarios of the interval."""
        return scenarios(self.job, self.times, self.host)

    def run(self, engine: Callable[[TaskGraph], Starts]) -> StepRun:
        """The step whose tasks an engine starts one by one.

        Raises:
            DeadlockError: tasks wait for each other for ever; says which programs wait, and at what.
        """
        try:
            starts = engine(self.tasks)
        except DeadlockError as error:
            raise DeadlockError(self._who_waits(error.tasks), error.tasks) from None
        return of_tasks(self.job, self.tasks, starts)

    def _who_waits(self, stuck: tuple[int, ...]) -> str:
        """Which programs stand still, and at which communication each of them waits for others."""
        job, waits = self.job, []
        for task in stuck:
            if self.tasks.rendezvous[task] >= 0:
                program, op = int(self.tasks.program[task]), int(self.tasks.op[task])
                name = job.programs[program].role or f"program {program}"
                waits.append(f"{name} at operation {op} ({job.strings[job.ops.name[op]]})")
        return f"deadlock: {', '.join(waits[:4]) or 'tasks'} wait for each other; {len(stuck)} streams stand still"


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
            the engine ran them beside the step; None where it did not.
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


def of_tasks(job: JobGraph, tasks: TaskGraph, starts: Starts) -> StepRun:
    """A step of tasks that ran one by one."""
    timeline = write_timeline(job, tasks, starts)
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
    )


def write_timeline(job: JobGraph, tasks: TaskGraph, starts: Starts) -> Timeline:
    """What ran when."""
    return Timeline(
        program=tasks.program,
        lane=tasks.lane,
        stream=job.ops.stream[tasks.op],
        op=tasks.op,
        instance=tasks.instance,
        micro_batch=tasks.micro_batch,
        start=starts.start,
        duration=tasks.duration,
        cause=starts.cause,
        programs=tuple(p.role or f"rank {i}" for i, p in enumerate(job.programs)),
        streams=job.streams,
    )
