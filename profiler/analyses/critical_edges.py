"""The dependencies among the events of one rank: within threads, from launches, on streams, by synchronisation."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from echograph.errors import UsageError
from echograph.ir.columns import Int64
from echograph.profiler.analyses.critical_graph import CriticalGraph, Edge, loads_data
from echograph.profiler.analyses.queue import queues
from echograph.profiler.analyses.work import US
from echograph.profiler.traces.launches import launch_of_rows, launches, of_device_queue
from echograph.profiler.traces.stacks import Stacks, call_stacks
from echograph.profiler.traces.trace import CALLS, NONE, OPERATORS, Bool, Trace, place_of_stream

# Calls that return when the device is done: what they wait for, and not their own time, is on the path.
_BLOCKING = frozenset(
    f"{api}{call}"
    for api in ("cuda", "hip")
    for call in ("DeviceSynchronize", "StreamSynchronize", "EventQuery", "EventSynchronize", "Memcpy")
)
# Beyond this a stream did not stand still because of the kernel before.
_LONGEST_GAP = 1500 * US


@dataclass(slots=True, kw_only=True)
class _Edges:
    """Edges as they are found; nodes are event numbers times two, plus one for an end."""

    trace: Trace
    event: Mapping[int, int]
    found: dict[tuple[int, int], tuple[Edge, int, int]] = field(default_factory=dict)

    def begin(self, row: int) -> int:
        return 2 * self.event[row]

    def end(self, row: int) -> int:
        return 2 * self.event[row] + 1

    def add(self, source: int, target: int, kind: Edge, weight: int = 0, event: int = NONE) -> None:
        """An edge; between two nodes there is one, the first that is found."""
        self.found.setdefault((source, target), (kind, max(weight, 0), event))


def critical_graph(
    trace: Trace,
    *,
    annotation: str = "",
    instance: int = 0,
    last: int = NONE,
    launch_edges: bool = False,
    data_load_events: str = "",
) -> CriticalGraph:
    """The dependencies among the events of one rank that began within an annotation, and what they launched.

    Edges, after HTA:

    - within a thread, from each start or end of an event to the next (`operator`, the time between them); between
      two events that nothing is around, `dependency` of no time: what lies between costs nothing.
    - from the start of a kernel to its end (`operator`).
    - to the start of a kernel: from the start of its call (`kernel_launch_delay`) where the stream was empty when
      the call began and all that the kernel waited for was done; or else from the end of the kernel before
      (`kernel_kernel_delay`).
    - from the end of a kernel to what waited for it by an event, a stream's or the device's synchronisation
      (`sync_dependency`, no time). A blocking call's own time is not counted.

    Args:
        trace: one rank's.
        annotation: part of the name of the rows within which host events begin; empty for the whole trace.
        instance: which of these rows, from 0 on, in the order of the file.
        last: the last of these rows, for a window of several; -1 for that one alone.
        launch_edges: an edge of no time from each call to its kernel where no other stands for it, so that a host
            made slower delays the device.
        data_load_events: a regular expression; what the host does under a name that it matches anywhere is loading
            data, and an event of the graph whatever its category (data loaders are annotations).

    Raises:
        UsageError: no row has the annotation, or there are fewer of them, or nothing began within it; or a wrong
            pattern.
    """
    begin, end = _window(trace, annotation, instance, last)
    queued, launch = of_device_queue(trace), launch_of_rows(trace)
    inside = ~queued & (trace.start >= begin) & (trace.start <= end)
    called = launch != NONE
    called[called] = inside[launch[called]]
    events = trace.of_category(CALLS | OPERATORS)
    events |= loads_data(trace, data_load_events) & ~trace.of_category({"gpu_user_annotation"})
    host = np.flatnonzero(inside & (trace.duration > 0) & events)
    device = np.flatnonzero(trace.on_device & called)
    rows = np.sort(np.concatenate((host, device)))
    if not len(rows):
        where = f"within '{annotation}'; choose another annotation" if annotation else "in it"
        raise UsageError(f"{trace.path}: no operator or call began {where}")
    edges = _Edges(trace=trace, event={row: event for event, row in enumerate(rows.tolist())})
    _threads(edges, host)
    streams = _Streams(trace, device, launch)
    for row in device.tolist():
        edges.add(edges.begin(row), edges.end(row), Edge.operator, int(trace.duration[row]), row)
    waited = _waits(edges, streams, inside)
    _starts(edges, streams, waited, launch_edges=launch_edges)
    pairs = np.array(list(edges.found), np.int64).reshape(-1, 2)
    kinds, weights, spenders = zip(*edges.found.values(), strict=True)
    return CriticalGraph(
        trace=trace,
        rows=rows,
        source=pairs[:, 0],
        target=pairs[:, 1],
        kind=np.array(kinds, np.int8),
        weight=np.array(weights, np.int64),
        event=np.array(spenders, np.int64),
        data_load_events=data_load_events,
    )


def _window(trace: Trace, annotation: str, instance: int, last: int) -> tuple[int, int]:
    """Picoseconds between which host events begin that count."""
    if not annotation:
        return int(trace.start.min(initial=0)), int(trace.start.max(initial=0))
    marks = [annotation in text for text in trace.strings]
    rows = np.flatnonzero(np.array([*marks, False])[trace.name])
    last = instance if last == NONE else last
    if not 0 <= instance <= last < len(rows):
        known = f"there are {len(rows)}, counted from 0" if len(rows) else "no row has it"
        raise UsageError(
            f"annotation '{annotation}', instance {instance} to {last}: {known}; see the analysis annotations"
        )
    chosen = rows[instance : last + 1]
    return int(trace.start[chosen].min()), int(trace.end[chosen].max())


def _threads(edges: _Edges, host: Int64) -> None:
    """What each thread did, one thing after another; the autograd thread continues the one that went forward."""
    trace = edges.trace
    calls = trace.rows(host)
    calls = dataclasses.replace(calls, tid=_one_thread(trace, calls), stream=np.full(len(host), NONE, np.int32))
    stacks, blocking = call_stacks(calls), calls.named(_BLOCKING).tolist()
    parent, row_of = stacks.parent.tolist(), host.tolist()
    time, nodes = (calls.start.tolist(), calls.end.tolist()), (edges.begin, edges.end)
    thread = list(zip(calls.pid.tolist(), calls.tid.tolist(), strict=True))
    for (last, ended), (row, ends) in pairwise(_moments(stacks)):
        if thread[last] != thread[row]:
            continue
        source, target = nodes[ended](row_of[last]), nodes[ends](row_of[row])
        if ended and not ends and parent[row] == NONE:
            edges.add(source, target, Edge.dependency)
            continue
        spender = last if not ended else row if ends else parent[row]
        spent = 0 if ends and blocking[row] else time[ends][row] - time[ended][last]
        edges.add(source, target, Edge.operator, spent, row_of[spender])


def _moments(stacks: Stacks) -> list[tuple[int, bool]]:
    """Starts and ends of the events of every thread, one after another: a row, and whether it ends."""
    moments: list[tuple[int, bool]] = []
    around: list[int] = []
    parent = stacks.parent.tolist()
    for row in stacks.order.tolist():
        while around and around[-1] != parent[row]:
            moments.append((around.pop(), True))
        moments.append((row, False))
        around.append(row)
    return [*moments, *((row, True) for row in reversed(around))]


def _one_thread(trace: Trace, calls: Trace) -> Int64:
    """Threads of the calls; the backward pass has that of the forward pass where each has one thread."""
    named = trace.of_category(OPERATORS | {"user_annotation"})
    pair = []
    for word in ("forward", "autograd"):
        rows = named & np.array([*(word in text for text in trace.strings), False])[trace.name]
        pair.append(np.unique(trace.tid[rows]))
    if len(pair[0]) != 1 or len(pair[1]) != 1:
        return calls.tid
    return np.where(calls.tid == pair[1][0], pair[0][0], calls.tid)


class _Streams:
    """The work of each stream in the order of its launches, which is that in which it runs."""

    def __init__(self, trace: Trace, device: Int64, launch: Int64) -> None:
        self.trace, self.launch = trace, launch
        order = device[np.lexsort((trace.index[device], trace.start[device]))]
        self.place, self.known = trace.streams()
        self.works: dict[int, list[int]] = {
            at: order[self.place[order] == at].tolist() for at in np.unique(self.place[order]).tolist()
        }
        self.called = {s: np.maximum.accumulate(trace.start[launch[w]]).tolist() for s, w in self.works.items()}

    def of_device(self, wait: int) -> list[int]:
        """The places of the streams of the device that a wait is shown on."""
        return [at for at in self.works if self.known[at].device == int(self.trace.pid[wait])]

    def last_before(self, stream: int, time: int) -> int:
        """The last work that a stream was given before a time, or -1."""
        at = bisect_left(self.called.get(stream, []), time)
        return self.works[stream][at - 1] if at else NONE

    def next_after(self, stream: int, call: int) -> int:
        """The first work that a call's thread gave a stream after the call, or -1."""
        at = bisect_left(self.called.get(stream, []), int(self.trace.start[call]))
        for work in self.works.get(stream, [])[at:]:
            by = self.launch[work]
            if self.trace.tid[by] == self.trace.tid[call] and self.trace.pid[by] == self.trace.pid[call]:
                return work
        return NONE


