"""Recurrent layers other than Mamba-2's: one operation a kernel, with the FLOPs of its products."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")
pytest.importorskip("transformers", reason="needs the [torch] extra")

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from echograph.frontend.pytorch.spec import StepSpec
from echograph.models import from_config, recurrences
from echograph.profiler.costs import load_device
from echograph.profiler.costs.estimate import estimate
from echograph.workflow.compile import compile_entry

pytestmark = pytest.mark.torch

BATCH, LENGTH, KEY_HEADS, HEADS, KEY, VALUE = 2, 256, 2, 4, 32, 16
COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "num_hidden_layers": 4,
}
NEXT = {
    **{"model_type": "qwen3_next", **COMMON, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4},
    **{
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
}
JAMBA = {
    **{"model_type": "jamba", **COMMON, "num_key_value_heads": 2, "num_experts": 2, "mamba_dt_rank": 4},
    **{"attn_layer_period": 4, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
}
KIMI = {
    **{"model_type": "kimi_linear", **COMMON, "num_key_value_heads": 4, "num_local_experts": 4},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8},
    **{"v_head_dim": 16, "qk_nope_head_dim": 8, "linear_head_dim": 16, "linear_num_heads": 4},
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "pad_token_id": 0,
}


def operands() -> tuple[torch.Tensor, ...]:
    shapes = [(KEY_HEADS, KEY), (KEY_HEADS, KEY), (HEADS, VALUE), (HEADS,), (HEADS,)]
    return tuple(torch.rand(BATCH, LENGTH, *shape) for shape in shapes)


def counted(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def test_flops_of_the_delta_rule_are_those_of_the_reference() -> None:
    """It solves a triangle of a chunk for keys and for values, where the kernel multiplies by the inverse."""
    query, key, value, decay, beta = operands()
    rule = counted(lambda: qwen3_next.torch_chunk_gated_delta_rule(query, key, value, -decay, beta))
    solved = BATCH * LENGTH * HEADS * 2 * recurrences.CHUNK * (KEY + VALUE)
    with torch.device("meta"):
        like = [torch.empty_like(tensor, device="meta") for tensor in (query, key, value, decay, beta)]
        assert counted(lambda: recurrences.gated_delta_rule(*like[:3], g=like[3], beta=like[4])) == rule + solved


@pytest.mark.parametrize("name", ["gated_delta_rule", "selective_scan"])
def test_gradients_are_like_what_they_are_of(name: str) -> None:
    if name == "gated_delta_rule":
        shapes = [tensor.shape for tensor in operands()]
    else:
        shapes = [(2, 8, 32), (2, 8, 32), (8, 4), (2, 4, 32), (2, 4, 32), (8,), (2, 8, 32), (8,)]
    given = [torch.empty(shape, device="meta", requires_grad=True) for shape in shapes]
    made = getattr(recurrences, name)(*given)
    out = made[0] if isinstance(made, tuple) else made
    forward = counted(lambda: getattr(recurrences, name)(*[tensor.detach() for tensor in given]))
    backward = counted(lambda: out.sum().backward())
    assert [tensor.grad.shape for tensor in given] == [torch.Size(shape) for shape in shapes]
    assert 2 * forward < backward <= 3 * forward


@pytest.mark.parametrize(
    ("config", "kernel", "layers"),
    [
        (NEXT, "recurrent.gated_delta_rule", 3),
        pytest.param(KIMI, "recurrent.gated_delta_rule", 3, marks=pytest.mark.slow),
        pytest.param(JAMBA, "recurrent.selective_scan", 3, marks=pytest.mark.slow),
    ],
)
def test_a_layer_is_one_operation_each_way_whatever_the_length(config: dict, kernel: str, layers: int) -> None:
    graph = compile_entry(from_config(config), StepSpec(), batch_size=1, seq_len=128)
    ran: Counter[str] = Counter()
    for block in graph.blocks:
        for row in block.ops:
            ran[graph.strings[graph.ops.name[row]]] += len(block.instances)
    assert (ran[kernel], ran[f"{kernel}_backward"]) == (layers, layers)
    assert ran["mamba2.causal_conv1d"] == layers
    longer = compile_entry(from_config(config), StepSpec(), batch_size=1, seq_len=256)
    assert len(longer.ops) == len(graph.ops)  # written out, a scan has operations for its chunks or positions
    priced = estimate(graph, load_device("h100-sxm"))(graph)
    times = [op.durations[0].picoseconds for op in priced.ops if op.name.startswith(kernel)]
    assert all(times)


def test_the_files_have_their_own_functions_again() -> None:
    before = qwen3_next.torch_chunk_gated_delta_rule
    compile_entry(from_config(NEXT), StepSpec(), batch_size=1, seq_len=64)
    assert qwen3_next.torch_chunk_gated_delta_rule is before
