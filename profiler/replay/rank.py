"""One rank's trace as items of work that wait for each other.

Threads are cut where something outside them is concerned: a launch, a wait, a collective, another thread, a step.
What a device did is put on its stream when it is launched, so that later calls can wait for it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from echograph.profiler.replay.profiling_overhead import Observed
from echograph.profiler.replay.walk import BLOCK, END_STEP, ISSUE, RELEASE, WAIT, Walk, operator_name
from echograph.profiler.replay.work_items import WorkItem, WorkItems, WorkKind
from echograph.profiler.traces.collectives import MESSAGES, MOST_MOVED, CollectiveCall, collectives
from echograph.profiler.traces.relations import launches, of_device_queue
from echograph.profiler.traces.trace import CALLS, COPIES, NONE, Trace, place_of_stream
from echograph.units import to_ps

LAUNCH = "launch"
"""From when work could have begun on its stream to when it did."""

_BLOCKING = ("DeviceSynchronize", "StreamSynchronize", "EventSynchronize")
_COPIES = ("Memcpy",)
_WAIT_EVENT = "StreamWaitEvent"
_OPTIMIZER = "Optimizer.step"
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
        name = trace.text(row) if copy else operator_name(trace.text(operator if operator != NONE else row))
        work = WorkKind.COPY if copy else WorkKind.COMPUTE
        item = WorkItem(work=work, name=name, line=line, start=start, duration=self.end[row] - start, key=key)
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
            if self.trace.text(row).startswith(_OPTIMIZER):
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
