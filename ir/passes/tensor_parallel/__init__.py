"""Tensor parallelism as Megatron-LM does it: each layer's matrices are shared by a group of ranks.

A column-parallel product shares the outputs of its weight, and the row-parallel one after it the inputs, so that
what lies between (heads of attention, channels of the feed-forward part) stays on its rank. Each rank then holds
a summand of the row-parallel product: it is all-reduced, and the bias added after. In the backward pass the input
gradient of the column-parallel products is all-reduced, once for all products that read the same input, as soon
as it is made, so that the weight gradients are computed meanwhile. The placements of all other tensors follow by
propagation (`plan.Sharding`).

Embeddings and heads share the vocabulary, padded so that each rank has a multiple of 128 rows (Megatron's
`make_vocab_size_divisible_by`); zeroing the rows that a rank lacks is not counted. The logits stay shared: the
loss all-reduces, for each token, the greatest logit, the sum of exponentials, and the log-probability of the
target (Megatron's `VocabParallelCrossEntropy`; torch's `loss_parallel` reduces the same three).

With sequence parallelism what was whole between the layers is shared along the sequence: summands are
reduce-scattered, and inputs of column-parallel layers all-gathered, again in the backward pass for the weight
gradients (Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022, section
4.2.2). A gather starts when what reads it is next, so gathers are hidden less than Megatron hides them.

Where keys and values have fewer heads than there are ranks, the weights are divided evenly all the same, as in
megatron-core (`SelfAttention.get_query_key_value_tensors`): outputs are all-gathered, and each rank takes the one
head that its queries need. In the backward pass gradients are reduce-scattered, which adds up those of ranks with
the same head. So no weight is held twice, and no weight gradient reduced. Megatron gathers the queries, too,
which stand between the keys in its fused weight; here they stay where they are.

Experts share their hidden channels (expert tensor parallelism), the router is whole. Their summands are weighted
and added up by token before they are reduced, as with Megatron's all-gather dispatcher. Where the last product
has a bias, rows are reduced before it is added: one for each expert that a token goes to. Or they are left whole
(`experts`), for the ranks to share as those of other axes do.

Clipping by norm, and the overflow flag of fp16: see `model.total_norms`. Norms are those of the first rank,
which counts also what every rank holds. What is recomputed is shared, and communicates, as the forward pass does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from typing import ClassVar

from echograph.errors import PlanError
from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import Axis, StepGraph
from echograph.ir.passes.dims import Shape
from echograph.ir.passes.rewrite import StepWriter
from echograph.ir.passes.tensor_parallel.experts import OwnTokens, whole_experts
from echograph.ir.passes.tensor_parallel.plan import PLAN, Indivisible, Sharding, Style, check_plan, infer_plan
from echograph.ir.passes.tensor_parallel.rules import (
    PARTIAL,
    VIEWS,
    WHOLE,
    Decision,
    Partial,
    Placement,
    Shard,
    operator,
)
from echograph.ir.types import Phase

AXIS = "tp"
_KINDS = t.CollectiveKind


def write(graph: StepGraph, sharding: Sharding, *, gathers_again: bool = True) -> StepGraph:
    """The step of one rank.

    Args:
        graph: the whole step.
        sharding: the placements of its tensors.
        gathers_again: whether backward gathers again what forward gathered along the sequence.
    """
    return _Writer(graph, sharding, gathers_again).write()


class _Writer(StepWriter):
    """Copies a graph with local shapes; of summands that are reduced, readers get what they are reduced to.

    `copies` has what was converted to another placement for some of a tensor's readers.
    """

    def __init__(self, graph: StepGraph, sharding: Sharding, gathers_again: bool) -> None:
        super().__init__(graph)
        self.sharding = sharding
        self.by_phase = sharding.sequence_parallel and gathers_again
        self.builder.mesh = (*graph.mesh, Axis(name=AXIS, size=sharding.size))
        self.group = self.builder.group(AXIS, axes=(AXIS,))
        self.stream = self.builder.stream(f"comm.{AXIS}")
        self.copies: dict[tuple[int, Placement, t.Phase | None], int] = {}

    def operation(self, op: t.Op) -> None:
        """Writes an operation on its local tensors, and what has to be communicated before and after it."""
        decision = self.sharding.decisions.get(op.id)
        if decision is None or not isinstance(op, t.Compute):
            decision = Decision((WHOLE,) * len(op.inputs), (WHOLE,) * len(op.outputs))
        reads = [self._read(i, wanted, op) for i, wanted in zip(op.inputs, decision.inputs, strict=True)]
        if isinstance(op, t.Compute) and self._in_parts(op, decision, reads):
            return
        outputs = [self._made(i, self._alias(op, i, reads)) for i in op.outputs]
        self.part.ops[op.id] = self._add(op, decision, reads, outputs)
        for index, made in zip(op.outputs, decision.outputs, strict=True):
            if isinstance(made, Partial) and index in self.sharding.reduced:
                self.part.tensors[index] = self._reduce(index, op, self.part.tensors[index])
            elif index in self.sharding.cut:
                placement = self.sharding.placement[index]
                self.part.tensors[index] = self._slice(index, placement, op, self.part.tensors[index])

    # -- tensors -----------------------------------------------------------------------------------------

    def tensor(self, index: int, **changes: object) -> int:
        """New row of what readers of an old tensor read."""
        known = self.part.tensors.get(index)
        return self._made(index) if known is None else known

    def _made(self, index: int, alias: int | None = None) -> int:
        """Adds a tensor as its maker leaves it: a summand, and what is cut later, have their whole shape."""
        tensor, sharding = self.graph.tensor(index), self.sharding
        if alias is None and tensor.alias_of is not None:
            alias = self.tensor(tensor.alias_of)
        whole = sharding.is_partial(index) or index in sharding.cut
        shape = tensor.shape if whole else sharding.shapes.get(index, tensor.shape)
        cut = tensor.role.persistent and isinstance(sharding.placement.get(index), Shard)
        over = (*tensor.sharded, AXIS) if cut else tensor.sharded
        self.part.tensors[index] = self.add_tensor(replace(tensor, shape=shape, sharded=over), alias)
        return self.part.tensors[index]

    def _read(self, index: int, wanted: Placement, op: t.Op) -> int:
        """The tensor with the placement that an operation wants, converted before it if need be."""
        has = self.sharding.placement.get(index, WHOLE)
        if has == wanted or isinstance(has, Partial):
            return self.tensor(index)
        key = (index, wanted, op.phase if self.by_phase else None)
        if key not in self.copies:
            self.copies[key] = self._convert(index, has, wanted, op)
        return self.copies[key]

    def _convert(self, index: int, has: Placement, wanted: Placement, op: t.Op) -> int:
        if isinstance(has, Shard) and isinstance(wanted, Shard) and has == replace(wanted, shares=has.shares):
            return self._share_otherwise(index, has, wanted, op)
        if isinstance(has, Shard) and has.shares and op.phase == t.Phase.BACKWARD:
            return self._sum_of_shares(index, wanted, op)
        if wanted == WHOLE:
            return self._gather(index, op)
        whole = self._read(index, WHOLE, op) if isinstance(has, Shard) else self.tensor(index)
        return self._slice(index, wanted, op, whole)

    def _slice(self, index: int, wanted: Placement, op: t.Op, source: int) -> int:
        tensor, shape = self.graph.tensor(index), self.sharding.local_shape(index, wanted)
        if shape == tensor.shape:  # all ranks have the one share
            return source
        local = self.builder.tensor(tensor.name, shape, tensor.dtype, tensor.role, alias_of=source)
        self.builder.compute("aten.slice", phase=op.phase, module=op.module, inputs=(source,), outputs=(local,))
        return local

    def _share_otherwise(self, index: int, has: Shard, wanted: Shard, op: t.Op) -> int:
        """The shares that neighbouring ranks have in common, of each rank's own, or the other way round.

        Of a gradient, ranks with a share in common have summands.
        """
        common = bool(wanted.shares)
        if op.phase != t.Phase.BACKWARD:
            return self._slice(index, wanted, op, self._read(index, WHOLE, op) if common else self.tensor(index))
        if common:
            return self._among_zeros(index, wanted, op)
        tensor, shape = self.graph.tensor(index), self.sharding.local_shape(index, wanted)
        made = self.builder.tensor(tensor.name, shape, tensor.dtype, tensor.role)
        self._collective(_KINDS.REDUCE_SCATTER, tensor, op, (self._among_zeros(index, WHOLE, op),), (made,))
        return made

    def _sum_of_shares(self, index: int, wanted: Placement, op: t.Op) -> int:
        """A whole gradient of shares that ranks have in common, or another part of it."""
        tensor, summand = self.graph.tensor(index), self._among_zeros(index, WHOLE, op)
        made = self.builder.tensor(tensor.name, tensor.shape, tensor.dtype, tensor.role, alias_of=summand)
        self._collective(_KINDS.ALL_REDUCE, tensor, op, (summand,), (made,))
        return made if wanted == WHOLE else self._slice(index, wanted, op, made)

    def _among_zeros(self, index: int, wanted: Placement, op: t.Op) -> int:
        """A larger part of a gradient, zero where a rank has no summand, as autograd undoes a slice."""
        tensor, source, shape = (
            self.graph.tensor(index),
            self.tensor(index),
            self.sharding.local_shape(index, wanted),
        )
        made = self.builder.tensor(tensor.name, shape, tensor.dtype, tensor.role)
        held, written = self.sharding.shapes[index], tensor.dtype.nbytes(prod(shape))
        read = tensor.dtype.nbytes(prod(held))
        self._local(op, "aten.slice_backward", (source,), (made,), read, written)
        return made

    def _gather(self, index: int, op: t.Op) -> int:
        """Gathers a tensor; of a view, what it is a view of, so that several views share the gathering."""
        tensor, maker = self.graph.tensor(index), int(self.graph.maker[index])
        if maker != NONE and operator(self.graph, maker) in VIEWS:
            view = self.graph.ops[maker]
            if len(view.outputs) == 1 and isinstance(self.sharding.placement.get(view.inputs[0]), Shard):
                whole = self._read(view.inputs[0], WHOLE, op)
                made = self.builder.tensor(tensor.name, tensor.shape, tensor.dtype, tensor.role, alias_of=whole)
                self.builder.compute(view.name, phase=op.phase, module=op.module, inputs=(whole,), outputs=(made,))
                return made
        made = self.builder.tensor(tensor.name, tensor.shape, tensor.dtype, tensor.role)
        self._collective(_KINDS.ALL_GATHER, tensor, op, (self.tensor(index),), (made,))
        return made

    def _reduce(self, index: int, op: t.Op, summand: int) -> int:
        """Adds up summands over the ranks, in place, or into shares."""
        tensor, target = self.graph.tensor(index), self.sharding.placement[index]
        shape = self.sharding.local_shape(index, target)
        alias = summand if target == WHOLE else None
        kind = _KINDS.ALL_REDUCE if target == WHOLE else _KINDS.REDUCE_SCATTER
        made = self.builder.tensor(tensor.name, shape, tensor.dtype, tensor.role, alias_of=alias)
        self._collective(kind, tensor, op, (summand,), (made,))
        return made

    def _collective(
        self, kind: t.CollectiveKind, tensor: t.Tensor, op: t.Op, inputs: Sequence[int], outputs: Sequence[int]
    ) -> None:
        payloads = {t.TensorRole.GRADIENT: t.Payload.GRADIENT, t.TensorRole.PARAMETER: t.Payload.PARAMETER}
        self.builder.collective(
            f"{AXIS}.{kind.name.lower()}",
            kind,
            group=self.group,
            bytes_per_rank=tensor.nbytes,
            dtype=tensor.dtype,
            payload=payloads.get(tensor.role, t.Payload.ACTIVATION) if tensor.shape else t.Payload.OTHER,
            asynchronous=True,
            phase=op.phase,
            module=op.module,
            inputs=inputs,
            outputs=outputs,
            stream=self.stream,
        )

    # -- operations --------------------------------------------------------------------------------------

    def _in_parts(self, op: t.Compute, decision: Decision, reads: Sequence[int]) -> bool:
        """Writes an operation that communicates in its midst; whether it is one."""
        first = decision.inputs[0] if decision.inputs else WHOLE
        shares_classes = isinstance(first, Shard) and first.dim == 1
        match op.name:
            case "aten.addmm" | "aten.baddbmm" if isinstance(decision.outputs[0], Partial):
                self._product_then_bias(op, decision, reads)
            case "aten._log_softmax" if shares_classes:
                self._log_softmax(op, reads[0])
            case "aten.nll_loss_forward" if shares_classes:
                self._nll_loss(op, reads)
            case "aten._log_softmax_backward_data" if shares_classes:
                self._log_softmax_backward(op, reads)
            case _:
                return False
        return True

    def _alias(self, op: t.Op, index: int, reads: Sequence[int]) -> int | None:
        """A view is one of what the operation reads now, which may be a converted copy."""
        alias = self.graph.tensor(index).alias_of
        return reads[op.inputs.index(alias)] if alias in op.inputs else None

    def _add(self, op: t.Op, decision: Decision, reads: Sequence[int], outputs: Sequence[int]) -> int:
        changes: dict[str, object] = {
            "inputs": reads,
            "outputs": outputs,
            "deps": [self.part.ops[d] for d in op.deps],
        }
        if isinstance(op, t.Compute):
            if op.forward_op is not None and op.forward_op >= 0:
                changes["forward_op"] = self.part.ops[op.forward_op]
            if any(isinstance(p, Shard) for p in (*decision.inputs, *decision.outputs)):
                changes |= self._local_work(op, decision)
        return self.builder.add(op, **changes)

    def _local_work(self, op: t.Compute, decision: Decision) -> dict[str, object]:
        """A rank's share of an operation's work; durations of the whole one no longer hold."""
        placed = [*zip(op.inputs, decision.inputs, strict=True), *zip(op.outputs, decision.outputs, strict=True)]
        share = next(self._share(i, p) for i, p in placed if isinstance(p, Shard))
        read = self._local_bytes(op.inputs, decision.inputs, op.bytes_read)
        if op.name == "aten.embedding" and isinstance(decision.outputs[0], Partial):
            read = op.bytes_read  # a row a token, whichever rank has it
        written = op.bytes_written
        if op.outputs:
            written = self._local_bytes(op.outputs, decision.outputs, written)
        attributes = op.attributes
        if isinstance(attributes, t.Attention):
            size, heads = self.sharding.size, attributes.kv_heads
            kv_heads = heads // min(size, heads)
            attributes = replace(attributes, heads=attributes.heads // size, kv_heads=kv_heads)
        return {
            "flops": int(op.flops * share), "bytes_read": read, "bytes_written": written,
            "attributes": attributes, "durations": (),
        }  # fmt: skip

    def _share(self, index: int, placement: Placement) -> Fraction:
        whole = self.graph.tensors.shape.row(index)
        return Fraction(prod(self.sharding.local_shape(index, placement)), max(1, prod(whole)))

    def _local_bytes(self, tensors: Sequence[int], placements: Sequence[Placement], nbytes: int) -> int:
        """Bytes of the shares: exact where the whole is the sum of the tensors, else in proportion."""
        whole, local = 0, 0
        for index, placement in dict(zip(tensors, placements, strict=True)).items():
            size = self.graph.tensor(index).nbytes
            whole += size
            local += int(size * self._share(index, placement))
        if whole == nbytes:
            return local
        return nbytes * local // whole if whole else nbytes

    # -- operations that become several ------------------------------------------------------------------

    def _product_then_bias(self, op: t.Compute, decision: Decision, reads: Sequence[int]) -> None:
        """A row-parallel product: its summands are added up over the ranks, and then the bias, once."""
        (index,) = op.outputs
        tensor, bias = self.graph.tensor(index), self.graph.tensor(op.inputs[0])
        target = self.sharding.placement[index]
        local = self.sharding.local_shape(index, target)
        summand = self.builder.tensor(tensor.name, tensor.shape, tensor.dtype, tensor.role)
        product = replace(
            op,
            name=op.name.replace("addmm", "mm").replace("baddbmm", "bmm"),
            inputs=op.inputs[1:],
            bytes_read=op.bytes_read - bias.nbytes,
        )
        self.part.ops[op.id] = self._add(product, Decision(decision.inputs[1:], (PARTIAL,)), reads[1:], (summand,))
        total = self._reduce(index, op, summand)
        self.part.tensors[index] = self.builder.tensor(tensor.name, local, tensor.dtype, tensor.role)
        nbytes = tensor.dtype.nbytes(prod(local))
        self._local(op, "aten.add", (total, reads[0]), (self.part.tensors[index],), nbytes + bias.nbytes, nbytes)

    def _log_softmax(self, op: t.Compute, logits: int) -> None:
        """Greatest logit and sum of exponentials of each row over all ranks; everything else is local."""
        (index,) = op.outputs
        tensor = self.graph.tensor(index)
        local = self.sharding.shapes[index]
        rows, size = tensor.dtype.nbytes(local[0]), tensor.dtype.nbytes(prod(local))
        column = (local[0], 1)
        largest = self._temporary("max", column, tensor)
        self._local(op, "aten.amax", (logits,), (largest,), size, rows)
        largest = self._sum_over_ranks(op, largest, column, tensor)
        shifted, exponential = self._temporary("sub", local, tensor), self._temporary("exp", local, tensor)
        self._local(op, "aten.sub", (logits, largest), (shifted,), size + rows, size)
        self._local(op, "aten.exp", (shifted,), (exponential,), size, size)
        total = self._temporary("sum", column, tensor)
        self._local(op, "aten.sum", (exponential,), (total,), size, rows)
        total = self._sum_over_ranks(op, total, column, tensor)
        made = self._made(index)
        self.part.ops[op.id] = self._local(op, "aten.sub", (shifted, total), (made,), size + rows, size)

    def _log_softmax_backward(self, op: t.Compute, reads: Sequence[int]) -> None:
        """Probabilities less one at the target, times the loss's gradient.

        In the kernels of torch's `loss_parallel`, a function that holds all that it reads until it returns.
        """
        (index,), (picked, likely) = op.outputs, reads
        tensor, local = self.graph.tensor(index), self.sharding.shapes[index]
        size = tensor.dtype.nbytes(prod(local))
        probability, difference = self._temporary("exp", local, tensor), self._temporary("add", local, tensor)
        self._local(op, "aten.exp", (likely,), (probability,), size, size)
        self._local(op, "aten.add", (picked, probability, likely), (difference,), 2 * size, size)
        self.part.ops[op.id] = self._local(op, "aten.mul", (difference,), (self._made(index),), size, size)

    def _nll_loss(self, op: t.Compute, reads: Sequence[int]) -> None:
        """The rank that has a token's target picks its log-probability; the others add zero."""
        tensor, target = self.graph.tensor(op.inputs[0]), self.graph.tensor(op.inputs[1])
        column = (tensor.shape[0], 1)
        rows = tensor.dtype.nbytes(tensor.shape[0])
        picked = self._temporary("gather", column, tensor)
        self._local(op, "aten.gather", reads[:2], (picked,), target.nbytes + rows, rows)
        picked = self._sum_over_ranks(op, picked, column, tensor)
        outputs = [self._made(i) for i in op.outputs]
        self.part.ops[op.id] = self.builder.add(
            op, inputs=(picked, *reads[1:]), outputs=outputs, deps=[self.part.ops[d] for d in op.deps]
        )

    def _temporary(self, name: str, shape: Shape, like: t.Tensor) -> int:
        return self.builder.tensor(name, shape, like.dtype, t.TensorRole.ACTIVATION)

    def _sum_over_ranks(self, op: t.Op, column: int, shape: Shape, like: t.Tensor) -> int:
        made = self.builder.tensor("all_reduce", shape, like.dtype, t.TensorRole.ACTIVATION, alias_of=column)
        self._collective(_KINDS.ALL_REDUCE, replace(like, shape=shape), op, (column,), (made,))
        return made

    def _local(
        self, op: t.Op, name: str, inputs: Sequence[int], outputs: Sequence[int], read: int, written: int
    ) -> int:
        forward = None
        if isinstance(op, t.Compute) and op.forward_op is not None:
            forward = self.part.ops.get(op.forward_op, op.forward_op)
        return self.builder.compute(
            name, phase=op.phase, module=op.module, inputs=inputs, outputs=outputs, bytes_read=read,
            bytes_written=written, forward_op=forward,
        )  # fmt: skip


