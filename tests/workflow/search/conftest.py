"""Small steps to search plans for."""

from __future__ import annotations

from typing import Any

import pytest

from echograph.ir.graph import StepGraph

DENSE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
EXPERTS: dict[str, Any] = DENSE | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def _compiled(config: dict[str, Any], folder: Any) -> StepGraph:
    import json

    import echograph as eg

    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return eg.compile(str(path), batch_size=2, seq_len=512)


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> StepGraph:
    """A Llama of four layers: two samples of 512 tokens."""
    pytest.importorskip("transformers", reason="needs the [torch] extra")
    return _compiled(DENSE, tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> StepGraph:
    """The same with four experts a layer."""
    pytest.importorskip("transformers", reason="needs the [torch] extra")
    return _compiled(EXPERTS, tmp_path_factory.mktemp("experts"))
