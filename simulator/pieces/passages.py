"""What a piece does to the clocks: constants from each entry to each exit, in the algebra of maximum and addition.

*Entries* are the clocks of the piece's lanes as it begins, then its inlets: when what each of these waits for
ended. *Exits* are the clocks of the same lanes after it, then the ends of its outlets. An exit is the largest of
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
from echograph.simulator.pieces.cut import Kind

NEVER = -(2**62)
"""A constant for what does not depend on an entry, and the clock of an inlet that nothing holds back."""
LONGEST_PS = 2**60
"""Steps beyond which sums with `NEVER` would not stay apart from those without."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
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
class Passage:
    """The constants of one kind of piece.

    Attributes:
        kind: of which pieces.
        lanes: ascending, the host first.
        over: int64 [exits, entries, scenarios].
        host: for each operation, int64 [entries, scenarios]: from the entries to when it is issued.
        device: the same to when it runs.
    """

    kind: Kind
    lanes: tuple[int, ...]
    over: Int64
    host: list[Int64]
    device: list[Int64]

    @cached_property
    def starts(self) -> Int64:
        """Int64 [operations, 2, entries]: from the entries to when host and device start it, first scenario."""
        return np.stack([np.array(self.host)[:, :, 0], np.array(self.device)[:, :, 0]], axis=1)


class Chain:
    """The constants of pieces that follow each other, of which only the first has inlets, the last outlets.

    Args:
        passages: of the pieces.

    Attributes:
        passages: of the pieces.
        lanes: of all pieces, ascending.
        at: the same, as an index.
        uses: the same, as bits.
        inlets: of the first piece, how many.
        over: int64 [exits, entries, scenarios].
        before: for each piece, int64 [its entries, entries]: to where it begins, first scenario.
    """

    def __init__(self, passages: tuple[Passage, ...]) -> None:
        self.passages = passages
        self.lanes = tuple(sorted({lane for its in passages for lane in its.lanes}))
        self.at, self.uses = np.array(self.lanes), sum(1 << lane for lane in self.lanes)
        self.inlets = len(passages[0].kind.reads)
        self.before: list[Int64] = []
        self.over = self._alone() if len(passages) == 1 else self._together()

    def _alone(self) -> Int64:
        entries = len(self.lanes) + self.inlets
        as_they_are = np.full((entries, entries), NEVER)
        np.fill_diagonal(as_they_are, 0)
        self.before.append(as_they_are)
        return self.passages[0].over

    def _together(self) -> Int64:
        """Sends the clocks through all pieces, and notes those with which each begins."""
        passages = self.passages
        entries = len(self.lanes) + self.inlets
        clocks = np.full((len(self.lanes), entries, passages[0].over.shape[2]), NEVER)
        clocks[np.arange(len(self.lanes)), np.arange(len(self.lanes))] = 0
        inlets = np.full((self.inlets, *clocks.shape[1:]), NEVER)
        inlets[np.arange(self.inlets), len(self.lanes) + np.arange(self.inlets)] = 0
        for its in passages:
            lanes = np.searchsorted(self.at, its.lanes)
            into = clocks[lanes]
            if its.kind.reads:
                closed = np.full((len(its.kind.reads), *clocks.shape[1:]), NEVER)
                into = np.concatenate([into, closed if self.before else inlets])
            self.before.append(into[:, :, 0])
            after = np.maximum((its.over[:, :, None] + into[None]).max(axis=1), NEVER)
            clocks[lanes] = after[: len(lanes)]
        return np.concatenate([clocks, after[len(lanes) :]])


def passage(kind: Kind, work: Work) -> Passage:
    """Works the constants of a kind of piece out, operation by operation."""
    rows = kind.rows
    lanes = (0, *sorted({work.lane[row] for row in rows}))
    entries, scenarios = len(lanes) + len(kind.reads), work.device.shape[1]
    clocks = np.full((len(lanes), entries, scenarios), NEVER)
    clocks[np.arange(len(lanes)), np.arange(len(lanes))] = 0
    clock = dict(zip(lanes, clocks, strict=True))
    inlets = {op: len(lanes) + inlet for inlet, op in enumerate(kind.reads)}
    ends: list[Int64] = []
    issued, started = [], []
    for op, row in enumerate(rows):
        ready = clock[0] if not work.hosts[row] else _after(clock[0], op, kind, ends, inlets)
        issued.append(ready)
        clock[0] = ready = ready + work.host[row]
        ready = np.maximum(clock[work.lane[row]], ready)
        if not work.hosts[row]:
            ready = _after(ready, op, kind, ends, inlets)
        started.append(ready)
        ends.append(ready + work.device[row])
        clock[work.lane[row]] = ends[-1]
    over = np.stack([*(clock[lane] for lane in lanes), *(ends[op] for op in kind.read)])
    return Passage(kind=kind, lanes=lanes, over=np.maximum(over, NEVER), host=issued, device=started)


def _after(ready: Int64, op: int, kind: Kind, ends: list[Int64], inlets: dict[int, int]) -> Int64:
    """When an operation can start that is ready, but for what it waits for."""
    for before in kind.waits[op]:
        ready = np.maximum(ready, ends[before])
    if op in inlets:
        ready = ready.copy()
        ready[inlets[op]] = np.maximum(ready[inlets[op]], 0)
    return ready
