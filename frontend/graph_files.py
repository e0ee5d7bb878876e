"""Graphs that echograph wrote as JSON, GML or text, perhaps changed by another program since."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from echograph.errors import FormatError
from echograph.ir.files import read_whole
from echograph.ir.graph import JobGraph, StepGraph

MAX_BYTES = {"gml": 16 * 2**20, "json": 64 * 2**20, "text": 64 * 2**20}
"""Of a file. Parsed, the worst takes some thirty times as much memory; networkx reads less than a MiB a second."""


def load_json(source: Path) -> StepGraph | JobGraph:
    """Reads a graph from JSON.

    Raises:
        InputError: the file cannot be read.
        FormatError: it is too large, or holds no graph; says where and what.
    """
    from echograph.ir.text.records import from_json

    return _load(source, "json", from_json)


def load_gml(source: Path) -> StepGraph | JobGraph:
    """Reads a graph from GML.

    Raises:
        InputError: the file cannot be read.
        FormatError: it is too large, or holds no graph; says where and what.
        MissingExtraError: networkx is not installed.
    """
    from echograph.ir.text.network import from_gml

    return _load(source, "gml", from_gml)


def load_text(source: Path) -> StepGraph | JobGraph:
    """Reads a graph from its text form.

    Raises:
        InputError: the file cannot be read.
        FormatError: it is too large, or holds no graph; says in which line and what.
    """
    from echograph.ir.text.parser import from_text

    return _load(source, "text", from_text)


def _load(source: Path, name: str, read: Callable[[str], StepGraph | JobGraph]) -> StepGraph | JobGraph:
    data = read_whole(
        source, f"write one with: echoc export graph.pb --to {name} -o {source.name}", MAX_BYTES[name]
    )
    try:
        return read(data.decode())
    except UnicodeDecodeError:
        raise FormatError(f"{source}: is no UTF-8 text, and so no {name}") from None
    except FormatError as error:
        raise FormatError(f"{source}: {error}") from None
