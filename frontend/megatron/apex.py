"""Apex's kernels that Megatron takes: a softmax with its scale and mask, and a product that adds, in PyTorch's.

In a capture a kernel is one operator that reads and writes what the kernel does. With values, it is what the
kernel computes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_ATEN = torch.ops.aten
_THREADS, _WARP = 128, 32


def accumulate(given: Tensor, gradient: Tensor, total: Tensor) -> None:
    """Adds the gradient of a weight to the sum of its gradients, by a product that adds.

    Args:
        given: input of the linear layer [tokens, in].
        gradient: of its output [tokens, out].
        total: [out, in], of a wider type, perhaps.
    """
    if isinstance(total, FakeTensor):
        _ATEN.addmm.dtype_out(total, gradient.t(), given, total.dtype, out=total)
    else:
        total.add_(gradient.t() @ given)  # on CPUs there is no product of two types


def softmax(scores: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Scale, mask and softmax of [..., queries, keys]: one kernel, which computes in fp32.

    Args:
        scores: of 16 bits.
        mask: true where nothing is attended to.
        causal: whether keys behind a query are masked; the kernel needs no mask for it.
        scale: of the scores.
    """
    if isinstance(scores, FakeTensor):
        out: Tensor = _ATEN._softmax(scores, -1, False)
        return out
    wide = scores.float() * scale
    if causal:
        shape = scores.shape[-2:]
        behind = torch.ones(shape, dtype=torch.bool, device=scores.device).triu(shape[1] - shape[0] + 1)
        mask = behind if mask is None else mask | behind
    return (wide if mask is None else wide.masked_fill(mask, -10000.0)).softmax(-1).to(scores.dtype)


def softmax_backward(gradient: Tensor, out: Tensor, scale: float) -> Tensor:
    """The gradient of scores; as the kernel does, it is written over that of the output."""
    if isinstance(gradient, FakeTensor):
        made: Tensor = _ATEN._softmax_backward_data.out(gradient, out, -1, out.dtype, grad_input=gradient)
        return made
    wide, over = gradient.float(), out.float()
    return gradient.copy_(scale * over * (wide - (wide * over).sum(-1, keepdim=True)))


def masked_softmax(scores: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """`softmax` with its gradient."""
    out: Tensor = _Softmax.apply(scores, mask, causal, scale)  # type: ignore[no-untyped-call]
    return out


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
        out = softmax(scores, mask, causal, scale)
        ctx.save_for_backward(out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (out,) = ctx.saved_tensors
        return softmax_backward(gradient.contiguous(), out, ctx.scale), None, None, None


def batch_per_block(queries: int, keys: int, batch: int, heads: int) -> int:
    """Rows that a block of the softmax's threads takes: by it, Megatron tells whether the kernel can run."""
    del queries, batch, heads
    wide = 1 << (keys - 1).bit_length()
    return _THREADS // min(wide, _WARP) * (2 if wide <= _THREADS else 1)
