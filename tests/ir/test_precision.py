from __future__ import annotations

import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

pytest.importorskip("torch", reason="needs the [torch] extra")
pytest.importorskip("transformers", reason="needs the [torch] extra")

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "e2e")]

import numpy as np
import torch
from families import shallow
from recompute_model import LAYERS, WIDTH, step
from torch._subclasses.fake_tensor import FakeTensorMode

from echograph.errors import PlanError, UnavailableError, UnknownNameError
from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir.graph import Graph, StepGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fold import Fold
from echograph.ir.passes.fully_shard import FullyShard
from echograph.ir.passes.fuse import Fuse
from echograph.ir.passes.model import adds_up, final_gradients
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.passes.precision import RECIPES, Precision
from echograph.ir.passes.recompute import Recompute
from echograph.ir.passes.tensor_parallel import TensorParallel
from echograph.ir.types import Collective, CollectiveKind, Compute, DType, Gemm, Phase, TensorRole
from echograph.ir.unfold import difference, unfold
from echograph.models import get_model
from echograph.profiler.costs import gemm, load_device
from echograph.profiler.costs.estimate import MXFP8_SLOWER, SPLIT_ACCUMULATION, estimate
from echograph.simulator.memory import memory
from echograph.workflow.compile import compile_entry

TOKENS = 64 * 64
WEIGHTS = 13 * WIDTH**2
"""Elements of a layer's linear weights: four square ones, and three of thrice that."""
INPUTS, GRADIENTS = 6 * WIDTH, 11 * WIDTH
"""Elements a token of the products' inputs (both norms, the attention, the feed-forward) and output gradients."""
FITTING = [recipe for recipe in RECIPES if RECIPES[recipe].block <= WIDTH]
"""Recipes whose blocks fit the small model."""
EVERY = pytest.mark.parametrize("recipe", FITTING)
KERNELS = {recipe: f"{RECIPES[recipe].format}." for recipe in RECIPES}
"""What the names of a recipe's casts begin with."""


@cache
def model() -> StepGraph:
    """Four small Llama-like layers of 4,096 tokens, seven linear layers each, and an embedding."""
    return Fold()(step(sizes=(64, 64)))


@cache
def captured(name: str, layers: int = 4) -> StepGraph:
    return compile_entry(shallow(get_model(name), layers), StepSpec(), batch_size=2, seq_len=64)


def ran(graph: Graph) -> list[tuple[str, Any]]:
    """(name, operation) of all that the programs run."""
    calls = [call for program in graph.programs for call in program.calls.tolist()]
    return [(graph.ops[row].name, graph.ops[row]) for _, begin, end, _, _ in calls for row in range(begin, end)]


def flops(graph: Graph) -> Counter[Phase]:
    found: Counter[Phase] = Counter()
    for _, op in ran(graph):
        found[op.phase] += getattr(op, "flops", 0)
    return found


# -- which products ----------------------------------------------------------------------------------------


@EVERY
def test_the_three_products_of_every_linear_layer(recipe: str) -> None:
    names = Counter((name, op.phase) for name, op in ran(Precision(dtype=recipe)(model())) if name.endswith("mm"))
    assert names == {
        ("aten._scaled_mm", Phase.FORWARD): 7 * LAYERS,
        ("aten._scaled_mm", Phase.BACKWARD): 14 * LAYERS,
    }


@EVERY
def test_the_head_and_the_rest_stay(recipe: str) -> None:
    graph = captured("llama-3-8b", 2)
    before, after = Counter(n for n, _ in ran(graph)), Counter(n for n, _ in ran(Precision(dtype=recipe)(graph)))
    assert after["aten.mm"] == 3  # of the head
    assert after["aten._scaled_mm"] == before["aten.mm"] - 3
    assert before - after == {"aten.mm": before["aten.mm"] - 3}


def test_dimensions_that_do_not_divide_stay() -> None:
    """The head's size is 16: a batch of 2 x 12 tokens is no multiple of it."""
    with pytest.raises(PlanError, match="multiples of 16"):
        Precision(dtype="fp8")(Fold()(step(sizes=(2, 12))))
    with pytest.raises(PlanError, match="multiples of 32"):
        Precision(dtype="mxfp8")(Fold()(step(sizes=(1, 16))))
    assert Precision(dtype="fp8")(Fold()(step(sizes=(1, 16)))) is not None


