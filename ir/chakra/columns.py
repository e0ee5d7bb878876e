"""Chakra traces from files, many nodes at a time: every field of every message by arithmetic on whole columns.

What is read so is what writers of the format usually write. A message that has anything else (a field twice, a
number of more than eight bytes, a message within that is malformed) is called odd and left to `serde_chakra.read`,
which knows what it means, or what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from echograph.ir.chakra.messages import MAX_MESSAGE_BYTES, NodeType, Value, decode_attribute
from echograph.ir.columns import Int64
from echograph.proto import chakra_pb2 as pb

Bools = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]

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
        ctrl_deps: for every node how many ids, and all of them.
        data_deps: likewise.
        attributes: what was read of them.
        texts: the distinct names.
    """

    odd: Bools
    id: Words
    names: Int64
    type: npt.NDArray[np.uint8]
    duration_us: Words
    ctrl_deps: tuple[Int64, Words]
    data_deps: tuple[Int64, Words]
    attributes: Attributes
    texts: list[str]


@dataclass(slots=True, kw_only=True, eq=False)
class Attributes:
    """Attributes of nodes: those that are plain numbers as columns, all others by the distinct ones among them.

    Attributes:
        numbers: by name, int64 nodes, their values, and where the bytes of these begin.
        others: int64 nodes, for each an index of `values`, and where the attribute ends.
        values: name and value.
        texts: the bytes of these.
    """

    numbers: dict[str, tuple[Int64, Int64, Int64]]
    others: tuple[Int64, Int64, Int64]
    values: list[tuple[str, Value]]
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


def decode(data: bytes, begins: Sequence[int], ends: Sequence[int], names: Mapping[str, bool]) -> NodeColumns:
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

    def _packed(self, tag: int) -> tuple[Int64, Words]:
        """For every message how many numbers a packed field has, and all of them."""
        begins, ends = self.spans[tag]
        at = _ranges(begins, ends)
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

    def _read_attributes(self, names: Mapping[str, bool]) -> Attributes:
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
        return Attributes(numbers=numbers, others=(nodes[rows], which, ends[rows]), values=values, texts=texts)

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
    ) -> tuple[Int64, list[tuple[str, Value]], list[bytes]]:
        found: dict[bytes, int] = {}
        data = self.data
        which = np.array(
            [
                found.setdefault(data[begin:end], len(found))
                for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
            ],
            np.int64,
        )
        values: list[tuple[str, Value]] = []
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
        values: list[tuple[str, Value]],
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


def eights(data: bytes) -> tuple[npt.NDArray[np.uint8], Words]:
    """The bytes, some zeros behind them, and the eight bytes from every byte on as a number."""
    padded = np.frombuffer(data + _PADDING, np.uint8)
    return padded, np.ndarray(len(data) + len(_PADDING) - 8, "<u8", padded, strides=(1,))


def varints(words: Words) -> tuple[Words, Int64]:
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


def _ranges(begins: Int64, ends: Int64) -> Int64:
    """The numbers of all ranges, one after the other."""
    sizes = ends - begins
    total = int(sizes.sum())
    found: Int64 = np.repeat(begins - (np.cumsum(sizes) - sizes), sizes) + np.arange(total)
    return found
