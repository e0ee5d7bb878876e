"""Context parallelism: every rank has a part of each sequence, and attention alone needs the others' parts.

Activations are cut along the sequence, parameters are whole. Position ids, rotary caches and labels are cut with
the sequence; a loss that is a mean is that of a rank's own tokens, and nothing is reduced for it (averaging the
gradients over ranks makes the mean of the whole, as torchtitan does; Megatron-LM also sums two numbers for its
log). Each rank's gradients are summands, which the data-parallel passes reduce over the data axes and "cp"
together. What takes one position of a sequence (BERT's pooler) is done by every rank.

Two ways for attention. *ring* passes keys and values round the ranks (`Ring`); *all_to_all* gives each rank some
heads of the whole sequence instead (`HeadExchange`).

FLOPs are counted as they were captured, pairs that a causal mask hides too: each of `size` ranks has 1/size of
the step's, each of the `size` steps of a ring 1/size^2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, Protocol, get_args

from echograph.errors import PlanError, UnknownNameError
from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import Axis, StepGraph
from echograph.ir.passes.extent import Carriers, Extent, ExtentWriter

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


def sequence_shard(tensor: t.Tensor, share: int) -> t.Tensor:
    """A tensor like another with 1/share of its positions."""
    shape = (*tensor.shape[:POSITIONS], tensor.shape[POSITIONS] // share, *tensor.shape[POSITIONS + 1 :])
    return replace(tensor, shape=shape)


_KEYS, _GRADIENTS = 0, 1
"""Tags of what goes round."""

LENGTHS = 8
"""Bytes of a list of sequences' lengths, summed up, of one sample, which most micro-batches of a ring are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """What a step computes: all queries or keys (1), or one of their two chunks (2)."""

    queries: int = 1
    keys: int = 1
    causal: bool = False


