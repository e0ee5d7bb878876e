"""The threads of a rank, walked in the order of time and cut into work items where something outside is concerned.

A trace says when operators and calls began and ended, not who waited for whom. Taken for waiting is what looks
like it: a thread that did nothing while the main thread worked goes on from there (the backward pass after the
forward pass), and a main thread that did nothing until another one was done waited for that.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from echograph.ir.columns import Int64
from echograph.ir.types import Phase
from echograph.profiler.replay.profiling_overhead import NO_COSTS, Observed, costs
from echograph.profiler.replay.work_items import WorkItem, WorkItems, WorkKind
from echograph.profiler.traces.relations import Stacks, call_stacks, profiler_steps
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


GAP = "gap"
"""Time of a thread in which no operator or call ran: Python, or what the profiler does not see."""
START = "start"
"""From the first event of the job to the first one of the rank."""
TRACE = "trace"
"""What marks the begin and the end of all that was traced of a rank."""
MAIN = "main"
WAIT = "wait"

# Of what happens at one moment, what comes first.
BEGIN, RELEASE, ISSUE, RETURN, HAND_OVER, BLOCK, END_STEP, BEGIN_STEP = range(8)


class _Event(NamedTuple):
    """Something at which a thread is cut; of those at one time the lower order comes first."""

    time: int
    order: int
    number: int
    act: Callable[..., None]
    arguments: tuple[Any, ...]


class ThreadState:
    """How far a thread is: until when it is in work items, and what it waits for next."""

    def __init__(self, thread: Thread) -> None:
        self.thread = thread
        self.now = 0
        self.at = 0
        self.after: list[WorkItem] = []
        self.owed = 0


class Walk:
    """The walk. What an event spent between two cuts is one work item, whatever ran in between.

    Attributes:
        trace: the rank's.
        stacks: what ran within what.
        facts: what rows have from those around them.
        states: of the threads; 0 is the main one.
        work_items: as far as they are.
        costs: what recording cost the threads.
        start: when each row began.
        end: when it ended.
    """

    def __init__(self, trace: Trace, seen: Observed | None = None) -> None:
        self.trace = trace
        self.stacks: Stacks = call_stacks(trace)
        self.facts: Facts = facts(trace, self.stacks)
        self.states = {number: ThreadState(thread) for number, thread in threads(trace).items()}
        self.work_items = WorkItems()
        self.start: list[int] = trace.start.tolist()
        self.end: list[int] = trace.end.tolist()
        self._has_device = bool(trace.on_device.any())
        self._events: list[_Event] = []
        self._thread_of = {state.thread.place: number for number, state in self.states.items()}
        self.costs = costs(trace, self.stacks, self.thread, seen)

    def at(self, time: int, order: int, act: Callable[..., None], *arguments: Any) -> None:
        """Plans what is done when the walk comes to a moment."""
        self._events.append(_Event(time, order, len(self._events), act, arguments))

    def walk(self) -> WorkItems:
        """Does what was planned, from first to last event."""
        for one in handovers({number: state.thread for number, state in self.states.items()}):
            self.at(one.time, RETURN if one.source else HAND_OVER, self._hand_over, *one)
        for number, start, end in zip(*(column.tolist() for column in profiler_steps(self.trace)), strict=True):
            name = f"ProfilerStep#{number}"
            self.at(start, BEGIN_STEP, self._step, name, start, NONE)
            self.at(end, END_STEP, self._step, name, end, end - start)
        first, last = min(self.start, default=0), max(self.end, default=0)
        self.at(first, BEGIN, self._begin, first)
        for event in sorted(self._events, key=lambda event: event[:3]):
            event.act(*event.arguments)
        for number, state in self.states.items():
            self.flush(number, state.thread.end)
        self._mark(TRACE, last, last - first, list(self.work_items.last.values()))
        return self.work_items

    # -- threads ---------------------------------------------------------------------------------------------

    def thread(self, row: int) -> int:
        """The thread that a row is of; the main one for those that ran nothing else."""
        return self._thread_of.get((int(self.trace.pid[row]), int(self.trace.tid[row])), 0)

    def flush(self, number: int, until: int) -> None:
        """Puts a thread in work items until a moment."""
        state = self.states[number]
        segments, spent, paid = state.thread.segments, dict[int, int](), Counter[int]()
        cost = self.costs.get(number, NO_COSTS)
        at, now = state.at, state.now
        while now < until:
            while at < len(segments) and segments[at].end <= now:
                at += 1
            inside = at < len(segments) and segments[at].begin <= now
            row = segments[at].row if inside else NONE
            end = segments[at].end if inside else segments[at].begin if at < len(segments) else until
            stop = min(end, until)
            spent[row] = spent.get(row, 0) + stop - now
            # What an event cost is spent in it, else behind it: as much as there is.
            state.owed += cost.between(now, stop)
            pays = min(state.owed, stop - now) if self._is_own(row) else 0
            paid[row], state.owed = paid[row] + pays, state.owed - pays
            now = stop
        start, line = state.now, state.thread.name
        for row, duration in spent.items():
            item = self._of_row(row, line, start, duration)
            item.after, state.after = state.after, []
            item.cost = paid[row]
            self.work_items.add(item)
            start += duration
        state.at, state.now = at, max(state.now, until)

    def point(self, number: int, time: int) -> list[WorkItem]:
        """The work item with which a thread reached a moment."""
        if number not in self.states:
            return []
        self.flush(number, time)
        state = self.states[number]
        if state.after:
            self._carry(state, WAIT)
        last = self.work_items.last.get(state.thread.name)
        return [last] if last else []

    def wait(self, number: int, since: int, until: int, awaited: Sequence[WorkItem], name: str) -> None:
        """A thread did nothing from one moment to another, when what it waited for was done."""
        if number not in self.states:
            return
        self.flush(number, since)
        state = self.states[number]
        state.after += awaited
        state.now, state.owed = max(state.now, until), 0
        self._carry(state, name)

    def host(self, name: str, line: str, start: int, duration: int, key: int) -> WorkItem:
        """A work item of the host's work."""
        return WorkItem(work=WorkKind.HOST, name=name, line=line, start=start, duration=duration, key=key)

    def describe(self, item: WorkItem, row: int) -> None:
        """Gives a work item what is known of the row that it is of, or was launched by."""
        item.phase = self.facts.phase[row]
        number = self.facts.sequence[row]
        if self.facts.backward[row]:
            item.forward = number
        elif item.phase is Phase.FORWARD:
            item.sequence = number

    def _begin(self, first: int) -> None:
        self.work_items.add(self.host(START, MAIN, 0, first, first))
        mark = self.work_items.add(self.host(TRACE, MAIN, first, 0, first))
        for number, state in self.states.items():
            state.now = first
            state.after = [mark] if number else []

    def _is_own(self, row: int) -> bool:
        """Whether it is the host's own time: between events or of an operator, not of a call to a device."""
        return row == NONE or self.facts.operator[row] == row

    def _carry(self, state: ThreadState, name: str) -> None:
        """A work item of no time that waits for what the thread waits for."""
        item = self.host(name, state.thread.name, state.now, 0, state.now)
        item.after, state.after = state.after, []
        self.work_items.add(item)

    def _hand_over(self, source: int, target: int, time: int, idle: int) -> None:
        point = self.point(source, time)
        if idle >= 0:
            self.flush(target, idle)
        state = self.states[target]
        state.after += point
        state.now, state.owed = max(state.now, time), 0

    def _of_row(self, row: int, line: str, start: int, duration: int) -> WorkItem:
        if row == NONE:
            return self.host(GAP, line, start, duration, start)
        item = self.host(operator_name(self.trace.text(row)), line, start, duration, start)
        if not self._has_device and self.facts.operator[row] == row:
            item.work = WorkKind.COMPUTE
        self.describe(item, row)
        return item

    def _step(self, name: str, time: int, took: int) -> None:
        if not self.states:
            # Nothing is known of the thread that was in that step but the time.
            now = self.work_items.last[MAIN].end
            self.work_items.add(self.host(GAP, MAIN, now, time - now, now))
        self._mark(name, time, took, self.point(0, time))

    def _mark(self, name: str, time: int, took: int, after: list[WorkItem]) -> None:
        mark = self.host(name, MAIN, time, 0, time)
        mark.after, mark.step = after, took
        self.work_items.add(mark)


def operator_name(text: str) -> str:
    """An operator as graphs spell it: aten::mm is aten.mm."""
    return text.replace("::", ".") if "::" in text and "<" not in text else text
