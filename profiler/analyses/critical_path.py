"""The critical path of each rank: what a step would have to do faster to end sooner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from echograph.errors import UnknownNameError, UsageError
from echograph.profiler.analyses.critical_edges import critical_graph
from echograph.profiler.analyses.critical_file import overlaid, save_graph
from echograph.profiler.analyses.critical_graph import Bound, CriticalGraph, Edge
from echograph.profiler.analyses.table import Table, from_rows
from echograph.profiler.analyses.work import US
from echograph.profiler.traces.trace import NONE, TraceSet

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
) -> Table:
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
) -> Table:
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
