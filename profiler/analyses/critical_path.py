"""The critical path of each rank: what a step would have to do faster to end sooner."""

from __future__ import annotations

import dataclasses
import io
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from echograph.errors import DataError, FormatError, UnknownNameError, UsageError
from echograph.ir.columns import Bools, Int64
from echograph.ir.files import read_arrays, write_whole
from echograph.ir.longest_path import longest_paths
from echograph.profiler.analyses.counters import queues
from echograph.profiler.analyses.marked_copy import _MarkedRows, exact_json, marked_copy
from echograph.profiler.analyses.table import AnswerTable, from_rows
from echograph.profiler.analyses.work import US, KernelKind, kernel_kinds
from echograph.profiler.traces.relations import Stacks, call_stacks, launch_of_rows, launches, of_device_queue
from echograph.profiler.traces.trace import CALLS, NONE, OPERATORS, Trace, TraceSet, place_of_stream


class Edge(IntEnum):
    """Why one moment cannot be before another; by these names in tables and in options."""

    operator = 0
    dependency = 1
    kernel_launch_delay = 2
    kernel_kernel_delay = 3
    sync_dependency = 4


class Bound(IntEnum):
    """What time on the path was spent on; `none` for edges that take no time."""

    none = 0
    cpu_bound = 1
    gpu_compute_bound = 2
    gpu_communication_bound = 3
    gpu_memory_bound = 4
    gpu_kernel_launch_overhead = 5
    gpu_kernel_kernel_overhead = 6
    data_loading = 7

    @property
    def title(self) -> str:
        """Its name in tables."""
        return self.name if self else ""


class CriticalPath(NamedTuple):
    """The longest path of a graph.

    Attributes:
        nodes: in order.
        edges: between them, one less.
        length: picoseconds.
    """

    nodes: Int64
    edges: Int64
    length: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CriticalGraph:
    """The dependencies of one rank's events; node 2k is the start of the k-th event and node 2k + 1 its end.

    Attributes:
        trace: the events, all of the rank's.
        rows: row in the trace of each event of the graph, ascending.
        source: node that each edge leaves.
        target: node that it enters.
        kind: an `Edge`.
        weight: picoseconds between the two, >= 0.
        event: row of the event whose time that is, or -1 for edges that stand for no event.
        data_load_events: a regular expression; host events whose name it matches anywhere load data.
    """

    trace: Trace
    rows: Int64
    source: Int64
    target: Int64
    kind: npt.NDArray[np.int8]
    weight: Int64
    event: Int64
    data_load_events: str = ""

    @property
    def nodes(self) -> int:
        """How many there are."""
        return 2 * len(self.rows)

    @property
    def time(self) -> Int64:
        """Picoseconds at which each node was in the trace; scaled weights do not move it."""
        return np.stack((self.trace.start[self.rows], self.trace.end[self.rows]), axis=1).ravel()

    @property
    def bound(self) -> npt.NDArray[np.int8]:
        """The `Bound` of each edge: by its kind for delays, by its event for the rest."""
        of_kind = np.full(len(KernelKind), Bound.gpu_compute_bound, np.int8)
        of_kind[KernelKind.COMMUNICATION] = Bound.gpu_communication_bound
        of_kind[KernelKind.MEMORY] = Bound.gpu_memory_bound
        of_host = np.where(loads_data(self.trace, self.data_load_events), Bound.data_loading, Bound.cpu_bound)
        of_row = np.where(self.trace.on_device, of_kind[kernel_kinds(self.trace)], of_host.astype(np.int8))
        bound = np.where(self.event == NONE, np.int8(Bound.none), of_row[self.event])
        bound[self.kind == Edge.kernel_launch_delay] = Bound.gpu_kernel_launch_overhead
        bound[self.kind == Edge.kernel_kernel_delay] = Bound.gpu_kernel_kernel_overhead
        return bound

    def scaled(
        self,
        factor: float,
        *,
        edges: Collection[Edge] | None = None,
        bounds: Collection[Bound] | None = None,
    ) -> CriticalGraph:
        """The graph if some of its edges took another time; path, breakdown and summary of it all follow.

        Args:
            factor: what weights are multiplied by; rounded to picoseconds.
            edges: kinds that are scaled; None for all.
            bounds: what scaled edges are bound by; None for all.

        Raises:
            UsageError: the factor is negative, not finite, or so large that times are beyond 64 bits.
        """
        if not 0 <= factor < np.inf:
            raise UsageError(f"scale {factor:g}: give a factor from 0 up; 0.5 halves the time")
        chosen = np.ones(len(self.weight), np.bool_)
        if edges is not None:
            chosen &= np.isin(self.kind, list(edges))
        if bounds is not None:
            chosen &= np.isin(self.bound, list(bounds))
        scaled = np.rint(self.weight[chosen] * factor)
        weight = self.weight.copy()
        if not float(scaled.sum()) + float(weight[~chosen].sum()) < 2**63:
            raise UsageError(f"scale {factor:g}: of times that would be more than 106 days: give a smaller factor")
        weight[chosen] = scaled.astype(np.int64)
        return dataclasses.replace(self, weight=weight)

    def path(self) -> CriticalPath:
        """The longest path; of equally long ones that whose events began first.

        Raises:
            DataError: the dependencies run in a circle: the trace's times contradict one another.
        """
        order, far, via = longest_paths(
            np.argsort(self.time, kind="stable"), self.source, self.target, self.weight
        )
        if len(order) < self.nodes:
            raise DataError(f"{self.trace.path}: its events depend on each other in a circle; nothing is longest")
        nodes, edges = [max(order, key=far.__getitem__)] if order else [], list[int]()
        while nodes and via[nodes[-1]] != NONE:
            edges.append(via[nodes[-1]])
            nodes.append(int(self.source[edges[-1]]))
        length = far[nodes[0]] if nodes else 0
        return CriticalPath(np.array(nodes[::-1], np.int64), np.array(edges[::-1], np.int64), length)


