"""What the tests of building share: fake tensors, and configurations small enough to be real."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from echograph.models import ModelEntry

ENCODER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TINY = {
    "BertForPreTraining": ENCODER,
    "RobertaForMaskedLM": ENCODER,
    "DistilBertForMaskedLM": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "T5ForConditionalGeneration": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
    "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "OPTForCausalLM": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "ffn_dim": 32,
        "word_embed_proj_dim": 16,
    },
    "PhiForCausalLM": {"hidden_size": 20, "head_dim": 10},
    "BloomForCausalLM": {"hidden_size": 16, "n_layer": 2, "n_head": 2},
    "MptForCausalLM": {"d_model": 16, "n_layers": 2, "n_heads": 2},
    "ViTForImageClassification": ENCODER,
    "ResNetForImageClassification": {"embedding_size": 4, "depths": [1, 1], "hidden_sizes": [8, 8]},
    "Vgg": {"blocks": [1, 1], "widths": [4, 4], "classifier_width": 8},
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Qwen3MoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "GptOssForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3ForCausalLM": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 16,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}
DECODER = {**ENCODER, "num_key_value_heads": 2, "head_dim": 8}


@pytest.fixture
def tiny() -> Callable[[ModelEntry], ModelEntry]:
    """Makes an entry's architecture a few thousand parameters in two layers."""

    def shrink(entry: ModelEntry) -> ModelEntry:
        changes = dict(TINY.get(entry.architecture, {}))
        if "num_key_value_heads" in entry.config:
            changes = {**DECODER, **changes}
        if "vocab_size" in entry.config:
            changes["vocab_size"] = 64
        if entry.config.get("pad_token_id"):
            changes["pad_token_id"] = 1
        return entry.with_config(**changes)

    return shrink


@pytest.fixture
def bfloat16() -> Callable[[], AbstractContextManager[None]]:
    """A context in which floating-point tensors are bfloat16."""
    import torch

    @contextmanager
    def context() -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    return context


@pytest.fixture
def fake(bfloat16) -> Callable[[], AbstractContextManager[None]]:
    """A context of fake CPU tensors in bfloat16, as captures use."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    @contextmanager
    def context() -> Iterator[None]:
        with bfloat16(), FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
            yield

    return context


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the zoo may look anything up."""
    import socket

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the zoo opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
