"""Operators of a step graph in ONNX's words: one rule an operator, in one table.

A rule reads what the operation was given (`Compute.arguments`) and adds nodes of ONNX's own; it raises `Unsaid`
where something that decides on the numbers is not in the graph, or ONNX has no word for it. Nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from echograph.ir.types import Attention, Convolution, DType, Tensor

if TYPE_CHECKING:
    from echograph.ir.types import Compute

_END = 2**63 - 1
_FLOATS = (DType.FP32, DType.FP16, DType.BF16, DType.FP64)
_RANK = (
    DType.BOOL, DType.UINT8, DType.INT8, DType.INT16, DType.INT32, DType.INT64, DType.FP16, DType.BF16, DType.FP32,
    DType.FP64,
)  # fmt: skip
_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


class Unsaid(Exception):
    """An operation cannot be spelled: ONNX has no word for it, or the graph does not say all."""


class OperatorCall(Protocol):
    """An operation to be spelled.

    Attributes:
        op: the operation.
        inputs: what it reads.
        outputs: what it makes.
        names: of what it reads, in the model.
        given: its arguments.
        written: the name of the value that it writes in place, where that holds something.
        read: for each result, whether an operation of the forward pass reads it.
    """

    op: Compute
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    names: Sequence[str]
    given: Mapping[str, Any]
    written: str | None
    read: Sequence[bool]

    def node(self, operator: str, *operands: str, **attributes: Any) -> str:
        """Adds a node -> the name of its result."""

    def nodes(self, operator: str, operands: Sequence[str], results: int, **attributes: Any) -> list[str]:
        """Adds a node -> the names of its results."""

    def constant(self, values: Any, dtype: DType) -> str:
        """Adds a constant -> its name."""

    def cast(self, name: str, before: DType, after: DType) -> str:
        """A value as another type -> its name."""

    def function(self, name: str) -> list[str]:
        """Adds a call of one of the model's functions with all that the operation reads -> its results."""

    def assume(self, text: str) -> None:
        """Says what the model does otherwise than the step."""


Rule = Callable[[OperatorCall], Sequence[str]]
"""Adds nodes; returns the names of the results, those at the end that nobody reads left out."""


def rule_of(name: str) -> Rule | None:
    """The rule of an operator ("aten.add_"); None where there is none."""
    return _RULES.get(name.removeprefix("aten.").rstrip("_"))


def _given(call: OperatorCall, name: str) -> Any:
    """An argument that has no default.

    Raises:
        Unsaid: the graph does not hold it.
    """
    if name not in call.given:
        raise Unsaid(name)
    return call.given[name]


def _operands(call: OperatorCall, count: int) -> Sequence[str]:
    if len(call.names) != count:
        raise Unsaid("operands")
    return call.names


def _ints(call: OperatorCall, *values: int) -> str:
    return call.constant(np.array(values, np.int64), DType.INT64)


def _scalar(call: OperatorCall, value: Any, dtype: DType) -> str:
    return call.constant(value, dtype)


def _number(call: OperatorCall, position: int, name: str, dtype: DType) -> str:
    """An operand as a type: a tensor, or a number among the arguments."""
    if name in call.given:
        return _scalar(call, call.given[name], dtype)
    if position >= len(call.names):
        raise Unsaid(name)
    return call.cast(call.names[position], call.inputs[position].dtype, dtype)


def _out(call: OperatorCall) -> Tensor:
    return call.outputs[0]


# -- element by element --------------------------------------------------------------------------------------


def _unary(operator: str, call: OperatorCall) -> Sequence[str]:
    (x,) = _operands(call, 1)
    dtype = call.inputs[0].dtype
    wide = _out(call).dtype if operator in _REAL else dtype
    return [call.cast(call.node(operator, call.cast(x, dtype, wide)), wide, _out(call).dtype)]


def _pair(call: OperatorCall, dtype: DType) -> tuple[str, str]:
    """Both operands of a binary operator; one of them may be a number."""
    if "self" in call.given:
        return _number(call, -1, "self", dtype), _number(call, 0, "", dtype)
    if not call.names:
        raise Unsaid("operands")
    first = call.cast(call.names[0], call.inputs[0].dtype, dtype)
    return first, _number(call, 1, "other", dtype)


