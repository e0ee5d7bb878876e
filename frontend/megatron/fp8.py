"""FP8 of Transformer Engine 2, for where it is not installed: its recipes, the kernels that cast, and products.

A capture holds the kernels that Transformer Engine runs, by name, shapes and types; they compute nothing, so with
values FP8 is refused. As there (`transformer_engine.pytorch.module.linear`, version 2.6):

- inputs and output gradients are cast once, by a kernel that writes the tensor as it lies and transposed. With
  current scaling a pass that looks for the maximum comes first, with delayed scaling the scale is known;
- weights are cast for the first micro-batch of a step and kept for the others;
- what ranks of tensor parallelism gather is cast before, so that half the bytes are gathered, and transposed
  after;
- with format "hybrid" output gradients are e5m2, all else is e4m3.

Scales of delayed scaling are reduced over ranks and updated in one operation a forward pass, which is left out, as
is everything that a single scale takes (a few bytes each).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from echograph.errors import CaptureError

_LIBRARY: Any = torch.library.Library("fp8", "DEF")  # type: ignore[no-untyped-call]
_CAST = "Tensor source, Tensor[] scale, int block, ScalarType dtype"
_PRODUCT = "Tensor a, Tensor b, Tensor[] scales, int block"
_LIBRARY.define("amax(Tensor source) -> Tensor")
_LIBRARY.define(f"cast({_CAST}) -> (Tensor, Tensor)")
_LIBRARY.define(f"cast_transpose({_CAST}) -> (Tensor, Tensor, Tensor, Tensor)")
_LIBRARY.define("amax_into(Tensor source, Tensor(a!) out) -> ()")
_LIBRARY.define("cast_into(Tensor source, Tensor scale, Tensor(a!) out) -> ()")
_LIBRARY.define("transpose(Tensor source) -> Tensor")
_LIBRARY.define(f"_scaled_mm({_PRODUCT}, ScalarType dtype) -> Tensor")
_LIBRARY.define(f"_scaled_mm_add_({_PRODUCT}, Tensor(a!) total) -> ()")
_OPS: Any = torch.ops.fp8


def _scales(source: Tensor, shape: Sequence[int], scale: list[Tensor], block: int) -> Tensor:
    """Scales of a copy: none of its own where one scale is known for all of it."""
    rows, columns = shape
    if not block:
        return source.new_empty(0, dtype=torch.float32)
    dtype = torch.float32 if block > 32 else torch.uint8
    return source.new_empty((rows, -(-columns // block)), dtype=dtype)


def _cast_rows(source: Tensor, scale: list[Tensor], block: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return source.new_empty(source.shape, dtype=dtype), _scales(source, tuple(source.shape), scale, block)


def _cast_both(source: Tensor, scale: list[Tensor], block: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    turned = (source.shape[1], source.shape[0])
    columns = source.new_empty(turned, dtype=dtype), _scales(source, turned, scale, block)
    return *_cast_rows(source, scale, block, dtype), *columns


_LIBRARY.impl("amax", lambda source: source.new_empty((), dtype=torch.float32), "Meta")
_LIBRARY.impl("cast", _cast_rows, "Meta")
_LIBRARY.impl("cast_transpose", _cast_both, "Meta")
_LIBRARY.impl("transpose", lambda source: source.new_empty(source.shape[::-1]), "Meta")
_LIBRARY.impl("_scaled_mm", lambda a, b, *rest: a.new_empty((a.shape[0], b.shape[1]), dtype=rest[-1]), "Meta")
for _name in ("_scaled_mm_add_", "amax_into", "cast_into"):
    _LIBRARY.impl(_name, lambda *_: None, "Meta")


@register_flop_formula([_OPS._scaled_mm, _OPS._scaled_mm_add_])
def _product_flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
    return 2 * int(a[0]) * int(a[1]) * int(b[1])


# -- recipes --------------------------------------------------------------------------------------------------


class Format:
    """`transformer_engine.common.recipe.Format`."""

    E4M3, E5M2, HYBRID = "e4m3", "e5m2", "hybrid"


class ScalingRecipe:
    """`transformer_engine.common.recipe.Recipe`.

    Args:
        fp8_format: of `Format`.
        options: others, of which those that change kernels are refused.

    Attributes:
        scales: found before a cast ("current"), known from before ("delayed"), or found in it, of blocks.
        block: elements that share a scale; 0 for all of a tensor.
    """

    scales: Literal["current", "delayed", "block"] = "current"
    block = 0

    def __init__(self, fp8_format: str = Format.HYBRID, **options: Any) -> None:
        for name in ("fp8_dpa", "fp8_mha"):
            if options.get(name):
                raise CaptureError(
                    f"--fp8-dot-product-attention ({name}): a capture has attention in 16 bits alone"
                )
        if any(options.get("override_linear_precision") or ()):
            raise CaptureError("--no-fp8-wgrad: a capture has all three products of a layer in FP8, or none")
        self.fp8_format = fp8_format

    @property
    def gradients(self) -> torch.dtype:
        """The type of output gradients."""
        return torch.float8_e5m2 if self.fp8_format == Format.HYBRID and not self.block else torch.float8_e4m3fn

    def delayed(self) -> bool:
        """Whether scales are those of earlier steps."""
        return self.scales == "delayed"

    def float8_current_scaling(self) -> bool:
        """Whether a scale is found before each cast."""
        return self.scales == "current"

    def float8_block_scaling(self) -> bool:
        """Whether blocks of 128 have a scale each."""
        return self.block == 128

    def mxfp8(self) -> bool:
        """Whether blocks of 32 have a scale each."""
        return self.block == 32


class DelayedScaling(ScalingRecipe):
    """`transformer_engine.common.recipe.DelayedScaling`."""

    scales = "delayed"


class Float8CurrentScaling(ScalingRecipe):
    """`transformer_engine.common.recipe.Float8CurrentScaling`."""


class Float8BlockScaling(ScalingRecipe):
    """`transformer_engine.common.recipe.Float8BlockScaling`."""

    scales, block = "block", 128


class MXFP8BlockScaling(ScalingRecipe):
    """`transformer_engine.common.recipe.MXFP8BlockScaling`."""

    scales, block = "block", 32


class State:
    """`transformer_engine.pytorch.fp8.FP8GlobalStateManager`: what is in FP8 just now.

    Attributes:
        recipe: of what runs; None where nothing is in FP8.
        primary: of parameters that are made; None where they are in 16 bits.
    """

    recipe: ScalingRecipe | None = None
    primary: ScalingRecipe | None = None

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Whether layers that run are in FP8."""
        return cls.recipe is not None

    @classmethod
    def get_fp8_recipe(cls) -> ScalingRecipe | None:
        """The recipe."""
        return cls.recipe


