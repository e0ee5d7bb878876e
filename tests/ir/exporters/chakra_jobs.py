"""Jobs that are exported: models large enough that whole microseconds and small kernels matter little."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from echograph.ir.graph import JobGraph, StepGraph
from echograph.profiler.costs import load_device
from echograph.profiler.costs.estimate import estimate
from echograph.simulator.clusters import load_cluster
from echograph.workflow.plan import Plan
from echograph.workflow.predict import lower

DEVICE = "h100-sxm"
SEQUENCE = 1024
SHAPE = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": SEQUENCE,
    "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SHAPE},
    "mixtral": {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 8,
        "num_experts_per_tok": 2, **SHAPE,
    },
    "gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 1024, "n_layer": 8, "n_head": 16,
        "n_positions": SEQUENCE, "vocab_size": 32000, "tie_word_embeddings": False,
    },
}  # fmt: skip
MODELS["tied gpt2"] = {**MODELS["gpt2"], "tie_word_embeddings": True}


@cache
def step(model: str) -> StepGraph:
    """The folded step of one of `MODELS`, two samples a micro-batch."""
    from echograph.frontend.pytorch.spec import StepSpec
    from echograph.workflow.compile import compile as compile_model

    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{model}.json"
        path.write_text(json.dumps(MODELS[model]))
        return compile_model(str(path), StepSpec(dtype="bf16"), batch_size=2, seq_len=SEQUENCE)


@cache
def job(model: str, **plan: Any) -> JobGraph:
    """The job of a plan, with estimated durations."""
    lowered = lower(step(model), Plan(**plan), load_cluster())
    return estimate(lowered, load_device(DEVICE))(lowered)
