"""What a compiled graph holds, on ten families: exact FLOPs, complete facts, and folding that loses nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from families import TEN, shallow, sizes

from echograph.frontend.pytorch.capture import capture, capture_mode
from echograph.frontend.pytorch.lower import lower
from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir.graph import StepGraph
from echograph.ir.passes.fold import Fold
from echograph.ir.types import DType, OpKind, Phase, TensorRole
from echograph.ir.unfold import difference, unfold
from echograph.models import build, dense_flops, get_model
from echograph.workflow.summary import summarize

pytestmark = pytest.mark.torch
families = pytest.mark.parametrize("name", TEN)
LAYERS = 4  # T5's first and last layers differ from those between
DEPTHS = {name: (LAYERS, LAYERS + 2) for name in TEN if name != "resnet-50"} | {"deepseek-v3": (5, 7)}
"""The first three layers of DeepSeek-V3 are not as the others are, and a residual network has the depth it has."""
IRREGULAR = ("bert-base-uncased", "t5-small", "gemma-2-2b", "deepseek-v3")
"""Of those whose depth changes, layers that are all alike, of two kinds, in turns, and unlike the first ones."""
COUNTED = ("bert-base-uncased", "llama-3-8b", "mixtral-8x7b", "resnet-50")
"""Encoder, decoder, experts and convolutions: torch's own count of the others is slow."""
SPEC = StepSpec(clip_grad_norm=1.0)


@pytest.fixture(scope="module")
def step() -> Callable[..., tuple[StepGraph, StepGraph]]:
    """`step(name, layers)`: a model's step as captured, and folded; each made once."""

    @cache
    def make(name: str, layers: int = LAYERS) -> tuple[StepGraph, StepGraph]:
        with capture_mode():
            torch.set_default_dtype(torch.bfloat16)
            try:
                built = build(shallow(get_model(name), layers), attention=TEN[name], **sizes(name))
            finally:
                torch.set_default_dtype(torch.float32)
        captured = lower(capture(*built, SPEC), SPEC, name=name)
        return captured, Fold()(captured)

    return make


def counted_by_torch(name: str) -> dict[str, int]:
    """FLOPs of the plain module by torch's own counter, with nothing of the capture in between."""
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    aten = torch.ops.aten
    # torch's table has the GPU kernels of attention, not the CPU's, and no product of groups.
    mapping = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
        ),
        aten._grouped_mm: lambda a, b, *_, **__: 2 * a[0] * a[1] * b[-1],
    }
    before = torch.get_default_dtype()
    with capture_mode():
        torch.set_default_dtype(torch.bfloat16)
        try:
            module, inputs, loss = build(shallow(get_model(name), LAYERS), attention=TEN[name], **sizes(name))
            with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
                value = loss(module(**inputs))
                forward = counter.get_total_flops()
                value.backward()
        finally:
            torch.set_default_dtype(before)
    return {"forward": forward, "backward": counter.get_total_flops() - forward}


@pytest.mark.parametrize(
    "name",
    [name if name in COUNTED else pytest.param(name, marks=pytest.mark.slow) for name in TEN],
)
def test_flops_are_exactly_those_that_torch_counts(step, name: str) -> None:
    shown = summarize(step(name)[1])
    expected = counted_by_torch(name)
    assert {phase: shown["flops"][phase] for phase in expected} == expected
    assert shown["flops"].get("optimizer", 0) == 0


@pytest.mark.parametrize("name", ["bert-large-uncased", "gpt3-1.3b", "llama-3-8b", "opt-1.3b", "qwen2.5-0.5b"])
def test_flops_are_within_a_hundredth_of_the_closed_form(compiled, name: str) -> None:
    entry = shallow(get_model(name), LAYERS)
    shown = summarize(compiled(name, LAYERS, batch_size=1, seq_len=512))["flops"]
    assert (shown["forward"], shown["backward"]) == pytest.approx(dense_flops(entry, 1, 512), rel=0.01)


@families
def test_every_operation_and_tensor_is_described(step, name: str) -> None:
    graph, _ = step(name)
    ops, tensors = graph.ops, graph.tensors
    assert np.isin(tensors.role, [int(role) for role in TensorRole]).all()
    assert np.isin(tensors.dtype, [int(dtype) for dtype in DType]).all()
    assert (ops.phase != 0).all()
    compute = (ops.kind == OpKind.COMPUTE) & ~ops.is_view
    named = np.array([bool(graph.strings[m]) for m in ops.module])
    forward = compute & (ops.phase == Phase.FORWARD)
    assert named[forward & (ops.flops > 0)].all(), "every product belongs to a module"
    at_root = forward & ~named
    assert at_root.sum() <= 16, "the loss, and little else, runs in the model itself"
    backward = compute & (ops.phase == Phase.BACKWARD)
    assert (ops.forward_op[backward] != -1).mean() >= 0.99
    assert (ops.phase[ops.forward_op[backward & (ops.forward_op >= 0)]] == Phase.FORWARD).all()


@families
def test_the_modules_named_are_the_models_own(step, name: str) -> None:
    graph, _ = step(name)
    with capture_mode():
        module = build(shallow(get_model(name), LAYERS), **sizes(name)).module
    own = {path for path, _ in module.named_modules()}
    assert {graph.strings[i] for i in np.unique(graph.ops.module)} <= own


@families
def test_unfolding_gives_back_what_was_captured(step, name: str) -> None:
    captured, folded = step(name)
    assert len(folded.blocks) > 1, "every one of these models repeats something"
    assert len(folded.ops) < len(captured.ops)
    assert difference(unfold(folded), captured) is None


@pytest.mark.parametrize(
    ("name", "depths"),
    [pytest.param(*one, marks=() if one[0] in IRREGULAR[::2] else pytest.mark.slow) for one in DEPTHS.items()],
)
def test_every_layer_is_in_a_block(step, name: str, depths: tuple[int, int]) -> None:
    """More layers make more instances, not more stored operations."""
    few, more = (step(name, layers)[1] for layers in depths)
    assert len(few.ops) == len(more.ops)
    assert few.unfolded_ops < more.unfolded_ops