def _binary(operator: str, call: OperatorCall) -> Sequence[str]:
    dtype = _out(call).dtype
    a, b = _pair(call, dtype)
    if call.given.get("alpha", 1) != 1:
        b = call.node("Mul", b, _scalar(call, call.given["alpha"], dtype))
    if operator == "Mul" and dtype == DType.BOOL:
        operator = "And"
    return [call.node(operator, a, b)]


def _reverse_subtract(call: OperatorCall) -> Sequence[str]:
    dtype = _out(call).dtype
    a, b = _pair(call, dtype)
    if call.given.get("alpha", 1) != 1:
        a = call.node("Mul", a, _scalar(call, call.given["alpha"], dtype))
    return [call.node("Sub", b, a)]


def _divide(call: OperatorCall) -> Sequence[str]:
    mode = call.given.get("rounding_mode")
    dtype = _out(call).dtype
    a, b = _pair(call, dtype)
    if mode == "floor":
        return [_floor_divided(call, a, b, dtype)]
    made = call.node("Div", a, b)
    if mode == "trunc" and dtype in _FLOATS:
        made = call.node("Mul", call.node("Sign", made), call.node("Floor", call.node("Abs", made)))
    return [made]


def _floor_divided(call: OperatorCall, a: str, b: str, dtype: DType) -> str:
    if dtype in _FLOATS:
        return call.node("Floor", call.node("Div", a, b))
    return call.node("Div", call.node("Sub", a, call.node("Mod", a, b)), b)


def _floor_divide(call: OperatorCall) -> Sequence[str]:
    dtype = _out(call).dtype
    return [_floor_divided(call, *_pair(call, dtype), dtype)]


def _remainder(call: OperatorCall) -> Sequence[str]:
    dtype = _out(call).dtype
    a, b = _pair(call, dtype)
    if dtype not in _FLOATS:
        return [call.node("Mod", a, b)]
    return [call.node("Sub", a, call.node("Mul", b, _floor_divided(call, a, b, dtype)))]


def _power(call: OperatorCall) -> Sequence[str]:
    dtype = _out(call).dtype
    if "self" in call.given:
        return [call.node("Pow", *_pair(call, dtype))]
    base = call.cast(call.names[0], call.inputs[0].dtype, dtype)
    return [call.node("Pow", base, _number(call, 1, "exponent", dtype))]


def _comparison(operator: str, call: OperatorCall) -> Sequence[str]:
    dtype = max((t.dtype for t in call.inputs), key=_RANK.index)
    other = call.given.get("other", call.given.get("self"))
    if isinstance(other, float) and dtype not in _FLOATS:
        dtype = DType.FP32
    if dtype == DType.BOOL and operator != "Equal":
        dtype = DType.INT32
    made = call.node(operator.removeprefix("Not"), *_pair(call, dtype))
    return [call.node("Not", made) if operator.startswith("Not") else made]


def _logical(operator: str, call: OperatorCall) -> Sequence[str]:
    if _out(call).dtype != DType.BOOL:
        raise Unsaid("bits")
    return [call.node(operator, *_pair(call, DType.BOOL))]


def _not(call: OperatorCall) -> Sequence[str]:
    (x,) = _operands(call, 1)
    return [call.node("Not", call.cast(x, call.inputs[0].dtype, DType.BOOL))]


def _clamp(call: OperatorCall) -> Sequence[str]:
    dtype, made = _out(call).dtype, call.cast(call.names[0], call.inputs[0].dtype, _out(call).dtype)
    bounds = {n: call.given.get(n) for n in ("min", "max")}
    if len(call.names) != 1:
        raise Unsaid("bounds")
    for name, operator in (("min", "Max"), ("max", "Min")):
        if bounds[name] is not None:
            made = call.node(operator, made, _scalar(call, bounds[name], dtype))
    return [made]


