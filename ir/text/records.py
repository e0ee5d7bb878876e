"""A graph as plain values (dict, list, str, numbers) that say everything the file says, and back.

The frozen types of the graph are turned into dictionaries of their fields and read by their type hints, so a
field that a type gains travels without a line here. Enumerations stand by name in lower case; a field that has
its default is left out; what is one of several types says which under "kind". JSON and GML are written from this.

`assemble` makes a graph of its frozen types: what the readers of text and of plain values end with.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, astuple, dataclass, field, fields, is_dataclass, replace
from enum import IntEnum
from functools import cache
from math import inf
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from echograph.errors import FormatError, GraphError
from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder
from echograph.ir.columns import Int64
from echograph.ir.files import write_whole
from echograph.ir.formats import Exported
from echograph.ir.graph import (
    CALL_FIELDS,
    FORMAT_MAJOR,
    Axis,
    Block,
    Graph,
    Group,
    Instance,
    JobGraph,
    Program,
    StepGraph,
    Workload,
)

MIN_NUMBER = -(2**63)
"""Readers refuse what is not of 64 bits where it stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphHead:
    """Everything of a graph but its rows and programs; `strings` and `attributes` order the tables."""

    level: type[StepGraph] | type[JobGraph] = StepGraph
    name: str = ""
    producer: str = ""
    workload: Workload = field(default_factory=Workload)
    streams: tuple[str, ...] = ("compute",)
    mesh: tuple[Axis, ...] = ()
    groups: tuple[Group, ...] = ()
    passes: tuple[str, ...] = ()
    strings: tuple[str, ...] = ()
    attributes: tuple[t.Attributes, ...] = ()
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRows:
    """A block: its name, its instances, and its rows of both tables."""

    name: str
    instances: tuple[Instance, ...] = (Instance(),)
    tensors: tuple[t.Tensor, ...] = ()
    ops: tuple[t.Op, ...] = ()


def assemble(head: GraphHead, blocks: Sequence[BlockRows], programs: Iterable[Program]) -> StepGraph | JobGraph:
    """Builds and verifies the graph.

    Raises:
        FormatError: rows are not numbered on, a number is beyond 64 bits, or an invariant does not hold.
    """
    try:
        builder = _begin(head)
        _fill(builder, blocks)
        for item in programs:
            builder.program(
                item.calls, role=item.role, coordinates=item.coordinates, ranks=item.ranks, held=item.held
            )
        graph = builder.build(head.level)
    except OverflowError:
        raise FormatError("a number is beyond 64 bits") from None
    except GraphError as error:
        raise FormatError(f"no valid graph: {error}") from None
    for told in (head.workload, *graph.ops.attribute_values):
        if (lowest := min(_numbers(astuple(told)), default=0)) < 0:
            raise FormatError(f"no valid graph: {type(told).__name__} has the negative number {lowest}")
    return graph


def _numbers(values: Iterable[object]) -> Iterator[int]:
    for value in values:
        if isinstance(value, tuple):
            yield from _numbers(value)
        elif isinstance(value, int):
            yield value


def _begin(head: GraphHead) -> GraphBuilder:
    builder = GraphBuilder(name=head.name, producer=head.producer, workload=head.workload, streams=head.streams)
    builder.unknown, builder.mesh, builder.passes = head.unknown, head.mesh, head.passes
    for number, group in enumerate(head.groups):
        if builder.add_group(group) != number:
            raise FormatError(f"group {number} ({group.name}) repeats an earlier one")
    for text in head.strings:
        builder.string(text)
    for attributes in head.attributes:
        builder.attribute(attributes)
    return builder


def _fill(builder: GraphBuilder, blocks: Sequence[BlockRows]) -> None:
    begins, ends, tensors, ops = [], [], 0, 0
    for block in blocks:
        begins.append((block.name, tensors, ops))
        tensors, ops = tensors + len(block.tensors), ops + len(block.ops)
        ends.append((tensors, ops))
    if not blocks or len(blocks[0].instances) != 1:
        raise FormatError("the first block is the main one, and it has one instance")
    builder.set_blocks(begins, ends)
    for number, block in enumerate(blocks):
        for item in block.instances:
            builder.instance(number, item.label, bindings=item.bindings, op_bindings=item.op_bindings)
        for tensor in block.tensors:
            _check("tensor", tensor.id, builder.tensor_count())
            builder.add_tensor(tensor)
        for op in block.ops:
            _check("operation", op.id, builder.op_count())
            builder.add(op)


