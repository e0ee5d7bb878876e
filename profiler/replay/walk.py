"""The threads of a rank, walked in the order of time and cut into pieces where something outside is concerned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from echograph.ir.types import Phase
from echograph.profiler.replay.observing import NO_COSTS, Observed, costs
from echograph.profiler.replay.pieces import Piece, Pieces, Work
from echograph.profiler.replay.threads import Facts, Thread, facts, handovers, threads
from echograph.profiler.traces.stacks import Stacks, call_stacks
from echograph.profiler.traces.steps import profiler_steps
from echograph.profiler.traces.trace import NONE, Trace

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


class State:
    """How far a thread is: until when it is in pieces, and what it waits for next."""

    def __init__(self, thread: Thread) -> None:
        self.thread = thread
        self.now = 0
        self.at = 0
        self.after: list[Piece] = []
        self.owed = 0


class Walk:
    """The walk. What an event spent between two cuts is one piece, whatever ran in between.

    Attributes:
        trace: the rank's.
        stacks: what ran within what.
        facts: what rows have from those around them.
        states: of the threads; 0 is the main one.
        pieces: as far as they are.
        costs: what recording cost the threads.
        start: when each row began.
        end: when it ended.
    """

    def __init__(self, trace: Trace, seen: Observed | None = None) -> None:
        self.trace = trace
        self.stacks: Stacks = call_stacks(trace)
        self.facts: Facts = facts(trace, self.stacks)
        self.states = {number: State(thread) for number, thread in threads(trace).items()}
        self.pieces = Pieces()
        self.start: list[int] = trace.start.tolist()
        self.end: list[int] = trace.end.tolist()
        self._has_device = bool(trace.on_device.any())
        self._events: list[_Event] = []
        self._thread_of = {state.thread.place: number for number, state in self.states.items()}
        self.costs = costs(trace, self.stacks, self.thread, seen)

    def at(self, time: int, order: int, act: Callable[..., None], *arguments: Any) -> None:
        """Plans what is done when the walk comes to a moment."""
        self._events.append(_Event(time, order, len(self._events), act, arguments))

    def walk(self) -> Pieces:
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
        self._mark(TRACE, last, last - first, list(self.pieces.last.values()))
        return self.pieces

    # -- threads ---------------------------------------------------------------------------------------------

    def thread(self, row: int) -> int:
        """The thread that a row is of; the main one for those that ran nothing else."""
        return self._thread_of.get((int(self.trace.pid[row]), int(self.trace.tid[row])), 0)

    def flush(self, number: int, until: int) -> None:
        """Puts a thread in pieces until a moment."""
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
            piece = self._of_row(row, line, start, duration)
            piece.after, state.after = state.after, []
            piece.cost = paid[row]
            self.pieces.add(piece)
            start += duration
        state.at, state.now = at, max(state.now, until)

    def point(self, number: int, time: int) -> list[Piece]:
        """The piece with which a thread reached a moment."""
        if number not in self.states:
            return []
        self.flush(number, time)
        state = self.states[number]
        if state.after:
            self._carry(state, WAIT)
        last = self.pieces.last.get(state.thread.name)
        return [last] if last else []

    def wait(self, number: int, since: int, until: int, awaited: Sequence[Piece], name: str) -> None:
        """A thread did nothing from one moment to another, when what it waited for was done."""
        if number not in self.states:
            return
        self.flush(number, since)
        state = self.states[number]
        state.after += awaited
        state.now, state.owed = max(state.now, until), 0
        self._carry(state, name)

    def host(self, name: str, line: str, start: int, duration: int, key: int) -> Piece:
        """A piece of the host's work."""
        return Piece(work=Work.HOST, name=name, line=line, start=start, duration=duration, key=key)

    def describe(self, piece: Piece, row: int) -> None:
        """Gives a piece what is known of the row that it is of, or was launched by."""
        piece.phase = self.facts.phase[row]
        number = self.facts.sequence[row]
        if self.facts.backward[row]:
            piece.forward = number
        elif piece.phase is Phase.FORWARD:
            piece.sequence = number

    def _begin(self, first: int) -> None:
        self.pieces.add(self.host(START, MAIN, 0, first, first))
        mark = self.pieces.add(self.host(TRACE, MAIN, first, 0, first))
        for number, state in self.states.items():
            state.now = first
            state.after = [mark] if number else []

    def _is_own(self, row: int) -> bool:
        """Whether it is the host's own time: between events or of an operator, not of a call to a device."""
        return row == NONE or self.facts.operator[row] == row

    def _carry(self, state: State, name: str) -> None:
        """A piece of no time that waits for what the thread waits for."""
        piece = self.host(name, state.thread.name, state.now, 0, state.now)
        piece.after, state.after = state.after, []
        self.pieces.add(piece)

    def _hand_over(self, source: int, target: int, time: int, idle: int) -> None:
        point = self.point(source, time)
        if idle >= 0:
            self.flush(target, idle)
        state = self.states[target]
        state.after += point
        state.now, state.owed = max(state.now, time), 0

    def _of_row(self, row: int, line: str, start: int, duration: int) -> Piece:
        if row == NONE:
            return self.host(GAP, line, start, duration, start)
        piece = self.host(operator_name(self.trace.text(row)), line, start, duration, start)
        if not self._has_device and self.facts.operator[row] == row:
            piece.work = Work.COMPUTE
        self.describe(piece, row)
        return piece

    def _step(self, name: str, time: int, took: int) -> None:
        if not self.states:
            # Nothing is known of the thread that was in that step but the time.
            now = self.pieces.last[MAIN].end
            self.pieces.add(self.host(GAP, MAIN, now, time - now, now))
        self._mark(name, time, took, self.point(0, time))

    def _mark(self, name: str, time: int, took: int, after: list[Piece]) -> None:
        mark = self.host(name, MAIN, time, 0, time)
        mark.after, mark.step = after, took
        self.pieces.add(mark)


def operator_name(text: str) -> str:
    """An operator as graphs spell it: aten::mm is aten.mm."""
    return text.replace("::", ".") if "::" in text and "<" not in text else text
