"""What a segment does to the clocks: constants from each entry to each exit, in max-plus algebra.

*Entries* are the clocks of the segment's lanes as it begins, then its inputs: when what each of these waits for
ended. *Exits* are the clocks of the same lanes after it, then the ends of its outputs. An exit is the largest of
(entry + constant); the constant is the longest chain of work between the two (Baccelli, Cohen, Olsder and Quadrat,
"Synchronization and Linearity", 1992, chapter 2). Several *scenarios*, which differ in durations, are worked out
side by side.

A *lane* is the host (0) or a stream (1 + its number).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from echograph.ir.columns import Int64
from echograph.simulator.engine.segments.cut import SegmentKind

NEVER = -(2**62)
"""A constant for what does not depend on an entry, and the clock of an input that nothing holds back."""
LONGEST_PS = 2**60
"""Steps beyond which sums with `NEVER` would not stay apart from those without."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowTimes:
    """Picoseconds of every row of the operation table.

    Attributes:
        device: int64 [rows, scenarios].
        host: int64 [rows, scenarios], to issue it, or for `Host` work to do it.
        hosts: which rows are `Host` work.
        lane: lane of each row's stream.
    """

    device: Int64
    host: Int64
    hosts: list[bool]
    lane: list[int]


@dataclass(kw_only=True, eq=False)
class TransferMatrix:
    """The constants of one kind of segment.

    Attributes:
        kind: of which segments.
        lanes: ascending, the host first.
        over: int64 [exits, entries, scenarios].
        host: for each operation, int64 [entries, scenarios]: from the entries to when it is issued.
        device: the same to when it runs.
    """

    kind: SegmentKind
    lanes: tuple[int, ...]
    over: Int64
    host: list[Int64]
    device: list[Int64]

    @cached_property
    def starts(self) -> Int64:
        """Int64 [operations, 2, entries]: from the entries to when host and device start it, first scenario."""
        return np.stack([np.array(self.host)[:, :, 0], np.array(self.device)[:, :, 0]], axis=1)


class SegmentChain:
    """The constants of segments that follow each other, of which only the first has inputs, the last outputs.

    Args:
        matrices: of the segments.

    Attributes:
        matrices: of the segments.
        lanes: of all segments, ascending.
        at: the same, as an index.
        uses: the same, as bits.
        inputs: of the first segment, how many.
        over: int64 [exits, entries, scenarios].
        before: for each segment, int64 [its entries, entries]: to where it begins, first scenario.
    """

    def __init__(self, matrices: tuple[TransferMatrix, ...]) -> None:
        self.matrices = matrices
        self.lanes = tuple(sorted({lane for its in matrices for lane in its.lanes}))
        self.at, self.uses = np.array(self.lanes), sum(1 << lane for lane in self.lanes)
        self.inputs = len(matrices[0].kind.inputs)
        self.before: list[Int64] = []
        self.over = self._alone() if len(matrices) == 1 else self._together()

    def _alone(self) -> Int64:
        entries = len(self.lanes) + self.inputs
        as_they_are = np.full((entries, entries), NEVER)
        np.fill_diagonal(as_they_are, 0)
        self.before.append(as_they_are)
        return self.matrices[0].over

    def _together(self) -> Int64:
        """Sends the clocks through all segments, and notes those with which each begins."""
        matrices = self.matrices
        entries = len(self.lanes) + self.inputs
        clocks = np.full((len(self.lanes), entries, matrices[0].over.shape[2]), NEVER)
        clocks[np.arange(len(self.lanes)), np.arange(len(self.lanes))] = 0
        inputs = np.full((self.inputs, *clocks.shape[1:]), NEVER)
        inputs[np.arange(self.inputs), len(self.lanes) + np.arange(self.inputs)] = 0
        for its in matrices:
            lanes = np.searchsorted(self.at, its.lanes)
            into = clocks[lanes]
            if its.kind.inputs:
                closed = np.full((len(its.kind.inputs), *clocks.shape[1:]), NEVER)
                into = np.concatenate([into, closed if self.before else inputs])
            self.before.append(into[:, :, 0])
            after = np.maximum((its.over[:, :, None] + into[None]).max(axis=1), NEVER)
            clocks[lanes] = after[: len(lanes)]
        return np.concatenate([clocks, after[len(lanes) :]])


def transfer_matrix(kind: SegmentKind, work: RowTimes) -> TransferMatrix:
    """Works the constants of a kind of segment out, operation by operation."""
    rows = kind.rows
    lanes = (0, *sorted({work.lane[row] for row in rows}))
    entries, scenarios = len(lanes) + len(kind.inputs), work.device.shape[1]
    clocks = np.full((len(lanes), entries, scenarios), NEVER)
    clocks[np.arange(len(lanes)), np.arange(len(lanes))] = 0
    clock = dict(zip(lanes, clocks, strict=True))
    inputs = {op: len(lanes) + in_port for in_port, op in enumerate(kind.inputs)}
    ends: list[Int64] = []
    issued, started = [], []
    for op, row in enumerate(rows):
        ready = clock[0] if not work.hosts[row] else _after(clock[0], op, kind, ends, inputs)
        issued.append(ready)
        clock[0] = ready = ready + work.host[row]
        ready = np.maximum(clock[work.lane[row]], ready)
        if not work.hosts[row]:
            ready = _after(ready, op, kind, ends, inputs)
        started.append(ready)
        ends.append(ready + work.device[row])
        clock[work.lane[row]] = ends[-1]
    over = np.stack([*(clock[lane] for lane in lanes), *(ends[op] for op in kind.outputs)])
    return TransferMatrix(kind=kind, lanes=lanes, over=np.maximum(over, NEVER), host=issued, device=started)


def _after(ready: Int64, op: int, kind: SegmentKind, ends: list[Int64], inputs: dict[int, int]) -> Int64:
    """When an operation can start that is ready, but for what it waits for."""
    for before in kind.waits[op]:
        ready = np.maximum(ready, ends[before])
    if op in inputs:
        ready = ready.copy()
        ready[inputs[op]] = np.maximum(ready[inputs[op]], 0)
    return ready
