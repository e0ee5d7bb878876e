"""A user's Hugging Face configuration as an entry of the zoo's kind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echograph.errors import InputError
from echograph.ir.files import read_whole
from echograph.models.build import require_torch
from echograph.models.entry import Kind, ModelEntry

MAX_CONFIG_BYTES = 4 * 2**20
DEFAULT_TOKENS = {"causal-lm": 4096, "masked-lm": 512, "seq2seq": 512}
DEFAULT_IMAGE_SIDE = 224
_NOT_OF_THE_MODEL = {
    *("architectures", "model_type", "auto_map", "quantization_config", "transformers_version"),
    *("dtype", "torch_dtype", "_attn_implementation", "_name_or_path", "_commit_hash"),
}


def from_config(source: str | Path | Mapping[str, Any], *, name: str | None = None) -> ModelEntry:
    """Reads a configuration into an entry that `build` accepts.

    The training class is the first of `architectures`, which must have a head that the zoo knows how to feed
    (causal or masked language model, sequence to sequence, image classification); where it is missing or the
    type's headless model, the model type's own. Code that the configuration points to (`auto_map`) is never
    run, weights' quantization is left out, nothing is downloaded.

    Args:
        source: a directory with a `config.json`, such a file, or its content.
        name: what to call the model; by default the directory's name, or the model type.

    Raises:
        InputError: no such file, not JSON, no object, an unknown model type, or no training head known here.
        MissingExtraError: torch or transformers is not installed.
    """
    config, where = (dict(source), "configuration") if isinstance(source, Mapping) else _read(Path(source))
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise InputError(f"{where}: no 'model_type': is this a Hugging Face model's config.json?")
    architecture, kind = _training_class(where, model_type, config.get("architectures"))
    default_name = model_type if isinstance(source, Mapping) else _name(Path(source))
    return ModelEntry(
        name=name or default_name,
        family=model_type,
        architecture=architecture,
        kind=kind,
        source=where,
        default_batch_size=1,
        default_seq_len=_default_seq_len(config, kind),
        config={key: value for key, value in config.items() if key not in _NOT_OF_THE_MODEL},
    )


def _read(path: Path) -> tuple[dict[str, Any], str]:
    file = path / "config.json" if path.is_dir() else path
    data = read_whole(file, "give a config.json or a directory that holds one", MAX_CONFIG_BYTES)
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"{file}: not a JSON object: is this a Hugging Face model's config.json?")
    return config, str(file)


def _name(path: Path) -> str:
    return path.resolve().parent.name if path.name == "config.json" else path.resolve().stem


def _training_class(where: str, model_type: str, architectures: object) -> tuple[str, Kind]:
    require_torch()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise InputError(f"{where}: model type '{model_type[:80]}' is not one of the installed transformers'")
    heads, headless = _heads(model_type)
    if not heads:
        raise InputError(f"{where}: model type '{model_type}' has no training head known here")
    wanted = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    if wanted in ("", *headless):
        return next(iter(heads.items()))
    # Case is ignored, for MPT's own code spells its class otherwise than transformers does.
    for name, kind in heads.items():
        if name.lower() == wanted.lower():
            return name, kind
    raise InputError(
        f"{where}: no training inputs known for '{wanted[:80]}': name one of {', '.join(heads)} instead"
    )


def _heads(model_type: str) -> tuple[dict[str, Kind], tuple[str, ...]]:
    """The type's classes with a training head, the one that its pre-training uses first, and those without."""
    from transformers.models.auto import modeling_auto as auto

    def names(table: Mapping[str, Any]) -> tuple[str, ...]:
        found = table.get(model_type, ())
        return (found,) if isinstance(found, str) else tuple(found)

    tables: tuple[tuple[Kind, Mapping[str, Any]], ...] = (
        ("seq2seq", auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
        ("masked-lm", auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
        ("causal-lm", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("image-classification", auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
    )
    heads: dict[str, Kind] = {}
    for kind, table in tables:
        for name in names(table):
            heads.setdefault(name, kind)  # BART's one class stands in two tables
    if model_type == "bert":
        heads["BertForPreTraining"] = "masked-lm"  # in none of these tables
    return heads, names(auto.MODEL_MAPPING_NAMES)


def _default_seq_len(config: Mapping[str, Any], kind: Kind) -> int:
    if kind == "image-classification":
        side = config.get("image_size", DEFAULT_IMAGE_SIDE)
        return side if isinstance(side, int) else DEFAULT_IMAGE_SIDE
    keys = ("max_position_embeddings", "n_positions", "max_seq_len")
    positions = next((config[key] for key in keys if isinstance(config.get(key), int)), DEFAULT_TOKENS[kind])
    return min(positions, DEFAULT_TOKENS[kind])
