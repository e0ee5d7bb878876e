"""What one rank did, as work items on a line (a thread or a stream), and the items that had to end before each.

Work items of a line follow each other. What lies between the moment at which a work item could have begun and
that at which it did is a work item of its own, so that running the work items again gives the measured times.

Threads are walked in the order of time and cut where something outside them is concerned: a launch, a wait, a
collective, another thread, a step. What a device did is put on its stream when it is launched, so that later
calls can wait for it. A trace says when operators and calls began and ended, not who waited for whom. Taken for
waiting is what looks like it: a thread that did nothing while the main thread worked goes on from there (the
backward pass after the forward pass), and a main thread that did nothing until another one was done waited for
that.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from echograph.ir.columns import Int64
from echograph.ir.traced import TRACE
from echograph.ir.types import Phase
from echograph.profiler.replay.profiling_overhead import Costs, Observed, costs
from echograph.profiler.traces.collectives import MESSAGES, MOST_MOVED, CollectiveCall, collectives
from echograph.profiler.traces.relations import Stacks, call_stacks, launches, of_device_queue, profiler_steps
from echograph.profiler.traces.trace import CALLS, COPIES, NONE, OPERATORS, Trace, place_of_stream
from echograph.units import to_ps


class WorkKind(Enum):
    """What a work item is."""

    HOST = "host"
    COMPUTE = "compute"
    COPY = "copy"
    COLLECTIVE = "collective"
    MESSAGE = "message"


@dataclass(slots=True, kw_only=True, eq=False)
class WorkItem:
    """An item of work; times are picoseconds of the trace.

    Attributes:
        work: what it is.
        name: its operator.
        line: name of its thread or stream.
        start: when it began.
        duration: how long it took.
        key: what orders the program: for work on a device the moment of its launch.
        after: work items that had to end first, beside that before it on its line.
        phase: part of the step.
        forward: sequence number of the forward operation that it differentiates, or -1.
        sequence: its own sequence number as a forward operation, or -1.
        call: the collective that it is.
        nbytes: bytes copied.
        step: picoseconds that a step took which ends here; -1 for all else.
        cost: of the duration, what recording added to it.
        row: of the work on a device that it is, in the trace; -1 for all else.
        at: its place in the rank's program, once that has an order.
    """

    work: WorkKind
    name: str
    line: str
    start: int
    duration: int
    key: int
    after: list[WorkItem] = field(default_factory=list)
    phase: Phase = Phase.OTHER
    forward: int = NONE
    sequence: int = NONE
    call: CollectiveCall | None = None
    nbytes: int = 0
    step: int = NONE
    cost: int = 0
    row: int = NONE
    at: int = NONE

    @property
    def end(self) -> int:
        """When it ended."""
        return self.start + self.duration


@dataclass(slots=True)
class WorkItems:
    """The work items of a rank as they are found."""

    all: list[WorkItem] = field(default_factory=list)
    last: dict[str, WorkItem] = field(default_factory=dict)

    def add(self, item: WorkItem) -> WorkItem:
        """Puts a work item at the end of its line; a program's order is never against a line's."""
        before = self.last.get(item.line)
        if before is not None:
            item.key = max(item.key, before.key)
        self.last[item.line] = item
        self.all.append(item)
        return item

    def ready(self, line: str, after: Iterable[WorkItem]) -> int:
        """When a line could have gone on."""
        before = self.last.get(line)
        return max((item.end for item in (*after, *([before] if before else []))), default=0)

    def in_order(self) -> tuple[list[WorkItem], int]:
        """The items, each after all that it waits for; and how many waits were left out as against the clock."""
        order = sorted(self.all, key=attrgetter("key"))
        for at, item in enumerate(order):
            item.at = at
        dropped = 0
        for item in order:
            if item.after:
                after = dict.fromkeys(item.after)
                item.after = [one for one in after if one.at < item.at]
                dropped += len(after) - len(item.after)
        return order, dropped


_BACKWARD = "autograd::engine::evaluate_function"
_OPTIMIZER = "Optimizer."
_OPTIMIZER_STEP = "Optimizer.step"


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
    of_row, rows = number.tolist(), host.tolist()
    for one, begin, end, row in _segments(calls, stacks, of_row):
        segments = found[one].segments
        if segments and end <= (last := segments[-1][1]):
            continue
        begin = max(begin, last) if segments else begin
        segments.append(Segment(begin, end, rows[row] if row != NONE else NONE))
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
        names: the trace's texts, operators as graphs spell them.
        name_of: the name of each row, a place in `names`.
    """

    def __init__(self, trace: Trace, seen: Observed | None = None) -> None:
        self.trace = trace
        self.stacks: Stacks = call_stacks(trace)
        self.facts: Facts = facts(trace, self.stacks)
        self.states = {number: ThreadState(thread) for number, thread in threads(trace).items()}
        self.work_items = WorkItems()
        self.start: list[int] = trace.start.tolist()
        self.end: list[int] = trace.end.tolist()
        self.names = [operator_name(text) for text in trace.strings]
        self.name_of: list[int] = trace.name.tolist()
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
        if state.now >= until:
            return
        spent, paid = self._spent(state, until, self.costs.get(number))
        start, line = state.now, state.thread.name
        for row, duration in spent.items():
            item = self._of_row(row, line, start, duration)
            if state.after:
                item.after, state.after = state.after, []
            item.cost = paid.get(row, 0)
            self.work_items.add(item)
            start += duration
        state.now = until

    def _spent(self, state: ThreadState, until: int, cost: Costs | None) -> tuple[dict[int, int], dict[int, int]]:
        """What a thread spent in each event until a moment, and what of it recording cost; by row."""
        segments = state.thread.segments
        spent: dict[int, int] = {}
        paid: dict[int, int] = {}
        at, now, count = state.at, state.now, len(segments)
        while now < until:
            while at < count and segments[at][1] <= now:
                at += 1
            if at == count:
                row, stop = NONE, until
            else:
                begin, stop, row = segments[at]
                if begin > now:
                    row, stop = NONE, begin
                stop = min(stop, until)
            spent[row] = spent.get(row, 0) + stop - now
            if cost is not None:
                # What an event cost is spent in it, else behind it: as much as there is.
                state.owed += cost.between(now, stop)
                pays = min(state.owed, stop - now) if self._is_own(row) else 0
                paid[row], state.owed = paid.get(row, 0) + pays, state.owed - pays
            now = stop
        state.at = at
        return spent, paid

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
        item = self.host(self.names[self.name_of[row]], line, start, duration, start)
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


