"""Attention by exchanging heads for positions.

(Jacobs et al., "DeepSpeed Ulysses", 2023; Megatron-core's `cp_comm_type` a2a.) An all-to-all of queries, one of
keys and one of values give each rank all positions of its share of the heads, so attention is the usual one; an
all-to-all of the result gives it back its positions with all heads. The backward pass is the same in reverse: one
for the gradient of the result, three for those of queries, keys and values. Each moves a rank's whole tensor, and
a copy before and after it puts together what goes to each rank. Where ranks outnumber key-value heads, these are
repeated, and their gradients added up. Every rank computes all pairs of its heads, so masks balance by themselves.
"""

from __future__ import annotations

from dataclasses import replace

from echograph.errors import PlanError
from echograph.ir import types as t
from echograph.ir.passes.context_parallel.write import AXIS, POSITIONS, ContextWriter, TensorRow

HEADS = 1


class HeadExchange:
    """Writes attention of a share of the heads.

    Args:
        writer: of the graph.
    """

    def __init__(self, writer: ContextWriter) -> None:
        self.writer = writer
        self.stream = writer.builder.stream(f"comm.{AXIS}")
        self._exchanged: dict[int, dict[int, TensorRow]] = {}  # by the forward operation, then by old row

    def forward(self, op: t.Compute) -> None:
        """Exchanges queries, keys and values, computes, and exchanges the result."""
        writer = self.writer
        attributes = self._attributes(op)
        held = {i: self._to_heads(op, self._repeated(op, writer.operand(i))) for i in op.inputs[:3]}
        result, sums, *rest = op.outputs
        whole = writer.local(result)
        held[result] = writer.new(self._of_heads(whole))
        held[sums] = writer.new(self._of_heads(writer.logarithms(sums, whole)))
        makes = [held[result], held[sums], *(writer.operand(i) for i in rest)]
        writer.attention(op, [held[i] for i in op.inputs[:3]], makes, attributes, op.flops // writer.ranks)
        self._exchanged[op.id] = held
        writer.stands_for(sums, held[sums][0])
        writer.stands_for(result, self._to_positions(op, held[result])[0])

    def backward(self, op: t.Compute) -> None:
        """Exchanges the gradient, computes, and exchanges those of queries, keys and values."""
        writer = self.writer
        held = self._exchanged[writer.forward_of(op, op.inputs[4:6])]
        gradient = self._to_heads(op, writer.operand(op.inputs[0]))
        saved = [held[i] if i in held else self._again(op, i) for i in op.inputs[1:6]]
        rest = [writer.operand(i) for i in op.inputs[6:]]
        makes = [writer.new(like) for _, like in saved[:3]]
        writer.attention(op, [gradient, *saved, *rest], makes, self._attributes(op), op.flops // writer.ranks)
        for index, made in zip(op.outputs[:3], makes, strict=True):
            writer.stands_for(index, self._summed(op, self._to_positions(op, made), writer.local(index))[0])

    def _again(self, op: t.Compute, index: int) -> TensorRow:
        """Queries, keys or values that were computed again are exchanged again."""
        operand = self._repeated(op, self.writer.operand(index))
        return self._exchange(op, operand, self._of_heads(operand[1]), t.Payload.ACTIVATION)

    def _attributes(self, op: t.Compute) -> t.Attention:
        assert isinstance(op.attributes, t.Attention)
        ranks, heads, keys = self.writer.ranks, op.attributes.heads, op.attributes.kv_heads
        if heads % ranks or (keys % ranks and ranks % keys):
            sizes = [n for n in range(1, heads + 1) if heads % n == 0 and (keys % n == 0 or n % keys == 0)]
            below, above = max(n for n in sizes if n < ranks), [n for n in sizes if n > ranks][:1]
            raise PlanError(
                f"{op.module}: all_to_all over {ranks} ranks does not divide {heads} heads and {keys} of keys: "
                f"choose a size of {' or '.join(map(str, (below, *above)))}, or the ring"
            )
        return replace(op.attributes, heads=heads // ranks, kv_heads=max(1, keys // ranks))

    def _of_heads(self, like: t.Tensor) -> t.Tensor:
        """All positions of a rank's heads."""
        ranks, shape = self.writer.ranks, list(like.shape)
        shape[HEADS], shape[POSITIONS] = shape[HEADS] // ranks, shape[POSITIONS] * ranks
        return replace(like, shape=tuple(shape))

    def _of_positions(self, like: t.Tensor) -> t.Tensor:
        """All heads of a rank's positions."""
        ranks, shape = self.writer.ranks, list(like.shape)
        shape[HEADS], shape[POSITIONS] = shape[HEADS] * ranks, shape[POSITIONS] // ranks
        return replace(like, shape=tuple(shape))

    def _to_heads(self, op: t.Compute, operand: TensorRow) -> TensorRow:
        return self._exchange(op, operand, self._of_heads(operand[1]), _payload(op))

    def _to_positions(self, op: t.Compute, operand: TensorRow) -> TensorRow:
        return self._exchange(op, operand, self._of_positions(operand[1]), _payload(op))

    def _exchange(self, op: t.Compute, operand: TensorRow, becomes: t.Tensor, payload: t.Payload) -> TensorRow:
        """An all-to-all, and a copy on either side."""
        writer, like = self.writer, operand[1]
        packed, arrived, made = writer.new(like), writer.new(like), writer.new(becomes)
        writer.kernel(op, "aten.clone", (operand,), (packed,), (like.nbytes, like.nbytes))
        writer.builder.collective(
            f"{AXIS}.all_to_all", t.CollectiveKind.ALL_TO_ALL, group=writer.group, bytes_per_rank=like.nbytes,
            dtype=like.dtype, payload=payload, asynchronous=True, phase=op.phase, module=op.module,
            stream=self.stream, inputs=(packed[0],), outputs=(arrived[0],),
        )  # fmt: skip
        writer.kernel(op, "aten.clone", (arrived,), (made,), (like.nbytes, like.nbytes))
        return made

    def _repeated(self, op: t.Compute, operand: TensorRow) -> TensorRow:
        """Heads of keys as often as there are ranks, where there are fewer."""
        row, like = operand
        if like.shape[HEADS] >= self.writer.ranks:
            return row, like
        made = self.writer.new(replace(like, shape=(like.shape[0], self.writer.ranks, *like.shape[2:])))
        self.writer.kernel(op, "aten.repeat_interleave", (operand,), (made,), (like.nbytes, made[1].nbytes))
        return made

    def _summed(self, op: t.Compute, operand: TensorRow, like: t.Tensor) -> TensorRow:
        """The gradient of repeated heads."""
        if operand[1].shape == like.shape:
            return operand
        made = self.writer.new(like)
        self.writer.kernel(op, "aten.sum", (operand,), (made,), (operand[1].nbytes, like.nbytes))
        return made


def _payload(op: t.Compute) -> t.Payload:
    return t.Payload.GRADIENT if op.phase == t.Phase.BACKWARD else t.Payload.ACTIVATION