def _rsqrt(call: OperatorCall) -> Sequence[str]:
    return [call.node("Reciprocal", _unary("Sqrt", call)[0])]


def _silu(call: OperatorCall) -> Sequence[str]:
    (x,) = _operands(call, 1)
    return [call.node("Mul", call.node("Sigmoid", x), x)]


def _gelu(call: OperatorCall) -> Sequence[str]:
    (x,) = _operands(call, 1)
    return [call.node("Gelu", x, approximate=call.given.get("approximate", "none"))]


def _leaky_relu(call: OperatorCall) -> Sequence[str]:
    (x,) = _operands(call, 1)
    return [call.node("LeakyRelu", x, alpha=float(call.given.get("negative_slope", 0.01)))]


def _where(call: OperatorCall) -> Sequence[str]:
    dtype = _out(call).dtype
    a = _number(call, 1, "self", dtype)
    return [call.node("Where", call.names[0], a, _number(call, 1 if "self" in call.given else 2, "other", dtype))]


def _masked_fill(call: OperatorCall) -> Sequence[str]:
    dtype = _out(call).dtype
    if len(call.names) < 2:
        raise Unsaid("mask")
    return [call.node("Where", call.names[1], _number(call, 2, "value", dtype), call.names[0])]


def _copy(call: OperatorCall) -> Sequence[str]:
    (x,) = _operands(call, 1)
    before, after = call.inputs[0].dtype, _out(call).dtype
    return [call.node("Identity", x) if before == after else call.cast(x, before, after)]


def _write(call: OperatorCall) -> Sequence[str]:
    """`copy_`: the source spread over what it is written to."""
    if not call.names:
        raise Unsaid("source")
    x = call.cast(call.names[-1], call.inputs[-1].dtype, _out(call).dtype)
    return [
        x if call.inputs[-1].shape == _out(call).shape else call.node("Expand", x, _ints(call, *_out(call).shape))
    ]


# -- from nothing ----------------------------------------------------------------------------------------------


def _filled(value: Any, call: OperatorCall) -> Sequence[str]:
    if value is None:
        name = next((n for n in ("fill_value", "value", "s") if n in call.given), None)
        if name is None:
            raise Unsaid("value")
        value = call.given[name]
    out = _out(call)
    scalar = _scalar(call, value, out.dtype)
    return [call.node("Expand", scalar, _ints(call, *out.shape)) if out.shape else call.node("Identity", scalar)]


def _arange(call: OperatorCall) -> Sequence[str]:
    start, step, count = call.given.get("start", 0), call.given.get("step", 1), _out(call).numel
    dtype = DType.FP32 if any(isinstance(v, float) for v in (start, step)) else DType.INT64
    end = start + step * (count - 0.5 if dtype == DType.FP32 else count)
    if "end" not in call.given:
        raise Unsaid("end")
    made = call.node("Range", *(_scalar(call, value, dtype) for value in (start, end, step)))
    return [call.cast(made, dtype, _out(call).dtype)]


# -- shapes ----------------------------------------------------------------------------------------------------


def _reshape(call: OperatorCall) -> Sequence[str]:
    (x,) = _operands(call, 1)
    if call.inputs[0].numel != _out(call).numel or call.inputs[0].dtype != _out(call).dtype:
        raise Unsaid("shape")
    return [call.node("Reshape", x, _ints(call, *_out(call).shape), allowzero=1)]


def _expand(call: OperatorCall) -> Sequence[str]:
    (x,) = _operands(call, 1)
    return [call.node("Expand", x, _ints(call, *_out(call).shape))]


def _transpose(call: OperatorCall) -> Sequence[str]:
    (x,) = _operands(call, 1)
    rank = len(call.inputs[0].shape)
    order = list(range(rank))
    if call.op.name == "aten.permute":
        order = [dim % rank for dim in _given(call, "dims")]
    elif rank > 1:
        a, b = (0, 1) if call.op.name == "aten.t" else (_given(call, "dim0") % rank, _given(call, "dim1") % rank)
        order[a], order[b] = b, a
    return [call.node("Transpose", x, perm=order)]


