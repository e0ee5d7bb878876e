"""Operators that reduce dimensions, and those that rank or accumulate along one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from echograph.frontend.onnx.call import NodeCall, Operator

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
