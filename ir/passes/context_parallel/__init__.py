"""Context parallelism: every rank has a part of each sequence, and attention alone needs the others' parts.

Activations are cut along the sequence, parameters are whole. Position ids, rotary caches and labels are cut with
the sequence; a loss that is a mean is that of a rank's own tokens, and nothing is reduced for it (averaging the
gradients over ranks makes the mean of the whole, as torchtitan does; Megatron-LM also sums two numbers for its
log). Each rank's gradients are summands, which the data-parallel passes reduce over the data axes and "cp"
together. What takes one position of a sequence (BERT's pooler) is done by every rank.

Two ways for attention. *ring* passes keys and values round the ranks (`Ring`); *all_to_all* gives
each rank some heads of the whole sequence instead (`HeadExchange`).

FLOPs are counted as they were captured, pairs that a causal mask hides too: each of `size` ranks has 1/size of the
step's, each of the `size` steps of a ring 1/size^2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, get_args

from echograph.errors import PlanError, UnknownNameError
from echograph.ir import types as t
from echograph.ir.graph import StepGraph
from echograph.ir.passes.context_parallel.heads import HeadExchange
from echograph.ir.passes.context_parallel.ring import Ring
from echograph.ir.passes.context_parallel.write import AXIS, ContextWriter
from echograph.ir.passes.extent import Carriers, Extent

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
    """

    name: ClassVar[str] = "context_parallel"

    size: int
    method: Method = "ring"
    load_balance: bool = True

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
        method = partial(Ring, load_balance=self.load_balance) if self.method == "ring" else HeadExchange
        return ContextWriter(graph, Carriers(graph, sequence), ranks=self.size, method=method).write()

    def _check(self, graph: StepGraph) -> None:
        if not 1 <= self.size <= MAX_SIZE:
            raise PlanError(f"context parallelism over {self.size} ranks: choose 1 to {MAX_SIZE}")
        if any(axis.name == AXIS for axis in graph.mesh):
            raise PlanError("the step is context-parallel already: start from the step as it was captured")
        length = graph.workload.sequence_length
        chunks = 2 * self.size if self.method == "ring" and self.load_balance else self.size
        if self.size > 1 and (not length or length % chunks):
            nearest = (
                f"{length // chunks * chunks} or " * (length >= chunks) + f"{(length // chunks + 1) * chunks}"
            )
            what = f"capture a sequence of {nearest}" if length else "capture a model of sequences"
            raise PlanError(
                f"context parallelism over {self.size} ranks cuts the sequence of {length} into {chunks} chunks, "
                f"which do not divide it: {what}"
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