def _check(what: str, identity: int, position: int) -> None:
    if identity != position:
        raise FormatError(
            f"{what} {identity} stands where {position} is next: rows are numbered on from block to block"
        )


Record = dict[str, Any]

_KINDS: dict[str, type] = {
    "compute": t.Compute, "collective": t.Collective, "send": t.Send, "recv": t.Recv, "copy": t.Copy,
    "host": t.Host, "gemm": t.Gemm, "attention": t.Attention, "convolution": t.Convolution,
    "multi_tensor": t.MultiTensor,
}  # fmt: skip
_KIND_OF = {kind: name for name, kind in _KINDS.items()}
_LEVELS: dict[str, type[StepGraph] | type[JobGraph]] = {"step": StepGraph, "job": JobGraph}


# -- writing -------------------------------------------------------------------------------------------------


def header(graph: Graph) -> Record:
    """Everything but the blocks and the programs; `strings` and `attributes` are the tables in their order."""
    record = {
        "echograph": "{}.{}".format(*graph.format),
        "level": "job" if isinstance(graph, JobGraph) else "step",
        "name": graph.name,
        "producer": graph.producer,
        "workload": plain(graph.workload),
        "streams": list(graph.streams),
        "mesh": plain(graph.mesh),
        "groups": plain(graph.groups),
        "strings": list(graph.strings),
        "attributes": plain(graph.ops.attribute_values),
    }
    record |= {"passes": list(graph.passes)} if graph.passes else {}
    return record | ({"unknown": graph.unknown.hex()} if graph.unknown else {})


def block_head(block: Block) -> Record:
    """A block without its rows."""
    return {"name": block.name, "instances": plain(block.instances)}


def plain(value: Any) -> Any:
    """A frozen type of the graph as plain values."""
    if isinstance(value, IntEnum):
        return value.name.lower()
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.ndarray):
        return value.tolist()
    own: type = type(value)
    if not is_dataclass(own):
        return value
    kind = _KIND_OF.get(own)
    record: Record = {} if kind is None else {"kind": kind}
    for name, (_, default) in _fields(own).items():
        item = getattr(value, name)
        if default is MISSING or item != default:
            record[name] = plain(item)
    return record


# -- reading -------------------------------------------------------------------------------------------------


def from_record(record: object) -> StepGraph | JobGraph:
    """The graph of a record: `header`, "blocks" (`block_head` with "tensors" and "ops") and "programs", verified.

    `strings` and `attributes` fix the order of the tables and may be missing.

    Raises:
        FormatError: it is no record of a graph; says where and what.
    """
    head = dict(_dict(record, "the graph"))
    version, level = head.pop("echograph", None), head.pop("level", None)
    known = [str(major) for major in range(1, FORMAT_MAJOR + 1)]
    if not isinstance(version, str) or version.partition(".")[0] not in known:
        raise FormatError(f"echograph: is {_shown(version)}, and format {FORMAT_MAJOR}.x and older is read")
    if not isinstance(level, str) or level not in _LEVELS:
        raise FormatError(f"level: is {_shown(level)}: give step or job")
    blocks = value(tuple[BlockRows, ...], head.pop("blocks", []), "blocks")
    programs = value(tuple[Program, ...], head.pop("programs", []), "programs")
    return assemble(replace(_dataclass(GraphHead, head, ""), level=_LEVELS[level]), blocks, programs)


