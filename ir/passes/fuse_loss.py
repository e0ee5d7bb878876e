"""Fusion of the loss: one kernel for the cross-entropy and one for its gradient, as compilers and libraries do.

Written out, the loss of a large vocabulary holds the logits, the log-probabilities and two gradients in fp32. A
kernel that goes over the rows of the logits as the product made them keeps one number a row, the logarithm of
the sum of exponentials, and writes the gradient in the logits' own type (torch.compile of the loss function;
Liger Kernel, Hsu et al. 2024, section 3.2).

Where tensor-parallel ranks share the vocabulary, the kernel leaves each row's largest logit, its sum of
exponentials and the target's logit, which one collective brings together (NVIDIA/TransformerEngine,
common/triton/cross_entropy.py); the gradient is made of these and the rank's own logits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar

from echograph.errors import PlanError
from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import Graph, JobGraph, StepGraph
from echograph.ir.passes.rewrite import StepWriter, issued

_SOFTMAX, _LOSS = "aten._log_softmax", "aten.nll_loss_forward"
_LOSS_BACKWARD, _SOFTMAX_BACKWARD = "aten.nll_loss_backward", "aten._log_softmax_backward_data"
_CONVERT, _PICK = "aten._to_copy", "aten.gather"
_PARTS = ("aten.amax", "aten.sub", "aten.exp", "aten.sum")


@dataclass(frozen=True, slots=True, kw_only=True)
class FuseLoss:
    """The step with fused cross-entropy losses."""

    name: ClassVar[str] = "fuse_loss"

    def __call__(self, graph: StepGraph) -> StepGraph:
        """The step graph.

        Raises:
            PlanError: there are no logits that only a cross-entropy reads.
        """
        losses = _LossFinder(graph).losses()
        if not losses:
            raise PlanError(
                "--loss fused: the step has no cross-entropy whose log-probabilities nothing else reads: "
                "leave the option out"
            )
        return _LossWriter(graph, losses).write()


def fuse_losses(job: JobGraph, within: Sequence[Hashable]) -> tuple[JobGraph, list[int]]:
    """A captured job with fused cross-entropy losses where a compiler has all of a loss, and its gradient.

    Args:
        job: of one block.
        within: for each row, what is compiled at a time, forward and backward; None: nothing is.

    Returns:
        The job, and the row that each of its rows comes from.
    """
    losses = [
        loss for loss in _LossFinder(job).losses()
        if within[loss.forward] is not None and len({within[row] for row in loss.rows}) == 1
    ]  # fmt: skip
    if not losses:
        return job, list(range(len(job.ops)))
    writer = _LossWriter(job, losses)
    return writer.write_as(JobGraph), writer.origin


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
        exchange: the row that brings together what ranks that share the vocabulary have of each row; None: the
            rows are whole.
    """

    rows: frozenset[int]
    forward: int
    backward: int
    logits: int
    target: int
    probabilities: int
    exchange: int | None = None


class _LossFinder:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.readers: dict[int, list[int]] = defaultdict(list)
        inputs = graph.ops.inputs
        for tensor, row in zip(inputs.values.tolist(), inputs.rows.tolist(), strict=True):
            self.readers[tensor].append(row)
        self.names = [graph.strings[name] for name in graph.ops.name.tolist()]

    def losses(self) -> list[_Loss]:
        """Those whose log-probabilities nobody else reads."""
        finders = {_SOFTMAX: self._loss, _PICK: self._shared_loss}
        found = (finders[name](row) for row, name in enumerate(self.names) if name in finders)
        return [loss for loss in found if loss is not None]

    def _loss(self, softmax: int) -> _Loss | None:
        ops = self.graph.ops
        (probabilities,) = ops.outputs.row(softmax)
        reading = {self.names[row]: row for row in self.readers[probabilities]}
        if len(self.readers[probabilities]) != 2 or _SOFTMAX_BACKWARD not in reading:
            return None
        backward = reading.pop(_SOFTMAX_BACKWARD)
        converts: list[int] = []
        if _CONVERT in reading:  # the loss is in fp32, of log-probabilities in 16 bits
            converts = [reading[_CONVERT]]
            reading = {self.names[row]: row for row in self.readers[ops.outputs.row(converts[0])[0]]}
        picked = ops.inputs.row(backward)[0]
        before = int(self.graph.maker[picked])
        if converts and before != NONE and self.names[before] == _CONVERT and self.readers[picked] == [backward]:
            converts.append(before)
            backward_of, picked = before, ops.inputs.row(before)[0]
            before = int(self.graph.maker[picked])
        else:
            backward_of = backward
        if before == NONE or self.names[before] != _LOSS_BACKWARD or self.readers[picked] != [backward_of]:
            return None
        if reading.pop(_LOSS_BACKWARD, before) != before or reading.keys() != {_LOSS}:
            return None
        forward = reading[_LOSS]
        logits, above = self._up(ops.inputs.row(softmax)[0], softmax)
        last, below = self._down(backward)
        return _Loss(
            rows=frozenset((*above, softmax, *converts, forward, before, backward, *below)),
            forward=forward,
            backward=last,
            logits=logits,
            target=ops.inputs.row(forward)[1],
            probabilities=probabilities,
        )

    def _shared_loss(self, pick: int) -> _Loss | None:
        """That of ranks that share the vocabulary, as `tensor_parallel` writes it."""
        ops, names = self.graph.ops, self.names
        probabilities, target, *_ = ops.inputs.row(pick)
        above, sources = self._above(probabilities)
        exchange = self.readers[ops.outputs.row(pick)[0]]
        difference = {row for row in self.readers[probabilities] if names[row] == "aten.add"}
        rest = {row for row in self.readers[probabilities] if names[row] == "aten.exp"}
        if len(sources) != 1 or len(exchange) != 1 or len(difference) != 1 or len(rest) != 1:
            return None
        (add,) = difference
        before = int(self.graph.maker[ops.inputs.row(add)[0]])
        (scaled,) = self.readers[ops.outputs.row(add)[0]]
        if before == NONE or names[before] != _LOSS_BACKWARD or len(self.readers[probabilities]) != 3:
            return None
        last, below = self._down(scaled)
        return _Loss(
            rows=frozenset((*above, pick, before, *rest, add, scaled, *below)),
            forward=pick,
            backward=last,
            logits=sources.pop(),
            target=target,
            probabilities=probabilities,
            exchange=exchange[0],
        )

    def _above(self, tensor: int) -> tuple[set[int], set[int]]:
        """The rows that make log-probabilities of shared logits, and what these read."""
        ops, rows, sources, asked = self.graph.ops, set[int](), set[int](), [tensor]
        while asked:
            at = asked.pop()
            row = int(self.graph.maker[at])
            part = row != NONE and (self.names[row] in _PARTS or ops.kinds[row] == t.OpKind.COLLECTIVE)
            if part or (row != NONE and ops.is_view[row]):
                rows.add(row)
                asked += ops.inputs.row(row)
            elif row != NONE and self.names[row] == _CONVERT:
                rows.add(row)
                sources.update(ops.inputs.row(row))
            else:
                sources.add(at)
        return rows, sources

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


