"""Adapters: the base model is frozen, products of its gradients fall away, and adapters alone are updated."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")
pytest.importorskip("transformers", reason="needs the [torch] extra")

from echograph.errors import UsageError
from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir.graph import StepGraph
from echograph.ir.passes.model import final_gradients
from echograph.ir.passes.tensor_parallel import TensorParallel
from echograph.ir.types import Phase
from echograph.ir.unfold import unfold
from echograph.models import get_model
from echograph.workflow.compile import compile_entry

pytestmark = pytest.mark.torch

LAYERS, RANK = 4, 16
SMALL = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 512, "num_hidden_layers": LAYERS,
}  # fmt: skip


def step(**spec: object) -> StepGraph:
    entry = get_model("llama-3-8b").with_config(**SMALL)
    return compile_entry(entry, StepSpec(**spec), batch_size=2, seq_len=64)  # type: ignore[arg-type]


def products(graph: StepGraph) -> Counter[Phase]:
    return Counter(op.phase for op in unfold(graph).ops if op.name == "aten.mm")


def test_adapters_alone_have_gradients() -> None:
    adapted = step(lora_rank=RANK, lora_targets="q_proj,v_proj")
    names = {adapted.tensors[row].name for row in final_gradients(adapted)}
    assert names
    assert all("lora_" in name for name in names)
    head = SMALL["hidden_size"] // SMALL["num_attention_heads"]
    widths = (SMALL["hidden_size"], head * SMALL["num_key_value_heads"])
    assert adapted.workload.parameters == LAYERS * sum(RANK * (SMALL["hidden_size"] + out) for out in widths)


def test_products_of_frozen_weights_gradients_fall_away() -> None:
    """Seven products a layer and the head, twice as many backward unless frozen; an adapter has two and four."""
    whole, adapted = products(step()), products(step(lora_rank=RANK, lora_targets="q_proj"))
    assert whole[Phase.FORWARD] == 7 * LAYERS + 1
    assert whole[Phase.BACKWARD] == 2 * whole[Phase.FORWARD]
    assert adapted[Phase.FORWARD] == whole[Phase.FORWARD] + 2 * LAYERS
    # The first layer's input needs no gradient.
    assert adapted[Phase.BACKWARD] == whole[Phase.FORWARD] + 4 * LAYERS - 4


@pytest.mark.parametrize("targets", ["q_proj,k_proj,v_proj", "o_proj,gate_proj,up_proj,down_proj"])
def test_tensor_parallel_ranks_share_adapters_as_their_layers(targets: str) -> None:
    shared, lines = TensorParallel(size=4).with_notes(step(lora_rank=RANK, lora_targets=targets))
    assert all("lora_" in line for line in lines)
    for tensor in shared.tensors:
        layer, _, part = tensor.name.removesuffix(".weight").rpartition(".")
        if part == "lora_b" and layer.endswith(("q_proj", "gate_proj")):
            assert tensor.shape[0] * 4 in (SMALL["hidden_size"], SMALL["intermediate_size"])


def test_what_cannot_be_adapted_is_one_line() -> None:
    with pytest.raises(UsageError, match="no linear layer of that name: choose of down_proj"):
        step(lora_rank=RANK, lora_targets="query")
    with pytest.raises(UsageError, match="give 1 or more"):
        StepSpec(lora_rank=0)
