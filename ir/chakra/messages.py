"""Chakra execution traces to and from files: the only module that knows their messages (`proto/chakra.proto`).

A file is the trace of one rank: (varint length, message) over and over, a `GlobalMetadata` first, then a `Node`
for every operation. It is written and read a node at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from echograph.errors import FormatError, InputError
from echograph.ir.files import open_file, write_whole
from echograph.proto import chakra_pb2 as pb

VERSION = "0.0.4"
"""Of the schema, as the files state it."""

MAX_MESSAGE_BYTES = 64 * 2**20
MAX_READ_BYTES = 2**20

Value = bool | int | float | str | bytes | tuple[bool | int | float | str | bytes, ...]
"""What an attribute holds; the 32-bit and unsigned variants of the format are one `int`."""


class NodeType(IntEnum):
    """What a node is; the value is the number on the wire."""

    INVALID = 0
    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    COMP = 4
    SEND = 5
    RECV = 6
    COLLECTIVE = 7


class CommType(IntEnum):
    """Which collective a `COLLECTIVE` node is: the value of its attribute `comm_type`."""

    ALL_REDUCE = 0
    REDUCE = 1
    ALL_GATHER = 2
    GATHER = 3
    SCATTER = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7
    REDUCE_SCATTER_BLOCK = 8
    BARRIER = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class ChakraNode:
    """A node of a trace.

    Attributes:
        id: unique in its file.
        name: for people.
        type: what it is.
        ctrl_deps: ids of nodes that end before it starts, for the order of a stream.
        data_deps: ids of nodes that end before it starts, for what they made.
        start_us: when it started, in whole microseconds, where the trace is of a run.
        duration_us: how long it took, in whole microseconds.
        attributes: by name.
    """

    id: int
    name: str
    type: NodeType
    ctrl_deps: tuple[int, ...] = ()
    data_deps: tuple[int, ...] = ()
    start_us: int = 0
    duration_us: int = 0
    attributes: Mapping[str, Value] = field(default_factory=dict)


# The alternative of an attribute's value that readers of the format expect, by the attribute's name.
_FIELDS = {
    "num_ops": "int64_val",
    "tensor_size": "uint64_val",
    "comm_type": "int64_val",
    "comm_size": "int64_val",
    "comm_priority": "int32_val",
    "comm_src": "int32_val",
    "comm_dst": "int32_val",
    "comm_tag": "int32_val",
}
# The alternative of any other attribute, by the type of its value.
_BY_TYPE = {bool: "bool", int: "int64", float: "double", str: "string", bytes: "bytes"}


def write(path: Path | str, nodes: Iterable[ChakraNode], metadata: Mapping[str, Value] | None = None) -> int:
    """Writes the trace of a rank whole or not at all; returns the bytes written.

    Args:
        path: the file.
        nodes: in the order of the file.
        metadata: attributes of the whole trace.

    Raises:
        OutputError: the path cannot be written.
    """
    return write_whole(Path(path), _messages(nodes, metadata or {}))


def _messages(nodes: Iterable[ChakraNode], metadata: Mapping[str, Value]) -> Iterator[bytes]:
    yield encode_metadata(metadata)
    for node in nodes:
        yield delimited(encode_node(node))


def encode_metadata(metadata: Mapping[str, Value]) -> bytes:
    """How a file begins: the message of the whole trace, after its length."""
    attributes = [_attribute(name, value) for name, value in metadata.items()]
    return delimited(pb.GlobalMetadata(version=VERSION, attr=attributes).SerializeToString(deterministic=True))


def encode_node(node: ChakraNode) -> bytes:
    """The message of a node."""
    return pb.Node(
        id=node.id,
        name=node.name,
        type=pb.NodeType.ValueType(node.type),
        ctrl_deps=node.ctrl_deps,
        data_deps=node.data_deps,
        start_time_micros=node.start_us,
        duration_micros=node.duration_us,
        attr=[_attribute(name, value) for name, value in node.attributes.items()],
    ).SerializeToString(deterministic=True)


def delimited(message: bytes) -> bytes:
    """A message after its length."""
    return varint(len(message)) + message


def varint(value: int) -> bytes:
    """A number >= 0 in sevens of bits, the lowest first."""
    return _SMALL[value] if value < len(_SMALL) else _varint(value)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


# Ids, lengths and dependencies are small numbers, and there are many of them.
_SMALL = tuple(_varint(value) for value in range(2**14))


def _attribute(name: str, value: Value) -> pb.AttributeProto:
    attribute = pb.AttributeProto(name=name)
    if isinstance(value, tuple):
        kind = _BY_TYPE[type(value[0])] if value else "string"
        getattr(attribute, f"{kind}_list").values.extend(value)
        getattr(attribute, f"{kind}_list").SetInParent()
        return attribute
    chosen = _FIELDS.get(name) if type(value) is int else None
    if chosen is None:
        large = type(value) is int and value >= 2**63
        chosen = "uint64_val" if large else f"{_BY_TYPE[type(value)]}_val"
    setattr(attribute, chosen, value)
    return attribute


def read(path: Path | str) -> Iterator[ChakraNode]:
    """The nodes of a file, one at a time.

    Raises:
        InputError: the file does not exist or cannot be read.
        FormatError: it is not a trace, is truncated or corrupted; names the file and the message.
    """
    path = Path(path)
    messages = _read_messages(path)
    decode_metadata(path, next(messages)[1])
    for number, data in messages:
        yield _decode_node(path, number, data)


def read_metadata(path: Path | str) -> tuple[str, dict[str, Value]]:
    """The version that a file states, "" where it states none, and the attributes of the whole trace.

    Raises:
        InputError: the file does not exist or cannot be read.
        FormatError: it does not begin as a trace.
    """
    return decode_metadata(Path(path), next(_read_messages(Path(path)))[1])


def _read_messages(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number, bytes) of every message."""
    try:
        with open_file(path) as file:
            number = 0
            while (length := _read_length(path, file, number)) is not None:
                if length > MAX_MESSAGE_BYTES:
                    raise FormatError(
                        f"{path}: message {number} is {length:,} bytes long: not a Chakra trace, or corrupted"
                    )
                data = _read_exactly(file, length)
                if len(data) < length:
                    raise FormatError(f"{path}: truncated in message {number}")
                yield number, data
                number += 1
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    if number == 0:
        raise FormatError(f"{path}: the file is empty")


