"""What ran when, rank by rank, on lanes that a page can zoom into.

A lane is a stream, one depth of a thread's call stack, or the critical path. So that a page stays small whatever
the trace, spans shorter than a grain of time are joined with their neighbours: the smallest grain (a power of two)
is taken with which everything is within `MOST_SPANS`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from echograph.ir.columns import Int64
from echograph.profiler.analyses.critical_graph import Bound, CriticalGraph
from echograph.profiler.analyses.work import Kind, kinds
from echograph.profiler.page.frame import key
from echograph.profiler.traces.stacks import call_stacks
from echograph.profiler.traces.trace import CALLS, Trace

MOST_SPANS = 40_000
MOST_RANKS, _STREAMS = 16, 8
_NS, _NAME = 1000, 120
# Colours of the page's style.
_HOST, _CALL, _STEP, _OTHER = 7, 5, 8, 6
_OF_KIND = {Kind.COMPUTATION: 0, Kind.COMMUNICATION: 1, Kind.MEMORY: 2, Kind.OTHER: _OTHER}
_OF_BOUND = {
    Bound.cpu_bound: _HOST,
    Bound.gpu_compute_bound: 0,
    Bound.gpu_communication_bound: 1,
    Bound.gpu_memory_bound: 2,
    Bound.gpu_kernel_launch_overhead: 3,
    Bound.gpu_kernel_kernel_overhead: 4,
}
_KEY = {
    "computation": 0,
    "communication": 1,
    "memory": 2,
    "operators on the host": _HOST,
    "calls to the runtime": _CALL,
    "annotations and steps": _STEP,
    "path: launch delay": 3,
    "path: between kernels": 4,
}


class Spans(NamedTuple):
    """Spans of a lane by their start; several that were joined stand as one.

    Attributes:
        start: picoseconds.
        end: picoseconds.
        name: code of what runs, of the longest where several were joined.
        colour: of the page's style.
        many: how many it stands for.
    """

    start: Int64
    end: Int64
    name: Int64
    colour: Int64
    many: Int64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lane:
    """A row of the timeline.

    Attributes:
        rank: whose.
        label: which stream or thread; the same for all depths of a thread.
        spans: what ran.
        strings: texts that their names stand for.
    """

    rank: int
    label: str
    spans: Spans
    strings: tuple[str, ...]


def timeline(traces: Mapping[int, Trace], graphs: Mapping[int, CriticalGraph]) -> str:
    """The timeline as HTML; `script` draws it.

    Args:
        traces: by rank; the first `MOST_RANKS` are shown.
        graphs: of the ranks whose critical path is shown.
    """
    shown = list(traces)[:MOST_RANKS]
    lanes = [lane for rank in shown for lane in lanes_of(rank, traces[rank], graphs.get(rank), len(shown))]
    if not lanes:
        return ""
    lanes, grain = coarse(lanes, MOST_SPANS)
    left_out = f" Ranks {shown[0]} to {shown[-1]} of {len(traces)}." if len(shown) < len(traces) else ""
    joined = f" Spans shorter than {grain / 1e6:.3g} us are joined with their neighbours." if grain else ""
    return (
        f"{key(list(_KEY), list(_KEY.values()))}"
        '<div class="timeline" tabindex="0" id="timeline"><div class="bar-top"><button data-zoom="0.5" '
        'aria-label="zoom in">+</button><button data-zoom="2" aria-label="zoom out">−</button>'
        '<button data-zoom="0">all</button><span class="where"></span></div>'
        '<div class="lanes"><canvas></canvas></div><div class="told">Point at a span.</div></div>'
        '<p class="note">Drag to move; + and −, Ctrl and the wheel, or a double click to zoom.'
        f"{escape(left_out + joined)} <noscript>The timeline needs JavaScript; the tables below do not.</noscript>"
        f'</p><script type="application/json" id="lanes">{_json(_content(lanes))}</script>'
    )


def script() -> str:
    """The JavaScript that draws a timeline."""
    return Path(__file__).with_name("timeline.js").read_text()


def lanes_of(rank: int, trace: Trace, graph: CriticalGraph | None, ranks: int) -> Iterator[Lane]:
    """The lanes of a rank: its critical path, the stacks of its busiest threads, its busiest streams.

    Args:
        rank: its number.
        trace: what ran.
        graph: of its critical path, if that is shown.
        ranks: how many ranks share the page: the more, the fewer threads of each.
    """
    if graph is not None:
        found = graph.path()
        spent = found.edges[graph.weight[found.edges] > 0]
        colour = np.array([_OF_BOUND.get(Bound(int(b)), _OTHER) for b in graph.bound[spent]], np.int64)
        name = np.where(graph.event[spent] >= 0, trace.name[graph.event[spent]], len(trace.strings))
        start = graph.time[graph.source[spent]]
        spans = _spans(start, np.maximum(graph.time[graph.target[spent]], start), name, colour)
        yield Lane(rank=rank, label="critical path", spans=spans, strings=(*trace.strings, "launch or gap"))
    threads, depths = (3, 4) if ranks <= 2 else (1, 3)
    yield from _thread_lanes(rank, trace, threads, depths)
    yield from _stream_lanes(rank, trace)


def _thread_lanes(rank: int, trace: Trace, threads: int, depths: int) -> Iterator[Lane]:
    host = trace.rows(~trace.of_category({"python_function"}))
    stacks = call_stacks(host)
    rows = stacks.order[stacks.depth[stacks.order] < depths]
    outer = rows[stacks.depth[rows] == 0]
    pairs, at = np.unique(np.stack((host.pid[outer], host.tid[outer])), axis=1, return_inverse=True)
    busy = np.bincount(at, host.duration[outer], pairs.shape[1])
    for chosen in np.argsort(-busy, kind="stable")[:threads]:
        pid, tid = pairs[:, chosen].tolist()
        own = rows[(host.pid[rows] == pid) & (host.tid[rows] == tid)]
        colour = np.where(host.of_category(CALLS)[own], _CALL, _HOST)
        colour[host.of_category({"user_annotation"})[own]] = _STEP
        for depth in range(depths):
            of = stacks.depth[own] == depth
            if of.any():
                rows_here = own[of]
                spans = _spans(host.start[rows_here], host.end[rows_here], host.name[rows_here], colour[of])
                label = f"thread {_place(tid, host.strings)}"
                yield Lane(rank=rank, label=label, spans=spans, strings=host.strings)


def _place(tid: int, strings: tuple[str, ...]) -> int | str:
    """A thread as the file names it: one that is text is the negative of a code (see `Trace`)."""
    return strings[-2 - tid] if 0 <= -2 - tid < len(strings) else tid


def _stream_lanes(rank: int, trace: Trace) -> Iterator[Lane]:
    rows = np.flatnonzero(trace.on_device)
    streams, at = np.unique(trace.stream[rows], return_inverse=True)
    busy = np.bincount(at, trace.duration[rows], len(streams))
    of_kind = np.array([_OF_KIND[kind] for kind in sorted(_OF_KIND)])
    colour = of_kind[kinds(trace)[rows]]
    for chosen in np.sort(np.argsort(-busy, kind="stable")[:_STREAMS]):
        of = at == chosen
        own = rows[of]
        spans = _spans(trace.start[own], trace.end[own], trace.name[own], colour[of])
        yield Lane(rank=rank, label=f"stream {streams[chosen]}", spans=spans, strings=trace.strings)


def _spans(start: Int64, end: Int64, name: npt.NDArray[Any], colour: npt.NDArray[Any]) -> Spans:
    order = np.argsort(start, kind="stable")
    one = np.ones(len(order), np.int64)
    return Spans(start[order], end[order], name[order].astype(np.int64), colour[order].astype(np.int64), one)


def coarse(lanes: list[Lane], most: int) -> tuple[list[Lane], int]:
    """The lanes with so many spans at most, and the grain with which they are: picoseconds, 0 for none.

    The longest spans of a lane are never lost: only what is shorter than the grain is joined.

    Args:
        lanes: as they were traced.
        most: spans in all.
    """
    grain, found = 0, lanes
    while sum(len(lane.spans.start) for lane in found) > most:
        grain = 2 * grain or _NS
        found = [
            Lane(rank=lane.rank, label=lane.label, spans=_joined(lane.spans, grain), strings=lane.strings)
            for lane in lanes
        ]
    return found, grain


def _joined(spans: Spans, grain: int) -> Spans:
    """Short spans that begin in the same grain of time become one, of the name and colour of the longest."""
    long = spans.end - spans.start >= grain
    cell = spans.start // grain
    # A long span stands alone, and parts what is before it from what is after.
    new = np.concatenate(([True], (cell[1:] != cell[:-1]) | long[1:] | long[:-1]))[: len(cell)]
    group = np.cumsum(new) - 1
    first = np.flatnonzero(new)
    if not len(first):
        return spans
    by_length = np.lexsort((spans.start - spans.end, group))
    longest = by_length[first]
    return Spans(
        spans.start[first],
        np.maximum.reduceat(spans.end, first),
        spans.name[longest],
        spans.colour[longest],
        np.add.reduceat(spans.many, first),
    )


def _content(lanes: list[Lane]) -> dict[str, Any]:
    """Lanes for the script: nanoseconds, starts as the distance from the start before."""
    first = min(int(lane.spans.start[0]) for lane in lanes)
    names: dict[str, int] = {}
    rows = []
    for lane in lanes:
        spans = lane.spans
        start, end = (spans.start - first) // _NS, -((first - spans.end) // _NS)
        texts = [lane.strings[code][:_NAME] for code in spans.name.tolist()]
        several = np.flatnonzero(spans.many > 1)
        rows.append(
            {
                "rank": lane.rank,
                "label": lane.label,
                "start": np.diff(start, prepend=0).tolist(),
                "dur": (end - start).tolist(),
                "name": [names.setdefault(text, len(names)) for text in texts],
                "colour": "".join(map(str, spans.colour.tolist())),
                "count": [several.tolist(), spans.many[several].tolist()],
            }
        )
    last = max(int(lane.spans.end.max()) for lane in lanes)
    return {"span": -((first - last) // _NS), "origin": first // _NS, "names": list(names), "lanes": rows}


def _json(content: dict[str, Any]) -> str:
    """JSON that cannot end the element which it stands in."""
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
