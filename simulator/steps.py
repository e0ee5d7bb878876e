"""One simulated step, as the questions about it need it: what every engine gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echograph.ir.columns import Int64
from echograph.ir.graph import JobGraph
from echograph.ir.timeline import Lane, Timeline
from echograph.simulator.breakdown import Breakdown, breakdown, breakdowns
from echograph.simulator.engine.schedule import Starts
from echograph.simulator.limits import limits
from echograph.simulator.tasks import TaskGraph

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
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


def of_tasks(job: JobGraph, tasks: TaskGraph, starts: Starts) -> Step:
    """A step of tasks that ran one by one."""
    timeline = write_timeline(job, tasks, starts)
    last = int(timeline.program[np.argmax(timeline.end)]) if len(timeline) else 0
    device = timeline.lane == Lane.DEVICE
    busy, mine = (
        np.bincount(timeline.op[rows], timeline.duration[rows], len(job.ops)).astype(np.float64)
        for rows in (device, device & (timeline.program == last))
    )
    return Step(
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