def loads_data(trace: Trace, pattern: str) -> Bools:
    """Which rows load data: those whose name the pattern matches anywhere; none for an empty pattern.

    Raises:
        UsageError: the pattern is no regular expression.
    """
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"data_load_events '{pattern}': not a regular expression ({error})") from None
    return np.array([bool(pattern and wanted.search(text)) for text in (*trace.strings, "")])[trace.name]


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
    rows: Int64
    within: Bools
    """Which rows of the trace are events of the graph."""
    found: list[Int64] = field(default_factory=list)
    """Columns of source, target, `Edge`, picoseconds and row; int64 [5, edges] each."""

    def event(self, rows: Int64) -> Int64:
        """The number of the event of each row."""
        return np.searchsorted(self.rows, rows)

    def begin(self, row: int) -> int:
        return 2 * int(self.rows.searchsorted(row))

    def end(self, row: int) -> int:
        return 2 * int(self.rows.searchsorted(row)) + 1

    def many(
        self, source: Int64, target: Int64, kind: npt.ArrayLike, weight: npt.ArrayLike, event: npt.ArrayLike
    ) -> None:
        """Edges between nodes between which no others are."""
        columns = np.broadcast_arrays(source, target, kind, np.maximum(weight, 0), event)
        self.found.append(np.stack(columns).astype(np.int64))


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
    within = np.zeros(len(trace), np.bool_)
    within[rows] = True
    edges = _Edges(trace=trace, rows=rows, within=within)
    _threads(edges, host)
    streams = _Streams(trace, device, launch)
    ran = edges.event(device)
    edges.many(2 * ran, 2 * ran + 1, Edge.operator, trace.duration[device], device)
    waited = _waits(edges, streams, inside)
    _starts(edges, streams, waited, launch_edges=launch_edges)
    return _graph_of(edges, rows, data_load_events)


