"""Micro-batches of models that see images or hear sound, shaped by fields of their own configurations.

What a model takes, it says in the signature of its forward pass: patches with their grid (Qwen-VL), tiles
(LLaVA-NeXT, Llama 3.2 Vision), or whole images. How many tokens of the text stand for an image, its own vision
tower says, which is run once without data. A sample has one square image, as large as the vision tower's own, or
`IMAGE_SIDE` where it takes any, and sound as long as the model's window, or `SECONDS`.
"""

from __future__ import annotations

import inspect
import itertools
import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from echograph.errors import InputError, UsageError

IMAGE_SIDE = 448
"""Pixels, where a model takes images of any size (a working choice, not a fact)."""

SECONDS, SAMPLES_PER_S, FRAMES_PER_S = 10, 16_000, 100
"""Of sound, where a model takes any length; the rates are those of wav2vec 2.0 (Baevski et al. 2020, section 4.1)
and of Whisper's spectrograms (Radford et al. 2022, section 2.2)."""

_BINS = ("num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim", "feature_projection_input_dim")
"""What configurations call the numbers of a frame of a spectrum."""

IGNORED = -100
"""Label of a position that has no loss (`torch.nn.functional.cross_entropy`)."""


def image_text(module: nn.Module, batch_size: int, seq_len: int) -> dict[str, Tensor]:
    """Images in a text, one a sample, at its beginning; every other position is labelled.

    Args:
        module: a model of the images and the text.
        batch_size: samples.
        seq_len: tokens of a sample, those that stand for its image among them.

    Raises:
        UsageError: the tokens do not hold the image.
        InputError: how the model takes images is not known here.
    """
    config: Any = module.config
    tower = _tower(module)
    if tower is None:
        return _image_beside_text(module, batch_size, seq_len)
    inputs = images(module, batch_size)
    if "cross_attention_mask" in _parameters(module.forward):
        tiles = config.vision_config.max_num_tiles
        inputs["cross_attention_mask"] = torch.ones(batch_size, seq_len, 1, tiles, dtype=torch.long)
        ids = text_ids(config, batch_size, seq_len)
        return {"input_ids": ids, "labels": ids.clone(), **inputs}
    image = _token(config, "image")
    count = _rows(module, tower, inputs) // batch_size
    return _beside_text(module, batch_size, seq_len, "an image", image, count) | inputs


def _tower(module: nn.Module) -> Any:
    """What makes tokens of images, of the model or of the one inside its head; None: no tokens stand for them."""
    inner = getattr(module, "model", None)
    return getattr(module, "get_image_features", None) or getattr(inner, "get_image_features", None)


def _image_beside_text(module: nn.Module, batch_size: int, seq_len: int) -> dict[str, Tensor]:
    """An image that the text attends to, or that the model itself puts before it; none where it takes none."""
    names = _parameters(module.forward)
    ids = text_ids(module.config, batch_size, seq_len)
    if "pixel_values" not in names and "input_ids" not in names:
        raise InputError(f"{type(module).__name__}: it takes neither 'pixel_values' nor 'input_ids'")
    if "pixel_values" not in names:
        return {"input_ids": ids, "labels": ids.clone()}
    if "decoder_input_ids" in names:
        return {**images(module, batch_size), "decoder_input_ids": ids, "labels": ids.clone()}
    return {"input_ids": ids, "labels": ids.clone(), **images(module, batch_size)}


def sound_text(module: nn.Module, batch_size: int, seq_len: int) -> dict[str, Tensor]:
    """Sound in a text, as `image_text` has images: for language models that hear.

    Args:
        module: a model of the sound and the text.
        batch_size: samples.
        seq_len: tokens of a sample, those that stand for its sound among them.

    Raises:
        UsageError: the tokens do not hold the sound.
        InputError: how the model takes sound is not known here.
    """
    config: Any = module.config
    inputs = sound(module, batch_size)
    for mask in ("input_features_mask", "feature_attention_mask"):
        if _demands(module.get_audio_features, mask):
            frames = inputs["input_features"].shape[-1]
            inputs[mask] = torch.ones(batch_size, frames, dtype=torch.long)
    tower, turned = module.get_audio_features, inputs | {"input_features": inputs["input_features"].mT}
    if not _takes(module, tower, inputs) and _takes(module, tower, turned):
        inputs = turned  # which of the two the frames are, no configuration says
    count = _rows(module, tower, inputs) // batch_size
    return _beside_text(module, batch_size, seq_len, "sound", _token(config, "audio"), count) | inputs


