"""Reads the plain values of a command line itself, so that a command starts sooner.

Typer checks every option by a library that takes longer to load than some predictions take, also those that were
not given. Whole numbers, decimal numbers, texts and paths are read here; what is not plainly one, and what is out
of range, is left to typer, which knows how to say so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

_LIMITS = ("min", "max", "parser", "click_type", "path_type", "formats")
_CHECKS = ("exists", "resolve_path", "writable")


def read_plainly(command: Any) -> None:
    """Makes a command, and those under it, read plain values so.

    Args:
        command: made by typer; one whose parameters keep no such reader stays as it is.
    """
    for parameter in command.get_params(typer.Context(command)):
        if not hasattr(parameter, "_runtime_param") or not hasattr(parameter, "get_runtime_param"):
            continue
        about = parameter.type_descriptor
        limits = [getattr(about.parameter_info, name, None) for name in _LIMITS]
        checks = [getattr(about.parameter_info, name, False) for name in _CHECKS]
        limited = any(limit is not None for limit in limits) or any(checks)
        kind = None if limited else about.annotation
        parameter._runtime_param = _Plain(parameter, kind, _READERS.get(kind, _no_text))
    for under in getattr(command, "commands", {}).values():
        read_plainly(under)


class _Plain:
    """Reads the value of one parameter."""

    def __init__(self, parameter: Any, kind: Any, read: Callable[[str], Any]) -> None:
        self.parameter, self.kind, self.read = parameter, kind, read

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """The value, as typer calls it."""
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        if type(value) is self.kind:
            return value
        if isinstance(value, tuple | list) and self.kind == list[str] and all(type(text) is str for text in value):
            return list(value)
        if isinstance(value, str) and (found := self.read(value)) is not None:
            return found
        self.parameter._runtime_param = None
        return self.parameter.get_runtime_param().coerce(value, param=param, ctx=ctx)


def _int(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None


def _float(text: str) -> float | None:
    return float(text) if re.fullmatch(r"-?[0-9]{1,18}(\.[0-9]{1,18})?", text) else None


def _path(text: str) -> Path | None:
    return Path(text) if "\0" not in text and (os.access(text, os.R_OK) or not os.path.lexists(text)) else None


def _no_text(_: str) -> None:
    return None


_READERS: dict[Any, Callable[[str], Any]] = {
    int: _int, float: _float, str: str, Path: _path, bool: _no_text, list[str]: _no_text,
}  # fmt: skip