@EVERY
@pytest.mark.parametrize("kept", ["bf16", "fp8"])
def test_work_is_what_it_was(recipe: str, kept: Any) -> None:
    graph = Recompute(policy="full")(captured("gpt2"))
    assert flops(Precision(dtype=recipe, kept=kept)(graph)) == flops(graph)


# -- against torch -----------------------------------------------------------------------------------------

_TORCH = {DType.FP8_E4M3: torch.float8_e4m3fn, DType.FP8_E5M2: torch.float8_e5m2, DType.BF16: torch.bfloat16}


@pytest.mark.parametrize("recipe", ["fp8", "fp8-rowwise", "mxfp8"])
@pytest.mark.parametrize("name", ["llama-3-8b", "gpt2"])
def test_torch_takes_every_product(name: str, recipe: str) -> None:
    """`torch._scaled_mm` checks types, layouts, multiples of 16 and the shapes of scales, on fake CUDA tensors."""
    graph = Precision(dtype=recipe)(captured(name, 2))
    scale = torch.float8_e8m0fnu if recipe == "mxfp8" else torch.float32
    for op in (op for op in graph.ops if op.name == "aten._scaled_mm"):
        a, b, *others = (graph.tensors[i] for i in op.inputs)
        bias = [each for each in others if each.dtype is DType.BF16]
        scales = [each.shape for each in others if each not in bias] or [(), ()]
        copy = graph.tensors[b.alias_of]
        with FakeTensorMode(allow_fallback_kernels=False):
            made = torch._scaled_mm(
                torch.empty(a.shape, dtype=_TORCH[a.dtype], device="cuda"),
                torch.empty(copy.shape, dtype=_TORCH[copy.dtype], device="cuda").t(),
                *(torch.empty(shape, dtype=scale, device="cuda") for shape in scales),
                bias=torch.empty(bias[0].shape, dtype=torch.bfloat16, device="cuda") if bias else None,
                out_dtype=torch.bfloat16,
            )
        result = graph.tensors[op.outputs[0]]
        assert (tuple(made.shape), made.dtype, b.shape) == (result.shape, _TORCH[result.dtype], copy.shape[::-1])
        assert DType.FP8_E4M3 in (a.dtype, b.dtype)  # cuBLAS has no product of two e5m2


@pytest.mark.parametrize(("recipe", "gradients"), [("fp8", 2), ("fp8-rowwise", 0), ("mxfp8", 0), ("nvfp4", 0)])
def test_hybrid_gradients_are_e5m2(recipe: str, gradients: int) -> None:
    """Of the six operands of a linear layer the output gradient is two, in the backward products alone."""
    graph = Precision(dtype=recipe)(TensorParallel(size=2, sequence_parallel=True)(captured("llama-3-8b", 2)))
    found: Counter[Phase] = Counter()
    for _, op in ran(graph):
        if op.name == "aten._scaled_mm":
            found[op.phase] += sum(graph.tensors[i].dtype == DType.FP8_E5M2 for i in op.inputs)
    assert found == Counter({Phase.FORWARD: 0, Phase.BACKWARD: gradients * 7 * 2})


def test_scales_of_rows_are_applied_after_the_products_of_backward() -> None:
    graph = Precision(dtype="fp8-rowwise")(captured("llama-3-8b", 2))
    scales: Counter[tuple[Phase, int]] = Counter()
    for op in (op for op in graph.ops if op.name == "aten._scaled_mm"):
        scales[op.phase, sum(graph.tensors[i].dtype is DType.FP32 for i in op.inputs)] += 1
        if op.phase is Phase.BACKWARD:
            (after,) = (other for other in graph.ops if op.outputs[0] in other.inputs)
            assert after.name == "fp8.rescale"
            assert after.bytes_read == after.bytes_written == graph.tensors[op.outputs[0]].nbytes
    assert set(scales) == {(Phase.FORWARD, 2), (Phase.BACKWARD, 0)}


