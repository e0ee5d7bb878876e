"""The engine: the roles of a job simulated over segments, where that pays."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from echograph.ir.columns import distinct
from echograph.ir.graph import JobGraph
from echograph.simulator.breakdown import Breakdown, breakdown
from echograph.simulator.engine import static
from echograph.simulator.engine.segments.critical_path import critical_path
from echograph.simulator.engine.segments.cut import cut
from echograph.simulator.engine.segments.run import SegmentRun, run, work_of
from echograph.simulator.engine.segments.timeline import program_timeline
from echograph.simulator.engine.segments.transfer import LONGEST_PS
from echograph.simulator.limits import families, largest_first
from echograph.simulator.roles import StepRun

if TYPE_CHECKING:
    from echograph.simulator.roles import Roles

REPEATED = 4
"""How often operations have to run, on average, for segments to pay: a kind takes as long as so many runs."""


def simulate(roles: Roles) -> StepRun | None:
    """One step, and when it ends in the scenarios of its interval.

    Returns:
        The step; None where operations do not repeat, where runs of the same operations do not wait alike, where
        segments wait for each other in a circle, or where threads issue besides the host.
    """
    if roles.host.threads or not _pays(roles):
        return None
    if (segments := cut(roles.job)) is None:
        return None
    device, host = (
        np.rint(times[:, None] * factors).astype(np.int64)
        for times, factors in ((roles.times.picoseconds, roles.factor[:-1]), (roles.issue, roles.factor[-1]))
    )
    ran = run(segments, work_of(roles.job, device, host))
    return None if ran is None else _step(roles, ran)


def _pays(roles: Roles) -> bool:
    """Whether operations repeat often enough, in a step that the constants can hold."""
    job, rows = roles.job, len(roles.job.ops) + 1
    calls = [program.calls[:, 1] * rows + program.calls[:, 2] for program in job.programs]
    begin, end = np.divmod(distinct(np.concatenate(calls)), rows)
    # As floats: what the host does itself stands in both, and their sum may be beyond 64 bits.
    work = roles.times.picoseconds.astype(np.float64) + roles.issue
    longest = float(np.dot(job.run_counts(), work)) * float(roles.factor.max())
    return job.unfolded_ops >= REPEATED * int((end - begin).sum()) and longest < LONGEST_PS


def _step(roles: Roles, ran: SegmentRun) -> StepRun:
    """What the segments did; their tasks are run one by one if they have to be written down."""
    job: JobGraph = roles.job
    last, total = critical_path(ran, families(job))
    end, work = int(ran.ends[0]), ran.work.device[:, 0].astype(np.float64)

    def of_program(number: int) -> Breakdown:
        return breakdown(job, program_timeline(ran, number), number, end)

    return StepRun(
        end_ps=end,
        last=last,
        breakdown=of_program(last),
        breakdowns=lambda: [of_program(number) for number in range(len(job.programs))],
        limits=largest_first(job, total, end),
        busy=job.run_counts() * work,
        busy_of_last=job.run_counts(last) * work,
        write=cache(lambda: roles.step(static.run(roles.tasks)).write()),
        scenario_ends=ran.ends[1:],
    )
