"""The catalog: every entry of `data/*.toml`, by name and alias."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from echograph.errors import DataError, UnknownNameError
from echograph.models.entry import ModelEntry


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
