"""What the zoo knows of models without building them: entries, by name and alias, and closed forms of FLOPs.

An entry stands in `data/*.toml`, or is a user's Hugging Face configuration (`from_config`, which asks
transformers for the training head).
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from echograph.errors import DataError, InputError, MissingExtraError, UnknownNameError, UsageError
from echograph.ir.files import read_whole

ModelKind = Literal[
    "causal-lm",
    "masked-lm",
    "seq2seq",
    "text-classification",
    "token-classification",
    "question-answering",
    "image-classification",
    "image-segmentation",
    "video-classification",
    "sound-classification",
    "image-text",
    "image-text-pairs",
    "speech-recognition",
    "masked-image",
    "features",
]
"""What a model is trained on. Features have no loss of their own: the mean square of the output stands for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One model: an architecture, its configuration and where the facts come from.

    Attributes:
        name: the one name under which the zoo lists it.
        aliases: other accepted names, public checkpoint names among them; case does not matter.
        family: what it is grouped with.
        architecture: a `transformers` class, or a module of the zoo's own (`echograph.models.build.OWN`).
        kind: which training task its head, inputs and loss belong to.
        config: keyword arguments of the architecture's configuration, under their public names.
        source: where the configuration is published; says so where a value is assumed.
        default_batch_size: samples of a micro-batch where the user names none (a working choice, not a fact).
        default_seq_len: tokens of a sample, or the side of a square image in pixels.
        parameters: exact count of the training module's parameters, shared ones counted once; None where the
            entry was read from a user's configuration.
        forward_flops: FLOPs of the forward pass of one sample at the default length, as captured; None where
            `dense_flops` has a closed form.
        backward_flops: FLOPs of its backward pass, likewise.
        published_parameters: the count its publication or model card states, rounded as it is there.
    """

    name: str
    family: str
    architecture: str
    kind: ModelKind
    source: str
    default_batch_size: int
    default_seq_len: int
    config: Mapping[str, Any] = field(hash=False)
    aliases: tuple[str, ...] = ()
    parameters: int | None = None
    published_parameters: int | None = None
    forward_flops: int | None = None
    backward_flops: int | None = None

    def with_config(self, **changes: Any) -> ModelEntry:
        """The same architecture with other configuration values (fewer layers, say); its counts are unknown.

        Args:
            changes: configuration keys and their new values.
        """
        return replace(
            self,
            config={**self.config, **changes},
            aliases=(),
            parameters=None,
            published_parameters=None,
            forward_flops=None,
            backward_flops=None,
        )


def model_names() -> tuple[str, ...]:
    """The names of the zoo's models: families in alphabetical order, each in the order of its data file."""
    return tuple(entry.name for entry in model_entries())


@cache
def model_entries() -> tuple[ModelEntry, ...]:
    """Every model of the zoo, in the order of `model_names`.

    Raises:
        DataError: a data file breaks a rule.
    """
    folder = files("echograph.models").joinpath("data").iterdir()
    paths = {path.name: path for path in folder if path.name.endswith(".toml")}
    return tuple(entry for _, path in sorted(paths.items()) for entry in read_family(path))


def get_model(name: str) -> ModelEntry:
    """The model of that name or alias.

    Args:
        name: a name (`llama-3-8b`) or a public checkpoint name (`meta-llama/Meta-Llama-3-8B`); case does not
            matter.

    Raises:
        UnknownNameError: no such model; lists the choices and the nearest.
    """
    index = _index()
    entry = index.get(name.lower())
    if entry is None:
        # Aliases are left out of the list that the error prints, save the one that the user may have meant.
        nearest = difflib.get_close_matches(name.lower(), index, n=1, cutoff=0.5)
        raise UnknownNameError("model", name, {*model_names(), *nearest})
    return entry


def read_family(path: Traversable) -> Iterator[ModelEntry]:
    """Reads a family's data file: defaults of any field, a shared `[config]`, one `[[models]]` a model.

    Args:
        path: the TOML file.

    Raises:
        DataError: the file is not TOML, or an entry lacks a field, has an unknown one or one of a wrong type.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DataError(f"model data {path.name}: {error}") from error
    models = data.pop("models", [])
    shared = data.pop("config", {})
    for model in models:
        yield _entry(path.name, {**data, **model, "config": {**shared, **model.get("config", {})}})


def _entry(file: str, fields: dict[str, Any]) -> ModelEntry:
    import msgspec

    unknown = fields.keys() - ModelEntry.__dataclass_fields__.keys()
    if unknown:
        raise DataError(f"model data {file}: unknown key '{min(unknown)}' in '{fields.get('name', '?')}'")
    try:
        return msgspec.convert(fields, ModelEntry)
    except msgspec.ValidationError as error:
        raise DataError(f"model data {file}: '{fields.get('name', '?')}': {error}") from error


@cache
def _index() -> dict[str, ModelEntry]:
    index: dict[str, ModelEntry] = {}
    for entry in model_entries():
        for name in (entry.name, *entry.aliases):
            other = index.setdefault(name.lower(), entry)
            if other is not entry:
                raise DataError(f"model data: '{name}' names both {other.name} and {entry.name}")
    return index


MAX_CONFIG_BYTES = 4 * 2**20
DEFAULT_TOKENS = {
    "causal-lm": 4096,
    "image-text": 4096,
    "masked-lm": 512,
    "text-classification": 512,
    "token-classification": 512,
    "question-answering": 512,
    "seq2seq": 512,
    "speech-recognition": 448,
}
DEFAULT_IMAGE_SIDE = 224
_NOT_OF_THE_MODEL = {
    *("architectures", "model_type", "auto_map", "quantization_config", "transformers_version"),
    *("dtype", "torch_dtype", "_attn_implementation", "_name_or_path", "_commit_hash"),
}


def require_transformers() -> None:
    """Checks that what modules are built from is there.

    Raises:
        MissingExtraError: torch or transformers is not installed.
    """
    from importlib.util import find_spec

    for package in ("torch", "transformers"):
        if find_spec(package) is None:
            raise MissingExtraError(package, "torch", "building a model")


def from_config(source: str | Path | Mapping[str, Any], *, name: str | None = None) -> ModelEntry:
    """Reads a configuration into an entry that `build` accepts.

    The training class is the first of `architectures`, which must have a head that the zoo knows how to feed
    (language modelling, sequence to sequence, classification of texts, tokens, images, videos and sound, and
    the other kinds of `ModelKind`); where it is missing or the type's headless model, the model type's own.
    Code that the configuration points to (`auto_map`) is never run, weights' quantization is left out, nothing
    is downloaded.

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


