"""Experts that are written as a loop run as grouped products, with the same results."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")
pytest.importorskip("transformers", reason="needs the [torch] extra")

import torch
from transformers import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from echograph.frontend.pytorch.spec import StepSpec
from echograph.models import from_config
from echograph.models.experts import group_experts
from echograph.workflow.compile import compile_entry
from echograph.workflow.plan import Plan
from echograph.workflow.predict import predict
from echograph.workflow.system import System

pytestmark = pytest.mark.torch
LONGCAT = {
    **{"model_type": "longcat_flash", "hidden_size": 64, "ffn_hidden_size": 128, "expert_ffn_hidden_size": 32},
    **{"num_layers": 2, "num_attention_heads": 4, "vocab_size": 128, "kv_lora_rank": 16, "q_lora_rank": 32},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "moe_topk": 6},
    **{"n_routed_experts": 8, "zero_expert_num": 4, "num_hidden_layers": 4, "head_dim": 16},
}


def test_grouped_products_give_what_the_loop_gives() -> None:
    torch.manual_seed(0)
    config = Step3p7TextConfig(hidden_size=16, moe_intermediate_size=16, num_local_experts=4)
    experts = Step3p7Experts(config).to(torch.bfloat16)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    tokens = torch.randn(10, 16, dtype=torch.bfloat16)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(10)])
    weights = torch.rand(10, 2, dtype=torch.bfloat16)
    loop = experts(tokens, chosen, weights)
    group_experts(experts)
    torch.testing.assert_close(experts(tokens, chosen, weights), loop, rtol=0.05, atol=0.02)


def test_experts_that_give_back_what_they_are_given_take_no_product() -> None:
    graph = compile_entry(from_config(LONGCAT), StepSpec(), batch_size=1, seq_len=64)
    rows = 64 * 6 * 8 // 12
    for block in graph.blocks:
        for row in block.ops:
            if graph.strings[graph.ops.name[row]] == "aten._grouped_mm":
                assert graph.ops.flops[row] in (2 * rows * 64 * 64, 2 * rows * 32 * 64)
    result, _ = predict(graph, Plan(gpus=8, ep=4, zero=1), System("dgx-h100"))
    assert result.step_ps > 0
