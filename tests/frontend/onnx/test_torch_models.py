"""A model exported by PyTorch, without weights, is the step that PyTorch itself captures: products and FLOPs.

The exporter is PyTorch's own, so what is compared is what the nodes of ONNX mean.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import onnx_models as m
import pytest
import torch

from echograph.frontend.onnx.compile import compile_onnx
from echograph.frontend.onnx.model import OnnxModel, read
from echograph.frontend.pytorch.capture import capture, capture_mode
from echograph.frontend.pytorch.lower import lower
from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir.graph import StepGraph
from echograph.ir.passes.fold import Fold
from echograph.models import ModelEntry, build, get_model
from echograph.workflow.compile import compile_entry

pytest.importorskip("onnxscript")
pytest.importorskip("transformers")

SPEC = StepSpec(dtype="fp32")
SMALL = {
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 100},
    "bert-base-uncased": {
        "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64,
        "vocab_size": 100,
    },
    "resnet-50": {"depths": [1, 2], "hidden_sizes": [16, 32], "embedding_size": 8, "num_labels": 10},
    "llama-3.2-1b": {
        "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "intermediate_size": 64, "vocab_size": 100,
    },
}  # fmt: skip


def _entry(name: str, small: bool) -> ModelEntry:
    entry = get_model(name)
    return dataclasses.replace(entry, config={**entry.config, **SMALL[name]}) if small else entry


def _sizes(entry: ModelEntry) -> dict[str, Any]:
    eager = {} if "resnet" in entry.name else {"attention": "eager"}
    return {"batch_size": 2, "seq_len": 64, **eager}


def _export(entry: ModelEntry, path: Path) -> OnnxModel:
    """The model with its loss, weights as inputs that have shapes alone."""
    with capture_mode() as mode:
        module, inputs, _ = build(entry, **_sizes(entry))
    with mode:
        program = torch.onnx.export(module.eval(), (), kwargs=inputs, dynamo=True, optimize=False, verbose=False)
    assert program is not None
    program.save(path, include_initializers=False, keep_initializers_as_inputs=True)
    assert path.stat().st_size < 8 * 2**20
    return read(path)


def _same(name: str, folder: Path, *, small: bool) -> None:
    entry = _entry(name, small)
    model = _export(entry, folder / "model.onnx")
    captured: StepGraph = compile_entry(entry, SPEC, **_sizes(entry))
    step, loss, _ = compile_onnx(model, SPEC, train=True)
    forward, *_ = compile_onnx(model, SPEC)
    assert loss.startswith("output")
    assert m.products(step) == m.products(captured)
    assert m.flops(step) == m.flops(captured)
    assert m.products(forward) == m.forward(m.products(captured))
    assert m.flops(forward)["FORWARD"] == m.flops(captured)["FORWARD"] == sum(m.flops(forward).values())
    assert forward.workload.parameters == step.workload.parameters == captured.workload.parameters
    assert _layers(step) == _layers(captured)


def _layers(graph: StepGraph) -> dict[str, int]:
    return {b.name: len(b.instances) for b in graph.blocks}


class Layer(torch.nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        y = torch.softmax(y @ y.transpose(1, 2), -1) @ y
        return x + self.down(torch.nn.functional.gelu(self.up(y)))


class Tower(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Linear(16, 16)
        self.layers = torch.nn.Sequential(Layer(), Layer(), Layer())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(self.stem(x)).sum()
        return out


def test_a_tower_of_layers(tmp_path: Path) -> None:
    with capture_mode() as mode:
        module, x = Tower(), torch.empty(2, 8, 16)
    with mode:
        program = torch.onnx.export(module.eval(), (x,), dynamo=True, optimize=False, verbose=False)
    assert program is not None
    program.save(tmp_path / "m.onnx", include_initializers=False, keep_initializers_as_inputs=True)
    step, *_ = compile_onnx(read(tmp_path / "m.onnx"), SPEC, train=True)
    captured = Fold()(lower(capture(module, (x,), None, SPEC), SPEC, name="tower"))
    assert m.products(step) == m.products(captured)
    assert m.flops(step) == m.flops(captured)
    assert _layers(step) == _layers(captured) == {"main": 1, "layers": 2}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_small(name: str, tmp_path: Path) -> None:
    _same(name, tmp_path, small=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert-base-uncased", "resnet-50"])
def test_at_full_size(name: str, tmp_path: Path) -> None:
    _same(name, tmp_path, small=False)
