"""The kernels of a Mamba-2 layer as single operations, which is how trainers run them.

Written out in PyTorch's operations, a layer's state-space duality (Dao and Gu 2024, arXiv:2405.21060, section 6)
makes matrices of chunk by chunk for every head; state-spaces/mamba, which trainers use, keeps them on the chip. So
a capture holds one operation each for the scan and for the causal convolution with its SiLU, and one for each
gradient. They have shapes and floating-point operations, and no values: they are put in place of the library's
functions while a model of fake tensors runs, and never otherwise.

A scan over chunks of Q positions, for S positions, H heads of size P, and G groups of B and C of state size N, has

    C B^T           S Q N G         within chunks, the masked half of them included
    (C B^T) X       S Q P H
    B^T X, C state  2 S N P H       the states that chunks leave, and what they give

multiply-adds. Its gradient computes C B^T and the first states again, and has two products for each of the four:
S (3 Q N G + 2 Q P H + 5 N P H).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_LIBRARY: Any = torch.library.Library("mamba2", "DEF")  # type: ignore[no-untyped-call]
_OF_SCAN = "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, Tensor dt_bias, int chunk"
_OF_CONVOLUTION = "Tensor x, Tensor weight, Tensor bias"
_LIBRARY.define(f"ssd_scan({_OF_SCAN}) -> Tensor")
_LIBRARY.define(f"ssd_scan_backward(Tensor gradient, {_OF_SCAN}) -> ({', '.join(['Tensor'] * 7)})")
_LIBRARY.define(f"causal_conv1d({_OF_CONVOLUTION}) -> Tensor")
_LIBRARY.define(f"causal_conv1d_backward(Tensor gradient, {_OF_CONVOLUTION}) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define("causal_conv1d.unbiased(Tensor x, Tensor weight) -> Tensor")
_LIBRARY.define("causal_conv1d_backward.unbiased(Tensor gradient, Tensor x, Tensor weight) -> (Tensor, Tensor)")


def _like(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in tensors)


for _name in ("ssd_scan", "causal_conv1d", "causal_conv1d.unbiased"):
    _LIBRARY.impl(_name, lambda x, *_: _like(x)[0], "Meta")
_LIBRARY.impl("ssd_scan_backward", lambda _, *inputs: _like(*inputs[:-1]), "Meta")
for _name in ("causal_conv1d_backward", "causal_conv1d_backward.unbiased"):
    _LIBRARY.impl(_name, lambda _, *inputs: _like(*inputs), "Meta")


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        ctx.save_for_backward(*inputs[:-1])
        ctx.chunk = inputs[-1]
        return torch.ops.mamba2.ssd_scan(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return (*torch.ops.mamba2.ssd_scan_backward(gradient, *ctx.saved_tensors, ctx.chunk), None)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        ctx.save_for_backward(*inputs)
        return torch.ops.mamba2.causal_conv1d(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return torch.ops.mamba2.causal_conv1d_backward(gradient, *ctx.saved_tensors)


def ssd_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor, dt_bias: Tensor, **_: Any
) -> Tensor:
    """The scan of a Mamba-2 layer, in place of transformers' `mamba2_chunk_scan`.

    Args:
        x: [batch, sequence, heads, head dim].
        dt: [batch, sequence, heads].
        A: [heads].
        B: [batch, sequence, groups, state].
        C: like B.
        chunk_size: positions of a chunk.
        D: [heads].
        dt_bias: [heads].

    Returns:
        What x is like.
    """
    result: Tensor = _Scan.apply(x, dt, A, B, C, D, dt_bias, chunk_size)  # type: ignore[no-untyped-call]
    return result


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """The causal convolution of a recurrent layer, its activation included.

    Args:
        x: [batch, channels, sequence].
        weight: [channels, kernel].
        bias: [channels], or None.
        activation: its name; it costs nothing beside the traffic.

    Returns:
        What x is like.
    """
    operands = (x, weight) if bias is None else (x, weight, bias)
    result: Tensor = _Convolution.apply(*operands)  # type: ignore[no-untyped-call]
    return result


def _sizes(x: Any, B: Any, chunk: int) -> tuple[int, int, int, int, int, int]:
    batch, sequence, heads, head = x
    groups, state = B[-2:]
    return batch * sequence, min(chunk, sequence), heads, head, groups, state


@register_flop_formula(torch.ops.mamba2.ssd_scan)
def _scan_flops(x: Any, dt: Any, A: Any, B: Any, *rest: Any, **_: Any) -> int:
    """FLOPs of a scan, of its operands' shapes and its chunk."""
    tokens, q, heads, head, groups, state = _sizes(x, B, rest[-1])
    return 2 * tokens * (q * state * groups + q * head * heads + 2 * state * head * heads)


@register_flop_formula(torch.ops.mamba2.ssd_scan_backward)
def _scan_backward_flops(gradient: Any, x: Any, dt: Any, A: Any, B: Any, *rest: Any, **_: Any) -> int:
    """FLOPs of a scan's gradient, of the same and the gradient that arrives."""
    tokens, q, heads, head, groups, state = _sizes(x, B, rest[-1])
    return 2 * tokens * (3 * q * state * groups + 2 * q * head * heads + 5 * state * head * heads)