def value(hint: Any, item: Any, where: str) -> Any:
    """A plain value as what a type hint says.

    A whole number may be a text of digits, since the numbers of some languages end at 2^53, and a flag 0 or 1.

    Raises:
        FormatError: it is of another type.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin is np.ndarray:
        return _calls(item, where)
    if origin is tuple:
        return tuple(value(args[0], each, f"{where}[{i}]") for i, each in enumerate(_list(item, where)))
    if origin is UnionType and NoneType in args:
        return None if item is None else value(args[0] if len(args) == 2 else _without_none(args), item, where)
    if origin is UnionType:
        return _one_of(args, _dict(item, where), where)
    if origin is not None and issubclass(origin, Mapping):
        return {key: value(args[1], each, f"{where}.{key}") for key, each in _dict(item, where).items()}
    if isinstance(hint, type) and is_dataclass(hint):
        return _dataclass(hint, _dict(item, where), where)
    return _scalar(hint, item, where)


def _without_none(args: tuple[Any, ...]) -> Any:
    kept = [arg for arg in args if arg is not NoneType]
    union = kept[0]
    for arg in kept[1:]:
        union = union | arg
    return union


def _one_of(kinds: tuple[type, ...], item: Record, where: str) -> Any:
    kind = _KINDS.get(str(item.get("kind")))
    if kind is None or kind not in kinds:
        known = ", ".join(name for name, one in _KINDS.items() if one in kinds)
        raise FormatError(f"{where}.kind: is {_shown(item.get('kind'))}: known: {known}")
    return _dataclass(kind, {key: each for key, each in item.items() if key != "kind"}, where)


def _dataclass(kind: type, item: Record, where: str) -> Any:
    found: Record = {}
    hints = _fields(kind)
    for key, each in item.items():
        if key not in hints:
            raise FormatError(
                f"{_place(where, key[:40])}: is no field of {kind.__name__}: known: {', '.join(hints)}"
            )
        found[key] = value(hints[key][0], each, _place(where, key))
    for name, (_, default) in hints.items():
        if default is MISSING and name not in found:
            raise FormatError(f"{_place(where, name)}: is missing")
    return kind(**found)


def _place(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _calls(item: Any, where: str) -> Int64:
    calls = _list(item, where)
    for number, call in enumerate(calls):
        if not (isinstance(call, list) and len(call) == len(CALL_FIELDS) and all(type(n) is int for n in call)):
            raise FormatError(f"{where}[{number}]: give whole numbers: [{', '.join(CALL_FIELDS)}]")
    try:
        return np.array(calls, np.int64).reshape(-1, len(CALL_FIELDS))
    except OverflowError:
        raise FormatError(f"{where}: a number is beyond 64 bits") from None


def _bytes(item: Any, where: str) -> bytes:
    try:
        return bytes.fromhex(item)
    except (TypeError, ValueError):
        raise FormatError(f"{where}: is {_shown(item)}: give hexadecimal digits") from None


def _scalar(hint: type, item: Any, where: str) -> Any:
    if issubclass(hint, IntEnum):
        member = hint.__members__.get(item.upper()) if isinstance(item, str) else None
        if member is None:
            known = ", ".join(name.lower() for name in hint.__members__)
            raise FormatError(f"{where}: is {_shown(item)}: known: {known}")
        return member
    if hint is bytes:
        return _bytes(item, where)
    if hint is bool and item in (0, 1):
        return bool(item)
    if hint is float and type(item) in (int, float) and abs(item) < inf:
        return float(item)
    if hint is int and isinstance(item, str) and len(item) < 20 and item.removeprefix("-").isdecimal():
        item = int(item)
    if type(item) is int and not MIN_NUMBER <= item < -MIN_NUMBER:
        raise FormatError(f"{where}: is beyond 64 bits")
    if type(item) is not hint or (hint is str and not _is_text(item)):
        words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
        raise FormatError(f"{where}: is {_shown(item)}: give {words[hint]}")
    return item


def _is_text(item: Any) -> bool:
    """Whether UTF-8 can say it: JSON may hold half a surrogate pair."""
    try:
        item.encode()
    except UnicodeEncodeError:
        return False
    return True


def _dict(item: object, where: str) -> Record:
    if not isinstance(item, dict):
        raise FormatError(f"{where}: is {_shown(item)}: give an object of fields")
    return item


def _list(item: object, where: str) -> list[Any]:
    if not isinstance(item, list):
        raise FormatError(f"{where}: is {_shown(item)}: give a list")
    return item


def _shown(item: object) -> str:
    if isinstance(item, list | dict):
        return "a list" if isinstance(item, list) else "an object"
    return "missing" if item is None else ascii(item[:40] if isinstance(item, str) else item)[:42]


@cache
def _fields(kind: Hashable) -> dict[str, tuple[Any, Any]]:
    """Type hint and default (`MISSING` where there is none) of every field."""
    hints, found = get_type_hints(kind), {}
    for f in fields(kind):  # type: ignore[arg-type]
        default = f.default if f.default_factory is MISSING else f.default_factory()
        found[f.name] = hints[f.name], default
    return found


# -- JSON -----------------------------------------------------------------------------------------------------
# A graph as JSON, a line for each tensor, operation and program, and back.


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


def export_json(graph: Graph, output: Path) -> Exported:
    """Writes a graph as JSON.

    Raises:
        OutputError: the path cannot be written.
    """
    return Exported(files=1, bytes=write_whole(output, to_json(graph)))
