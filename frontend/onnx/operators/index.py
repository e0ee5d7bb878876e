"""Operators that look elements up, or write some of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from echograph.errors import CaptureError
from echograph.frontend.onnx.call import NodeCall, Operator, extents


def _gather(call: NodeCall) -> Any:
    """Rows of a table are an embedding, one known position is a view, anything else picks along a dimension."""
    x: Tensor = call[0]
    axis = call.axis(0, x.dim())
    known = call.known[1]
    if known is not None:
        if known.ndim == 0:
            return x.select(axis, int(known))
        index = torch.tensor(np.where(known < 0, known + int(x.shape[axis]), known))
    else:
        index = call[1]
    if axis == 0 and x.dim() == 2 and x.is_floating_point():
        return F.embedding(index, x)
    picked = x.index_select(axis, index.reshape(-1))
    return picked.reshape([*extents(x)[:axis], *extents(index), *extents(x)[axis + 1 :]])


def _gather_elements(call: NodeCall) -> Any:
    return torch.gather(call[0], call.axis(0, call[0].dim()), call[1])


def _gather_nd(call: NodeCall) -> Any:
    x, index = call[0], call[1]
    if call.integer("batch_dims"):
        raise CaptureError("its batch_dims are not 0: export it as GatherElements")
    return x[_positions(x, index)]


def _positions(x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    if index.dim() == 0 or index.shape[-1] > x.dim():
        raise CaptureError(
            f"its indices {extents(index)} say more than the {x.dim()} dimensions of what they index"
        )
    return index.unbind(-1)


def _scatter_elements(call: NodeCall) -> Any:
    x, index, updates = call[0], call[1], call[2]
    axis = call.axis(0, x.dim())
    reduction = call.text("reduction", "none")
    if reduction == "none":
        return x.scatter(axis, index, updates)
    if reduction == "add":
        return x.scatter_add(axis, index, updates)
    name = {"mul": "prod", "max": "amax", "min": "amin"}.get(reduction)
    if name is None:
        raise CaptureError(f"its reduction '{reduction}' is not one that ONNX has")
    return x.scatter_reduce(axis, index, updates, name)


def _scatter_nd(call: NodeCall) -> Any:
    x, index, updates = call[0], call[1], call[2]
    reduction = call.text("reduction", "none")
    if reduction not in ("none", "add"):
        raise CaptureError(f"its reduction '{reduction}' has no kernel of its own: use ScatterElements")
    return x.index_put(_positions(x, index), updates, accumulate=reduction == "add")


def _one_hot(call: NodeCall) -> Any:
    depth = call.constant(1)
    if depth is None:
        raise CaptureError("it lacks its depth")
    classes = torch.arange(int(depth.item()), dtype=call[0].dtype)
    axis = call.integer("axis", -1)
    rank = call[0].dim() + 1
    hits = (call[0].unsqueeze(-1) == classes).movedim(-1, axis % rank)
    return torch.where(hits, call[2][1], call[2][0])


OPERATORS: Mapping[str, Operator] = {
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "ScatterElements": _scatter_elements,
    "Scatter": _scatter_elements,
    "ScatterND": _scatter_nd,
    "OneHot": _one_hot,
}
