"""What a piece does to the clocks: constants from each entry to each exit, in the algebra of maximum and addition.

*Entries* are the clocks of the piece's lanes as it begins, then its inlets: when what each of these waits for
ended. *Exits* are the clocks of the same lanes after it, then the ends of its outlets. An exit is the largest of
(entry + constant); the constant is the longest chain of work between the two (Baccelli, Cohen, Olsder and Quadrat,
"Synchronization and Linearity", 1992, chapter 2). Several *scenarios*, which differ in durations, are worked out
side by side.

A *lane* is the host (0) or a stream (1 + its number).
"""

from __future__ import annotations

from dataclasses import dataclass, field
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
    _powers: list[Int64] = field(default_factory=list, init=False)

    @cached_property
    def uses(self) -> int:
        """The lanes as bits."""
        return sum(1 << lane for lane in self.lanes)

    @cached_property
    def starts(self) -> Int64:
        """Int64 [operations, 2, entries]: from the entries to when host and device start it, first scenario."""
        return np.stack([np.array(self.host)[:, :, 0], np.array(self.device)[:, :, 0]], axis=1)

    def times(self, count: int) -> Int64:
        """Int64 [lanes, lanes, scenarios]: what `count` such pieces one after the other do, without inlets."""
        lanes = len(self.lanes)
        step = self.over[:lanes, :lanes]
        if not self._powers:
            one = np.full_like(step, NEVER)
            one[np.arange(lanes), np.arange(lanes)] = 0
            self._powers += [one, step]
        while len(self._powers) <= count:
            further = (step[:, :, None] + self._powers[-1][None]).max(axis=1)
            self._powers.append(np.maximum(further, NEVER))
        return self._powers[count]


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
