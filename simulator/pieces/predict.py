"""A job's roles simulated in pieces, where that pays."""

from __future__ import annotations

import numpy as np

from echograph.ir.columns import Int64, distinct
from echograph.ir.graph import JobGraph
from echograph.simulator.interval import Factors
from echograph.simulator.pieces.cut import Joins, cut
from echograph.simulator.pieces.passages import LONGEST_PS
from echograph.simulator.pieces.run import Run, run, work_of

REPEATED = 4
"""How often operations have to run, on average, for pieces to pay: a kind takes as long as so many runs."""


def run_pieces(job: JobGraph, device: Int64, host: Int64, factor: Factors, joins: Joins) -> Run | None:
    """Runs all roles as they are, and in further scenarios.

    Args:
        job: the job.
        device: int64 [rows], picoseconds on the device.
        host: int64 [rows], picoseconds that the host takes.
        factor: float64 [rows + 1, scenarios] on durations, the last row that of the host.
        joins: as of `tasks.expand`.

    Returns:
        The run, whose first scenario is the job as it is; None where pieces do not repeat, where runs of the same
        operations do not wait alike, or where pieces wait for each other in a circle: run the tasks then.
    """
    rows = len(job.ops) + 1
    calls = [program.calls[:, 1] * rows + program.calls[:, 2] for program in job.programs]
    begin, end = np.divmod(distinct(np.concatenate(calls)), rows)
    # As floats: what the host does itself stands in both, and their sum may be beyond 64 bits.
    longest = float(np.dot(runs(job), device.astype(np.float64) + host)) * max(1.0, float(factor.max(initial=0.0)))
    if job.unfolded_ops < REPEATED * int((end - begin).sum()) or not longest < LONGEST_PS:
        return None
    if (pieces := cut(job, joins)) is None:
        return None
    factor = np.concatenate([np.ones((len(factor), 1)), factor], axis=1)
    of_device, of_host = (
        np.rint(times[:, None] * factors) for times, factors in ((device, factor[:-1]), (host, factor[-1]))
    )
    return run(pieces, work_of(job, of_device.astype(np.int64), of_host.astype(np.int64)))


def runs(job: JobGraph, program: int | None = None) -> Int64:
    """How often each row of the operation table runs, in one program or in all."""
    change = np.zeros(len(job.ops) + 1, np.int64)
    for its in job.programs if program is None else [job.programs[program]]:
        change += np.bincount(its.calls[:, 1], minlength=len(change))
        change -= np.bincount(its.calls[:, 2], minlength=len(change))
    counts: Int64 = np.cumsum(change)[:-1]
    return counts