def _read_exactly(file: BinaryIO, length: int) -> bytes:
    """A piece at a time, so that a false length of a short file reserves no memory."""
    data = file.read(min(length, MAX_READ_BYTES))
    while len(data) < length and (more := file.read(min(length - len(data), MAX_READ_BYTES))):
        data += more
    return data


def _read_length(path: Path, file: BinaryIO, number: int) -> int | None:
    value = 0
    for shift in range(0, 70, 7):
        byte = file.read(1)
        if not byte:
            if shift:
                raise FormatError(f"{path}: truncated before message {number}")
            return None
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    raise FormatError(f"{path}: message {number} has no length: not a Chakra trace, or corrupted")


def decode_metadata(path: Path, data: bytes) -> tuple[str, dict[str, Value]]:
    """Version and attributes of the whole trace from the message that a file begins with.

    Raises:
        FormatError: it is none; names the file.
    """
    try:
        message = pb.GlobalMetadata.FromString(data)
    except DecodeError:
        raise FormatError(f"{path}: begins with no GlobalMetadata: not a Chakra trace, or corrupted") from None
    # Traces of PyTorch state no version. A node in the place of the metadata has fields that those lack.
    if not message.version and len(UnknownFieldSet(message)):
        raise FormatError(f"{path}: begins with no GlobalMetadata: not a Chakra trace")
    return message.version, {attribute.name: _value(attribute) for attribute in message.attr}


def _decode_node(path: Path, number: int, data: bytes) -> ChakraNode:
    if not data:
        raise FormatError(f"{path}: message {number} is empty, which readers take for the end of the file")
    try:
        message = pb.Node.FromString(data)
        kind = NodeType(message.type)
    except DecodeError:
        raise FormatError(f"{path}: message {number} is no node: not a Chakra trace, or corrupted") from None
    except ValueError:
        raise FormatError(f"{path}: node {message.id} has the unknown type {message.type}") from None
    return ChakraNode(
        id=message.id,
        name=message.name,
        type=kind,
        ctrl_deps=tuple(message.ctrl_deps),
        data_deps=tuple(message.data_deps),
        start_us=message.start_time_micros,
        duration_us=message.duration_micros,
        attributes={attribute.name: _value(attribute) for attribute in message.attr},
    )


def _value(attribute: pb.AttributeProto) -> Value:
    chosen = attribute.WhichOneof("value")
    if chosen is None:
        return ""
    value = getattr(attribute, chosen)
    return tuple(value.values) if chosen.endswith("_list") else value


def decode_attribute(data: bytes) -> tuple[str, Value]:
    """Name and value of an attribute from its message.

    Raises:
        DecodeError: it is none.
    """
    attribute = pb.AttributeProto.FromString(data)
    return attribute.name, _value(attribute)


def encode_attributes(attributes: Mapping[str, Value]) -> bytes:
    """Attributes as they stand at the end of a node's message."""
    return pb.Node(attr=[_attribute(n, v) for n, v in attributes.items()]).SerializeToString(deterministic=True)
