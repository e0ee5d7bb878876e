"""Operators of a step graph in ONNX's words, where it has an exact one.

A graph holds shapes, types and what a cost needs; it does not hold an axis, a scale or an epsilon. What the
shapes decide is exact; what ONNX asks for beyond, and the graph does not know, is either assumed and said
(`assumed`), or the operation is left to a domain of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from typing import Any

from echograph.ir.types import Attention, Compute, Convolution, Tensor

_MOST_DIMENSIONS = 6  # of a permutation that is searched for
_REGULAR_RESULTS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """How ONNX spells an operation: the last step makes its first result, earlier ones what that reads.

    Attributes:
        steps: (operator, operands, attributes); an operand is a position among the operation's inputs, a list of
            integers (a constant), or "-1" for the result of the step before.
        results: how many of the operation's results the last step makes.
        assumed: what ONNX asks for and a graph does not hold; "" for an exact spelling.
    """

    steps: Sequence[tuple[str, Sequence[int | list[int] | str], Mapping[str, Any]]]
    results: int = _REGULAR_RESULTS
    assumed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation with its tensors.

    Attributes:
        op: the operation.
        inputs: what it reads.
        outputs: what it makes.
    """

    op: Compute
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor] = field(default=())


Rule = Callable[[Operation], Spelling | None]


def spell(operation: Operation) -> Spelling | None:
    """The ONNX spelling of an operation; None where only its own name will do."""
    rule = _RULES.get(operation.op.name.removeprefix("aten.").rstrip("_"))
    if rule is None or not operation.outputs:
        return None
    return rule(operation)


def _one(
    operator: str,
    *operands: int | list[int] | str,
    results: int = _REGULAR_RESULTS,
    assumed: str = "",
    **attributes: Any,
) -> Spelling:
    return Spelling(steps=[(operator, operands, attributes)], results=results, assumed=assumed)


def _unary(operator: str, o: Operation) -> Spelling | None:
    same = len(o.inputs) == 1 and o.inputs[0].dtype == o.outputs[0].dtype
    return _one(operator, 0) if same else None


def _binary(operator: str, o: Operation) -> Spelling | None:
    if len(o.inputs) != 2 or o.inputs[0].dtype != o.inputs[1].dtype:
        return None
    return _one(operator, 0, 1)


def _matmul(o: Operation) -> Spelling | None:
    return _one("MatMul", 0, 1) if len(o.inputs) == 2 else None


def _addmm(o: Operation) -> Spelling | None:
    return _one("Gemm", 1, 2, 0, assumed="its factors are 1") if len(o.inputs) == 3 else None


def _baddbmm(o: Operation) -> Spelling | None:
    if len(o.inputs) != 3:
        return None
    return Spelling(steps=[("MatMul", (1, 2), {}), ("Add", ("-1", 0), {})], assumed="its factors are 1")


def _convolution(o: Operation) -> Spelling | None:
    a = o.op.attributes
    if not isinstance(a, Convolution) or len(o.inputs) not in (2, 3):
        return None
    x, weight, result = o.inputs[0], o.inputs[1], o.outputs[0]
    attributes: dict[str, Any] = {
        "strides": list(a.stride), "pads": [*a.padding, *a.padding], "dilations": list(a.dilation),
        "group": a.groups, "kernel_shape": list(weight.shape[2:]),
    }  # fmt: skip
    if a.transposed:
        sizes = zip(x.shape[2:], weight.shape[2:], a.stride, a.padding, a.dilation, result.shape[2:], strict=True)
        attributes["output_padding"] = [
            out - ((size - 1) * s - 2 * p + d * (k - 1) + 1) for size, k, s, p, d, out in sizes
        ]
    return _one("ConvTranspose" if a.transposed else "Conv", *range(len(o.inputs)), **attributes)


def _layer_norm(o: Operation) -> Spelling | None:
    if len(o.inputs) != 3:
        return None
    epsilon = "the epsilon is ONNX's default"
    return _one("LayerNormalization", 0, 1, 2, results=3, assumed=epsilon, axis=-len(o.inputs[1].shape))


def _rms_norm(o: Operation) -> Spelling | None:
    if len(o.inputs) != 2:
        return None
    epsilon = "the epsilon is ONNX's default"
    return _one("RMSNormalization", 0, 1, assumed=epsilon, axis=-len(o.inputs[1].shape))


def _batch_norm(o: Operation) -> Spelling | None:
    if len(o.inputs) != 5:
        return None
    return _one("BatchNormalization", 0, 1, 2, 3, 4, assumed="it normalises by the running statistics")


def _last_axis(operator: str, o: Operation) -> Spelling | None:
    return _one(operator, 0, assumed="its axis is the last", axis=-1) if len(o.inputs) == 1 else None


def _gelu(o: Operation) -> Spelling | None:
    return _one("Gelu", 0, assumed="it is the exact form") if len(o.inputs) == 1 else None


def _silu(o: Operation) -> Spelling | None:
    if len(o.inputs) != 1:
        return None
    return Spelling(steps=[("Sigmoid", (0,), {}), ("Mul", ("-1", 0), {})])


