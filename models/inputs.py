"""One micro-batch of training inputs for each kind of model."""

from __future__ import annotations

import inspect
import math
from typing import Any, assert_never

import torch
from torch import nn

from echograph.models import multimodal
from echograph.models.catalog import ModelEntry, ModelKind

NOISE_DENSITY = 0.15
MEAN_SPAN_TOKENS = 3
"""T5's span corruption (Raffel et al. 2020, section 3.3.4): 15 % of the tokens, in spans of 3 on average."""


def training_inputs(
    entry: ModelEntry, module: nn.Module, batch_size: int, seq_len: int
) -> dict[str, torch.Tensor]:
    """Keyword tensors of one micro-batch, labels included, on the default device.

    Args:
        entry: the model.
        module: built from it.
        batch_size: samples.
        seq_len: tokens of a sample (of the encoder's, for sequence to sequence), or the image side in pixels.
    """
    config: Any = module.config
    match entry.kind:
        case "causal-lm":
            tokens = _token_ids(config, batch_size, seq_len)
            return {"input_ids": tokens, "labels": tokens.clone()}
        case "masked-lm":
            tokens = _token_ids(config, batch_size, seq_len)
            inputs = {"input_ids": tokens, "labels": tokens.clone()}
            if "next_sentence_label" in inspect.signature(module.forward).parameters:
                inputs["next_sentence_label"] = torch.zeros(batch_size, dtype=torch.long)
            return inputs
        case "seq2seq" | "speech-recognition" if hasattr(module, "get_audio_features"):
            return multimodal.sound_text(module, batch_size, seq_len)
        case "seq2seq":
            return {
                "input_ids": _token_ids(config, batch_size, seq_len),
                "labels": _token_ids(config, batch_size, span_corruption_targets(seq_len)),
            }
        case "text-classification" | "token-classification" | "question-answering":
            return _labelled_text(entry.kind, config, batch_size, seq_len)
        case "image-classification" | "image-segmentation" | "video-classification":
            return _labelled_images(entry.kind, config, batch_size, seq_len)
        case "sound-classification":
            return {**multimodal.sound(module, batch_size), "labels": _classes(config, batch_size)}
        case "image-text":
            return multimodal.image_text(module, batch_size, seq_len)
        case "image-text-pairs":
            return multimodal.image_text_pairs(module, batch_size, seq_len)
        case "speech-recognition":
            text = multimodal.text_ids(config, batch_size, seq_len)
            return {**multimodal.sound(module, batch_size), "labels": text}
        case "masked-image" | "features":
            return _unlabelled(config, module, batch_size, seq_len)
        case _:
            assert_never(entry.kind)


def _labelled_text(kind: ModelKind, config: Any, batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
    """Texts with a class each, with a class a token, or with the first and last token of an answer."""
    inputs = {"input_ids": multimodal.text_ids(config, batch_size, seq_len)}
    match kind:
        case "text-classification":
            return inputs | {"labels": _targets(config, batch_size)}
        case "token-classification":
            return inputs | {"labels": _classes(config, batch_size, seq_len)}
        case _:
            answer = torch.zeros(batch_size, dtype=torch.long)
            return inputs | {"start_positions": answer, "end_positions": answer.clone()}


def _labelled_images(kind: ModelKind, config: Any, batch_size: int, side: int) -> dict[str, torch.Tensor]:
    """Images with a class each or a class a pixel, or videos with a class each."""
    image = (int(getattr(config, "num_channels", 3)), side, side)
    match kind:
        case "image-segmentation":
            return {
                "pixel_values": multimodal.pixels(batch_size, *image),
                "labels": _classes(config, batch_size, side, side),
            }
        case "video-classification":
            frames = int(getattr(config, "num_frames", None) or config.frames_per_clip)
            videos = multimodal.pixels(batch_size, frames, *image)
            name = "pixel_values_videos" if hasattr(config, "frames_per_clip") else "pixel_values"
            return {name: videos, "labels": _classes(config, batch_size)}
        case _:
            return {"pixel_values": multimodal.pixels(batch_size, *image), "labels": _classes(config, batch_size)}


def _targets(config: Any, batch_size: int) -> torch.Tensor:
    """What a text is judged by: its class, or numbers where there is one label, or several at once."""
    if config.problem_type == "multi_label_classification":
        return torch.zeros(batch_size, int(config.num_labels))
    if config.problem_type == "regression" or int(config.num_labels) == 1:
        return torch.zeros(batch_size, *[int(config.num_labels)] * (config.num_labels > 1))
    return _classes(config, batch_size)


def _classes(config: Any, *shape: int) -> torch.Tensor:
    """Classes that count up and wrap around."""
    return torch.arange(math.prod(shape)).remainder(max(int(config.num_labels), 1)).reshape(shape)


def _unlabelled(config: Any, module: Any, batch_size: int, length: int) -> dict[str, torch.Tensor]:
    """What a model takes whose loss needs no labels: an image, sound or tokens."""
    if module.main_input_name == "pixel_values":
        channels = int(getattr(config, "num_channels", 3))
        return {"pixel_values": multimodal.pixels(batch_size, channels, length, length)}
    if module.main_input_name in ("input_values", "input_features"):
        return multimodal.sound(module, batch_size)
    return {"input_ids": multimodal.text_ids(config, batch_size, length)}


def span_corruption_targets(seq_len: int) -> int:
    """Decoder tokens that span corruption makes beside `seq_len` encoder tokens (512 -> 114).

    A text of n tokens loses `noise` of them in `spans` spans. The encoder sees what is left, one sentinel a
    span and an end token; the decoder produces the noise, the same sentinels and an end token. n is the
    longest that fits.

    Args:
        seq_len: encoder tokens.
    """

    def lengths(n: int) -> tuple[int, int]:
        noise = min(max(round(n * NOISE_DENSITY), 1), n)
        spans = max(round(noise / MEAN_SPAN_TOKENS), 1)
        return n - noise + spans + 1, noise + spans + 1

    n = 1
    while lengths(n + 1)[0] <= seq_len:
        n += 1
    return lengths(n)[1]


def _token_ids(config: Any, batch_size: int, seq_len: int) -> torch.Tensor:
    vocabulary = int(config.get_text_config().vocab_size)
    return torch.arange(batch_size * seq_len).remainder(vocabulary).reshape(batch_size, seq_len)