def test_ranks_agree_on_the_scales_of_rows_that_they_share() -> None:
    """The output and down projections sum over a share forward, all others where gradients of inputs are made."""
    whole = captured("llama-3-8b", 2)
    shared = TensorParallel(size=2, sequence_parallel=True)(whole)

    def reductions(graph: StepGraph) -> list[Any]:
        found = [op for op in graph.ops if getattr(op, "collective", None) is CollectiveKind.ALL_REDUCE]
        return [op for op in found if op.dtype is DType.FP64]

    assert not reductions(Precision(dtype="fp8-rowwise")(whole)) and not reductions(Precision(dtype="fp8")(shared))
    graph = Precision(dtype="fp8-rowwise")(shared)
    found = Counter((op.phase, op.module.rpartition(".")[2]) for op in reductions(graph))
    forward = dict.fromkeys([(Phase.FORWARD, name) for name in ("o_proj", "down_proj")], 2)
    columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    assert found == forward | dict.fromkeys([(Phase.BACKWARD, name) for name in columns], 2)
    for op in reductions(graph):
        (maxima,), (agreed,) = (graph.tensors[i] for i in op.inputs), (graph.tensors[i] for i in op.outputs)
        assert op.bytes_per_rank == maxima.nbytes == agreed.nbytes == 8 * maxima.numel
        (cast,) = (other for other in graph.ops if agreed.id in other.inputs)
        source = graph.tensors[cast.inputs[0]]
        assert cast.name in ("fp8.cast_agreed", "fp8.cast_columns")
        assert graph.tensors[cast.outputs[0]].numel == source.numel and cast.bytes_read > source.nbytes


def test_a_kernel_says_that_it_applies_scales() -> None:
    graph = Fuse(within="layers")(Precision(dtype="fp8-rowwise")(captured("llama-3-8b", 2)))
    found = Counter(op.name for op in graph.ops if "rescale" in op.name)
    assert found["compiled.rescaled_norm_backward"] and found["compiled.rescaled_silu_backward"]
    assert found["fp8.rescale"]  # of gradients of weights, which nothing is fused with


LLAMA_LAYERS, WIDE, KEYS, INNER, FEW = 2, 4096, 1024, 14336, 128
LLAMA_ELEMENTS = LLAMA_LAYERS * (
    2 * WIDE * WIDE
    + 2 * WIDE * KEYS
    + 3 * WIDE * INNER
    + FEW * (3 * WIDE + INNER + 3 * WIDE + 2 * KEYS + 2 * INNER)
)
"""Of the weights, inputs and output gradients of Llama-3 8B's linear layers, of 128 tokens."""

# -- bytes -------------------------------------------------------------------------------------------------


def moved(graph: StepGraph, prefix: str) -> int:
    return sum(op.bytes_read + op.bytes_written for name, op in ran(graph) if name.startswith(prefix))


def test_bytes_of_casts_with_one_scale() -> None:
    """By hand: maxima read 2 bytes an element, once; casts read 2 and write 1 for each copy."""
    graph = Precision(dtype="fp8")(model())
    forward, gradients = WEIGHTS + TOKENS * INPUTS, TOKENS * GRADIENTS
    scales = 4 * LAYERS * (7 + 4 + 7)
    assert moved(graph, "fp8.amax") == LAYERS * 2 * (forward + gradients) + scales
    assert moved(graph, "fp8.cast") == LAYERS * ((2 + 1) * 2 * forward + (2 + 1 + 1) * gradients)
    kept = Precision(dtype="fp8", kept="fp8")(model())
    assert moved(kept, "fp8.amax") == moved(graph, "fp8.amax")
    assert moved(kept, "fp8.cast") == LAYERS * (2 + 1 + 1) * (forward + gradients)
    # Gradients alone are wanted both ways in one phase where inputs are cast again.
    assert moved(graph, "fp8.cast_both") == LAYERS * (2 + 1 + 1) * gradients and not moved(kept, "fp8.cast_both")


def test_delayed_scaling_looks_for_no_maxima() -> None:
    graph = Precision(dtype="fp8", delayed=True)(model())
    assert moved(graph, "fp8.amax") == 0
    assert moved(graph, "fp8.cast") == moved(Precision(dtype="fp8")(model()), "fp8.cast")


