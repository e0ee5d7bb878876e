"""VGG (Simonyan and Zisserman 2015, arXiv:1409.1556): 3x3 convolutions, five poolings, three linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

POOLED_SIDE = 7


class VggOutput(NamedTuple):
    """What a forward pass returns: scalar loss and logits (batch, labels)."""

    loss: torch.Tensor
    logits: torch.Tensor


class Vgg(nn.Module):
    """The network and its cross-entropy loss.

    Args:
        blocks: convolutions of each block; a block ends in a max pooling that halves the image.
        widths: channels of each block.
        classifier_width: width of the two hidden linear layers.
        num_channels: channels of the image.
        num_labels: classes.
        dropout: probability behind each hidden linear layer.
    """

    def __init__(
        self,
        *,
        blocks: list[int],
        widths: list[int],
        classifier_width: int,
        num_channels: int,
        num_labels: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_channels=num_channels, num_labels=num_labels)
        channels = [num_channels, *widths]
        self.features = nn.Sequential(
            *(_block(count, channels[i], channels[i + 1]) for i, count in enumerate(blocks))
        )
        self.pool = nn.AdaptiveAvgPool2d(POOLED_SIDE)
        self.classifier = nn.Sequential(
            *_hidden(widths[-1] * POOLED_SIDE**2, classifier_width, dropout),
            *_hidden(classifier_width, classifier_width, dropout),
            nn.Linear(classifier_width, num_labels),
        )

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> VggOutput:
        """Classifies images.

        Args:
            pixel_values: (batch, num_channels, side, side), side at least 32.
            labels: (batch,) class indices.
        """
        pooled = self.pool(self.features(pixel_values))
        logits = self.classifier(torch.flatten(pooled, 1))
        return VggOutput(nn.functional.cross_entropy(logits, labels), logits)


def vgg(config: Mapping[str, Any]) -> Vgg:
    """Builds the network from an entry's configuration, whose keys are the arguments of `Vgg`."""
    return Vgg(**config)


def _block(convolutions: int, channels_in: int, channels_out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(convolutions):
        channels = channels_in if i == 0 else channels_out
        layers += [nn.Conv2d(channels, channels_out, kernel_size=3, padding=1), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.MaxPool2d(kernel_size=2))


def _hidden(width_in: int, width_out: int, dropout: float) -> tuple[nn.Module, ...]:
    return nn.Linear(width_in, width_out), nn.ReLU(inplace=True), nn.Dropout(dropout)
