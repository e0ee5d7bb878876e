"""Makes fake CPU tensors run the operators that CUDA would run.

Captures use fake tensors on the CPU: it is the one device whose fake backward works without a GPU. A few
composite operators look at the device before they choose what to call, so on the CPU they would decompose
differently:

    aten.dropout                        CUDA: one native_dropout; CPU: empty_like, bernoulli_, div_, mul
    aten.scaled_dot_product_attention   CUDA: flash or memory-efficient kernel; CPU: its own, or math
    aten.rms_norm                       CUDA: one _fused_rms_norm; CPU: pow, mean, add, rsqrt, mul
    aten.softmax, aten.log_softmax      of fp16 to fp32, CUDA: one kernel; CPU: a copy, then the kernel

Besides, operators get the shape rules that PyTorch does not give them: `aten._fused_sgd_` writes in place and
returns nothing; `aten._ctc_loss` keeps log-probabilities as long as its longest target, a number that it is given;
batch normalisation over ranks, which PyTorch has on GPUs alone.

`cuda_operators` registers, for as long as the context lasts, kernels at the dispatcher's AutogradCPU key
that take CUDA's choice. The dispatcher is the place where the devices part, so C++ callers
(`nn.MultiheadAttention`) and all Python spellings of an operator are served alike.

What still differs from CUDA: attention takes the flash kernel where recent GPUs may prefer cuDNN's; batch
normalisation is `native_batch_norm`, not `cudnn_batch_norm`; the saved statistics of layer and batch norm have the
type of the input instead of fp32; sums of gradients make a new tensor instead of adding in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_impls import op_implementations_dict

from echograph.frontend.pytorch import cudnn

_ATEN = torch.ops.aten
_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_FLASH_MAX_HEAD_DIM = 256
_FLASH_ALIGNMENT = 8


@contextmanager
def cuda_operators() -> Iterator[None]:
    """Within the context, composite operators on CPU tensors call what they would call on CUDA."""
    with cpu_operators() as library:
        library.impl("dropout", _dropout, "AutogradCPU")
        library.impl("scaled_dot_product_attention", _attention, "AutogradCPU")
        library.impl("rms_norm", _rms_norm, "AutogradCPU")
        library.impl("softmax.int", partial(_softmax, _ATEN._softmax), "AutogradCPU")
        library.impl("log_softmax.int", partial(_softmax, _ATEN._log_softmax), "AutogradCPU")
        for name, call in cudnn.CALLS.items():
            library.impl(name, call, "AutogradCPU")
        yield


@contextmanager
def cpu_operators() -> Iterator[Any]:
    """Within the context, operators on CPU tensors call what they do there, and none lacks a shape rule."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        library.impl("_fused_sgd_", lambda *_, **__: None, "Meta")
        library.impl("_ctc_loss_backward", lambda _, log_probs, *__: torch.empty_like(log_probs), "Meta")
        for name, rule in _OF_SYNCHRONISED_NORMS.items():
            library.impl(name, rule, "Meta")
        op_implementations_dict[_ATEN._ctc_loss.default] = _ctc_loss
        yield library
    finally:
        op_implementations_dict.pop(_ATEN._ctc_loss.default, None)
        library._destroy()


def _of_channels(x: Tensor, count: int) -> tuple[Tensor, ...]:
    """Numbers for each channel, in fp32 at least."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return tuple(torch.empty(x.shape[1], dtype=dtype, device=x.device) for _ in range(count))


# What batch normalisation over ranks (SyncBatchNorm) is made of on a GPU: mean and inverse deviation of a rank's
# samples, those of all ranks', and what is made of them element by element.
_OF_SYNCHRONISED_NORMS: dict[str, Callable[..., Any]] = {
    "batch_norm_stats": lambda x, eps: _of_channels(x, 2),
    "batch_norm_gather_stats_with_counts": lambda x, *_: _of_channels(x, 2),
    "batch_norm_elemt": lambda x, *_: torch.empty_like(x),
    "batch_norm_backward_reduce": lambda grad, *_: _of_channels(grad, 4),
    "batch_norm_backward_elemt": lambda grad, *_: torch.empty_like(grad),
}


def _ctc_loss(
    mode: Any,
    func: Any,
    log_probs: Tensor,
    targets: Tensor,
    lengths: list[int],
    target_lengths: list[int],
    *_: Any,
) -> tuple[Tensor, Tensor]:
    """The loss of each sample, and log-probabilities [samples, steps, blanks between labels and these]."""
    steps, samples, _labels = log_probs.shape
    return log_probs.new_empty(samples), log_probs.new_empty(samples, steps, 2 * max(target_lengths) + 1)


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if p == 0 or not train or x.numel() == 0:
        return x
    if p == 1:
        return x * torch.zeros((), dtype=x.dtype)
    out: Tensor = _ATEN.native_dropout(x, p, train)[0]
    return out


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """CUDA's order of preference with default flags: flash, memory-efficient, math (sdp_utils.cpp)."""
    if query.dim() == key.dim() == value.dim() == 4:
        if _flash_takes(query, key, value, attn_mask, is_causal, enable_gqa):
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if query.shape[1] == key.shape[1] == value.shape[1]:
            mask = _additive_mask(attn_mask, query, key)
            grad = query.requires_grad or key.requires_grad or value.requires_grad
            efficient = _ATEN._scaled_dot_product_efficient_attention
            out: Tensor = efficient(query, key, value, mask, grad, dropout_p, is_causal, scale=scale)[0]
            return out
    math = _ATEN._scaled_dot_product_attention_math
    result: Tensor = math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]
    return result


def _flash_takes(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, enable_gqa: bool
) -> bool:
    return (
        mask is None
        and query.dtype in _FLASH_DTYPES
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= _FLASH_MAX_HEAD_DIM
        and (not is_causal or query.shape[-2] == key.shape[-2])
        and (enable_gqa or query.shape[1] == key.shape[1] == value.shape[1])
    )


def _flash(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor:
    head_dim = query.shape[-1]
    pad = -head_dim % _FLASH_ALIGNMENT
    if pad:
        scale = head_dim**-0.5 if scale is None else scale
        query, key, value = (torch.nn.functional.pad(t, (0, pad)) for t in (query, key, value))
    flash = _ATEN._scaled_dot_product_flash_attention
    out: Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    return out[..., :head_dim] if pad else out


def _additive_mask(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """A mask as the memory-efficient kernel takes it: added to the scores, one per head (expanded, not copied)."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype)
        mask = torch.where(mask, zero, torch.full((), float("-inf"), dtype=query.dtype))
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _softmax(kernel: Any, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    if x.dtype == torch.float16 and dtype == torch.float32:
        return kernel(x, dim, True)  # type: ignore[no-any-return]
    return kernel(x if dtype is None else x.to(dtype), dim, False)  # type: ignore[no-any-return]


def _rms_norm(
    x: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    out: Tensor = _FusedRMSNorm.apply(x, normalized_shape, weight, eps)  # type: ignore[no-untyped-call]
    return out


class _FusedRMSNorm(torch.autograd.Function):
    """`aten._fused_rms_norm` with its gradient: on the CPU the operator itself is a composite that decomposes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            out, rstd = _ATEN._fused_rms_norm(x, shape, weight, eps)
        ctx.save_for_backward(x, rstd, weight)
        ctx.shape = shape
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        x, rstd, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        with torch._C._AutoDispatchBelowAutograd():
            dx, dweight = _ATEN._fused_rms_norm_backward(grads[0], x, ctx.shape, rstd, weight, wanted)
        return dx, None, dweight, None
