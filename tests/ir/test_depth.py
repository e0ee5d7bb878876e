"""`Depth`: a shallow capture made deeper is, byte for byte, the capture of the deep model."""

from __future__ import annotations

from typing import Any

import pytest

from echograph.errors import PlanError
from echograph.ir.graph import StepGraph
from echograph.ir.passes.depth import Depth
from echograph.ir.text import to_text
from echograph.ir.unfold import unfold

pytestmark = pytest.mark.torch

SMALL: dict[str, dict[str, int]] = {
    "megatron-gpt-1.7b": {"n_embd": 64, "n_head": 4, "n_inner": 128, "vocab_size": 256, "n_positions": 32},
    "llama-3-8b": {
        "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
        "vocab_size": 256, "max_position_embeddings": 32,
    },
    "bert-base": {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 256},
}  # fmt: skip
LAYERS = {"megatron-gpt-1.7b": "n_layer"}


def captured(model: str, layers: int) -> StepGraph:
    pytest.importorskip("transformers", reason="needs the [torch] extra")
    from echograph.frontend.pytorch.spec import StepSpec
    from echograph.models import get_model
    from echograph.workflow.compile import compile_entry

    config: dict[str, Any] = SMALL[model] | {LAYERS.get(model, "num_hidden_layers"): layers}
    dtype = "fp16" if model.startswith("megatron") else "bf16"
    return compile_entry(get_model(model).with_config(**config), StepSpec(dtype=dtype), batch_size=2, seq_len=32)


@pytest.mark.slow
@pytest.mark.parametrize("model", SMALL)
def test_a_deeper_step_is_the_capture_of_the_deeper_model(model: str) -> None:
    shallow = captured(model, 4)
    assert list(to_text(Depth(layers=7)(shallow))) == list(to_text(captured(model, 7)))


def test_what_a_capture_does_not_show_is_refused() -> None:
    step = captured("megatron-gpt-1.7b", 4)
    assert Depth(layers=4)(step) is step
    with pytest.raises(PlanError, match="3 layers: the capture has 4: give 4 to"):
        Depth(layers=3)(step)
    with pytest.raises(PlanError, match="0 kinds of layers repeat"):
        Depth(layers=8)(unfold(step))
    with pytest.raises(PlanError, match="a capture of 3 layers does not show"):
        Depth(layers=8)(captured("megatron-gpt-1.7b", 3))
