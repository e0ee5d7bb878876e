r"""Ring attention: keys and values go round the ranks while each computes with those it has.

(Liu et al., "Ring Attention with Blockwise Transformers", 2023; Megatron-core's `cp_comm_type` p2p as
TransformerEngine writes it.) In step i of n a rank computes its queries against the keys and values of rank r - i,
which it sends on to r + 1 meanwhile, receiving those of r - i - 1. Each step leaves a result and the logarithm of
its sum of exponentials. The logarithms are added up as steps end; after the last, results are rescaled and added.

With load balance and a causal mask, each rank has chunks r and 2n - 1 - r of 2n. Step 0 is a causal square of S/n
positions. Keys of a lower rank are seen by all queries, but only the first chunk of them; those of a higher one by
the second chunk of queries, but whole. So each of the other steps computes (S/n)^2 / 2 pairs, as many as step 0.
Ranks differ in how often they do either: the middle one is written. Without load balance, the last rank: a causal
square and n - 1 whole ones, for which all others wait. Where no mask hides anything, all squares are whole.

The backward pass goes round the other way, from the keys and values that came last; their gradients follow a step
behind, each rank adding its own. Sent in all, by a layer: (n - 1) (k + v) forward, 2 (n - 1) (k + v) backward.
Slices of chunks are views (flash attention takes strides); all steps run on the compute stream, where
TransformerEngine alternates between two. Gradients add up in the type of the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from echograph.ir import types as t
from echograph.ir.passes.context_parallel.write import AXIS, ContextWriter, TensorRow, part_of

_KEYS, _GRADIENTS = 0, 1
"""Tags of what goes round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """What a step computes: all queries or keys (1), or one of their two chunks (2)."""

    queries: int = 1
    keys: int = 1
    causal: bool = False


