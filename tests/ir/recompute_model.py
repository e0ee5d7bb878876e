"""A small transformer whose layers, or whose attention, are run by a function of the test's choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echograph.frontend.pytorch.capture import capture, capture_mode
from echograph.frontend.pytorch.lower import lower
from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir.graph import StepGraph

WIDTH, HEADS, LAYERS = 64, 4, 4
BATCH, SEQUENCE = 2, 16
Run = Callable[..., Any]


def plainly(function: Run, *args: Any) -> Any:
    return function(*args)


class Core(nn.Module):
    """Attention written out, from queries, transposed keys and values to weighted values."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = 0.25 * torch.bmm(query, key)
        return torch.bmm(F.dropout(scores.softmax(-1), 0.1, training=True), value)


class Layer(nn.Module):
    """A pre-norm transformer layer with gated feed-forward: seven products, as in Llama."""

    def __init__(self, fused: bool, run_core: Run) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.core, self.fused, self.run_core = Core(), fused, run_core

    def attend(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = (batch, length, HEADS, WIDTH // HEADS)
        q, k, v = (project(x).view(heads).transpose(1, 2) for project in (self.q, self.k, self.v))
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            flat = (batch * HEADS, length, WIDTH // HEADS)
            q, k, v = (each.reshape(flat) for each in (q, k, v))
            mixed = self.run_core(self.core, q, k.transpose(1, 2), v)
            mixed = mixed.view(batch, HEADS, length, WIDTH // HEADS)
        return self.o(mixed.transpose(1, 2).reshape(batch, length, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.first(x))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self, fused: bool, run: tuple[Run, ...], run_core: Run = plainly) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, WIDTH)
        self.layers = nn.ModuleList(Layer(fused, run_core) for _ in range(LAYERS))
        self.run = run

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer, run in zip(self.layers, self.run, strict=True):
            x = run(layer, x)
        return x.float().mean()


def step(
    *,
    fused: bool = True,
    run: Run = plainly,
    every: int = 1,
    run_core: Run = plainly,
    sizes: tuple[int, int] = (BATCH, SEQUENCE),
) -> StepGraph:
    """The unfolded step of a model whose every so-many-th layer, or whose attention, is run by a function."""
    runs = tuple(run if index % every == every - 1 else plainly for index in range(LAYERS))
    with capture_mode():
        model = Model(fused, runs, run_core)
        tokens = torch.zeros(sizes, dtype=torch.int64)
    spec = StepSpec(dtype="bf16")
    return lower(capture(model, (tokens,), None, spec), spec, name="layers")
