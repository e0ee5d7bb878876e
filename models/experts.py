"""Experts of transformers that are written as a loop over those that tokens chose: as grouped products instead.

Most of its classes run either way, and are captured as trainers run them: one grouped product for all experts.
Some are written as the loop alone, whose length values decide; those of them whose weights are one tensor
[experts, out, in] for each product run as the others do.

LongCat-Flash (Meituan 2025, arXiv:2509.01322, section 2.1) has experts beside them that give back what they are
given: of the choices, taken to be spread evenly, those of such experts take no product.
"""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations import moe

_TAKEN = ["hidden_states", "top_k_index", "top_k_weights"]


def group_experts(module: nn.Module) -> None:
    """Makes experts of a module, that would loop over what tokens chose, run grouped products; in place."""
    for part in module.modules():
        weights = [getattr(part, name, None) for name in ("gate_up_proj", "down_proj")]
        looping = not hasattr(part, "has_gate") and list(inspect.signature(part.forward).parameters) == _TAKEN
        if looping and all(isinstance(weight, nn.Parameter) and weight.dim() == 3 for weight in weights):
            part.forward = MethodType(_grouped, part)


def _grouped(part: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What experts make of tokens [tokens, width], each of which chose some and weights them [tokens, choices]."""
    experts, total = len(part.down_proj), len(part.gate_up_proj)
    choices = top_k_index.numel()
    order = torch.sort(top_k_index.reshape(-1)).indices
    rows = hidden_states[order // top_k_index.shape[-1]]
    taken = choices * experts // total
    counts = torch.histc(top_k_index.reshape(-1)[:taken].float(), bins=total, min=0, max=total - 1)
    offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
    gate_up = moe._grouped_linear(rows[:taken], part.gate_up_proj, offsets)
    made = moe._grouped_linear(_gated(part, gate_up), part.down_proj, offsets[:experts])
    if taken < choices:
        made = torch.cat([made, rows[taken:]])
    made = made * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(choices, device=order.device)
    of_tokens: Tensor = made[back].view(*top_k_index.shape, -1).sum(dim=1)
    return of_tokens.to(hidden_states.dtype)


def _gated(part: Any, gate_up: Tensor) -> Tensor:
    if hasattr(part, "_apply_gate"):
        gated: Tensor = part._apply_gate(gate_up)
        return gated
    gate, up = gate_up.chunk(2, dim=-1)
    made: Tensor = part.act_fn(gate) * up
    return made