@EVERY
def test_weights_cast_once_a_step_leave_the_casts_of_activations(recipe: str) -> None:
    """Six 8-bit copies of a linear layer's operands, two of them the weight's; their memory outlives the step."""
    each, once = (Precision(dtype=recipe, kept="fp8", weights=w)(model()) for w in ("micro-batch", "step"))  # type: ignore[arg-type]
    copies = [of_role(graph, TensorRole.BUFFER) for graph in (each, once)]
    products = [op for name, op in ran(once) if name == "aten._scaled_mm" and op.phase == Phase.FORWARD]
    assert copies[1] - copies[0] == 2 * sum(once.tensors[op.inputs[1]].nbytes for op in products)
    assert moved(each, KERNELS[recipe]) > moved(once, KERNELS[recipe]) > 0
    assert flops(each) == flops(once)


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt2"])
@pytest.mark.parametrize("policy", ["none", "full"])
def test_ranks_gather_half_the_bytes_where_they_cast_first(name: str, policy: Any) -> None:
    """All that layers gather is read by products alone; each rank casts its part of it once."""
    whole = Recompute(policy=policy)(captured(name))
    ranks = TensorParallel(size=2, sequence_parallel=True)(whole)
    after = Precision(dtype="fp8", kept="fp8", delayed=True)(ranks)
    first = Precision(dtype="fp8", kept="fp8", delayed=True, gathers="fp8")(ranks)

    def gathered(graph: Graph) -> tuple[int, int]:
        gathers = [op for n, op in ran(graph) if n == "tp.all_gather" and op.phase != Phase.OPTIMIZER]
        layers = [op for op in gathers if op.bytes_per_rank and ".{}" in op.module]
        return len(layers), sum(op.bytes_per_rank for op in layers)

    (number, before), (same, bytes_first) = gathered(after), gathered(first)
    assert number == same > 0
    assert bytes_first == before // 2
    assert flops(first) == flops(after)
    assert moved(first, "fp8.cast") < moved(after, "fp8.cast")
    assert unfold(first) is not None


def test_what_products_in_16_bit_read_is_gathered_in_16_bit() -> None:
    ranks = TensorParallel(size=2, sequence_parallel=True)(captured("llama-3-8b", 2))
    first = Precision(dtype="fp8", kept="fp8", delayed=True, gathers="fp8")(ranks)
    types = {(op.module.rpartition(".")[2], op.dtype.text) for n, op in ran(first) if n == "tp.all_gather"}
    assert types >= {("lm_head", "bf16"), ("gate_proj", "fp8_e4m3"), ("down_proj", "fp8_e5m2")}


def test_grouped_products_of_experts_are_priced_in_fp8() -> None:
    graph = captured("mixtral-8x7b", 2)
    plain, experts = (Precision(dtype="fp8", experts=e)(graph) for e in (False, True))
    names = [Counter(name for name, _ in ran(g) if "grouped" in name) for g in (plain, experts)]
    assert names[0]["aten._grouped_mm"] == names[1]["aten._scaled_grouped_mm"] > 0
    assert flops(plain) == flops(experts)
    device = load_device("h100-sxm")
    times = []
    for made in (plain, experts):
        annotated = estimate(made, device)
        rows = [r for r in range(len(made.ops)) if "grouped_mm" in made.strings[made.ops.name[r]]]
        times.append(sum(int(annotated.picoseconds[r]) for r in rows))
    assert times[1] < times[0]