def _beside_text(
    module: nn.Module, batch_size: int, seq_len: int, what: str, token: int, count: int
) -> dict[str, Tensor]:
    """A text behind as many tokens as stand for an image or for sound, which have no labels."""
    config: Any = module.config
    if count >= seq_len:
        raise UsageError(f"{seq_len} tokens do not hold {what} of {count} tokens and a text: give more")
    text = text_ids(config, batch_size, seq_len - count)
    ids = torch.cat([torch.full((batch_size, count), token), text], dim=1)
    stands = ids == token
    types = {
        name: stands.long()
        for name in ("token_type_ids", "mm_token_type_ids")
        if name in _parameters(module.forward)
    }
    return {"input_ids": ids, "labels": torch.where(stands, IGNORED, ids), **types}


def image_text_pairs(module: nn.Module, batch_size: int, image_side: int) -> dict[str, Tensor]:
    """Images, and texts as long as the text tower's positions.

    Args:
        module: a model that tells pairs from others by a contrastive loss, over the samples of one rank.
        batch_size: pairs.
        image_side: pixels.
    """
    config: Any = module.config
    tokens = int(config.text_config.max_position_embeddings)
    inputs = {
        "input_ids": text_ids(config, batch_size, tokens),
        "pixel_values": pixels(batch_size, config.vision_config.num_channels, image_side, image_side),
    }
    return inputs | {"return_loss": torch.tensor(True)}


