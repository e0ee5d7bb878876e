"""Which host event ran within which other: the call stack of every thread."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echograph.ir.columns import Int32, Int64
from echograph.profiler.traces.launches import launches, of_device_queue
from echograph.profiler.traces.trace import CALLS, NONE, Trace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stacks:
    """Call stacks; what runs on a device belongs to the call that launched it.

    Attributes:
        order: the host rows, thread by thread, each before what runs within it, by time.
        place: for each row its position in `order`, or -1 for rows that are not on the host.
        past: for each position of `order` the position after the last event within it.
        parent: for each row the one that it ran within, or that launched it, or -1.
        depth: for each row how many it is within; -1 for work whose launch is not in the trace.
    """

    order: Int64
    place: Int64
    past: Int64
    parent: Int64
    depth: Int32

    def within(self, row: int) -> Int64:
        """The host rows that ran within a host row, itself first."""
        at = int(self.place[row])
        return self.order[at : int(self.past[at])]


def call_stacks(trace: Trace) -> Stacks:
    """The call stacks of a trace.

    An event is within the last one of its thread that began no later and ended no earlier; of events that begin
    together, the longer is the outer. Clocks of whole microseconds leave one question open, that of an event
    without duration at the moment at which another ends: it is taken to be within that, as most are
    (`aten::as_strided` ends the view that called it), but not within a call to the runtime.
    """
    host = np.flatnonzero(~of_device_queue(trace) & ~trace.of_category({"gpu_user_annotation"}) & ~trace.on_device)
    keys = (trace.index[host], -trace.duration[host], trace.start[host], trace.tid[host], trace.pid[host])
    order = host[np.lexsort(keys)]
    parent = np.full(len(trace), NONE, np.int64)
    depth = np.full(len(trace), NONE, np.int32)
    place = np.full(len(trace), NONE, np.int64)
    place[order] = np.arange(len(order))
    outer, deep, past = _nest(trace, order)
    parent[order] = outer
    depth[order] = deep
    calls, works = launches(trace)
    parent[works] = calls
    depth[works] = depth[calls] + 1
    return Stacks(order=order, place=place, past=past, parent=parent, depth=depth)


def _nest(trace: Trace, order: Int64) -> tuple[list[int], list[int], Int64]:
    """Parent row, depth and end of the subtree of each position."""
    begin, end = trace.start[order].tolist(), trace.end[order].tolist()
    calls = trace.of_category(CALLS)[order].tolist()
    moves = np.diff(trace.tid[order], prepend=0).astype(bool) | np.diff(trace.pid[order], prepend=0).astype(bool)
    threads, rows = np.cumsum(moves).tolist(), order.tolist()
    parents, depths, past = [NONE] * len(rows), [0] * len(rows), [len(rows)] * len(rows)
    around: list[int] = []
    for at in range(len(rows)):
        while around:
            last = around[-1]
            open_still = end[last] >= end[at] and not (calls[last] and end[last] <= begin[at])
            if open_still and threads[last] == threads[at]:
                parents[at] = rows[last]
                break
            past[around.pop()] = at
        depths[at] = len(around)
        around.append(at)
    return parents, depths, np.array(past, np.int64)
