"""Options that are the fields of a dataclass: their words stand once, for libraries, files and command lines."""

from __future__ import annotations

from dataclasses import field, fields
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from echograph.errors import UsageError


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


def field_types(options: type) -> dict[str, Any]:
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


def parse_ranks(option: str, text: str, most: int = 1_000_000) -> tuple[int, ...]:
    """Ranks from "0,2,8-15", each once.

    Args:
        option: how it is called, for what is said of a wrong one.
        text: the value given.
        most: ranks that may be given.

    Raises:
        UsageError: it is no list of ranks, or too long a one.
    """
    found: dict[int, None] = {}
    for part in text.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        if not _is_rank(first) or (dash and not _is_rank(last)):
            raise UsageError(f"{option} {text[:40]}: give ranks with commas between them, as 0,17 or 0-7")
        for rank in range(int(first), int(last or first) + 1):
            found[rank] = None
            if len(found) > most:
                raise UsageError(f"{option}: over {most} ranks: give at most {most}")
    return tuple(found)


def _is_rank(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10
