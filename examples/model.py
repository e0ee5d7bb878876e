"""A model of one's own: `build` is what `echoc compile --model model.py:build` calls.

Run, it writes the forward pass as ONNX, its batch left open: `python model.py model.onnx` (needs the [onnx] extra).
"""

import sys

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def build():
    blocks = nn.Sequential(*(Block(256) for _ in range(4)), nn.Linear(256, 10))
    return blocks, (torch.randn(32, 256),), lambda logits: logits.float().logsumexp(-1).mean()


if __name__ == "__main__":
    model, inputs, _ = build()
    torch.onnx.export(
        model.eval(), inputs, sys.argv[1], input_names=["x"], dynamic_shapes=({0: "batch"},), dynamo=True
    )
