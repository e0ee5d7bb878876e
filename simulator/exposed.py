"""What kernels wait for the communication of their own call, told of the call alone.

A call (a layer's forward pass of a micro-batch) is a row of operations on a few streams. Its stream of kernels
takes at least the longest path from the stream's state as the call begins to its state as it ends; what that is
longer than the call's kernels, they wait, whatever else the step does. Communication that runs beside other calls
(prefetched gathers, reduced gradients) and messages between stages are not in it: they may be hidden. Messages
that ranks of one role pass around a ring are: a send starts with the receive behind it, as both ends do the same.
What the host waits for (how many rows experts get), kernels that it issues later wait for, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from echograph.ir.columns import Int64, distinct
from echograph.ir.graph import JobGraph
from echograph.ir.schedule import Edges
from echograph.ir.types import OpKind

_NEVER = -(2**62)
_STAGES = "pp"


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
    received = _of_rings(job)
    counts = ops.kind == OpKind.COLLECTIVE
    counts[received] = counts[received - 1] = True
    meets = np.concatenate([[0], np.cumsum(counts)])
    # Messages of other stages may have come long before.
    takes, edges, rings = np.where(kernels | counts, picoseconds, 0), Edges(job), frozenset(received.tolist())
    found: dict[tuple[int, int], int] = {}
    each = [its[:, 1] * rows + its[:, 2] for its in calls or [program.calls for program in job.programs]]
    for begin, end in (divmod(span, rows) for span in distinct(np.concatenate(each)).tolist()):
        if meets[begin] < meets[end]:
            kernels_ps = int(takes[begin:end][kernels[begin:end]].sum())
            waits = _longest_path(job, edges, range(begin, end), takes, compute, rings) - kernels_ps
            found |= {(begin, end): waits} if waits > 0 else {}
    return found


def _of_rings(job: JobGraph) -> Int64:
    """Rows of receives that start together with the send before them: of a group that lies within a stage."""
    ops = job.ops
    within = np.array(
        [bool(group.axes) and _STAGES not in group.axes for group in job.groups] or [False], np.bool_
    )
    pairs = (ops.kind[:-1] == OpKind.SEND) & (ops.kind[1:] == OpKind.RECV) & (ops.group[:-1] == ops.group[1:])
    pairs &= ops.stream[:-1] != ops.stream[1:]
    return 1 + np.flatnonzero(pairs & within[ops.group[1:]])


def _longest_path(
    job: JobGraph, edges: Edges, rows: range, takes: Int64, stream: int, rings: frozenset[int]
) -> int:  # fmt: skip
    """Picoseconds from a stream's state as a call begins to its state as the call ends."""
    waited_for: dict[int, list[int]] = {}
    for after, before in edges.within(rows):
        waited_for.setdefault(after, []).append(before - rows.start)
    clock, host, ends = {stream: 0}, _NEVER, list[int]()
    ops = job.ops
    streams, kinds = (column[rows.start : rows.stop].tolist() for column in (ops.stream, ops.kind))
    for at, (row, on, kind) in enumerate(zip(rows, streams, kinds, strict=True)):
        ready = max([host, *(ends[before] for before in waited_for.get(row, ()))])
        if kind == OpKind.HOST:
            host = ready
            ends.append(host)
            continue
        ready = max(ready, clock.get(on, _NEVER))
        if row in rings and at:
            took = int(takes[row - 1])
            ready = max(ready, ends[-1] - took)
            ends[-1] = clock[streams[at - 1]] = ready + took
        clock[on] = ready + int(takes[row])
        ends.append(clock[on])
    return clock[stream]