MAX_SIZE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """The step as one rank of a tensor-parallel group executes it.

    Attributes:
        size: ranks that share each layer.
        plan: what is shared, see `tensor_parallel.plan`; None takes the plan for the zoo's families, and infers
            that for matrices which it does not know (`plan.infer_plan`).
        sequence_parallel: share activations along the sequence where they would be whole.
        expert_size: ranks that cut each expert: all, or 1 with sequence parallelism (`experts`), after which
            `expert_parallel` has to go across "tp".
        vocab_multiple: rows of the vocabulary that each rank's share is a multiple of.
        gathers_again: with sequence parallelism the backward pass gathers again what forward gathered, as in
            Megatron-LM; else it is kept, as autograd keeps what DTensor gathers.
    """

    name: ClassVar[str] = "tensor_parallel"

    size: int
    plan: Mapping[str, Style] | None = None
    sequence_parallel: bool = False
    expert_size: int | None = None
    vocab_multiple: int = 128
    gathers_again: bool = True

    def __call__(self, graph: StepGraph) -> StepGraph:
        """The step with local shapes and collectives over the axis "tp".

        Raises:
            PlanError: the size is out of range or does not divide what is shared (names sizes that do), the plan
                fits no parameter, or the step holds what cannot be shared.
            UnknownNameError: the plan has an unknown style.
        """
        sharding, _ = self._sharding(graph)
        return graph if self.size == 1 else write(graph, sharding, gathers_again=self.gathers_again)

    def with_notes(self, graph: StepGraph) -> tuple[StepGraph, list[str]]:
        """The step, and what every rank computes whole, where shared tensors are gathered, and why."""
        sharding, lines = self._sharding(graph)
        if self.size == 1:
            return graph, []
        # Gathering the sequence before a product is what sequence parallelism does, not something it failed to.
        said = [line for line in _report(graph, sharding) if not (self.sequence_parallel and ": gathers " in line)]
        return write(graph, sharding, gathers_again=self.gathers_again), [*lines, *said]

    def _sharding(self, graph: StepGraph) -> tuple[Sharding, list[str]]:
        """The placements, and why some are whole."""
        if not 1 <= self.size <= MAX_SIZE or self.vocab_multiple < 1:
            raise PlanError(
                f"tensor parallelism over {self.size} ranks, with vocabulary rows in multiples of "
                f"{self.vocab_multiple}: choose 1 to {MAX_SIZE} ranks and a positive multiple"
            )
        if any(axis.name == AXIS for axis in graph.mesh):
            raise PlanError("the step is tensor-parallel already: start from the step as it was captured")
        positions = graph.workload.sequence_length
        if self.sequence_parallel and (not positions or positions % self.size):
            fault = f"the sequence of {positions} does not divide: choose a length that does, or"
            raise PlanError(
                f"sequence parallelism over {self.size} ranks: "
                f"{fault if positions else 'the samples of this step are not said to be sequences:'} leave it out"
            )
        if self.expert_size not in (None, 1, self.size) or (self.whole_experts and not self.sequence_parallel):
            raise PlanError(
                f"experts cut over {self.expert_size} of {self.size} tensor-parallel ranks: choose {self.size}, "
                "or 1 with sequence parallelism, which gives each rank tokens of its own"
            )
        plan, lines = self._plan(graph)
        try:
            return self._propagate(graph, plan), lines
        except Indivisible as error:
            nearest = self._nearest(graph, plan, error.extent)
            raise PlanError(f"tensor parallelism: {error}: choose a size of {nearest}") from None

    @property
    def whole_experts(self) -> bool:
        """Whether experts are not cut."""
        return self.expert_size == 1 < self.size

    def _plan(self, graph: StepGraph) -> tuple[Mapping[str, Style], list[str]]:
        """The user's plan, or the one for the zoo's families with what else can be inferred."""
        whole = whole_experts(graph) if self.whole_experts else {}
        if self.plan is not None:
            check_plan(self.plan)
            return {**whole, **self.plan}, []
        inferred, lines = infer_plan(
            graph, {**whole, **PLAN}, self.size * self.vocab_multiple, lambda plan: self._fault(graph, plan)
        )
        return {**whole, **inferred, **PLAN}, lines

    def _fault(self, graph: StepGraph, plan: Mapping[str, Style]) -> str:
        """Why a plan is not worth it: an extent does not divide, or ranks have to gather what they share."""
        try:
            sharding = replace(self, sequence_parallel=False, expert_size=None)._propagate(graph, plan)
        except PlanError as error:
            return str(error)
        return next((line for line in _report(graph, sharding) if ": gathers " in line), "")

    def _propagate(self, graph: StepGraph, plan: Mapping[str, Style]) -> Sharding:
        return Sharding(
            graph,
            size=self.size,
            plan=plan,
            vocab_multiple=self.vocab_multiple,
            sequence_parallel=self.sequence_parallel,
            decided=OwnTokens(graph, plan).decision if self.whole_experts else None,
        )

    def _nearest(self, graph: StepGraph, plan: Mapping[str, Style], extent: int) -> str:
        """The sizes below and above that work, found by trying those that divide an extent."""
        divisors = [n for n in range(2, min(extent, MAX_SIZE) + 1) if extent % n == 0]
        below = next((n for n in reversed(divisors) if n < self.size and self._works(n, graph, plan)), 1)
        above = next((n for n in divisors if n > self.size and self._works(n, graph, plan)), None)
        return f"{below}" if above is None else f"{below} or {above}"

    def _works(self, size: int, graph: StepGraph, plan: Mapping[str, Style]) -> bool:
        try:
            replace(self, size=size, expert_size=self.expert_size and min(size, self.expert_size))._propagate(
                graph, plan
            )
        except PlanError:
            return False
        return True


def _report(graph: StepGraph, sharding: Sharding) -> list[str]:
    lines: dict[str, None] = {}
    for row, decision in sorted(sharding.decisions.items()):
        where = f"{graph.strings[graph.ops.module[row]] or 'loss'} (aten.{operator(graph, row)})"
        forward = graph.ops.phases[row] == Phase.FORWARD
        if forward and graph.ops.flops[row] and set(decision.inputs) <= {WHOLE}:
            lines[f"{where}: whole on every rank"] = None
        for index, wanted in zip(graph.ops.inputs.row(row), decision.inputs, strict=True):
            has = sharding.placement[index]
            if not isinstance(has, Shard):
                continue
            if isinstance(wanted, Shard) and wanted.shares > has.shares:
                lines[f"{where}: fewer heads than ranks, which exchange {graph.tensors[index].name}"] = None
            elif wanted == WHOLE:
                lines[f"{where}: gathers {graph.tensors[index].name} {graph.tensors[index].shape}"] = None
    return list(lines)