def _waits(edges: _Edges, streams: _Streams, inside: Bool) -> dict[int, int]:
    """Adds the edges of synchronisation; for each work, when the last that it waited for by an event ended."""
    trace = edges.trace
    records = np.flatnonzero(trace.named({"cudaEventRecord", "cudaEventRecordWithFlags", "hipEventRecord"}))
    record_of = dict(zip(trace.correlation[records].tolist(), records.tolist(), strict=True))
    recorded, awaited = (trace.argument(name) for name in ("wait_on_cuda_event_record_corr_id", "wait_on_stream"))
    sync, latest = trace.of_category({"cuda_sync"}), dict[int, int]()
    for call, wait in zip(*(pair.tolist() for pair in launches(trace)), strict=True):
        if not sync[wait] or not inside[call]:
            continue
        what, record = trace.text(wait), record_of.get(int(recorded[wait]), NONE)
        asked = place_of_stream(streams.known, int(awaited[wait]), int(trace.pid[wait]))
        by_event = streams.last_before(asked, int(trace.start[record])) if record != NONE else NONE
        if what == "Stream Wait Event":
            waiter = streams.next_after(int(streams.place[wait]), call)
            if NONE not in (by_event, waiter):
                edges.add(edges.end(by_event), edges.begin(waiter), Edge.sync_dependency)
                latest[waiter] = max(latest.get(waiter, 0), int(trace.end[by_event]))
            continue
        on = {"Stream Sync": [int(streams.place[wait])], "Context Sync": streams.of_device(wait)}.get(what, [])
        done = [by_event, *(streams.last_before(stream, int(trace.start[call])) for stream in on)]
        for work in done if call in edges.event else ():
            if work != NONE:
                edges.add(edges.end(work), edges.end(call), Edge.sync_dependency)
    return latest


