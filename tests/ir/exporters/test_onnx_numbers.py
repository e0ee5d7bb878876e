"""An export computes what the step computes: operators by ONNX's reference, models by a runtime."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from echograph.frontend.pytorch.capture import capture, capture_mode  # noqa: E402
from echograph.frontend.pytorch.lower import lower  # noqa: E402
from echograph.frontend.pytorch.spec import StepSpec  # noqa: E402
from echograph.ir.builder import GraphBuilder  # noqa: E402
from echograph.ir.exporters.onnx import export  # noqa: E402
from echograph.ir.graph import StepGraph  # noqa: E402

Function = Callable[[Tensor], Tensor]


class _Module(nn.Module):
    """A function of a weight [4, 6]."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(24.0).reshape(4, 6) / 7 - 1.5)
        self.function = function

    def forward(self) -> Tensor:
        return self.function(self.weight)


def _written_part(x: Tensor) -> Tensor:
    """Writes into views of memory that is read after, through the whole and through another view."""
    whole = x * 2
    part = whole[1:3]
    whole[:, 2] = 5.0
    whole[0, 1:4] = x[1, 1:4]
    part.t()[0].mul_(3.0)
    return whole + part.sum(0)


def _permuted(x: Tensor) -> Tensor:
    order = torch.argsort(x[:, 0], descending=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(4)
    return x[order] * 2 + x[back]


def _counted(x: Tensor) -> Tensor:
    counts = torch.histc(x, bins=5, min=-1.0, max=1.0)
    return x.sum() * counts.cumsum(0)


CASES: dict[str, Function] = {
    "numbers": lambda x: (2 - x) * 0.5 / (x.abs() + 1) - x.add(x, alpha=3),
    "integers": lambda x: x * (torch.arange(6) // 4 - torch.arange(6) % 4),
    "comparisons": lambda x: torch.where((x > 0.2) | (x == 0) & (x <= 1), x, torch.zeros_like(x)),
    "masks": lambda x: x.masked_fill(x.ne(x.amax(1, keepdim=True)), 7.0),
    "powers": lambda x: x.pow(3) + 2.0**x + (x * x + 1).rsqrt(),
    "clamps": lambda x: x.clamp(-0.5, 0.75) + x.clamp(min=0.25),
    "activations": lambda x: F.silu(x) + F.gelu(x) + F.gelu(x, approximate="tanh") + F.leaky_relu(x, 0.2),
    "softmax": lambda x: F.softmax(x, 0) + F.log_softmax(x, -1),
    "reductions": lambda x: x.mean(0) + x.sum((0, 1)) + x.amin(0),
    "views": lambda x: x.t()[2:5, ::2].unsqueeze(1).expand(3, 4, 2).permute(2, 0, 1).flatten(),
    "parts": lambda x: torch.cat([p * i for i, p in enumerate(x.split([1, 3, 2], 1))], 1) + torch.stack(
        [*x.unbind(1)], 1
    ),
    "choices": lambda x: x.topk(3, 1).values.sum() + x.sort(0).values + x.argmax(1, keepdim=True),
    "lookups": lambda x: F.embedding(torch.arange(4).reshape(2, 2) % 3, x).sum(1)[:, :2],
    "gathers": lambda x: x.gather(1, torch.arange(8).reshape(4, 2) % 6),
    "pads": lambda x: F.pad(x, (1, 2, 0, 1), value=3.0).tril(1),
    "norms": lambda x: F.layer_norm(x, [6], eps=0.1) + F.layer_norm(x, [6], torch.ones(6), torch.ones(6), eps=0.2),
    "products": lambda x: torch.addmm(x[:, :4], x, x.t(), beta=0.5, alpha=2.0),
    "convolutions": lambda x: F.conv2d(x.reshape(1, 2, 3, 4), x[:2, :4].reshape(2, 1, 2, 2), padding=1, groups=2),
    "pools": lambda x: F.max_pool2d(x[None, None], 2, stride=1, padding=1) + F.avg_pool2d(x[None, None], 2, 1, 1),
    "written parts": _written_part,
    "permutations": _permuted,
    "counts": _counted,
    "ranges": lambda x: x + torch.arange(1, 13, 2) * torch.full((4, 1), 0.5),
    "losses": lambda x: F.cross_entropy(x, torch.arange(4), ignore_index=2),
}  # fmt: skip


def _told_apart(out: Tensor) -> Tensor:
    """A scalar in which every entry has a weight of its own."""
    return (out.flatten() * (torch.arange(out.numel()) + 1)).sum()


@pytest.mark.parametrize("name", CASES)
def test_operators_compute_what_pytorch_does(name: str, tmp_path: Path) -> None:
    with capture_mode():
        module = _Module(CASES[name])
    spec = StepSpec(dtype="fp32")
    done = export(lower(capture(module, (), _told_apart, spec), spec, name="case"), tmp_path / "case.onnx")
    assert "echograph" not in " ".join(done.notes), done.notes
    proto = onnx.load(tmp_path / "case.onnx")
    onnx.checker.check_model(proto, full_check=True)
    real = _Module(CASES[name])
    feeds = {"weight": real.weight.detach().numpy().copy()}
    expected = _told_apart(real()).detach().numpy()
    found = ReferenceEvaluator(proto).run([proto.graph.output[-1].name], feeds)[0]
    np.testing.assert_allclose(found, expected, rtol=2e-5)


def test_what_the_graph_does_not_say_is_not_guessed(tmp_path: Path) -> None:
    """A file of before, without arguments: the operators that need some stay what they are called."""
    with capture_mode():
        module = _Module(CASES["softmax"])
    spec = StepSpec(dtype="fp32")
    graph = lower(capture(module, (), torch.sum, spec), spec, name="case")
    builder = GraphBuilder(name="old")
    for tensor in graph.tensors:
        builder.tensor(tensor.name, tensor.shape, tensor.dtype, tensor.role, alias_of=tensor.alias_of)
    for op in graph.ops:
        builder.add(op, arguments="")
    done = export(builder.build(StepGraph), tmp_path / "old.onnx")
    assert "aten._softmax" in done.notes[-1]


SMALL: dict[str, dict[str, Any]] = {
    "bert": {
        "architectures": ["BertForPreTraining"], "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99, "max_position_embeddings": 32,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99,
        "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0,
    },
    "resnet": {
        "architectures": ["ResNetForImageClassification"], "embedding_size": 8, "hidden_sizes": [8, 16],
        "depths": [2, 2], "layer_type": "bottleneck", "num_labels": 10,
    },
    "vit": {
        "architectures": ["ViTForImageClassification"], "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32, "patch_size": 8, "num_labels": 10,
    },
    "t5": {
        "architectures": ["T5ForConditionalGeneration"], "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2,
        "num_heads": 4, "vocab_size": 99, "decoder_start_token_id": 0,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99, "num_local_experts": 4,
        "num_experts_per_tok": 2, "max_position_embeddings": 64,
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99, "max_position_embeddings": 64,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SMALL)
def test_a_runtime_computes_the_loss_and_the_scores_of_a_model(name: str, dtype: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install onnxruntime")
    pytest.importorskip("transformers")
    from echograph.models import build, from_config
    from echograph.workflow.compile import compile_entry

    if name == "mixtral" and dtype == "fp32":
        pytest.skip("PyTorch's product of experts is captured in bf16 alone")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": name, **SMALL[name]}))
    entry = from_config(path)
    graph = compile_entry(entry, StepSpec(dtype=dtype), batch_size=2, seq_len=32)
    export(graph, tmp_path / "model.onnx")
    proto = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(proto, full_check=True)
    scores = next(node.input[0] for node in proto.graph.node if node.op_type == "LogSoftmax")
    proto.graph.output.append(next(v for v in proto.graph.value_info if v.name == scores))
    torch.manual_seed(0)
    module, inputs, loss = build(entry, batch_size=2, seq_len=32)
    module.config._experts_implementation = "eager"
    if name != "resnet":  # nothing is dropped; a batch norm in training is one of the batch
        module.eval()
    owned = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(), *inputs.items()]
    values = {key: value.detach().clone().numpy() for key, value in owned}
    with torch.no_grad():
        out = module(**inputs)
    session = runtime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(None, {v.name: values[v.name] for v in proto.graph.input})
    lost = [float(value) for value in found if value.size == 1 and value.dtype == np.float32]
    assert lost[-1] == pytest.approx(float(loss(out)), rel=1e-5)
    logits = out.prediction_logits if name == "bert" else out.logits
    np.testing.assert_allclose(found[-1].reshape(logits.shape), logits.numpy(), atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["bert-base-uncased", "gpt2", "resnet-50", "vit-b-16", "t5-small", "mixtral-8x7b"]
)
def test_a_runtime_loads_the_models_of_the_zoo(name: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install onnxruntime")
    pytest.importorskip("transformers")
    from echograph.models import get_model
    from echograph.workflow.compile import compile_entry

    graph = compile_entry(get_model(name), StepSpec(), batch_size=2, seq_len=64)
    done = export(graph, tmp_path / "model.onnx")
    assert not any("nothing runs it" in note for note in done.notes)
    runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
