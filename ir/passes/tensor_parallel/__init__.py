"""Tensor parallelism as Megatron-LM does it: each layer's matrices are shared by a group of ranks.

A column-parallel product shares the outputs of its weight, and the row-parallel one after it the inputs, so that
what lies between (heads of attention, channels of the feed-forward part) stays on its rank. Each rank then holds a
summand of the row-parallel product: it is all-reduced, and the bias added after. In the backward pass the input
gradient of the column-parallel products is all-reduced, once for all products that read the same input, as soon as
it is made, so that the weight gradients are computed meanwhile. The placements of all other tensors follow by
propagation (`sharding`).

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
the same head. So no weight is held twice, and no weight gradient reduced. Megatron gathers the queries, too, which
stand between the keys in its fused weight; here they stay where they are.

Experts share their hidden channels (expert tensor parallelism), the router is whole. Their summands are weighted
and added up by token before they are reduced, as with Megatron's all-gather dispatcher. Where the last product
has a bias, rows are reduced before it is added: one for each expert that a token goes to.

Clipping by norm, and the overflow flag of fp16: see `gradients.total_norms`. Norms are those of the first rank,
which counts also what every rank holds. What is recomputed is shared, and communicates, as the forward pass does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from echograph.errors import PlanError
from echograph.ir.graph import StepGraph
from echograph.ir.passes.tensor_parallel.plan import PLAN, Style, check_plan, infer_plan
from echograph.ir.passes.tensor_parallel.rules import WHOLE, Shard
from echograph.ir.passes.tensor_parallel.sharding import Indivisible, Sharding, operator
from echograph.ir.passes.tensor_parallel.write import AXIS, write
from echograph.ir.types import Phase

MAX_SIZE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """The step as one rank of a tensor-parallel group executes it.

    Attributes:
        size: ranks that share each layer.
        plan: what is shared, see `tensor_parallel.plan`; None takes the plan for the zoo's families, and infers
            that for matrices which it does not know (`plan.infer_plan`).
        sequence_parallel: share activations along the sequence where they would be whole.
        vocab_multiple: rows of the vocabulary that each rank's share is a multiple of.
    """

    name: ClassVar[str] = "tensor_parallel"

    size: int
    plan: Mapping[str, Style] | None = None
    sequence_parallel: bool = False
    vocab_multiple: int = 128

    def __call__(self, graph: StepGraph) -> StepGraph:
        """The step with local shapes and collectives over the axis "tp".

        Raises:
            PlanError: the size is out of range or does not divide what is shared (names sizes that do), the plan
                fits no parameter, or the step holds what cannot be shared.
            UnknownNameError: the plan has an unknown style.
        """
        sharding, _ = self._sharding(graph)
        return graph if self.size == 1 else write(graph, sharding)

    def with_notes(self, graph: StepGraph) -> tuple[StepGraph, list[str]]:
        """The step, and what every rank computes whole, where shared tensors are gathered, and why."""
        sharding, lines = self._sharding(graph)
        if self.size == 1:
            return graph, []
        # Gathering the sequence before a product is what sequence parallelism does, not something it failed to.
        said = [line for line in _report(graph, sharding) if not (self.sequence_parallel and ": gathers " in line)]
        return write(graph, sharding), [*lines, *said]

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
            raise PlanError(
                f"sequence parallelism over {self.size} ranks: the sequence of {positions} does not divide: "
                "choose a length that does, or leave it out"
            )
        plan, lines = self._plan(graph)
        try:
            return self._propagate(graph, plan), lines
        except Indivisible as error:
            nearest = self._nearest(graph, plan, error.extent)
            raise PlanError(f"tensor parallelism: {error}: choose a size of {nearest}") from None

    def _plan(self, graph: StepGraph) -> tuple[Mapping[str, Style], list[str]]:
        """The user's plan, or the one for the zoo's families with what else can be inferred."""
        if self.plan is not None:
            check_plan(self.plan)
            return self.plan, []
        inferred, lines = infer_plan(
            graph, PLAN, self.size * self.vocab_multiple, lambda plan: self._fault(graph, plan)
        )
        return {**inferred, **PLAN}, lines

    def _fault(self, graph: StepGraph, plan: Mapping[str, Style]) -> str:
        """Why a plan is not worth it: an extent does not divide, or ranks have to gather what they share."""
        try:
            sharding = replace(self, sequence_parallel=False)._propagate(graph, plan)
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
        )

    def _nearest(self, graph: StepGraph, plan: Mapping[str, Style], extent: int) -> str:
        """The sizes below and above that work, found by trying those that divide an extent."""
        divisors = [n for n in range(2, min(extent, MAX_SIZE) + 1) if extent % n == 0]
        below = next((n for n in reversed(divisors) if n < self.size and self._works(n, graph, plan)), 1)
        above = next((n for n in divisors if n > self.size and self._works(n, graph, plan)), None)
        return f"{below}" if above is None else f"{below} or {above}"

    def _works(self, size: int, graph: StepGraph, plan: Mapping[str, Style]) -> bool:
        try:
            replace(self, size=size)._propagate(graph, plan)
        except PlanError:
            return False
        return True


def _report(graph: StepGraph, sharding: Sharding) -> list[str]:
    lines: dict[str, None] = {}
    for row, decision in sorted(sharding.decisions.items()):
        where = f"{graph.strings[graph.ops.module[row]] or 'loss'} (aten.{operator(graph, row)})"
        forward = graph.ops.phase[row] == Phase.FORWARD
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