class Ring:
    """Writes ring attention: keys and values go round the ranks while each computes with those it has.

    (Liu et al., "Ring Attention with Blockwise Transformers", 2023; Megatron-core's `cp_comm_type` p2p as
    TransformerEngine writes it.) In step i of n a rank computes its queries against the keys and values of
    rank r - i, which it sends on to r + 1 meanwhile, receiving those of r - i - 1. Each step leaves a result
    and the logarithm of its sum of exponentials. The logarithms are added up as steps end; after the last,
    results are rescaled and added.

    With load balance and a causal mask, each rank has chunks r and 2n - 1 - r of 2n. Step 0 is a causal
    square of S/n positions. Keys of a lower rank are seen by all queries, but only the first chunk of them;
    those of a higher one by the second chunk of queries, but whole. So each of the other steps computes
    (S/n)^2 / 2 pairs, as many as step 0. Ranks differ in how often they do either: the middle one is written.
    Without load balance, the last rank: a causal square and n - 1 whole ones, for which all others wait.
    Where no mask hides anything, all squares are whole.

    The backward pass goes round the other way, from the keys and values that came last; their gradients
    follow a step behind, each rank adding its own. Sent in all, by a layer: (n - 1) (k + v) forward, twice
    that backward. All steps run on the compute stream, where TransformerEngine alternates between two.
    Gradients add up in the type of the keys.

    What is copied is what TransformerEngine copies (v1.11, pytorch/attention.py, AttnFuncWithCPAndKVP2P): a chunk
    before each step that reads one of two, as its operands are contiguous; results into zeros, which each step
    adds to; backward keys and values into the buffer that goes round, the first gradients into their sums, and
    each step's gradients of keys and values side by side before they are added.

    Args:
        writer: of the graph.
        load_balance: `ContextParallel.load_balance`.
        host_waits: `ContextParallel.host_waits`.
    """

    def __init__(self, writer: ContextWriter, *, load_balance: bool, host_waits: bool = False) -> None:
        self.writer, self.load_balance, self.host_waits = writer, load_balance, host_waits
        self.sends = writer.builder.stream(f"comm.{AXIS}.send")
        self.receives = writer.builder.stream(f"comm.{AXIS}.recv")
        self._last: dict[int, TensorRow] = {}  # keys and values that came last, by the forward operation
        self._maker: dict[int, int] = {}  # operations that make what goes round

    def forward(self, op: t.Compute) -> None:
        """Writes the steps, and merges their results."""
        writer = self.writer
        query, key, value = (writer.operand(i) for i in op.inputs[:3])
        result = writer.local(op.outputs[0])
        sums = writer.logarithms(op.outputs[1], result)
        steps = self._steps(op)
        if self.host_waits:
            for _ in ("queries", "keys"):
                self._compare_lengths(op)
        buffer = self._pack(op, (key, value))
        partial: list[tuple[TensorRow, TensorRow]] = []
        total: TensorRow | None = None
        for number, step in enumerate(steps):
            pair = self._unpack(op, buffer, (key[1], value[1])) if number else (key, value)
            if number + 1 < len(steps):
                buffer = self._exchange(op, buffer, _KEYS, towards=1)
            made = [writer.new(sequence_shard(like, step.queries)) for like in (result, sums)]
            rest = () if number else [writer.operand(i) for i in op.outputs[2:]]
            read = [*self._chunk(op, step.queries, query), *self._chunk(op, step.keys, *pair)]
            self._attention(op, step, read, [*made, *rest], first=not number)
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
        buffer = self._copied(op, self._last[writer.forward_of(op, op.inputs[4:6])])
        keys = key[1], value[1]
        query_total: TensorRow | None = None
        key_total: TensorRow | None = None
        for number, step in enumerate(steps):
            pair = self._unpack(op, buffer, keys)
            if number + 1 < len(steps):
                buffer = self._exchange(op, buffer, _KEYS, towards=-1)
            if key_total is not None:
                key_total = self._exchange(op, key_total, _GRADIENTS, towards=-1)
            first, second, third = self._chunk(op, step.queries, gradient, query, result)
            (fourth,), read = self._chunk(op, step.queries, sums), self._chunk(op, step.keys, *pair)
            made = [
                writer.new(sequence_shard(writer.local(op.outputs[0]), step.queries)),
                *(writer.new(sequence_shard(writer.local(i), step.keys)) for i in op.outputs[1:3]),
            ]
            self._attention(op, step, [first, second, *read, third, fourth, *rest], made, first=not number)
            query_total = self._add(op, query[1], query_total, made[0])
            beside = self._pack(op, made[1:])
            key_total = self._add(op, buffer[1], key_total, beside)
        assert query_total is not None
        assert key_total is not None
        writer.stands_for(op.outputs[0], query_total[0])
        for index, whole in zip(op.outputs[1:3], self._unpack(op, key_total, keys), strict=True):
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

    def _compare_lengths(self, op: t.Compute) -> None:
        """`torch.equal` of sequences' lengths, whose answer the host waits for: with it, for all before it."""
        builder, phase, module = self.writer.builder, op.phase, op.module
        compared = builder.compute(
            "aten.equal", phase=phase, module=module, stream=op.stream, bytes_read=2 * LENGTHS, bytes_written=1
        )
        answer = builder.copy(
            "equal", t.CopyDirection.DEVICE_TO_HOST, nbytes=1, phase=phase, module=module, deps=(compared,)
        )
        builder.host("synchronize", phase=phase, module=module, deps=(answer,))

    def _chunk(self, op: t.Compute, share: int, *operands: TensorRow) -> list[TensorRow]:
        """All positions of tensors, or copies of one of their two chunks, by one kernel."""
        if share == 1:
            return list(operands)
        made = [self.writer.new(sequence_shard(like, share)) for _, like in operands]
        nbytes = sum(like.nbytes for _, like in made)
        self.writer.kernel(op, "aten.clone", operands, made, (nbytes, nbytes))
        return made

    def _copied(self, op: t.Compute, operand: TensorRow) -> TensorRow:
        """A copy of a tensor."""
        like = operand[1]
        made = self.writer.new(like)
        self._maker[made[0]] = self.writer.kernel(
            op, "aten.clone", (operand,), (made,), (like.nbytes, like.nbytes)
        )
        return made

    # -- what goes round -------------------------------------------------------------------------------------

    def _pack(self, op: t.Compute, pair: Sequence[TensorRow]) -> TensorRow:
        """Keys and values, or their gradients, one after the other."""
        nbytes = sum(like.nbytes for _, like in pair)
        made = self.writer.new(replace(pair[0][1], shape=(sum(like.numel for _, like in pair),)))
        self._maker[made[0]] = self.writer.kernel(op, "aten.cat", pair, (made,), (nbytes, nbytes))
        return made

    def _unpack(
        self, op: t.Compute, buffer: TensorRow, pair: tuple[t.Tensor, t.Tensor]
    ) -> tuple[TensorRow, TensorRow]:
        """Views of keys and values."""
        made = [self.writer.new(like, alias_of=buffer[0]) for like in pair]
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
        """Each step's result times exp(its logarithm - the total's), added to zeros."""
        made = self.writer.new(like)
        self.writer.kernel(op, "aten.zeros_like", (), (made,), (0, like.nbytes))
        for result, logarithms in partial:
            nbytes = 2 * result[1].nbytes + 2 * logarithms[1].nbytes
            new = self.writer.new(like, alias_of=made[0])
            reads = (made, result, logarithms, total)
            self.writer.kernel(op, f"{AXIS}.merge", reads, (new,), (nbytes, result[1].nbytes))
            made = new
        return made[0]

    def _add(self, op: t.Compute, like: t.Tensor, total: TensorRow | None, part: TensorRow) -> TensorRow:
        """Gradients of a step added to those of the steps before; the first are copied."""
        nbytes = part[1].nbytes
        made = self.writer.new(like, alias_of=None if total is None else total[0])
        reads = (part,) if total is None else (total, part)
        name = "aten.copy_" if total is None else "aten.add_"
        self._maker[made[0]] = self.writer.kernel(op, name, reads, (made,), (len(reads) * nbytes, nbytes))
        return made


