"""Mamba-2 layers: one operation a kernel, with the FLOPs of its products."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")
pytest.importorskip("transformers", reason="needs the [torch] extra")

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

import torch
from families import shallow
from torch.utils.flop_counter import FlopCounterMode

from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.precision import Precision
from echograph.ir.passes.tensor_parallel import TensorParallel
from echograph.ir.types import Collective, Compute, Phase
from echograph.models import build, get_model
from echograph.models.mamba2 import _scan_backward_flops, _scan_flops
from echograph.profiler.costs import load_device
from echograph.profiler.costs.estimate import SCAN_KERNELS, estimate
from echograph.workflow.compile import compile_entry

pytestmark = pytest.mark.torch
NANO = "nemotron-3-nano-30b-a3b"
LAYERS = 9
"""Of the kinds MEMEM*EME."""
BATCH, LENGTH, HEADS, HEAD, GROUPS, STATE, CHUNK = 2, 512, 64, 64, 8, 128, 128


@pytest.fixture(scope="module")
def graph():
    return compile_entry(shallow(get_model(NANO), LAYERS), StepSpec(), batch_size=BATCH, seq_len=LENGTH)


def products(*shapes: tuple[int, ...]) -> int:
    """What torch counts of batched products [b, m, k] x [b, k, n], each given as (b, m, k, n)."""
    with FlopCounterMode(display=False) as counter:
        for b, m, k, n in shapes:
            torch.bmm(torch.empty(b, m, k, device="meta"), torch.empty(b, k, n, device="meta"))
    return int(counter.get_total_flops())


def test_flops_are_those_of_the_products_of_chunks() -> None:
    """Of a chunk: C B^T for each group; for each head its product with X, the state that it leaves and gets."""
    chunks = BATCH * LENGTH // CHUNK
    scores, output = (chunks * GROUPS, CHUNK, STATE, CHUNK), (chunks * HEADS, CHUNK, CHUNK, HEAD)
    left, got = (chunks * HEADS, STATE, CHUNK, HEAD), (chunks * HEADS, CHUNK, STATE, HEAD)
    x, per_head = (BATCH, LENGTH, HEADS, HEAD), (HEADS,)
    operands = (
        x,
        x[:3],
        per_head,
        (BATCH, LENGTH, GROUPS, STATE),
        (BATCH, LENGTH, GROUPS, STATE),
        per_head,
        per_head,
    )
    assert _scan_flops(*operands, CHUNK) == products(scores, output, left, got)
    twice = [shape for shape in (scores, output, left, got) for _ in range(2)]
    assert _scan_backward_flops(x, *operands, CHUNK) == products(*twice, scores, left)


def test_each_layer_runs_one_scan_and_one_convolution(graph) -> None:
    calls = [call for program in graph.programs for call in program.calls.tolist()]
    ran = Counter(graph.ops[row].name for _, begin, end, _, _ in calls for row in range(begin, end))
    kernels = ("ssd_scan", "ssd_scan_backward", "causal_conv1d", "causal_conv1d_backward")
    assert {name: ran[f"mamba2.{name}"] for name in kernels} == dict.fromkeys(kernels, 4)
    assert ran["aten._grouped_mm"] == 4 * 6  # experts without a gate: two products, and two gradients of each
    assert not any("conv" in name for name in ran if name.startswith("aten."))
    assert sorted(len(block.instances) for block in graph.blocks) == [1, 4, 4]


def test_a_depth_cuts_the_pattern(fake) -> None:
    with fake():
        module = build(get_model(NANO).with_config(num_hidden_layers=6), batch_size=1, seq_len=64).module
    kinds = [layer.block_type for layer in module.model.layers]
    assert kinds == ["linear_attention", "moe", "linear_attention", "moe", "linear_attention", "full_attention"]


def test_the_librarys_functions_come_back(fake) -> None:
    from transformers.models.nemotron_h import modeling_nemotron_h as modeling

    before = (modeling.mamba2_chunk_scan, modeling.causal_conv1d_fn)
    with fake():
        module, inputs, _ = build(shallow(get_model(NANO), 1), batch_size=1, seq_len=64)
        module(**inputs)
    assert (modeling.mamba2_chunk_scan, modeling.causal_conv1d_fn) == before


def test_scans_are_priced_by_their_arithmetic(graph) -> None:
    device = load_device("h100-sxm")
    priced = estimate(graph, device)(graph)
    assert device.scan is not None
    rate = device.scan.efficiency * device.datasheet.peak_flops_per_s["bf16"]
    for op in (op for op in priced.ops if op.name.startswith("mamba2.ssd_scan")):
        assert isinstance(op, Compute)
        seconds = op.flops / rate + SCAN_KERNELS * device.memory_launch_s
        assert op.durations[0].picoseconds == pytest.approx(seconds * 1e12, rel=1e-6)


def test_tensor_parallel_ranks_share_heads_and_groups(graph) -> None:
    """As Megatron-Core's MambaMixer: nothing is said between the products of a layer, in either direction."""
    local = TensorParallel(size=2, sequence_parallel=True)(graph)
    mamba = next(b for b in local.blocks if any(local.ops[row].name == "mamba2.ssd_scan" for row in b.ops))
    ops = [local.ops[row] for row in mamba.ops]
    said = [(op.phase, op.name) for op in ops if isinstance(op, Collective) and "mixer" in op.module]
    gather, scatter = "tp.all_gather", "tp.reduce_scatter"
    assert said == [(phase, name) for phase, names in ((Phase.FORWARD, (gather, scatter)),
                    (Phase.BACKWARD, (gather, gather, scatter))) for name in names]  # fmt: skip
    scan = next(op for op in ops if op.name == "mamba2.ssd_scan")
    shapes = [local.tensors[i].shape for i in scan.inputs]
    x, groups = (BATCH, LENGTH, HEADS // 2, HEAD), (BATCH, LENGTH, GROUPS // 2, STATE)
    assert shapes == [x, x[:3], x[2:3], groups, groups, x[2:3], x[2:3]]
    assert scan.flops == _scan_flops(*shapes, CHUNK)


def test_passes_take_it_on(graph) -> None:
    job = DataParallel(replicas=2)(Precision(dtype="mxfp8", kept="fp8", experts=True)(graph))
    scaled = Counter(op.phase for op in job.ops if op.name == "aten._scaled_mm")
    assert scaled[Phase.BACKWARD] == 2 * scaled[Phase.FORWARD] > 0
