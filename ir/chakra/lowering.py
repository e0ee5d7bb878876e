"""What an operation is in a Chakra trace: a kind of node and its attributes, or nothing.

Readers simulate all-reduce, all-gather, reduce-scatter and all-to-all alone. The other collectives become the one
of these that moves as many bytes through the busiest rank of a ring.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np

from echograph.errors import PlanError, SimulationError
from echograph.ir.chakra.messages import AttributeValue, CommType, NodeType, encode_attributes
from echograph.ir.columns import Int64
from echograph.ir.graph import Axis, Group, JobGraph, Program
from echograph.ir.types import CollectiveKind, OpKind

DIMENSIONS = 4
"""Of a network, at most: collectives say of each that they use it."""

BARRIER_BYTES = 4
MAX_TAGS = 1_000_000
"""The first tag that ASTRA-sim gives the messages of collectives."""

LEAST_GATHER_BYTES = 64
"""ASTRA-sim divides the shard of an all-gather into pieces, and loops for ever where it has fewer bytes than it is
to have pieces (`preferred-dataset-splits`): smaller shards are rounded up to this."""

_COLLECTIVES = {
    CollectiveKind.ALL_REDUCE: CommType.ALL_REDUCE,
    CollectiveKind.ALL_GATHER: CommType.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER: CommType.REDUCE_SCATTER,
    CollectiveKind.ALL_TO_ALL: CommType.ALL_TO_ALL,
    CollectiveKind.BROADCAST: CommType.ALL_GATHER,
    CollectiveKind.REDUCE: CommType.REDUCE_SCATTER,
    CollectiveKind.GATHER: CommType.ALL_GATHER,
    CollectiveKind.SCATTER: CommType.REDUCE_SCATTER,
    CollectiveKind.BARRIER: CommType.ALL_REDUCE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A row of the operation table as a node.

    Attributes:
        kind: of the node.
        attributes: encoded, those that all ranks have alike.
        differs: where the others come from.
    """

    kind: NodeType
    attributes: bytes
    differs: Differs | None = None


@dataclass(slots=True, kw_only=True)
class Lowering:
    """Lowers the rows of a job, and counts what it changed.

    Attributes:
        job: the job.
        picoseconds: int64 [operations], how long each runs; -1 where unknown.
        sizes: ranks of every group.
        changed: by what was done, the rows that it was done to.
        first_tags: by group, what is added to the tags of its messages.
    """

    job: JobGraph
    picoseconds: Int64
    sizes: tuple[int, ...]
    changed: Counter[str] = field(default_factory=Counter)
    first_tags: Mapping[int, int] = field(init=False)
    _kernels: dict[tuple[int, int], Lowered] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.first_tags = _first_tags(self.job)

    def __call__(self, row: int) -> Lowered | None:
        """The node of a row; None where the trace has none.

        Raises:
            SimulationError: it runs on the device, and how long is unknown.
        """
        match OpKind(int(self.job.ops.kind[row])):
            case OpKind.COLLECTIVE:
                return self._collective(row)
            case OpKind.SEND | OpKind.RECV as kind:
                return self._message(row, kind)
            case OpKind.COPY:
                return self._work(
                    row, flops=0, moved=int(self.job.ops.nbytes[row]), change="copies run as compute"
                )
            case OpKind.HOST:
                self.changed["operations of the host left out"] += 1
                return None
            case OpKind.COMPUTE:
                ops = self.job.ops
                moved = int(ops.bytes_read[row]) + int(ops.bytes_written[row])
                return self._work(row, flops=int(ops.flops[row]), moved=moved)

    def _work(self, row: int, *, flops: int, moved: int, change: str = "") -> Lowered | None:
        if self.picoseconds[row] < 0:
            name = self.job.strings[self.job.ops.name[row]]
            raise SimulationError(f"operation {row} ({name}) has no duration on this device: annotate the graph")
        if flops == moved == self.picoseconds[row] == 0:
            return None
        if change:
            self.changed[change] += 1
        if (flops, moved) not in self._kernels:
            # A roofline divides both by each other: neither is 0.
            work: dict[str, AttributeValue] = {
                "num_ops": max(1, flops),
                "tensor_size": max(1, moved),
                "is_cpu_op": False,
            }
            self._kernels[flops, moved] = Lowered(kind=NodeType.COMP, attributes=encode_attributes(work))
        return self._kernels[flops, moved]

    def _collective(self, row: int) -> Lowered | None:
        ops, group = self.job.ops, int(self.job.ops.group[row])
        kind, size, ranks = CollectiveKind(int(ops.variant[row])), int(ops.nbytes[row]), self.sizes[group]
        if kind == CollectiveKind.BARRIER:
            size = BARRIER_BYTES
        if ranks == 1 or size == 0:
            return None
        becomes = _COLLECTIVES[kind]
        if becomes.name != kind.name:
            self.changed[f"{kind.name.lower()} as {becomes.name.lower()}"] += 1
        if becomes == CommType.ALL_GATHER:
            size = -(-size // ranks)
            if size < LEAST_GATHER_BYTES:
                self.changed[f"all_gather shards made {LEAST_GATHER_BYTES} bytes"] += 1
            size = max(size, LEAST_GATHER_BYTES)
        attributes: dict[str, AttributeValue] = {
            "comm_type": int(becomes),
            "comm_size": size,
            "involved_dim": (True,) * DIMENSIONS,
            "comm_priority": 0,
            "is_cpu_op": False,
        }
        return Lowered(
            kind=NodeType.COLLECTIVE,
            attributes=encode_attributes(attributes),
            differs=(OpKind.COLLECTIVE, group, 0),
        )

    def _message(self, row: int, kind: OpKind) -> Lowered | None:
        ops, group = self.job.ops, int(self.job.ops.group[row])
        away, size = int(ops.peer[row]) % self.sizes[group], int(ops.nbytes[row])
        if away == 0 or size == 0:
            return None
        # Two groups that hold the same two ranks keep their messages apart.
        tag = int(ops.tag[row]) + self.first_tags[group]
        attributes: dict[str, AttributeValue] = {"comm_tag": tag, "comm_size": size, "is_cpu_op": False}
        return Lowered(
            kind=NodeType.SEND if kind == OpKind.SEND else NodeType.RECV,
            attributes=encode_attributes(attributes),
            differs=(kind, group, away),
        )


def _first_tags(job: JobGraph) -> dict[int, int]:
    """Tags of one group follow those of another, since two groups may hold the same two ranks."""
    ops, first, found = job.ops, 0, {}
    messages = np.isin(ops.kind, (OpKind.SEND, OpKind.RECV))
    for group in np.unique(ops.group[messages]).tolist():
        found[group] = first
        first += 1 + int(ops.tag[messages & (ops.group == group)].max())
    if first > MAX_TAGS:
        raise PlanError(f"messages have {first:,} tags: at most {MAX_TAGS:,} are told apart from collectives")
    return found


# -- who takes part -------------------------------------------------------------------------------------------
# Which ranks a role has, and who is whose group and peer: what differs between the traces of its ranks.


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

    def attributes(self, differs: Differs, rank: int) -> dict[str, AttributeValue]:
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