_NUMBERS_OF_A_ROW = 3
"""Of a rank's part of it: the largest logit, the sum of exponentials, the target's logit."""


class _LossWriter(StepWriter):
    """Writes the kernels of losses in place of their operations.

    Attributes:
        origin: of each row that is written, the row that it comes from.
    """

    def __init__(self, graph: Graph, losses: list[_Loss]) -> None:
        super().__init__(graph)
        self.origin: list[int] = []
        self.of = {row: loss for loss in losses for row in loss.rows}
        self.exchanges = {loss.exchange for loss in losses}
        self.sums: dict[int, int] = {}

    def operation(self, op: t.Op) -> None:
        self._write(op)
        self.origin += [op.id] * (self.builder.op_count() - len(self.origin))

    def _write(self, op: t.Op) -> None:
        loss = self.of.get(op.id)
        if isinstance(op, t.Collective) and op.id in self.exchanges:
            self.copy(replace(op, bytes_per_rank=_NUMBERS_OF_A_ROW * op.bytes_per_rank))
        elif loss is None:
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
            bytes_written=t.DType.FP32.nbytes(prod(rows)) * (1 if loss.exchange is None else _NUMBERS_OF_A_ROW),
            **self._issue(loss, op),
        )
        self.part.ops |= dict.fromkeys(loss.rows, self.part.ops[op.id])

    def _backward(self, op: t.Op, loss: _Loss) -> None:
        graph, tensors = self.graph, self.graph.tensors
        before = next(r for r in sorted(loss.rows) if graph.strings[graph.ops.name[r]] == _LOSS_BACKWARD)
        (of_all,) = graph.ops.outputs.row(before)
        written_out = tensors[of_all].shape  # as log-probabilities that autograd keeps
        others = [i for i in graph.ops.inputs.row(before) if i != loss.target and tensors[i].shape != written_out]
        (gradient,) = op.outputs
        total = self.sums[loss.forward]
        self.part.ops[op.id] = self.builder.compute(
            "fused.cross_entropy_backward",
            phase=op.phase,
            module=op.module,
            inputs=(*map(self.tensor, others), self.tensor(loss.logits), self.tensor(loss.target), total),
            outputs=(self.tensor(gradient),),
            stream=op.stream,
            forward_op=self.part.ops[loss.forward],
            bytes_read=tensors[loss.logits].nbytes + tensors[loss.target].nbytes,
            bytes_written=tensors[gradient].nbytes,
            **self._issue(loss, op),
        )

    def _issue(self, loss: _Loss, op: t.Op) -> dict[str, Any]:
        """What one of its kernels waits for, and what issuing it takes: as the operations of its phase."""
        ops = [self.graph.ops[row] for row in sorted(loss.rows)]
        ops = [each for each in ops if each.phase == op.phase and not self.graph.ops.is_view[each.id]]
        waits = {before for each in ops for before in each.deps if before not in loss.rows}
        return {"durations": issued(ops), "deps": sorted(self.part.ops[before] for before in waits)}
