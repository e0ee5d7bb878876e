"""A graph as JSON, a line for each tensor, operation and program, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from echograph.errors import FormatError
from echograph.ir.graph import Graph, JobGraph, StepGraph
from echograph.ir.text.records import block_head, from_record, header, plain


def to_json(graph: Graph) -> Iterator[str]:
    """The graph's JSON, piece by piece; `records` says what stands in it."""
    yield "{\n"
    for key, item in header(graph).items():
        yield f"{_text(key)}: {_text(item)},\n"
    yield '"blocks": [\n'
    for number, block in enumerate(graph.blocks):
        head = _text(block_head(block)).removesuffix("}")
        yield f"{',' if number else ''}{head},\n"
        yield '"tensors": '
        yield from _lines(plain(graph.tensors[row]) for row in block.tensors)
        yield ',\n"ops": '
        yield from _lines(plain(graph.ops[row]) for row in block.ops)
        yield "}\n"
    yield '],\n"programs": '
    yield from _lines(map(plain, graph.programs))
    yield "\n}\n"


def _lines(items: Iterable[object]) -> Iterator[str]:
    separator = "[\n"
    for item in items:
        yield separator + _text(item)
        separator = ",\n"
    yield "[]" if separator == "[\n" else "\n]"


def _text(item: object) -> str:
    return json.dumps(item, allow_nan=False, separators=(",", ":"))


def from_json(text: str) -> StepGraph | JobGraph:
    """The graph that `to_json` wrote.

    Raises:
        FormatError: it is no JSON, or says no graph; says where.
    """
    try:
        record = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"is no JSON ({' '.join(str(error).split())[:80]})") from None
    return from_record(record)


def _refuse(word: str) -> object:
    raise ValueError(f"{word} is no number")