def test_bytes_of_casts_with_scales_of_blocks() -> None:
    """Each of the two copies reads 2 bytes an element, and writes one and a scale for 32 of them."""
    graph = Precision(dtype="mxfp8")(captured("llama-3-8b", LLAMA_LAYERS))
    assert moved(graph, "mxfp8.") == 2 * (3 * LLAMA_ELEMENTS + LLAMA_ELEMENTS // 32)


def test_bytes_of_casts_to_four_bits() -> None:
    """Maxima read 2 bytes an element, once; a cast reads 2, and writes half a byte and 1/16 for each copy."""
    graph = Precision(dtype="nvfp4")(captured("llama-3-8b", LLAMA_LAYERS))
    assert moved(graph, "nvfp4.amax") == 2 * LLAMA_ELEMENTS + 4 * LLAMA_LAYERS * (7 + 4 + 7)
    assert moved(graph, "nvfp4.cast") == LLAMA_ELEMENTS * (2 + 2 * (1 / 2 + 1 / 16))
    products = [op for name, op in ran(graph) if name == "aten._scaled_mm"]
    assert all(graph.tensors[op.inputs[0]].dtype == DType.FP4_E2M1 for op in products)


def test_blocks_are_cast_in_one_kernel_where_copies_are_kept() -> None:
    """Each tensor is then read once."""
    elements = WEIGHTS + TOKENS * (INPUTS + GRADIENTS)
    each, once = (Precision(dtype="mxfp8", kept=kept)(model()) for kept in ("bf16", "fp8"))  # type: ignore[arg-type]
    assert moved(each, "mxfp8.") - moved(once, "mxfp8.") == LAYERS * 2 * elements


def activations(graph: StepGraph) -> int:
    found = memory(DataParallel(replicas=1)(graph), 0, 1)
    assert found is not None
    return found.by_role["activation"]


def test_memory_of_what_is_kept() -> None:
    """8-bit copies of the inputs in place of 16-bit inputs, and of the weights beside those.

    The attention's result stays, which its own backward reads, so its copy comes on top.
    """
    before, after = (
        activations(Precision(dtype="fp8")(model())),
        activations(Precision(dtype="fp8", kept="fp8")(model())),
    )
    saved = (LAYERS - 1) * (TOKENS * (5 - 1) * WIDTH - WEIGHTS)
    assert (
        saved < before - after < 1.1 * saved
    )  # in the last layer, at the peak, casts of backward are done already


# -- costs -------------------------------------------------------------------------------------------------


def test_products_are_priced_without_a_cast() -> None:
    device = load_device("h100-sxm")
    graph = Precision(dtype="fp8")(captured("llama-3-8b", 2))
    priced = estimate(graph, device)(graph)
    # Gradients' products add up in full precision, which takes longer.
    products = [op for op in priced.ops if op.name == "aten._scaled_mm" and op.phase == Phase.FORWARD]
    assert products
    for op in products:
        a, b = (priced.tensors[i] for i in op.inputs[:2])
        expected = gemm(device, a.shape[0], b.shape[1], a.shape[1], dtype="fp8", quantize=False)
        slower = SPLIT_ACCUMULATION["hopper"] if op.phase == Phase.BACKWARD else 1.0
        assert op.durations[0].picoseconds == pytest.approx(float(expected.seconds) * slower * 1e12, abs=1)


@pytest.mark.parametrize(
    ("recipe", "model_of", "slower"),
    [("nvfp4", "nvfp4", 1.0), ("fp8-blockwise", "fp8_block", 1.0), ("mxfp8", "fp8", MXFP8_SLOWER)],
)
def test_the_model_of_a_recipes_products(recipe: str, model_of: str, slower: float) -> None:
    device = load_device("b200")
    graph = Precision(dtype=recipe)(captured("llama-3-8b", 2))
    priced = estimate(graph, structs.replace(device, power=None))(graph)
    for op in (op for op in priced.ops if op.name == "aten._scaled_mm"):
        a, b = (priced.tensors[i] for i in op.inputs[:2])
        expected = gemm(device, a.shape[0], b.shape[1], a.shape[1], dtype=model_of, quantize=False)
        assert op.durations[0].picoseconds == pytest.approx(slower * float(expected.seconds) * 1e12, abs=1)


def test_devices_without_four_bits_are_refused() -> None:
    graph = Precision(dtype="nvfp4")(model())
    with pytest.raises(UnavailableError, match="device h100-sxm has no NVFP4 units"):
        estimate(graph, load_device("h100-sxm"))


def test_devices_without_fp8_are_refused() -> None:
    graph = Precision(dtype="fp8")(model())
    with pytest.raises(UnavailableError, match="device a100-sxm-80 has no FP8 units"):
        estimate(graph, load_device("a100-sxm-80"))


# -- gradients ---------------------------------------------------------------------------------------------


def of_role(graph: Graph, role: TensorRole) -> int:
    found = memory(graph, 0, 1)  # type: ignore[arg-type]
    assert found is not None
    return found.by_role[role.name.lower()]


def test_main_gradients_replace_those_of_the_optimizer() -> None:
    graph = captured("llama-3-8b", 2)
    ours = Precision(grad_dtype="fp32")(graph)
    before, after = Counter(n for n, _ in ran(graph)), Counter(n for n, _ in ran(ours))
    linears, norms, parameters = 7 * 2 + 1, 2 * 2 + 1, 2 * 9 + 3
    assert after - before == {
        "aten.addmm_": linears,
        "aten.add_": norms + 1,  # and the embedding
        "aten._foreach_zero_": parameters,
    }
    assert before - after == {"aten.mm": linears, "aten._foreach_copy_": parameters}
    assert sum(op.attributes.leads for name, op in ran(ours) if name == "aten._foreach_zero_") == 1
    assert flops(ours) == flops(graph)


def test_bytes_of_main_gradients() -> None:
    """A product reads and writes its buffer, 8 bytes an element, and no longer writes 2; an addition moves 10."""
    graph = captured("llama-3-8b", 2)
    ours = Precision(grad_dtype="fp32")(graph)

    def total(step: StepGraph, phase: Phase) -> int:
        return sum(op.bytes_read + op.bytes_written for _, op in ran(step) if op.phase == phase)

    parameters = graph.workload.parameters
    added = (2 * 2 + 1) * 4096 + 128256 * 4096
    assert total(ours, Phase.BACKWARD) - total(graph, Phase.BACKWARD) == 6 * (parameters - added) + 10 * added
    # The optimizer copied 2 bytes to 4, and now sets 4 to zero.
    assert total(graph, Phase.OPTIMIZER) - total(ours, Phase.OPTIMIZER) == 2 * parameters


def test_main_gradients_live_through_the_step() -> None:
    graph = Precision(grad_dtype="fp32")(captured("llama-3-8b", 2))
    found = of_role(DataParallel(replicas=1)(graph), TensorRole.GRADIENT)
    parameters = 4 * graph.workload.parameters
    assert parameters <= found < parameters + 512 * 30  # allocations
    assert all(adds_up(graph, row) for row in final_gradients(graph))


def test_main_gradients_in_the_steps_own_type() -> None:
    """A product reads its buffer, 2 bytes an element; an addition moves 6; the optimizer sets 2 to zero."""
    graph = captured("llama-3-8b", 2)
    ours = Precision(main_gradients=True)(graph)
    assert difference(ours, Precision(main_gradients=True, grad_dtype="bf16")(graph)) is None
    parameters, added = graph.workload.parameters, (2 * 2 + 1) * 4096 + 128256 * 4096

    def more(phase: Phase) -> int:
        of = [
            sum(op.bytes_read + op.bytes_written for _, op in ran(g) if op.phase == phase) for g in (graph, ours)
        ]
        return of[1] - of[0]

    assert more(Phase.BACKWARD) == 2 * (parameters - added) + 6 * added
    assert more(Phase.OPTIMIZER) == 2 * parameters
    assert all(adds_up(ours, row) for row in final_gradients(ours))


def test_gradients_that_products_do_not_add_are_cast_and_added() -> None:
    """A cast reads 2 bytes an element and writes 4, an addition moves 12; the product writes its 2 as before."""
    graph = captured("llama-3-8b", 2)
    ours = Precision(grad_dtype="fp32", fused_accumulation=False)(graph)
    before, after = Counter(n for n, _ in ran(graph)), Counter(n for n, _ in ran(ours))
    parameters = 2 * 9 + 3
    assert (after - before)["aten._to_copy"] == (after - before)["aten.add_"] == parameters
    assert after["aten.mm"] == before["aten.mm"]
    moved = [
        sum(op.bytes_read + op.bytes_written for _, op in ran(g) if op.phase == Phase.BACKWARD)
        for g in (graph, ours)
    ]
    assert moved[1] - moved[0] == 18 * graph.workload.parameters
    assert all(adds_up(ours, row) for row in final_gradients(ours))


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_that_are_cast_stay_in_16_bit_beside_their_sums(fused: bool) -> None:
    ours = Precision(grad_dtype="fp32", fused_accumulation=fused)(captured("llama-3-8b", 2))
    kept = sum(
        len(block.instances) * ours.tensors[row].nbytes
        for block in ours.blocks
        for row in block.tensors
        if ours.tensors.role[row] == TensorRole.BUFFER and ours.tensors[row].name.endswith(".16bit")
    )
    assert kept == (0 if fused else 2 * ours.workload.parameters)


@pytest.mark.parametrize("options", [{"grad_dtype": "fp32"}, {"main_gradients": True}])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_micro_batches_add_up_by_themselves(micro_batches: int, options: dict[str, Any]) -> None:
    graph = Precision(**options)(captured("llama-3-8b", 2))
    wide = DType.FP32 if "grad_dtype" in options else DType.BF16
    once = Counter(name for name, op in ran(graph) if op.phase != Phase.OPTIMIZER)
    jobs = [
        DataParallel(replicas=4, micro_batches=micro_batches)(graph),
        DataParallel(replicas=4, micro_batches=micro_batches, zero=1)(graph),
        DataParallel(replicas=4)(Pipeline(stages=2, micro_batches=micro_batches)(graph)),
    ]
    for job in jobs:
        names = Counter(name for name, _ in ran(job))
        assert (names["aten.add_"], names["aten.addmm_"]) == (
            micro_batches * once["aten.add_"],
            micro_batches * once["aten.addmm_"],
        )
        reduced = [op for _, op in ran(job) if isinstance(op, Collective) and op.phase == Phase.BACKWARD]
        assert {op.dtype for op in reduced} == {wide}
        assert sum(op.bytes_per_rank for op in reduced) == wide.nbytes(graph.workload.parameters)


def test_a_chunk_without_layers_adds_up_the_embeddings_gradient() -> None:
    graph = Precision(grad_dtype="fp32")(captured("llama-3-8b"))
    job = Pipeline(stages=6, micro_batches=6, layers=(0, 1, 1, 1, 1, 0))(graph)
    of_embedding = [op.name for op in job.ops if getattr(op, "module", "") == "model.embed_tokens"]
    assert of_embedding.count("aten.add_") == of_embedding.count("aten.embedding_dense_backward") == 1


def test_fp8_products_add_to_main_gradients() -> None:
    graph = Precision(dtype="fp8", grad_dtype="fp32")(model())
    weights = [
        op for op in graph.ops if isinstance(op, Compute) and "_scaled_mm" in op.name and len(op.inputs) == 5
    ]
    assert len(weights) == 7
    for op in weights:
        buffer, made = graph.tensors[op.inputs[-1]], graph.tensors[op.outputs[0]]
        assert (buffer.dtype, made.dtype, made.alias_of, made.role) == (
            DType.FP32, DType.FP32, buffer.id, TensorRole.GRADIENT,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [None, "fp8"])
def test_experts_weight_gradients_are_added_by_their_product(dtype: str | None) -> None:
    """As Transformer Engine's GroupedLinear adds them: no kernel of its own reads a 16-bit gradient of experts."""
    narrow = Precision(dtype=dtype, experts=dtype is not None)(captured("qwen3-30b-a3b", 1))
    graph = Precision(grad_dtype="fp32")(narrow)
    products = [
        op for op in graph.ops
        if isinstance(op, Compute) and "_grouped_mm" in op.name and len(graph.tensors[op.outputs[0]].shape) == 3
    ]  # fmt: skip
    assert len(products) == 2  # gate and up at once, and down
    experts = {graph.tensors[op.outputs[0]].shape for op in products}
    for op in products:
        made, buffer, ends = (graph.tensors[i] for i in (op.outputs[0], *op.inputs[-2:]))
        assert (ends.dtype, len(ends.shape)) == (DType.INT32, 1)
        assert (made.dtype, made.alias_of, made.role) == (DType.FP32, buffer.id, TensorRole.GRADIENT)
        assert op.bytes_written == made.nbytes
    added = [op for op in graph.ops if isinstance(op, Compute) and op.name == "aten.add_"]
    assert not [op for op in added if graph.tensors[op.outputs[0]].shape in experts]


def test_tied_embeddings_are_summed_in_fp32() -> None:
    """GPT-2's embedding and head are one: a pipeline reduces the shares of its gradient, in their type."""
    graph = Precision(grad_dtype="fp32")(captured("gpt2"))
    (tied,) = [row for row in final_gradients(graph) if not adds_up(graph, row)]
    assert graph.tensors[tied].shape == (50257, 768)
    assert {graph.tensors[row].dtype for row in final_gradients(graph)} == {DType.FP32}
    job = Pipeline(stages=2, micro_batches=2)(graph)
    shared = [op for _, op in ran(job) if isinstance(op, Collective)]
    assert [(op.bytes_per_rank, op.dtype) for op in shared] == [(4 * 50257 * 768, DType.FP32)] * 2


# -- with other passes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"dtype": recipe} for recipe in RECIPES] + [{"grad_dtype": "fp32"}])
def test_folding_changes_nothing(options: dict[str, Any]) -> None:
    graph, precision = captured("gpt2"), Precision(**options)
    assert difference(unfold(precision(graph)), precision(unfold(graph))) is None


@pytest.mark.parametrize(("recipe", "grad_dtype"), [*((recipe, None) for recipe in RECIPES), ("fp8", "fp32")])
def test_other_passes_take_it_on(recipe: str, grad_dtype: str | None) -> None:
    graph = TensorParallel(size=2, sequence_parallel=True)(Recompute(policy="full")(captured("gpt2")))
    graph = Precision(dtype=recipe, grad_dtype=grad_dtype)(graph)
    work = flops(graph)
    jobs = [
        DataParallel(replicas=4, micro_batches=2)(graph),
        FullyShard(replicas=4, micro_batches=2)(graph),
        DataParallel(replicas=4)(Pipeline(stages=2, micro_batches=2)(graph)),
        DataParallel(replicas=4)(Pipeline(stages=2, micro_batches=2, schedule="zb-h1")(graph)),
    ]
    for job in jobs:
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE):
            assert flops(job)[phase] == 2 * work[phase]


