"""A simulated timeline as the traces that a profiler would have left: columns from columns, no file in between."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from echograph.ir.columns import Int64, distinct
from echograph.ir.exporters.chrome import (
    ProcessGroup,
    collective_name,
    device_label,
    job_header,
    launch_numbers,
    process_groups,
)
from echograph.ir.graph import Graph
from echograph.ir.timeline import Lane, Timeline
from echograph.ir.types import COMMUNICATIONS, OpKind
from echograph.profiler.traces.trace import NONE, Trace, TraceSet, Values

PATH = "simulated step"
"""What a trace that has no file is called in messages."""
_STEP = ("ProfilerStep#0", "user_annotation")


def simulated_traces(graph: Graph, timeline: Timeline) -> TraceSet:
    """A timeline as traces, equal to those read from its Chrome trace (`ir.exporters.chrome`), but without a file.

    Args:
        graph: the graph that ran.
        timeline: when it ran; its programs are the graph's, and each stands for the first rank that runs it.

    Raises:
        UsageError: the timeline has no program.
    """
    columns = _Columns(graph, timeline)
    ranks = [graph.lowest_rank(number) for number in range(len(timeline.programs))]
    return TraceSet({rank: columns.trace(number, rank) for number, rank in enumerate(ranks)})


class _Columns:
    """What the traces of all programs have in common: texts, and the columns of each row of the timeline."""

    def __init__(self, graph: Graph, timeline: Timeline) -> None:
        self.graph, self.timeline = graph, timeline
        self.codes: dict[str, int] = {}
        self.shown = timeline.duration > 0
        self.device = timeline.lane == Lane.DEVICE
        self.launch = launch_numbers(timeline)
        host, device = np.zeros((2, 2, len(graph.ops.kind)), np.int32)
        for op in np.unique(timeline.op[self.shown & ~self.device]).tolist():
            host[:, op] = self._coded(graph.strings[graph.ops.name[op]], "cpu_op")
        for op in np.unique(timeline.op[self.shown & self.device]).tolist():
            device[:, op] = self._coded(*device_label(graph, op))
        self.name, self.category = np.where(self.device, device[:, timeline.op], host[:, timeline.op])
        self.step = self._coded(*_STEP)

    def _coded(self, name: str, category: str) -> tuple[int, int]:
        return self._code(name), self._code(category)

    def _code(self, text: str) -> int:
        return self.codes.setdefault(text, len(self.codes))

    def trace(self, program: int, rank: int) -> Trace:
        """The trace of one program: its step, and what it ran."""
        timeline = self.timeline
        rows = np.flatnonzero(self.shown & (timeline.program == program))
        device, kind = self.device[rows], self.graph.ops.kind[timeline.op[rows]]
        stream = timeline.stream[rows].astype(np.int64)
        # Host work on another stream than the first is that of a thread, beside the one that issues.
        apart = device | ((kind == OpKind.HOST) & (stream > 0))
        whole = np.full(len(rows) + 1, NONE, np.int64)
        groups = process_groups(self.graph, rank)
        arguments = self._arguments(rows, device, kind) | self._groups(rows, device, kind, groups)
        return Trace(
            rank=rank,
            world_size=self.graph.world_size,
            path=PATH,
            origin=0,
            start=_behind(0, timeline.start[rows]),
            duration=_behind(timeline.makespan, timeline.duration[rows]),
            name=_behind(self.step[0], self.name[rows]).astype(np.int32),
            category=_behind(self.step[1], self.category[rows]).astype(np.int32),
            pid=np.full(len(whole), program, np.int64),
            tid=_behind(0, np.where(apart, 1 + stream, 0)),
            stream=_behind(NONE, np.where(device, stream, NONE)),
            correlation=_behind(NONE, self.launch[rows]),
            external_id=whole,
            index=whole,
            strings=tuple(self.codes),
            arguments=arguments,
            header={"distributedInfo": job_header(self.graph, [groups], [rank])},
        )

    def _groups(
        self, rows: Int64, device: np.ndarray, kind: np.ndarray, groups: Mapping[int, ProcessGroup]
    ) -> dict[str, Values]:
        """What each communication is, and in which process group."""
        where = np.flatnonzero(device & np.isin(kind, COMMUNICATIONS))
        ops = self.timeline.op[rows[where]]
        said = {op: self._code(collective_name(self.graph, op)) for op in distinct(ops).tolist()}
        codes = {number: self._code(group.name) for number, group in groups.items()}
        group = self.graph.ops.group[ops]
        inside = np.isin(group, list(codes))
        found = {
            "Collective name": Values(where + 1, np.array([said[op] for op in ops.tolist()], np.int32)),
            "Process Group Name": Values(
                where[inside] + 1, np.array([codes[number] for number in group[inside].tolist()], np.int32)
            ),
        }
        return {name: values for name, values in found.items() if len(values.rows)}

    def _arguments(self, rows: Int64, device: np.ndarray, kind: np.ndarray) -> dict[str, Values]:
        """Bytes of what is copied and communicated, and how fast copies are."""
        found = {}
        copies = np.flatnonzero(device & (kind == OpKind.COPY))
        moved = np.flatnonzero(device & ((kind == OpKind.COPY) | np.isin(kind, COMMUNICATIONS)))
        nbytes = self.graph.ops.nbytes[self.timeline.op[rows]].astype(np.float64)
        if len(moved):
            found["bytes"] = Values(moved + 1, nbytes[moved])
        if len(copies):
            rate = 1000 * nbytes[copies] / self.timeline.duration[rows[copies]]
            found["memory bandwidth (GB/s)"] = Values(copies + 1, rate)
        return found


def _behind(first: int, rest: np.ndarray) -> Int64:
    return np.concatenate(([first], rest)).astype(np.int64)
