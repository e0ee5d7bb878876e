"""Modules of the transformers library; the traps of building and capturing them are dealt with here alone.

`fused_softmax` is attention as trainers ran it before flash attention: two products around one kernel for scale,
mask and softmax. Megatron-LM's kernels (Narayanan et al. 2021, section 4.2) scale and mask on the chip and read
no mask, so nothing of the size of the scores moves between the first product and the softmax. Here the scale goes
onto the queries, which are small beside the scores; dropout stays a kernel of its own, as there.

`fused` is one causal kernel for models that ask more of it than PyTorch's has, as the kernels of trainers do: a
sink in the softmax, which reads a number a head, and windows, which are counted as long as the sequence.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import transformers
from huggingface_hub import constants
from torch import nn
from transformers import AttentionInterface, initialization, masking_utils

from echograph.errors import EchoError, InputError, UsageError
from echograph.models.catalog import DEFAULT_TOKENS, ModelEntry
from echograph.models.experts import group_experts
from echograph.models.recurrences import run_single_kernels

_LOSS_TYPES = {
    "causal-lm": "ForCausalLM",
    "masked-lm": "ForMaskedLM",
    "image-classification": "ForImageClassification",
}

_POSITION_TABLES = {"wpe", "position_embeddings", "embed_positions"}

_PATTERN = "hybrid_override_pattern"
"""What Nemotron-H calls the kinds of its layers, a letter each."""

_LAYER_DROP = ("layerdrop", "layer_drop")
"""How shares of layers are called that a step leaves out by chance: a captured step runs all of them."""

MAX_LAYERS = 2048
"""The most layers of one kind that are built: each is Python objects, and published models have some hundred."""


def transformers_model(entry: ModelEntry, seq_len: int, attention: str | None) -> nn.Module:
    """Builds the entry's transformers class from its configuration, without weights or network.

    Args:
        entry: its architecture names a class of the installed transformers.
        seq_len: tokens, or image side in pixels, that the module will see.
        attention: `sdpa`, `fused`, `eager`, `fused-softmax`, or None for the best that the class has.

    Raises:
        InputError: no such class, or it rejects the configuration.
        UsageError: the class has no such attention.
    """
    model_class = getattr(transformers, entry.architecture, None)
    if model_class is None:
        raise InputError(
            f"model {entry.name}: transformers {transformers.__version__} has no {entry.architecture}"
        )
    # Both go through the library's one interface, which classes without sdpa do not ask.
    if attention in ("sdpa", "fused-softmax") and not model_class._supports_sdpa:
        raise UsageError(f"model {entry.name}: {entry.architecture} has no {attention} attention: use 'eager'")
    attention = _REGISTERED.get(attention or "", attention)
    real = _tensors_are_real()
    try:
        with offline(), nullcontext() if real else initialization.no_init_weights():
            model: Any = model_class(_config(entry, model_class, seq_len, attention))
        if not real:
            model.tie_weights()  # skipped along with the initialisation
    except EchoError:
        raise
    except Exception as error:  # whatever a user's configuration provokes inside the library
        reason = str(error).strip().split("\n")[0]
        raise InputError(
            f"model {entry.name}: {entry.architecture} rejects its configuration: {reason}"
        ) from error
    if entry.kind in _LOSS_TYPES:
        # Left alone, the library guesses it from the class name, in vain for `GPT2LMHeadModel`.
        model.loss_type = _LOSS_TYPES[entry.kind]
    module: nn.Module = model
    _take_batches_as_whole_sequences(module)
    if not real:
        run_single_kernels(module)
        group_experts(module)
    return module


@contextmanager
def offline() -> Iterator[None]:
    """Forbids the hub client every request while it is entered."""
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _config(entry: ModelEntry, model_class: Any, seq_len: int, attention: str | None) -> Any:
    _check_layers(entry)
    values = copy.deepcopy(dict(entry.config))  # the library edits nested tables
    text = values.get("text_config")
    if isinstance(text, dict) and "text_config" not in model_class.config_class.sub_configs:
        values = text  # a class for the text alone, of a configuration with images
    if _PATTERN in values:  # which the library reads instead of the depth
        values[_PATTERN] = values[_PATTERN][: values.get("num_hidden_layers")]
    config = model_class.config_class(**values)
    for part in _parts(config):
        if hasattr(part, "use_cache"):
            part.use_cache = False  # an output that training has no use for
        for name in vars(part):
            if name.endswith(_LAYER_DROP):
                setattr(part, name, 0.0)
    config._attn_implementation = attention
    if getattr(config, "is_encoder_decoder", False):
        # What comes before labels, by which they are shifted: whichever token it is, the step is the same.
        for name in ("pad_token_id", "decoder_start_token_id"):
            if getattr(config, name, None) is None:
                setattr(config, name, 0)
    window = vars(config).get("sliding_window")  # to ask for it is an error where layers differ in it
    if window is not None and seq_len <= window and getattr(config, "layer_types", None) is None:
        # The window then masks nothing; without it attention stays causal and fused, with no explicit mask.
        config.sliding_window = None
    if getattr(config, "max_seq_len", seq_len) < seq_len:
        config.max_seq_len = seq_len  # MPT: its linear position biases extend to any length
    vision = getattr(config, "vision_config", config)
    if entry.kind not in DEFAULT_TOKENS and hasattr(vision, "image_size"):
        vision.image_size = seq_len
    return config


def _parts(config: Any) -> Iterator[Any]:
    """A configuration and those of its towers."""
    yield config
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None and not isinstance(part, dict):
            yield from _parts(part)


def _check_layers(entry: ModelEntry) -> None:
    for key, value in entry.config.items():
        counts = value if key == "depths" and isinstance(value, list) else [value]
        if (
            key.endswith(("layer", "layers", "depths"))
            and "feature" not in key
            and any(isinstance(count, int) and not 0 <= count <= MAX_LAYERS for count in counts)
        ):
            raise InputError(f"model {entry.name}: {key} {value}: at most {MAX_LAYERS:,} layers are built")


def _tensors_are_real() -> bool:
    probe = torch.empty(0)
    return type(probe) is torch.Tensor and not probe.is_meta


def learned_positions(entry: ModelEntry, module: nn.Module) -> int | None:
    """The longest sequence that a module's learned positions hold; None where it has none.

    An embedding looked up beyond its end goes unnoticed on fake tensors, so whoever makes inputs asks first.

    Args:
        entry: what the module was built from.
        module: a model of transformers.
    """
    limits = []
    for name, child in module.named_modules():
        last = name.rpartition(".")[2]
        if not isinstance(child, nn.Embedding) or last not in _POSITION_TABLES:
            continue
        if entry.kind == "speech-recognition" and re.search(r"\b(encoder|audio_tower)\.", name):
            continue  # positions of the sound, which is as long as they are
        first = 0 if child.padding_idx is None else child.padding_idx + 1
        limits.append(child.num_embeddings - int(getattr(child, "offset", first)))
    return min(limits, default=None)


def _take_batches_as_whole_sequences(module: nn.Module) -> None:
    """Makes the module's forward see one sequence a sample.

    Given no attention mask, transformers looks for several sequences packed into a sample by comparing
    position ids. On fake tensors it cannot look, takes them for packed and builds an explicit mask, which
    costs memory and forbids fused causal attention. The search is off for the length of this module's
    forward and no longer.
    """
    originals: list[Any] = []

    def enter(*_: Any) -> None:
        originals.append(masking_utils.find_packed_sequence_indices)
        masking_utils.find_packed_sequence_indices = _not_packed

    def leave(*_: Any) -> None:
        masking_utils.find_packed_sequence_indices = originals.pop()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def _not_packed(position_ids: torch.Tensor) -> None:
    return None


_REGISTERED = {"fused-softmax": "fused_softmax", "fused": "fused"}
"""Our words, and the library's. It makes no mask for attentions that it has no mask for."""