def _graph_of(edges: _Edges, rows: Int64, data_load_events: str) -> CriticalGraph:
    source, target, kind, weight, event = np.concatenate(edges.found, axis=1)
    return CriticalGraph(
        trace=edges.trace,
        rows=rows,
        source=source,
        target=target,
        kind=kind.astype(np.int8),
        weight=weight,
        event=event,
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
    stacks = call_stacks(calls)
    row, ends = _moments(stacks)
    last, ended, row, ends = row[:-1], ends[:-1], row[1:], ends[1:]
    same = (calls.tid[last] == calls.tid[row]) & (calls.pid[last] == calls.pid[row])
    last, ended, row, ends = last[same], ended[same], row[same], ends[same]
    event = edges.event(host)
    parent, time = stacks.parent, np.stack((calls.start, calls.end))
    between = (ended == 1) & (ends == 0) & (parent[row] == NONE)
    spender = np.where(ended == 0, last, np.where(ends == 1, row, parent[row]))
    spent = np.where(calls.named(_BLOCKING)[row] & (ends == 1), 0, time[ends, row] - time[ended, last])
    edges.many(
        2 * event[last] + ended,
        2 * event[row] + ends,
        np.where(between, Edge.dependency, Edge.operator),
        np.where(between, 0, spent),
        np.where(between, NONE, host[spender]),
    )


def _moments(stacks: Stacks) -> tuple[Int64, Int64]:
    """Starts and ends of the events of every thread, one after another: rows, and which of them end (1).

    Before the start at position p of the order come p starts and the ends of all events that are past there;
    before the end of an event come the starts of all within it, and the ends of these and of all before it.
    """
    order, past = stacks.order, stacks.past
    count = len(order)
    at = np.arange(count)
    # Of events that end at one position the innermost ends first, which is the one that began last.
    ending = np.lexsort((-at, past))
    row, ends = np.empty(2 * count, np.int64), np.zeros(2 * count, np.int64)
    before = np.searchsorted(past[ending], at, "right")
    row[at + before] = order
    place = past[ending] + at
    row[place], ends[place] = order[ending], 1
    return row, ends


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
        self.by_thread: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for stream, works in self.works.items():
            calls = launch[works]
            threads = zip(trace.pid[calls].tolist(), trace.tid[calls].tolist(), strict=True)
            for at, thread in enumerate(threads):
                self.by_thread[stream, *thread].append(at)

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
        own = self.by_thread.get((stream, int(self.trace.pid[call]), int(self.trace.tid[call])), [])
        place = bisect_left(own, at)
        return self.works[stream][own[place]] if place < len(own) else NONE


def _waits(edges: _Edges, streams: _Streams, inside: Bools) -> dict[int, tuple[int, set[int]]]:
    """Adds the edges of synchronisation.

    Returns:
        For each work that waited by an event, when the last that it waited for ended, and all of that.
    """
    trace = edges.trace
    records = np.flatnonzero(trace.named({"cudaEventRecord", "cudaEventRecordWithFlags", "hipEventRecord"}))
    record_of = dict(zip(trace.correlation[records].tolist(), records.tolist(), strict=True))
    recorded, awaited = (trace.argument(name) for name in ("wait_on_cuda_event_record_corr_id", "wait_on_stream"))
    sync, latest = trace.of_category({"cuda_sync"}), dict[int, tuple[int, set[int]]]()
    joined = dict[tuple[int, int], None]()
    for call, wait in zip(*(pair.tolist() for pair in launches(trace)), strict=True):
        if not sync[wait] or not inside[call]:
            continue
        what, record = trace.text(wait), record_of.get(int(recorded[wait]), NONE)
        asked = place_of_stream(streams.known, int(awaited[wait]), int(trace.pid[wait]))
        by_event = streams.last_before(asked, int(trace.start[record])) if record != NONE else NONE
        if what == "Stream Wait Event":
            waiter = streams.next_after(int(streams.place[wait]), call)
            if NONE not in (by_event, waiter):
                joined[edges.end(by_event), edges.begin(waiter)] = None
                ended, awaits = latest.get(waiter, (0, set[int]()))
                over = int(trace.start[by_event] + trace.duration[by_event])
                latest[waiter] = max(ended, over), awaits | {by_event}
            continue
        on = {"Stream Sync": [int(streams.place[wait])], "Context Sync": streams.of_device(wait)}.get(what, [])
        done = [by_event, *(streams.last_before(stream, int(trace.start[call])) for stream in on)]
        for work in done if edges.within[call] else ():
            if work != NONE:
                joined[edges.end(work), edges.end(call)] = None
    if joined:
        source, target = np.array(list(joined), np.int64).T
        edges.many(source, target, Edge.sync_dependency, 0, NONE)
    return latest


def _starts(
    edges: _Edges, streams: _Streams, waited: Mapping[int, tuple[int, set[int]]], *, launch_edges: bool
) -> None:
    """Adds what each work's start followed from: its launch, or the work before it."""
    trace, alone = edges.trace, _alone(edges.trace)
    for works in streams.works.values():
        row = np.array(works, np.int64)
        before, call = np.r_[NONE, row[:-1]], streams.launch[row]
        start, called = trace.start[row], trace.start[call]
        follows = before != NONE
        ended = trace.start[before] + trace.duration[before]
        waits = np.array([one in waited for one in works], np.bool_)
        ready = np.array([waited[one][0] if one in waited else 0 for one in works], np.int64)
        # Between two works there is one edge; that of a wait is there before.
        again = np.array(
            [one in waited and last in waited[one][1] for last, one in zip(before.tolist(), works, strict=True)]
        )
        idle = (~follows | (ended < called)) & (~waits | (ready < called))
        launched = alone[row] & idle & edges.within[call]
        near = follows & (start - ended < _LONGEST_GAP) & (~waits | (ready <= ended))
        chained = near & ~launched & ~again
        event, caller = edges.event(row), edges.event(call)
        last = edges.event(before)
        edges.many(
            2 * caller[launched],
            2 * event[launched],
            Edge.kernel_launch_delay,
            (start - called)[launched],
            NONE,
        )
        edges.many(
            2 * last[chained] + 1,
            2 * event[chained],
            Edge.kernel_kernel_delay,
            (start - ended)[chained],
            before[chained],
        )
        if launch_edges:
            others = edges.within[call] & ~launched
            edges.many(2 * caller[others], 2 * event[others], Edge.dependency, 0, NONE)


def _alone(trace: Trace) -> Bools:
    """Which rows are work that was alone in its stream's queue at its launch, and left it empty at its start."""
    single, left = np.zeros(len(trace), np.bool_), np.zeros(len(trace), np.bool_)
    for _, queue in queues(trace):
        launched = queue.works != queue.rows
        single[queue.works[launched & (queue.length == 1)]] = True
        left[queue.works[~launched & (queue.length == 0)]] = True
    return single & left


_COLUMNS = ("rows", "source", "target", "kind", "weight", "event")
_FLOWS = (Edge.dependency, Edge.kernel_launch_delay, Edge.sync_dependency)


def save_critical_graph(graph: CriticalGraph, path: Path) -> None:
    """Keeps a graph, with the weights that it has, as arrays (.npz); the trace stays where it is.

    Raises:
        OutputError: the path cannot be written.
    """
    content = io.BytesIO()
    arrays = {name: getattr(graph, name) for name in _COLUMNS}
    arrays |= {"index": graph.trace.index[graph.rows], "time": graph.time}
    arrays["data_load_events"] = np.array(graph.data_load_events)
    np.savez_compressed(content, allow_pickle=False, **arrays)
    write_whole(path, [content.getvalue()])


def load_graph(path: Path, trace: Trace) -> CriticalGraph:
    """The graph that was kept in a file.

    Args:
        path: where `save_graph` wrote it.
        trace: the trace that it is of, read with the same options.

    Raises:
        InputError: the file cannot be read.
        FormatError: it is no graph.
        DataError: it is of another trace.
    """
    try:
        arrays = read_arrays(path, (*_COLUMNS, "index", "time", "data_load_events"))
    except FormatError as error:
        raise FormatError(f"{error}: save a critical path graph with --option save=FILE.npz") from None
    index, time = arrays.pop("index"), arrays.pop("time")
    rows = arrays["rows"]
    known = not len(rows) or (rows.min() >= 0 and rows.max() < len(trace))
    loads = str(arrays.pop("data_load_events"))
    graph = CriticalGraph(trace=trace, data_load_events=loads, **arrays)
    if not known or not np.array_equal(trace.index[rows], index) or not np.array_equal(graph.time, time):
        raise DataError(f"{path}: of another trace than {trace.path}, or of one read with other options")
    return graph


def overlaid(graph: CriticalGraph) -> Iterator[bytes]:
    """A copy of the trace's file in which `args.critical` is 1 for the events on the path, piece by piece.

    Arrows, flow events of category `critical_path`, stand for the edges of the path that are no event's own:
    dependencies, launches and synchronisation; their `args` have the weight in microseconds and the type. Times of
    the trace's events are exact; those of events that a trace does not keep have the digits of a float.

    Args:
        graph: a graph of a trace whose file is still where it was.

    Raises:
        InputError: the file is gone.
        DataError: it is not the file that was read.
    """
    found = graph.path()
    on_path = np.unique(graph.rows[found.nodes // 2])
    return marked_copy(
        graph.trace,
        {row: {"critical": 1} for row in on_path.tolist()},
        lambda places: _arrows(graph, found.edges.tolist(), places),
    )


def _arrows(graph: CriticalGraph, edges: list[int], places: _MarkedRows) -> Iterator[str]:
    time = graph.time
    for number, edge in enumerate(edges):
        if graph.kind[edge] not in _FLOWS:
            continue
        kind, weight = Edge(int(graph.kind[edge])).name, int(graph.weight[edge]) / US
        named = {"cat": "critical_path", "name": "critical_path", "id": number}
        for phase, node in (("s", int(graph.source[edge])), ("f", int(graph.target[edge]))):
            flow = {"ph": phase, **named, **places[int(graph.rows[node // 2])]}
            flow |= {"bp": "e", "args": {"weight": weight, "type": kind, "critical": 1}}
            yield exact_json(flow, graph.trace, int(time[node]))


TITLES = ("rank", "event_idx", "duration", "type", "s_name", "cat", "pid", "tid", "stream", "bound_by")


def critical_path(
    traces: TraceSet,
    *,
    annotation: str = "",
    instance: int = 0,
    last: int = NONE,
    launch_edges: bool = False,
    data_load_events: str = "",
    scale: str = "",
    save: str = "",
) -> AnswerTable:
    """The longest chain of dependencies of each rank, in order of time.

    Columns: `rank`; `event_idx` of the event whose time is spent, in the file, or -1; `duration` microseconds;
    `type` of the edge (`critical_path_operator`, `_dependency`, `_kernel_launch_delay`, `_kernel_kernel_delay`,
    `_sync_dependency`; see `critical_graph`); `s_name`, `cat`, `pid`, `tid`, `stream` of the event; `bound_by`
    (see the summary).

    Args:
        traces: the job's.
        annotation: part of a row's name within which host events begin; empty for the whole trace.
        instance: which of these rows, from 0 on.
        last: the last of them, for several; -1 for one.
        launch_edges: an edge from every call to its kernel, of no time where that waited for something else.
        data_load_events: a regular expression: host events whose name it matches anywhere load data.
        scale: what if: NAME=FACTOR, several by commas; NAME a type of edge without `critical_path_`, or a
            `bound_by`.
        save: file for the graph (.npz), of one rank.

    Raises:
        UsageError: a wrong annotation, instance or scale, or a file for the graphs of several ranks.
        OutputError: a file cannot be written.
    """
    window: dict[str, Any] = {"annotation": annotation, "instance": instance, "last": last}
    window |= {"launch_edges": launch_edges, "data_load_events": data_load_events}
    rows: list[tuple[Any, ...]] = []
    if save:
        _one_rank(traces)
    notes = list(traces.notes)
    for rank, graph in _graphs(traces, notes, scale=scale, **window):
        if save:
            save_critical_graph(graph, Path(save))
        rows += path_rows(rank, graph)
    return from_rows(TITLES, rows, notes)


def critical_path_summary(
    traces: TraceSet,
    *,
    annotation: str = "",
    instance: int = 0,
    last: int = NONE,
    launch_edges: bool = False,
    data_load_events: str = "",
    scale: str = "",
) -> AnswerTable:
    """What bounds each rank: the time on its critical path by what it is spent on.

    Columns: `rank`; `bound_by`; `duration` microseconds on the path; `percentage` of its length. It is bound by
    the host (`cpu_bound`; `data_loading` in events that are said to load data), by kernels that compute,
    communicate, or copy and set (`gpu_compute_bound`, `gpu_communication_bound`, `gpu_memory_bound`), by what lies
    between a call and its kernel on an idle stream (`gpu_kernel_launch_overhead`), or between two kernels of a
    busy one (`gpu_kernel_kernel_overhead`).

    Args:
        traces: the job's.
        annotation: as for the critical path, and so are the others.
        instance: which row with the annotation.
        last: the last such row.
        launch_edges: an edge from every call to its kernel.
        data_load_events: names of host events that load data.
        scale: what if, NAME=FACTOR.

    Raises:
        UsageError: a wrong annotation, instance or scale.
    """
    window: dict[str, Any] = {"annotation": annotation, "instance": instance, "last": last}
    window |= {"launch_edges": launch_edges, "data_load_events": data_load_events}
    rows, notes = [], list(traces.notes)
    for rank, graph in _graphs(traces, notes, scale=scale, **window):
        rows += [(rank, *row) for row in path_bounds(graph)]
    return from_rows(("rank", "bound_by", "duration", "percentage"), rows, notes)


def trace_with_path(traces: TraceSet, *, save: str = "", **options: Any) -> Iterator[bytes]:
    """The trace file of one rank with its critical path marked (see `overlaid`).

    Args:
        traces: one rank's.
        save: as for the critical path.
        options: further options of the critical path.

    Raises:
        UsageError: several ranks, or as for the critical path.
        InputError: the file is gone or cannot be read.
    """
    _one_rank(traces)
    ((_, graph),) = _graphs(traces, [], **options)
    if save:
        save_critical_graph(graph, Path(save))
    return overlaid(graph)


def path_rows(rank: int, graph: CriticalGraph) -> Iterator[tuple[Any, ...]]:
    """The edges of a graph's path as rows under `TITLES`."""
    trace, edges = graph.trace, graph.path().edges
    event, bound = graph.event[edges], graph.bound[edges]
    titles = {one.value: one.title for one in Bound}
    kinds_of = {one.value: f"critical_path_{one.name}" for one in Edge}
    # Of edges without an event, what stands here is of the last row, and is not taken.
    places = zip(*(column[event].tolist() for column in (trace.pid, trace.tid, trace.stream)), strict=True)
    texts = zip(*(column[event].tolist() for column in (trace.name, trace.category)), strict=True)
    for row, index, spent, kind, place, (name, category), by in zip(
        event.tolist(), trace.index[event].tolist(), (graph.weight[edges] / US).tolist(),
        graph.kind[edges].tolist(), places, texts, bound.tolist(), strict=True,
    ):  # fmt: skip
        if row == NONE:
            yield (rank, NONE, spent, kinds_of[kind], "", "", NONE, NONE, NONE, titles[by])
        else:
            what = trace.strings[name], trace.strings[category]
            yield (rank, index, spent, kinds_of[kind], *what, *place, titles[by])


def path_bounds(graph: CriticalGraph) -> list[tuple[str, float, float]]:
    """What a graph's path is bound by: name, microseconds and percentage of the path, the largest first."""
    path = graph.path()
    spent = np.bincount(graph.bound[path.edges], graph.weight[path.edges], len(Bound)) / US
    whole = max(path.length / US, 1 / US)
    order = sorted((bound for bound in Bound if spent[bound]), key=lambda bound: -spent[bound])
    return [(bound.title, float(spent[bound]), float(100 * spent[bound] / whole)) for bound in order]


def _one_rank(traces: TraceSet) -> None:
    if len(traces) > 1:
        raise UsageError(f"critical-path: a file is of one rank, and there are {len(traces)}: add --ranks 0")


def _graphs(
    traces: TraceSet, notes: list[str], *, scale: str = "", **window: Any
) -> Iterator[tuple[int, CriticalGraph]]:
    """The graph of each rank; notes get a line for each that has none, unless none of them has one."""
    factors, without = _factors(scale), list[UsageError]()
    for rank, trace in traces.items():
        try:
            graph = critical_graph(trace, **window)
        except UsageError as error:
            without.append(error)
            if len(without) == len(traces):
                raise
            notes.append(f"rank {rank}: {error}")
            continue
        for what, factor in factors:
            if isinstance(what, Edge):
                graph = graph.scaled(factor, edges=[what])
            else:
                graph = graph.scaled(factor, bounds=[what])
        yield rank, graph


def _factors(text: str) -> list[tuple[Edge | Bound, float]]:
    """What is scaled by what, from "cpu_bound=0.5,kernel_launch_delay=0"."""
    names: dict[str, Edge | Bound] = {kind.name: kind for kind in Edge}
    names |= {bound.name: bound for bound in Bound if bound}
    found = []
    for part in filter(None, text.split(",")):
        name, _, factor = part.partition("=")
        if name not in names:
            raise UnknownNameError("part of the critical path", name, list(names))
        try:
            found.append((names[name], float(factor)))
        except ValueError:
            raise UsageError(f"scale '{part}': write NAME=FACTOR, such as {name}=0.5") from None
    return found
