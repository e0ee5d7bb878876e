"""What a cost needs to know of a call node beyond the shapes of its tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Node

from echograph.frontend.pytorch.annotate import VAL
from echograph.frontend.pytorch.schema import arguments, plain_name
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
