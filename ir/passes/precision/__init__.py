"""The types that a step computes in: FP8 products, fp32 gradients.

FP8 as torchao's `float8` training and Transformer Engine do it. The products of the linear layers within the
model's layers are `_scaled_mm` on 8-bit operands with 16-bit results; everything else (attention, norms,
embeddings, the head, experts' grouped products) stays as it is, parameters and their gradients too. A linear layer
whose tokens or features are no multiples of 16 (32 for mxfp8) stays as well. Recipes:

- "fp8": one scale a tensor, found before the cast (dynamic scaling) in a pass of its own; a cast kernel then
  writes the copies that the phase needs, transposed or not, at once. Output gradients are e5m2 (the hybrid
  format), all else is e4m3.
- "fp8-rowwise": one scale a row of each operand, e4m3. A row's maximum is found by the kernel that casts it; along
  columns it is a pass of its own.
- "mxfp8": one power of two for each 32 elements of a row, e4m3; one kernel a copy (Blackwell and later).

Between forward and backward an input and a weight are kept in 16 bit and cast again, as torchao does by default;
with `kept="fp8"` forward writes both copies and the 8-bit ones are kept, as Transformer Engine does. Casts of a
tensor that several products read are shared, as `torch.compile` shares them. Weights are cast for each
micro-batch, and every rank scales by its own maxima.

The pass works on local shapes: it comes after those that divide a step (tensor, context and expert parallelism),
which do not know 8-bit operands, and before those that lower it to a job.

Main gradients add up in fp32: each parameter has a buffer that lives as long as it does. Megatron-LM's
`--accumulate-allreduce-grads-in-fp32`: the product that makes a weight's gradient adds it to the buffer itself
(gradient accumulation fusion, on by default there); any other 16-bit gradient is added to it by a kernel of its
own. The optimizer reads the buffers, which are set to zero after it. Data-parallel passes reduce them in their
type, and see that nothing has to be added up over micro-batches: no operation makes such a gradient's memory
(`gradients.adds_up`).

The gradient of a parameter that is used twice (a tied embedding) is a sum, which a pipeline takes apart. Its terms
are made in fp32, and added up over micro-batches as they would be in 16 bit.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from echograph.errors import PlanError, UnavailableError, UnknownNameError
from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import StepGraph
from echograph.ir.passes.gradients import final_gradients
from echograph.ir.passes.precision.fp8 import Recipe, to_fp8
from echograph.ir.passes.rewrite import StepWriter

_FUSING = ("aten.mm", "aten._scaled_mm")
_WIDE = t.DType.FP32


def to_main_gradients(graph: StepGraph) -> StepGraph:
    """The step with fp32 main gradients; the step itself where none of its gradients has a 16-bit type."""
    gradients = [row for row in final_gradients(graph) if graph.tensors[row].dtype.itemsize < _WIDE.itemsize]
    return _Writer(graph, gradients).write() if gradients else graph


class _Writer(StepWriter):
    """Writes main gradients.

    Args:
        graph: the step.
        gradients: rows of its final gradients of 16-bit types.
    """

    def __init__(self, graph: StepGraph, gradients: list[int]) -> None:
        super().__init__(graph)
        self.gradients = frozenset(gradients)
        self.readers: dict[int, list[int]] = defaultdict(list)
        for tensor, row in zip(graph.ops.inputs.values.tolist(), graph.ops.inputs.rows.tolist(), strict=True):
            self.readers[tensor].append(row)
        # The gradient that a product adds to its buffer, by the product's row; those that are added after a row;
        # tensors whose type changes; tensors that are no gradients any more, as they die when they are added.
        self.fused: dict[int, int] = {}
        self.added: dict[int, list[int]] = defaultdict(list)
        self.wide: set[int] = set()
        self.dying: set[int] = set()
        self.narrow: dict[int, int] = {}
        for gradient in gradients:
            self._sort(gradient)
        self._widen_ports()
        self.zeroed = self._last_readers()
        counts = (
            len(gs) * len(graph.blocks[int(graph.block_of_op[r])].instances) for r, gs in self.zeroed.items()
        )
        self.launched = sum(counts)
        self.leads = min((gs[0] for r, gs in self.zeroed.items() if graph.block_of_op[r] == 0), default=NONE)

    # -- what becomes of which gradient --------------------------------------------------------------------

    def _sort(self, gradient: int) -> None:
        graph = self.graph
        chain = self._chain(gradient)
        base = chain[-1]
        if self._is_sum(base):
            self.wide |= {*chain, *self._terms(base)}
            return
        maker = int(graph.maker[base])
        alone = all(self._leads_to_optimizer(index, set(chain)) for index in chain)
        same = graph.tensors.shape.row(base) == graph.tensors.shape.row(gradient)
        if graph.strings[graph.ops.name[maker]] in _FUSING and alone and same:
            self.fused[maker] = gradient
            self.wide |= set(chain)
        else:
            self.added[int(graph.maker[gradient])].append(gradient)
            self.dying |= set(chain)

    def _chain(self, gradient: int) -> list[int]:
        """A gradient, what it is a view of, and so on up to what a kernel made."""
        chain = [gradient]
        while (maker := int(self.graph.maker[chain[-1]])) != NONE and self.graph.ops.is_view[maker]:
            chain.append(self.graph.ops.inputs.row(maker)[0])
        return chain

    def _is_sum(self, tensor: int) -> bool:
        maker = int(self.graph.maker[tensor])
        named = maker != NONE and self.graph.strings[self.graph.ops.name[maker]] == "aten.add"
        return named and len(self.graph.ops.inputs.row(maker)) == 2

    def _terms(self, total: int) -> set[int]:
        """All tensors that a sum is made of, sums and views among them."""
        found: set[int] = set()
        for term in self.graph.ops.inputs.row(int(self.graph.maker[total])):
            chain = self._chain(term)
            if self.graph.maker[chain[-1]] != NONE:  # else it is of another block, and read as it is
                found |= {*chain, *(self._terms(chain[-1]) if self._is_sum(chain[-1]) else ())}
        return found

    def _leads_to_optimizer(self, index: int, chain: set[int]) -> bool:
        """Whether nothing of the backward pass reads a tensor but views that lead to the gradient."""
        return all(
            self.graph.ops.phase[row] == t.Phase.OPTIMIZER or chain.issuperset(self.graph.ops.outputs.row(row))
            for row in self.readers[index]
        )

    def _widen_ports(self) -> None:
        """Ports that mean a gradient have its new type."""
        graph, changed = self.graph, self.wide | self.gradients
        for block in graph.blocks:
            ports = np.flatnonzero(graph.tensors.port[block.tensors.start : block.tensors.stop])
            for instance in block.instances:
                for port, bound in zip(ports.tolist(), instance.bindings, strict=True):
                    if graph.locate_tensor(bound)[2] in changed:
                        self.wide.add(block.tensors.start + port)

    def _last_readers(self) -> dict[int, list[int]]:
        """The operations of the optimizer after which buffers are read no more, with their gradients."""
        last: dict[int, list[int]] = defaultdict(list)
        buffered = [*self.fused.values(), *(g for gradients in self.added.values() for g in gradients)]
        for gradient in sorted(buffered):
            rows = [row for index in self._versions(gradient) for row in self.readers[index]]
            if rows and self.graph.ops.phase[max(rows)] == t.Phase.OPTIMIZER:
                last[max(rows)].append(gradient)
        return last

    def _versions(self, gradient: int) -> list[int]:
        """A gradient, its fp32 copy, and what the optimizer makes of that in place."""
        found = [gradient]
        for index in found:
            for row in self.readers[index]:
                copied = self._is_copy(self.graph.ops[row])
                outputs = self.graph.ops.outputs.row(row)
                found += [i for i in outputs if copied or self.graph.tensors.alias_of[i] == index]
        return found

    def _is_copy(self, op: t.Op) -> bool:
        """Whether an operation of the optimizer does nothing but widen a gradient."""
        if op.phase != t.Phase.OPTIMIZER or "copy" not in op.name or len(op.inputs) != 1 or len(op.outputs) != 1:
            return False
        made = self.graph.tensors[op.outputs[0]]
        of_gradient = op.inputs[0] in self.gradients or op.inputs[0] in self.wide
        return of_gradient and (made.dtype, made.role, made.alias_of) == (_WIDE, t.TensorRole.GRADIENT, None)

    # -- writing -------------------------------------------------------------------------------------------

    def operation(self, op: t.Op) -> None:
        if self._is_copy(op):
            (source,), (made,) = op.inputs, op.outputs
            self.part.tensors[made] = self.tensor(source)
            if (maker := int(self.graph.maker[source])) in self.part.ops:
                self.part.ops[op.id] = self.part.ops[maker]
            return
        if op.id in self.fused and isinstance(op, t.Compute):
            self._accumulate(op, self.graph.tensors[self.fused[op.id]])
        else:
            self._rewrite(op)
        for gradient in self.added.get(op.id, ()):
            self._add(op, self.graph.tensors[gradient])
        for gradient in self.zeroed.get(op.id, ()):
            self._zero(op, self.graph.tensors[gradient])

    def tensor(self, index: int, **changes: object) -> int:
        """New row of an old tensor; what changes its type or role has the new one."""
        if index in self.wide:
            changes["dtype"] = _WIDE
        if index in self.dying:
            changes["role"] = t.TensorRole.ACTIVATION
        return super().tensor(index, **changes)

    def _rewrite(self, op: t.Op) -> None:
        """Copies an operation; what it moves grows with the types of its tensors."""
        changes: dict[str, object] = {}
        updates = op.phase == t.Phase.OPTIMIZER
        if not updates:
            changes["inputs"] = [self.narrow.get(i, self.tensor(i)) for i in op.inputs]
        if isinstance(op, t.Compute) and not op.is_view:
            wide = self.wide | self.gradients if updates else self.wide
            for name, tensors in (("bytes_read", op.inputs), ("bytes_written", op.outputs)):
                more = sum(self.graph.tensors[i].nbytes for i in set(tensors) & wide)
                changes[name] = getattr(op, name) + more
        self.copy(op, **changes)

    def _version(self, gradient: t.Tensor, buffer: int | None) -> int:
        """A main gradient as an operation leaves it; without one before it, the buffer itself."""
        named = gradient.name if buffer is not None else f"{gradient.name}.main"
        return self.add_tensor(replace(gradient, name=named, dtype=_WIDE, role=t.TensorRole.GRADIENT), buffer)

    def _accumulate(self, op: t.Compute, gradient: t.Tensor) -> None:
        """Writes a product that adds its result to the buffer."""
        buffer = self._version(gradient, None)
        self.part.tensors[op.outputs[0]] = self._version(gradient, buffer)
        nbytes, plain = gradient.numel * _WIDE.itemsize, op.name == "aten.mm"
        inputs = [self.tensor(i) for i in op.inputs]
        product = replace(
            op, name="aten.addmm_" if plain else op.name, bytes_read=op.bytes_read + nbytes, bytes_written=nbytes,
            durations=(),
        )  # fmt: skip
        self.copy(product, inputs=[buffer, *inputs] if plain else [*inputs, buffer])

    def _add(self, op: t.Op, gradient: t.Tensor) -> None:
        """Adds a 16-bit gradient, which dies with that, to the buffer."""
        self.narrow[gradient.id] = self.part.tensors[gradient.id]
        buffer = self._version(gradient, None)
        made = self.part.tensors[gradient.id] = self._version(gradient, buffer)
        nbytes = gradient.numel * _WIDE.itemsize
        self.builder.compute(
            "aten.add_", phase=op.phase, module=op.module, inputs=(buffer, self.narrow[gradient.id]),
            outputs=(made,), bytes_read=nbytes + gradient.nbytes, bytes_written=nbytes,
        )  # fmt: skip

    def _zero(self, op: t.Op, gradient: t.Tensor) -> None:
        """Sets a buffer to zero, for the next step."""
        buffer = self.part.tensors[gradient.id]
        made = self._version(gradient, buffer)
        self.builder.compute(
            "aten._foreach_zero_", phase=op.phase, module=op.module, inputs=(buffer,), outputs=(made,),
            deps=(self.part.ops[op.id],), bytes_written=gradient.numel * _WIDE.itemsize,
            attributes=t.MultiTensor(parts=self.launched, leads=gradient.id == self.leads),
        )  # fmt: skip


RECIPES = {
    "fp8": Recipe(scales="tensor", gradients=t.DType.FP8_E5M2, kept="bf16"),
    "fp8-rowwise": Recipe(scales="row", gradients=t.DType.FP8_E4M3, kept="bf16"),
    "mxfp8": Recipe(scales="block", gradients=t.DType.FP8_E4M3, kept="bf16"),
}
_STEPS = {"bf16": t.DType.BF16, "fp16": t.DType.FP16, "fp32": t.DType.FP32}
_TYPES = {"tf32", *(dtype.text for dtype in t.DType)} - {*_STEPS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The step in other types.

    Attributes:
        dtype: a recipe for products in FP8 ("fp8", "fp8-rowwise", "mxfp8"), or the type that the step has already
            ("bf16", "fp16", "fp32"): another one is other kernels, which only a capture shows. None: as it is.
        grad_dtype: type in which gradients add up; "fp32" gives a 16-bit step main gradients. None: their own.
        kept: of inputs and weights, for backward: the 16-bit tensors ("bf16"), or 8-bit copies ("fp8").
        delayed: scales of "fp8" come from earlier steps' maxima, which the casts note on their way (delayed
            scaling); updating the histories is not counted.
        weights: whether weights are cast for each micro-batch, or once a step ("step"), which is not counted.
        experts: whether experts' grouped products are in FP8, too.
    """

    name: ClassVar[str] = "precision"

    dtype: str | None = None
    grad_dtype: str | None = None
    kept: Literal["bf16", "fp8"] = "bf16"
    delayed: bool = False
    weights: Literal["micro-batch", "step"] = "micro-batch"
    experts: bool = False

    def __call__(self, graph: StepGraph) -> StepGraph:
        """The step graph.

        Raises:
            PlanError: the step has another type, or no linear layer can have products in FP8.
            UnknownNameError: no such type or recipe.
            UnavailableError: a type in which no step computes, or no gradients add up.
        """
        return self._gradients(self._products(graph))

    def _products(self, graph: StepGraph) -> StepGraph:
        if self.dtype is None:
            return graph
        own = graph.workload.dtype
        if self.dtype in _STEPS:
            if own == _STEPS[self.dtype]:
                return graph
            raise PlanError(
                f"precision {self.dtype}: the step was captured in {own.text}, and its kernels are of that type: "
                f"compile the model with --dtype {self.dtype}"
            )
        if self.dtype not in RECIPES:
            if self.dtype in _TYPES:
                raise UnavailableError(f"precision {self.dtype}: no step computes in it", (*RECIPES, *_STEPS))
            raise UnknownNameError("precision", self.dtype, (*RECIPES, *_STEPS))
        if own != t.DType.BF16:
            raise PlanError(
                f"precision {self.dtype}: its products give bf16, and the step was captured in {own.text}: "
                "compile the model with --dtype bf16"
            )
        if self.delayed and self.dtype != "fp8":
            raise PlanError(
                f"precision {self.dtype} with delayed scaling: only fp8, with a scale a tensor, has it"
            )
        options = {"kept": self.kept, "delayed": self.delayed, "weights": self.weights, "experts": self.experts}
        return to_fp8(graph, replace(RECIPES[self.dtype], **options))  # type: ignore[arg-type]

    def _gradients(self, graph: StepGraph) -> StepGraph:
        if self.grad_dtype is None:
            return graph
        if self.grad_dtype not in _STEPS:
            if self.grad_dtype in (*_TYPES, *RECIPES):
                raise UnavailableError(f"gradients do not add up in {self.grad_dtype}", _STEPS)
            raise UnknownNameError("type of gradients", self.grad_dtype, _STEPS)
        wanted, own = _STEPS[self.grad_dtype], graph.workload.dtype
        if wanted == own:
            return graph
        if wanted != t.DType.FP32:
            raise PlanError(
                f"gradients in {self.grad_dtype}: those of a step in {own.text} add up in {own.text} or fp32: "
                "choose one of these"
            )
        return to_main_gradients(graph)