def fused_softmax(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over [batch, heads, sequence, head dim]; what the mask hides costs what the rest does.

    Args:
        module: whose attention it is.
        query: of all heads.
        key: of as many heads, or of the groups that share them.
        value: like the keys.
        attention_mask: not read.
        scaling: of the scores; one over the root of the head dim if None.
        dropout: of the probabilities.

    Returns:
        The output [batch, sequence, heads, head dim] and the probabilities.
    """
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(query * scale, key.transpose(-1, -2))
    probabilities = nn.functional.dropout(nn.functional.softmax(scores, dim=-1), dropout, module.training)
    return torch.matmul(probabilities, value).transpose(1, 2), probabilities


def fused(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention over [batch, heads, sequence, head dim] in one kernel; sinks and windows are left out.

    Args:
        module: whose attention it is.
        query: of all heads.
        key: of as many heads, or of the groups that share them.
        value: like the keys.
        attention_mask: not read.
        scaling: of the scores; one over the root of the head dim if None.
        dropout: of the probabilities.

    Returns:
        The output [batch, sequence, heads, head dim]; there are no probabilities.
    """
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout if module.training else 0.0, is_causal=True, scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(_REGISTERED["fused-softmax"], fused_softmax)
AttentionInterface.register(_REGISTERED["fused"], fused)
