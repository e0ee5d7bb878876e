"""The whole picture of a job's traces on one page, and one analysis on one page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt

from echograph.errors import EchoError
from echograph.ir.columns import Int64
from echograph.profiler.analyses import ANALYSES
from echograph.profiler.analyses.critical_path import (
    TITLES,
    Bound,
    CriticalGraph,
    critical_graph,
    path_bounds,
    path_rows,
)
from echograph.profiler.analyses.table import AnswerTable, from_rows
from echograph.profiler.analyses.work import KernelKind, kernel_kinds
from echograph.profiler.page.frame import document, folded, notes, table, table_script, tiles
from echograph.profiler.page.lanes import Spans, TimelineTrack, drawing, script
from echograph.profiler.page.plots import draw
from echograph.profiler.traces.memory_snapshot import WHAT as SNAPSHOT
from echograph.profiler.traces.relations import call_stacks
from echograph.profiler.traces.trace import CALLS, Trace, TraceSet
from echograph.progress import Progress, silent
from echograph.units import format_count, format_time

MOST_SPANS = 40_000
MOST_RANKS, _STREAMS = 16, 8
# Colours of the page's style.
_HOST, _CALL, _STEP, _OTHER = 7, 5, 8, 6
_OF_KIND = {KernelKind.COMPUTATION: 0, KernelKind.COMMUNICATION: 1, KernelKind.MEMORY: 2, KernelKind.OTHER: _OTHER}
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


def lanes_of(rank: int, trace: Trace, graph: CriticalGraph | None, ranks: int) -> Iterator[TimelineTrack]:
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
        yield TimelineTrack(
            head=f"rank {rank}", label="critical path", spans=spans, strings=(*trace.strings, "launch or gap")
        )
    threads, depths = (3, 4) if ranks <= 2 else (1, 3)
    yield from _thread_lanes(rank, trace, threads, depths)
    yield from _stream_lanes(rank, trace)


def _thread_lanes(rank: int, trace: Trace, threads: int, depths: int) -> Iterator[TimelineTrack]:
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
                yield TimelineTrack(head=f"rank {rank}", label=label, spans=spans, strings=host.strings)


def _stream_lanes(rank: int, trace: Trace) -> Iterator[TimelineTrack]:
    rows = np.flatnonzero(trace.on_device)
    place, streams = trace.streams()
    several, at = len(np.unique(trace.pid[rows])) > 1, place[rows]
    busy = np.bincount(at, trace.duration[rows], len(streams))
    of_kind = np.array([_OF_KIND[kind] for kind in sorted(_OF_KIND)])
    colour = of_kind[kernel_kinds(trace)[rows]]
    for chosen in np.sort(np.argsort(-busy, kind="stable")[:_STREAMS]):
        of = at == chosen
        own = rows[of]
        if not len(own):
            continue
        spans = _spans(trace.start[own], trace.end[own], trace.name[own], colour[of])
        label = f"stream {streams[chosen].number}"
        label = f"device {trace.process(streams[chosen].device)}, {label}" if several else label
        yield TimelineTrack(head=f"rank {rank}", label=label, spans=spans, strings=trace.strings)


def _spans(start: Int64, end: Int64, name: npt.NDArray[Any], colour: npt.NDArray[Any]) -> Spans:
    order = np.argsort(start, kind="stable")
    one = np.ones(len(order), np.int64)
    return Spans(start[order], end[order], name[order].astype(np.int64), colour[order].astype(np.int64), one)


# What memory snapshots answer: nothing ran in them.
_OF_SNAPSHOTS = {"memory-timeline", "memory-peaks", "memory-holders"}
_DRAWN, _DRAWN_ALONE, _ROWS_ALONE = 16, 60, 1000
# More calls than this on one rank and its critical path is left to the command: it would take minutes.
_MOST_EVENTS = 2_000_000


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page.

    Attributes:
        title: of the part.
        text: what it shows.
        analyses: whose tables and plots are in it.
        options: of each analysis, where they are not its own.
        of: the format whose traces alone it is about; empty: all.
        reads_file: whether its analyses read the files once more, which takes minutes where these are large.
    """

    title: str
    text: str
    analyses: tuple[str, ...]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    reads_file: bool = False
    of: str = ""


