"""A critical path in files: the graph, kept and restored, and a copy of the trace in which the path is marked."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from echograph.errors import DataError, FormatError, InputError
from echograph.ir.files import write_whole
from echograph.profiler.analyses.critical_graph import CriticalGraph, Edge
from echograph.profiler.analyses.work import US
from echograph.profiler.traces.events import EventStream
from echograph.profiler.traces.trace import Trace

_COLUMNS = ("rows", "source", "target", "kind", "weight", "event")
_FLOWS = (Edge.dependency, Edge.kernel_launch_delay, Edge.sync_dependency)
_PS_DIGITS = 6


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
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in (*_COLUMNS, "index", "time", "data_load_events")}
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except (EOFError, ValueError, KeyError, zipfile.BadZipFile):
        raise FormatError(f"{path}: no critical path graph; save one with --option save=FILE.npz") from None
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
    trace, found = graph.trace, graph.path()
    on_path = np.unique(graph.rows[found.nodes // 2])
    names = dict(zip(trace.index[on_path].tolist(), map(trace.text, on_path.tolist()), strict=True))
    starts = dict(zip(trace.index.tolist(), trace.start.tolist(), strict=True))
    stream, header = EventStream(Path(trace.path), dict), EventStream(Path(trace.path)).head()
    yield (json.dumps(header)[:-1] + (", " if header else "") + '"traceEvents": [').encode()
    threads: dict[int, dict[str, Any]] = {}
    separator = "\n"
    for index, event in enumerate(chain.from_iterable(stream)):
        marked = event
        if index in names:
            if event.get("name") != names[index]:
                raise DataError(f"{trace.path}: changed since it was read: event {index} is another; read anew")
            threads[index] = {"pid": event["pid"], "tid": event["tid"]}
            marked = event | {"args": event.get("args", {}) | {"critical": 1}}
        yield (separator + _exact(marked, trace, starts.get(index))).encode()
        separator = ",\n"
    for number, edge in enumerate(found.edges.tolist()):
        if graph.kind[edge] in _FLOWS:
            yield "".join(separator + arrow for arrow in _arrow(graph, edge, number, threads)).encode()
    after = {key: value for key, value in stream.header.items() if key not in header}
    yield ("\n]" + (", " + json.dumps(after)[1:] if after else "}") + "\n").encode()


def _arrow(graph: CriticalGraph, edge: int, number: int, threads: dict[int, dict[str, Any]]) -> Iterator[str]:
    kind, weight = Edge(int(graph.kind[edge])).name, int(graph.weight[edge]) / US
    time, named = graph.time, {"cat": "critical_path", "name": "critical_path", "id": number}
    for phase, node in (("s", int(graph.source[edge])), ("f", int(graph.target[edge]))):
        flow = {"ph": phase, **named, **threads[int(graph.trace.index[graph.rows[node // 2]])]}
        flow |= {"bp": "e", "args": {"weight": weight, "type": kind, "critical": 1}}
        yield _exact(flow, graph.trace, int(time[node]))


def _exact(event: dict[str, Any], trace: Trace, start: int | None) -> str:
    """An event as JSON; a float has too few digits for nanoseconds since 1970."""
    if start is None:
        return json.dumps(event)
    rest = json.dumps({key: value for key, value in event.items() if key != "ts"})
    return f'{rest[:-1]}, "ts": {Decimal(trace.origin + start).scaleb(-_PS_DIGITS):f}}}'
