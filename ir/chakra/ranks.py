"""Which ranks a role has, and who is whose group and peer: what differs between the traces of its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from echograph.errors import PlanError
from echograph.ir.chakra.messages import Value
from echograph.ir.columns import Int64
from echograph.ir.graph import Axis, Group, JobGraph, Program
from echograph.ir.types import OpKind

MAX_RANKS = 2**20

Differs = tuple[int, int, int]
"""What a communication is between: an `OpKind`, a group of the graph, and how far away the peer is."""


class Communicators:
    """The groups of a job as numbered lists of ranks.

    Numbers begin with 1, since readers take 0 for the whole world. Groups of listed ranks stand, in a job with a
    mesh, for the first place along the axes that programs leave free; the other places have groups alike.

    Args:
        job: the job.
        used: groups, as indices, that get numbers because collectives use them.

    Raises:
        PlanError: more than 2^20 ranks.
    """

    def __init__(self, job: JobGraph, used: Iterable[int]) -> None:
        if job.world_size > MAX_RANKS:
            raise PlanError(f"{job.world_size:,} ranks: traces are written for at most {MAX_RANKS:,}")
        self.job = job
        self._strides = {a.name: prod(b.size for b in job.mesh[i + 1 :]) for i, a in enumerate(job.mesh)}
        self._groups: dict[int, _Numbered] = {}
        first = 1
        for index in sorted(used):
            self._groups[index] = numbered = self._number(job.groups[index], first)
            first += len(numbered.starts)
        self.count = first - 1

    def ranks(self, number: int) -> Int64:
        """The ranks that run a program, ascending."""
        job, program = self.job, self.job.programs[number]
        if not job.mesh:
            return np.array(sorted(program.ranks) or [number], np.int64)
        return self._spread([a for a in job.mesh if a.name not in program.coordinates], self._place(program))

    def size(self, group: int) -> int:
        """Ranks of a group."""
        return len(self._offsets(self.job.groups[group]))

    def members(self) -> Iterator[tuple[int, list[int]]]:
        """Number and ranks of every numbered group."""
        for numbered in self._groups.values():
            for place, start in enumerate(numbered.starts.tolist()):
                yield numbered.first + place, (start + numbered.offsets).tolist()

    def attributes(self, differs: Differs, rank: int) -> dict[str, Value]:
        """The attributes of a communication that only its rank knows.

        Raises:
            PlanError: the rank is in no group of this kind.
        """
        kind, index, away = differs
        if kind == OpKind.COLLECTIVE:
            numbered = self._groups[index]
            start = self._start(index, rank)
            return {"pg_name": str(numbered.first + int(np.searchsorted(numbered.starts, start)))}
        peer = self._peer(index, rank, away)
        source, target = (rank, peer) if kind == OpKind.SEND else (peer, rank)
        return {"comm_src": source, "comm_dst": target}

    def _peer(self, index: int, rank: int, away: int) -> int:
        offsets, start = self._offsets(self.job.groups[index]), self._start(index, rank)
        place = int(np.flatnonzero(offsets == rank - start)[0])
        return start + int(offsets[(place + away) % len(offsets)])

    def _start(self, index: int, rank: int) -> int:
        """The rank from which the offsets of a group count, for the group of this kind that a rank is in."""
        group = self.job.groups[index]
        if group.axes:
            return rank - sum(self._coordinate(rank, axis) * self._strides[axis] for axis in group.axes)
        return group.ranks[0]

    def _number(self, group: Group, first: int) -> _Numbered:
        others = [a for a in self.job.mesh if a.name not in group.axes] if group.axes else []
        starts = self._spread(others, 0 if group.axes else group.ranks[0])
        return _Numbered(first=first, starts=starts, offsets=self._offsets(group))

    def _offsets(self, group: Group) -> Int64:
        """The ranks of a group in order, as distances from where it starts."""
        if not group.axes:
            return np.array(group.ranks, np.int64) - group.ranks[0]
        whole = self._spread([a for a in self.job.mesh if a.name in group.axes], 0)
        return whole[list(group.positions)] if group.positions else whole

    def _spread(self, axes: list[Axis], start: int) -> Int64:
        """Ranks at all places along some axes, ascending."""
        ranks = np.array([start], np.int64)
        for axis in axes:
            ranks = (ranks[:, None] + np.arange(axis.size) * self._strides[axis.name]).ravel()
        return ranks

    def _place(self, program: Program) -> int:
        return sum(self._strides[axis] * value for axis, value in program.coordinates.items())

    def _coordinate(self, rank: int, axis: str) -> int:
        size = next(a.size for a in self.job.mesh if a.name == axis)
        return rank // self._strides[axis] % size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Numbered:
    """The groups of one kind: numbers from `first` on, where each starts, and how far from there its ranks are."""

    first: int
    starts: Int64
    offsets: Int64
