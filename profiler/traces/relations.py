"""How the rows of a trace belong together: launches and what they launched, call stacks, profiler steps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from echograph.ir.columns import Bools, Int32, Int64
from echograph.profiler.traces.trace import CALLS, NONE, WAITS, Trace


class Launches(NamedTuple):
    """Pairs of rows, in the order of the work's rows; a launched CUDA graph stands once for each of its kernels.

    Attributes:
        calls: the call on the host.
        works: what it launched.
    """

    calls: Int64
    works: Int64


def of_device_queue(trace: Trace) -> Bools:
    """Which rows are on a device's side: work, and waits of a stream; calls of the host may name a stream, too."""
    on_stream = (trace.stream >= 0) & (trace.correlation >= 0) & ~trace.of_category(CALLS)
    queued: Bools = on_stream | trace.named(WAITS)
    return queued


def launches(trace: Trace) -> Launches:
    """Every row on a device's side whose launching call is in the trace, with that call.

    Where several calls have one correlation number, the last counts.
    """
    queued = of_device_queue(trace)
    calls = np.flatnonzero(~queued & (trace.correlation > 0))
    calls = calls[np.argsort(trace.correlation[calls], kind="stable")]
    works = np.flatnonzero(queued & (trace.correlation > 0))
    if not len(calls):
        return Launches(calls, calls)
    keys = trace.correlation[calls]
    at = np.searchsorted(keys, trace.correlation[works], "right") - 1
    found = (at >= 0) & (keys[at] == trace.correlation[works])
    return Launches(calls[at[found]], works[found])


def launch_of_rows(trace: Trace) -> Int64:
    """For each row the call that launched it, or -1."""
    found = launches(trace)
    calls = np.full(len(trace), NONE, np.int64)
    calls[found.works] = found.calls
    return calls


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


_STEP = re.compile(r"ProfilerStep#(\d+)$")


class Steps(NamedTuple):
    """The profiler's steps on the host, by the time at which they start.

    Attributes:
        number: N of `ProfilerStep#N`.
        start: picoseconds.
        end: picoseconds.
    """

    number: Int64
    start: Int64
    end: Int64


def profiler_steps(trace: Trace) -> Steps:
    """The steps that `torch.profiler`'s schedule marked on the host."""
    number = _marked(trace)
    return _in_order(trace, np.flatnonzero((number != NONE) & ~trace.of_category({"gpu_user_annotation"})), number)


def complete_steps(trace: Trace) -> Trace:
    """The trace without its last step, where it has two or more.

    Host rows that start before the last mark of a step are kept, and the work on devices that they launched,
    whenever it ran. Some profilers mark steps on the device too: where the last step was seen to run there, what
    the host did for it until then stays.
    """
    number = _marked(trace)
    marks = _in_order(trace, np.flatnonzero(number != NONE), number)
    if len(set(marks.number.tolist())) < 2:
        return trace
    queued = of_device_queue(trace)
    kept = ~queued & (trace.start < marks.start[-1])
    launched = np.isin(trace.correlation, trace.correlation[kept & (trace.correlation != NONE)])
    return trace.rows(kept | (queued & launched))


def _marked(trace: Trace) -> Int64:
    """The number of the step that each row marks, or -1."""
    return np.array([int(m[1]) if (m := _STEP.match(text)) else NONE for text in trace.strings] or [NONE])[
        trace.name
    ]


def _in_order(trace: Trace, rows: Int64, number: Int64) -> Steps:
    rows = rows[np.argsort(trace.start[rows], kind="stable")]
    return Steps(number[rows], trace.start[rows], trace.end[rows])


def step_of_rows(trace: Trace) -> Int64:
    """The step in which each row ran, or was launched for work on a device; -1 outside all steps."""
    steps = profiler_steps(trace)
    step = np.full(len(trace), NONE, np.int64)
    if not len(steps.number):
        return step
    if (steps.end[:-1] <= steps.start[1:]).all():
        at = np.searchsorted(steps.start, trace.start, "right") - 1
        within = (at >= 0) & (trace.start < steps.end[at])
        step[within] = steps.number[at[within]]
    else:
        # Of steps that overlap, the one counts that began last.
        for number, start, end in zip(*(column.tolist() for column in steps), strict=True):
            step[(trace.start >= start) & (trace.start < end)] = number
    device = of_device_queue(trace)
    step[device] = NONE
    calls, works = launches(trace)
    step[works] = step[calls]
    return step
