"""One rank's trace as pieces of work that wait for each other.

The trace is walked in the order of time. Threads are cut where something outside them is concerned: a launch, a
wait, a collective, another thread, a step; what an event spent between two cuts is one piece. What a device did
is put on its stream when it is launched, so that later calls can wait for it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from echograph.ir.types import Phase
from echograph.profiler.replay.pieces import Piece, Pieces, Work
from echograph.profiler.replay.threads import Facts, Thread, facts, handovers, threads
from echograph.profiler.traces.collectives import MESSAGES, Call, collectives
from echograph.profiler.traces.launches import launches, of_device_queue
from echograph.profiler.traces.stacks import Stacks, call_stacks
from echograph.profiler.traces.steps import profiler_steps
from echograph.profiler.traces.trace import CALLS, COPIES, NONE, OPERATORS, Trace

GAP = "gap"
"""Time of a thread in which no operator or call ran: Python, or what the profiler does not see."""
LAUNCH = "launch"
"""From when work could have begun on its stream to when it did."""
START = "start"
TRACE = "trace"
"""What marks the begin and the end of all that was traced of a rank."""

_BLOCKING = ("DeviceSynchronize", "StreamSynchronize", "EventSynchronize")
_COPIES = ("Memcpy",)
_WAIT_EVENT = "StreamWaitEvent"
# Stamps of the host and of the device agree to about this.
_NEAR = 1_000_000


class _Event(NamedTuple):
    """Something at which a thread is cut; of those at one time the lower order comes first."""

    time: int
    order: int
    number: int
    act: Callable[[], None]


class _State:
    """How far a thread is: until when it is in pieces, and what it waits for next."""

    def __init__(self, thread: Thread) -> None:
        self.thread = thread
        self.now = 0
        self.at = 0
        self.after: list[Piece] = []


def rank_pieces(trace: Trace) -> Pieces:
    """The pieces of a rank.

    Args:
        trace: with times since the origin of the job's traces.
    """
    return _Rank(trace).run()


class _Rank:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.stacks: Stacks = call_stacks(trace)
        self.facts: Facts = facts(trace, self.stacks)
        self.states = {number: _State(thread) for number, thread in threads(trace).items()}
        self.pieces = Pieces()
        self.calls: Mapping[int, Call] = {call.row: call for call in collectives(trace, self.stacks)}
        self.has_device = bool(trace.on_device.any())
        self.start, self.end = trace.start.tolist(), trace.end.tolist()
        self.events: list[_Event] = []
        # What was put on each stream: when it was launched, and the piece.
        self.issued: dict[int, tuple[list[int], list[Piece]]] = defaultdict(lambda: ([], []))
        self.stream_waits: dict[int, list[Piece]] = defaultdict(list)
        self.unsaid_wait = False
        self.outstanding: list[Piece] = []
        of_thread = {(int(p), int(t)) for p, t in zip(trace.pid, trace.tid, strict=True)}
        self.thread_of = {place: self._thread_number(place) for place in of_thread}

    def _thread_number(self, place: tuple[int, int]) -> int:
        for number, state in self.states.items():
            for segment in state.thread.segments:
                if segment.row != NONE:
                    if (int(self.trace.pid[segment.row]), int(self.trace.tid[segment.row])) == place:
                        return number
                    break
        return 0

    def run(self) -> Pieces:
        """Walks the trace."""
        self._device_events()
        self._sync_events()
        self._gloo_events()
        self._mark_events()
        for one in handovers({number: state.thread for number, state in self.states.items()}):
            self._at(one.time, 2 if one.source else 3, lambda one=one: self._hand_over(*one))  # type: ignore[misc]
        first, last = (int(t) for t in (self.trace.start.min(initial=0), self.trace.end.max(initial=0)))
        self._at(first, -1, lambda: self._begin(first))
        for event in sorted(self.events, key=lambda event: event[:3]):
            event.act()
        for number, state in self.states.items():
            if state.thread.segments:
                self._flush(number, state.thread.segments[-1].end)
        ends = list(self.pieces.last.values())
        self._mark(TRACE, last, last - first, ends)
        return self.pieces

    def _at(self, time: int, order: int, act: Callable[[], None]) -> None:
        self.events.append(_Event(time, order, len(self.events), act))

    # -- threads ---------------------------------------------------------------------------------------------

    def _begin(self, first: int) -> None:
        start = self._host(START, "main", 0, first, first)
        self.pieces.add(start)
        mark = self._host(TRACE, "main", first, 0, first)
        self.pieces.add(mark)
        for number, state in self.states.items():
            state.now = first
            if number:
                state.after = [mark]

    def _flush(self, number: int, until: int) -> None:
        """Puts a thread in pieces until a moment."""
        state = self.states[number]
        segments, spent = state.thread.segments, dict[int, int]()
        at, now = state.at, state.now
        while now < until:
            while at < len(segments) and segments[at].end <= now:
                at += 1
            inside = at < len(segments) and segments[at].begin <= now
            row = segments[at].row if inside else NONE
            end = segments[at].end if inside else segments[at].begin if at < len(segments) else until
            stop = min(end, until)
            spent[row] = spent.get(row, 0) + stop - now
            now = stop
        start, line = state.now, state.thread.name
        for row, duration in spent.items():
            piece = self._of_row(row, line, start, duration)
            piece.after, state.after = state.after, []
            self.pieces.add(piece)
            start += duration
        state.at, state.now = at, max(state.now, until)

    def _point(self, number: int, time: int) -> list[Piece]:
        """The piece with which a thread reached a moment."""
        self._flush(number, time)
        state = self.states[number]
        if state.after:
            self._carry(state, "wait")
        last = self.pieces.last.get(state.thread.name)
        return [last] if last else []

    def _carry(self, state: _State, name: str) -> None:
        """A piece of no time that waits for what the thread waits for."""
        piece = self._host(name, state.thread.name, state.now, 0, state.now)
        piece.after, state.after = state.after, []
        self.pieces.add(piece)

    def _wait(self, number: int, since: int, until: int, awaited: Sequence[Piece], name: str) -> None:
        """A thread did nothing from one moment to another, when what it waited for was done."""
        self._flush(number, since)
        state = self.states[number]
        state.after += awaited
        state.now = max(state.now, until)
        self._carry(state, name)

    def _hand_over(self, source: int, target: int, time: int, idle: int) -> None:
        point = self._point(source, time)
        if idle >= 0:
            self._flush(target, idle)
        state = self.states[target]
        state.after += point
        state.now = max(state.now, time)

    def _host(self, name: str, line: str, start: int, duration: int, key: int) -> Piece:
        return Piece(work=Work.HOST, name=name, line=line, start=start, duration=duration, key=key)

    def _of_row(self, row: int, line: str, start: int, duration: int) -> Piece:
        if row == NONE:
            return self._host(GAP, line, start, duration, start)
        piece = self._host(_name(self.trace.text(row)), line, start, duration, start)
        if not self.has_device and self.facts.operator[row] == row:
            piece.work = Work.COMPUTE
        self._describe(piece, row)
        return piece

    def _describe(self, piece: Piece, row: int) -> None:
        piece.phase = self.facts.phase[row]
        number = self.facts.sequence[row]
        if self.facts.backward[row]:
            piece.forward = number
        elif piece.phase is Phase.FORWARD:
            piece.sequence = number

    # -- devices ---------------------------------------------------------------------------------------------

    def _device_events(self) -> None:
        """Work is put on its stream when it is launched, in the order in which the stream ran it."""
        call_of = dict(zip(*(column.tolist() for column in reversed(launches(self.trace))), strict=True))
        rows = np.flatnonzero(self.trace.on_device)
        place = np.lexsort((self.trace.index[rows], self.trace.start[rows]))
        latest: dict[tuple[int, int], int] = {}
        for row in rows[place].tolist():
            stream = int(self.trace.pid[row]), int(self.trace.stream[row])
            call = call_of.get(row, NONE)
            time = max(self.start[call] if call != NONE else 0, latest.get(stream, 0))
            latest[stream] = time
            self._at(time, 1, lambda row=row, call=call, time=time: self._launch(row, call, time))  # type: ignore[misc]
        for row in np.flatnonzero(self.trace.of_category(CALLS)).tolist():
            if _WAIT_EVENT in self.trace.text(row):
                self._at(self.start[row], 0, self._unsaid)

    def _unsaid(self) -> None:
        self.unsaid_wait = True

    def _launch(self, row: int, call: int, time: int) -> None:
        number = self._thread(call) if call != NONE else NONE
        after = self._point(number, min(time, self.start[call])) if number != NONE else []
        stream = int(self.trace.stream[row])
        after += self.stream_waits.pop(stream, [])
        line = f"stream {stream}"
        if self.unsaid_wait and call != NONE:
            after += self._likely(line, row, after)
            self.unsaid_wait = False
        piece = self._device_piece(row, line, time)
        self._begin_after(piece, after)
        times, pieces = self.issued[stream]
        times.append(time)
        pieces.append(piece)
        # A copy from or to pageable memory returns when it is done.
        if call != NONE and any(word in self.trace.text(call) for word in _COPIES) and piece.end <= self.end[call]:
            self._wait(number, self.start[call], piece.end, [piece], _name(self.trace.text(call)))

    def _likely(self, line: str, row: int, after: Sequence[Piece]) -> list[Piece]:
        """What a stream waited for by an event that the trace tells nothing of: what ended just before it went on."""
        ready, start = self.pieces.ready(line, after), self.start[row]
        ended = [pieces[-1] for _, pieces in self.issued.values() if ready < pieces[-1].end <= start + _NEAR]
        return [max(ended, key=lambda piece: piece.end)] if ended else []

    def _device_piece(self, row: int, line: str, key: int) -> Piece:
        trace, operator = self.trace, self.facts.operator[row]
        name = _name(trace.text(operator if operator != NONE else row))
        work = Work.COPY if trace.strings[trace.category[row]] in COPIES else Work.COMPUTE
        piece = Piece(
            work=work,
            name=name,
            line=line,
            start=self.start[row],
            duration=self.end[row] - self.start[row],
            key=key,
        )
        self._describe(piece, row)
        if work is Work.COPY:
            piece.name = trace.text(row)
            sizes = trace.arguments.get("bytes")
            at = bisect_left(sizes.rows, row) if sizes else 0
            piece.nbytes = int(sizes.values[at]) if sizes and at < len(sizes.rows) and sizes.rows[at] == row else 0
        if (call := self.calls.get(row)) is not None:
            self._communicates(piece, call)
        return piece

    def _begin_after(self, piece: Piece, after: list[Piece]) -> None:
        """Puts a piece on its line, and before it what passed until it began."""
        ready, before = self.pieces.ready(piece.line, after), self.pieces.last.get(piece.line)
        if piece.start > ready:
            late = self._host(LAUNCH, f"{piece.line} {LAUNCH}", ready, piece.start - ready, piece.key)
            late.after = [*after, *([before] if before else [])]
            late.phase = piece.phase
            piece.after = [self.pieces.add(late)]
        else:
            piece.after = after
        self.pieces.add(piece)

    def _communicates(self, piece: Piece, call: Call) -> None:
        piece.call, piece.nbytes = call, call.nbytes
        piece.name = call.kind or piece.name
        if call.kind and call.kind not in MESSAGES:
            piece.work = Work.COLLECTIVE

    # -- synchronisation -------------------------------------------------------------------------------------

    def _sync_events(self) -> None:
        trace = self.trace
        said = {call: row for call, row in zip(*(c.tolist() for c in launches(trace)), strict=True)}
        sync, queued = trace.of_category({"cuda_sync"}), of_device_queue(trace)
        records = {
            int(trace.correlation[row]): row
            for row in np.flatnonzero(trace.of_category(CALLS) & ~queued).tolist()
            if "EventRecord" in trace.text(row)
        }
        recorded, awaited = (
            trace.argument(name) for name in ("wait_on_cuda_event_record_corr_id", "wait_on_stream")
        )
        for call in np.flatnonzero(trace.of_category(CALLS) & ~queued).tolist():
            text, row = trace.text(call), said.get(call, NONE)
            row = row if row != NONE and sync[row] else NONE
            event = records.get(int(recorded[row]), NONE) if row != NONE else NONE
            by_event = (int(awaited[row]), self.start[event]) if event != NONE else None
            if any(word in text for word in _BLOCKING):
                on = int(trace.stream[row]) if row != NONE and "Stream" in trace.text(row) else NONE
                self._at(
                    self.start[call], 4, lambda c=call, o=on, e=by_event: self._synchronize(c, o, e)  # type: ignore[misc]
                )  # fmt: skip
            elif by_event is not None and _WAIT_EVENT in text:
                stream = int(trace.stream[row])
                self._at(self.start[call], 0, lambda s=stream, e=by_event: self._wait_event(s, e))  # type: ignore[misc]

    def _wait_event(self, stream: int, event: tuple[int, int]) -> None:
        self.stream_waits[stream] += self._last_before(*event)

    def _last_before(self, stream: int, time: int) -> list[Piece]:
        times, pieces = self.issued.get(stream, ([], []))
        at = bisect_right(times, time)
        return [pieces[at - 1]] if at else []

    def _synchronize(self, call: int, stream: int, event: tuple[int, int] | None) -> None:
        """A call that returns when work is done: that of a stream or of all, or the one that the times tell of."""
        begin, end = self.start[call], self.end[call]
        last = [pieces[-1] for _, pieces in self.issued.values() if pieces]
        if event is not None:
            awaited = self._last_before(*event)
        elif stream != NONE:
            awaited = self._last_before(stream, begin)
        elif "Device" in self.trace.text(call):
            awaited = last
        else:
            done = [piece for piece in last if piece.end <= end + _NEAR]
            awaited = [max(done, key=lambda piece: piece.end)] if done else []
        awaited = [piece for piece in awaited if piece.end <= end + _NEAR]
        until = min(end, max((piece.end for piece in awaited), default=begin))
        self._wait(self._thread(call), begin, until, awaited, _name(self.trace.text(call)))

    # -- collectives of the host -----------------------------------------------------------------------------

    def _gloo_events(self) -> None:
        workers: dict[tuple[int, int], str] = {}
        rows = [row for row in self.calls if self.trace.stream[row] < 0]
        for row in sorted(rows, key=lambda row: self.start[row]):
            place = int(self.trace.pid[row]), int(self.trace.tid[row])
            line = workers.setdefault(place, f"gloo {len(workers)}")
            issue = self.calls[row].issue
            time = self.start[issue if issue != NONE else row]
            self._at(time, 1, lambda r=row, line=line, t=time: self._transfer(r, line, t))  # type: ignore[misc]
        self._gloo_waits(rows)

    def _transfer(self, row: int, line: str, time: int) -> None:
        call = self.calls[row]
        after = self._point(self._thread(call.issue), time) if call.issue != NONE else []
        piece = Piece(
            work=Work.COMPUTE, name=self.trace.text(row), line=line, start=self.start[row],
            duration=self.end[row] - self.start[row], key=time, phase=self.facts.phase[max(call.issue, 0)],
        )  # fmt: skip
        self._communicates(piece, call)
        self._begin_after(piece, after)
        self.outstanding.append(piece)

    def _gloo_waits(self, rows: Sequence[int]) -> None:
        """A thread that did nothing when a collective ended waited for it, and for those issued before it."""
        waits: dict[tuple[int, int, int], int] = {}
        for row in rows:
            issue = self.calls[row].issue
            number = self._thread(issue) if issue != NONE else 0
            if number not in self.states:
                continue
            gap = self._waiting_at(number, self.end[row])
            if gap is not None:
                key = (number, *gap)
                waits[key] = max(waits.get(key, 0), self.end[row])
        for (number, begin, end), until in waits.items():
            self._at(
                max(begin, 0), 5, lambda n=number, b=begin, e=end, u=until: self._await(n, b, e, u)  # type: ignore[misc]
            )  # fmt: skip
        marks = self.trace.of_category({"user_annotation"})
        for row in np.flatnonzero(marks).tolist():
            if self.trace.text(row).startswith("Optimizer.step"):
                self._at(self.start[row], 6, lambda row=row: self._settle(row))  # type: ignore[misc]

    def _waiting_at(self, number: int, time: int) -> tuple[int, int] | None:
        """The stretch around a moment in which a thread does nothing, or runs an operator that waits."""
        thread = self.states[number].thread
        if gap := thread.gap_at(time):
            return gap
        segment = thread.segments[bisect_left(thread.begins, time) - 1]
        inside = segment.row != NONE and segment.begin < time <= segment.end
        return segment[:2] if inside and "wait" in self.trace.text(segment.row).lower() else None

    def _await(self, number: int, begin: int, end: int, until: int) -> None:
        ended = [at for at, piece in enumerate(self.outstanding) if begin < piece.end <= until]
        awaited = [piece for piece in self.outstanding[: max(ended, default=-1) + 1] if piece.end <= end]
        if awaited:
            self._wait(number, max(begin, 0), until, awaited, "wait")
            self.outstanding = [piece for piece in self.outstanding if piece not in awaited]

    def _settle(self, row: int) -> None:
        """What had ended when the optimizer began was waited for: it reads the gradients."""
        number, time = self._thread(row), self.start[row]
        done = [piece for piece in self.outstanding if piece.end <= time]
        if done and number in self.states:
            self._wait(number, time, time, done, "wait")
            self.outstanding = [piece for piece in self.outstanding if piece.end > time]

    # -- steps -----------------------------------------------------------------------------------------------

    def _mark_events(self) -> None:
        for number, start, end in zip(*(column.tolist() for column in profiler_steps(self.trace)), strict=True):
            name = f"ProfilerStep#{number}"
            self._at(start, 7, lambda name=name, start=start: self._step(name, start, NONE))  # type: ignore[misc]
            self._at(end, 6, lambda name=name, end=end, took=end - start: self._step(name, end, took))  # type: ignore[misc]

    def _step(self, name: str, time: int, took: int) -> None:
        self._mark(name, time, took, self._point(0, time) if self.states else [])

    def _mark(self, name: str, time: int, took: int, after: list[Piece]) -> None:
        mark = self._host(name, "main", time, 0, time)
        mark.after, mark.step = after, took
        self.pieces.add(mark)

    def _thread(self, row: int) -> int:
        return self.thread_of.get((int(self.trace.pid[row]), int(self.trace.tid[row])), 0)


def _name(text: str) -> str:
    """An operator as graphs spell it: aten::mm is aten.mm."""
    return text.replace("::", ".") if "::" in text and "<" not in text else text
