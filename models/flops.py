"""Closed forms: the matrix-product FLOPs of a dense language model's step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from echograph.errors import UsageError
from echograph.models.entry import ModelEntry

_GATED = {
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Phi3ForCausalLM",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
}
_PLAIN = {
    "GPT2LMHeadModel",
    "OPTForCausalLM",
    "BloomForCausalLM",
    "MptForCausalLM",
    "PhiForCausalLM",
    "NemotronForCausalLM",
}
_ENCODERS = {"BertForPreTraining", "BertForMaskedLM", "RobertaForMaskedLM", "DistilBertForMaskedLM"}
_NEVER_FUSED = {"BloomForCausalLM", "MptForCausalLM", "Gemma2ForCausalLM"}
_FUSED_BACKWARD_PRODUCTS = 5
_EAGER_BACKWARD_PRODUCTS = 4


class StepFlops(NamedTuple):
    """Floating-point operations of one micro-batch, a multiply and an add counted as two."""

    forward: int
    backward: int


def dense_flops(
    entry: ModelEntry, batch_size: int, seq_len: int, *, fused_attention: bool | None = None
) -> StepFlops:
    """FLOPs of the matrix products of one micro-batch, by closed form and without torch.

    With T = batch x sequence tokens and W the weights of all linear layers, the language model head among
    them (embeddings looked up are no product), forward is 2 T W plus attention's two products a layer, 2 x 2
    x batch x sequence^2 x heads x head size. The causal half is not left out, as `torch.utils.flop_counter`
    does not leave it out. Backward is 4 T W plus four such attention products, or five where a fused kernel
    computes the scores again. Recomputation of activations is not in it.

    Args:
        entry: a dense decoder or an encoder with a masked language model head.
        batch_size: samples.
        seq_len: tokens of a sample.
        fused_attention: whether attention is one fused operation (`sdpa`) or separate products (`eager`); None:
            as `build` makes it, fused where the architecture has it.

    Raises:
        UsageError: the architecture has no closed form here, or its configuration lacks a size.
    """
    if entry.architecture not in _GATED | _PLAIN | _ENCODERS:
        raise UsageError(f"model {entry.name}: {entry.architecture} has no closed form here: capture it instead")
    heads = _size(entry, "num_attention_heads", "n_head", "n_heads")
    head_dim = entry.config.get("head_dim") or _hidden(entry) // heads
    layers = _size(entry, "num_hidden_layers", "n_layer", "n_layers")
    tokens = batch_size * seq_len
    linear = 2 * tokens * (layers * _layer_weights(entry, heads, head_dim) + _head_weights(entry))
    if entry.architecture == "BertForPreTraining":
        linear += 2 * batch_size * (_hidden(entry) ** 2 + 2 * _hidden(entry))  # pooler and next-sentence head
    product = 2 * tokens * seq_len * heads * head_dim * layers
    if fused_attention is None:
        fused_attention = entry.architecture not in _NEVER_FUSED
    backward_products = _FUSED_BACKWARD_PRODUCTS if fused_attention else _EAGER_BACKWARD_PRODUCTS
    return StepFlops(linear + 2 * product, 2 * linear + backward_products * product)


def _layer_weights(entry: ModelEntry, heads: int, head_dim: int) -> int:
    config, hidden = entry.config, _hidden(entry)
    key_value_heads = config.get("num_key_value_heads") or heads
    attention = hidden * head_dim * (2 * heads + 2 * key_value_heads)
    default_ffn = hidden * config.get("expansion_ratio", 4)
    ffn = _optional(config, "intermediate_size", "ffn_dim", "n_inner", "hidden_dim") or default_ffn
    return attention + (3 if entry.architecture in _GATED else 2) * hidden * ffn


def _head_weights(entry: ModelEntry) -> int:
    hidden, vocabulary = _hidden(entry), _size(entry, "vocab_size")
    if entry.architecture in _ENCODERS:
        return hidden * hidden + hidden * vocabulary  # a dense transform comes before the projection
    embedding = entry.config.get("word_embed_proj_dim") or hidden
    projections = 2 * hidden * embedding if embedding != hidden else 0  # OPT-350m's embedding is narrower
    return projections + embedding * vocabulary


def _hidden(entry: ModelEntry) -> int:
    return _size(entry, "hidden_size", "n_embd", "d_model", "dim")


def _size(entry: ModelEntry, *keys: str) -> int:
    value = _optional(entry.config, *keys)
    if value is None:
        raise UsageError(f"model {entry.name}: its configuration has no '{keys[0]}'")
    return value


def _optional(config: Mapping[str, Any], *keys: str) -> int | None:
    return next((int(config[key]) for key in keys if config.get(key) is not None), None)
