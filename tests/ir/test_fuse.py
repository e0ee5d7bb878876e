from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

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
from echograph.ir.types import Op, Phase
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
    assert not {key for key in gone if "mm" in key or "attention" in key or "native_layer_norm" in key}
    assert {key for key in after if after[key] > before[key]} == {k for k in after if k.startswith("fused.")}
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
    """Llama's norm: eight operations. Bytes by hand: what it reads, and what the product and backward read."""
    graph = Fuse()(captured("llama-3-8b"))
    module = "model.layers.{}.input_layernorm"
    (kernel,) = [op for op in graph.ops if (op.module, op.phase) == (module, Phase.FORWARD)]
    tokens, width = 128, 4096
    assert kernel.bytes_read == 2 * tokens * width + 2 * width
    wide, statistics, normed, result = 4 * tokens * width, 4 * tokens, 2 * tokens * width, 2 * tokens * width
    assert kernel.bytes_written == wide + statistics + normed + result


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
                sum(op.phase == phase and op.name.startswith("fused.") for op in ran(g)) for g in (graph, job)
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
