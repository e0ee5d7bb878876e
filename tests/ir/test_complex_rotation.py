"""Rotations by complex numbers, and keys and values with a head for every query head."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")
pytest.importorskip("transformers", reason="needs the [torch] extra")

from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir.graph import StepGraph
from echograph.ir.passes.base import run
from echograph.ir.passes.complex_rotation import ComplexRotation
from echograph.ir.passes.fuse import Fuse
from echograph.ir.passes.recompute import Recompute
from echograph.ir.passes.repeated_heads import RepeatedHeads
from echograph.ir.passes.tensor_parallel import TensorParallel
from echograph.ir.types import Attention, Compute, DType, Phase
from echograph.ir.unfold import unfold
from echograph.ir.verify import verify
from echograph.models import get_model
from echograph.simulator.clusters import load_cluster
from echograph.workflow.compile import compile_entry
from echograph.workflow.plan import Plan, passes

BATCH, SEQUENCE, LAYERS, HEADS, KEYS, WIDTH = 2, 64, 3, 8, 2, 32
TURNING = ("aten.neg", "aten.cat", "aten.slice_backward")


@pytest.fixture(scope="module")
def step() -> StepGraph:
    entry = get_model("llama-3-8b").with_config(
        num_hidden_layers=LAYERS, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, num_key_value_heads=KEYS,
        head_dim=WIDTH, intermediate_size=512, vocab_size=512,
    )  # fmt: skip
    return compile_entry(entry, StepSpec(dtype="bf16"), batch_size=BATCH, seq_len=SEQUENCE)


def attentions(graph: StepGraph) -> list[Compute]:
    return [op for op in kernels(graph) if isinstance(op.attributes, Attention)]


def kernels(graph: StepGraph) -> list[Compute]:
    flat = unfold(graph)
    return [op for op in flat.ops if isinstance(op, Compute) and not flat.ops.is_view[op.id]]


def of_attention(graph: StepGraph) -> Counter[str]:
    return Counter(op.name for op in kernels(graph) if op.module.endswith("self_attn"))


def test_queries_and_keys_are_converted_multiplied_and_converted_back(step: StepGraph) -> None:
    made = ComplexRotation()(step)
    verify(made)
    before, after = of_attention(step), of_attention(made)
    assert all(before[name] and not after[name] for name in TURNING)
    assert after["complex.mul"] == 2 * 2 * LAYERS  # queries and keys, forward and backward
    assert after["aten._to_copy"] - before["aten._to_copy"] == 2 * after["complex.mul"]
    products = [op for op in kernels(made) if op.name == "complex.mul"]
    assert Counter(op.phase for op in products) == dict.fromkeys((Phase.FORWARD, Phase.BACKWARD), 2 * LAYERS)
    flat, factors = unfold(made), 2 * SEQUENCE * WIDTH * 2  # cosines and sines, in 16 bit
    for op, heads in zip(
        sorted(products, key=lambda op: op.bytes_written)[:: 2 * LAYERS], (KEYS, HEADS), strict=True
    ):
        exact = 4 * BATCH * SEQUENCE * heads * WIDTH
        assert (op.bytes_read, op.bytes_written) == (exact + factors, exact)
    assert {flat.tensors[op.outputs[0]].dtype for op in flat.ops if op.name == "complex.mul"} == {DType.FP32}


def test_what_else_a_step_does_stays(step: StepGraph) -> None:
    def elsewhere(graph: StepGraph) -> Counter[tuple[str, str, int]]:
        return Counter(
            (op.name, op.module, op.flops) for op in kernels(graph) if not op.module.endswith("self_attn")
        )

    made = ComplexRotation()(step)
    assert elsewhere(made) == elsewhere(step)
    assert sum(op.flops for op in kernels(made)) == sum(op.flops for op in kernels(step))


def test_nothing_is_fused_with_a_product_of_complex_numbers(step: StepGraph) -> None:
    fused = of_attention(Fuse(within="layers")(ComplexRotation()(step)))
    assert fused["complex.mul"] == 2 * 2 * LAYERS
    moved = sum(
        op.bytes_read + op.bytes_written
        for op in kernels(Fuse(within="layers")(ComplexRotation()(step))) if op.module.endswith("self_attn")
    ) - sum(
        op.bytes_read + op.bytes_written
        for op in kernels(Fuse(within="layers")(step)) if op.module.endswith("self_attn")
    )  # fmt: skip
    # Four bytes an element in one kernel of 16 bit; now 6 + 8 + 6, the last in one with a transposition backward.
    elements = BATCH * SEQUENCE * (HEADS + KEYS) * WIDTH * 2 * LAYERS
    assert 14 * elements <= moved <= 18 * elements


@pytest.mark.parametrize("before", [(), (Recompute(policy="full"),), (TensorParallel(size=2),)])
def test_a_plan_has_them_of_its_stack(step: StepGraph, before: tuple[object, ...]) -> None:
    graph = run(step, before, to=StepGraph)
    made = run(graph, (RepeatedHeads(), ComplexRotation()), to=StepGraph)
    verify(made)
    assert of_attention(made)["complex.mul"] >= 2 * 2 * LAYERS
    for stack in ("torchtitan", "fsdp", "nemo"):
        plan = Plan(gpus=8, zero=3 if stack != "nemo" else 0, stack=stack)
        names = [one.name for one in passes(plan, step.workload, load_cluster("dgx-h100"))]
        assert ("complex_rotation" in names) == ("repeated_heads" in names) == (stack == "torchtitan")


def test_a_model_without_rotations_is_as_it_was() -> None:
    entry = get_model("gpt2").with_config(n_layer=2, n_embd=64, n_head=2, vocab_size=512)
    step = compile_entry(entry, StepSpec(dtype="bf16"), batch_size=2, seq_len=16)
    for one in (ComplexRotation(), RepeatedHeads()):
        assert of_attention(one(step)) == of_attention(step)


def test_every_query_head_has_keys_and_values_of_its_own(step: StepGraph) -> None:
    made = RepeatedHeads()(step)
    verify(made)
    flat = unfold(made)
    for op in attentions(made):
        assert isinstance(op.attributes, Attention)
        assert op.attributes.kv_heads == op.attributes.heads == HEADS
    shared = BATCH * SEQUENCE * KEYS * WIDTH * 2
    times = HEADS // KEYS
    before, after = of_attention(step), of_attention(made)
    assert after["aten.clone"] - before["aten.clone"] == 2 * LAYERS
    assert after["aten.sum"] - before["aten.sum"] == 2 * LAYERS
    sums = [op for op in flat.ops if op.name == "aten.sum" and op.module.endswith("self_attn")]
    assert {(op.bytes_read, op.bytes_written) for op in sums if isinstance(op, Compute)} == {
        (times * shared, shared)
    }
    assert {op.phase for op in sums} == {Phase.BACKWARD}
    grown = [sum(op.bytes_read + op.bytes_written for op in attentions(graph)) for graph in (step, made)]
    # Keys and values are read twice, and their gradients written once, each of so many times the heads.
    assert grown[1] - grown[0] == LAYERS * 3 * 2 * (times - 1) * shared


def test_copies_that_are_kept_are_made_once(step: StepGraph) -> None:
    again = RepeatedHeads()(Recompute(policy="full")(step))
    verify(again)
    copies = Counter(
        op.phase for op in kernels(again) if op.name == "aten.clone" and op.module.endswith("self_attn")
    )
    kept = Counter(
        op.phase for op in kernels(RepeatedHeads()(step))
        if op.name == "aten.clone" and op.module.endswith("self_attn")
    )  # fmt: skip
    assert kept[Phase.FORWARD] == copies[Phase.FORWARD] == 2 * LAYERS
    assert copies[Phase.RECOMPUTE] == 2 * LAYERS