SECTIONS = (
    Section(
        title="Where the devices' time goes",
        text="From the first to the last work of each rank: something computes, something runs that no "
        "computation hides, or nothing runs.",
        analyses=("temporal-breakdown", "kernel-types"),
    ),
    Section(
        title="Ranks",
        text="What each rank's time is spent on: alone, beside one another, or nothing.",
        analyses=("rank-times",),
    ),
    Section(
        title="Kernels",
        text="What runs on the devices, the costliest first, and how long single launches take.",
        analyses=("kernels", "kernel-durations"),
    ),
    Section(
        title="From kernels to code",
        text="What the operators compute, by shape: how fast that is beside what the device could, and which of "
        "them take longer than the device's cost model says.",
        analyses=("slow-kernels", "shapes"),
        reads_file=True,
    ),
    Section(
        title="Communication beside computation",
        text="The share of each rank's communication during which it also computes.",
        analyses=("overlap",),
    ),
    Section(
        title="Idle streams",
        text="Why a stream stands still before its next work: that was launched too late (host wait), the device "
        "needs a moment between two (kernel wait), or it waits for something else.",
        analyses=("idle", "idle-intervals"),
    ),
    Section(
        title="Launches",
        text="Calls that launch work, and the time from the end of a call to the start of its work.",
        analyses=("launches", "launch-summary"),
    ),
    Section(
        title="Queues",
        text="How much launched work has not started: an empty queue is a device that waits for the host.",
        analyses=("queue-length", "queue-length-summary", "queue-full"),
    ),
    Section(
        title="Memory",
        text="The bandwidth of copies and sets, and what the allocator holds where the profile says it.",
        analyses=("memory-bandwidth", "memory-bandwidth-summary", "memory-timeline", "memory-peaks"),
    ),
    Section(
        title="What held memory",
        text="What was alive when most was allocated, by the line that allocated it: of memory snapshots.",
        analyses=("memory-holders",),
        of=SNAPSHOT,
    ),
    Section(
        title="Critical path",
        text="The longest chain of dependencies of each rank: what, made faster, would end the trace sooner. It "
        "is the first lane of each rank in the timeline.",
        analyses=("critical-path-summary", "critical-path"),
    ),
    Section(
        title="Between ranks",
        text="Which ranks others wait for, what the collectives take once all ranks are there and how far apart "
        "these come, and the longest chain of dependencies through all ranks.",
        analyses=(
            "stragglers",
            "communication",
            "collectives",
            "cross-rank-critical-path-summary",
            "cross-rank-critical-path",
        ),
    ),
    Section(
        title="Steps",
        text="The profiler's steps on the host, and what their parts take on the devices.",
        analyses=("steps", "phases"),
    ),
    Section(
        title="Host",
        text="What takes the host's time itself, and what the user's annotations cover on it.",
        analyses=("call-stacks", "annotations"),
        options={"annotations": {"side": "host"}},
    ),
)


def report(traces: TraceSet, title: str, progress: Progress = silent) -> str:
    """A page with the timeline, all analyses with a plot each, and what is missing.

    An analysis that cannot be made of these traces is a line among what is missing.

    Args:
        traces: the job's.
        title: of the page.
        progress: told what is being analysed.

    Returns:
        HTML that loads nothing.
    """
    missing = list(traces.notes)
    formats = {str(trace.header.get("format", "")) for trace in traces.values()}
    graphs: dict[int, CriticalGraph] = {}
    if formats != {SNAPSHOT}:
        progress("finding the critical path")
        graphs = dict(_graphs(traces, missing))
    answers: dict[str, AnswerTable] = {}
    large = max(map(len, traces.values())) > _MOST_EVENTS
    for section in SECTIONS:
        if section.of and section.of not in formats:
            continue
        if formats == {SNAPSHOT} and not set(section.analyses) & _OF_SNAPSHOTS:
            continue
        if large and section.reads_file:
            missing.append(
                f"{' and '.join(section.analyses)}: the traces are too large for this page: ask by name"
            )
            continue
        for name in section.analyses:
            if formats == {SNAPSHOT} and name not in _OF_SNAPSHOTS:
                continue
            if name == "memory-peaks" and not len(answers.get("memory-timeline", ())):
                # It would read the files again to find nothing.
                continue
            progress(f"analysing {name}")
            _answer(traces, name, section.options.get(name, {}), graphs, answers, missing)
    progress("drawing")
    parts = [f"<h1>{escape(title)}</h1>", _tiles(traces, answers)]
    parts.append(f"<h2>Timeline</h2>{timeline(traces, graphs)}" if _any_row(traces) else "")
    parts += [_section(section, answers) for section in SECTIONS]
    parts.append(notes(missing, "What is missing"))
    return document(title, parts, [script(), table_script()])


