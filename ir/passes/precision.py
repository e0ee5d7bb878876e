"""The types that a step computes in: products in FP8, NVFP4 and TF32, fp32 gradients.

FP8 as torchao's `float8` training and Transformer Engine do it. The products of the linear layers within the
model's layers are `_scaled_mm` on narrow operands with 16-bit results; everything else (attention, norms,
embeddings, the head, experts' grouped products) stays as it is, parameters and their gradients too. A linear
layer whose tokens or features are no multiples of 16, or of a longer block, stays as well. Recipes:

- "fp8": one scale a tensor, found before the cast (dynamic scaling) in a pass of its own; a cast kernel then
  writes the copies that the phase needs, transposed or not, at once. Output gradients are e5m2 (the hybrid
  format), all else is e4m3.
- "fp8-rowwise": one scale a row of each operand, e4m3. A row's maximum is found by the kernel that casts it; along
  columns it is a pass of its own. Products of backward run with scales of one, and an elementwise operation,
  `fp8.rescale`, scales their result (pytorch/ao, float8/float8_ops.py, addmm_float8_unwrapped, since December
  2024: the kernel with scales of rows is slow where sums leave the tensor core). Where tensor-parallel ranks
  share what a product sums over, so that its result is reduced over them, they agree on the maxima of both
  operands' rows first, by an all-reduce of numbers in fp64, and the cast is a kernel of its own after that (so
  DTensor redistributes a maximum along a shared dimension, and torchao finds scales in fp64).
- "fp8-blockwise": one scale for each 128 elements of a row, and for each 128 x 128 of a weight (DeepSeek-V3).
- "mxfp8": one power of two for each 32 elements of a row, e4m3 (Blackwell and later).
- "nvfp4": e2m1, two elements a byte, with a scale for each 16 of a row (e4m3) beside one of the tensor, whose
  maximum is a pass of its own (Blackwell; NVIDIA, arXiv:2509.25149; Transformer Engine's NVFP4BlockScaling). All
  three products of a linear layer are in it, and copies are kept as with `kept="fp8"` below. What the recipe does
  for accuracy moves no byte more in the kernel that casts: stochastic rounding of gradients, a random Hadamard
  transform of the transposed copies of inputs and gradients, scales of 16 x 16 elements of a weight.

Between forward and backward an input and a weight are kept in 16 bit and cast again, as torchao does by default,
by a kernel for each copy where scales are of rows or blocks; with `kept="fp8"` one kernel of forward writes both
copies, and these are kept, as Transformer Engine does. Casts of a tensor that several products read are shared, as
`torch.compile` shares them. Weights are cast for each micro-batch, and every rank scales by its own maxima.

Where the ranks of a tensor-parallel group gather a tensor that such products alone read, each can cast its part
first, so that half the bytes are gathered (`gathers`, with one scale a tensor). What is needed transposed is
transposed after that.

The pass works on local shapes: it comes after those that divide a step (tensor, context and expert parallelism),
which do not know 8-bit operands, and before those that lower it to a job.

Main gradients add up in fp32, or in the step's own type: each parameter has a buffer that lives as long as it
does, Megatron-LM's `main_grad`. The product that makes a weight's gradient adds it to the buffer itself (gradient
accumulation fusion, on by default there); any other 16-bit gradient is added to it by a kernel of its own. The
optimizer reads the buffers, which are set to zero after it. Data-parallel passes reduce them in their type, and
see that nothing has to be added up over micro-batches: no operation makes such a gradient's memory
(`model.adds_up`). Where products do not add to the buffers, as with DeepSpeed's BF16_Optimizer, the 16-bit
gradients of a micro-batch are cast and added together once it is over, and stay until the next one's backward
begins (v0.6.4, runtime/bf16_optimizer.py, clear_lp_grads): they take memory of their own, here through the whole
step.

The gradient of a parameter that is used twice (a tied embedding) is a sum, which a pipeline takes apart. Its
terms are made in fp32, and added up over micro-batches as they would be in 16 bit.

A linear layer has three products: output = input x weight^T, input gradient = output gradient x weight, weight
gradient = output gradient^T x input. Such a product wants both operands with the dimension that it sums over last
in memory, so each of the three tensors is needed as it lies in memory ("rows") and transposed ("columns").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import ClassVar, Literal

import numpy as np

from echograph.errors import PlanError, UnavailableError, UnknownNameError
from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import StepGraph
from echograph.ir.passes.fuse import RESCALE
from echograph.ir.passes.model import final_gradients, find_layers
from echograph.ir.passes.rewrite import StepWriter

_PRODUCTS = ("aten.mm", "aten.addmm")
_GROUPED = "aten._grouped_mm"
_SCALE = t.DType.FP32
ALIGNMENT = 16
"""What `torch._scaled_mm` wants the dimensions of a product to be multiples of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How tensors become narrow ones.

    Attributes:
        scales: one a tensor, one a row of the operand, or one for each block along a row.
        operands: type of inputs and weights.
        gradients: type of output gradients.
        kept: what forward keeps of an input and a weight for backward: the 16-bit tensor, cast again, or the
            transposed narrow copy.
        format: what the names of its kernels and copies begin with.
        block: elements along a row that share a scale.
        scale: type of the scales of blocks: below 32 bits they lie in the tiles that tensor cores read.
        maximum: whether the maximum of the whole tensor is looked for before a cast.
        delayed: scales come from the maxima of earlier steps, so that none is looked for before the cast.
        weights: whether weights are cast for each micro-batch, or once a step, outside the micro-batches; making
            these copies, and scaling them, is then not counted.
        experts: whether experts' grouped products have narrow operands, too.
        gathers: whether what ranks gather for 8-bit products is cast before it is gathered.
    """

    scales: Literal["tensor", "row", "block"]
    operands: t.DType = t.DType.FP8_E4M3
    gradients: t.DType = t.DType.FP8_E4M3
    kept: Literal["bf16", "fp8"] = "bf16"
    format: str = "fp8"
    block: int = 0
    scale: t.DType = _SCALE
    maximum: bool = False
    delayed: bool = False
    weights: Literal["micro-batch", "step"] = "micro-batch"
    experts: bool = False
    gathers: bool = False

    @property
    def multiple(self) -> int:
        """What the dimensions of a product are multiples of."""
        return max(ALIGNMENT, self.block)


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowOperand:
    """An operand of a product.

    Attributes:
        base: the tensor that it is a view of, with the same elements.
        columns: whether it is needed transposed.
        left: whether it is the left operand.
        shape: rows and columns of the copy that is needed; the product sums over the columns.
        dtype: the narrow type.
    """

    base: int
    columns: bool
    left: bool
    shape: tuple[int, int]
    dtype: t.DType


def to_narrow(graph: StepGraph, recipe: Recipe) -> StepGraph:
    """The step with narrow products in the linear layers of its layers.

    Raises:
        PlanError: there is no linear layer whose dimensions are multiples of 16, or of a block.
    """
    finder = _Finder(graph, recipe)
    products = finder.products()
    if not products:
        raise PlanError(
            f"{recipe.format}: no linear layer in the model's layers has tokens and features in multiples of "
            f"{recipe.multiple}: change the batch, the sequence, or the precision"
        )
    return _NarrowProducts(finder, products).write()


class _Finder:
    """Finds the products of linear layers, by what they differentiate."""

    def __init__(self, graph: StepGraph, recipe: Recipe) -> None:
        self.graph, self.recipe = graph, recipe

    def products(self) -> dict[int, tuple[NarrowOperand, NarrowOperand]]:
        """The operands of every product that becomes a narrow one, by its row."""
        graph, found = self.graph, dict[int, tuple[NarrowOperand, NarrowOperand]]()
        linears = {row for layer in find_layers(graph) for row in layer.rows if self._is_linear(row)}
        backward: dict[int, list[int]] = {row: [] for row in linears}
        for row, forward in enumerate(graph.ops.forward_op.tolist()):
            if forward in linears and self._is_product(row):
                backward[forward].append(row)
        for row in sorted(linears):
            again = [r for r in backward[row] if graph.ops.phases[r] == t.Phase.RECOMPUTE]
            found |= {r: self._operands(r, frozenset()) for r in (row, *again)}
            rest = [r for r in backward[row] if graph.ops.phases[r] == t.Phase.BACKWARD]
            gradients = frozenset(self._gradient_bases(rest))
            found |= {r: self._operands(r, gradients) for r in rest}
        return found

    def _is_product(self, row: int) -> bool:
        return self.graph.strings[self.graph.ops.name[row]] in _PRODUCTS

    def _is_linear(self, row: int) -> bool:
        """Whether an operation is a product with a parameter, of dimensions that narrow products can have."""
        if not self._is_product(row):
            return False
        left, right = self.graph.ops.inputs.row(row)[-2:]
        sizes = (*self.graph.tensors.shape.row(left), self.graph.tensors.shape.row(right)[1])
        divides = min(sizes) > 0 and not any(size % self.recipe.multiple for size in sizes)
        return divides and self.is_parameter(right) and not self.is_parameter(left)

    def is_parameter(self, index: int) -> bool:
        """Whether a tensor is a weight, or a view of one."""
        block = next(n for n, b in enumerate(self.graph.blocks) if index in b.tensors)
        _, _, origin = self.graph.value(block, 0, index)
        return bool(self.graph.tensors.role[origin] == t.TensorRole.PARAMETER)

    def _gradient_bases(self, backward: list[int]) -> Iterator[int]:
        """The output gradient of a linear layer: what its input gradient multiplies the weight with."""
        for row in backward:
            left, right = self.graph.ops.inputs.row(row)[-2:]
            if self.is_parameter(right):
                yield self.base(left)
            elif self.is_parameter(left):
                yield self.base(right)

    def _operands(self, row: int, gradients: frozenset[int]) -> tuple[NarrowOperand, NarrowOperand]:
        op = self.graph.ops[row]
        assert isinstance(op, t.Compute)
        assert isinstance(op.attributes, t.Gemm)
        left, right = op.inputs[-2:]
        rows, inner = self.graph.tensors.shape.row(left)
        columns = self.graph.tensors.shape.row(right)[1]
        first = self._operand(left, (rows, inner), op.attributes.transpose_a, True, gradients)
        second = self._operand(right, (columns, inner), not op.attributes.transpose_b, False, gradients)
        if op.phase == t.Phase.BACKWARD and not gradients:  # the input needs no gradient: all is known by phases
            first, second = (self._by_phase(o) for o in (first, second))
        return first, second

    def _operand(
        self, index: int, shape: tuple[int, int], columns: bool, left: bool, gradients: frozenset[int]
    ) -> NarrowOperand:
        base = self.base(index)
        dtype = self.recipe.gradients if base in gradients else self.recipe.operands
        return NarrowOperand(base=base, columns=columns, left=left, shape=shape, dtype=dtype)

    def _by_phase(self, operand: NarrowOperand) -> NarrowOperand:
        maker = int(self.graph.maker[operand.base])
        made = maker != NONE and self.graph.ops.phases[maker] == t.Phase.BACKWARD
        return replace(operand, dtype=self.recipe.gradients) if made else operand

    def base(self, index: int) -> int:
        """The tensor that a view shows all of."""
        graph = self.graph
        while True:
            above, maker = int(graph.tensors.alias_of[index]), int(graph.maker[index])
            same = above != NONE and prod(graph.tensors.shape.row(above)) == prod(graph.tensors.shape.row(index))
            if not same or maker == NONE or not graph.ops.is_view[maker]:
                return index
            index = above


class _NarrowProducts(StepWriter):
    """Writes narrow products in place of the others, each after the kernels that make what it reads first."""

    def __init__(self, finder: _Finder, products: dict[int, tuple[NarrowOperand, NarrowOperand]]) -> None:
        graph = finder.graph
        super().__init__(graph)
        self.finder, self.recipe, self.products = finder, finder.recipe, products
        self.wanted: dict[object, dict[bool, NarrowOperand]] = {}
        for row, operands in products.items():
            for operand in operands:
                self.wanted.setdefault(self._scope(operand, graph.ops[row]), {}).setdefault(
                    operand.columns, operand
                )
        self.copies: dict[tuple[object, bool], tuple[int, ...]] = {}
        self.scales: dict[int, int] = {}
        self.agreeing = self._of_shared_sums() if self.recipe.scales == "row" else {}
        self.gathered: dict[int, t.DType] = self._gathered_for_products() if self.recipe.gathers else {}

    def _gathered_for_products(self) -> dict[int, t.DType]:
        """What is gathered for 8-bit products alone, and the views of it, with their 8-bit type."""
        graph, readers, found = self.graph, defaultdict[int, list[int]](list), dict[int, t.DType]()
        for tensor, row in zip(graph.ops.inputs.values.tolist(), graph.ops.inputs.rows.tolist(), strict=True):
            readers[tensor].append(row)
        bases = {operand.base: operand.dtype for pair in self.products.values() for operand in pair}
        for base, dtype in bases.items():
            maker = int(graph.maker[base])
            op = graph.ops[maker] if maker != NONE else None
            if not isinstance(op, t.Collective) or op.collective != t.CollectiveKind.ALL_GATHER:
                continue
            views = [base]
            for index in views:
                views += [i for r in readers[index] if graph.ops.is_view[r] for i in graph.ops.outputs.row(r)]
            ends = {row for index in views for row in readers[index] if not graph.ops.is_view[row]}
            whole = all(self.finder.base(index) == base for index in views)
            if whole and all(base in {o.base for o in self.products.get(row, ())} for row in ends):
                found |= dict.fromkeys(views, dtype)
        return found

    def _of_shared_sums(self) -> dict[tuple[object, bool], t.Collective]:
        """Copies for products that sum over a rank's share of a dimension, with what reduces the results."""
        graph, found = self.graph, dict[tuple[object, bool], t.Collective]()
        reductions = (t.CollectiveKind.REDUCE_SCATTER, t.CollectiveKind.ALL_REDUCE)
        for op in graph.ops:
            left = list(op.inputs) if isinstance(op, t.Collective) and op.collective in reductions else []
            while left:
                row = int(graph.maker[left.pop()])
                if row in self.products:
                    assert isinstance(op, t.Collective)
                    product = graph.ops[row]
                    found |= {(self._scope(o, product), o.columns): op for o in self.products[row]}
                elif row != NONE and (graph.ops.is_view[row] or graph.ops[row].name in ("aten.add", "aten.cat")):
                    left += graph.ops.inputs.row(row)
        return found

    def tensor(self, index: int, **changes: object) -> int:
        if index in self.gathered:
            changes["dtype"] = self.gathered[index]
        return super().tensor(index, **changes)

    def _gather(self, op: t.Collective) -> None:
        """Gathers a tensor in 8 bit: each rank casts its part, once for all phases that keep it."""
        part, dtype = self.graph.tensors[op.inputs[0]], self.gathered[op.outputs[0]]
        key = ("part", self.finder.base(part.id), None if self.recipe.kept == "fp8" else op.phase), False
        if key not in self.copies:
            scale, made = self._maximum(part, op), self._new(f"{part.name}.fp8", part.shape, dtype)
            self._kernel("fp8.cast", op, (self.tensor(part.id), *scale), (made,), part.nbytes, part.numel)
            self.copies[key] = (made, *scale)
        nbytes = op.bytes_per_rank * dtype.bits // part.dtype.bits
        self.copy(op, inputs=[self.copies[key][0]], bytes_per_rank=nbytes, dtype=dtype, durations=())

    def operation(self, op: t.Op) -> None:
        if isinstance(op, t.Collective) and op.outputs and op.outputs[0] in self.gathered:
            self._gather(op)
            return
        if self.recipe.experts and op.name == _GROUPED and isinstance(op, t.Compute):
            self._grouped(op)
            return
        if op.id not in self.products or not isinstance(op, t.Compute):
            self.copy(op)
            return
        left, right = self.products[op.id]
        (first, *first_scale), (second, *second_scale) = self._quantised(left, op), self._quantised(right, op)
        turned = self.builder.tensor("t", right.shape[::-1], right.dtype, t.TensorRole.ACTIVATION, alias_of=second)
        self.builder.compute("aten.t", phase=op.phase, module=op.module, inputs=(second,), outputs=(turned,))
        bias = [self.tensor(i) for i in op.inputs[:-2]]
        sizes = [o.dtype.nbytes(prod(o.shape)) + self._scale_bytes(o) for o in (left, right)]
        sizes += [self.graph.tensors[i].nbytes for i in op.inputs[:-2]]
        scaled = replace(
            op,
            name="aten._scaled_mm",
            bytes_read=sum(sizes),
            attributes=t.Gemm(transpose_b=True, block=self.recipe.block),
            durations=(),
        )
        if self.recipe.scales == "row" and op.phase == t.Phase.BACKWARD:
            self._scale_after(scaled, [first, turned, *bias], (*first_scale, *second_scale))
        else:
            self.copy(scaled, inputs=[first, turned, *bias, *first_scale, *second_scale])

    def _scale_after(self, op: t.Compute, operands: Iterable[int], scales: Iterable[int]) -> None:
        """A product with scales of one, and the multiplication of its rows and columns by theirs."""
        (made,) = (self.graph.tensors[i] for i in op.outputs)
        unscaled = self._new("unscaled", made.shape, made.dtype)
        self.copy(op, inputs=list(operands), outputs=[unscaled])
        self._kernel(RESCALE, op, (unscaled, *scales), (self.tensor(made.id),), made.nbytes, made.nbytes)

    def _grouped(self, op: t.Compute) -> None:
        """Writes a grouped product of experts on narrow operands; one kernel makes both copies of each."""
        *_, offsets = op.inputs
        assert isinstance(op.attributes, t.Gemm)
        read = [self._of_experts(index, op) for index in op.inputs[:2]]
        sizes = [self._narrow_bytes(self.graph.tensors[index].numel) for index in op.inputs[:2]]
        scaled = replace(
            op, name="aten._scaled_grouped_mm", bytes_read=sum(sizes) + self.graph.tensors[offsets].nbytes,
            attributes=replace(op.attributes, block=self.recipe.block), durations=(),
        )  # fmt: skip
        self.copy(scaled, inputs=[*read, *(self.tensor(i) for i in op.inputs[2:])])

    def _of_experts(self, index: int, op: t.Compute) -> int:
        """A narrow operand of a grouped product."""
        base, shape = self.finder.base(index), tuple(self.graph.tensors.shape.row(index))
        weight = self.recipe.weights == "step" and self.finder.is_parameter(base)
        scope = (base, op.phase if self.recipe.kept == "bf16" and not weight else None)
        if (scope, False) not in self.copies:
            source = self.graph.tensors[base]
            if weight:
                made = self._kept(source.name, source.shape)
            else:
                made = self._new(self._named(source.name), source.shape, self.recipe.operands)
                self._maximum(source, op)
                written = 2 * self._narrow_bytes(source.numel)
                name = f"{self.recipe.format}.cast_transpose"
                self._kernel(name, op, (self.tensor(base),), (made,), source.nbytes, written)
            self.copies[scope, False] = (made,)
        (made,) = self.copies[scope, False]
        if tuple(self.graph.tensors.shape.row(base)) == shape:
            return made
        turned = self.builder.tensor("t", shape, self.recipe.operands, t.TensorRole.ACTIVATION, alias_of=made)
        self.builder.compute("aten.t", phase=op.phase, module=op.module, inputs=(made,), outputs=(turned,))
        return turned

    def _kept(self, name: str, shape: tuple[int, ...]) -> int:
        """A narrow copy of a weight that outlives the micro-batch."""
        return self.builder.tensor(self._named(name), shape, self.recipe.operands, t.TensorRole.BUFFER)

    def _named(self, name: str) -> str:
        return f"{name}.fp{self.recipe.operands.bits}"

    def _narrow_bytes(self, elements: int) -> int:
        """Of so many operands' elements, and of the scales of their blocks."""
        scales = ceil(elements / self.recipe.block) if self.recipe.block else 0
        return self.recipe.operands.nbytes(elements) + self.recipe.scale.nbytes(scales)

    def _scope(self, operand: NarrowOperand, op: t.Op) -> object:
        """What shares narrow copies: all products of a tensor, or those of one phase."""
        return operand.base if self.recipe.kept == "fp8" else (operand.base, op.phase)

    def _quantised(self, operand: NarrowOperand, op: t.Compute) -> tuple[int, ...]:
        """The narrow copy that a product reads, and its scale where it has one."""
        if self.recipe.weights == "step" and self.finder.is_parameter(operand.base):
            return self._weight(operand)
        scope = self._scope(operand, op)
        if (scope, operand.columns) not in self.copies:
            # What was gathered in 8 bit is transposed when that is read, as gathering may still go on before.
            wanted = [operand] if operand.base in self.gathered else list(self.wanted[scope].values())
            if self.recipe.scales == "tensor":
                self._cast_all(wanted, scope, op)
            elif self.recipe.scales == "block" and self.recipe.kept == "fp8":
                self._cast_blocks(wanted, scope, op)
            else:
                for each in wanted:
                    self._cast_rows(each, scope, op)
        return self.copies[scope, operand.columns]

    def _weight(self, operand: NarrowOperand) -> tuple[int, ...]:
        """The copy of a weight that was made before the micro-batches."""
        key = ("weight", operand.base), operand.columns
        if key not in self.copies:
            self.copies[key] = (self._kept(self.graph.tensors[operand.base].name, operand.shape),)
        return self.copies[key]

    def _maximum(self, source: t.Tensor, op: t.Op) -> tuple[int, ...]:
        """The scale of a tensor, found once; nothing where earlier steps, or blocks of it, have scaled it."""
        if self.recipe.delayed or (self.recipe.scales == "block" and not self.recipe.maximum):
            return ()
        if source.id not in self.scales:
            made = self.scales[source.id] = self._new("amax", (), _SCALE)
            name = f"{self.recipe.format}.amax"
            self._kernel(name, op, (self.tensor(source.id),), (made,), source.nbytes, _SCALE.nbytes(1))
        return (self.scales[source.id],)

    def _cast_all(self, wanted: list[NarrowOperand], scope: object, op: t.Compute) -> None:
        """With one scale for a tensor: its maximum, once, then one kernel that writes all copies."""
        source = self.graph.tensors[wanted[0].base]
        if source.id in self.gathered:
            self._copies_of_gathered(source, wanted, scope, op)
            return
        scale = self._maximum(source, op)
        copies = [self._new(self._named(source.name), each.shape, each.dtype) for each in wanted]
        name = self._cast_name(wanted)
        written = source.numel * len(copies)
        self._kernel(name, op, (self.tensor(source.id), *scale), copies, source.nbytes, written)
        for each, made in zip(wanted, copies, strict=True):
            self.copies[scope, each.columns] = (made, *scale)

    def _copies_of_gathered(
        self, source: t.Tensor, wanted: list[NarrowOperand], scope: object, op: t.Compute
    ) -> None:
        """What was gathered in 8 bit, as it is and transposed."""
        whole = self.tensor(source.id)
        for each in wanted:
            alias = None if each.columns else whole
            made = self.builder.tensor(
                self._named(source.name), each.shape, each.dtype, t.TensorRole.ACTIVATION, alias_of=alias
            )
            nbytes = source.numel if each.columns else 0
            self._kernel("fp8.transpose" if each.columns else "aten.view", op, (whole,), (made,), nbytes, nbytes)
            self.copies[scope, each.columns] = (made,)

    def _cast_blocks(self, wanted: list[NarrowOperand], scope: object, op: t.Compute) -> None:
        """With scales of blocks: one kernel that reads a tensor once and writes all copies."""
        source = self.graph.tensors[wanted[0].base]
        read = (self.tensor(source.id), *self._maximum(source, op))
        copies = []
        for each in wanted:
            shape, dtype = self._scale_shape(each)
            scale = self._new("scale", shape, dtype)
            copies.append((self._new(self._named(source.name), each.shape, each.dtype), scale))
            self.copies[scope, each.columns] = copies[-1]
        written = sum(each.dtype.nbytes(source.numel) + self._scale_bytes(each) for each in wanted)
        made = [tensor for pair in copies for tensor in pair]
        self._kernel(self._cast_name(wanted), op, read, made, source.nbytes, written)

    def _cast_name(self, wanted: list[NarrowOperand]) -> str:
        """A tensor as it is, transposed, or both; kernels that torch.compile makes of both are slow ones."""
        if self.recipe.kept == "bf16" and len({each.columns for each in wanted}) > 1:
            return f"{self.recipe.format}.cast_both"
        return f"{self.recipe.format}.cast{'_transpose' if any(each.columns for each in wanted) else ''}"

    def _cast_rows(self, operand: NarrowOperand, scope: object, op: t.Compute) -> None:
        """With scales within a tensor: a kernel for each copy, which finds the maxima on its way.

        Maxima down the columns of a tensor are another pass over it; blocks fit into a tile.
        """
        source = self.graph.tensors[operand.base]
        read = (self.tensor(source.id),)
        shape, dtype = self._scale_shape(operand)
        scale = self._new("scale", shape, dtype)
        made = self._new(self._named(source.name), operand.shape, operand.dtype)
        name = self._cast_name([operand])
        nbytes = self._scale_bytes(operand)
        if reduction := self.agreeing.get((scope, operand.columns)):
            agreed = self._agreed(operand, op, reduction)
            name = "fp8.cast_columns" if operand.columns else "fp8.cast_agreed"
            written = source.numel + nbytes
            self._kernel(name, op, (*read, agreed), (made, scale), source.nbytes + 2 * nbytes, written)
        elif self.recipe.scales == "row" and operand.columns:
            self._kernel("fp8.amax_columns", op, read, (scale,), source.nbytes, nbytes)
            self._kernel("fp8.cast_columns", op, (*read, scale), (made,), source.nbytes + nbytes, source.numel)
        else:
            self._kernel(name, op, read, (made, scale), source.nbytes, source.numel + nbytes)
        self.copies[scope, operand.columns] = made, scale

    def _agreed(self, operand: NarrowOperand, op: t.Compute, reduction: t.Collective) -> int:
        """The maxima of rows that several ranks hold parts of."""
        source, (shape, _) = self.graph.tensors[operand.base], self._scale_shape(operand)
        own, agreed = (self._new(name, shape, t.DType.FP64) for name in ("maxima", "agreed"))
        nbytes = t.DType.FP64.nbytes(prod(shape))
        name = "fp8.amax_columns" if operand.columns else "fp8.amax_rows"
        self._kernel(name, op, (self.tensor(source.id),), (own,), source.nbytes, nbytes)
        axis, _, _ = reduction.name.partition(".")
        self.builder.collective(
            f"{axis}.all_reduce", t.CollectiveKind.ALL_REDUCE, group=reduction.group, bytes_per_rank=nbytes,
            dtype=t.DType.FP64, payload=t.Payload.OTHER, asynchronous=True, phase=op.phase, module=op.module,
            inputs=(own,), outputs=(agreed,), stream=reduction.stream,
        )  # fmt: skip
        return agreed

    def _scale_shape(self, operand: NarrowOperand) -> tuple[tuple[int, ...], t.DType]:
        rows, inner = operand.shape
        match self.recipe.scales:
            case "tensor":
                return (), _SCALE
            case "row":
                return ((rows, 1) if operand.left else (1, rows)), _SCALE
        blocks = ceil(inner / self.recipe.block)
        if self.recipe.scale == _SCALE:
            square = self.finder.is_parameter(operand.base)
            return (ceil(rows / self.recipe.block) if square else rows, blocks), _SCALE
        # One byte a scale, in tiles of 128 rows by 4 blocks as the tensor cores read them.
        return (128 * ceil(rows / 128) * 4 * ceil(blocks / 4),), self.recipe.scale

    def _scale_bytes(self, operand: NarrowOperand) -> int:
        shape, dtype = self._scale_shape(operand)
        return 0 if self.recipe.delayed else dtype.nbytes(prod(shape))

    def _new(self, name: str, shape: tuple[int, ...], dtype: t.DType) -> int:
        return self.builder.tensor(name, shape, dtype, t.TensorRole.ACTIVATION)

    def _kernel(
        self, name: str, op: t.Op, read: Iterable[int], made: Iterable[int], bytes_read: int, bytes_written: int
    ) -> None:
        self.builder.compute(
            name, phase=op.phase, module=op.module, inputs=read, outputs=made, bytes_read=bytes_read,
            bytes_written=bytes_written,
        )  # fmt: skip


