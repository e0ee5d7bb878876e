"""Chakra execution traces to and from files: the only module that knows their messages (`proto/chakra.proto`).

A file is the trace of one rank: (varint length, message) over and over, a `GlobalMetadata` first, then a `Node`
for every operation. It is written and read a node at a time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from echograph.errors import FormatError, InputError
from echograph.ir.columns import Bools, Int64, UInt64, expand_ranges
from echograph.ir.files import open_file, write_whole
from echograph.proto import chakra_pb2 as pb

VERSION = "0.0.4"
"""Of the schema, as the files state it."""

MAX_MESSAGE_BYTES = 64 * 2**20
MAX_READ_BYTES = 2**20

AttributeValue = bool | int | float | str | bytes | tuple[bool | int | float | str | bytes, ...]
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
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)


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


def write_nodes(
    path: Path | str, nodes: Iterable[ChakraNode], metadata: Mapping[str, AttributeValue] | None = None
) -> int:
    """Writes the trace of a rank whole or not at all; returns the bytes written.

    Args:
        path: the file.
        nodes: in the order of the file.
        metadata: attributes of the whole trace.

    Raises:
        OutputError: the path cannot be written.
    """
    return write_whole(Path(path), _messages(nodes, metadata or {}))


def _messages(nodes: Iterable[ChakraNode], metadata: Mapping[str, AttributeValue]) -> Iterator[bytes]:
    yield encode_metadata(metadata)
    for node in nodes:
        yield delimited(encode_node(node))


def encode_metadata(metadata: Mapping[str, AttributeValue]) -> bytes:
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


def _attribute(name: str, value: AttributeValue) -> pb.AttributeProto:
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


def read_nodes(path: Path | str) -> Iterator[ChakraNode]:
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


def read_metadata(path: Path | str) -> tuple[str, dict[str, AttributeValue]]:
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


def decode_metadata(path: Path, data: bytes) -> tuple[str, dict[str, AttributeValue]]:
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


def _value(attribute: pb.AttributeProto) -> AttributeValue:
    chosen = attribute.WhichOneof("value")
    if chosen is None:
        return ""
    value = getattr(attribute, chosen)
    return tuple(value.values) if chosen.endswith("_list") else value


def decode_attribute(data: bytes) -> tuple[str, AttributeValue]:
    """Name and value of an attribute from its message.

    Raises:
        DecodeError: it is none.
    """
    attribute = pb.AttributeProto.FromString(data)
    return attribute.name, _value(attribute)


def encode_attributes(attributes: Mapping[str, AttributeValue]) -> bytes:
    """Attributes as they stand at the end of a node's message."""
    return pb.Node(attr=[_attribute(n, v) for n, v in attributes.items()]).SerializeToString(deterministic=True)


# -- writing the same trace for many ranks --------------------------------------------------------------------
# The same Chakra trace for many ranks: encoded once, with what differs put in for each.
#
# A node's message ends with its attributes, and only attributes differ between the ranks of a role. So what is
# before them is encoded once, and nodes in a row that no rank changes are one piece of bytes.


_ID_KEY, _NAME_KEY, _TYPE_KEY, _CTRL_DEPS_KEY, _DATA_DEPS_KEY, _DURATION_KEY = (
    b"\x08",
    b"\x12",
    b"\x18",
    b"\x22",
    b"\x2a",
    b"\x38",
)


_Key = TypeVar("_Key", bound=Hashable)