LAUNCH = "launch"
"""From when work could have begun on its stream to when it did."""

_BLOCKING = ("DeviceSynchronize", "StreamSynchronize", "EventSynchronize")
_COPIES = ("Memcpy",)
_WAIT_EVENT = "StreamWaitEvent"
# Stamps of the host and of the device agree to about this.
_NEAR = 1_000_000


def rank_work_items(trace: Trace, seen: Observed | None = None) -> WorkItems:
    """The work items of a rank.

    Args:
        trace: with times since the origin of the job's traces.
        seen: how the rank was observed, where that counts.

    Raises:
        InputError: the trace's file is gone.
    """
    return _Rank(trace, seen).run()


class _Rank(Walk):
    """The walk through a rank's threads, with the device and the collectives that they use.

    `issued` has what was put on each stream: when it was launched, and the work item; `ends` until when each line
    of a stream or thread is taken.
    """

    def __init__(self, trace: Trace, seen: Observed | None = None) -> None:
        super().__init__(trace, seen)
        overhead = None if seen is None else seen.overhead
        self.issue_ps = 0 if overhead is None else to_ps(overhead.issue_s)
        self.calls: Mapping[int, CollectiveCall] = {call.row: call for call in collectives(trace, self.stacks)}
        self.issued: dict[int, tuple[list[int], list[WorkItem]]] = defaultdict(lambda: ([], []))
        self.stream_waits: dict[int, list[WorkItem]] = defaultdict(list)
        self.unsaid_wait = False
        self.outstanding: list[WorkItem] = []
        self.place, self.streams = trace.streams()
        self.several = len(np.unique(trace.pid[trace.on_device])) > 1
        self.ends: dict[str, list[int]] = defaultdict(list)

    def run(self) -> WorkItems:
        """Walks the trace."""
        self._plan_device()
        self._plan_syncs()
        self._plan_gloo()
        return self.walk()

    # -- devices ---------------------------------------------------------------------------------------------

    def _plan_device(self) -> None:
        """Work is put on its stream when it is launched, in the order in which the stream ran it."""
        call_of = dict(zip(*(column.tolist() for column in reversed(launches(self.trace))), strict=True))
        rows = np.flatnonzero(self.trace.on_device)
        latest: dict[str, int] = {}
        for row in rows[np.lexsort((self.trace.index[rows], self.trace.start[rows]))].tolist():
            call, line = call_of.get(row, NONE), self._free_line(self._stream(row), row, self.start[row])
            latest[line] = time = max(self.start[call] if call != NONE else 0, latest.get(line, 0))
            self.at(time, ISSUE, self._launch, row, call, line, time)
        for row in np.flatnonzero(self.trace.of_category(CALLS)).tolist():
            if _WAIT_EVENT in self.trace.text(row):
                self.at(self.start[row], RELEASE, self._unsaid)

    def _stream(self, row: int) -> str:
        stream = f"stream {int(self.trace.stream[row])}"
        return f"device {self.trace.process(int(self.trace.pid[row]))} {stream}" if self.several else stream

    def _free_line(self, name: str, row: int, begins: int) -> str:
        """A line on which nothing runs when a row begins: what a thread or stream shows at once needs several."""
        ends = self.ends[name]
        at = next((at for at, end in enumerate(ends) if end <= begins + _NEAR), len(ends))
        ends[at : at + 1] = [self.end[row]]
        return f"{name} ({at + 1})" if at else name

    def _unsaid(self) -> None:
        self.unsaid_wait = True

    def _launch(self, row: int, call: int, line: str, time: int) -> None:
        number = self.thread(call) if call != NONE else NONE
        after = self.point(number, min(time, self.start[call])) if number != NONE else []
        stream = int(self.place[row])
        after = [*after, *self.stream_waits.pop(stream, [])]
        if self.unsaid_wait and call != NONE:
            after += self._likely(line, row, after)
            self.unsaid_wait = False
        item = self._device_work_item(row, line, time)
        self._begin_after(item, after)
        times, work_items = self.issued[stream]
        times.append(time)
        work_items.append(item)
        # A copy from or to pageable memory returns when it is done.
        if call != NONE and any(word in self.trace.text(call) for word in _COPIES) and item.end <= self.end[call]:
            self.wait(number, self.start[call], item.end, [item], operator_name(self.trace.text(call)))

    def _likely(self, line: str, row: int, after: Sequence[WorkItem]) -> list[WorkItem]:
        """What a stream waited for where only the call that says so was traced: what ended before it went on."""
        ready, start = self.work_items.ready(line, after), self.start[row]
        ended = [
            work_items[-1] for _, work_items in self.issued.values() if ready < work_items[-1].end <= start + _NEAR
        ]
        return [max(ended, key=lambda item: item.end)] if ended else []

    def _device_work_item(self, row: int, line: str, key: int) -> WorkItem:
        trace, operator = self.trace, self.facts.operator[row]
        start, copy = self.start[row], trace.strings[trace.category[row]] in COPIES
        name = trace.text(row) if copy else self.names[self.name_of[operator if operator != NONE else row]]
        work = WorkKind.COPY if copy else WorkKind.COMPUTE
        took = self.end[row] - start
        item = WorkItem(work=work, name=name, line=line, start=start, duration=took, key=key, row=row)
        self.describe(item, row)
        if copy:
            item.nbytes = self._bytes(row)
        if (call := self.calls.get(row)) is not None:
            self._communicates(item, call)
        return item

    def _bytes(self, row: int) -> int:
        sizes = self.trace.arguments.get("bytes")
        at = bisect_left(sizes.rows, row) if sizes else 0
        said = sizes.values[at] if sizes and at < len(sizes.rows) and sizes.rows[at] == row else 0
        return int(said) if 0 <= said < MOST_MOVED else 0

    def _begin_after(self, item: WorkItem, after: Sequence[WorkItem], cost: int = 0) -> None:
        """Puts a work item on its line, and before it what passed until it began, part of which recording cost."""
        ready, before = self.work_items.ready(item.line, after), self.work_items.last.get(item.line)
        item.after = list(after)
        if item.start > ready:
            late = self.host(LAUNCH, f"{item.line} {LAUNCH}", ready, item.start - ready, item.key)
            late.after = [*after, *([before] if before else [])]
            late.phase, late.cost = item.phase, min(cost, late.duration)
            item.after = [self.work_items.add(late)]
        self.work_items.add(item)

    def _communicates(self, item: WorkItem, call: CollectiveCall) -> None:
        item.call, item.nbytes = call, call.nbytes
        item.name = call.kind or item.name
        if call.kind and call.kind not in MESSAGES:
            item.work = WorkKind.COLLECTIVE

    # -- synchronisation -------------------------------------------------------------------------------------

    def _plan_syncs(self) -> None:
        trace = self.trace
        said = dict(zip(*(column.tolist() for column in launches(trace)), strict=True))
        sync = trace.of_category({"cuda_sync"})
        calls = np.flatnonzero(trace.of_category(CALLS) & ~of_device_queue(trace)).tolist()
        records = {int(trace.correlation[row]): row for row in calls if "EventRecord" in trace.text(row)}
        recorded, awaited = (
            trace.argument(name) for name in ("wait_on_cuda_event_record_corr_id", "wait_on_stream")
        )
        for call in calls:
            row = said.get(call, NONE)
            row = row if row != NONE and sync[row] else NONE
            record = records.get(int(recorded[row]), NONE) if row != NONE else NONE
            event = None
            if record != NONE:
                on = place_of_stream(self.streams, int(awaited[row]), int(trace.pid[row]))
                event = on, self.start[record]
            if any(word in trace.text(call) for word in _BLOCKING):
                self.at(self.start[call], BLOCK, self._synchronize, call, row, event)
            elif event is not None and _WAIT_EVENT in trace.text(call):
                self.at(self.start[call], RELEASE, self._wait_event, int(self.place[row]), event)

    def _wait_event(self, stream: int, event: tuple[int, int]) -> None:
        self.stream_waits[stream] += self._last_before(*event)

    def _last_before(self, stream: int, time: int) -> list[WorkItem]:
        times, work_items = self.issued.get(stream, ([], []))
        at = bisect_right(times, time)
        return [work_items[at - 1]] if at else []

    def _synchronize(self, call: int, sync: int, event: tuple[int, int] | None) -> None:
        """A call that returns when work is done: that of a stream or device, or the one that the times tell of."""
        begin, end, text = self.start[call], self.end[call], self.trace.text(call)
        last = {stream: work_items[-1] for stream, (_, work_items) in self.issued.items() if work_items}
        if event is not None:
            awaited = self._last_before(*event)
        elif sync != NONE and "Stream" in self.trace.text(sync) and self.place[sync] != NONE:
            awaited = self._last_before(int(self.place[sync]), begin)
        elif "Device" in text:
            device = int(self.trace.pid[sync]) if sync != NONE else NONE
            awaited = [item for stream, item in last.items() if device in (NONE, self.streams[stream].device)]
        else:
            done = [item for item in last.values() if item.end <= end + _NEAR]
            awaited = [max(done, key=lambda item: item.end)] if done else []
        awaited = [item for item in awaited if item.end <= end + _NEAR]
        until = min(end, max((item.end for item in awaited), default=begin))
        self.wait(self.thread(call), begin, until, awaited, operator_name(text))

    # -- collectives of the host -----------------------------------------------------------------------------

    def _plan_gloo(self) -> None:
        workers: dict[tuple[int, int], str] = {}
        rows = sorted((row for row in self.calls if self.trace.stream[row] < 0), key=self._posted)
        waits: dict[tuple[int, int, int], int] = {}
        for row in rows:
            place, issue = (int(self.trace.pid[row]), int(self.trace.tid[row])), self.calls[row].issue
            line = self._free_line(workers.setdefault(place, f"gloo {len(workers)}"), row, self._posted(row))
            time = self.start[issue if issue != NONE else row]
            self.at(time, ISSUE, self._transfer, row, line, time)
            number = self.thread(issue) if issue != NONE else 0
            if (gap := self._waiting_at(number, self.end[row])) is not None:
                waits[number, *gap] = max(waits.get((number, *gap), 0), self.end[row])
        for (number, begin, end), until in waits.items():
            self.at(max(begin, 0), BLOCK, self._await, number, begin, end, until)
        for row in np.flatnonzero(self.trace.of_category({"user_annotation"})).tolist() if rows else ():
            if self.trace.text(row).startswith(_OPTIMIZER_STEP):
                self.at(self.start[row], END_STEP, self._settle, row)

    def _posted(self, row: int) -> int:
        """When a transfer began. A message can go as soon as its call is made, whenever it shows in the trace."""
        call = self.calls[row]
        return self.start[call.issue if call.kind in MESSAGES and call.issue != NONE else row]

    def _transfer(self, row: int, line: str, time: int) -> None:
        call, start = self.calls[row], self._posted(row)
        after = self.point(self.thread(call.issue), time) if call.issue != NONE else []
        work, text = WorkKind.COMPUTE, self.trace.text(row)
        item = WorkItem(work=work, name=text, line=line, start=start, duration=self.end[row] - start, key=time)
        item.phase = self.facts.phase[call.issue if call.issue != NONE else row]
        self._communicates(item, call)
        if call.kind in MESSAGES:
            item.cost = min(self.issue_ps, item.duration)
        self._begin_after(item, after, self.issue_ps - item.cost)
        self.outstanding.append(item)

    def _waiting_at(self, number: int, time: int) -> tuple[int, int] | None:
        """The stretch around a moment in which a thread does nothing, or runs an operator that waits."""
        if number not in self.states:
            return None
        thread = self.states[number].thread
        if (gap := thread.gap_at(time)) or not thread.segments:
            return gap
        segment = thread.segments[bisect_left(thread.begins, time) - 1]
        inside = segment.row != NONE and segment.begin < time <= segment.end
        return segment[:2] if inside and WAIT in self.trace.text(segment.row).lower() else None

    def _await(self, number: int, begin: int, end: int, until: int) -> None:
        """A thread did nothing when a collective ended: it waited for that, and for those issued before it."""
        ended = [at for at, item in enumerate(self.outstanding) if begin < item.end <= until]
        awaited = [item for item in self.outstanding[: max(ended, default=-1) + 1] if item.end <= end]
        if awaited:
            self.wait(number, max(begin, 0), until, awaited, WAIT)
            self.outstanding = [item for item in self.outstanding if item not in awaited]

    def _settle(self, row: int) -> None:
        """What had ended when the optimizer began was waited for: it reads the gradients."""
        number, time = self.thread(row), self.start[row]
        done = [item for item in self.outstanding if item.end <= time]
        if done:
            self.wait(number, time, time, done, WAIT)
            self.outstanding = [item for item in self.outstanding if item.end > time]