def _attention(o: Operation) -> Spelling | None:
    a = o.op.attributes
    if not isinstance(a, Attention) or len(o.inputs) not in (3, 4) or len(o.inputs[0].shape) != 4:
        return None
    dropped = f", and nothing is dropped (of {a.dropout:g})" if a.dropout else ""
    return _one(
        "Attention",
        *range(len(o.inputs)),
        is_causal=int(a.causal),
        assumed=f"its scale is ONNX's default{dropped}",
    )


def _embedding(o: Operation) -> Spelling | None:
    return _one("Gather", 0, 1, axis=0) if len(o.inputs) == 2 else None


def _reshape(o: Operation) -> Spelling | None:
    if len(o.inputs) != 1 or o.inputs[0].numel != o.outputs[0].numel or o.inputs[0].dtype != o.outputs[0].dtype:
        return None
    return _one("Reshape", 0, list(o.outputs[0].shape), allowzero=1)


def _expand(o: Operation) -> Spelling | None:
    return _one("Expand", 0, list(o.outputs[0].shape)) if len(o.inputs) == 1 else None


def _permute(o: Operation) -> Spelling | None:
    """Exact where one permutation alone makes the shape."""
    if len(o.inputs) != 1 or len(o.inputs[0].shape) > _MOST_DIMENSIONS:
        return None
    before, after = o.inputs[0].shape, o.outputs[0].shape
    orders: Iterator[tuple[int, ...]] = permutations(range(len(before)))
    if o.op.name in ("aten.t", "aten.transpose"):
        orders = (order for order in orders if sum(i != at for i, at in enumerate(order)) == 2)
    fitting = [order for order in orders if tuple(before[i] for i in order) == after]
    return _one("Transpose", 0, perm=list(fitting[0])) if len(fitting) == 1 else None


def _concat(o: Operation) -> Spelling | None:
    axis = _differing(o.inputs[0], o.outputs[0]) if o.inputs else None
    return None if axis is None else _one("Concat", *range(len(o.inputs)), axis=axis)


def _split(o: Operation) -> Spelling | None:
    axis = _differing(o.inputs[0], o.outputs[0]) if len(o.inputs) == 1 else None
    if axis is None or any(len(t.shape) != len(o.inputs[0].shape) for t in o.outputs):
        return None
    sizes = [t.shape[axis] for t in o.outputs]
    if sum(sizes) != o.inputs[0].shape[axis]:
        return None
    return _one("Split", 0, sizes, results=len(sizes), axis=axis)


def _differing(a: Tensor, b: Tensor) -> int | None:
    if len(a.shape) != len(b.shape):
        return None
    axes = [i for i, (one, other) in enumerate(zip(a.shape, b.shape, strict=True)) if one != other]
    return axes[0] if len(axes) == 1 else None


def _copy(o: Operation) -> Spelling | None:
    if len(o.inputs) != 1:
        return None
    if o.inputs[0].dtype == o.outputs[0].dtype:
        return _one("Identity", 0)
    return _one("Cast", 0, to=o.outputs[0].dtype)


def _where(o: Operation) -> Spelling | None:
    return _one("Where", 0, 1, 2) if len(o.inputs) == 3 else None


def _average(o: Operation) -> Spelling | None:
    single = len(o.inputs) == 1 and all(extent == 1 for extent in o.outputs[0].shape[2:])
    return _one("GlobalAveragePool", 0) if single and len(o.inputs[0].shape) > 2 else None


_UNARY = {
    "relu": "Relu", "tanh": "Tanh", "sigmoid": "Sigmoid", "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "neg": "Neg",
    "abs": "Abs", "cos": "Cos", "sin": "Sin", "erf": "Erf", "reciprocal": "Reciprocal", "floor": "Floor",
    "ceil": "Ceil", "sign": "Sign", "logical_not": "Not",
}  # fmt: skip
_BINARY = {
    "add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "eq": "Equal", "gt": "Greater", "lt": "Less",
    "ge": "GreaterOrEqual", "le": "LessOrEqual", "logical_and": "And", "logical_or": "Or", "maximum": "Max",
    "minimum": "Min",
}  # fmt: skip
_RULES: Mapping[str, Rule] = {
    **{name: partial(_unary, operator) for name, operator in _UNARY.items()},
    **{name: partial(_binary, operator) for name, operator in _BINARY.items()},
    **dict.fromkeys(("mm", "bmm"), _matmul),
    "addmm": _addmm,
    "baddbmm": _baddbmm,
    "convolution": _convolution,
    "native_layer_norm": _layer_norm,
    "_fused_rms_norm": _rms_norm,
    "native_batch_norm": _batch_norm,
    "_softmax": partial(_last_axis, "Softmax"),
    "_log_softmax": partial(_last_axis, "LogSoftmax"),
    "gelu": _gelu,
    "silu": _silu,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "embedding": _embedding,
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "unflatten"), _reshape),
    "expand": _expand,
    **dict.fromkeys(("t", "transpose", "permute"), _permute),
    "cat": _concat,
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _split),
    **dict.fromkeys(("_to_copy", "clone"), _copy),
    "where": _where,
    **dict.fromkeys(("_adaptive_avg_pool2d", "mean"), _average),
}
