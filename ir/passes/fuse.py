"""Fusion of elementwise operations, as a compiler does it (torch.compile with inductor): off by default.

Elementwise operations on tensors of one size that read each other's results become one kernel, which reads what
comes from outside once and writes only what is read outside. So does a reduction of what a kernel has made: along
rows the kernel goes on after it, with the rows on the chip (a norm is one kernel), in any other direction it ends
there. Nothing moves from one phase, block or call to another; what backward reads of forward is still written,
where a compiler may compute it again; matrix products, attention, norms with kernels of their own, random numbers
and operations in place stay as they are. Views of results that only the kernel reads vanish with them.

The pass knows no layouts: it comes last of those that change a step, before those that lower it to a job.

The loss is fused by a pass of its own, one kernel for the cross-entropy and one for its gradient, as a compiler or
a library makes them. Written out, the loss of a large vocabulary holds the logits, the log-probabilities and two
gradients in fp32. A kernel that goes over the rows of the logits as the product made them keeps one number a row,
the logarithm of the sum of exponentials, and writes the gradient in the logits' own type (torch.compile of the
loss function; Liger Kernel, Hsu et al. 2024, section 3.2).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar, Literal

from echograph.errors import PlanError
from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import StepGraph
from echograph.ir.passes.fold import LABEL
from echograph.ir.passes.rewrite import StepWriter

_POINTWISE = {
    "aten._to_copy", "aten.abs", "aten.add", "aten.clamp", "aten.cos", "aten.div", "aten.eq", "aten.exp",
    "aten.gelu", "aten.gelu_backward", "aten.ge", "aten.gt", "aten.le", "aten.log", "aten.lt",
    "aten.masked_fill", "aten.maximum", "aten.minimum", "aten.mul", "aten.native_dropout_backward", "aten.ne",
    "aten.neg", "aten.pow", "aten.reciprocal", "aten.relu", "aten.rsqrt", "aten.rsub", "aten.sigmoid",
    "aten.sigmoid_backward", "aten.silu", "aten.silu_backward", "aten.sin", "aten.sqrt", "aten.sub",
    "aten.tanh", "aten.tanh_backward", "aten.threshold_backward", "aten.where",
}  # fmt: skip
_REDUCTIONS = ("aten.sum", "aten.mean", "aten.amax", "aten.amin", "aten.var")


@dataclass(slots=True, eq=False)
class _Kernel:
    """Operations that become one.

    Attributes:
        size: elements that it works on.
        area: the part of the model that it stays within; "": none.
        reduced: elements that are left of those when rows are reduced; 0 before it does so.
        rows: the operations, in order.
        views: views of what they make, in order.
    """

    size: int
    area: str = ""
    reduced: int = 0
    rows: list[int] = field(default_factory=list)
    views: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fuse:
    """The step with fused elementwise operations.

    Attributes:
        within: "step": all that a compiler finds; "modules": only within one part of a layer (a norm, a
            feed-forward network), as a library of fused kernels has them. What stands between parts, as the
            addition of a residual, is then a kernel of its own.
    """

    name: ClassVar[str] = "fuse"

    within: Literal["step", "modules"] = "step"

    def __call__(self, graph: StepGraph) -> StepGraph:
        """The step graph."""
        return _Writer(graph, _Finder(graph, self.within == "modules").kernels()).write()


class _Finder:
    """Goes through the operations in order, with the kernels that may still grow."""

    def __init__(self, graph: StepGraph, within_modules: bool) -> None:
        self.graph, self.within_modules = graph, within_modules
        self.cuts = set(graph.programs[0].calls[:, 1:3].ravel().tolist())
        self.open: dict[int, _Kernel] = {}
        self.found: list[_Kernel] = []

    def kernels(self) -> list[_Kernel]:
        """The kernels of two operations or more."""
        phase = NONE
        for row in range(len(self.graph.ops)):
            if row in self.cuts or int(self.graph.ops.phase[row]) != phase:
                self.open = {}
            phase = int(self.graph.ops.phase[row])
            self._take(row)
        return [kernel for kernel in self.found if len(kernel.rows) > 1]

    def _take(self, row: int) -> None:
        graph = self.graph
        inputs, outputs = graph.ops.inputs.row(row), graph.ops.outputs.row(row)
        read = list({id(k): k for i in inputs if (k := self.open.get(i)) is not None}.values())
        if graph.ops.is_view[row] and read and len(outputs) == 1:
            (kernel,) = read
            if self._elements(outputs[0]) == self._elements(inputs[0]):
                kernel.views.append(row)
                self.open[outputs[0]] = kernel
            else:
                self._close(kernel)
            return
        name = graph.strings[graph.ops.name[row]]
        reduces = name in _REDUCTIONS
        fusible = self._is_plain(row) and (name in _POINTWISE or reduces)
        joins = [kernel for kernel in read if fusible and self._fits(kernel, row, reduces)]
        for kernel in read:
            if kernel not in joins:
                self._close(kernel)
        if not fusible or (reduces and not joins):
            return
        if not joins:
            joins = [_Kernel(self._size(row), self._area(row))]
            self.found += joins
        kernel = self._merged(joins)
        kernel.rows.append(row)
        self.open[outputs[0]] = kernel
        if reduces:
            kernel.reduced = self._elements(outputs[0])
            if not self._is_of_rows(inputs[0], outputs[0]):
                self._close(kernel)

    def _size(self, row: int) -> int:
        tensors = (*self.graph.ops.inputs.row(row), *self.graph.ops.outputs.row(row))
        return max(map(self._elements, tensors))

    def _fits(self, kernel: _Kernel, row: int, reduces: bool) -> bool:
        """Whether an operation works on the same elements as a kernel, or on what is left of its rows."""
        if kernel.area != self._area(row):
            return False
        if not reduces:
            return self._size(row) in (kernel.size, kernel.reduced)
        (before, *_), (after,) = self.graph.ops.inputs.row(row), self.graph.ops.outputs.row(row)
        again = self._is_of_rows(before, after) and kernel.reduced == self._elements(after)
        return self._elements(before) == kernel.size and (not kernel.reduced or again)

    def _area(self, row: int) -> str:
        """The part of a layer that an operation belongs to; beyond layers, its module. "": all is one."""
        if not self.within_modules:
            return ""
        module: str = self.graph.strings[self.graph.ops.module[row]]
        layer, inner, part = module.rpartition(LABEL)
        return layer + inner + ".".join(part.split(".")[:2])

    def _is_of_rows(self, before: int, after: int) -> bool:
        """Whether a reduction leaves one element of each row."""
        whole, left = self.graph.tensors.shape.row(before), self.graph.tensors.shape.row(after)
        return tuple(left[: len(whole) - 1]) == tuple(whole[:-1]) and prod(left) * whole[-1] == prod(whole)

    def _merged(self, kernels: list[_Kernel]) -> _Kernel:
        first, *others = sorted(kernels, key=lambda kernel: -kernel.size)
        for other in others:
            first.reduced = first.reduced or other.reduced
            first.rows += other.rows
            first.views += other.views
            self.found.remove(other)
            self.open |= {tensor: first for tensor, kernel in self.open.items() if kernel is other}
        first.rows.sort()
        first.views.sort()
        return first

    def _close(self, kernel: _Kernel) -> None:
        """It is read by what stands behind it, so it runs before that and takes in no more."""
        self.open = {tensor: its for tensor, its in self.open.items() if its is not kernel}

    def _elements(self, index: int) -> int:
        return prod(self.graph.tensors.shape.row(index))

    def _is_plain(self, row: int) -> bool:
        """Whether an operation makes one new tensor, of what it reads alone."""
        ops, outputs = self.graph.ops, self.graph.ops.outputs.row(row)
        plain = ops.kind[row] == t.OpKind.COMPUTE and not ops.flops[row] and not ops.deps.row(row)
        return bool(
            plain
            and ops.attributes[row] == NONE
            and not ops.is_view[row]
            and len(outputs) == 1
            and self.graph.tensors.alias_of[outputs[0]] == NONE
            and not self.graph.tensors[outputs[0]].role.persistent
        )


class _Writer(StepWriter):
    """Writes a kernel where the last of its operations stood, and after it the views that are read outside."""

    def __init__(self, graph: StepGraph, kernels: list[_Kernel]) -> None:
        super().__init__(graph)
        self.kernel_of = {row: kernel for kernel in kernels for row in (*kernel.rows, *kernel.views)}
        self.outside = _read_outside(graph, self.kernel_of)

    def operation(self, op: t.Op) -> None:
        kernel = self.kernel_of.get(op.id)
        if kernel is None:
            self.copy(op)
        elif op.id == kernel.rows[-1]:
            self._fused(kernel)
            for row in kernel.views:
                if row < op.id:
                    self._view(row)
        elif op.id > kernel.rows[-1]:
            self._view(op.id)

    def _view(self, row: int) -> None:
        if self.graph.ops.outputs.row(row)[0] in self.outside:
            self.copy(self.graph.ops[row])

    def _fused(self, kernel: _Kernel) -> None:
        graph = self.graph
        made = [graph.ops.outputs.row(row)[0] for row in kernel.rows]
        own = {*made, *(graph.ops.outputs.row(row)[0] for row in kernel.views)}
        read = list(dict.fromkeys(i for row in kernel.rows for i in graph.ops.inputs.row(row) if i not in own))
        kept = [index for index in made if index in self.outside]
        last = graph.ops[kernel.rows[-1]]
        forward = next((f for row in kernel.rows if (f := int(graph.ops.forward_op[row])) != NONE), None)
        new = self.builder.compute(
            "fused." + graph.ops[kernel.rows[-1]].name.removeprefix("aten."),
            phase=last.phase,
            module=last.module,
            inputs=[self.tensor(i) for i in read],
            outputs=[self.tensor(i) for i in kept],
            stream=last.stream,
            forward_op=self.part.ops[forward] if forward is not None and forward >= 0 else forward,
            bytes_read=sum(self._memory_bytes(i) for i in read),
            bytes_written=sum(graph.tensors[i].nbytes for i in kept),
        )
        self.part.ops |= dict.fromkeys((*kernel.rows, *kernel.views), new)

    def _memory_bytes(self, index: int) -> int:
        """Bytes behind a tensor: an expanded one repeats those of what it is a view of."""
        tensors = self.graph.tensors
        return min(tensors[index].nbytes, tensors[int(self.graph.root[index])].nbytes)


def _read_outside(graph: StepGraph, kernel_of: dict[int, _Kernel]) -> set[int]:
    """Tensors that are read by others than the kernel that makes them, or are views of such."""
    inputs = graph.ops.inputs
    outside = {bound for block in graph.blocks for i in block.instances for bound in _bound(graph, i.bindings)}
    for tensor, row in zip(inputs.values.tolist(), inputs.rows.tolist(), strict=True):
        maker = int(graph.maker[tensor])
        if maker != NONE and (maker not in kernel_of or kernel_of.get(row) is not kernel_of[maker]):
            outside.add(tensor)
    for row in sorted(kernel_of, reverse=True):  # what a view that is read shows has to be there
        (made,) = graph.ops.outputs.row(row)
        if graph.ops.is_view[row] and made in outside:
            outside.update(graph.ops.inputs.row(row))
    return outside


def _bound(graph: StepGraph, bindings: tuple[int, ...]) -> list[int]:
    return [graph.locate_tensor(identity)[2] for identity in bindings]


_SOFTMAX, _LOSS = "aten._log_softmax", "aten.nll_loss_forward"
_LOSS_BACKWARD, _SOFTMAX_BACKWARD = "aten.nll_loss_backward", "aten._log_softmax_backward_data"
_CONVERT = "aten._to_copy"


@dataclass(frozen=True, slots=True, kw_only=True)
class FuseLoss:
    """The step with fused cross-entropy losses."""

    name: ClassVar[str] = "fuse_loss"

    def __call__(self, graph: StepGraph) -> StepGraph:
        """The step graph.

        Raises:
            PlanError: no rank has whole rows of logits that only a cross-entropy reads.
        """
        losses = _LossFinder(graph).losses()
        if not losses:
            raise PlanError(
                "--loss fused: the step has no cross-entropy over whole rows of logits (tensor-parallel ranks "
                "that share a vocabulary have parts of rows): leave the option out"
            )
        return _LossWriter(graph, losses).write()


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


class _LossFinder:
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


class _LossWriter(StepWriter):
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
            bytes_written=t.DType.FP32.nbytes(prod(rows)),
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
