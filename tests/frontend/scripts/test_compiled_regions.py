"""What a script compiles is kernels of its graph, forward and backward; what it does not, stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from echograph.frontend.pytorch.capture import plain_attention_masks, seen_by_a_compiler
from echograph.frontend.scripts.capture import capture_script
from echograph.frontend.scripts.run import Script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World
from echograph.ir.graph import JobGraph
from echograph.ir.types import Attention, Compute, Phase

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional

{setup}

def gate(x, bias):
    x = x + bias
    return x * torch.tanh(0.8 * x)

{gate}

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.bias = nn.Parameter(torch.zeros(64))

    def forward(self, x):
        return self.down(gate(self.up(x), self.bias))

model = Layer().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(32, 64, device="cuda")
    {attend}
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def captured(folder: Path, *, setup: str = "", gate: str = "", attend: str = "") -> JobGraph:
    path = folder / "train.py"
    path.write_text(SCRIPT.format(setup=setup, gate=gate, attend=attend))
    graph = capture_script(Script(path=path), World(size=1), TorchAdapter()).graph
    assert isinstance(graph, JobGraph)
    return graph


def names(job: JobGraph, phase: Phase) -> list[str]:
    chosen = (op for op in map(job.ops.__getitem__, range(len(job.ops))) if isinstance(op, Compute))
    return [op.name for op in chosen if op.phase == phase and (op.bytes_read or op.bytes_written)]


def elementwise(job: JobGraph) -> list[str]:
    """Kernels of the layer's forward pass beside its products, in order."""
    beside = ("mm", "randn", "sum", "ones_like")
    return [name for name in names(job, Phase.FORWARD) if not name.endswith(beside)]


def test_a_compiled_function_is_a_kernel_forward_and_backward(tmp_path: Path) -> None:
    job = captured(tmp_path, gate="gate = torch.compile(gate)")
    assert job.workload.stack == "inductor"
    assert elementwise(job) == ["compiled.mul"]
    fused = [name for name in names(job, Phase.BACKWARD) if name.startswith("compiled.")]
    assert 1 <= len(fused) <= 2, "the gradients of x and, summed up in another kernel perhaps, of the bias"
    assert not {"aten.tanh_backward", "aten.mul"} & set(names(job, Phase.BACKWARD))


def test_without_it_operators_are_those_of_the_script(tmp_path: Path) -> None:
    job = captured(tmp_path)
    assert job.workload.stack == "eager"
    assert elementwise(job) == ["aten.add", "aten.mul", "aten.tanh", "aten.mul"]


def test_a_function_with_its_own_backward_pass_says_what_that_runs(tmp_path: Path) -> None:
    """As megatron-core's: what autograd does besides, here the sum for the bias, is no part of a kernel."""
    own = """
compiled = torch.compile(gate)

class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias):
        return compiled(x, bias)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient

gate = Gate.apply
"""
    job = captured(tmp_path, gate=own)
    assert "compiled.mul" in names(job, Phase.FORWARD)
    assert "aten.sum" in names(job, Phase.BACKWARD)
    assert not [name for name in names(job, Phase.BACKWARD) if name.startswith("compiled.")]


CHECKPOINTED = """
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

class Checkpointed(nn.Module):
    def __init__(self, of):
        super().__init__()
        self.of = of

    def forward(self, x):
        with set_checkpoint_early_stop(False):
            return checkpoint(self.of, x, use_reentrant=False)
"""


@pytest.mark.parametrize("compiles", [False, True])
def test_a_checkpoint_within_what_is_compiled_runs_again_what_is_read(tmp_path: Path, compiles: bool) -> None:
    """As torchtitan's: each layer is checkpointed and then compiled, so that its last product is not run again."""
    wrapped = "Checkpointed(Layer())"
    made = f"torch.compile({wrapped})" if compiles else wrapped
    attend = f"if _ == 0: model = {made}.cuda(); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
    again = names(captured(tmp_path, gate=CHECKPOINTED, attend=attend), Phase.RECOMPUTE)
    assert again.count("aten.mm") == (1 if compiles else 2)
    assert any(name.startswith("compiled.") for name in again) is compiles
    assert ("aten.tanh" in again) is not compiles


@pytest.mark.parametrize("fixed", [False, True])
def test_deterministic_algorithms_fill_memory_and_fix_an_order(tmp_path: Path, fixed: bool) -> None:
    attend = (
        "x = functional.scaled_dot_product_attention(*[x.view(1, 1, 32, 64).bfloat16()] * 3).view(32, 64).float()"
    )
    setup = f"torch.use_deterministic_algorithms({fixed})"
    job = captured(tmp_path, setup=setup, attend=attend)
    orders = {value.deterministic for value in job.ops.attribute_values if isinstance(value, Attention)}
    assert orders == {fixed}
    assert ("aten.fill_" in names(job, Phase.FORWARD)) is fixed
    assert not torch.are_deterministic_algorithms_enabled(), "the next script has its own"


def test_a_compiler_computes_again_what_is_cheaper_so(tmp_path: Path) -> None:
    """What only backward reads of a gate is made of what it has read; a function of its own says what it keeps."""
    job = captured(tmp_path, gate="gate = torch.compile(gate)")
    (gate,) = [op for op in job.ops if op.name == "compiled.mul" and op.phase == Phase.FORWARD]
    assert [job.tensors[i].shape for i in gate.outputs] == [(32, 64)]


LANGUAGE_MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(1000, 64), nn.Linear(64, 1000)

    def forward(self, tokens):
        logits = self.head(self.embed(tokens))
        return nn.functional.cross_entropy({logits}, tokens), logits

model = torch.compile(Model().cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    tokens = torch.zeros(256, dtype=torch.long, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss, logits = model(tokens)
    {then}
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("logits", ["logits", "logits.float()"])
@pytest.mark.parametrize("used", [False, True])
def test_a_compiled_loss_is_a_kernel_each_way(tmp_path: Path, logits: str, used: bool) -> None:
    """And logits that a script makes nothing of have a gradient of zeros, as AOTAutograd is given it."""
    path = tmp_path / "train.py"
    path.write_text(
        LANGUAGE_MODEL.format(logits=logits, then="loss = loss + logits.sum()" if used else "del logits")
    )
    job = capture_script(Script(path=path), World(size=1), TorchAdapter()).graph
    assert isinstance(job, JobGraph)
    forward, backward = names(job, Phase.FORWARD), names(job, Phase.BACKWARD)
    assert forward.count("fused.cross_entropy") == backward.count("fused.cross_entropy_backward") == 1
    assert not [name for name in forward + backward if "softmax" in name or "nll" in name]
    zeros = [op for op in job.ops if op.name == "aten.zeros_like" and op.phase == Phase.BACKWARD]
    assert [job.tensors[op.outputs[0]].shape for op in zeros] == ([] if used else [(256, 1000)])


def test_a_mask_is_what_a_compiler_sees_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers leaves a causal mask out where it can look at positions, and builds it where it cannot."""
    masking = pytest.importorskip("transformers.masking_utils")
    monkeypatch.setattr(masking, "find_packed_sequence_indices", lambda _: "packed")
    with plain_attention_masks():
        assert masking.find_packed_sequence_indices(None) is None
        with seen_by_a_compiler():
            assert masking.find_packed_sequence_indices(None) == "packed"
        assert masking.find_packed_sequence_indices(None) is None
    assert masking.find_packed_sequence_indices(None) == "packed"
