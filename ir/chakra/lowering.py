"""What an operation is in a Chakra trace: a kind of node and its attributes, or nothing.

Readers simulate all-reduce, all-gather, reduce-scatter and all-to-all alone. The other collectives become the one
of these that moves as many bytes through the busiest rank of a ring.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from echograph.errors import PlanError, SimulationError
from echograph.ir.chakra.messages import CommType, NodeType, Value, encode_attributes
from echograph.ir.chakra.ranks import Differs
from echograph.ir.columns import Int64
from echograph.ir.graph import JobGraph
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
            work: dict[str, Value] = {"num_ops": max(1, flops), "tensor_size": max(1, moved), "is_cpu_op": False}
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
        attributes: dict[str, Value] = {
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
        attributes: dict[str, Value] = {"comm_tag": tag, "comm_size": size, "is_cpu_op": False}
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
