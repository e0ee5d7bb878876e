"""FP8 training: the products of a step's linear layers on 8-bit operands, with the kernels that make those.

A linear layer has three products: output = input x weight^T, input gradient = output gradient x weight, weight
gradient = output gradient^T x input. An FP8 product wants both operands with the dimension that it sums over last
in memory, so each of the three tensors is needed as it lies in memory ("rows") and transposed ("columns").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Literal

from echograph.errors import PlanError
from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import StepGraph
from echograph.ir.passes.model import find_layers
from echograph.ir.passes.rewrite import StepWriter

_PRODUCTS = ("aten.mm", "aten.addmm")
_GROUPED = "aten._grouped_mm"
_SCALE = t.DType.FP32
BLOCK = 32
"""Elements that share a scale in the microscaling formats (OCP MX specification, section 5.2)."""
ALIGNMENT = 16
"""What `torch._scaled_mm` wants the dimensions of a product to be multiples of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How tensors become 8-bit ones.

    Attributes:
        scales: one a tensor, one a row of the operand, or one for each block of 32 along a row.
        gradients: type of output gradients; inputs and weights are e4m3.
        kept: what forward keeps of an input and a weight for backward: the 16-bit tensor, cast again, or the
            transposed 8-bit copy.
        delayed: scales come from the maxima of earlier steps, so that none is looked for before the cast.
        weights: whether weights are cast for each micro-batch, or once a step, outside the micro-batches; making
            these copies, and scaling them, is then not counted.
        experts: whether experts' grouped products have 8-bit operands, too.
    """

    scales: Literal["tensor", "row", "block"]
    gradients: t.DType
    kept: Literal["bf16", "fp8"]
    delayed: bool = False
    weights: Literal["micro-batch", "step"] = "micro-batch"
    experts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """An operand of a product.

    Attributes:
        base: the tensor that it is a view of, with the same elements.
        columns: whether it is needed transposed.
        left: whether it is the left operand.
        shape: rows and columns of the copy that is needed; the product sums over the columns.
        dtype: the 8-bit type.
    """

    base: int
    columns: bool
    left: bool
    shape: tuple[int, int]
    dtype: t.DType


def to_fp8(graph: StepGraph, recipe: Recipe) -> StepGraph:
    """The step with FP8 products in the linear layers of its layers.

    Raises:
        PlanError: there is no linear layer whose dimensions are multiples of 16 (32 with scales of blocks).
    """
    finder = _Finder(graph, recipe)
    products = finder.products()
    if not products:
        multiple = BLOCK if recipe.scales == "block" else ALIGNMENT
        raise PlanError(
            f"fp8: no linear layer in the model's layers has tokens and features in multiples of {multiple}: "
            "change the batch, the sequence, or the precision"
        )
    return _Writer(finder, products).write()


class _Finder:
    """Finds the products of linear layers, by what they differentiate."""

    def __init__(self, graph: StepGraph, recipe: Recipe) -> None:
        self.graph, self.recipe = graph, recipe

    def products(self) -> dict[int, tuple[Operand, Operand]]:
        """The operands of every product that becomes an FP8 one, by its row."""
        graph, found = self.graph, dict[int, tuple[Operand, Operand]]()
        linears = {row for layer in find_layers(graph) for row in layer.rows if self._is_linear(row)}
        backward: dict[int, list[int]] = {row: [] for row in linears}
        for row, forward in enumerate(graph.ops.forward_op.tolist()):
            if forward in linears and self._is_product(row):
                backward[forward].append(row)
        for row in sorted(linears):
            again = [r for r in backward[row] if graph.ops.phase[r] == t.Phase.RECOMPUTE]
            found |= {r: self._operands(r, frozenset()) for r in (row, *again)}
            rest = [r for r in backward[row] if graph.ops.phase[r] == t.Phase.BACKWARD]
            gradients = frozenset(self._gradient_bases(rest))
            found |= {r: self._operands(r, gradients) for r in rest}
        return found

    def _is_product(self, row: int) -> bool:
        return self.graph.strings[self.graph.ops.name[row]] in _PRODUCTS

    def _is_linear(self, row: int) -> bool:
        """Whether an operation is a product with a parameter, of dimensions that FP8 products can have."""
        if not self._is_product(row):
            return False
        left, right = self.graph.ops.inputs.row(row)[-2:]
        sizes = (*self.graph.tensors.shape.row(left), self.graph.tensors.shape.row(right)[1])
        multiple = BLOCK if self.recipe.scales == "block" else ALIGNMENT
        divides = min(sizes) > 0 and not any(size % multiple for size in sizes)
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

    def _operands(self, row: int, gradients: frozenset[int]) -> tuple[Operand, Operand]:
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
    ) -> Operand:
        base = self.base(index)
        dtype = self.recipe.gradients if base in gradients else t.DType.FP8_E4M3
        return Operand(base=base, columns=columns, left=left, shape=shape, dtype=dtype)

    def _by_phase(self, operand: Operand) -> Operand:
        maker = int(self.graph.maker[operand.base])
        made = maker != NONE and self.graph.ops.phase[maker] == t.Phase.BACKWARD
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


class _Writer(StepWriter):
    """Writes FP8 products in place of the others, each after the kernels that make what it reads first."""

    def __init__(self, finder: _Finder, products: dict[int, tuple[Operand, Operand]]) -> None:
        graph = finder.graph
        super().__init__(graph)
        self.finder, self.recipe, self.products = finder, finder.recipe, products
        self.wanted: dict[object, dict[bool, Operand]] = {}
        for row, operands in products.items():
            for operand in operands:
                self.wanted.setdefault(self._scope(operand, graph.ops[row]), {}).setdefault(
                    operand.columns, operand
                )
        self.copies: dict[tuple[object, bool], tuple[int, ...]] = {}
        self.scales: dict[int, int] = {}

    def operation(self, op: t.Op) -> None:
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
        sizes = [prod(o.shape) + self._scale_bytes(o) for o in (left, right)]
        sizes += [self.graph.tensors[i].nbytes for i in op.inputs[:-2]]
        scaled = replace(
            op,
            name="aten._scaled_mm",
            bytes_read=sum(sizes),
            attributes=t.Gemm(transpose_b=True),
            durations=(),
        )
        self.copy(scaled, inputs=[first, turned, *bias, *first_scale, *second_scale])

    def _grouped(self, op: t.Compute) -> None:
        """Writes a grouped product of experts on 8-bit operands; one kernel makes both copies of each."""
        *_, offsets = op.inputs
        read = [self._of_experts(index, op) for index in op.inputs[:2]]
        sizes = [self.graph.tensors[index].numel for index in op.inputs[:2]]
        scaled = replace(
            op, name="aten._scaled_grouped_mm", bytes_read=sum(sizes) + self.graph.tensors[offsets].nbytes,
            durations=(),
        )  # fmt: skip
        self.copy(scaled, inputs=[*read, *(self.tensor(i) for i in op.inputs[2:])])

    def _of_experts(self, index: int, op: t.Compute) -> int:
        """An operand of a grouped product in 8 bit."""
        base, shape = self.finder.base(index), tuple(self.graph.tensors.shape.row(index))
        weight = self.recipe.weights == "step" and self.finder.is_parameter(base)
        scope = (base, op.phase if self.recipe.kept == "bf16" and not weight else None)
        if (scope, False) not in self.copies:
            source = self.graph.tensors[base]
            if weight:
                made = self._kept(source.name, source.shape)
            else:
                made = self._new(f"{source.name}.fp8", source.shape, t.DType.FP8_E4M3)
                self._maximum(source, op)
                self._kernel(
                    "fp8.cast_transpose", op, (self.tensor(base),), (made,), source.nbytes, 2 * source.numel
                )
            self.copies[scope, False] = (made,)
        (made,) = self.copies[scope, False]
        if tuple(self.graph.tensors.shape.row(base)) == shape:
            return made
        turned = self.builder.tensor("t", shape, t.DType.FP8_E4M3, t.TensorRole.ACTIVATION, alias_of=made)
        self.builder.compute("aten.t", phase=op.phase, module=op.module, inputs=(made,), outputs=(turned,))
        return turned

    def _kept(self, name: str, shape: tuple[int, ...]) -> int:
        """An 8-bit copy of a weight that outlives the micro-batch."""
        return self.builder.tensor(f"{name}.fp8", shape, t.DType.FP8_E4M3, t.TensorRole.BUFFER)

    def _scope(self, operand: Operand, op: t.Op) -> object:
        """What shares 8-bit copies: all products of a tensor, or those of one phase."""
        return operand.base if self.recipe.kept == "fp8" else (operand.base, op.phase)

    def _quantised(self, operand: Operand, op: t.Compute) -> tuple[int, ...]:
        """The 8-bit copy that a product reads, and its scale where it has one."""
        if self.recipe.weights == "step" and self.finder.is_parameter(operand.base):
            return self._weight(operand)
        scope = self._scope(operand, op)
        if (scope, operand.columns) not in self.copies:
            wanted = list(self.wanted[scope].values())
            if self.recipe.scales == "tensor":
                self._cast_all(wanted, scope, op)
            else:
                for each in wanted:
                    self._cast_rows(each, scope, op)
        return self.copies[scope, operand.columns]

    def _weight(self, operand: Operand) -> tuple[int, ...]:
        """The copy of a weight that was made before the micro-batches."""
        key = ("weight", operand.base), operand.columns
        if key not in self.copies:
            self.copies[key] = (self._kept(self.graph.tensors[operand.base].name, operand.shape),)
        return self.copies[key]

    def _maximum(self, source: t.Tensor, op: t.Compute) -> tuple[int, ...]:
        """The scale of a tensor, found once; nothing where earlier steps, or blocks of it, have scaled it."""
        if self.recipe.delayed or self.recipe.scales == "block":
            return ()
        if source.id not in self.scales:
            made = self.scales[source.id] = self._new("amax", (), _SCALE)
            self._kernel("fp8.amax", op, (self.tensor(source.id),), (made,), source.nbytes, _SCALE.itemsize)
        return (self.scales[source.id],)

    def _cast_all(self, wanted: list[Operand], scope: object, op: t.Compute) -> None:
        """With one scale for a tensor: its maximum, once, then one kernel that writes all copies."""
        source = self.graph.tensors[wanted[0].base]
        scale = self._maximum(source, op)
        copies = [self._new(f"{source.name}.fp8", each.shape, each.dtype) for each in wanted]
        name = "fp8.cast_transpose" if any(each.columns for each in wanted) else "fp8.cast"
        written = source.numel * len(copies)
        self._kernel(name, op, (self.tensor(source.id), *scale), copies, source.nbytes, written)
        for each, made in zip(wanted, copies, strict=True):
            self.copies[scope, each.columns] = (made, *scale)

    def _cast_rows(self, operand: Operand, scope: object, op: t.Compute) -> None:
        """With scales within a tensor: a kernel for each copy, which finds the maxima on its way.

        Maxima down the columns of a tensor are another pass over it; blocks of 32 fit into a tile.
        """
        source = self.graph.tensors[operand.base]
        read = (self.tensor(source.id),)
        prefix = "fp8" if self.recipe.scales == "row" else "mxfp8"
        shape, dtype = self._scale_shape(operand)
        scale = self._new("scale", shape, dtype)
        made = self._new(f"{source.name}.fp8", operand.shape, operand.dtype)
        name = f"{prefix}.cast_transpose" if operand.columns else f"{prefix}.cast"
        nbytes = self._scale_bytes(operand)
        if self.recipe.scales == "row" and operand.columns:
            self._kernel("fp8.amax", op, read, (scale,), source.nbytes, nbytes)
            self._kernel(name, op, (*read, scale), (made,), source.nbytes + nbytes, source.numel)
        else:
            self._kernel(name, op, read, (made, scale), source.nbytes, source.numel + nbytes)
        self.copies[scope, operand.columns] = made, scale

    def _scale_shape(self, operand: Operand) -> tuple[tuple[int, ...], t.DType]:
        rows, inner = operand.shape
        match self.recipe.scales:
            case "tensor":
                return (), _SCALE
            case "row":
                return ((rows, 1) if operand.left else (1, rows)), _SCALE
        # One byte an exponent, in tiles of 128 rows by 4 blocks as the tensor cores read them.
        return (128 * ceil(rows / 128) * 4 * ceil(inner / BLOCK / 4),), t.DType.UINT8

    def _scale_bytes(self, operand: Operand) -> int:
        shape, dtype = self._scale_shape(operand)
        return 0 if self.recipe.delayed else prod(shape) * dtype.itemsize

    def _new(self, name: str, shape: tuple[int, ...], dtype: t.DType) -> int:
        return self.builder.tensor(name, shape, dtype, t.TensorRole.ACTIVATION)

    def _kernel(
        self, name: str, op: t.Op, read: Iterable[int], made: Iterable[int], bytes_read: int, bytes_written: int
    ) -> None:
        self.builder.compute(
            name, phase=op.phase, module=op.module, inputs=read, outputs=made, bytes_read=bytes_read,
            bytes_written=bytes_written,
        )  # fmt: skip