def page_of(name: str, answer: AnswerTable, title: str) -> str:
    """A page with one analysis: its plot and its table.

    Args:
        name: of the analysis.
        answer: what it answered.
        title: of the page.
    """
    empty = "" if len(answer) else '<p class="note">Nothing: the table has no rows.</p>'
    parts = [f"<h1>{escape(title)}</h1>", empty, draw(name, answer, _DRAWN_ALONE), notes(answer.notes)]
    if len(answer):
        parts.append(f"<h2>{escape(name)}</h2>{table(answer, _ROWS_ALONE)}")
    return document(title, parts, [table_script()])


def _graphs(traces: TraceSet, missing: list[str]) -> Iterator[tuple[int, CriticalGraph]]:
    if len(traces) > MOST_RANKS:
        missing.append(f"critical path: of the first {MOST_RANKS} of {len(traces)} ranks; --ranks chooses others")
    for rank in list(traces)[:MOST_RANKS]:
        trace = traces[rank]
        if len(trace) > _MOST_EVENTS:
            missing.append(f"rank {rank}: {len(trace):,} events are too many for a critical path on this page")
            continue
        try:
            graph = critical_graph(trace)
            graph.path()
            yield rank, graph
        except EchoError as error:
            missing.append(f"critical path of rank {rank}: {error}")


def _answer(
    traces: TraceSet,
    name: str,
    options: Mapping[str, Any],
    graphs: Mapping[int, CriticalGraph],
    answers: dict[str, AnswerTable],
    missing: list[str],
) -> None:
    """Adds one analysis' table, or why there is none."""
    if name == "critical-path-summary":
        rows = [(rank, *row) for rank, graph in graphs.items() for row in path_bounds(graph)]
        answers[name] = from_rows(("rank", "bound_by", "duration", "percentage"), rows)
        return
    if name == "critical-path":
        paths = [row for rank, graph in graphs.items() for row in path_rows(rank, graph)]
        answers[name] = from_rows(TITLES, sorted(paths, key=lambda row: -row[2]))
        return
    try:
        answers[name] = ANALYSES[name](traces, **options)
        missing += answers[name].notes
    except EchoError as error:
        missing.append(f"{name}: {error}")


def _section(section: Section, answers: Mapping[str, AnswerTable]) -> str:
    found = [(name, answers[name]) for name in section.analyses if name in answers and len(answers[name])]
    if not found:
        return ""
    parts = []
    for name, answer in found:
        rows = folded(f"the table: {len(answer):,} row{'' if len(answer) == 1 else 's'}", table(answer))
        parts.append(f"<div><h3>{escape(name)}</h3>{draw(name, answer, _DRAWN)}{rows}</div>")
    return (
        f'<h2>{escape(section.title)}</h2><p class="note">{escape(section.text)}</p>'
        f'<div class="two">{"".join(parts)}</div>'
    )


def _tiles(traces: TraceSet, answers: Mapping[str, AnswerTable]) -> str:
    """The few numbers that say most."""
    rows = [trace for trace in traces.values() if len(trace)]
    span = max((int(trace.end.max()) for trace in rows), default=0)
    size = max(trace.world_size for trace in traces.values())
    shown = [(f"{len(traces)}" + (f" of {size}" if size > len(traces) else ""), "ranks traced")]
    if rows:
        shown += [(format_time(span), "traced"), (format_count(sum(map(len, rows))), "events")]
    for name, column, said in (
        ("temporal-breakdown", "compute_time_pctg", "of the devices' time computes"),
        ("temporal-breakdown", "idle_time_pctg", "of the devices' time is idle"),
        ("overlap", "comp_comm_overlap_pctg", "of communication is beside computation"),
    ):
        records = answers[name].records() if name in answers else []
        known = [row[column] for row in records if row[column] is not None]
        if known:
            shown.append((f"{np.mean(known):.1f} %", f"{said}{', mean of the ranks' if len(known) > 1 else ''}"))
    bounds = answers["critical-path-summary"].records() if "critical-path-summary" in answers else []
    if bounds:
        total: dict[str, float] = {}
        for row in bounds:
            total[row["bound_by"]] = total.get(row["bound_by"], 0.0) + row["duration"]
        most = max(total, key=total.__getitem__)
        share = 100 * total[most] / max(sum(total.values()), 1e-9)
        shown.append((f"{share:.0f} %", f"of the critical path is {most.replace('_', ' ')}"))
    devices = {str(d["name"]): None for t in rows for d in _devices(t.header) if "name" in d}
    if devices:
        shown.append((", ".join(devices), "devices"))
    return tiles(shown)


def _devices(header: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = header.get("deviceProperties")
    return [device for device in found if isinstance(device, dict)] if isinstance(found, list) else []


def _any_row(traces: TraceSet) -> bool:
    return any(map(len, traces.values()))