class Ring:
    """Writes attention as steps of a ring.

    Args:
        writer: of the graph.
        load_balance: as in `ContextParallel`.
    """

    def __init__(self, writer: ContextWriter, *, load_balance: bool) -> None:
        self.writer, self.load_balance = writer, load_balance
        self.sends = writer.builder.stream(f"comm.{AXIS}.send")
        self.receives = writer.builder.stream(f"comm.{AXIS}.recv")
        self._last: dict[int, TensorRow] = {}  # keys and values that came last, by the forward operation
        self._maker: dict[int, int] = {}  # operations that make what goes round
        self._chunks: dict[int, TensorRow] = {}

    def forward(self, op: t.Compute) -> None:
        """Writes the steps, and merges their results."""
        writer = self.writer
        query, key, value = (writer.operand(i) for i in op.inputs[:3])
        result = writer.local(op.outputs[0])
        sums = writer.logarithms(op.outputs[1], result)
        steps = self._steps(op)
        buffer = self._pack(op, (key, value))
        partial: list[tuple[TensorRow, TensorRow]] = []
        total: TensorRow | None = None
        for number, step in enumerate(steps):
            pair = self._unpack(op, buffer, (key[1], value[1]), step.keys) if number else (key, value)
            if number + 1 < len(steps):
                buffer = self._exchange(op, buffer, _KEYS, towards=1)
            made = [writer.new(part_of(like, step.queries)) for like in (result, sums)]
            rest = () if number else [writer.operand(i) for i in op.outputs[2:]]
            self._attention(op, step, [self._queries(op, query, step), *pair], [*made, *rest], first=not number)
            partial.append((made[0], made[1]))
            total = made[1] if total is None else self._add_logarithms(op, total, made[1], fresh=number == 1)
        assert total is not None
        self._last[op.id] = buffer
        writer.stands_for(op.outputs[1], total[0])
        writer.stands_for(op.outputs[0], self._merge(op, result, total, partial))

    def backward(self, op: t.Compute) -> None:
        """Writes the steps in reverse, and adds up the gradients."""
        writer = self.writer
        gradient, query, key, value, result, sums, *rest = (writer.operand(i) for i in op.inputs)
        sums = sums[0], writer.logarithms(op.inputs[5], result[1])
        steps = self._steps(op)[::-1]
        buffer = self._last[writer.forward_of(op, op.inputs[4:6])]
        keys = key[1], value[1]
        query_total: TensorRow | None = None
        key_total: TensorRow | None = None
        for number, step in enumerate(steps):
            pair = self._unpack(op, buffer, keys, step.keys)
            if number + 1 < len(steps):
                buffer = self._exchange(op, buffer, _KEYS, towards=-1)
            if key_total is not None:
                key_total = self._exchange(op, key_total, _GRADIENTS, towards=-1)
            first, second, third, fourth = (self._queries(op, x, step) for x in (gradient, query, result, sums))
            made = [
                writer.new(part_of(writer.local(op.outputs[0]), step.queries)),
                *(writer.new(part_of(writer.local(i), step.keys)) for i in op.outputs[1:3]),
            ]
            self._attention(op, step, [first, second, *pair, third, fourth, *rest], made, first=not number)
            query_total = self._add(op, query[1], query_total, made[:1])
            key_total = self._add(op, buffer[1], key_total, made[1:])
        assert query_total is not None
        assert key_total is not None
        writer.stands_for(op.outputs[0], query_total[0])
        for index, whole in zip(op.outputs[1:3], self._unpack(op, key_total, keys, 1), strict=True):
            writer.stands_for(index, whole[0])

    # -- steps -----------------------------------------------------------------------------------------------

    def _steps(self, op: t.Compute) -> list[_Step]:
        assert isinstance(op.attributes, t.Attention)
        ranks, first = self.writer.ranks, _Step(causal=op.attributes.causal)
        if not (op.attributes.causal and self.load_balance):
            return [first, *[_Step()] * (ranks - 1)]
        lower = ranks // 2  # the ranks before the middle one
        return [first, *[_Step(keys=2)] * lower, *[_Step(queries=2)] * (ranks - 1 - lower)]

    def _attention(
        self, op: t.Compute, step: _Step, reads: Sequence[TensorRow], makes: Sequence[TensorRow], *, first: bool
    ) -> None:
        assert isinstance(op.attributes, t.Attention)
        attributes = replace(op.attributes, causal=step.causal)
        self.writer.attention(op, reads, makes, attributes, op.flops // self.writer.ranks**2, stands=first)

    def _queries(self, op: t.Compute, operand: TensorRow, step: _Step) -> TensorRow:
        """All positions of a tensor, or a view of the second chunk."""
        if step.queries == 1:
            return operand
        row, like = operand
        if row not in self._chunks:
            part = part_of(like, step.queries)
            self._chunks[row] = self.writer.new(part, alias_of=row)
            self.writer.kernel(op, "aten.slice", (operand,), (self._chunks[row],))
        return self._chunks[row]

    # -- what goes round -------------------------------------------------------------------------------------

    def _pack(self, op: t.Compute, pair: Sequence[TensorRow]) -> TensorRow:
        """Keys and values, or their gradients, one after the other; what is left out of a chunk is 0."""
        elements = sum(like.numel for _, like in pair)
        return self._packed(op, pair, replace(pair[0][1], shape=(elements,)))

    def _packed(self, op: t.Compute, pair: Sequence[TensorRow], like: t.Tensor) -> TensorRow:
        made = self.writer.new(like)
        self._maker[made[0]] = self.writer.kernel(
            op, "aten.cat", pair, (made,), (sum(x.nbytes for _, x in pair), like.nbytes)
        )
        return made

    def _unpack(
        self, op: t.Compute, buffer: TensorRow, pair: tuple[t.Tensor, t.Tensor], share: int
    ) -> tuple[TensorRow, TensorRow]:
        """Views of keys and values, or of their first chunks."""
        made = [self.writer.new(part_of(like, share), alias_of=buffer[0]) for like in pair]
        self.writer.kernel(op, "aten.split_with_sizes", (buffer,), made)
        return made[0], made[1]

    def _exchange(self, op: t.Compute, sent: TensorRow, tag: int, *, towards: int) -> TensorRow:
        """Sends something on and receives the like, which cannot come before it is ready on the other side."""
        row, like = sent
        received = self.writer.new(like)
        builder, payload = self.writer.builder, t.Payload.GRADIENT if tag == _GRADIENTS else t.Payload.ACTIVATION
        builder.send(
            f"{AXIS}.send", group=self.writer.group, peer=towards, tag=tag, nbytes=like.nbytes, payload=payload,
            phase=op.phase, module=op.module, stream=self.sends, inputs=(row,),
        )  # fmt: skip
        self._maker[received[0]] = builder.recv(
            f"{AXIS}.recv", group=self.writer.group, peer=-towards, tag=tag, nbytes=like.nbytes, payload=payload,
            phase=op.phase, module=op.module, stream=self.receives, outputs=(received[0],),
            deps=(self._maker[row],),
        )  # fmt: skip
        return received

    # -- sums over steps -------------------------------------------------------------------------------------

    def _add_logarithms(self, op: t.Compute, total: TensorRow, new: TensorRow, *, fresh: bool) -> TensorRow:
        """The logarithm of the sum of exponentials so far: in place from the second sum on."""
        made = self.writer.new(total[1], alias_of=None if fresh else total[0])
        written = total[1].nbytes if fresh else new[1].nbytes
        self.writer.kernel(op, "aten.logaddexp", (total, new), (made,), (written + new[1].nbytes, written))
        return made

    def _merge(
        self, op: t.Compute, like: t.Tensor, total: TensorRow, partial: Sequence[tuple[TensorRow, TensorRow]]
    ) -> int:
        """Each step's result times exp(its logarithm - the total's), added up."""
        made: list[TensorRow] = []
        for result, logarithms in partial:
            nbytes = result[1].nbytes * (1 + len(made[-1:])) + 2 * logarithms[1].nbytes
            new = self.writer.new(like, alias_of=made[-1][0] if made else None)
            reads = (*made[-1:], result, logarithms, total)
            self.writer.kernel(op, f"{AXIS}.merge", reads, (new,), (nbytes, result[1].nbytes))
            made.append(new)
        return made[-1][0]

    def _add(
        self, op: t.Compute, like: t.Tensor, total: TensorRow | None, parts: Sequence[TensorRow]
    ) -> TensorRow:
        """Gradients of a step added to those of the steps before."""
        if total is None:
            return parts[0] if parts[0][1].shape == like.shape else self._packed(op, parts, like)
        made, nbytes = self.writer.new(like, alias_of=total[0]), sum(x.nbytes for _, x in parts)
        self._maker[made[0]] = self.writer.kernel(op, "aten.add_", (total, *parts), (made,), (2 * nbytes, nbytes))
        return made