# -- what is refused, and what is nothing to do -------------------------------------------------------------


def test_other_types_of_a_step_are_refused() -> None:
    graph = model()
    with pytest.raises(PlanError, match="compile the model with --dtype fp16"):
        Precision(dtype="fp16")(graph)
    with pytest.raises(PlanError, match="gradients in fp16"):
        Precision(grad_dtype="fp16")(graph)
    with pytest.raises(PlanError, match="only fp8"):
        Precision(dtype="mxfp8", delayed=True)(graph)
    with pytest.raises(UnknownNameError, match="mxfp8"):
        Precision(dtype="mxfp4")(graph)
    with pytest.raises(UnavailableError, match="fp32"):
        Precision(grad_dtype="fp64")(graph)


def test_a_step_in_fp32_may_round_what_its_products_read() -> None:
    """The products are those of TF32, and nothing else of the step changes."""
    step = compile_entry(shallow(get_model("gpt2"), 2), StepSpec(dtype="fp32"), batch_size=2, seq_len=64)
    graph, device = Fold()(step), load_device("a100-sxm-80")
    rounded = Precision(dtype="tf32")(graph)
    assert rounded.format == (1, 5) and graph.format < (1, 5)
    assert Precision(dtype="fp32")(graph) is graph and Precision(dtype="tf32")(rounded) is rounded
    assert difference(Precision(dtype="fp32")(rounded), graph) is None
    rows = [row for row in range(len(graph.ops)) if isinstance(getattr(graph.ops[row], "attributes", None), Gemm)]
    assert [graph.ops[row].name for row in rows] == [rounded.ops[row].name for row in rows] != []
    before, after = (estimate(one, device).picoseconds for one in (graph, rounded))
    changed = np.flatnonzero(before != after)
    assert changed.tolist() == rows
    assert before[rows].sum() > 3 * after[rows].sum()
    with pytest.raises(PlanError, match="compile the model with --dtype fp32"):
        Precision(dtype="tf32")(model())


def test_the_types_that_a_step_has_are_nothing_to_do() -> None:
    graph = model()
    for same in (Precision(), Precision(dtype="bf16"), Precision(grad_dtype="bf16", dtype="bf16")):
        assert same(graph) is graph
