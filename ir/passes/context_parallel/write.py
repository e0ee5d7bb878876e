"""Writes the step of one context-parallel rank: all is cut along the sequence, attention is one of two methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from echograph.errors import PlanError
from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import Axis, StepGraph
from echograph.ir.passes.extent import Carriers, ExtentWriter

AXIS, INNER = "cp", "tp"
POSITIONS = 2
"""The dim of positions of queries, keys and values: [batch, heads, positions, channels]."""
TensorRow = tuple[int, t.Tensor]
"""A row of the new tensor table, and the tensor that stands there."""


class AttentionMethod(Protocol):
    """Writes attention that needs the whole sequence."""

    def forward(self, op: t.Compute) -> None:
        """Writes a forward operation, or one that computes it again."""

    def backward(self, op: t.Compute) -> None:
        """Writes a backward operation."""


class ContextWriter(ExtentWriter):
    """Copies a step with 1/size of each sequence.

    Args:
        graph: the step.
        carriers: where the sequence is.
        ranks: how many share it.
        method: makes what writes attention.
    """

    def __init__(
        self,
        graph: StepGraph,
        carriers: Carriers,
        *,
        ranks: int,
        method: Callable[[ContextWriter], AttentionMethod],
    ) -> None:
        super().__init__(graph, carriers, carriers.extent.size // ranks)
        self.ranks = ranks
        at = next((i for i, axis in enumerate(graph.mesh) if axis.name == INNER), len(graph.mesh))
        self.builder.mesh = (*graph.mesh[:at], Axis(name=AXIS, size=ranks), *graph.mesh[at:])
        self.group = self.builder.group(AXIS, axes=(AXIS,))
        self.method = method(self)

    def operation(self, op: t.Op) -> None:
        """Writes an operation; attention by the method."""
        if not isinstance(op, t.Compute) or not isinstance(op.attributes, t.Attention):
            super().operation(op)
            return
        backward = op.name.endswith("backward")
        self._check_attention(op, backward)
        (self.method.backward if backward else self.method.forward)(op)

    def _check_attention(self, op: t.Compute, backward: bool) -> None:
        """Refuses attention that is not of a sequence to itself."""
        operands = op.inputs[int(backward) :][:3]
        lengths = {self.graph.tensors.shape.row(i)[POSITIONS] for i in operands}
        if lengths != {self.carriers.extent.size} or not all(i in self.carriers.places for i in operands):
            raise PlanError(
                f"{op.module}: context parallelism takes attention of a sequence of "
                f"{self.carriers.extent.size} to itself alone: do without it"
            )

    # -- for the methods -----------------------------------------------------------------------------------

    def local(self, index: int) -> t.Tensor:
        """An old tensor with its new shape, as a template for others."""
        tensor = self.graph.tensors[index]
        return t.Tensor(
            id=index, name=tensor.name, shape=self.carriers.resized(index, self.size), dtype=tensor.dtype,
            role=t.TensorRole.ACTIVATION,
        )  # fmt: skip

    def logarithms(self, index: int, result: t.Tensor) -> t.Tensor:
        """The log-sum-exp of a local result, in its shape (some kernels pad what was captured)."""
        return replace(self.local(index), shape=result.shape[: POSITIONS + 1])

    def operand(self, index: int) -> TensorRow:
        """An old tensor's new row and shape."""
        return self.tensor(index), self.local(index)

    def new(self, like: t.Tensor, *, alias_of: int | None = None) -> TensorRow:
        """Adds an activation like another."""
        row = self.builder.tensor(like.name, like.shape, like.dtype, t.TensorRole.ACTIVATION, alias_of=alias_of)
        return row, like

    def stands_for(self, index: int, row: int) -> None:
        """Says which new tensor those that read an old one read."""
        self.part.tensors[index] = row

    def kernel(
        self,
        op: t.Compute,
        name: str,
        reads: Sequence[TensorRow],
        makes: Sequence[TensorRow],
        nbytes: tuple[int, int] = (0, 0),
    ) -> int:
        """Adds an operation beside attention, of some bytes (read, written); a view, without any."""
        return self.builder.compute(
            name, phase=op.phase, module=op.module, stream=op.stream, inputs=[row for row, _ in reads],
            outputs=[row for row, _ in makes], bytes_read=nbytes[0], bytes_written=nbytes[1],
        )  # fmt: skip

    def attention(
        self,
        op: t.Compute,
        reads: Sequence[TensorRow],
        makes: Sequence[TensorRow],
        attributes: t.Attention,
        flops: int,
        *,
        stands: bool = True,
    ) -> None:
        """Adds attention of a block of the scores.

        Args:
            op: the old operation.
            reads: its operands, as the old one has them.
            makes: its results.
            attributes: of the block.
            flops: of the block.
            stands: whether others that name the old operation name this one.
        """
        changes: dict[str, object] = {}
        if op.forward_op is not None and op.forward_op >= 0:
            changes["forward_op"] = self.part.ops[op.forward_op]
        row = self.builder.add(
            op, inputs=[row for row, _ in reads], outputs=[row for row, _ in makes], durations=(),
            deps=[self.part.ops[before] for before in op.deps],
            bytes_read=sum(tensor.nbytes for _, tensor in reads),
            bytes_written=sum(tensor.nbytes for _, tensor in makes),
            flops=flops, attributes=attributes, **changes,
        )  # fmt: skip
        if stands:
            self.part.ops[op.id] = row

    def forward_of(self, op: t.Compute, results: Sequence[int]) -> int:
        """The old row of the operation whose results a backward operation reads."""
        makers = {int(self.graph.maker[i]) for i in results}
        if len(makers) != 1 or makers == {NONE}:
            raise PlanError(
                f"{op.module}: attention's backward pass is in another block than its forward pass: fold less"
            )
        return makers.pop()


def part_of(tensor: t.Tensor, share: int) -> t.Tensor:
    """A tensor like another with 1/share of its positions."""
    shape = (*tensor.shape[:POSITIONS], tensor.shape[POSITIONS] // share, *tensor.shape[POSITIONS + 1 :])
    return replace(tensor, shape=shape)
