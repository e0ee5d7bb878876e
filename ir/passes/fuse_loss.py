"""One kernel for the cross-entropy loss and one for its gradient, as a compiler or a library makes them.

Written out, the loss of a large vocabulary holds the logits, the log-probabilities and two gradients in fp32. A
kernel that goes over the rows of the logits as the product made them keeps one number a row, the logarithm of the
sum of exponentials, and writes the gradient in the logits' own type (torch.compile of the loss function; Liger
Kernel, Hsu et al. 2024, section 3.2).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod

from echograph.errors import PlanError
from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import StepGraph
from echograph.ir.passes.rewrite_step import StepWriter

_SOFTMAX, _LOSS = "aten._log_softmax", "aten.nll_loss_forward"
_LOSS_BACKWARD, _SOFTMAX_BACKWARD = "aten.nll_loss_backward", "aten._log_softmax_backward_data"
_CONVERT = "aten._to_copy"


@dataclass(frozen=True, slots=True, kw_only=True)
class FuseLoss:
    """The step with fused cross-entropy losses."""

    def __call__(self, graph: StepGraph) -> StepGraph:
        """The step graph.

        Raises:
            PlanError: no rank has whole rows of logits that only a cross-entropy reads.
        """
        losses = _Finder(graph).losses()
        if not losses:
            raise PlanError(
                "--loss fused: the step has no cross-entropy over whole rows of logits (tensor-parallel ranks "
                "that share a vocabulary have parts of rows): leave the option out"
            )
        return _Writer(graph, losses).write()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loss:
    """A loss and its gradient.

    Attributes:
        rows: operations that go, forward and backward.
        forward: the row of the loss.
        backward: the row that makes the gradient of the logits.
        logits: what the kernels read.
        target: the classes.
        probabilities: the log-probabilities that are no longer there.
    """

    rows: frozenset[int]
    forward: int
    backward: int
    logits: int
    target: int
    probabilities: int


class _Finder:
    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.readers: dict[int, list[int]] = defaultdict(list)
        inputs = graph.ops.inputs
        for tensor, row in zip(inputs.values.tolist(), inputs.rows.tolist(), strict=True):
            self.readers[tensor].append(row)
        self.names = [graph.strings[name] for name in graph.ops.name.tolist()]

    def losses(self) -> list[_Loss]:
        """Those whose log-probabilities nobody else reads."""
        rows = range(len(self.names))
        return [loss for row in rows if self.names[row] == _SOFTMAX and (loss := self._loss(row))]

    def _loss(self, softmax: int) -> _Loss | None:
        ops = self.graph.ops
        (probabilities,) = ops.outputs.row(softmax)
        reading = {self.names[row]: row for row in self.readers[probabilities]}
        if len(self.readers[probabilities]) != 2 or reading.keys() != {_LOSS, _SOFTMAX_BACKWARD}:
            return None
        forward, backward = reading[_LOSS], reading[_SOFTMAX_BACKWARD]
        picked = ops.inputs.row(backward)[0]
        before = int(self.graph.maker[picked])
        if before == NONE or self.names[before] != _LOSS_BACKWARD or self.readers[picked] != [backward]:
            return None
        logits, above = self._up(ops.inputs.row(softmax)[0], softmax)
        last, below = self._down(backward)
        return _Loss(
            rows=frozenset((*above, softmax, forward, before, backward, *below)),
            forward=forward,
            backward=last,
            logits=logits,
            target=ops.inputs.row(forward)[1],
            probabilities=probabilities,
        )

    def _up(self, tensor: int, reader: int) -> tuple[int, list[int]]:
        """What a conversion and views of it, which only the loss reads, are made of; and their rows."""
        ops, gone, at = self.graph.ops, [], tensor
        while (row := int(self.graph.maker[at])) != NONE and self.readers[at] == [reader]:
            converts = self.names[row] == _CONVERT
            if not (converts or ops.is_view[row]):
                break
            gone.append(row)
            reader, (at, *_) = row, ops.inputs.row(row)
            if converts:
                return at, gone
        return tensor, []

    def _down(self, row: int) -> tuple[int, list[int]]:
        """The conversion that the gradient goes through, perhaps after views; and the rows on the way."""
        ops, passed, at = self.graph.ops, [], row
        while len(outputs := ops.outputs.row(at)) == 1 and len(readers := self.readers[outputs[0]]) == 1:
            at = readers[0]
            passed.append(at)
            if self.names[at] == _CONVERT:
                return at, passed
            if not ops.is_view[at]:
                break
        return row, []


class _Writer(StepWriter):
    def __init__(self, graph: StepGraph, losses: list[_Loss]) -> None:
        super().__init__(graph)
        self.of = {row: loss for loss in losses for row in loss.rows}
        self.sums: dict[int, int] = {}

    def operation(self, op: t.Op) -> None:
        loss = self.of.get(op.id)
        if loss is None:
            self.copy(op)
        elif op.id == loss.forward:
            self._forward(op, loss)
        elif op.id == loss.backward:
            self._backward(op, loss)

    def _forward(self, op: t.Op, loss: _Loss) -> None:
        tensors = self.graph.tensors
        rows = tensors[loss.probabilities].shape[:-1]
        total = self.builder.tensor("log_sum_exp", rows, t.DType.FP32, t.TensorRole.ACTIVATION)
        self.sums[loss.forward] = total
        made = [self.tensor(i) for i in op.outputs]
        self.part.ops[op.id] = self.builder.compute(
            "fused.cross_entropy",
            phase=op.phase,
            module=op.module,
            inputs=(self.tensor(loss.logits), self.tensor(loss.target)),
            outputs=(*made, total),
            stream=op.stream,
            bytes_read=tensors[loss.logits].nbytes + tensors[loss.target].nbytes,
            bytes_written=prod(rows) * t.DType.FP32.itemsize,
        )
        self.part.ops |= dict.fromkeys(loss.rows, self.part.ops[op.id])

    def _backward(self, op: t.Op, loss: _Loss) -> None:
        graph, tensors = self.graph, self.graph.tensors
        before = next(r for r in sorted(loss.rows) if graph.strings[graph.ops.name[r]] == _LOSS_BACKWARD)
        scalars = [i for i in graph.ops.inputs.row(before) if i != loss.target]
        (gradient,) = op.outputs
        total = self.sums[loss.forward]
        self.part.ops[op.id] = self.builder.compute(
            "fused.cross_entropy_backward",
            phase=op.phase,
            module=op.module,
            inputs=(*map(self.tensor, scalars), self.tensor(loss.logits), self.tensor(loss.target), total),
            outputs=(self.tensor(gradient),),
            stream=op.stream,
            forward_op=self.part.ops[loss.forward],
            bytes_read=tensors[loss.logits].nbytes + tensors[loss.target].nbytes,
            bytes_written=tensors[gradient].nbytes,
        )
