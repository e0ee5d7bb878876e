"""The keys of a cluster's file, as the types have them, and documents to change one key of."""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Iterator
from typing import Any

from msgspec import inspect

from echograph.simulator.clusters import PRESETS, ClusterFile

Keys = tuple[str | int, ...]
"""The way to a key: names of tables; `*` is every entry of a list, or every name of a table."""

# What a file holds beside what the preset has, for keys of tables that presets leave out.
EXTRAS: dict[str, Any] = {
    "degraded": [{"link": "node 0 nic 0", "bandwidth": 0.5}, {"node": 1, "compute": 0.5}],
    "collectives": {"all_reduce": "ring"},
    "growth": {"ratio": 4, "hop_us": 1, "oversubscription": 1},
}


def leaves(kind: Any, path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Every key of a type, with its own type; entries of a list of tables are `*`."""
    if isinstance(kind, inspect.UnionType):
        kind = next(one for one in kind.types if not isinstance(one, inspect.NoneType))
    if isinstance(kind, inspect.StructType):
        for field in kind.fields:
            yield from leaves(field.type, (*path, field.encode_name))
    elif isinstance(kind, inspect.ListType):
        yield from leaves(kind.item_type, (*path, "*"))
    elif isinstance(kind, inspect.DictType):
        yield from leaves(kind.value_type, (*path, "*"))
    else:
        yield path, kind


KEYS = [path for path, _ in leaves(inspect.type_info(ClusterFile))]


def places(document: Any, path: Keys) -> Iterator[tuple[Any, str | int]]:
    """Where a document holds a key: each table or list, and the key in it."""
    if len(path) == 1:
        names = document if path[0] == "*" else [path[0]]
        yield from ((document, name) for name in names if name in document)
        return
    steps = [path[0]] if path[0] != "*" else range(len(document)) if isinstance(document, list) else list(document)
    for step in steps:
        if isinstance(document, list) or step in document:
            yield from places(document[step], path[1:])


def prepared(name: str, path: Keys) -> dict[str, Any]:
    """A preset's document, with the table that a key is of, and room for growth above its last level."""
    document = tomllib.loads((PRESETS / f"{name}.toml").read_text())
    for table in ("degraded", "collectives"):
        if path[0] == table:
            document[table] = copy.deepcopy(EXTRAS[table])
    if path == ("node", "gpu_spread"):
        document["node"]["gpu_spread"] = 0.02
    document["node"].setdefault("processor", "epyc-9654")
    if "growth" in path:
        document["network"].setdefault("growth", dict(EXTRAS["growth"]))
        document["max_gpus"] = document["network"]["growth"]["ratio"] * document["network"]["level"][-1]["gpus"]
    return document


def written(table: dict[str, Any], name: str = "") -> str:
    """A document as TOML: values first, then tables, then lists of tables."""
    rows = [f"{k} = {json.dumps(v)}" for k, v in table.items() if not isinstance(v, dict | list)]
    for key, value in table.items():
        path = f"{name}.{key}" if name else key
        if isinstance(value, dict):
            rows += [f"[{path}]", written(value, path)]
        if isinstance(value, list):
            rows += [f"[[{path}]]\n{written(entry, path)}" for entry in value]
    return "\n".join(rows)
