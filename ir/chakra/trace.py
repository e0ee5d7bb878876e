"""The nodes that a role of a job runs, in order, with what each waits for and how long it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from echograph.ir.columns import Int64
from echograph.ir.edges import Edges
from echograph.ir.graph import JobGraph, Program
from echograph.ir.types import COMMUNICATIONS, OpKind
from echograph.units import PS_PER_NS, PS_PER_US


class Step(NamedTuple):
    """A node.

    Attributes:
        number: 1, 2, ... in the order of the program, which readers take for a priority.
        row: of the operation table.
        block: of the graph.
        instance: of the block.
        after: the node before it on its stream; () where it is the first.
        waits: nodes of other streams that end before it starts, ascending, but for those that it is behind anyhow.
        duration_us: whole microseconds.
    """

    number: int
    row: int
    block: int
    instance: int
    after: tuple[int, ...]
    waits: tuple[int, ...]
    duration_us: int


class Trace:
    """What one program runs.

    Work on a stream runs in order, so of the nodes of another stream that a node waits for, the last is enough;
    and an operation that has no node hands on what it waits for to the next of its stream.

    A collective also waits for the sends before it within its group: a reader that runs one communication at a
    time would otherwise hold a message back for a collective whose other members wait for that message.

    Args:
        edges: of the job.
        number: of the program.
        kept: bool [operations], which rows have a node.
        picoseconds: int64 [operations]; what is below 0 counts as 0.

    Attributes:
        drift_ps: by stream, how much longer its kernels run than they should, once all have been gone through.
    """

    def __init__(self, edges: Edges, number: int, kept: np.ndarray, picoseconds: Int64) -> None:
        self._job, self._calls = edges.job, edges.job.programs[number].calls
        self._rows = _rows(edges.job.programs[number])
        self._streams = edges.job.ops.stream[self._rows].tolist()
        self._kept = kept[self._rows].tolist()
        self._kernels = (~np.isin(edges.job.ops.kind, COMMUNICATIONS))[self._rows].tolist()
        self._kinds = edges.job.ops.kind[self._rows].tolist()
        self._groups = edges.job.ops.group[self._rows].tolist()
        self._before = _by_reader(*edges.of(number))
        self._picoseconds = np.maximum(picoseconds, 0)[self._rows].tolist()
        self.drift_ps: list[int] = [0] * len(self._job.streams)

    def __len__(self) -> int:
        return sum(self._kept)

    def __iter__(self) -> Iterator[Step]:
        lengths = self._calls[:, 2] - self._calls[:, 1]
        block, instance = (np.repeat(self._calls[:, i], lengths).tolist() for i in (0, 3))
        rows, owed = self._rows.tolist(), [0] * len(self.drift_ps)
        for position, number, after, waits in self._order():
            stream, exact = self._streams[position], self._picoseconds[position]
            if self._kernels[position]:
                exact += owed[stream]
            micros = max(0, (exact + PS_PER_US // 2) // PS_PER_US)
            if self._kernels[position]:
                # Readers take 0 microseconds for a nanosecond.
                owed[stream] = exact - (micros * PS_PER_US or PS_PER_NS)
            yield Step(number, rows[position], block[position], instance[position], after, waits, micros)
        self.drift_ps = [-left for left in owed]

    def _order(self) -> Iterator[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
        """(position, number, node before it on its stream, nodes it waits for) of every node."""
        streams = range(len(self.drift_ps))
        last = [0 for _ in streams]
        known: list[dict[int, int]] = [{} for _ in streams]
        inherited: list[dict[int, int]] = [{} for _ in streams]
        sources = {source for found in self._before.values() for source in found}
        sends: dict[int, dict[int, int]] = {}
        at: dict[int, dict[int, int]] = {}
        number = 0
        for position, (stream, kept) in enumerate(zip(self._streams, self._kept, strict=True)):
            needs = inherited[stream]
            for source in self._before.get(position, ()):
                _latest(needs, at[source])
            if kept:
                number += 1
                group = self._groups[position]
                if self._kinds[position] == OpKind.SEND:
                    sends.setdefault(group, {})[stream] = number
                elif self._kinds[position] == OpKind.COLLECTIVE:
                    for among, sent in sends.items():
                        if _within(self._job, among, group):
                            _latest(needs, sent)
                behind = known[stream]
                waits = {s: n for s, n in needs.items() if s != stream and n > behind.get(s, 0)}
                behind.update(waits)
                yield position, number, (last[stream],) if last[stream] else (), tuple(sorted(waits.values()))
                last[stream], inherited[stream] = number, {}
            if position in sources:
                # Whoever waits for it waits for its stream up to here, and for what has not been waited for.
                at[position] = {**inherited[stream], **({stream: last[stream]} if last[stream] else {})}


def _within(job: JobGraph, inner: int, outer: int) -> bool:
    """Whether all who are in a group together are so in another one."""
    one, other = job.groups[inner], job.groups[outer]
    if one.ranks or other.ranks:
        return bool(one.ranks) and set(one.ranks) <= set(other.ranks)
    if other.positions:
        return one.axes == other.axes and bool(one.positions) and set(one.positions) <= set(other.positions)
    return set(one.axes) <= set(other.axes)


def _latest(needs: dict[int, int], more: Mapping[int, int]) -> None:
    for stream, number in more.items():
        if number > needs.get(stream, 0):
            needs[stream] = number


def _rows(program: Program) -> Int64:
    """The rows of the operation table that a program runs, in order."""
    begin, end = program.calls[:, 1], program.calls[:, 2]
    lengths = end - begin
    rows: Int64 = np.repeat(begin - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(lengths.sum()))
    return rows


def _by_reader(before: Int64, after: Int64) -> Mapping[int, Sequence[int]]:
    """For every position that waits, the positions it waits for."""
    found: dict[int, list[int]] = {}
    for source, reader in zip(before.tolist(), after.tolist(), strict=True):
        found.setdefault(reader, []).append(source)
    return found