def _starts(edges: _Edges, streams: _Streams, waited: Mapping[int, int], *, launch_edges: bool) -> None:
    """Adds what each work's start followed from: its launch, or the work before it."""
    trace, alone = edges.trace, _alone(edges.trace)
    for works in streams.works.values():
        for before, row in zip([NONE, *works], works, strict=False):
            call = int(streams.launch[row])
            start, called = int(trace.start[row]), int(trace.start[call])
            ended = int(trace.end[before]) if before != NONE else None
            ready = waited.get(row)
            idle = (ended is None or ended < called) and (ready is None or ready < called)
            if row in alone and idle and call in edges.event:
                kind, spent = Edge.kernel_launch_delay, start - called
                edges.add(edges.begin(call), edges.begin(row), kind, spent)
                continue
            if ended is not None and start - ended < _LONGEST_GAP and (ready is None or ready <= ended):
                kind, spent = Edge.kernel_kernel_delay, start - ended
                edges.add(edges.end(before), edges.begin(row), kind, spent, before)
            if launch_edges and call in edges.event:
                edges.add(edges.begin(call), edges.begin(row), Edge.dependency)


def _alone(trace: Trace) -> set[int]:
    """Work that was alone in its stream's queue when it was launched, and left it empty when it started."""
    found: set[int] = set()
    for _, queue in queues(trace):
        launched = queue.works != queue.rows
        single = queue.works[launched & (queue.length == 1)]
        left = queue.works[~launched & (queue.length == 0)]
        found |= set(single.tolist()) & set(left.tolist())
    return found
