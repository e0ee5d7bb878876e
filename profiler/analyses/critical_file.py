"""A critical path in files: the graph, kept and restored, and a copy of the trace in which the path is marked."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from echograph.errors import DataError, FormatError
from echograph.ir.files import read_arrays, write_whole
from echograph.profiler.analyses.critical_graph import CriticalGraph, Edge
from echograph.profiler.analyses.marked_copy import Places, exact_json, marked_copy
from echograph.profiler.analyses.work import US
from echograph.profiler.traces.trace import Trace

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


def _arrows(graph: CriticalGraph, edges: list[int], places: Places) -> Iterator[str]:
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
