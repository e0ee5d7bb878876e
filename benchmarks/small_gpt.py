"""A small GPT as nanoGPT writes it, without dropout and with its attention spelled out; trained on random tokens.

python benchmarks/small_gpt.py LAYERS WIDTH HEADS BATCH TOKENS VOCABULARY [STEPS]

With STEPS it trains as many for each line that it is given, and prints the processor time of each in seconds, a
line each; without, it trains three.
"""

from __future__ import annotations

import math
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

LAYERS, WIDTH, HEADS, BATCH, TOKENS, VOCABULARY = map(int, sys.argv[1:7])


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("bias", torch.tril(torch.ones(TOKENS, TOKENS)).view(1, 1, TOKENS, TOKENS))

    def forward(self, x: Tensor) -> Tensor:
        """Of [batch, tokens, width]."""
        batch, tokens, width = x.size()
        q, k, v = self.c_attn(x).split(WIDTH, dim=2)
        k = k.view(batch, tokens, HEADS, width // HEADS).transpose(1, 2)
        q = q.view(batch, tokens, HEADS, width // HEADS).transpose(1, 2)
        v = v.view(batch, tokens, HEADS, width // HEADS).transpose(1, 2)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.bias[:, :, :tokens, :tokens] == 0, float("-inf"))
        y = functional.softmax(scores, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, tokens, width))


class Block(nn.Module):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Of [batch, tokens, width]."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Embeddings, layers, head and loss."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, given: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        x = self.wte(given) + self.wpe(torch.arange(given.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


torch.manual_seed(0)
torch.set_num_threads(1)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
given, targets = (torch.randint(0, VOCABULARY, (BATCH, TOKENS)) for _ in range(2))


def train(steps: int) -> list[float]:
    """The processor time of each step in seconds."""
    times = []
    for _ in range(steps):
        began = time.process_time()
        loss = model(given, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        times.append(time.process_time() - began)
    return times


if len(sys.argv) > 7:
    for _ in sys.stdin:
        print(*train(int(sys.argv[7])), sep="\n", flush=True)
else:
    train(3)
