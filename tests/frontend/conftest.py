"""What the frontend's tests share: small models, and one way to capture them."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch")

from echograph.frontend.pytorch.capture import capture, capture_mode  # noqa: E402
from echograph.frontend.pytorch.spec import StepSpec  # noqa: E402

Build = Callable[[], tuple[Any, ...]]
_DEPTH_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers")


def _capture(build: Build, *, producer: str = "recorder", **spec: Any) -> Any:
    with capture_mode():
        module, inputs, *loss = build()
    return capture(module, inputs, loss[0] if loss else None, StepSpec(**spec), producer=producer)


def _cut(name: str, layers: int | None = 2, **options: Any) -> Build:
    from echograph.models import build, get_model

    entry = get_model(name)
    if layers is not None:
        cut = {k: layers for k in _DEPTH_KEYS if k in entry.config}
        entry = dataclasses.replace(entry, config={**entry.config, **cut})
    return lambda: build(entry, **options)


@pytest.fixture
def capture_step() -> Callable[..., Any]:
    """`capture_step(build, producer=..., **spec)`: builds under the capture mode and captures."""
    return _capture


@pytest.fixture
def zoo() -> Callable[..., Build]:
    """`zoo(name, layers=2, **build options)`: a builder of a model of the zoo, cut to a few layers."""
    return _cut


@pytest.fixture(scope="session")
def captured() -> Callable[..., Any]:
    """`captured(name, producer)`: two layers of a model of the zoo, gradients clipped; each made once."""

    @cache
    def make(name: str, producer: str = "recorder") -> Any:
        sizes = {} if name.startswith(("resnet", "vit", "vgg")) else {"seq_len": 64}
        return _capture(_cut(name, batch_size=2, **sizes), producer=producer, clip_grad_norm=1.0)

    return make


class Mlp(torch.nn.Module):
    """Embedding, layer norm, two linear layers in a block: every operator runs on a CPU too."""

    def __init__(self, vocabulary: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(vocabulary, width)
        self.block = torch.nn.Sequential(
            torch.nn.LayerNorm(width),
            torch.nn.Linear(width, 2 * width),
            torch.nn.GELU(),
            torch.nn.Linear(2 * width, width),
        )
        self.head = torch.nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        x = x + self.block(x)
        return self.head(x)


def mlp_loss(logits: Any) -> Any:
    return -torch.log_softmax(logits, -1)[..., 0].mean()


@pytest.fixture
def build_mlp() -> Build:
    return lambda: (Mlp(), (torch.zeros(2, 5, dtype=torch.long),), mlp_loss)
