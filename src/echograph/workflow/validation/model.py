"""The model of a row: a public one by its name, or one of the sizes that the row states."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from echograph.models import ModelEntry, get_model, model_entries
from echograph.models.catalog import GATED_MLP
from echograph.workflow.validation.table import MeasuredStep, Skip
from echograph.workflow.validation.trainers import Trainer

_SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab")
_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers"), "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"), "kv_heads": ("num_key_value_heads",),
    "ffn_hidden": ("intermediate_size", "n_inner"), "vocab": ("vocab_size",),
}  # fmt: skip
"""What configurations call the columns."""

_BY_SIZES = (
    "LlamaForCausalLM", "MistralForCausalLM", "GPT2LMHeadModel", "OPTForCausalLM", "BloomForCausalLM",
    "MptForCausalLM",
)  # fmt: skip
"""Architectures that their sizes say all of."""

AGREES = 0.1
"""How far, relatively, the parameters that a row states may be from those of its sizes."""

FAR = 0.5
"""How much more parameters, relatively, a row may state than its sizes make: a second embedding."""

NEAR = 0.06
"""How far, relatively, the parameters in a free name may be from those of the model that it names."""

_METHODS = re.compile(r"\([^)]*\)|\b(sft|lora|qlora|pretrain|finetune)\b")
"""What a name says beyond the model."""

_EXPERTS = re.compile(r"\bmoe\b|mixture|expert|[0-9]x[0-9.]+b\b|\ba[0-9.]+b\b", re.IGNORECASE)
"""Names of mixtures of experts."""

_WRITTEN_OUT = re.compile(r"(eager|math|naive|vanilla|native|plain|standard|(no|non|not|without)\b)")
"""Attention of products and softmax, each a kernel of PyTorch's."""

_MANNERS = ("moe", "v", "model", "base", "instruct", "chat", "hf", "bf", "nvidia")
"""Words of names that tell no model from another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowModel:
    """The model of a row.

    Attributes:
        entry: as deep as it is.
        attention: its implementation of attention.
    """

    entry: ModelEntry
    attention: str

    @property
    def layers(self) -> int:
        """How deep it is."""
        return int(self.entry.config[self._depth])

    @property
    def has_experts(self) -> bool:
        """Whether its layers have experts, of which a token is sent to some."""
        return any("experts" in key and value for key, value in self.entry.config.items())

    def size(self, column: str) -> int:
        """A size under its name in tables; that of plain models where the configuration leaves it out."""
        plain = {"kv_heads": "heads", "ffn_hidden": "hidden"}
        value = _value(self.entry, column)
        return int(value) if value is not None else self.size(plain[column]) * (4 if column == "ffn_hidden" else 1)

    @property
    def _depth(self) -> str:
        return next(key for key in _KEYS["layers"] if key in self.entry.config)

    def of_layers(self, layers: int) -> ModelEntry:
        """The entry with another depth."""
        return self.entry.with_config(**{self._depth: layers})

    def with_layers(self, layers: int) -> RowModel:
        """The same with another depth."""
        return replace(self, entry=self.of_layers(layers))


def model_of(row: MeasuredStep, trainer: Trainer, assumed: list[str]) -> RowModel:
    """The model of a row.

    Args:
        row: names it, or states its sizes.
        trainer: whose dropout it has.
        assumed: told what the row does not say.

    Raises:
        Skip: neither a known name nor sizes enough.
    """
    known = public_model(row.text("model"))
    attention = _attention(row, trainer, assumed)
    if known is not None and known.architecture not in _BY_SIZES:
        model = RowModel(entry=_as_published(known, row), attention="fused")
        layers, dense = row.number("layers", model.layers), known.config.get("first_k_dense_replace", 0)
        if layers != model.layers and dense:
            assumed.append(
                f"its first {min(dense, layers)} of {layers} layers dense, as published of {model.layers}"
            )
        return model.with_layers(layers)
    if row.number("ep", 1) > 1 or (known is None and _EXPERTS.search(row.text("model"))):
        raise Skip(
            f"model '{row.text('model')}': its experts are not in the table's columns, nor is it a known one"
        )
    return RowModel(entry=_of_sizes(row, known, trainer, assumed), attention=attention)


def _attention(row: MeasuredStep, trainer: Trainer, assumed: list[str]) -> str:
    said = row.text("attention").lower()
    if not said:
        assumed.append("fused attention")
    if said.startswith("unfused"):
        return "fused-softmax" if trainer.fused_softmax or "fused softmax" in said else "eager"
    return "eager" if _WRITTEN_OUT.match(said) else "sdpa"


def with_known_sizes(row: MeasuredStep) -> MeasuredStep:
    """The row with the sizes that it leaves out, of the public model that it names; as it is if it names none."""
    known = public_model(row.text("model"))
    if known is None or known.architecture not in _BY_SIZES or known.parameters is None:
        return row
    sizes = {column: _value(known, column) for column in _SIZES} | {"params_B": known.parameters / 1e9}
    stated = {column: text for column, text in row.columns.items() if text}
    return MeasuredStep({column: str(size) for column, size in sizes.items() if size} | stated)


def public_model(name: str) -> ModelEntry | None:
    """The model of the zoo that a free spelling names, as "Qwen3_30B (tokendrop)"; None where none is such."""
    aside = " ".join(re.findall(r"\(([^)]*)\)", name))
    found = _named(_METHODS.sub(" ", name.lower()))
    return found if found is not None and _sized(aside, found) else None


def _named(free: str) -> ModelEntry | None:
    said = _plain(free)
    names = {_plain(word): entry for entry in model_entries() for word in (entry.name, *entry.aliases)}
    if said in names:
        return names[said]
    longer = {entry.name for word, entry in names.items() if len(said) > 5 and word.startswith(said)}
    if len(longer) == 1:
        return get_model(longer.pop())
    entries = [entry for entry in model_entries() if _same(free, entry)]
    return entries[0] if len(entries) == 1 else None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.rsplit("/", 1)[-1].lower())


def _same(name: str, entry: ModelEntry) -> bool:
    """Whether a name has an entry's words; its parameters may be said or not, and must be about the entry's."""
    return any(_words(name) == _words(word) for word in (entry.name, *entry.aliases)) and _sized(name, entry)


def _sized(text: str, entry: ModelEntry) -> bool:
    """Whether the parameters that a text says, but for active ones, are about an entry's."""
    said = re.findall(r"(?<![a-z0-9.])([0-9]+(?:\.[0-9]+)?)([bm])\b(?!.?act)", text.lower())
    counts = [float(number) * (1e9 if unit == "b" else 1e6) for number, unit in said]
    return all(abs(count - (entry.parameters or 0)) <= NEAR * count for count in counts)