_FUSING = ("aten.mm", "aten._scaled_mm", "aten._grouped_mm", "aten._scaled_grouped_mm")
"""Products that can add to a buffer, as those of Transformer Engine do: of linear layers, and of GroupedLinear
for all experts of a layer (fuse_wgrad_accumulation)."""
_WIDE = t.DType.FP32


def to_main_gradients(graph: StepGraph, dtype: t.DType = _WIDE, fuses: bool = True) -> StepGraph:
    """The step with main gradients of a type; the step itself where none of its gradients has a 16-bit type.

    Args:
        graph: the step.
        dtype: type of the buffers.
        fuses: products add to them; else each gradient is cast, and then added.
    """
    types = [graph.tensors[row].dtype for row in final_gradients(graph)]
    fit = [own.bits < _WIDE.bits and dtype in (own, _WIDE) for own in types]
    gradients = [row for row, fits in zip(final_gradients(graph), fit, strict=True) if fits]
    return _MainGradients(graph, gradients, dtype, fuses).write() if gradients else graph


class _MainGradients(StepWriter):
    """Writes main gradients.

    Args:
        graph: the step.
        gradients: rows of its final gradients of 16-bit types.
        dtype: type of the buffers.
        fuses: whether products add to them.
    """

    def __init__(self, graph: StepGraph, gradients: list[int], dtype: t.DType, fuses: bool) -> None:
        super().__init__(graph)
        self.dtype, self.fuses = dtype, fuses
        self.gradients = frozenset(gradients)
        self.readers: dict[int, list[int]] = defaultdict(list)
        for tensor, row in zip(graph.ops.inputs.values.tolist(), graph.ops.inputs.rows.tolist(), strict=True):
            self.readers[tensor].append(row)
        # The gradient that a product adds to its buffer, by the product's row; those that are added after a row;
        # tensors whose type changes; tensors that are no gradients any more, as they die when they are added, and
        # those of them whose memory stays.
        self.fused: dict[int, int] = {}
        self.added: dict[int, list[int]] = defaultdict(list)
        self.wide: set[int] = set()
        self.dying: set[int] = set()
        self.kept: set[int] = set()
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
        if self.fuses and graph.strings[graph.ops.name[maker]] in _FUSING and alone and same:
            self.fused[maker] = gradient
            self.wide |= set(chain)
        else:
            self.added[int(graph.maker[gradient])].append(gradient)
            self.dying |= set(chain)
            self.kept |= set() if self.fuses else {base}

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
            self.graph.ops.phases[row] == t.Phase.OPTIMIZER or chain.issuperset(self.graph.ops.outputs.row(row))
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
        return of_gradient and (made.dtype, made.role, made.alias_of) == (self.dtype, t.TensorRole.GRADIENT, None)

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
            changes["dtype"] = self.dtype
        if index in self.dying:
            changes["role"] = t.TensorRole.ACTIVATION
        if index in self.kept and index not in self.part.tensors:
            made = replace(self.graph.tensors[index], role=t.TensorRole.ACTIVATION)
            memory = self.add_tensor(replace(made, name=f"{made.name}.16bit", role=t.TensorRole.BUFFER), None)
            self.part.tensors[index] = self.add_tensor(made, memory)
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
                more = sum(map(self._growth, set(tensors) & wide))
                changes[name] = getattr(op, name) + more
        self.copy(op, **changes)

    def _growth(self, index: int) -> int:
        """Bytes that a tensor has more in the type of the buffers."""
        tensor = self.graph.tensors[index]
        return self.dtype.nbytes(tensor.numel) - tensor.nbytes

    def _version(self, gradient: t.Tensor, buffer: int | None) -> int:
        """A main gradient as an operation leaves it; without one before it, the buffer itself."""
        named = gradient.name if buffer is not None else f"{gradient.name}.main"
        return self.add_tensor(replace(gradient, name=named, dtype=self.dtype, role=t.TensorRole.GRADIENT), buffer)

    def _accumulate(self, op: t.Compute, gradient: t.Tensor) -> None:
        """Writes a product that adds its result to the buffer."""
        buffer = self._version(gradient, None)
        self.part.tensors[op.outputs[0]] = self._version(gradient, buffer)
        nbytes, plain = self.dtype.nbytes(gradient.numel), op.name == "aten.mm"
        inputs = [self.tensor(i) for i in op.inputs]
        product = replace(
            op, name="aten.addmm_" if plain else op.name, bytes_read=op.bytes_read + nbytes, bytes_written=nbytes,
            durations=(),
        )  # fmt: skip
        # A grouped product's last operand is the ends of its groups, and stays it.
        at = 0 if plain else len(inputs) - ("_grouped" in op.name)
        self.copy(product, inputs=[*inputs[:at], buffer, *inputs[at:]])

    def _add(self, op: t.Op, gradient: t.Tensor) -> None:
        """Adds a 16-bit gradient, which dies with that, to the buffer."""
        self.narrow[gradient.id] = added = self.part.tensors[gradient.id]
        buffer = self._version(gradient, None)
        made = self.part.tensors[gradient.id] = self._version(gradient, buffer)
        read, nbytes = gradient.nbytes, self.dtype.nbytes(gradient.numel)
        if not self.fuses:
            wide = replace(gradient, dtype=self.dtype, role=t.TensorRole.ACTIVATION)
            cast, added = added, self.add_tensor(wide, None)
            self.builder.compute(
                "aten._to_copy", phase=op.phase, module=op.module, inputs=(cast,), outputs=(added,),
                bytes_read=read, bytes_written=nbytes,
            )  # fmt: skip
            read = nbytes
        self.builder.compute(
            "aten.add_", phase=op.phase, module=op.module, inputs=(buffer, added), outputs=(made,),
            bytes_read=nbytes + read, bytes_written=nbytes,
        )  # fmt: skip

    def _zero(self, op: t.Op, gradient: t.Tensor) -> None:
        """Sets a buffer to zero, for the next step."""
        buffer = self.part.tensors[gradient.id]
        made = self._version(gradient, buffer)
        self.builder.compute(
            "aten._foreach_zero_", phase=op.phase, module=op.module, inputs=(buffer,), outputs=(made,),
            deps=(self.part.ops[op.id],), bytes_written=self.dtype.nbytes(gradient.numel),
            attributes=t.MultiTensor(parts=self.launched, leads=gradient.id == self.leads),
        )  # fmt: skip


