"""A model of one's own: `build` is what `echoc compile --model model.py:build` calls.

`python model.py model.onnx` writes its forward pass as ONNX, the batch left open (needs the [onnx] extra).
"""

import sys

import torch
from torch import nn


class Block(nn.Module):
    """A feed-forward block with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, width] -> [batch, width]."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def build():
    """The module, its inputs, and a loss of what it returns."""
    blocks = nn.Sequential(*(Block(256) for _ in range(4)), nn.Linear(256, 10))
    return blocks, (torch.randn(32, 256),), lambda logits: logits.float().logsumexp(-1).mean()


if __name__ == "__main__":
    model, inputs, _ = build()
    torch.onnx.export(
        model.eval(), inputs, sys.argv[1], input_names=["x"], dynamic_shapes=({0: "batch"},), dynamo=True
    )
