"""What ran when in traces: a lane is a stream, one depth of a thread's stack, or the critical path of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from echograph.ir.columns import Int64
from echograph.profiler.analyses.critical_graph import Bound, CriticalGraph
from echograph.profiler.analyses.work import Kind, kinds
from echograph.profiler.page.lanes import Lane, Spans, drawing
from echograph.profiler.traces.stacks import call_stacks
from echograph.profiler.traces.trace import CALLS, Trace

MOST_SPANS = 40_000
MOST_RANKS, _STREAMS = 16, 8
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


def timeline(traces: Mapping[int, Trace], graphs: Mapping[int, CriticalGraph]) -> str:
    """The timeline as HTML; `lanes.script` draws it.

    Args:
        traces: by rank; the first `MOST_RANKS` are shown.
        graphs: of the ranks whose critical path is shown.
    """
    shown = list(traces)[:MOST_RANKS]
    lanes = [lane for rank in shown for lane in lanes_of(rank, traces[rank], graphs.get(rank), len(shown))]
    left_out = f" Ranks {shown[0]} to {shown[-1]} of {len(traces)}." if len(shown) < len(traces) else ""
    return drawing(lanes, MOST_SPANS, _KEY, left_out)


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
        yield Lane(
            head=f"rank {rank}", label="critical path", spans=spans, strings=(*trace.strings, "launch or gap")
        )
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
                label = f"thread {host.process(int(tid))}"
                yield Lane(head=f"rank {rank}", label=label, spans=spans, strings=host.strings)


def _stream_lanes(rank: int, trace: Trace) -> Iterator[Lane]:
    rows = np.flatnonzero(trace.on_device)
    place, streams = trace.streams()
    several, at = len(np.unique(trace.pid[rows])) > 1, place[rows]
    busy = np.bincount(at, trace.duration[rows], len(streams))
    of_kind = np.array([_OF_KIND[kind] for kind in sorted(_OF_KIND)])
    colour = of_kind[kinds(trace)[rows]]
    for chosen in np.sort(np.argsort(-busy, kind="stable")[:_STREAMS]):
        of = at == chosen
        own = rows[of]
        if not len(own):
            continue
        spans = _spans(trace.start[own], trace.end[own], trace.name[own], colour[of])
        label = f"stream {streams[chosen].number}"
        label = f"device {trace.process(streams[chosen].device)}, {label}" if several else label
        yield Lane(head=f"rank {rank}", label=label, spans=spans, strings=trace.strings)


def _spans(start: Int64, end: Int64, name: npt.NDArray[Any], colour: npt.NDArray[Any]) -> Spans:
    order = np.argsort(start, kind="stable")
    one = np.ones(len(order), np.int64)
    return Spans(start[order], end[order], name[order].astype(np.int64), colour[order].astype(np.int64), one)