class Template(Generic[_Key]):
    """A trace with places to be filled in; `_Key` says what is put into which.

    Args:
        metadata: attributes of the whole trace.
    """

    def __init__(self, metadata: Mapping[str, AttributeValue]) -> None:
        self._constant = bytearray(encode_metadata(metadata))
        self._parts: list[tuple[bytes, bytes, _Key]] = []

    def add(
        self,
        number: int,
        name: bytes,
        kind: NodeType,
        ctrl_deps: tuple[int, ...],
        data_deps: tuple[int, ...],
        duration_us: int,
        attributes: bytes,
        differs: _Key | None = None,
    ) -> None:
        """Adds a node.

        Args:
            number: its id, above 0.
            name: of `encode_name`.
            kind: its type.
            ctrl_deps: ids.
            data_deps: ids.
            duration_us: whole microseconds.
            attributes: of `encode_attributes`, those that all ranks have alike.
            differs: the key of those that a rank has of its own, which come last.
        """
        body = b"".join((_ID_KEY, varint(number), name, _TYPE_KEY, varint(kind)))
        if ctrl_deps:
            body += _CTRL_DEPS_KEY + delimited(b"".join(map(varint, ctrl_deps)))
        if data_deps:
            body += _DATA_DEPS_KEY + delimited(b"".join(map(varint, data_deps)))
        if duration_us:
            body += _DURATION_KEY + varint(duration_us)
        body += attributes
        if differs is None:
            self._constant += varint(len(body)) + body
        else:
            self._parts.append((bytes(self._constant), body, differs))
            self._constant.clear()

    @property
    def keys(self) -> set[_Key]:
        """What ranks have to fill in."""
        return {differs for _, _, differs in self._parts}

    def fill(self, own: Mapping[_Key, Mapping[str, AttributeValue]]) -> Iterator[bytes]:
        """The file of one rank, piece by piece.

        Args:
            own: by key, the attributes that only this rank has.
        """
        encoded = {key: encode_attributes(attributes) for key, attributes in own.items()}
        for before, body, differs in self._parts:
            attributes = encoded[differs]
            yield before
            yield varint(len(body) + len(attributes))
            yield body
            yield attributes
        yield bytes(self._constant)


def encode_name(name: str) -> bytes:
    """A name as it stands in a node's message."""
    return _NAME_KEY + delimited(name.encode()) if name else b""


# -- reading many nodes at a time -----------------------------------------------------------------------------
# Chakra traces from files, many nodes at a time: every field of every message by arithmetic on whole columns.
#
# What is read so is what writers of the format usually write. A message that has anything else (a field
# twice, a number of more than eight bytes, a message within that is malformed) is called odd and left to
# `read`, which knows what it means, or what is wrong with it.


_ID, _NAME, _TYPE, _CTRL, _DATA, _START, _DURATION, _IN, _OUT, _ATTRIBUTE = (
    0x08, 0x12, 0x18, 0x22, 0x2A, 0x30, 0x38, 0x42, 0x4A, 0x52,
)  # fmt: skip
_TAGS = np.zeros(256, np.bool_)
_TAGS[[_ID, _NAME, _TYPE, _CTRL, _DATA, _START, _DURATION, _IN, _OUT, _ATTRIBUTE]] = True

# Alternatives of an attribute's value that are plain numbers: their tag, and where the number has to be below.
_NUMBERS = {0x38: 2**31, 0x48: 2**63, 0x58: 2**32, 0x68: 2**63}
_BOOL = (0xD8, 0x01)
_PADDING = bytes(32)


@dataclass(slots=True, kw_only=True, eq=False)
class NodeColumns:
    """Messages of nodes as columns; those that are odd have no meaning in them.

    Attributes:
        odd: which messages were not read.
        id: uint64.
        names: indices of `texts`.
        type: `NodeType` values.
        duration_us: whole microseconds.
        ctrl_deps: control dependencies: the number of ids of every node, and all ids.
        data_deps: data dependencies, in the same form.
        attributes: what was read of them.
        texts: the distinct names.
    """

    odd: Bools
    id: UInt64
    names: Int64
    type: npt.NDArray[np.uint8]
    duration_us: UInt64
    ctrl_deps: tuple[Int64, UInt64]
    data_deps: tuple[Int64, UInt64]
    attributes: AttributeColumns
    texts: list[str]


