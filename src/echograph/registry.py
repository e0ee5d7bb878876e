"""A lazy table: name -> `module:attribute`, imported when it is asked for and not before."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from echograph.errors import UnknownNameError


class Table(Mapping[str, Any]):
    """An immutable table of things that extend echograph; one line a thing.

    Args:
        kind: what the table holds, in the singular, for error messages ("frontend").
        entries: name -> `module:attribute`.
    """

    def __init__(self, kind: str, entries: Mapping[str, str]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> Any:
        """Imports and returns the entry.

        Raises:
            UnknownNameError: no such entry; lists the choices and the nearest.
        """
        target = self._entries.get(name)
        if target is None:
            raise UnknownNameError(self.kind, name, self._entries)
        module, _, attribute = target.partition(":")
        return getattr(importlib.import_module(module), attribute)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
