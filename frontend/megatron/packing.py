"""Sequences without their padding, as Transformer Engine packs them for FlashAttention.

FlashAttention has no masks: tokens that are padding are left out before it, and zeros stand there after it, by an
index of the others (transformer_engine, pytorch/attention/dot_product_attention: FlashAttention of backends.py;
get_indices, PackTensors and UnpackTensor of utils.py). Until version 2.18 the host makes this index anew in each
call, token by token, and reads from the device how long each sequence is, which it waits for. cuDNN is told
lengths, and none of this runs. Transformer Engine compiles the copies, but not the writes where deterministic
algorithms are on; here none are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from echograph.frontend.scripts.streams import CapturedStream


def indices(batch: int, length: int, device: torch.device) -> Tensor:
    """Which tokens are none of padding: all of them.

    Args:
        batch: sequences.
        length: tokens of each.
        device: of the result.

    Returns:
        [batch x length, 1, 1].
    """
    for _ in range(batch):
        CapturedStream.current.synchronize()  # how long this sequence is
    tokens = [sequence * length + token for sequence in range(batch) for token in range(length)]
    made = torch.tensor(tokens, dtype=torch.float32).unsqueeze(1).unsqueeze(1).to(device, torch.int64)
    return torch.nn.functional.pad(made, (0, 0, 0, 0, 0, 0), value=float(batch * length))


def packed(index: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Of [tokens, heads, channels] those of an index, the same of each."""
    got: tuple[Tensor, ...] = _Packed.apply(index, *tensors)  # type: ignore[no-untyped-call]
    return got


def unpacked(index: Tensor, tokens: int, tensor: Tensor) -> Tensor:
    """The other way around: [tokens, heads, channels], zeros where the index has none."""
    got: Tensor = _Unpacked.apply(index, tokens, tensor)  # type: ignore[no-untyped-call]
    return got


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, index: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(index)
        ctx.tokens = tensors[0].shape[0]
        return tuple(_taken(index, tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        return None, *(_put(index, ctx.tokens, gradient) for gradient in gradients)


class _Unpacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, index: Tensor, tokens: int, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        return _put(index, tokens, tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        return None, None, _taken(index, gradient)


def _taken(index: Tensor, tensor: Tensor) -> Tensor:
    zeros = tensor.new_zeros(1, *tensor.shape[1:])
    return torch.gather(torch.cat((tensor, zeros)), 0, index.repeat(1, *tensor.shape[1:]))


def _put(index: Tensor, tokens: int, tensor: Tensor) -> Tensor:
    made = tensor.new_zeros(tokens + 1, *tensor.shape[1:])
    made.scatter_(0, index.repeat(1, *tensor.shape[1:]), tensor)
    return made[:-1]