def _dim(call: OperatorCall, default: int | None = None) -> int:
    dim = _given(call, "dim") if default is None else call.given.get("dim", default)
    return int(dim) % max(len(call.inputs[0].shape), 1)


def _slice(call: OperatorCall) -> Sequence[str]:
    (x,) = _operands(call, 1)
    start, end = call.given.get("start") or 0, call.given.get("end")
    bounds = (start, _END if end is None else end, _dim(call, 0), call.given.get("step", 1))
    return [call.node("Slice", x, *(_ints(call, value) for value in bounds))]


def _select(call: OperatorCall) -> Sequence[str]:
    (x,) = _operands(call, 1)
    index = call.constant(_given(call, "index"), DType.INT64)
    return [call.node("Gather", x, index, axis=_dim(call))]


def _split(call: OperatorCall) -> Sequence[str]:
    (x,) = _operands(call, 1)
    axis = _dim(call, 0)
    sizes = [t.shape[axis] for t in call.outputs]
    return call.nodes("Split", [x, _ints(call, *sizes)], len(sizes), axis=axis)


def _unbind(call: OperatorCall) -> Sequence[str]:
    (x,) = _operands(call, 1)
    axis, count = _dim(call, 0), len(call.outputs)
    parts = call.nodes("Split", [x, _ints(call, *[1] * count)], count, axis=axis)
    return [call.node("Squeeze", part, _ints(call, axis)) for part in parts]


def _concat(call: OperatorCall) -> Sequence[str]:
    out = _out(call)
    if not call.names or sum(t.numel for t in call.inputs) != out.numel:
        raise Unsaid("operands")
    parts = [call.cast(n, t.dtype, out.dtype) for n, t in zip(call.names, call.inputs, strict=True)]
    return [call.node("Concat", *parts, axis=_dim(call, 0))]


def _stack(call: OperatorCall) -> Sequence[str]:
    axis = int(call.given.get("dim", 0)) % len(_out(call).shape)
    parts = [call.node("Unsqueeze", name, _ints(call, axis)) for name in call.names]
    return [call.node("Concat", *parts, axis=axis)]


