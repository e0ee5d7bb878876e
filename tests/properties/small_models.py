"""Models small enough to be lowered and simulated hundreds of times."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from echograph.ir.graph import StepGraph

HEADS, LAYERS, EXPERTS, SEQUENCE, VOCABULARY = 8, 4, 4, 64, 4096
SHAPE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": 4, "vocab_size": VOCABULARY, "max_position_embeddings": SEQUENCE,
    "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SHAPE},
    "mixtral": {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2, **SHAPE,
    },
    "gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": LAYERS,
        "n_head": HEADS, "n_positions": SEQUENCE, "vocab_size": VOCABULARY, "tie_word_embeddings": False,
    },
}  # fmt: skip


@cache
def small_step(name: str) -> StepGraph:
    """The folded step of one of `CONFIGS`, two samples a micro-batch."""
    from echograph.frontend.pytorch.spec import StepSpec
    from echograph.workflow.compile import compile as compile_model

    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.json"
        path.write_text(json.dumps(CONFIGS[name]))
        return compile_model(str(path), StepSpec(), batch_size=2, seq_len=SEQUENCE)