def _training_class(where: str, model_type: str, architectures: object) -> tuple[str, ModelKind]:
    require_transformers()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise InputError(f"{where}: model type '{model_type[:80]}' is not one of the installed transformers'")
    heads, headless = _heads(model_type)
    wanted = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    # Case is ignored, for MPT's own code spells its class otherwise than transformers does.
    for name, kind in heads.items():
        if name.lower() == wanted.lower():
            return name, kind
    if heads and wanted in ("", *headless):
        return next(iter(heads.items()))
    if wanted in headless and _takes_images_or_sound(wanted):
        return wanted, "features"
    if not heads:
        raise InputError(f"{where}: model type '{model_type}' has no training head known here")
    raise InputError(
        f"{where}: no training inputs known for '{wanted[:80]}': name one of {', '.join(heads)} instead"
    )


def _heads(model_type: str) -> tuple[dict[str, ModelKind], tuple[str, ...]]:
    """The type's classes with a training head, the one that its pre-training uses first, and those without."""
    from transformers.models.auto import modeling_auto as auto

    def names(table: Mapping[str, Any]) -> tuple[str, ...]:
        found = table.get(model_type, ())
        return (found,) if isinstance(found, str) else tuple(found)

    hearing = {  # language models that hear and do not see; one with a class for text alone is trained on text
        kind: name
        for kind, name in auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.items()
        if kind not in (*auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    }
    tables: tuple[tuple[ModelKind, Mapping[str, Any]], ...] = (
        ("image-text", auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
        ("image-text-pairs", auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES),
        ("speech-recognition", auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES),
        ("speech-recognition", auto.MODEL_FOR_CTC_MAPPING_NAMES),
        ("speech-recognition", hearing),
        ("seq2seq", auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
        ("masked-lm", auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
        ("causal-lm", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("image-classification", auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
        ("text-classification", auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
        ("token-classification", auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES),
        ("question-answering", auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES),
        ("sound-classification", auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES),
        ("video-classification", auto.MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES),
        ("image-segmentation", auto.MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES),
    )
    heads: dict[str, ModelKind] = {}
    for kind, table in tables:
        for name in names(table):
            heads.setdefault(name, kind)  # BART's one class stands in two tables
    for name in names(auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES):
        if name not in heads and name.endswith("MAEForPreTraining"):
            heads[name] = "masked-image"
    if model_type == "bert":
        heads["BertForPreTraining"] = "masked-lm"  # in none of these tables
    return heads, names(auto.MODEL_MAPPING_NAMES)


def _takes_images_or_sound(architecture: str) -> bool:
    import transformers

    return getattr(transformers, architecture).main_input_name in (
        "pixel_values",
        "input_values",
        "input_features",
    )


def _default_seq_len(config: Mapping[str, Any], kind: ModelKind) -> int:
    if (tokens := DEFAULT_TOKENS.get(kind)) is None:
        side = {**config, **_part(config, "vision_config")}.get("image_size", DEFAULT_IMAGE_SIDE)
        return side if isinstance(side, int) else DEFAULT_IMAGE_SIDE
    text = {**config, **_part(config, "text_config")}
    keys = ("max_target_positions", "max_position_embeddings", "n_positions", "max_seq_len")
    return min([tokens, *(int(text[key]) for key in keys if isinstance(text.get(key), int))])


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = config.get(name)
    return part if isinstance(part, Mapping) else {}


GATED_MLP: Mapping[str, bool] = {
    "LlamaForCausalLM": True,
    "MistralForCausalLM": True,
    "Qwen2ForCausalLM": True,
    "Qwen3ForCausalLM": True,
    "Phi3ForCausalLM": True,
    "GemmaForCausalLM": True,
    "Gemma2ForCausalLM": True,
    "GPT2LMHeadModel": False,
    "OPTForCausalLM": False,
    "BloomForCausalLM": False,
    "MptForCausalLM": False,
    "PhiForCausalLM": False,
    "NemotronForCausalLM": False,
}
"""Dense decoders, and whether their feed-forward network is gated, so that it has three matrices and not two."""
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
    if entry.architecture not in {*GATED_MLP, *_ENCODERS}:
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
    return attention + (2 + GATED_MLP.get(entry.architecture, False)) * hidden * ffn


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
