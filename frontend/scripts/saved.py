"""What a script saves in a run and loads again: kept in memory by the file's name, since there are no values to write."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Saved:
    """What was saved in a run, by file.

    Args:
        note: is told that nothing was written.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._kept: dict[str, Any] = {}

    def saving(self, original: Callable[..., Any]) -> Callable[..., None]:
        """`torch.save` that keeps what it is given."""
        del original

        def save(obj: Any, f: Any, *_: Any, **__: Any) -> None:
            self._note("torch.save writes nothing: there are no values to save")
            if (name := _file(f)) is not None:
                self._kept[name] = obj

        return save

    def loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`torch.load` that gives a copy of what the run saved there, and reads all other files."""

        def load(f: Any, *args: Any, **kwargs: Any) -> Any:
            name = _file(f)
            if name is None or name not in self._kept:
                return original(f, *args, **kwargs)
            try:
                return copy.deepcopy(self._kept[name])
            except (TypeError, RuntimeError, NotImplementedError):  # a process group, a lock
                return self._kept[name]

        return load


def _file(f: Any) -> str | None:
    name = f if isinstance(f, str | os.PathLike) else getattr(f, "name", None)
    return str(Path(os.fspath(name)).absolute()) if isinstance(name, str | os.PathLike) else None
