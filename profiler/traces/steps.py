"""Profiler steps: which rows belong to which, and the steps that were profiled whole."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from echograph.ir.columns import Int64
from echograph.profiler.traces.launches import launches, of_device_queue
from echograph.profiler.traces.trace import NONE, Trace

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