@dataclass(slots=True, kw_only=True, eq=False)
class AttributeColumns:
    """Attributes of nodes: those that are plain numbers as columns, all others by the distinct ones among them.

    Attributes:
        numbers: by name, int64 nodes, their values, and where the bytes of these begin.
        others: int64 nodes, for each an index of `values`, and where the attribute ends.
        values: name and value.
        texts: the bytes of these.
    """

    numbers: dict[str, tuple[Int64, Int64, Int64]]
    others: tuple[Int64, Int64, Int64]
    values: list[tuple[str, AttributeValue]]
    texts: list[bytes]


class Messages(NamedTuple):
    """Where messages are in some bytes.

    Attributes:
        begins: of the messages.
        ends: of the messages.
        rest: where what belongs to no whole message begins.
        odd: whether what follows is no message of a length that is read.
    """

    begins: list[int]
    ends: list[int]
    rest: int
    odd: bool


def split(data: bytes) -> Messages:
    """Finds the messages, each after its length."""
    begins: list[int] = []
    ends: list[int] = []
    at, size = 0, len(data)
    while at < size:
        length, body = data[at], at + 1
        if length > 127:
            length &= 127
            for shift in range(7, 70, 7):
                if body >= size:
                    return Messages(begins, ends, at, odd=False)
                byte = data[body]
                body += 1
                length |= (byte & 127) << shift
                if byte < 128:
                    break
            else:
                return Messages(begins, ends, at, odd=True)
            if length > MAX_MESSAGE_BYTES:
                return Messages(begins, ends, at, odd=True)
        if body + length > size:
            break
        begins.append(body)
        at = body + length
        ends.append(at)
    return Messages(begins, ends, at, odd=False)


def decode_nodes(
    data: bytes, begins: Sequence[int], ends: Sequence[int], names: Mapping[str, bool]
) -> NodeColumns:
    """Nodes from their messages.

    Args:
        data: what holds the messages.
        begins: of the messages.
        ends: of the messages.
        names: of attributes that are read as columns where they are numbers, and whether true and false are, too;
            of six letters or more.
    """
    return _Decoding(data, np.array(begins, np.int64), np.array(ends, np.int64)).run(names)


