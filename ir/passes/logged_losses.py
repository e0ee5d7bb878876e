"""Losses that a trainer works out again for its log, beside the one that it learns from.

Some trainers hand the logits of every micro-batch to metrics, of which each is a cross-entropy forward alone, as
PyTorch writes it: logits to fp32, log-probabilities, the loss. They run after the backward pass, whatever kernel
the loss itself is, so that the logits live until then (mosaicml/composer, trainer/trainer.py,
`_eval_train_metrics`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echograph.errors import PlanError
from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import StepGraph
from echograph.ir.passes.rewrite import StepWriter

_LOSS = "aten.nll_loss_forward"
_ABOVE = ("aten._log_softmax", "aten._to_copy")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedLosses:
    """The step with cross-entropies of its logits for the log.

    Attributes:
        count: how many times the forward part of each loss runs again.
    """

    name: ClassVar[str] = "logged_losses"

    count: int

    def __call__(self, graph: StepGraph) -> StepGraph:
        """The step graph.

        Raises:
            PlanError: there is no cross-entropy in it.
        """
        losses = [row for row in graph.blocks[0].ops if graph.strings[graph.ops.name[row]] == _LOSS]
        if not losses:
            raise PlanError(
                "logged_losses: the step has no cross-entropy: give another --stack, or leave the pass out"
            )
        backward = [row for row in graph.blocks[0].ops if graph.ops[row].phase == t.Phase.BACKWARD]
        if not backward:
            raise PlanError("logged_losses: the step has no backward pass, after which losses are logged")
        return _Writer(graph, [_chain(graph, row) for row in losses] * self.count, backward[-1]).write()


def _chain(graph: StepGraph, loss: int) -> list[int]:
    """The rows from the logits, in their own type, to the loss."""
    rows, converted = [loss], False
    while not converted:
        row = int(graph.maker[graph.ops.inputs.row(rows[-1])[0]])
        if row == NONE or not (graph.ops.is_view[row] or graph.strings[graph.ops.name[row]] in _ABOVE):
            break
        rows.append(row)
        converted = graph.strings[graph.ops.name[row]] == _ABOVE[-1]
    return rows[::-1]


class _Writer(StepWriter):
    def __init__(self, graph: StepGraph, chains: list[list[int]], after: int) -> None:
        super().__init__(graph)
        self.chains, self.after = chains, after

    def operation(self, op: t.Op) -> None:
        self.copy(op)
        if op.id == self.after:
            for chain in self.chains:
                self._again(chain)

    def _again(self, chain: list[int]) -> None:
        """Writes a loss once more, from the same logits and classes."""
        fresh: dict[int, int] = {}

        def newest(index: int) -> int:
            return fresh[index] if index in fresh else self.tensor(index)

        for row in chain:
            op = self.graph.ops[row]
            for index in op.outputs:
                tensor = self.graph.tensors[index]
                alias = None if tensor.alias_of is None else newest(tensor.alias_of)
                fresh[index] = self.add_tensor(tensor, alias)
            self.builder.add(
                op,
                phase=t.Phase.BACKWARD,
                inputs=[newest(index) for index in op.inputs],
                outputs=[fresh[index] for index in op.outputs],
                deps=[],
                forward_op=self.part.ops[row],  # a pipeline runs it on the stage of the loss
            )
