"""Operators that work element by element, reduce dimensions, or rank and accumulate along one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from echograph.frontend.onnx.call import NodeCall, Operator


def _unary(function: Callable[[Tensor], Tensor], call: NodeCall) -> Any:
    return function(call[0])


def _binary(function: Callable[[Any, Any], Any], call: NodeCall) -> Any:
    """A number that is known is an argument of the kernel and no operand in memory."""
    a, b = call[0], call[1]
    if _absorbs(a, b):
        return function(a, call.number(1))
    if _absorbs(b, a) and function not in _COMPARISONS:
        return function(call.number(0), b)
    return function(a, b)


def _absorbs(tensor: Tensor, other: Tensor) -> bool:
    return other.numel() == 1 and other.dim() <= tensor.dim()


_COMPARISONS = (torch.eq, torch.gt, torch.ge, torch.lt, torch.le, torch.fmod)


def _divide(a: Any, b: Any) -> Any:
    """ONNX divides integers towards zero."""
    floats = any(isinstance(x, float) or (isinstance(x, Tensor) and x.is_floating_point()) for x in (a, b))
    if floats or any(isinstance(x, Tensor) and x.is_complex() for x in (a, b)):
        return operator.truediv(a, b)
    return torch.div(a, b, rounding_mode="trunc")


def _modulo(call: NodeCall) -> Any:
    function = torch.fmod if call.integer("fmod") else torch.remainder
    return _binary(function, call)


def _variadic(function: Callable[[Any, Any], Any], call: NodeCall) -> Any:
    return reduce(function, [call[i] for i in range(len(call.operands))])


def _mean(call: NodeCall) -> Any:
    return _variadic(operator.add, call) / len(call.operands)


def _clip(call: NodeCall) -> Any:
    low, high = (call.node.attributes.get(name) for name in ("min", "max"))
    low = call.number(1) if call.get(1) is not None else low
    high = call.number(2) if call.get(2) is not None else high
    return call[0] if low is None and high is None else torch.clamp(call[0], low, high)


def _where(call: NodeCall) -> Any:
    return torch.where(call[0], call[1], call[2])


def _cast(call: NodeCall) -> Any:
    return call[0].to(call.dtypes.of(call.integer("to"), call.node.name))


def _cast_like(call: NodeCall) -> Any:
    return call[0].to(call[1].dtype)


def _gelu(call: NodeCall) -> Any:
    return F.gelu(call[0], approximate=call.text("approximate", "none"))


def _prelu(call: NodeCall) -> Any:
    x, slope = call[0], call[1]
    return torch.where(x > 0, x, x * slope)


def _selu(call: NodeCall) -> Any:
    x = call[0]
    alpha, gamma = call.real("alpha", 1.6732632), call.real("gamma", 1.0507)
    return gamma * F.elu(x, alpha)


def _swish(call: NodeCall) -> Any:
    x, alpha = call[0], call.real("alpha", 1.0)
    return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)


def _hard_sigmoid(call: NodeCall) -> Any:
    return torch.clamp(call[0] * call.real("alpha", 0.2) + call.real("beta", 0.5), 0.0, 1.0)


def _thresholded(call: NodeCall) -> Any:
    return F.threshold(call[0], call.real("alpha", 1.0), 0.0)


def _shift(call: NodeCall) -> Any:
    shift = torch.bitwise_left_shift if call.text("direction") == "LEFT" else torch.bitwise_right_shift
    return shift(call[0], call[1])


def _shrink(call: NodeCall) -> Any:
    x, bias, edge = call[0], call.real("bias", 0.0), call.real("lambd", 0.5)
    return torch.where(x < -edge, x + bias, torch.where(x > edge, x - bias, torch.zeros_like(x)))


_UNARY: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs, "Acos": torch.acos, "Acosh": torch.acosh, "Asin": torch.asin, "Asinh": torch.asinh,
    "Atan": torch.atan, "Atanh": torch.atanh, "Ceil": torch.ceil, "Cos": torch.cos, "Cosh": torch.cosh,
    "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor, "Log": torch.log, "Neg": torch.neg,
    "Reciprocal": torch.reciprocal, "Round": torch.round, "Sigmoid": torch.sigmoid, "Sign": torch.sign,
    "Sin": torch.sin, "Sinh": torch.sinh, "Sqrt": torch.sqrt, "Tan": torch.tan, "Tanh": torch.tanh,
    "Not": torch.logical_not, "BitwiseNot": torch.bitwise_not, "IsNaN": torch.isnan, "IsInf": torch.isinf,
    "Relu": F.relu, "Softplus": F.softplus, "Softsign": F.softsign, "HardSwish": F.hardswish, "Mish": F.mish,
    "Identity": lambda x: x,
}  # fmt: skip
_BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Div": _divide, "Pow": torch.pow,
    "Equal": torch.eq, "Greater": torch.gt, "GreaterOrEqual": torch.ge, "Less": torch.lt, "LessOrEqual": torch.le,
    "And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor,
    "BitwiseAnd": torch.bitwise_and, "BitwiseOr": torch.bitwise_or, "BitwiseXor": torch.bitwise_xor,
}  # fmt: skip
_LOGICAL = ("And", "Or", "Xor")


Reduction = Callable[[Tensor, list[int], bool], Tensor]


def _reduce(function: Reduction, call: NodeCall) -> Any:
    x: Tensor = call[0]
    axes = call.optional_ints("axes", 1)
    if not axes:
        if call.integer("noop_with_empty_axes"):
            return x
        axes = list(range(x.dim()))
    return function(x, axes, bool(call.integer("keepdims", 1))) if axes else x


def _prod(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((a % x.dim() for a in axes), reverse=True):
        x = torch.prod(x, axis, keepdim=keep)
    return x


def _arg(function: Callable[..., Tensor], call: NodeCall) -> Any:
    return function(call[0], call.axis(0, call[0].dim()), bool(call.integer("keepdims", 1)))


def _top_k(call: NodeCall) -> Any:
    k = call.ints("k", 1)[0]
    return torch.topk(call[0], k, call.axis(-1, call[0].dim()), bool(call.integer("largest", 1)))


def _cumulative(function: Callable[[Tensor, int], Tensor], call: NodeCall) -> Any:
    x, axis = call[0], call.ints("axis", 1)[0]
    backward, exclusive = bool(call.integer("reverse")), bool(call.integer("exclusive"))
    x = x.flip([axis]) if backward else x
    if exclusive:  # the first result is of nothing
        first = torch.full_like(x.narrow(axis, 0, 1), 1 if function is torch.cumprod else 0)
        x = torch.cat([first, x.narrow(axis, 0, int(x.shape[axis]) - 1)], axis)
    made = function(x, axis)
    return made.flip([axis]) if backward else made


def _hardmax(x: Tensor, axis: int) -> Tensor:
    return torch.zeros_like(x).scatter(axis, torch.argmax(x, axis, keepdim=True), 1.0)


def _mean_variance(call: NodeCall) -> Any:
    x, axes = call[0], call.ints("axes", default=[0, 2, 3])
    centred = x - torch.mean(x, axes, keepdim=True)
    return centred / (torch.sqrt(torch.mean(centred * centred, axes, keepdim=True)) + 1e-9)


def _softmax(function: Callable[[Tensor, int], Tensor], call: NodeCall) -> Any:
    x: Tensor = call[0]
    if call.opset >= 13 or x.dim() == 2:
        return function(x, call.axis(-1 if call.opset >= 13 else 1, x.dim()))
    axis = call.axis(1, x.dim())  # before version 13, over all dimensions from this one on
    return function(x.flatten(axis), axis).reshape(x.shape)


_REDUCTIONS: Mapping[str, Reduction] = {
    "ReduceSum": lambda x, axes, keep: torch.sum(x, axes, keep),
    "ReduceMean": lambda x, axes, keep: torch.mean(x, axes, keep),
    "ReduceMax": lambda x, axes, keep: torch.amax(x, axes, keep),
    "ReduceMin": lambda x, axes, keep: torch.amin(x, axes, keep),
    "ReduceProd": _prod,
    "ReduceL1": lambda x, axes, keep: torch.linalg.vector_norm(x, 1, axes, keep),
    "ReduceL2": lambda x, axes, keep: torch.linalg.vector_norm(x, 2, axes, keep),
    "ReduceSumSquare": lambda x, axes, keep: torch.sum(x * x, axes, keep),
    "ReduceLogSum": lambda x, axes, keep: torch.log(torch.sum(x, axes, keep)),
    "ReduceLogSumExp": lambda x, axes, keep: torch.logsumexp(x, axes, keep),
}


OPERATORS: Mapping[str, Operator] = {
    **{name: partial(_unary, function) for name, function in _UNARY.items()},
    **{n: partial(_variadic if n in _LOGICAL else _binary, function) for n, function in _BINARY.items()},
    "Mod": _modulo,
    "Sum": partial(_variadic, operator.add),
    "Max": partial(_variadic, torch.maximum),
    "Min": partial(_variadic, torch.minimum),
    "Mean": _mean,
    "Clip": _clip,
    "Where": _where,
    "Cast": _cast,
    "CastLike": _cast_like,
    "Gelu": _gelu,
    "PRelu": _prelu,
    "LeakyRelu": lambda call: F.leaky_relu(call[0], call.real("alpha", 0.01)),
    "Elu": lambda call: F.elu(call[0], call.real("alpha", 1.0)),
    "Celu": lambda call: F.celu(call[0], call.real("alpha", 1.0)),
    "Selu": _selu,
    "Swish": _swish,
    "HardSigmoid": _hard_sigmoid,
    "ThresholdedRelu": _thresholded,
    "BitShift": _shift,
    "Shrink": _shrink,
    **{name: partial(_reduce, function) for name, function in _REDUCTIONS.items()},
    "ArgMax": partial(_arg, torch.argmax),
    "ArgMin": partial(_arg, torch.argmin),
    "TopK": _top_k,
    "CumSum": partial(_cumulative, torch.cumsum),
    "CumProd": partial(_cumulative, torch.cumprod),
    "MeanVarianceNormalization": _mean_variance,
    "Hardmax": partial(_softmax, _hardmax),
    "Det": lambda call: torch.linalg.det(call[0]),
    "Softmax": partial(_softmax, F.softmax),
    "LogSoftmax": partial(_softmax, F.log_softmax),
}