def images(module: nn.Module, batch_size: int) -> dict[str, Tensor]:
    """One image a sample in the form that a model takes, with what it is told of them.

    Raises:
        InputError: its configuration says nothing of images.
    """
    config: Any = module.config
    vision = getattr(config, "vision_config", None) or getattr(config, "encoder", None)
    if vision is None:
        raise InputError(
            f"{type(module).__name__}: its configuration has no 'vision_config': how it takes images is not known"
        )
    names = _parameters(module.forward)
    channels = _field(vision, "num_channels", "in_channels", "in_chans", default=3)
    side = image_side(vision)
    if "image_grid_thw" in names:
        return _patches(module, vision, batch_size, channels, side)
    if "target_sizes" in names:
        rows = max(side // (4 * vision.patch_size), 1) * 4  # twice, two by two are merged into one
        return {
            "pixel_values": pixels(1, channels, vision.patch_size, batch_size * rows * rows * vision.patch_size),
            "target_sizes": torch.tensor([[rows, rows]] * batch_size, dtype=torch.int32),
        }
    shape: tuple[int, ...] = (batch_size, channels, side, side)
    if "aspect_ratio_ids" in names:
        tiles = vision.max_num_tiles
        return {
            "pixel_values": pixels(batch_size, 1, tiles, channels, side, side),
            "aspect_ratio_ids": torch.ones(batch_size, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(batch_size, 1, tiles, dtype=torch.long),
        }
    if "pixel_attention_mask" in names:
        return {"pixel_values": pixels(batch_size, 1, channels, side, side)}
    pinpoints = getattr(config, "image_grid_pinpoints", None)
    sizes = {}
    if pinpoints or _demands(_tower(module), "image_sizes"):
        sizes["image_sizes"] = torch.tensor([[side, side]] * batch_size)
    if pinpoints:
        count = sys.modules[type(module).__module__].image_size_to_num_patches
        tiles = count((side, side), pinpoints, side)
        shape = (batch_size, tiles, channels, side, side)
    return {"pixel_values": pixels(*shape), **sizes}


def _patches(module: nn.Module, vision: Any, batch_size: int, channels: int, side: int) -> dict[str, Tensor]:
    """Patches of images in one list, and the grid of each: frames, rows and columns of patches."""
    patch, merged = vision.patch_size, _field(vision, "spatial_merge_size", default=1)
    rows = max(side // (patch * merged), 1) * merged
    frames = _field(vision, "temporal_patch_size", "patch_temporal", default=1)
    count, numbers = batch_size * rows * rows, channels * frames * patch * patch
    grid = {"image_grid_thw": torch.tensor([[1, rows, rows]] * batch_size)}
    listed = {"pixel_values": pixels(count, numbers), **grid}
    whole = {"pixel_values": pixels(count, channels * frames, patch, patch), **grid}
    # Whether a patch is a row of numbers or an image, no configuration says.
    tower = _tower(module)
    return whole if not _takes(module, tower, listed) and _takes(module, tower, whole) else listed


def _takes(module: nn.Module, tower: Any, inputs: dict[str, Tensor]) -> bool:
    """Whether a tower runs on such inputs."""
    try:
        _rows(module, tower, inputs)
    except InputError:
        return False
    return True


def image_side(vision: Any) -> int:
    """Pixels of a side of the images that a vision configuration is made for."""
    size = getattr(vision, "image_size", None)
    if isinstance(size, list | tuple):
        size = size[0]
    return size if isinstance(size, int) else IMAGE_SIDE


def _token(config: Any, what: str) -> int:
    """The token that stands for an image or for sound, a row each."""
    for name in (f"{what}_token_id", f"{what}_token_index"):
        if isinstance(token := getattr(config, name, None), int):
            return token
    raise InputError(f"{type(config).__name__}: no '{what}_token_id': where the text has its {what} is not known")


def _rows(module: nn.Module, tower: Any, inputs: dict[str, Tensor]) -> int:
    """Rows that a tower gives to the text, of all images or sounds."""
    names = _parameters(tower)
    passed_on = any(one.kind is one.VAR_POSITIONAL for one in names.values())
    try:
        with torch.no_grad():
            features = tower(**{name: one for name, one in inputs.items() if passed_on or name in names})
    except Exception as error:  # whatever the library does with what it did not expect, or has no values
        reason = str(error).strip().partition("\n")[0]
        what = "audio" if "audio" in tower.__name__ else "vision"
        raise InputError(
            f"{type(module).__name__}: its {what} tower does not run without data: {reason}"
        ) from error
    if not isinstance(features, Tensor | list | tuple):
        pooled = features.pooler_output
        features = features.last_hidden_state if pooled is None else pooled
    parts = features if isinstance(features, list | tuple) else [features]
    return sum(part.shape[:-1].numel() for part in parts)


def sound(module: nn.Module, batch_size: int) -> dict[str, Tensor]:
    """What a model hears: frames of a spectrogram as long as its window, or samples of a wave.

    Raises:
        InputError: its configuration says nothing of spectra.
    """
    config: Any = module.config
    if module.main_input_name == "input_values":
        if frames := getattr(config, "max_length", 0):  # the audio spectrogram transformer's word for its input
            return {"input_values": pixels(batch_size, frames, config.num_mel_bins)}
        return {"input_values": pixels(batch_size, SECONDS * SAMPLES_PER_S)}
    audio = getattr(config, "encoder_config", None) or getattr(config, "audio_config", None) or config
    bins = _field(audio, *_BINS, default=0)
    if not bins:
        raise InputError(
            f"{type(module).__name__}: no 'num_mel_bins' in its configuration: what it hears is not known"
        )
    if (positions := getattr(audio, "max_source_positions", None)) and hasattr(audio, "num_mel_bins"):
        # Whisper and its descendants: before the positions stands a convolution of stride two (Radford et al.
        # 2022, section 2.2).
        return {"input_features": pixels(batch_size, bins, 2 * positions)}
    return {"input_features": pixels(batch_size, FRAMES_PER_S * SECONDS, bins)}


def text_ids(config: Any, batch_size: int, tokens: int) -> Tensor:
    """Token ids that count up and wrap around, between those that stand for something else than text."""
    text = config.get_text_config()
    vocabulary = int(text.vocab_size)
    marks = {
        value
        for name, value in vars(config).items()
        if name.endswith(("token_id", "token_index")) and isinstance(value, int) and 0 <= value < vocabulary
    }
    edges = sorted({-1, *marks, vocabulary})
    first, end = max(itertools.pairwise(edges), key=lambda gap: gap[1] - gap[0])
    count = batch_size * tokens
    return torch.arange(count).remainder(end - first - 1).add(first + 1).reshape(batch_size, tokens)


def pixels(*shape: int) -> Tensor:
    """Numbers from -1 to 1, as images and spectra are normalised."""
    return torch.linspace(-1.0, 1.0, math.prod(shape)).reshape(shape)


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _demands(function: Any, name: str) -> bool:
    """Whether a function has a parameter of that name, and no default for it."""
    asked = None if function is None else _parameters(function).get(name)
    return asked is not None and asked.default is inspect.Parameter.empty


def _field(config: Any, *names: str, default: int) -> int:
    return next((int(value) for name in names if (value := getattr(config, name, None)) is not None), default)
