"""Captures the small steps in `graphs/`: `python tests/golden/jobs/make_graphs.py [NAME ...]`; needs PyTorch.

They are of models that are written in other ways than those in `../predictions/graphs/`: experts with biases,
latent attention, attention that is written out, norms for clipping, loss scaling, recomputation by the model.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir.graph import StepGraph
from echograph.ir.serde import save
from echograph.models import get_model
from echograph.workflow.compile import compile as compile_model
from echograph.workflow.compile import compile_entry

GRAPHS = Path(__file__).parent / "graphs"
SMALL = {
    "hidden_size": 64, "vocab_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 96, "moe_intermediate_size": 96, "num_hidden_layers": 4,
}  # fmt: skip
CLIPPED, SCALED = StepSpec(clip_grad_norm=1.0), StepSpec(dtype="fp16", clip_grad_norm=1.0)
STEPS: dict[str, tuple[str, dict[str, int], StepSpec, str | None]] = {
    "gpt2-fp16": ("gpt2", {"n_layer": 5}, SCALED, None),
    "llama-clip": ("llama-3.2-1b", {"num_hidden_layers": 6}, CLIPPED, None),
    "llama-recompute": ("llama-3.2-1b", {"num_hidden_layers": 4}, StepSpec(recompute=True), None),
    "bert-written": ("bert-base-uncased", {"num_hidden_layers": 4}, StepSpec(dtype="fp32"), "eager"),
    "bloom": ("bloom-7b1", {"num_hidden_layers": 4}, StepSpec(optimizer="sgd"), None),
    "phi": ("phi-2", {"num_hidden_layers": 4}, StepSpec(), None),
    "gpt-oss": ("gpt-oss-20b", {**SMALL, "num_local_experts": 8, "head_dim": 16}, CLIPPED, "eager"),
    "qwen-moe": (
        "qwen3-30b-a3b", {**SMALL, "num_experts": 16, "num_experts_per_tok": 4, "head_dim": 16}, StepSpec(), None,
    ),
    "deepseek": (
        "deepseek-v3",
        {
            **SMALL, "n_routed_experts": 16, "n_group": 4, "topk_group": 2, "q_lora_rank": 32, "kv_lora_rank": 32,
            "num_hidden_layers": 7,
        },
        CLIPPED,
        "eager",
    ),
}  # fmt: skip
MODELS = """
import torch
from torch import nn
F = nn.functional

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(64, 8, bias=False)
        self.first = nn.Parameter(torch.zeros(8, 64, 96))
        self.second = nn.Parameter(torch.zeros(8, 96, 64))

    def forward(self, tokens):
        weight, chosen = self.router(tokens).softmax(-1).topk(2)
        order = chosen.flatten().argsort()
        ends = torch.nn.functional.one_hot(chosen.flatten(), 8).sum(0).cumsum(0).int()
        rows = torch._grouped_mm(tokens[order // 2], self.first, ends).relu()
        rows = torch._grouped_mm(rows * weight.flatten()[order, None], self.second, ends)
        return tokens.index_add(0, order // 2, rows)

def experts():
    return nn.Sequential(Experts(), Experts()), (torch.zeros(64, 64, dtype=torch.bfloat16),), lambda y: y.sum()

class Watched(Experts):
    def forward(self, tokens):
        return super().forward(tokens) * self.first.transpose(1, 2).amax()

def watched():
    return Watched(), (torch.zeros(64, 64, dtype=torch.bfloat16),), lambda y: y.sum()

class InPlace(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.RMSNorm(width)
        self.alpha, self.beta = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.gate = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.slim = nn.Linear(4 * width, width, bias=False)
        self.register_buffer("seen", torch.zeros(4 * width))

    def forward(self, x):
        batch, positions, width = x.shape
        parts = self.alpha(self.first(x)).chunk(3, -1)
        q, k, v = (y.view(batch, positions, self.heads, -1).transpose(1, 2) for y in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.beta(y.transpose(1, 2).reshape(batch, positions, width)).add_(x)
        y = self.second(x)
        h = F.silu(self.wide(y)).mul_(0.5)
        h = (torch.zeros_like(h).add_(h) * self.gate(y)).add_(self.seen)
        h = torch.empty_like(h).copy_(h).masked_fill_(h > 1, 0)
        return self.slim(h).add_(x)

class Model(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.words, self.out = nn.Embedding(512, width), nn.Linear(width, 512)
        self.body = nn.Sequential(*(InPlace(width, 4) for _ in range(4)))

    def forward(self, ids, labels):
        x = self.body(self.words(ids) + 1)
        return F.cross_entropy(self.out(x).view(-1, 512), labels.view(-1))

def in_place():
    ids = torch.zeros(2, 32, dtype=torch.long)
    return Model(), {"ids": ids, "labels": ids.clone()}
"""
OWN = {"experts": "experts", "experts-watched": "watched", "in-place": "in_place"}


def captured(name: str) -> StepGraph:
    """The step of a name."""
    if name in OWN:
        with TemporaryDirectory() as folder:
            model = Path(folder) / "models.py"
            model.write_text(MODELS)
            return compile_model(f"{model}:{OWN[name]}", StepSpec())
    model_name, changes, spec, attention = STEPS[name]
    changed: dict[str, Any] = dict(changes)
    entry = get_model(model_name).with_config(**changed)
    return compile_entry(entry, spec, batch_size=2, seq_len=64, attention=attention)


if __name__ == "__main__":
    GRAPHS.mkdir(exist_ok=True)
    for each in sys.argv[1:] or [*STEPS, *OWN]:
        save(captured(each), GRAPHS / f"{each}.pb")
        print(each, (GRAPHS / f"{each}.pb").stat().st_size)
