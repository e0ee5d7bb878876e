"""What the events of one rank waited for, as a graph: its longest path, and that if something were faster."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from echograph.errors import DataError, UsageError
from echograph.ir.columns import Int64
from echograph.profiler.analyses.work import Kind, kinds
from echograph.profiler.traces.trace import NONE, Bool, Trace


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
        of_kind = np.full(len(Kind), Bound.gpu_compute_bound, np.int8)
        of_kind[Kind.COMMUNICATION] = Bound.gpu_communication_bound
        of_kind[Kind.MEMORY] = Bound.gpu_memory_bound
        of_host = np.where(loads_data(self.trace, self.data_load_events), Bound.data_loading, Bound.cpu_bound)
        of_row = np.where(self.trace.on_device, of_kind[kinds(self.trace)], of_host.astype(np.int8))
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
        where: Bool | None = None,
    ) -> CriticalGraph:
        """The graph if some of its edges took another time; path, breakdown and summary of it all follow.

        Args:
            factor: what weights are multiplied by; rounded to picoseconds.
            edges: kinds that are scaled; None for all.
            bounds: what scaled edges are bound by; None for all.
            where: bool [edges], further condition; None for none.

        Raises:
            UsageError: the factor is negative, not finite, or so large that times are beyond 64 bits.
        """
        if not 0 <= factor < np.inf:
            raise UsageError(f"scale {factor:g}: give a factor from 0 up; 0.5 halves the time")
        chosen = np.ones(len(self.weight), np.bool_) if where is None else where.copy()
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
        leaving, first = _grouped(self.source, self.nodes)
        open_ = np.bincount(self.target, minlength=self.nodes).tolist()
        target, weight = self.target.tolist(), self.weight.tolist()
        far, via = [0] * self.nodes, [NONE] * self.nodes
        ready = [node for node in np.argsort(self.time, kind="stable").tolist() if not open_[node]]
        for node in ready:
            for edge in leaving[first[node] : first[node + 1]]:
                to, length = target[edge], far[node] + weight[edge]
                if via[to] == NONE or length > far[to]:
                    far[to], via[to] = length, edge
                open_[to] -= 1
                if not open_[to]:
                    ready.append(to)
        if len(ready) < self.nodes:
            raise DataError(f"{self.trace.path}: its events depend on each other in a circle; nothing is longest")
        return self._back(max(ready, key=far.__getitem__, default=NONE), via, far)

    def _back(self, node: int, via: list[int], far: list[int]) -> CriticalPath:
        nodes, edges = [node][: self.nodes], []
        while nodes and via[nodes[-1]] != NONE:
            edges.append(via[nodes[-1]])
            nodes.append(int(self.source[edges[-1]]))
        length = far[node] if nodes else 0
        return CriticalPath(np.array(nodes[::-1], np.int64), np.array(edges[::-1], np.int64), length)


def loads_data(trace: Trace, pattern: str) -> Bool:
    """Which rows load data: those whose name the pattern matches anywhere; none for an empty pattern.

    Raises:
        UsageError: the pattern is no regular expression.
    """
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"data_load_events '{pattern}': not a regular expression ({error})") from None
    return np.array([bool(pattern and wanted.search(text)) for text in (*trace.strings, "")])[trace.name]


def _grouped(source: Int64, nodes: int) -> tuple[list[int], list[int]]:
    """Edges by the node that they leave, in the order in which they are; and where each node's begin."""
    order = np.argsort(source, kind="stable")
    first = np.concatenate(([0], np.cumsum(np.bincount(source, minlength=nodes))))
    return order.tolist(), first.tolist()
