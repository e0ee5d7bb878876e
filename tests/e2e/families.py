"""One model of each of ten families, and how to make it shallow while its layers keep their real sizes."""

from __future__ import annotations

from echograph.models import ModelEntry

DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers")
TEN = {
    "bert-base-uncased": "eager",
    "gpt2": "eager",
    "opt-350m": "sdpa",
    "llama-3-8b": "sdpa",
    "gemma-2-2b": "eager",
    "t5-small": "eager",
    "mixtral-8x7b": "sdpa",
    "deepseek-v3": "eager",
    "vit-b-16": "sdpa",
    "resnet-50": None,
}
"""Name -> attention; eager where the CPU, on which torch counts, has no fused kernel (dropout, unequal heads)."""
IMAGES = ("vit-b-16", "resnet-50")


def shallow(entry: ModelEntry, layers: int) -> ModelEntry:
    """The entry with fewer layers (residual networks as they are)."""
    return entry.with_config(**{key: layers for key in DEPTHS if key in entry.config})


def sizes(name: str) -> dict[str, object]:
    """Options of a micro-batch that is quick to capture."""
    return {"batch_size": 2, **({} if name in IMAGES else {"seq_len": 64})}
