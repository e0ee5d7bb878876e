"""What a cost needs to know of a call node beyond the shapes of its tensors."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from echograph.frontend.pytorch.annotate import FORWARD, NUMBER, PHASE, VAL
from echograph.frontend.pytorch.schema import arguments, given_arguments, is_fill, plain_name
from echograph.ir.types import Attention, Attributes, Convolution, Gemm

# Operator -> names of its two matrix operands.
_GEMM_OPERANDS = {
    "mm": ("self", "mat2"),
    "bmm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"),
    "_grouped_mm": ("self", "mat2"),
    "_scaled_mm": ("self", "mat2"),
}
_ATTENTION = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention")
_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_CONVOLUTION = ("convolution", "convolution_backward")
# What the results' shapes say, and what is the device's affair.
_SHAPES = ("size", "shape", "split_size", "split_sizes", "pin_memory")
_HANDLES = (torch.device, torch.layout, torch.memory_format, torch.Generator)


def attributes_of(node: Node) -> Attributes | None:
    """The attributes of a call node, or None where shapes say all."""
    name = plain_name(node)
    if name in _GEMM_OPERANDS:
        a, b = (arguments(node)[operand].meta[VAL] for operand in _GEMM_OPERANDS[name])
        return Gemm(transpose_a=_is_transposed(a), transpose_b=_is_transposed(b))
    if name.removesuffix("_backward") in (*_ATTENTION, _CPU_ATTENTION):
        return _attention(arguments(node))
    if name in _CONVOLUTION:
        return _convolution(arguments(node))
    return None


def arguments_of(node: Node) -> str:
    """What a forward operator is given beside tensors and shapes, as a JSON object; "" where that is nothing.

    Names are those of the operator's schema. What has its default is left out; a tensor within a list is "%", one
    that is left out null, a type the name of PyTorch.
    """
    if node.meta.get(PHASE) != FORWARD or plain_name(node) in _CONVOLUTION:
        return ""
    numbers = is_fill(node)  # what it is filled with is no operand
    given = {name: _plain(value, numbers) for name, value in given_arguments(node).items() if name not in _SHAPES}
    told = {name: value for name, value in given.items() if value is not _TENSOR}
    return json.dumps(told, separators=(",", ":")) if told else ""


_TENSOR = object()


def _plain(value: Any, numbers: bool = False) -> Any:
    if numbers and isinstance(value, Node) and NUMBER in value.meta:
        return value.meta[NUMBER]
    if isinstance(value, (Node, *_HANDLES)):
        return _TENSOR
    if isinstance(value, tuple | list):
        items = [_plain(item) for item in value]
        if items and all(item is _TENSOR for item in items):
            return _TENSOR
        return ["%" if item is _TENSOR else item for item in items]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value if value is None or isinstance(value, bool | int | float | str) else _TENSOR


def _is_transposed(operand: Tensor) -> bool:
    """Whether a matrix lies in memory by columns (of two equal layouts, by rows)."""
    rows, columns = operand.stride()[-2:]
    return rows == 1 and columns != 1


def _attention(named: dict[str, Any]) -> Attention:
    query, key = named["query"].meta[VAL], named["key"].meta[VAL]
    return Attention(
        heads=query.shape[1],
        kv_heads=key.shape[1],
        head_dim=query.shape[3],
        causal=bool(named["is_causal"]),
        dropout=float(named["dropout_p"]),
    )


def _convolution(named: dict[str, Any]) -> Convolution:
    dimensions = named["weight"].meta[VAL].dim() - 2

    def each(values: list[int]) -> tuple[int, ...]:
        return tuple(values) * dimensions if len(values) == 1 else tuple(values)

    return Convolution(
        stride=each(named["stride"]),
        padding=each(named["padding"]),
        dilation=each(named["dilation"]),
        groups=int(named["groups"]),
        transposed=bool(named["transposed"]),
    )