@contextmanager
def autocast(enabled: bool = True, fp8_recipe: ScalingRecipe | None = None, **_: Any) -> Iterator[None]:
    """`transformer_engine.pytorch.fp8_autocast`: in the context, layers are in FP8."""
    before, State.recipe = State.recipe, (fp8_recipe or DelayedScaling()) if enabled else None
    try:
        yield
    finally:
        State.recipe = before


@contextmanager
def model_init(enabled: bool = True, recipe: ScalingRecipe | None = None, **_: Any) -> Iterator[None]:
    """`transformer_engine.pytorch.fp8_model_init`: in the context, weights that are made are in FP8.

    Raises:
        CaptureError: of another recipe than one scale a tensor, looked for before each cast.
    """
    if enabled and not isinstance(recipe, Float8CurrentScaling):
        raise CaptureError("--fp8-param-gather: a capture has FP8 parameters with --fp8-recipe tensorwise alone")
    before, State.primary = State.primary, recipe if enabled else None
    try:
        yield
    finally:
        State.primary = before


# -- parameters in FP8 ----------------------------------------------------------------------------------------

_PRIMARY, _ROWS = "fp8_recipe", "fp8_rows"


class _Marked(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return getattr(instance, _PRIMARY, None) is not None


class QuantizedTensor(metaclass=_Marked):
    """`transformer_engine.pytorch.tensor.QuantizedTensor`: what a parameter in FP8 is taken for."""


def mark(parameter: nn.Parameter) -> nn.Parameter:
    """Marks a weight that is made where weights are in FP8."""
    if State.primary is not None:
        setattr(parameter, _PRIMARY, State.primary)
    return parameter


def replace_raw_data(parameter: Any, raw: Tensor) -> None:
    """`transformer_engine.pytorch.tensor.utils.replace_raw_data`: a parameter's bytes lie in a buffer from now on.

    Args:
        parameter: marked as one in FP8; it keeps its shape and type, and no memory of its own.
        raw: as many bytes.
    """
    shape, dtype = parameter.shape, parameter.dtype
    setattr(parameter, _ROWS, raw.view(torch.float8_e4m3fn))
    parameter.data = parameter.data.new_empty(1).expand(shape)
    parameter.get_high_precision_init_val = lambda: raw.new_empty(shape, dtype=dtype)
    parameter.clear_high_precision_init_val = lambda: None


def cast_master_weights(
    parameters: list[Any], masters: list[Tensor | None], offsets: list[int | None], group: Any, *_: Any, **__: Any
) -> None:
    """`transformer_engine.pytorch.tensor.utils.cast_master_weights_to_fp8`: of each parameter, this rank's part.

    Args:
        parameters: in FP8.
        masters: parts of them in fp32; None where this rank has none.
        offsets: of the parts' first elements.
        group: ranks that have the other parts, which agree on the largest element.
    """
    here = [(i, m) for i, m in enumerate(masters) if m is not None]
    if not parameters:
        return
    maxima = torch.empty(len(parameters), dtype=torch.float32, device=parameters[0].device)
    for number, master in here:
        _OPS.amax_into(master, maxima[number])
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    for number, master in here:
        begin = offsets[number] or 0
        part = getattr(parameters[number], _ROWS).view(-1)[begin : begin + master.numel()]
        _OPS.cast_into(master, maxima[number], part)


# -- copies and products --------------------------------------------------------------------------------------


class Narrow(NamedTuple):
    """A tensor in FP8.

    Attributes:
        rows: as it lies in memory.
        row_scales: of its rows.
        columns: transposed; None where it is not needed.
        column_scales: of these.
    """

    rows: Tensor
    row_scales: list[Tensor]
    columns: Tensor | None = None
    column_scales: list[Tensor] | None = None


def cast(source: Tensor, recipe: ScalingRecipe, gradient: bool = False, both: bool = True) -> Narrow:
    """Casts a matrix [rows, columns].

    Args:
        source: of 16 bits.
        recipe: how.
        gradient: whether it is an output's gradient.
        both: whether the transposed copy is made, too.

    Raises:
        CaptureError: it has values.
    """
    if not isinstance(source, FakeTensor):
        raise CaptureError("FP8 without Transformer Engine is there in a capture alone: leave out --fp8-format")
    dtype = recipe.gradients if gradient else torch.float8_e4m3fn
    found = [_OPS.amax(source)] if recipe.scales == "current" else []
    made = (_OPS.cast_transpose if both else _OPS.cast)(source, found, recipe.block, dtype)
    scales = [found if not recipe.block else [scale] for scale in made[1::2]]
    return Narrow(made[0], scales[0], *((made[2], scales[1]) if both else ()))


def _product(a: Tensor, a_scales: Any, b: Tensor, b_scales: Any, block: int, out: Any) -> Tensor:
    """A [m, k] times b [n, k] transposed; added to `out`, where that is a tensor, else of that type."""
    operands = (a, b.t(), [*(a_scales or ()), *(b_scales or ())], block)
    if isinstance(out, Tensor):
        _OPS._scaled_mm_add_(*operands, out)
        return out
    made: Tensor = _OPS._scaled_mm(*operands, out)
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedLayer:
    """How a linear layer multiplies.

    Attributes:
        recipe: of its casts.
        group: ranks of tensor parallelism; None for one.
        parallel_mode: "column", "row" or None.
        sequence_parallel: whether ranks have parts of the sequence of what is not divided by features.
        fuses: whether weights' gradients are added to `main_grad` by the product that makes them.
        keeps_given: whether the input is kept for backward as it is, and cast again.
        weight: the parameter.
    """

    recipe: ScalingRecipe
    group: Any
    parallel_mode: str | None
    sequence_parallel: bool
    fuses: bool
    keeps_given: bool
    weight: nn.Parameter

    def gathers(self, mode: str) -> bool:
        """Whether, divided this way, parts of the sequence are gathered before the product."""
        return self.group is not None and self.sequence_parallel and self.parallel_mode == mode

    def adds(self, mode: str) -> bool:
        """Whether, divided this way, results are partial sums that every rank needs all of."""
        return self.group is not None and not self.sequence_parallel and self.parallel_mode == mode


def linear(given: Tensor, weight: Narrow, layer: DividedLayer) -> Tensor:
    """The product of [tokens, in] and a weight [out, in], with what ranks exchange.

    Args:
        given: of 16 bits, of which each rank has a part, by columns with sequence parallelism.
        weight: its copies.
        layer: how.
    """
    out: Tensor = _Linear.apply(given, layer.weight, weight, layer)  # type: ignore[no-untyped-call]
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, parameter: Tensor, weight: Narrow, layer: DividedLayer) -> Tensor:
        gathers = layer.gathers("column")
        narrow = cast(given, layer.recipe, both=not (gathers or layer.keeps_given))
        rows = _gathered(narrow.rows, layer.group) if gathers else narrow.rows
        out = _product(rows, narrow.row_scales, weight.rows, weight.row_scales, layer.recipe.block, given.dtype)
        kept = given if layer.keeps_given else narrow.rows if gathers else narrow.columns
        ctx.save_for_backward(kept, weight.columns)
        ctx.scales = (narrow.row_scales if gathers else narrow.column_scales), weight.column_scales
        ctx.layer, ctx.dtype = layer, given.dtype
        if layer.gathers("row"):
            return _scattered(out, layer.group)
        if layer.adds("row"):
            dist.all_reduce(out, group=layer.group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        layer: DividedLayer = ctx.layer
        kept, columns = ctx.saved_tensors
        kept_scales, column_scales = ctx.scales
        block, gathers = layer.recipe.block, layer.gathers("column")
        if layer.keeps_given:
            narrow = cast(kept, layer.recipe, both=not gathers)
            kept = narrow.rows if gathers else narrow.columns
            kept_scales = narrow.row_scales if gathers else narrow.column_scales
        above = _above(gradient.contiguous(), layer)
        coming, arrives = kept, None
        if gathers:
            coming = kept.new_empty((kept.shape[0] * layer.group.size(), kept.shape[1]))
            arrives = dist.all_gather_into_tensor(coming, kept, group=layer.group, async_op=True)
        below = _product(above.rows, above.row_scales, columns, column_scales, block, ctx.dtype)
        leaves, result = None, below
        if arrives is not None:
            arrives.wait()
            coming = _OPS.transpose(coming)
            result = below.new_empty((below.shape[0] // layer.group.size(), below.shape[1]))
            leaves = dist.reduce_scatter_tensor(result, below, group=layer.group, async_op=True)
        elif layer.adds("column"):
            leaves = dist.all_reduce(below, group=layer.group, async_op=True)
        made = _weight_gradient(layer.weight, layer.fuses, above, coming, kept_scales, block)
        if leaves is not None:
            leaves.wait()
        return result, made, None, None


def _above(gradient: Tensor, layer: DividedLayer) -> Narrow:
    """The output's gradient, which by rows with sequence parallelism each rank has a part of."""
    if not layer.gathers("row"):
        return cast(gradient, layer.recipe, gradient=True)
    part = cast(gradient, layer.recipe, gradient=True, both=False)
    rows = _gathered(part.rows, layer.group)
    return Narrow(rows, part.row_scales, _OPS.transpose(rows), part.row_scales)


def _weight_gradient(
    weight: nn.Parameter, fuses: bool, above: Narrow, given: Tensor, scales: Any, block: int
) -> Tensor:
    """The output's gradient, transposed, times the input, both with tokens last."""
    assert above.columns is not None
    into: Any = weight.main_grad if fuses else weight.dtype  # type: ignore[attr-defined]
    made = _product(above.columns, above.column_scales, given, scales, block, into)
    if not fuses:
        return made
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.empty_like(weight)


def _gathered(part: Tensor, group: Any) -> Tensor:
    whole = part.new_empty((part.shape[0] * group.size(), part.shape[1]))
    dist.all_gather_into_tensor(whole, part, group=group)
    return whole


def _scattered(whole: Tensor, group: Any) -> Tensor:
    part = whole.new_empty((whole.shape[0] // group.size(), whole.shape[1]))
    dist.reduce_scatter_tensor(part, whole, group=group)
    return part


def grouped(
    given: Tensor, splits: list[int], weights: list[Narrow], parameters: list[nn.Parameter], recipe: ScalingRecipe,
    fuses: bool,
) -> Tensor:  # fmt: skip
    """Products of consecutive rows of [tokens, in] with the weight of an expert each."""
    out: Tensor = _Grouped.apply(given, splits, weights, recipe, fuses, *parameters)  # type: ignore[no-untyped-call]
    return out


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, given: Tensor, splits: list[int], weights: list[Narrow], recipe: ScalingRecipe, fuses: bool,
        *parameters: nn.Parameter,
    ) -> Tensor:  # fmt: skip
        parts = [cast(rows, recipe) for rows in torch.split(given, splits)]
        made = [
            _product(part.rows, part.row_scales, weight.rows, weight.row_scales, recipe.block, given.dtype)
            for part, weight in zip(parts, weights, strict=True)
        ]
        ctx.save_for_backward(*(part.columns for part in parts), *(weight.columns for weight in weights))
        ctx.scales = [part.column_scales for part in parts], [weight.column_scales for weight in weights]
        ctx.splits, ctx.recipe, ctx.fuses, ctx.parameters = splits, recipe, fuses, parameters
        ctx.dtype = given.dtype
        return torch.cat(made)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        count = len(ctx.splits)
        kept, columns = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        kept_scales, column_scales = ctx.scales
        block = ctx.recipe.block
        parts = [cast(rows, ctx.recipe, gradient=True) for rows in torch.split(gradient.contiguous(), ctx.splits)]
        below = [
            _product(part.rows, part.row_scales, columns[i], column_scales[i], block, ctx.dtype)
            for i, part in enumerate(parts)
        ]
        made = [
            _weight_gradient(weight, ctx.fuses, part, kept[i], kept_scales[i], block)
            for i, (weight, part) in enumerate(zip(ctx.parameters, parts, strict=True))
        ]
        return torch.cat(below), None, None, None, None, *made


class Copies(list[Tensor]):
    """The FP8 copies of a layer's weights, made for the first micro-batch of a step.

    Transformer Engine keeps them from step to step. A list, as a recorder looks through those of a module for what
    it holds between steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self._narrow: list[Narrow] = []

    def of(self, weights: list[nn.Parameter], recipe: ScalingRecipe, first: bool | None) -> list[Narrow]:
        """Copies of all.

        Args:
            weights: of the layer.
            recipe: how they are cast.
            first: whether it is a step's first micro-batch; None: copies are not kept.
        """
        if first is None:
            return [_copies(weight, recipe) for weight in weights]
        if first or not self._narrow:
            self._narrow = [_copies(weight, recipe) for weight in weights]
            self[:] = [part for copy in self._narrow for part in (copy.rows, copy.columns) if part is not None]
        return self._narrow


def _copies(weight: nn.Parameter, recipe: ScalingRecipe) -> Narrow:
    rows = getattr(weight, _ROWS, None)
    if rows is None:
        return cast(weight.detach(), recipe)
    return Narrow(rows, [], _OPS.transpose(rows), [])


class Padding(nn.Module):
    """`transformer_engine.pytorch.Fp8Padding`: rows of experts, each to a multiple of what a product takes.

    Args:
        num_gemms: experts.
        align_size: the multiple; None: 32, which all recipes take.
    """

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self._multiple = num_gemms, align_size or 32

    def forward(self, given: Tensor, splits: list[int]) -> tuple[Tensor, list[int]]:
        """Rows with nothing between them [tokens, features] -> padded ones, and how many of each."""
        sizes = padded(splits, self._multiple)
        if sizes == list(splits):
            return given, sizes
        parts = []
        for rows, size in zip(torch.split(given, list(splits)), sizes, strict=True):
            parts += [rows, rows.new_zeros((size - rows.shape[0], *rows.shape[1:]))]
        return torch.cat(parts), sizes


class Unpadding(nn.Module):
    """`transformer_engine.pytorch.Fp8Unpadding`: the other way around.

    Args:
        num_gemms: experts.
        align_size: the multiple.
    """

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self._multiple = num_gemms, align_size or 32

    def forward(self, given: Tensor, splits: list[int]) -> Tensor:
        """Padded rows -> `splits` of them."""
        sizes = padded(splits, self._multiple)
        if sizes == list(splits):
            return given
        whole = zip(torch.split(given, sizes), splits, strict=True)
        return torch.cat([rows[:size] for rows, size in whole])


def padded(splits: list[int], multiple: int) -> list[int]:
    """Each number, rounded up to a multiple."""
    return [-(-size // multiple) * multiple for size in splits]
