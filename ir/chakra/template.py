"""The same Chakra trace for many ranks: encoded once, with what differs put in for each.

A node's message ends with its attributes, and only attributes differ between the ranks of a role. So what is
before them is encoded once, and nodes in a row that no rank changes are one piece of bytes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Generic, TypeVar

from echograph.ir.chakra.messages import NodeType, Value, delimited, encode_attributes, encode_metadata, varint

_ID, _NAME, _TYPE, _CTRL_DEPS, _DATA_DEPS, _DURATION = b"\x08", b"\x12", b"\x18", b"\x22", b"\x2a", b"\x38"


Key = TypeVar("Key", bound=Hashable)


class Template(Generic[Key]):
    """A trace with places to be filled in; `Key` says what is put into which.

    Args:
        metadata: attributes of the whole trace.
    """

    def __init__(self, metadata: Mapping[str, Value]) -> None:
        self._constant = bytearray(encode_metadata(metadata))
        self._parts: list[tuple[bytes, bytes, Key]] = []

    def add(
        self,
        number: int,
        name: bytes,
        kind: NodeType,
        ctrl_deps: tuple[int, ...],
        data_deps: tuple[int, ...],
        duration_us: int,
        attributes: bytes,
        differs: Key | None = None,
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
        body = b"".join((_ID, varint(number), name, _TYPE, varint(kind)))
        if ctrl_deps:
            body += _CTRL_DEPS + delimited(b"".join(map(varint, ctrl_deps)))
        if data_deps:
            body += _DATA_DEPS + delimited(b"".join(map(varint, data_deps)))
        if duration_us:
            body += _DURATION + varint(duration_us)
        body += attributes
        if differs is None:
            self._constant += varint(len(body)) + body
        else:
            self._parts.append((bytes(self._constant), body, differs))
            self._constant.clear()

    @property
    def keys(self) -> set[Key]:
        """What ranks have to fill in."""
        return {differs for _, _, differs in self._parts}

    def fill(self, own: Mapping[Key, Mapping[str, Value]]) -> Iterator[bytes]:
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
    return _NAME + delimited(name.encode()) if name else b""
