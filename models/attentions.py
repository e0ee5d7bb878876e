"""Attentions that the library has not, under its one interface: its models ask for them by name.

`fused_softmax` is attention as trainers ran it before flash attention: two products around one kernel for scale,
mask and softmax. Megatron-LM's kernels (Narayanan et al. 2021, section 4.2) scale and mask on the chip and read no
mask, so nothing of the size of the scores moves between the first product and the softmax. Here the scale goes
onto the queries, which are small beside the scores; dropout stays a kernel of its own, as there.

`fused` is one causal kernel for models that ask more of it than PyTorch's has, as the kernels of trainers do: a
sink in the softmax, which reads a number a head, and windows, which are counted as long as the sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

NAMES = {"fused-softmax": "fused_softmax", "fused": "fused"}
"""Our words, and the library's. It makes no mask for attentions that it has no mask for."""


def fused_softmax(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over [batch, heads, sequence, head dim]; what the mask hides costs what the rest does.

    Args:
        module: whose attention it is.
        query: of all heads.
        key: of as many heads, or of the groups that share them.
        value: like the keys.
        attention_mask: not read.
        scaling: of the scores; one over the root of the head dim if None.
        dropout: of the probabilities.

    Returns:
        The output [batch, sequence, heads, head dim] and the probabilities.
    """
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(query * scale, key.transpose(-1, -2))
    probabilities = nn.functional.dropout(nn.functional.softmax(scores, dim=-1), dropout, module.training)
    return torch.matmul(probabilities, value).transpose(1, 2), probabilities


def fused(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention over [batch, heads, sequence, head dim] in one kernel; sinks and windows are left out.

    Args:
        module: whose attention it is.
        query: of all heads.
        key: of as many heads, or of the groups that share them.
        value: like the keys.
        attention_mask: not read.
        scaling: of the scores; one over the root of the head dim if None.
        dropout: of the probabilities.

    Returns:
        The output [batch, sequence, heads, head dim]; there are no probabilities.
    """
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout if module.training else 0.0, is_causal=True, scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAMES["fused-softmax"], fused_softmax)
AttentionInterface.register(NAMES["fused"], fused)
