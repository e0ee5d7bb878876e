"""Files that people write, as typed records: a value that breaks its type or range is one line that names it.

Types are msgspec structs whose fields carry their ranges (`Annotated[float, msgspec.Meta(gt=0, le=1e6)]`), so that
what is permitted stands once, beside the field.
"""

from __future__ import annotations

import re
import reprlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import inspect

from echograph.errors import DataError, FormatError
from echograph.ir.files import read_whole

MAX_PARTS = 1000
"""Of a dotted key."""

_Record = TypeVar("_Record", bound=msgspec.Struct)


def require(holds: bool, rule: str) -> None:
    """For a record's `__post_init__`: a rule that no single field can hold.

    Raises:
        ValueError: it does not; the rule, which `convert` puts into its error.
    """
    if not holds:
        raise ValueError(rule)


def parse_toml(data: bytes, what: str) -> dict[str, Any]:
    """The table that a TOML file holds.

    Raises:
        DataError: it is not TOML, or beyond what the parser takes (deep tables, integers of thousands of digits).
    """
    try:
        # The parser's time grows with the square of a key's parts.
        if any(line.count(b".") > MAX_PARTS for line in data.splitlines()):
            raise RecursionError
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise DataError(f"{what}: is not TOML ({reason})") from error


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        DataError: it is no JSON object, or beyond what the parser takes.
    """
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise DataError(f"{what}: is no JSON object ({reason})") from error


def convert(document: Mapping[str, Any], record: type[_Record], what: str) -> _Record:
    """A document as a record.

    Args:
        document: what a file holds.
        record: the type.
        what: the file is, for errors.

    Raises:
        DataError: a key is missing, unknown, or has a value that is not permitted; names the key, the value, and
            what is permitted.
    """
    try:
        return msgspec.convert(document, record)
    except (msgspec.ValidationError, RecursionError) as error:
        raise DataError(f"{what}: {_line(str(error), document, record)}") from error


def read_json_record(path: Path, record: type[_Record], most: int, what: str) -> _Record:
    """The record that a JSON file holds, decoded in one go.

    Raises:
        InputError: the file cannot be read.
        FormatError: it is larger than `most`, or no JSON object.
        DataError: as `convert`.
    """
    data = read_whole(path, f"give the path of a {what}", most)
    try:
        return msgspec.json.decode(data, type=record)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        try:
            document = parse_json(data, str(path))
        except DataError as second:
            raise FormatError(f"{path}: not a {what}: {second}") from error
        raise DataError(f"{path}: not a {what}: {_line(str(error), document, record)}") from error


def _line(message: str, document: Mapping[str, Any], record: type[_Record]) -> str:
    """What msgspec says of a value, with the value and what is permitted in its place."""
    words, _, place = message.partition(" - at ")
    found = re.fullmatch(r"`\$(.*)`", place)
    if place and found is None:
        return message
    dotted, value, kind = "", document, record
    for name, number in re.findall(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]", found[1]) if found else ():
        try:
            name, value, kind = _step(value, kind, name, number)
        except (AttributeError, LookupError, TypeError):
            # The path goes on in a form of the value that the document does not have: what msgspec says must do.
            return message
        dotted += f".{name}"
    dotted = dotted.removeprefix(".")
    if not re.match("Expected|Number out|Integer value out|Invalid", words):
        return f"{dotted}: {words}" if dotted else words
    shown = reprlib.repr(value)
    return f"{dotted or 'the file'} = {shown[:60]}: give {_permitted(inspect.type_info(kind))}"


def _step(value: Any, kind: Any, name: str, number: str) -> tuple[str, Any, Any]:
    """One step along msgspec's path: the name of the step, what the document holds there, and its type."""
    if get_origin(kind) in (Union, UnionType):
        kind = next(one for one in get_args(kind) if one is not type(None))
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if name:
        return name, value.get(name), get_type_hints(kind, include_extras=True)[name]
    inner = get_args(kind)[-1]
    if number != "...":
        return number, value[int(number)], get_args(kind)[int(number)] if get_origin(kind) is tuple else inner
    # msgspec does not say which entry of a mapping, or of a list of numbers, it is.
    for key, entry in value.items():
        try:
            msgspec.convert(entry, inner, str_keys=True)
        except (msgspec.ValidationError, RecursionError):
            return str(key), entry, inner
    return "...", value, inner


def _permitted(kind: Any) -> str:
    """What a type takes, in words."""
    if isinstance(kind, inspect.UnionType):
        return " or ".join(dict.fromkeys(map(_permitted, kind.types)))
    if isinstance(kind, inspect.FloatType | inspect.IntType):
        noun = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
        return f"{noun}{_range(kind)}"
    if isinstance(kind, inspect.LiteralType):
        return f"one of {', '.join(map(str, kind.values))}"
    names: dict[Any, str] = {
        inspect.BoolType: "true or false",
        inspect.StrType: "text",
        inspect.NoneType: "nothing",
        inspect.StructType: "a table of keys",
        inspect.DictType: "a table of keys",
    }
    return names.get(type(kind), "a list")


def _range(kind: inspect.FloatType | inspect.IntType) -> str:
    words = [("above", kind.gt), ("from", kind.ge), ("below", kind.lt), ("up to", kind.le)]
    said = "".join(
        f" {word} {bound:,}" if isinstance(bound, int) else f" {word} {bound:g}"
        for word, bound in words
        if bound is not None
    )
    return said.replace("up to", "to") if kind.ge is not None else said
