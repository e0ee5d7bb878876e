"""Writes a step with another extent: shapes, FLOPs and bytes of what carries it (`extent`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import prod

from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import StepGraph
from echograph.ir.passes.extent import Carriers
from echograph.ir.passes.extent_rules import Shape
from echograph.ir.passes.rewrite_step import StepWriter

_LOOKS_UP = frozenset(("embedding", "index", "index_select", "gather", "take", "nll_loss_forward"))
_MOST_OPERANDS = 10


class ExtentWriter(StepWriter):
    """Copies a step with an extent replaced.

    FLOPs are products of extents, in which this one is once, so they scale. Bytes are those of the tensors that an
    operation reads and makes: which of them the graph counted is found from the numbers, and counted again.

    Args:
        graph: the step.
        carriers: where the extent is.
        size: what it becomes.
    """

    def __init__(self, graph: StepGraph, carriers: Carriers, size: int) -> None:
        super().__init__(graph)
        self.carriers, self.size = carriers, size
        self._before: dict[int, int] = {}
        self._after: dict[int, int] = {}

    def tensor(self, index: int, **changes: object) -> int:
        """New row of an old tensor, with its new shape."""
        return super().tensor(index, **({"shape": self.carriers.resized(index, self.size)} | changes))

    def operation(self, op: t.Op) -> None:
        """Writes an operation with its new work."""
        self.copy(op, **self.work(op))

    def work(self, op: t.Op) -> dict[str, object]:
        """FLOPs and bytes of an operation after the change; durations of what changes no longer hold."""
        if not self.carriers.carried((*op.inputs, *op.outputs)):
            return {}
        match op:
            case t.Compute():
                written = self._bytes(op.bytes_written, op.outputs, op.inputs)
                return {
                    "flops": op.flops * self.size // self.carriers.extent.size,
                    "bytes_read": self._read(op, written),
                    "bytes_written": written,
                    "durations": (),
                }
            case t.Collective():
                return {"bytes_per_rank": self._bytes(op.bytes_per_rank, op.outputs, op.inputs), "durations": ()}
            case t.Send() | t.Recv() | t.Copy():
                return {"nbytes": self._bytes(op.nbytes, op.outputs, op.inputs), "durations": ()}
        return {}

    def _read(self, op: t.Compute, written: int) -> int:
        """Bytes read; of a table, a row for each row written, if it has as many."""
        if op.inputs and op.name.rpartition(".")[2] in _LOOKS_UP:
            table, rest = self._memory(op.inputs[0], new=False), set(op.inputs[1:])
            if sum(self._memory(i, new=False) for i in rest) + min(table, op.bytes_written) == op.bytes_read:
                return sum(self._memory(i, new=True) for i in rest) + min(
                    self._memory(op.inputs[0], new=True), written
                )
        return self._bytes(op.bytes_read, op.inputs, op.outputs)

    def _bytes(self, nbytes: int, first: Sequence[int], then: Sequence[int]) -> int:
        """Bytes of the tensors that make up a number of bytes, after the change; in proportion if none do."""
        for rows in (first, (*first, *then)):
            distinct = list(dict.fromkeys(rows))
            before = [self._memory(i, new=False) for i in distinct]
            counted = _summands(before, nbytes)
            if counted is not None:
                return sum(self._memory(distinct[i], new=True) for i in counted)
        rows = (*first, *then)
        whole, now = (sum(self._memory(i, new=new) for i in rows) for new in (False, True))
        return nbytes * now // whole if whole else nbytes

    def _memory(self, row: int, *, new: bool) -> int:
        """Bytes that the elements of a tensor take in memory: of an expanded dim, one."""
        known = self._after if new else self._before
        if row not in known:
            shape: Shape = self.carriers.resized(row, self.size) if new else self.graph.tensors.shape.row(row)
            nbytes = prod(shape) * self.graph.tensors[row].dtype.itemsize
            source = self._viewed(row)
            known[row] = nbytes if source is None else min(nbytes, self._memory(source, new=new))
        return known[row]

    def _viewed(self, row: int) -> int | None:
        """What a tensor is a view of, if it is one; for a port, what the first instance binds."""
        graph = self.graph
        maker = int(graph.maker[row])
        if maker != NONE:
            reads = graph.ops.inputs.row(maker)
            return reads[0] if graph.ops.is_view[maker] and len(reads) == 1 else None
        if graph.tensors.port[row]:
            block = next(b for b in graph.blocks if row in b.tensors)
            return graph.locate_tensor(block.instances[0].bindings[int(graph.port_position[row])])[2]
        alias = int(graph.tensors.alias_of[row])
        return None if alias == NONE else alias


def _summands(sizes: Sequence[int], total: int) -> tuple[int, ...] | None:
    """Which of some numbers add up to a total, as many of them as can; None where none do."""
    if len(sizes) > _MOST_OPERANDS:
        return tuple(range(len(sizes))) if sum(sizes) == total else None
    for count in range(len(sizes), -1, -1):
        for chosen in combinations(range(len(sizes)), count):
            if sum(sizes[i] for i in chosen) == total:
                return chosen
    return None