def _words(name: str) -> list[str]:
    words = re.findall(r"[0-9.]+[bm]|a[0-9.]+b|[a-z]+|[0-9.]+", name.rsplit("/", 1)[-1].lower())
    return sorted(word for word in words if word not in _MANNERS and not re.fullmatch(r"a?[0-9.]+[bm]", word))


def _as_published(known: ModelEntry, row: MeasuredStep) -> ModelEntry:
    """A model that its sizes do not say all of; only its vocabulary and depth may be others.

    Raises:
        Skip: the row states another width or other heads, or the model is of images or has two stacks.
    """
    if "vocab_size" not in known.config or not any(key in known.config for key in _KEYS["layers"]):
        raise Skip(f"model '{row.text('model')}' ({known.name}) is not one stack of layers over tokens")
    for column in ("hidden", "heads", "kv_heads"):
        published = _value(known, column)
        if row.text(column) and published and row.number(column) != published:
            raise Skip(f"{column} is {row.text(column)}, and that of {known.name} is {published}")
    return known.with_config(
        vocab_size=row.number("vocab", int(known.config["vocab_size"])),
        max_position_embeddings=max(row.number("seq_len"), int(known.config.get("max_position_embeddings", 0))),
    )


def _of_sizes(row: MeasuredStep, known: ModelEntry | None, trainer: Trainer, assumed: list[str]) -> ModelEntry:
    if known is None and not any(row.text(column) for column in _SIZES):
        raise Skip(f"model '{row.text('model')}' is not a known one, and the row does not state its sizes")
    layers, hidden, heads = (row.number(column) for column in ("layers", "hidden", "heads"))
    kv_heads, ffn = row.number("kv_heads", heads), row.number("ffn_hidden", 4 * hidden)
    vocabulary, length = row.number("vocab"), row.number("seq_len")
    rest = _rest(hidden, heads, kv_heads, layers, vocabulary)
    gated = _is_gated(row, known, layers * hidden * ffn, rest, vocabulary * hidden, assumed)
    if not gated and kv_heads == heads:
        return get_model("megatron-gpt-1.7b").with_config(
            n_embd=hidden, n_layer=layers, n_head=heads, vocab_size=vocabulary, n_positions=length, n_inner=ffn,
            attn_pdrop=trainer.dropout, resid_pdrop=trainer.dropout, embd_pdrop=trainer.dropout,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
    return get_model("llama-3-8b" if gated else "nemotron-4-15b").with_config(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        intermediate_size=ffn, vocab_size=vocabulary, max_position_embeddings=length, head_dim=hidden // heads,
    )  # fmt: skip


def _value(entry: ModelEntry, column: str) -> Any:
    return next((entry.config[key] for key in _KEYS[column] if entry.config.get(key) is not None), None)


def _rest(hidden: int, heads: int, kv_heads: int, layers: int, vocabulary: int) -> int:
    """Parameters of attention and of one embedding."""
    return layers * (2 * hidden * hidden + 2 * hidden * hidden * kv_heads // heads) + vocabulary * hidden


def _is_gated(
    row: MeasuredStep, known: ModelEntry | None, matrix: int, rest: int, embedding: int, assumed: list[str]
) -> bool:
    """Whether the feed-forward network has three matrices.

    A known model's; else what the parameters stated count, with one embedding or two, whichever is nearer; where
    they are not stated, or agree with neither, a plain one is four times as wide as the model.

    Args:
        row: states parameters, in billions.
        known: the public model of its name.
        matrix: parameters of one matrix in all layers.
        rest: parameters of attention and of one embedding.
        embedding: parameters of one embedding.
        assumed: told what is inferred.

    Raises:
        Skip: it states far more, as mixtures of experts have.
    """
    if known is not None:
        return GATED_MLP[known.architecture]
    billions = None if row.of_layers_alone else row.real("params_B")
    if billions is not None:
        stated, most = 1e9 * billions, rest + 3 * matrix
        if stated > (1 + FAR) * most:
            raise Skip(f"params_B is {billions:g}, and its sizes make {most / 1e9:.3g} at most")
        plain, gated = (
            min(abs(rest + more + matrices * matrix - stated) for more in (0, embedding)) for matrices in (2, 3)
        )
        if min(plain, gated) <= AGREES * stated:
            return gated < plain
    gate = row.text("ffn_hidden") not in ("", str(4 * row.number("hidden")))
    assumed.append(f"a feed-forward network with{'' if gate else 'out'} a gate")
    return gate
