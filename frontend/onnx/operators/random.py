"""Operators that make random numbers: a step has their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from echograph.errors import CaptureError
from echograph.frontend.onnx.call import Call, Operator


def _type(call: Call, default: torch.dtype) -> torch.dtype:
    number = call.integer("dtype")
    return call.dtypes.of(number, call.node.name) if number else default


def _normal(call: Call, made: Tensor) -> Any:
    return made.normal_(call.real("mean", 0.0), call.real("scale", 1.0))


def _uniform(call: Call, made: Tensor) -> Any:
    return made.uniform_(call.real("low", 0.0), call.real("high", 1.0))


def _shaped(fill: Any, call: Call) -> Any:
    return fill(call, torch.empty(call.ints("shape"), dtype=_type(call, call.dtypes.to_step(torch.float32))))


def _like(fill: Any, call: Call) -> Any:
    return fill(call, torch.empty(call[0].shape, dtype=_type(call, call[0].dtype)))


def _bernoulli(call: Call) -> Any:
    return torch.bernoulli(call[0]).to(_type(call, call[0].dtype))


def _multinomial(call: Call) -> Any:
    if call[0].dim() != 2:
        raise CaptureError("its input is no matrix of scores")
    drawn = torch.multinomial(torch.exp(call[0]), call.integer("sample_size", 1), True)
    return drawn.to(_type(call, torch.int32))


OPERATORS: Mapping[str, Operator] = {
    "RandomNormal": partial(_shaped, _normal),
    "RandomUniform": partial(_shaped, _uniform),
    "RandomNormalLike": partial(_like, _normal),
    "RandomUniformLike": partial(_like, _uniform),
    "Bernoulli": _bernoulli,
    "Multinomial": _multinomial,
}
