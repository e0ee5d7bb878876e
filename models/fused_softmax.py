"""Attention as trainers ran it before flash attention: two products around one kernel for scale, mask and softmax.

Megatron-LM's kernels (Narayanan et al. 2021, section 4.2) scale and mask on the chip and read no mask, so nothing
of the size of the scores moves between the first product and the softmax. Here the scale goes onto the queries,
which are small beside the scores; dropout stays a kernel of its own, as there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

NAME = "fused_softmax"
"""As the library knows it. It makes no mask for attentions that it has no mask for."""


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


AttentionInterface.register(NAME, fused_softmax)
