"""What the host's threads did, moment by moment, and where one thread goes on from another.

A trace says when operators and calls began and ended, not who waited for whom. Taken for waiting is what looks
like it: a thread that did nothing while the main thread worked goes on from there (the backward pass after the
forward pass), and a main thread that did nothing until another one was done waited for that.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from echograph.ir.columns import Int64
from echograph.ir.types import Phase
from echograph.profiler.traces.stacks import Stacks, call_stacks
from echograph.profiler.traces.steps import profiler_steps
from echograph.profiler.traces.trace import CALLS, NONE, OPERATORS, Trace

_BACKWARD = "autograd::engine::evaluate_function"
_OPTIMIZER = "Optimizer."


class Segment(NamedTuple):
    """A stretch of a thread in which the innermost event is the same; `row` is -1 between events."""

    begin: int
    end: int
    row: int


class Handover(NamedTuple):
    """A moment at which one thread lets another one go on; picoseconds.

    Attributes:
        source: the thread that the other waited for.
        target: the thread that goes on.
        time: of the source, when the other could go on.
        idle: of the target, since when it did nothing.
    """

    source: int
    target: int
    time: int
    idle: int


@dataclass(slots=True)
class Thread:
    """A thread of the host.

    Attributes:
        name: "main", "thread 1", ...
        place: process and thread, as the trace has them.
        segments: ascending, without gaps.
        begins: where each of them begins.
        busy: events that nothing is around, ascending: when each begins and ends.
    """

    name: str
    place: tuple[int, int]
    segments: list[Segment] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    busy: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))

    @property
    def end(self) -> int:
        """Until when it ran something; events of no time count where it ran nothing else."""
        return self.segments[-1].end if self.segments else max(self.busy[1], default=0)

    def gap_at(self, time: int) -> tuple[int, int] | None:
        """The stretch without events that a moment lies in or at the end of; None where an event runs."""
        begins, ends = self.busy
        at = bisect_left(begins, time)
        before = ends[at - 1] if at else 0
        if time <= before and at:
            return None
        return before, begins[at] if at < len(begins) else 2**63 - 1


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """What is known of each row of a trace from those that it ran within; device work has what launched it.

    Attributes:
        phase: part of the step.
        operator: row of the innermost operator, or -1.
        sequence: autograd's number of the operation that it belongs to, or -1.
        backward: whether that number is of the forward operation that it differentiates.
    """

    phase: list[Phase]
    operator: list[int]
    sequence: list[int]
    backward: list[bool]


def facts(trace: Trace, stacks: Stacks) -> Facts:
    """What rows have from those around them."""
    count = len(trace)
    phase, operator = [Phase.FORWARD] * count, [NONE] * count
    sequence, backward = trace.argument("Sequence number").tolist(), [False] * count
    own = trace.of_category(OPERATORS).tolist()
    of_name = [
        Phase.BACKWARD if _BACKWARD in text else Phase.OPTIMIZER if text.startswith(_OPTIMIZER) else None
        for text in trace.strings
    ]
    names, parents = trace.name.tolist(), stacks.parent.tolist()
    works = np.flatnonzero(trace.on_device & (stacks.parent != NONE))
    for row in (*stacks.order.tolist(), *works.tolist()):
        parent = parents[row]
        starts = of_name[names[row]]
        phase[row] = starts or (phase[parent] if parent != NONE else Phase.FORWARD)
        operator[row] = row if own[row] else operator[parent] if parent != NONE else NONE
        if parent != NONE and (sequence[row] == NONE or backward[parent]):
            sequence[row], backward[row] = sequence[parent], backward[parent]
        elif starts is Phase.BACKWARD:
            backward[row] = True
    return Facts(phase, operator, sequence, backward)


def threads(trace: Trace) -> dict[int, Thread]:
    """The threads that ran operators or calls, by a number; the main one first.

    The main thread is that which has the profiler's steps, or else the one that ran most.
    """
    host = np.flatnonzero(trace.of_category(CALLS | OPERATORS) & (trace.tid != NONE) & ~trace.on_device)
    if not len(host):
        return {}
    calls = trace.rows(host)
    calls = _plain(calls)
    stacks = call_stacks(calls)
    places, number = np.unique(np.stack([calls.pid, calls.tid]), axis=1, return_inverse=True)
    number = number.ravel()
    main = _main(trace, calls, number)
    order = sorted(set(number.tolist()), key=lambda one: (one != main, -int((number == one).sum()), one))
    found = {
        one: Thread("main" if not at else f"thread {at}", (int(places[0, one]), int(places[1, one])))
        for at, one in enumerate(order)
    }
    of_row = number.tolist()
    for one, begin, end, row in _segments(calls, stacks, of_row):
        thread = found[one]
        if not thread.segments or end > thread.segments[-1].end:
            begin = max(begin, thread.segments[-1].end) if thread.segments else begin
            thread.segments.append(Segment(begin, end, int(host[row]) if row != NONE else NONE))
    starts, ends = calls.start.tolist(), calls.end.tolist()
    for row in stacks.order[stacks.parent[stacks.order] == NONE].tolist():
        begins, stops = found[of_row[row]].busy
        begins.append(starts[row])
        stops.append(max(ends[row], stops[-1] if stops else 0))
    for thread in found.values():
        thread.begins = [segment.begin for segment in thread.segments]
    return {at: found[one] for at, one in enumerate(order)}


def handovers(known: dict[int, Thread]) -> Iterator[Handover]:
    """Where other threads go on from the main one, and it from them."""
    if not known:
        return
    main = known[0]
    for number, thread in known.items():
        if number == 0:
            continue
        for idle, begin in _gaps(thread):
            at = bisect_left(main.busy[0], begin) - 1
            if at >= 0 and main.busy[1][at] > idle:
                yield Handover(0, number, min(main.busy[1][at], begin), idle)
        for idle, begin in _gaps(main):
            at = bisect_right(thread.busy[1], begin) - 1
            running = bisect_left(thread.busy[0], begin) > at + 1
            if at >= 0 and thread.busy[1][at] > idle and not running and idle >= 0:
                yield Handover(number, 0, thread.busy[1][at], idle)


def _gaps(thread: Thread) -> Iterator[tuple[int, int]]:
    """Stretches between the events that nothing is around; the first is from -1."""
    return zip([-1, *thread.busy[1]], thread.busy[0], strict=False)


def _plain(calls: Trace) -> Trace:
    """Calls as events of the host alone, whatever streams they name."""
    import dataclasses

    return dataclasses.replace(calls, stream=np.full(len(calls), NONE, np.int32))


def _main(trace: Trace, calls: Trace, number: Int64) -> int:
    steps = profiler_steps(trace)
    if len(steps.number):
        marks = np.flatnonzero(np.isin(trace.start, steps.start) & trace.of_category({"user_annotation"}))
        for row in marks[[trace.text(r).startswith("ProfilerStep") for r in marks.tolist()]].tolist():
            same = (calls.pid == trace.pid[row]) & (calls.tid == trace.tid[row])
            if same.any():
                return int(number[same][0])
    return int(np.argmax(np.bincount(number)))


def _segments(calls: Trace, stacks: Stacks, thread: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """(thread, begin, end, row) between the moments at which an event begins or ends."""
    parent, start, end = stacks.parent.tolist(), calls.start.tolist(), calls.end.tolist()
    around: list[int] = []
    now, on = 0, NONE

    def until(time: int) -> Iterator[tuple[int, int, int, int]]:
        nonlocal now
        if time > now:
            yield on, now, time, around[-1] if around else NONE
            now = time

    for row in stacks.order.tolist():
        while around and around[-1] != parent[row]:
            yield from until(end[around[-1]])
            around.pop()
        if thread[row] != on:
            on, now = thread[row], start[row]
        yield from until(start[row])
        around.append(row)
    while around:
        yield from until(end[around[-1]])
        around.pop()