class _Decoding:
    """One pass over the messages, whose n-th fields are read together."""

    def __init__(self, data: bytes, begins: Int64, ends: Int64) -> None:
        self.data, self.begins, self.ends = data, begins, ends
        self.bytes, self.words = eights(data)
        count = len(begins)
        self.odd = begins == ends
        self.numbers = {tag: np.zeros(count, np.uint64) for tag in (_ID, _TYPE, _DURATION, _START)}
        self.spans = {tag: (np.zeros(count, np.int64), np.zeros(count, np.int64)) for tag in (_NAME, _CTRL, _DATA)}
        self.within: list[tuple[Int64, Int64, Int64]] = []
        self.attributes: list[tuple[Int64, Int64, Int64]] = []

    def run(self, names: Mapping[str, bool]) -> NodeColumns:
        self._fields()
        self._check_within()
        attributes = self._read_attributes(names)
        kinds = self.numbers[_TYPE]
        self.odd |= kinds >= len(NodeType)
        texts, which = self._names()
        return NodeColumns(
            odd=self.odd, id=self.numbers[_ID], names=which, texts=texts, type=kinds.astype(np.uint8),
            duration_us=self.numbers[_DURATION], ctrl_deps=self._packed(_CTRL), data_deps=self._packed(_DATA),
            attributes=attributes,
        )  # fmt: skip

    def _fields(self) -> None:
        """The first field of all messages, then the second of those that have one, and so on."""
        cursor, seen = self.begins.copy(), np.zeros(len(self.begins), np.int64)
        active = np.flatnonzero(~self.odd)
        while len(active):
            at = cursor[active]
            tag = self.bytes[at]
            value, length = varints(self.words[at + 1])
            body = at + 1 + length
            after = body + np.where((tag & 7) == 2, value, 0).astype(np.int64)
            wrong = ~_TAGS[tag] | (length == 0) | (after > self.ends[active])
            self.odd[active[wrong]] = True
            for one in np.flatnonzero(np.bincount(tag[~wrong], minlength=1)).tolist():
                these = np.flatnonzero((tag == one) & ~wrong)
                nodes = active[these]
                if one == _ATTRIBUTE:
                    self.attributes.append((nodes, body[these], after[these]))
                    continue
                if one in (_IN, _OUT):
                    self.within.append((nodes, body[these], after[these]))
                elif one in self.spans:
                    self.spans[one][0][nodes], self.spans[one][1][nodes] = body[these], after[these]
                else:
                    self.numbers[one][nodes] = value[these]
                self.odd[nodes] |= (seen[nodes] >> (one >> 3) & 1).astype(np.bool_)
                seen[nodes] |= 1 << (one >> 3)
            cursor[active] = after
            active = active[~wrong & (after < self.ends[active])]

    def _check_within(self) -> None:
        """Descriptions of inputs and outputs are not kept, but are to be messages."""
        for nodes, begins, ends in self.within:
            for node, begin, end in zip(nodes.tolist(), begins.tolist(), ends.tolist(), strict=True):
                try:
                    pb.IOInfo.FromString(self.data[begin:end])
                except DecodeError:
                    self.odd[node] = True

    def _names(self) -> tuple[list[str], Int64]:
        found: dict[bytes, int] = {}
        begins, ends = self.spans[_NAME]
        data = self.data
        which = [
            found.setdefault(data[begin:end], len(found))
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
        ]
        texts, wrong = [], []
        for number, text in enumerate(found):
            try:
                texts.append(text.decode())
            except UnicodeDecodeError:
                texts.append("")
                wrong.append(number)
        indices = np.array(which, np.int64)
        if wrong:
            self.odd |= np.isin(indices, wrong)
        return texts, indices

    def _packed(self, tag: int) -> tuple[Int64, UInt64]:
        """For every message how many numbers a packed field has, and all of them."""
        begins, ends = self.spans[tag]
        at = expand_ranges(begins, ends)
        last = self.bytes[at] < 128
        stops = at[last]
        # A number begins where the one before it ends, or with its field.
        sizes = ends - begins
        node = np.repeat(np.arange(len(begins)), sizes)[last]
        starts = np.concatenate([[0], stops[:-1] + 1]) if len(stops) else stops
        first = np.flatnonzero(np.diff(node, prepend=-1))
        starts[first] = begins[node[first]]
        values, lengths = varints(self.words[starts])
        self.odd[node[lengths == 0]] = True
        filled = sizes > 0
        self.odd[filled] |= self.bytes[ends[filled] - 1] >= 128
        return np.bincount(node, minlength=len(begins)), values

    def _read_attributes(self, names: Mapping[str, bool]) -> AttributeColumns:
        """Those that are plain numbers are told by their first eight bytes, which hold the name's length."""
        found = self.attributes or [(np.zeros(0, np.int64),) * 3]
        nodes, begins, ends = (np.concatenate(part) for part in zip(*found, strict=True))
        head, left = self.words[begins], np.ones(len(nodes), np.bool_)
        numbers: dict[str, tuple[Int64, Int64, Int64]] = {}
        for name, flags in names.items():
            prefix = b"\x0a" + bytes([len(name)]) + name.encode()
            rows = np.flatnonzero(head == int.from_bytes(prefix[:8], "little"))
            tail = int.from_bytes(prefix[-8:], "little")
            rows = rows[self.words[begins[rows] + len(prefix) - 8] == tail]
            stated, at, plain = self._plain(begins[rows] + len(prefix), ends[rows], flags=flags)
            rows = rows[plain]
            left[rows] = False
            numbers[name] = nodes[rows], stated[plain], at[plain]
        rows = np.flatnonzero(left)
        which, values, texts = self._distinct(nodes[rows], begins[rows], ends[rows])
        self._refuse_repeated(numbers, nodes[rows], which, values)
        return AttributeColumns(
            numbers=numbers, others=(nodes[rows], which, ends[rows]), values=values, texts=texts
        )

    def _plain(self, at: Int64, ends: Int64, *, flags: bool) -> tuple[Int64, Int64, Bools]:
        """Values that begin with their tag, where they stand, which are numbers that end with their attribute."""
        tag = self.bytes[at]
        flag = flags & (tag == _BOOL[0]) & (self.bytes[at + 1] == _BOOL[1])
        body = at + 1 + flag
        value, length = varints(self.words[body])
        limit = np.zeros(256, np.uint64)
        limit[list(_NUMBERS)] = list(_NUMBERS.values())
        plain = (length > 0) & (body + length == ends) & (flag | (value < limit[tag]))
        return np.where(flag, value != 0, value).astype(np.int64), body, plain

    def _distinct(
        self, nodes: Int64, begins: Int64, ends: Int64
    ) -> tuple[Int64, list[tuple[str, AttributeValue]], list[bytes]]:
        found: dict[bytes, int] = {}
        data = self.data
        which = np.array(
            [
                found.setdefault(data[begin:end], len(found))
                for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
            ],
            np.int64,
        )
        values: list[tuple[str, AttributeValue]] = []
        for number, text in enumerate(found):
            try:
                values.append(decode_attribute(text))
            except DecodeError:
                values.append(("", ""))
                self.odd[nodes[which == number]] = True
        return which, values, list(found)

    def _refuse_repeated(
        self,
        numbers: dict[str, tuple[Int64, Int64, Int64]],
        nodes: Int64,
        which: Int64,
        values: list[tuple[str, AttributeValue]],
    ) -> None:
        """Of an attribute that a node has twice the last counts: such nodes are odd."""
        known: dict[str, int] = {name: number for number, name in enumerate(numbers)}
        name_of = np.array([known.setdefault(name, len(known)) for name, _ in values], np.int64)
        others = name_of[which] if len(which) else which
        for name, (having, _, _) in numbers.items():
            again = np.concatenate([having, nodes[others == known[name]]])
            self._mark_repeated(again)
        beyond = others >= len(numbers)
        key = np.sort(nodes[beyond] * len(known) + others[beyond])
        self.odd[key[1:][key[1:] == key[:-1]] // max(1, len(known))] = True

    def _mark_repeated(self, nodes: Int64) -> None:
        having = np.zeros(len(self.begins), np.bool_)
        having[nodes] = True
        if np.count_nonzero(having) < len(nodes):
            self.odd[np.flatnonzero(np.bincount(nodes) > 1)] = True


def eights(data: bytes) -> tuple[npt.NDArray[np.uint8], UInt64]:
    """The bytes, some zeros behind them, and the eight bytes from every byte on as a number."""
    padded = np.frombuffer(data + _PADDING, np.uint8)
    return padded, np.ndarray(len(data) + len(_PADDING) - 8, "<u8", padded, strides=(1,))


def varints(words: UInt64) -> tuple[UInt64, Int64]:
    """Numbers in sevens of bits from the eight bytes that they begin, and lengths: 0 where they are longer."""
    stops = ~words & np.uint64(0x8080808080808080)
    low = stops & (~stops + np.uint64(1))
    mask = low | (low - np.uint64(1))
    length = (np.bitwise_count(mask).astype(np.int64)) >> 3
    length[stops == 0] = 0
    bits = words & mask & np.uint64(0x7F7F7F7F7F7F7F7F)
    bits = (bits & np.uint64(0x007F007F007F007F)) | ((bits & np.uint64(0x7F007F007F007F00)) >> np.uint64(1))
    bits = (bits & np.uint64(0x00003FFF00003FFF)) | ((bits & np.uint64(0x3FFF00003FFF0000)) >> np.uint64(2))
    bits = (bits & np.uint64(0x000000000FFFFFFF)) | ((bits & np.uint64(0x0FFFFFFF00000000)) >> np.uint64(4))
    return bits, length
