"""The critical path of each rank: what a step would have to do faster to end sooner."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from echograph.errors import DataError, FormatError, UnknownNameError, UsageError
from echograph.ir.files import read_arrays, write_whole
from echograph.profiler.analyses.critical_graph import Bound, CriticalGraph, Edge, critical_graph
from echograph.profiler.analyses.marked_copy import _MarkedRows, exact_json, marked_copy
from echograph.profiler.analyses.table import AnswerTable, from_rows
from echograph.profiler.analyses.work import US
from echograph.profiler.traces.trace import NONE, Trace, TraceSet

_COLUMNS = ("rows", "source", "target", "kind", "weight", "event")
_FLOWS = (Edge.dependency, Edge.kernel_launch_delay, Edge.sync_dependency)


def save_graph(graph: CriticalGraph, path: Path) -> None:
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
            save_graph(graph, Path(save))
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
        rows += [(rank, *row) for row in breakdown(graph)]
    return from_rows(("rank", "bound_by", "duration", "percentage"), rows, notes)


def trace_with_path(traces: TraceSet, *, save: str = "", **options: Any) -> Iterator[bytes]:
    """The trace file of one rank with its critical path marked (see `critical_file.overlaid`).

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
        save_graph(graph, Path(save))
    return overlaid(graph)


def path_rows(rank: int, graph: CriticalGraph) -> Iterator[tuple[Any, ...]]:
    """The edges of a graph's path as rows under `TITLES`."""
    trace, bound = graph.trace, graph.bound
    for edge in graph.path().edges.tolist():
        row, kind = int(graph.event[edge]), Edge(int(graph.kind[edge])).name
        spent = (int(graph.weight[edge]) / US, f"critical_path_{kind}")
        of_event: tuple[object, ...] = ("", "", NONE, NONE, NONE)
        if row != NONE:
            of_event = (trace.text(row), trace.strings[trace.category[row]])
            of_event += tuple(int(column[row]) for column in (trace.pid, trace.tid, trace.stream))
        index = int(trace.index[row]) if row != NONE else NONE
        yield (rank, index, *spent, *of_event, Bound(int(bound[edge])).title)


def breakdown(graph: CriticalGraph) -> list[tuple[str, float, float]]:
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
