"""What kernels lose to a collective beside them: the multiprocessors (SMs) that it runs on.

A reduction is a kernel of its own, which holds some SMs as long as it lasts; products beside it have the
others. While a collective with the share s of the SMs runs, kernels beside it do 1 - s of the work that they
would do. Which kernels these are is known without simulating where both stand in one block: those issued after
the collective and before the first that waits for it. What runs beside a collective of another block (buckets
of gradients) is not told. Gathers are left out: copy engines carry them in rings, and what they take in bulk is
little.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from echograph.ir.columns import Int64
from echograph.ir.graph import Block, JobGraph
from echograph.ir.types import CollectiveKind, OpKind

_REDUCTIONS = (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE)


def beside_collectives(job: JobGraph, picoseconds: Int64, share: Mapping[str, float]) -> Int64:
    """Durations with what kernels lose to reductions beside them.

    Args:
        job: the job.
        picoseconds: int64, one a row of the operation table, of each alone.
        share: of the SMs, that a reduction takes, by the label of its group.
    """
    taken = [share.get(group.label, 0.0) for group in job.groups]
    if not any(taken):
        return picoseconds
    longer = picoseconds.copy()
    for block in job.blocks:
        _lengthen(job, block, taken, longer)
    return longer


def _lengthen(job: JobGraph, block: Block, taken: list[float], picoseconds: Int64) -> None:
    ops = job.ops
    rows = np.arange(block.ops.start, block.ops.stop)
    reduces = (ops.kind[rows] == OpKind.COLLECTIVE) & np.isin(ops.variant[rows], _REDUCTIONS)
    for row in rows[reduces].tolist():
        share = taken[int(ops.group[row])]
        if share > 0:
            _lose(job, row, block.ops.stop, share, picoseconds)


def _lose(job: JobGraph, collective: int, end: int, share: float, picoseconds: Int64) -> None:
    """Lengthens the kernels that run while a collective does."""
    ops, left = job.ops, float(picoseconds[collective])
    for row in range(collective + 1, end):
        if left <= 0 or _waits(job, row, collective):
            return
        if ops.kind[row] == OpKind.COMPUTE and not ops.is_view[row]:
            work = min(float(picoseconds[row]), left * (1.0 - share))
            picoseconds[row] += round(work * share / (1.0 - share))
            left -= work / (1.0 - share)


def _waits(job: JobGraph, row: int, collective: int) -> bool:
    """Whether an operation of another stream needs a collective, or one after it on its stream."""
    ops = job.ops
    if ops.stream[row] == ops.stream[collective]:
        return False
    makers = [int(job.maker[job.origin[index]]) for index in ops.inputs.row(row)]
    return any(m >= collective and ops.stream[m] == ops.stream[collective] for m in (*makers, *ops.deps.row(row)))
