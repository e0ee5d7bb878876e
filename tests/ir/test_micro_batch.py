"""Another batch size against a capture of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from echograph.errors import PlanError
from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir import types as t
from echograph.ir.graph import StepGraph
from echograph.ir.passes.extent import Carriers, Extent, MicroBatch
from echograph.ir.unfold import difference, unfold
from echograph.models import get_model
from echograph.workflow.compile import compile_entry

Step = Callable[..., StepGraph]
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers")
IMAGES = ("resnet-50", "vit-b-16")
FAST = ("gpt2", "llama-3.2-1b")
SLOW = ("bert-base-uncased", "t5-small", "mixtral-8x7b", "resnet-50")


@pytest.fixture(scope="module")
def step() -> Step:
    """Captured steps of two layers, each once."""
    known: dict[tuple[object, ...], StepGraph] = {}

    def get(name: str, batch: int, attention: str | None = None, **spec: Any) -> StepGraph:
        key = (name, batch, attention, *spec.items())
        if key not in known:
            entry = get_model(name)
            entry = entry.with_config(**{k: 2 for k in DEPTHS if k in entry.config})
            length = None if name in IMAGES else 64
            known[key] = compile_entry(
                entry,
                StepSpec(**spec),
                batch_size=batch,
                seq_len=length,
                attention=attention,
            )
        return known[key]

    return get


def assert_equals_a_capture(step: Step, name: str, now: int, then: int, attention: str | None = None) -> None:
    made = MicroBatch(size=then)(step(name, now, attention))
    assert difference(unfold(made), unfold(step(name, then, attention))) is None


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize(("now", "then"), [(3, 8), (4, 1)])
def test_it_equals_a_capture_of_that_batch(step: Step, name: str, now: int, then: int) -> None:
    assert_equals_a_capture(step, name, now, then)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
@pytest.mark.parametrize(("now", "then"), [(3, 8), (8, 4), (4, 1)])
def test_it_equals_a_capture_of_that_batch_for_more_models(step: Step, name: str, now: int, then: int) -> None:
    assert_equals_a_capture(step, name, now, then)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert-base-uncased", "llama-3.2-1b", "t5-small", "bloom-7b1"])
def test_it_equals_a_capture_with_unfused_attention(step: Step, name: str) -> None:
    assert_equals_a_capture(step, name, 3, 8, "eager")


@pytest.mark.slow
def test_of_images_whose_tokens_broadcast(step: Step) -> None:
    assert_equals_a_capture(step, "vit-b-16", 3, 8)


@pytest.mark.slow
def test_it_equals_a_capture_that_computes_again(step: Step) -> None:
    made = MicroBatch(size=8)(step("llama-3.2-1b", 3, recompute=True))
    assert difference(unfold(made), unfold(step("llama-3.2-1b", 8, recompute=True))) is None


def test_it_equals_a_capture_that_clips_and_scales(step: Step) -> None:
    made = MicroBatch(size=6)(step("gpt2", 3, dtype="fp16", clip_grad_norm=1.0))
    assert difference(unfold(made), unfold(step("gpt2", 6, dtype="fp16", clip_grad_norm=1.0))) is None


@pytest.mark.slow
def test_one_sample_of_unfused_attention_differs_in_layouts_alone(step: Step) -> None:
    """Products read copies of several samples, and transposed views of one."""
    made = unfold(MicroBatch(size=1)(step("bert-base-uncased", 4, "eager")))
    captured = unfold(step("bert-base-uncased", 1, "eager"))
    for ours, theirs in zip(made.ops, captured.ops, strict=True):
        assert isinstance(ours, t.Compute)
        assert isinstance(theirs, t.Compute)
        mine, its = ((x.name, x.flops, x.bytes_read, x.bytes_written) for x in (ours, theirs))
        assert mine == its
        if ours.attributes != theirs.attributes:
            assert isinstance(ours.attributes, t.Gemm)


def test_there_and_back_is_where_it_was(step: Step) -> None:
    graph = step("llama-3.2-1b", 3)
    back = MicroBatch(size=3)(MicroBatch(size=7)(graph))
    assert difference(unfold(back), unfold(graph)) is None


def test_work_is_in_proportion_and_parameters_stay(step: Step) -> None:
    graph = step("gpt2", 3)
    made = MicroBatch(size=12)(graph)
    assert made.workload.batch_size == 12
    assert np.array_equal(made.ops.flops, 4 * graph.ops.flops)
    lives = [t.TensorRole.PARAMETER, t.TensorRole.GRADIENT, t.TensorRole.OPTIMIZER_STATE]
    before, after = (sorted(g.tensors.nbytes[np.isin(g.tensors.role, lives)].tolist()) for g in (graph, made))
    assert before == after
    update = graph.ops.phase == t.Phase.OPTIMIZER
    assert np.array_equal(made.ops.bytes_read[update], graph.ops.bytes_read[update])


def test_the_same_batch_is_the_same_graph(step: Step) -> None:
    graph = step("gpt2", 3)
    assert MicroBatch(size=3)(graph) is graph


def test_one_captured_sample_does_not_show_what_broadcasts(step: Step) -> None:
    with pytest.raises(PlanError, match="capture with --batch-size 2, or with 4") as error:
        MicroBatch(size=4)(step("gpt2", 1))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("size", [0, -1, 2**20 + 1])
def test_sizes_out_of_range_are_refused(step: Step, size: int) -> None:
    with pytest.raises(PlanError, match="choose 1 to"):
        MicroBatch(size=size)(step("gpt2", 3))


def test_an_extent_that_no_input_has_is_refused(step: Step) -> None:
    with pytest.raises(PlanError, match="no input of the step has the batch of 5"):
        Carriers(step("gpt2", 3), Extent(name="batch", size=5, dim=0, advice="capture another"))
