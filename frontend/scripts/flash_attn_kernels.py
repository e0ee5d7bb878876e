"""The modules in CUDA beside FlashAttention (its folder `csrc`), as scripts call them: what stands for each.

Each is one kernel that reads its inputs and writes its results once. Where PyTorch has the same, that is it;
elsewhere operators that read and write as much stand for it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from echograph.errors import CaptureError
from echograph.frontend.scripts.values import NoteTaker

Making = Callable[..., ModuleType]
_ATEN: Any = torch.ops.aten


def rotary_emb(make: Making, note: NoteTaker) -> ModuleType:
    """`rotary_emb`: both halves of each head are turned."""

    def apply_rotary(
        x1: Tensor, x2: Tensor, cos: Tensor, sin: Tensor, out1: Tensor, out2: Tensor, *_: Any
    ) -> None:
        note("rotary_emb is not installed: two kernels that read and write as much stand for its one")
        for given, out in ((x1, out1), (x2, out2)):
            torch.mul(given.data, 1.0, out=out.data)  # which autograd does not see of a kernel either

    return make("rotary_emb", apply_rotary=apply_rotary)


def xentropy_cuda_lib(make: Making, note: NoteTaker) -> ModuleType:
    """`xentropy_cuda_lib`: a cross-entropy that keeps logits, and may write their gradient where they are."""

    def forward(logits: Tensor, labels: Tensor, smoothing: float, *_: Any) -> tuple[Tensor, Tensor]:
        note("xentropy_cuda_lib is not installed: kernels that read and write as much stand for its own")
        losses = logits.amax(-1).float()
        return losses, torch.empty_like(losses)

    def backward(
        gradient: Tensor, logits: Tensor, lse: Tensor, labels: Tensor, smoothing: float, inplace: bool, *_: Any
    ) -> Tensor:
        if inplace:
            logits.data.mul_(1.0)
            return logits
        return logits * 1.0

    return make("xentropy_cuda_lib", forward=forward, backward=backward)


def dropout_layer_norm(make: Making, note: NoteTaker) -> ModuleType:
    """`dropout_layer_norm`: a norm of layers or of roots of means, where it adds no residual and drops nothing."""

    def forward(x: Tensor, residual: Any, gamma: Tensor, beta: Any, *given: Any) -> tuple[Any, ...]:
        # Two scales, two subsets, the share that is dropped, epsilon, and further ones up to which norm it is.
        _alone(residual, *given[:4], given[4] or None)
        note("dropout_layer_norm is not installed: PyTorch's norms, one kernel each, stand for it")
        shape = [x.shape[-1]]
        if given[-1]:
            out, root = _ATEN._fused_rms_norm(x, shape, gamma, given[5])
            return out, x, None, torch.empty_like(root), root
        out, mean, root = _ATEN.native_layer_norm(x, shape, gamma, beta, given[5])
        return out, x, None, mean, root

    def backward(
        gradient: Tensor, of_residual: Any, x: Tensor, _: Any, mask: Any, mean: Tensor, root: Tensor,
        gamma: Tensor, *given: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        _alone(of_residual, mask, *given[:4])
        shape = [x.shape[-1]]
        if given[-1]:
            of_x, of_gamma = _ATEN._fused_rms_norm_backward(gradient, x, shape, root, gamma, [True, True])
            return of_x, None, of_gamma, None, None, None
        asked = [True, True, True]
        of_x, of_gamma, of_beta = _ATEN.native_layer_norm_backward(
            gradient, x, shape, mean, root, gamma, torch.empty_like(gamma), asked
        )
        return of_x, None, of_gamma, of_beta, None, None

    return make("dropout_layer_norm", dropout_add_ln_fwd=forward, dropout_add_ln_bwd=backward)


def _alone(*further: Any) -> None:
    if any(one is not None for one in further):
        raise CaptureError(
            "dropout_layer_norm with a residual, dropout, scales or subsets is one kernel that PyTorch has not"
        )
