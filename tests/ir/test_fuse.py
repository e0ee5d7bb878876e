from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Literal

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")
pytest.importorskip("transformers", reason="needs the [torch] extra")

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "e2e")]

import torch
from families import shallow
from torch import Tensor, nn

from echograph.frontend.pytorch.capture import capture, capture_mode
from echograph.frontend.pytorch.lower import lower
from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir.graph import Graph, StepGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fully_shard import FullyShard
from echograph.ir.passes.fuse import Fuse
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.passes.precision import Precision
from echograph.ir.passes.recompute import Recompute
from echograph.ir.types import Compute, DType, Op, Phase
from echograph.ir.unfold import unfold
from echograph.models import get_model
from echograph.workflow.compile import compile_entry

FAMILIES = ["gpt2", "llama-3-8b", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gemma-2-2b", "t5-small"))]


@cache
def captured(name: str) -> StepGraph:
    return compile_entry(shallow(get_model(name), 4), StepSpec(), batch_size=2, seq_len=64)


def ran(graph: Graph) -> list[Op]:
    calls = [call for program in graph.programs for call in program.calls.tolist()]
    return [graph.ops[row] for _, begin, end, _, _ in calls for row in range(begin, end)]


def moved(graph: Graph) -> int:
    return sum(getattr(op, "bytes_read", 0) + getattr(op, "bytes_written", 0) for op in ran(graph))


@pytest.mark.parametrize("name", FAMILIES)
def test_only_elementwise_work_and_traffic_go(name: str) -> None:
    graph = Recompute(policy="full")(captured(name))
    ours = Fuse()(graph)
    before, after = Counter(op.name for op in ran(graph)), Counter(op.name for op in ran(ours))
    gone = {key for key in before if after[key] < before[key] and key != "aten.view"}
    assert not {key for key in gone if "mm" in key or "attention" in key}
    assert {key for key in after if after[key] > before[key]} == {k for k in after if k.startswith("compiled.")}
    norms = ("native_layer_norm", "native_layer_norm_backward")
    assert all(after[f"compiled.{name}"] == before[f"aten.{name}"] for name in norms)
    assert sum(getattr(op, "flops", 0) for op in ran(ours)) == sum(getattr(op, "flops", 0) for op in ran(graph))
    assert moved(ours) < moved(graph)
    assert [len(block.instances) for block in ours.blocks] == [len(block.instances) for block in graph.blocks]


@pytest.mark.parametrize("name", FAMILIES)
def test_results_that_others_read_are_made(name: str) -> None:
    """Each product, attention and optimizer operation reads and makes tensors of the same shapes."""

    def kinds(graph: StepGraph) -> Counter[object]:
        flat = unfold(graph)
        left = [op for op in flat.ops if "mm" in op.name or "attention" in op.name or op.phase == Phase.OPTIMIZER]
        shapes = flat.tensors.shape
        return Counter((op.name, op.phase, *map(tuple, map(shapes.row, (*op.inputs, *op.outputs)))) for op in left)

    assert kinds(Fuse()(captured(name))) == kinds(captured(name))


def test_a_norm_written_out_is_one_kernel() -> None:
    """Llama's norm: eight operations. Bytes by hand: backward reads what the norm read, and a number a row."""
    graph = Fuse()(captured("llama-3-8b"))
    module = "model.layers.{}.input_layernorm"
    (kernel,) = [op for op in graph.ops if (op.module, op.phase) == (module, Phase.FORWARD)]
    tokens, width = 128, 4096
    assert kernel.bytes_read == 2 * tokens * width + 2 * width
    assert kernel.bytes_written == 2 * tokens * width + 4 * tokens


TOKENS, WIDTH, KEYS, HIDDEN = 128, 4096, 1024, 14336


@pytest.mark.parametrize("within", ["modules", "layers", "step"])
@pytest.mark.parametrize(
    ("part", "phase", "read", "written"),
    [
        # Gate and up in, the product's operand out; backward has both and the gradient, and makes two.
        ("mlp", Phase.FORWARD, 2 * HIDDEN, HIDDEN),
        ("mlp", Phase.BACKWARD, 3 * HIDDEN, 2 * HIDDEN),
        # Queries and keys are turned in one kernel each, whose tables two samples share.
        ("self_attn", Phase.FORWARD, WIDTH + KEYS + 2 * 128, WIDTH + KEYS),
        ("self_attn", Phase.BACKWARD, WIDTH + KEYS + 2 * 128, WIDTH + KEYS),
    ],
)
def test_parts_of_a_layer_move_each_tensor_once(
    within: Literal["modules", "layers", "step"], part: str, phase: Phase, read: int, written: int
) -> None:
    graph = Fuse(within=within)(captured("llama-3-8b"))
    kernels = [
        op
        for op in graph.ops
        if isinstance(op, Compute)
        and op.phase == phase
        and op.module in (f"model.layers.{{}}.{part}", f"model.layers.{{}}.{part}.act_fn")
        and op.name.startswith(("fused.", "compiled."))
    ]
    assert sum(op.bytes_read for op in kernels) == 2 * TOKENS * read
    assert sum(op.bytes_written for op in kernels) == 2 * TOKENS * written


def test_an_activation_that_a_library_has_no_kernel_of_stays_as_it_is() -> None:
    """Squared ReLU of NeMo 2.0: two kernels forward, each of which reads and writes what it works on."""
    graph = captured("nemotron-4-15b")
    parts = {"all fused": Fuse(within="modules"), "but one": Fuse(within="modules", unfused=("aten.relu",))}
    found = {
        name: Counter((op.name, op.phase) for op in ran(fuse(graph)) if op.module.endswith("act_fn"))
        for name, fuse in parts.items()
    }
    assert {name for name, _ in found["all fused"]} == {"fused.pow", "fused.threshold_backward"}
    assert found["but one"] == Counter(
        (op.name, op.phase) for op in ran(graph) if op.module.endswith("act_fn") and op.name != "aten.view"
    )
    norms = (
        Counter(op.name for op in ran(fuse(graph)) if op.name.startswith("fused.native_layer_norm"))
        for fuse in parts.values()
    )
    assert len(set(map(tuple, map(sorted, map(Counter.items, norms))))) == 1


def test_a_compiler_of_layers_leaves_what_stands_around_them() -> None:
    graph = captured("llama-3-8b")

    def around(step: StepGraph) -> list[str]:
        return [op.name for op in step.ops if op.phase != Phase.OPTIMIZER and "{}" not in op.module]

    layers, step = Fuse(within="layers")(graph), Fuse()(graph)
    assert around(layers) == around(graph)
    assert any(name.startswith("compiled.") for name in around(step))
    inside = [sorted(op.name for op in g.ops if "{}" in op.module) for g in (layers, step)]
    assert inside[0] == inside[1]


def test_a_library_makes_both_gradients_of_a_norm_at_once_and_a_compiler_one_after_the_other() -> None:
    """Transformer Engine's kernel adds a row up on the way; inductor reduces in one direction a kernel."""
    module = "model.layers.{}.post_attention_layernorm"

    def kernels(within: Literal["modules", "step"]) -> list[Compute]:
        graph = Fuse(within=within)(Precision(grad_dtype="fp32")(captured("llama-3-8b")))
        return [
            op
            for op in graph.ops
            if isinstance(op, Compute)
            and (op.module, op.phase) == (module, Phase.BACKWARD)
            and op.bytes_read >= 2**20
        ]

    tensor, rows, weight = 2 * TOKENS * WIDTH, 4 * TOKENS, 2 * WIDTH
    library = {op.name: op for op in kernels("modules")}
    assert library.keys() == {"fused.norm_backward", "aten.add"}  # and autograd adds the residual's gradient
    norm = library["fused.norm_backward"]
    assert (norm.bytes_read, norm.bytes_written) == (2 * tensor + rows + weight, tensor + weight)
    assert sorted(op.name for op in kernels("step")) == ["aten.sum", "compiled.norm_backward"]


def test_less_is_kept_for_backward() -> None:
    """Of a norm its input, of a gated activation its operands, each also read by others: nothing of fp32."""

    def kept(graph: StepGraph) -> set[int]:
        made = {int(graph.root[i]) for op in graph.ops if op.phase == Phase.FORWARD for i in op.outputs}
        read = {int(graph.root[i]) for op in graph.ops if op.phase == Phase.BACKWARD for i in op.inputs}
        return made & read

    graph = captured("llama-3-8b")
    ours = Fuse(within="modules")(graph)
    assert sum(ours.tensors[i].nbytes for i in kept(ours)) < sum(graph.tensors[i].nbytes for i in kept(graph))
    loss = {i for i in kept(ours) if ours.tensors[i].nbytes > 2**24}
    fp32 = [ours.tensors[i] for i in kept(ours) - loss if ours.tensors[i].dtype == DType.FP32]
    assert fp32 and all(tensor.numel <= TOKENS * 32 for tensor in fp32)  # a norm's rows, and attention's


def test_whole_steps_fuse_no_less_than_folded_ones() -> None:
    """Kernels do not span blocks, so that a step written out may fuse more, across layers."""
    graph = captured("llama-3-8b")
    assert moved(Fuse()(unfold(graph))) <= moved(Fuse()(graph))


def test_it_is_done_once() -> None:
    graph = Fuse()(captured("gpt2"))
    assert [op.name for op in Fuse()(graph).ops] == [op.name for op in graph.ops]


def test_other_passes_take_it_on() -> None:
    graph = Fuse()(
        Precision(dtype="fp8", grad_dtype="fp32")(Recompute(policy="selective_op")(captured("llama-3-8b")))
    )
    for job in (
        DataParallel(replicas=4, micro_batches=2)(graph),
        FullyShard(replicas=4, micro_batches=2)(graph),
        DataParallel(replicas=4)(Pipeline(stages=2, micro_batches=2)(graph)),
    ):
        for phase in (Phase.BACKWARD, Phase.RECOMPUTE):  # of forward, a pipeline repeats some on every stage
            ours, theirs = (
                sum(op.phase == phase and op.name.startswith("compiled.") for op in ran(g)) for g in (graph, job)
            )
            assert theirs == 2 * ours > 0


# -- against inductor --------------------------------------------------------------------------------------


def gated(x: Tensor, w: Tensor) -> Tensor:
    return (torch.sigmoid(x) * x * w).sum(-1)


def around_a_product(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(torch.mm(x * w + 1, x.t())) * 0.5


class Of(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(64)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles with a C++ compiler")
@pytest.mark.parametrize("function", [gated, around_a_product])
def test_kernels_are_as_many_as_inductors(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    """With their sum, the loss. (Norms are left out: for a CPU inductor counts the loops within one kernel.)"""
    from torch._inductor import metrics

    metrics.reset()
    with torch.no_grad():
        torch.compile(lambda x, w: function(x, w).sum(), fullgraph=True)(torch.randn(64, 64), torch.ones(64))
    theirs = metrics.generated_kernel_count
    with capture_mode():
        module, x = Of(function), torch.randn(64, 64)
    spec = StepSpec(dtype="fp32")
    graph = Fuse()(lower(capture(module, (x,), lambda y: y.sum(), spec), spec, name="small"))
    kernels = [op for op in graph.ops if op.phase == Phase.FORWARD and op.bytes_written and "mm" not in op.name]
    assert len(kernels) == theirs