def _pad(call: OperatorCall) -> Sequence[str]:
    x = call.names[0]
    rank, widths = len(call.inputs[0].shape), _given(call, "pad")
    before, after = [0] * rank, [0] * rank
    for i in range(len(widths) // 2):  # pairs from the last dimension on
        before[rank - 1 - i], after[rank - 1 - i] = widths[2 * i : 2 * i + 2]
    value = _scalar(call, call.given.get("value", 0), call.inputs[0].dtype)
    return [call.node("Pad", x, _ints(call, *before, *after), value)]


def _triangle(upper: int, call: OperatorCall) -> Sequence[str]:
    diagonal = call.constant(call.given.get("diagonal", 0), DType.INT64)
    return [call.node("Trilu", call.names[0], diagonal, upper=upper)]


# -- lookups ---------------------------------------------------------------------------------------------------


def _embedding(call: OperatorCall) -> Sequence[str]:
    return [call.node("Gather", *_operands(call, 2), axis=0)]


def _gather(call: OperatorCall) -> Sequence[str]:
    return [call.node("GatherElements", *_operands(call, 2), axis=_dim(call))]


def _index_select(call: OperatorCall) -> Sequence[str]:
    return [call.node("Gather", *_operands(call, 2), axis=_dim(call))]


def _index(call: OperatorCall) -> Sequence[str]:
    """Picks by one tensor of positions along a dimension, or by one for each of the first dimensions."""
    told, indices = call.given.get("indices"), call.inputs[1:]
    if not indices or any(t.dtype not in (DType.INT64, DType.INT32) for t in indices):
        raise Unsaid("mask")
    if len(indices) == 1:
        return [call.node("Gather", *call.names, axis=0 if told is None else told.index("%"))]
    if told is not None:
        raise Unsaid("dimensions")
    return [call.node("GatherND", call.names[0], _positions(call, call.names[1:], indices))]


def _positions(call: OperatorCall, names: Sequence[str], indices: Sequence[Tensor]) -> str:
    shape = np.broadcast_shapes(*(t.shape for t in indices))
    parts = []
    for name, tensor in zip(names, indices, strict=True):
        wide = call.cast(name, tensor.dtype, DType.INT64)
        wide = wide if tensor.shape == shape else call.node("Expand", wide, _ints(call, *shape))
        parts.append(call.node("Unsqueeze", wide, _ints(call, -1)))
    return call.node("Concat", *parts, axis=-1) if len(parts) > 1 else parts[0]


def _index_put(call: OperatorCall) -> Sequence[str]:
    """Memory that nothing wrote yet is zeros before."""
    out, names, inputs = _out(call), list(call.names), list(call.inputs)
    if names and names[0] == call.written:
        names, inputs = names[1:], inputs[1:]
    if len(inputs) < 2 or "indices" in call.given or inputs[0].dtype not in (DType.INT64, DType.INT32):
        raise Unsaid("mask")
    base = call.written or _filled(0, call)[0]
    where = _positions(call, names[:-1], inputs[:-1])
    rest = out.shape[len(inputs) - 1 :]
    shape = (*np.broadcast_shapes(*(t.shape for t in inputs[:-1])), *rest)
    values = call.cast(names[-1], inputs[-1].dtype, out.dtype)
    values = values if inputs[-1].shape == shape else call.node("Expand", values, _ints(call, *shape))
    reduction = "add" if call.given.get("accumulate") else "none"
    return [call.node("ScatterND", base, where, values, reduction=reduction)]


def _scatter(reduction: str, call: OperatorCall) -> Sequence[str]:
    x, index = call.names[:2]
    source = _number(call, 2, "value", _out(call).dtype)
    if "value" in call.given:
        source = call.node("Expand", source, _ints(call, *call.inputs[1].shape))
    return [call.node("ScatterElements", x, index, source, axis=_dim(call), reduction=reduction)]


# -- reductions and ranks --------------------------------------------------------------------------------------


def _reduce(operator: str, call: OperatorCall) -> Sequence[str]:
    (x,) = _operands(call, 1)
    rank, dtype = len(call.inputs[0].shape), _out(call).dtype
    dims = call.given.get("dim")
    dims = list(range(rank)) if not dims and dims != 0 else [dims] if isinstance(dims, int) else dims
    made = call.cast(x, call.inputs[0].dtype, dtype)
    keep = int(bool(call.given.get("keepdim", False)))
    return [call.node(operator, made, _ints(call, *(d % max(rank, 1) for d in dims)), keepdims=keep)]


def _arg(operator: str, call: OperatorCall) -> Sequence[str]:
    keep = int(bool(call.given.get("keepdim", False)))
    return [call.node(operator, call.names[0], axis=_dim(call), keepdims=keep)]


def _top_k(call: OperatorCall) -> Sequence[str]:
    count = _ints(call, _given(call, "k"))
    largest = int(call.given.get("largest", True))
    return call.nodes("TopK", [call.names[0], count], 2, axis=_dim(call, -1), largest=largest, sorted=1)


def _sort(call: OperatorCall) -> Sequence[str]:
    axis = _dim(call, -1)
    count = _ints(call, call.inputs[0].shape[axis])
    largest = int(call.given.get("descending", False))
    return call.nodes("TopK", [call.names[0], count], 2, axis=axis, largest=largest, sorted=1)


def _cumulative(call: OperatorCall) -> Sequence[str]:
    x = call.cast(call.names[0], call.inputs[0].dtype, _out(call).dtype)
    return [call.node("CumSum", x, call.constant(_dim(call), DType.INT64))]


def _histogram(call: OperatorCall) -> Sequence[str]:
    """Counts of values in equal bins; the last one holds its upper edge too."""
    bins, low, high = (call.given.get(n, d) for n, d in (("bins", 100), ("min", 0), ("max", 0)))
    if not low < high:
        raise Unsaid("range")
    x = call.cast(call.names[0], call.inputs[0].dtype, DType.FP32)
    lower, upper = _scalar(call, low, DType.FP32), _scalar(call, high, DType.FP32)
    scaled = call.node("Mul", call.node("Sub", x, lower), _scalar(call, bins / (high - low), DType.FP32))
    place = call.node("Min", call.node("Floor", scaled), _scalar(call, bins - 1, DType.FP32))
    inside = call.node("And", call.node("GreaterOrEqual", x, lower), call.node("LessOrEqual", x, upper))
    place = call.node("Where", inside, place, _scalar(call, bins, DType.FP32))  # one bin more, for those outside
    edges = call.constant(np.array([0, 1], np.float32), DType.FP32)
    flat = call.node("Reshape", call.cast(place, DType.FP32, DType.INT64), _ints(call, -1))
    hits = call.node("OneHot", flat, call.constant(bins, DType.INT64), edges, axis=-1)
    counts = call.node("ReduceSum", hits, _ints(call, 0), keepdims=0)
    return [call.cast(counts, DType.FP32, _out(call).dtype)]


# -- layers ------------------------------------------------------------------------------------------------------


def _matmul(call: OperatorCall) -> Sequence[str]:
    return [call.node("MatMul", *_operands(call, 2))]


def _addmm(call: OperatorCall) -> Sequence[str]:
    c, a, b = _operands(call, 3)
    alpha, beta = (float(call.given.get(name, 1.0)) for name in ("alpha", "beta"))
    return [call.node("Gemm", a, b, c, alpha=alpha, beta=beta)]


def _baddbmm(call: OperatorCall) -> Sequence[str]:
    c, a, b = _operands(call, 3)
    dtype, made = _out(call).dtype, call.node("MatMul", a, b)
    if (alpha := call.given.get("alpha", 1)) != 1:
        made = call.node("Mul", made, _scalar(call, alpha, dtype))
    if (beta := call.given.get("beta", 1)) == 0:
        return [made]
    return [call.node("Add", made, c if beta == 1 else call.node("Mul", c, _scalar(call, beta, dtype)))]


def _grouped_mm(call: OperatorCall) -> Sequence[str]:
    if len(call.names) != 3 or len(call.inputs[1].shape) != 3 or len(call.inputs[0].shape) != 2:
        raise Unsaid("groups")
    return call.function(GROUPED_MM)


def _convolution(call: OperatorCall) -> Sequence[str]:
    a = call.op.attributes
    if not isinstance(a, Convolution) or len(call.inputs) not in (2, 3):
        raise Unsaid("form")
    x, weight, result = call.inputs[0], call.inputs[1], _out(call)
    attributes: dict[str, Any] = {
        "strides": list(a.stride), "pads": [*a.padding, *a.padding], "dilations": list(a.dilation),
        "group": a.groups, "kernel_shape": list(weight.shape[2:]),
    }  # fmt: skip
    if a.transposed:
        sizes = zip(x.shape[2:], weight.shape[2:], a.stride, a.padding, a.dilation, result.shape[2:], strict=True)
        attributes["output_padding"] = [
            out - ((size - 1) * s - 2 * p + d * (k - 1) + 1) for size, k, s, p, d, out in sizes
        ]
    return [call.node("ConvTranspose" if a.transposed else "Conv", *call.names, **attributes)]


def _windows(call: OperatorCall, kernel: list[int]) -> dict[str, Any]:
    """Stride and padding of a pooling, one entry a dimension."""
    found = {n: _listed(call.given.get(n), len(kernel)) for n in ("stride", "padding")}
    pads = found["padding"] or [0] * len(kernel)
    return {"kernel_shape": kernel, "strides": found["stride"] or kernel, "pads": [*pads, *pads]}


def _listed(value: Any, count: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value or [])
    return values * count if len(values) == 1 else values


def _max_pool(call: OperatorCall) -> Sequence[str]:
    count = len(_out(call).shape) - 2
    kernel = _listed(_given(call, "kernel_size"), count)
    dilations = _listed(call.given.get("dilation", 1), count)
    ceil = int(call.given.get("ceil_mode", False))
    return [call.node("MaxPool", call.names[0], dilations=dilations, ceil_mode=ceil, **_windows(call, kernel))]


def _average_pool(call: OperatorCall) -> Sequence[str]:
    kernel = _listed(_given(call, "kernel_size"), len(_out(call).shape) - 2)
    if call.given.get("divisor_override") is not None:
        raise Unsaid("divisor")
    values = {
        "ceil_mode": int(call.given.get("ceil_mode", False)),
        "count_include_pad": int(call.given.get("count_include_pad", True)),
    }
    return [call.node("AveragePool", call.names[0], **values, **_windows(call, kernel))]


def _global_average(call: OperatorCall) -> Sequence[str]:
    if prod(_out(call).shape[2:]) != 1:
        raise Unsaid("windows")
    return [call.node("GlobalAveragePool", *_operands(call, 1))]


def _layer_norm(call: OperatorCall) -> Sequence[str]:
    shape = _given(call, "normalized_shape")
    epsilon = float(_given(call, "eps"))
    scale = list(call.names[1:])
    if call.given.get("weight", "") is None:
        scale.insert(0, call.constant(np.ones(shape, np.float32), call.inputs[0].dtype))
    values = {"axis": -len(shape), "epsilon": epsilon, "stash_type": 1}
    return call.nodes("LayerNormalization", [call.names[0], *scale], 3 if any(call.read[1:]) else 1, **values)


def _rms_norm(call: OperatorCall) -> Sequence[str]:
    x, weight = _operands(call, 2)
    epsilon = call.given.get("eps")
    epsilon = float(np.finfo(np.float32).eps) if epsilon is None else float(epsilon)
    return [call.node("RMSNormalization", x, weight, axis=-len(call.inputs[1].shape), epsilon=epsilon)]


def _batch_norm(call: OperatorCall) -> Sequence[str]:
    names = _operands(call, 5)
    epsilon, training = float(_given(call, "eps")), bool(_given(call, "training"))
    values = {"epsilon": epsilon, "momentum": 1.0 - float(call.given.get("momentum", 0.1))}
    if not training:
        return [call.node("BatchNormalization", *names, **values)]
    return call.nodes("BatchNormalization", names, 3, training_mode=1, **values)[:1]


def _softmax(operator: str, call: OperatorCall) -> Sequence[str]:
    (x,) = _operands(call, 1)
    return [call.node(operator, call.cast(x, call.inputs[0].dtype, _out(call).dtype), axis=_dim(call))]


def _safe_softmax(call: OperatorCall) -> Sequence[str]:
    """Zero where nothing is left to choose from."""
    made = _softmax("Softmax", call)[0]
    return [call.node("Where", call.node("IsNaN", made), _scalar(call, 0, _out(call).dtype), made)]


def _dropout(call: OperatorCall) -> Sequence[str]:
    if call.given.get("train") and call.given.get("p", 0):
        call.assume("nothing is dropped")
    kept = [call.node("Identity", call.names[0])]
    return [*kept, call.node("Expand", call.constant(True, DType.BOOL), _ints(call, *_out(call).shape))]


def _attention(call: OperatorCall) -> Sequence[str]:
    a = call.op.attributes
    if not isinstance(a, Attention) or len(call.inputs) not in (3, 4) or len(call.inputs[0].shape) != 4:
        raise Unsaid("form")
    if a.dropout:
        call.assume("nothing is dropped")
    values: dict[str, Any] = {"is_causal": int(a.causal)}
    if call.given.get("scale") is not None:
        values["scale"] = float(call.given["scale"])
    return [call.node("Attention", *call.names, **values)]


def _nll_loss(call: OperatorCall) -> Sequence[str]:
    reduction = _REDUCTIONS.get(_given(call, "reduction"))
    if reduction is None or len(call.names) not in (2, 3):
        raise Unsaid("reduction")
    ignored = int(call.given.get("ignore_index", -100))
    return [call.node("NegativeLogLikelihoodLoss", *call.names, ignore_index=ignored, reduction=reduction)]


GROUPED_MM = "aten._grouped_mm"
_REAL = ("Exp", "Log", "Sqrt", "Sin", "Cos", "Tanh", "Sigmoid", "Erf", "Reciprocal")
_UNARY = {
    "relu": "Relu", "tanh": "Tanh", "sigmoid": "Sigmoid", "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "neg": "Neg",
    "abs": "Abs", "cos": "Cos", "sin": "Sin", "erf": "Erf", "reciprocal": "Reciprocal", "floor": "Floor",
    "ceil": "Ceil", "round": "Round", "sign": "Sign", "softplus": "Softplus", "isnan": "IsNaN",
}  # fmt: skip
_BINARY = {"add": "Add", "sub": "Sub", "mul": "Mul", "maximum": "Max", "minimum": "Min"}
_COMPARISONS = {
    "eq": "Equal", "ne": "NotEqual", "gt": "Greater", "lt": "Less", "ge": "GreaterOrEqual", "le": "LessOrEqual"
}  # fmt: skip
_LOGICAL = {
    "logical_and": "And", "logical_or": "Or", "logical_xor": "Xor", "bitwise_and": "And", "bitwise_or": "Or",
    "__and__": "And", "__or__": "Or",
}  # fmt: skip
_REDUCED = {"sum": "ReduceSum", "mean": "ReduceMean", "amax": "ReduceMax", "amin": "ReduceMin"}
_RULES: Mapping[str, Rule] = {
    **{name: partial(_unary, operator) for name, operator in _UNARY.items()},
    **{name: partial(_binary, operator) for name, operator in _BINARY.items()},
    **{name: partial(_comparison, operator) for name, operator in _COMPARISONS.items()},
    **{name: partial(_logical, operator) for name, operator in _LOGICAL.items()},
    **{name: partial(_reduce, operator) for name, operator in _REDUCED.items()},
    **dict.fromkeys(("logical_not", "bitwise_not"), _not),
    "rsub": _reverse_subtract,
    "div": _divide,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "pow": _power,
    "clamp": _clamp,
    "rsqrt": _rsqrt,
    "silu": _silu,
    "gelu": _gelu,
    "leaky_relu": _leaky_relu,
    "where": _where,
    "masked_fill": _masked_fill,
    "copy": _write,
    **dict.fromkeys(("_to_copy", "clone", "alias", "detach", "lift_fresh_copy"), _copy),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "zero"), partial(_filled, 0)),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), partial(_filled, 1)),
    **dict.fromkeys(("full", "full_like", "new_full", "scalar_tensor", "fill"), partial(_filled, None)),
    "arange": _arange,
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "unflatten"), _reshape),
    "expand": _expand,
    **dict.fromkeys(("t", "transpose", "permute"), _transpose),
    "slice": _slice,
    "select": _select,
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _split),
    "unbind": _unbind,
    "cat": _concat,
    "stack": _stack,
    "constant_pad_nd": _pad,
    "triu": partial(_triangle, 1),
    "tril": partial(_triangle, 0),
    "embedding": _embedding,
    "gather": _gather,
    "index_select": _index_select,
    "index": _index,
    "index_put": _index_put,
    "scatter": partial(_scatter, "none"),
    "scatter_add": partial(_scatter, "add"),
    "argmax": partial(_arg, "ArgMax"),
    "argmin": partial(_arg, "ArgMin"),
    "topk": _top_k,
    "sort": _sort,
    "cumsum": _cumulative,
    "histc": _histogram,
    **dict.fromkeys(("mm", "bmm"), _matmul),
    "addmm": _addmm,
    "baddbmm": _baddbmm,
    "_grouped_mm": _grouped_mm,
    "convolution": _convolution,
    "max_pool2d_with_indices": _max_pool,
    "avg_pool2d": _average_pool,
    "_adaptive_avg_pool2d": _global_average,
    "native_layer_norm": _layer_norm,
    "_fused_rms_norm": _rms_norm,
    "native_batch_norm": _batch_norm,
    "_softmax": partial(_softmax, "Softmax"),
    "_safe_softmax": _safe_softmax,
    "_log_softmax": partial(_softmax, "LogSoftmax"),
    "native_dropout": _dropout,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "nll_loss_forward": _nll_loss,
}