class _Rounded(StepWriter):
    """Writes products of fp32 whose operands may be rounded to TF32, or may not."""

    def __init__(self, graph: StepGraph, tf32: bool) -> None:
        super().__init__(graph)
        self._tf32 = tf32

    def operation(self, op: t.Op) -> None:
        if _rounds(op, not self._tf32):
            assert isinstance(op, t.Compute) and isinstance(op.attributes, t.Gemm)
            op = replace(op, attributes=replace(op.attributes, tf32=self._tf32), durations=())
        self.copy(op)


def _rounds(op: t.Op, tf32: bool) -> bool:
    return isinstance(op, t.Compute) and isinstance(op.attributes, t.Gemm) and op.attributes.tf32 is tf32


def to_rounded(graph: StepGraph, tf32: bool) -> StepGraph:
    """The step with products of fp32 whose operands may be rounded to TF32, or may not."""
    if not any(isinstance(each, t.Gemm) and each.tf32 is not tf32 for each in graph.ops.attribute_values):
        return graph
    return _Rounded(graph, tf32).write()


RECIPES = {
    "fp8": Recipe(scales="tensor", gradients=t.DType.FP8_E5M2),
    "fp8-rowwise": Recipe(scales="row"),
    "fp8-blockwise": Recipe(scales="block", block=128),
    "mxfp8": Recipe(scales="block", format="mxfp8", block=32, scale=t.DType.UINT8),
    "nvfp4": Recipe(
        scales="block", format="nvfp4", block=16, scale=t.DType.FP8_E4M3, maximum=True,
        operands=t.DType.FP4_E2M1, gradients=t.DType.FP4_E2M1,
    ),
}  # fmt: skip
_STEPS = {"bf16": t.DType.BF16, "fp16": t.DType.FP16, "fp32": t.DType.FP32}
_ROUNDED = {"fp32": False, "tf32": True}
"""Precisions of a step in fp32: whether operands of its products are rounded to TF32."""
_PRECISIONS = (*RECIPES, *_STEPS, "tf32")
_TYPES = {"tf32", *(dtype.text for dtype in t.DType)} - {*_STEPS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The step in other types.

    Attributes:
        dtype: a recipe for narrow products ("fp8", "fp8-rowwise", "fp8-blockwise", "mxfp8", "nvfp4"), or the type
            that the step has already ("bf16", "fp16", "fp32"): another one is other kernels, which only a capture
            shows. "tf32" is a step in fp32 whose products may round their operands to TF32
            (`torch.backends.cuda.matmul.allow_tf32`), and "fp32" one whose products may not. None: as it is.
        grad_dtype: type in which gradients add up; "fp32" gives a 16-bit step main gradients. None: their own.
        main_gradients: gradients in their own type have buffers, too, to which products add (gradient accumulation
            fusion); those in fp32 always have.
        fused_accumulation: products add to the buffers themselves; else each gradient is cast, and then added, as
            DeepSpeed's BF16_Optimizer does.
        kept: of inputs and weights, for backward: the 16-bit tensors ("bf16"), or narrow copies ("fp8"; NVFP4 has
            no other way).
        delayed: scales of "fp8" come from earlier steps' maxima, which the casts note on their way (delayed
            scaling); updating the histories is not counted.
        weights: whether weights are cast for each micro-batch, or once a step ("step"), which is not counted.
        experts: whether experts' grouped products are narrow, too.
        gathers: whether what tensor-parallel ranks gather for "fp8" products is cast before ("fp8"), or after.
    """

    name: ClassVar[str] = "precision"

    dtype: str | None = None
    grad_dtype: str | None = None
    main_gradients: bool = False
    fused_accumulation: bool = True
    kept: Literal["bf16", "fp8"] = "bf16"
    delayed: bool = False
    weights: Literal["micro-batch", "step"] = "micro-batch"
    experts: bool = False
    gathers: Literal["bf16", "fp8"] = "bf16"

    def __call__(self, graph: StepGraph) -> StepGraph:
        """The step graph.

        Raises:
            PlanError: the step has another type, or no linear layer can have narrow products.
            UnknownNameError: no such type or recipe.
            UnavailableError: a type in which no step computes, or no gradients add up.
        """
        return self._gradients(self._products(graph))

    def _products(self, graph: StepGraph) -> StepGraph:
        if self.dtype is None:
            return graph
        own = graph.workload.dtype
        step = "fp32" if self.dtype in _ROUNDED else self.dtype
        if step in _STEPS:
            if own == _STEPS[step]:
                return to_rounded(graph, _ROUNDED[self.dtype]) if self.dtype in _ROUNDED else graph
            raise PlanError(
                f"precision {self.dtype}: the step was captured in {own.text}, and its kernels are of that type: "
                f"compile the model with --dtype {step}"
            )
        if self.dtype not in RECIPES:
            if self.dtype in _TYPES:
                raise UnavailableError(f"precision {self.dtype}: no step computes in it", _PRECISIONS)
            raise UnknownNameError("precision", self.dtype, _PRECISIONS)
        if own != t.DType.BF16:
            raise PlanError(
                f"precision {self.dtype}: its products give bf16, and the step was captured in {own.text}: "
                "compile the model with --dtype bf16"
            )
        if self.delayed and self.dtype != "fp8":
            raise PlanError(
                f"precision {self.dtype} with delayed scaling: only fp8, with a scale a tensor, has it"
            )
        recipe = RECIPES[self.dtype]
        recipe = replace(
            recipe,
            kept="fp8" if recipe.maximum else self.kept,
            delayed=self.delayed,
            weights=self.weights,
            experts=self.experts,
            gathers=self.gathers == "fp8" and self.dtype == "fp8",
        )
        return to_narrow(graph, recipe)

    def _gradients(self, graph: StepGraph) -> StepGraph:
        if self.grad_dtype is None:
            return self._buffered(graph, graph.workload.dtype) if self.main_gradients else graph
        if self.grad_dtype not in _STEPS:
            if self.grad_dtype in (*_TYPES, *RECIPES):
                raise UnavailableError(f"gradients do not add up in {self.grad_dtype}", _STEPS)
            raise UnknownNameError("type of gradients", self.grad_dtype, _STEPS)
        wanted, own = _STEPS[self.grad_dtype], graph.workload.dtype
        if wanted == own:
            return self._buffered(graph, own) if self.main_gradients else graph
        if wanted != t.DType.FP32:
            raise PlanError(
                f"gradients in {self.grad_dtype}: those of a step in {own.text} add up in {own.text} or fp32: "
                "choose one of these"
            )
        return self._buffered(graph, wanted)

    def _buffered(self, graph: StepGraph, dtype: t.DType) -> StepGraph:
        return to_main_gradients(graph, dtype, self.fused_accumulation)
