"""Low-rank adapters: linear layers keep their weights, and small matrices beside them are trained."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from echograph.errors import UsageError


class AdaptedLinear(nn.Module):
    """A linear layer whose weights are frozen, and what two matrices of a low rank add to it.

    y = W x + (alpha / rank) B A x, of which A and B are trained (Hu et al. 2021, arXiv:2106.09685, section 4.1);
    alpha is the rank here, which costs what any does.

    Args:
        linear: the layer.
        rank: rows of A, columns of B.
    """

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.lora_a = nn.Linear(linear.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The layer's output with the adapter's."""
        added: torch.Tensor = self.lora_b(self.lora_a(input))
        return nn.functional.linear(input, self.weight, self.bias) + added


def add_adapters(module: nn.Module, rank: int, targets: Collection[str]) -> list[str]:
    """Freezes a module and puts adapters beside its linear layers.

    Args:
        module: changed in place.
        rank: of the adapters.
        targets: the last names of the layers that get one.

    Returns:
        The names that no linear layer has.

    Raises:
        UsageError: no linear layer has one of these names.
    """
    found = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and name in targets
    ]
    if not found:
        linear = sorted({n.rpartition(".")[2] for n, m in module.named_modules() if isinstance(m, nn.Linear)})
        raise UsageError(
            f"--lora-targets {','.join(targets)[:60]}: no linear layer of that name: choose of {', '.join(linear)}"
        )
    module.requires_grad_(False)
    for parent, name, child in found:
        setattr(parent, name, AdaptedLinear(child, rank))
    return sorted({*targets} - {name for _, name, _ in found})
