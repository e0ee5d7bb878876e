"""What kernels wait for the communication of their own call, told of the call alone.

A call (a layer's forward pass of a micro-batch) is a row of operations on a few streams. Its stream of kernels
takes at least the longest path from the stream's state as the call begins to its state as it ends; what that is
longer than the call's kernels, they wait, whatever else the step does. Communication that runs beside other calls
(prefetched gathers, reduced gradients) and messages between stages are not in it: they may be hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from echograph.ir.columns import Int64, distinct
from echograph.ir.graph import JobGraph
from echograph.ir.schedule import Edges
from echograph.ir.types import OpKind

_NEVER = -(2**62)


def exposed_ps(job: JobGraph, picoseconds: Int64, calls: Sequence[Int64] = ()) -> dict[tuple[int, int], int]:
    """Picoseconds that kernels wait at least for communication of their own call, on the stream with most of them.

    Args:
        job: what every rank executes.
        picoseconds: [operations] what each takes on its stream.
        calls: those that are asked for, as of `Program.calls`; (): of all programs.

    Returns:
        By the first row of a call and the one behind its last; calls that wait for nothing are left out.
    """
    ops, rows = job.ops, len(job.ops) + 1
    kernels = np.isin(ops.kind, (OpKind.COMPUTE, OpKind.COPY))
    if not kernels.any():
        return {}
    compute = int(np.argmax(np.bincount(ops.stream, weights=picoseconds * kernels * job.run_counts())))
    meets = np.concatenate([[0], np.cumsum(ops.kind == OpKind.COLLECTIVE)])
    # Messages of other stages may have come long before.
    still = np.isin(ops.kind, (OpKind.SEND, OpKind.RECV, OpKind.HOST))
    takes, edges = np.where(still, 0, picoseconds), Edges(job)
    found: dict[tuple[int, int], int] = {}
    each = [its[:, 1] * rows + its[:, 2] for its in calls or [program.calls for program in job.programs]]
    for begin, end in (divmod(span, rows) for span in distinct(np.concatenate(each)).tolist()):
        if meets[begin] < meets[end]:
            kernels_ps = int(takes[begin:end][kernels[begin:end]].sum())
            waits = _longest_path(job, edges, range(begin, end), takes, compute) - kernels_ps
            found |= {(begin, end): waits} if waits > 0 else {}
    return found


def _longest_path(job: JobGraph, edges: Edges, rows: range, takes: Int64, stream: int) -> int:
    """Picoseconds from a stream's state as a call begins to its state as the call ends."""
    waited_for: dict[int, list[int]] = {}
    for after, before in edges.within(rows):
        waited_for.setdefault(after, []).append(before - rows.start)
    clock = {stream: 0}
    ends: list[int] = []
    for row, on in zip(rows, job.ops.stream[rows.start : rows.stop].tolist(), strict=True):
        ready = max([clock.get(on, _NEVER), *(ends[before] for before in waited_for.get(row, ()))])
        clock[on] = ready + int(takes[row])
        ends.append(clock[on])
    return clock[stream]
