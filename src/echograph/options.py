"""Options that are the fields of a dataclass: their words stand once, for libraries, files and command lines."""

from __future__ import annotations

from dataclasses import field, fields
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints


def option(default: Any, text: str, shown: str = "", *, least: float | None = None, letter: str = "") -> Any:
    """A field of a frozen dataclass that is also an option.

    Args:
        default: the value of a field that is not given.
        text: help on the command line.
        shown: what the help says of the default; "": the default itself, where there is one.
        least: the least value that the command line takes.
        letter: its short form on the command line, as "m" for -m; "": none.
    """
    return field(default=default, metadata={"help": text, "shown": shown, "least": least, "letter": letter})


def option_name(field_name: str) -> str:
    """A field as the command line spells it."""
    return "--" + field_name.replace("_", "-")


def kinds(options: type) -> dict[str, Any]:
    """The type of every field, without None; a choice of words is text."""
    hints = get_type_hints(options)
    return {f.name: _kind(hints[f.name]) for f in fields(options)}


def _kind(hint: Any) -> Any:
    if isinstance(hint, UnionType):
        (hint,) = (h for h in get_args(hint) if h is not type(None))
    return str if get_origin(hint) is Literal else hint


def given(options: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults."""
    return {f.name: getattr(options, f.name) for f in fields(options) if getattr(options, f.name) != f.default}