HEADS = 1


class HeadExchange:
    """Writes attention of a share of the heads, by exchanging heads for positions.

    (Jacobs et al., "DeepSpeed Ulysses", 2023; Megatron-core's `cp_comm_type` a2a.) An all-to-all of queries,
    one of keys and one of values give each rank all positions of its share of the heads, so attention is the
    usual one; an all-to-all of the result gives it back its positions with all heads. The backward pass is
    the same in reverse: one for the gradient of the result, three for those of queries, keys and values. Each
    moves a rank's whole tensor, and a copy before and after it puts together what goes to each rank. Where
    ranks outnumber key-value heads, these are repeated, and their gradients added up. Every rank computes all
    pairs of its heads, so masks balance by themselves.

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


MAX_SIZE = 4096
OPERANDS, OPERANDS_BACKWARD = 3, 6
"""Queries, keys and values; backward the result, its log-sum-exp and its gradient too. One more is a mask."""
Method = Literal["ring", "all_to_all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallel:
    """The step as one rank of a context-parallel group executes it.

    Attributes:
        size: ranks that share each sequence.
        method: how attention gets at the other ranks' parts: "ring" or "all_to_all".
        load_balance: cut sequences into 2 `size` chunks and give rank r chunks r and 2 `size` - 1 - r, so that a
            causal mask hides as much from each. Without it a ring waits for the last rank, which is the one then
            written. Makes no difference to all_to_all.
        host_waits: whether the host waits, before each ring of forward, for a comparison of lengths on the device
            (TransformerEngine v1.10 to v1.13, `AttnFuncWithCPAndKVP2P`: two `torch.equal`).
    """

    name: ClassVar[str] = "context_parallel"

    size: int
    method: Method = "ring"
    load_balance: bool = True
    host_waits: bool = False

    def __call__(self, graph: StepGraph) -> StepGraph:
        """The step with local shapes and the communications of attention over the axis "cp", just outside "tp".

        Raises:
            PlanError: the size is out of range or does not divide the sequence (names lengths that it does) or the
                heads, the step has no fused attention of a sequence to itself, or dims cannot be told apart.
            UnknownNameError: there is no such method.
        """
        if self.method not in get_args(Method):
            raise UnknownNameError("context-parallel method", self.method, get_args(Method))
        self._check(graph)
        if self.size == 1:
            return graph
        sequence = Extent(
            name="sequence",
            size=graph.workload.sequence_length,
            dim=1,
            advice="capture another sequence length, or do without context parallelism",
        )
        ring = partial(Ring, load_balance=self.load_balance, host_waits=self.host_waits)
        method = ring if self.method == "ring" else HeadExchange
        return ContextWriter(graph, Carriers(graph, sequence), ranks=self.size, method=method).write()

    def _check(self, graph: StepGraph) -> None:
        if not 1 <= self.size <= MAX_SIZE:
            raise PlanError(f"context parallelism over {self.size} ranks: choose 1 to {MAX_SIZE}")
        if any(axis.name == AXIS for axis in graph.mesh):
            raise PlanError("the step is context-parallel already: start from the step as it was captured")
        length = graph.workload.sequence_length
        chunks = 2 * self.size if self.method == "ring" and self.load_balance else self.size
        if self.size > 1 and not length:
            raise PlanError(
                f"context parallelism over {self.size} ranks: the samples of this step are not said to be "
                "sequences: leave it out"
            )
        if self.size > 1 and length % chunks:
            nearest = (
                f"{length // chunks * chunks} or " * (length >= chunks) + f"{(length // chunks + 1) * chunks}"
            )
            raise PlanError(
                f"context parallelism over {self.size} ranks cuts the sequence of {length} into {chunks} chunks, "
                f"which do not divide it: capture a sequence of {nearest}"
            )
        if self.size > 1:
            _check_attention(graph)


def _check_attention(graph: StepGraph) -> None:
    """Attention must be fused, and mask by position alone."""
    fused = [op for op in graph.ops if isinstance(op, t.Compute) and isinstance(op.attributes, t.Attention)]
    if not fused:
        raise PlanError(
            "context parallelism needs fused attention, and the step has none: capture with --attention sdpa, if "
            "the model has it"
        )
    for op in fused:
        operands = [i for i in op.inputs if len(graph.tensors.shape.row(i)) >= 3]
        if len(operands) > (OPERANDS_BACKWARD if op.name.endswith("backward") else OPERANDS):
            raise PlanError(
                f"{op.module}: context parallelism does not cut a mask or bias of attention: do without it"
            )
