"""Reads dumps of PyTorch's flight recorder, in their JSON form or as the pickle that PyTorch writes.

Nothing is unpickled (`ir.plain_pickle`): a dump is of plain values, and whatever is not is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from echograph.errors import FormatError
from echograph.ir.comms.bandwidth import message_bytes
from echograph.ir.comms.record import (
    COLUMNS,
    MAX_SEQUENCE,
    MAX_WALL_NS,
    NO_TIME,
    UNKNOWN,
    CallRows,
    CallSignature,
    CallSource,
    WholeNumber,
)
from echograph.ir.files import read_whole
from echograph.ir.plain_pickle import plain_pickle
from echograph.profiler.comms.groups import spell_ranks

MAX_BYTES = 1 << 30
MAX_MESSAGE_BYTES = 1 << 62
MAX_DIMS, MAX_DIGITS = 64, 7
WallClock: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_WALL_NS)]
Sequence: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_SEQUENCE)]
_NEEDED = (
    "profiling_name", "process_group", "input_sizes", "output_sizes", "input_dtypes", "output_dtypes",
    "time_created_ns",
)  # fmt: skip
# PyTorch's names of element types (c10/core/ScalarType.h).
_ITEM_BYTES = {
    "ComplexDouble": 16, "Double": 8, "Long": 8, "UInt64": 8, "ComplexFloat": 8, "Float": 4, "Int": 4, "UInt32": 4,
    "ComplexHalf": 4, "Half": 2, "BFloat16": 2, "Short": 2, "UInt16": 2, "Byte": 1, "Char": 1, "Bool": 1,
    "Float8_e4m3fn": 1, "Float8_e5m2": 1, "Float8_e4m3fnuz": 1, "Float8_e5m2fnuz": 1, "Float8_e8m0fnu": 1,
}  # fmt: skip
_NAMES = {
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_gather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
}
_RANK = re.compile(r"(?<![0-9])([0-9]{1,7})(?:\.\w+)?$")


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of an entry; all else that it holds, of whatever form, is not looked at."""

    process_group: Annotated[list[str | int], Meta(min_length=1)]
    profiling_name: str
    input_sizes: list[list[WholeNumber]]
    output_sizes: list[list[WholeNumber]]
    input_dtypes: list[str]
    output_dtypes: list[str]
    time_created_ns: WallClock
    time_discovered_started_ns: WallClock | None = None
    time_discovered_completed_ns: WallClock | None = None
    duration_ms: Annotated[float, Meta(ge=0, le=1e12)] | None = None
    state: str = ""
    retired: bool | None = None
    is_p2p: bool | None = None
    collective_seq_id: Sequence | None = None
    p2p_seq_id: Sequence | None = None


class _Group(msgspec.Struct, frozen=True, kw_only=True):
    ranks: str = ""


class FlightRecorderSource(CallSource):
    """One rank's dump: the last calls before it, as many as the recorder's buffer holds."""

    kind = "flight recorder"

    def open(self) -> None:
        """Reads the whole dump.

        Raises:
            InputError: the file cannot be read, or is larger than 1 GiB.
            FormatError: it is no dump, or says what cannot be; names the field.
        """
        data = read_whole(self.path, "give a dump of the flight recorder", MAX_BYTES)
        self._dump = read_dump(data, str(self.path))
        number = _RANK.search(self.path.name)
        self.rank = int(number[1]) if number else 0
        if number is None:
            self.problems["dumps whose names have no rank, taken for those of rank 0"] += 1
        configs = self._dump.get("pg_config") or {}
        for name, config in _converted(configs, dict[str | int, _Group], f"{self.path}: pg_config").items():
            ranks = re.findall(r"[0-9]+", config.ranks)
            if any(len(rank) > MAX_DIGITS for rank in ranks):
                raise FormatError(f"{self.path}: pg_config: the ranks of group {str(name)[:40]} are no ranks")
            if ranks:
                self.groups[str(name)] = tuple(map(int, ranks))
                self.world = max(self.world, int(ranks[-1]) + 1)

    def rows(self) -> Iterator[CallRows]:
        """Rows of the dump.

        Raises:
            FormatError: an entry says what cannot be; names entry and field.
        """
        known: dict[tuple[Any, ...], int] = {}
        names: dict[str, str] = {}
        rows = []
        for number, found in enumerate(self._dump["entries"]):
            entry = self._entry(found, number)
            if entry is None:
                self.problems["unreadable entries"] += 1
                continue
            what, sequence = self._key(entry, names, number)
            if what not in known:
                known[what] = len(self.signatures)
                self.signatures.append(_signature(len(self.signatures), what))
            rows.append((known[what], sequence, *_times(entry)))
        yield np.array(rows, dtype=np.int64).reshape(-1, COLUMNS)

    def _entry(self, found: Any, number: int) -> _Entry | None:
        """An entry; None where it lacks a field, as those of calls that never began do."""
        needed = "p2p_seq_id" if isinstance(found, dict) and found.get("is_p2p") is True else "collective_seq_id"
        if not isinstance(found, dict) or any(found.get(name) is None for name in (*_NEEDED, needed)):
            return None
        entry: _Entry = _converted(found, _Entry, f"{self.path}: entry {number}")
        return entry

    def _key(self, entry: _Entry, names: dict[str, str], number: int) -> tuple[tuple[Any, ...], int]:
        group = str(entry.process_group[0])
        ranks = self.groups.get(group, ())
        name = names.setdefault(group, spell_ranks(ranks) + f"={group}" if ranks else f"group {group}")
        self.groups.setdefault(name, ranks)
        op, _, peer = entry.profiling_name.partition(":")[2].partition(" ")
        op = _NAMES.get(op, op)
        given = self._bytes(entry.input_sizes, entry.input_dtypes)
        got = self._bytes(entry.output_sizes, entry.output_dtypes)
        size = message_bytes(op, given, got, len(ranks))
        if max(given, got, size) > MAX_MESSAGE_BYTES:
            raise FormatError(
                f"{self.path}: entry {number}: sizes of more than {MAX_MESSAGE_BYTES} bytes: no message has"
            )
        shapes = tuple(tuple(shape) for shape in entry.input_sizes)[:8]
        dtype = (entry.input_dtypes or [""])[0].lower()
        channel = f"{name}:{peer}@{self.rank}" if entry.is_p2p else name
        sequence = entry.p2p_seq_id if entry.is_p2p else entry.collective_seq_id
        return (op, name, channel, size, given, got, shapes, dtype), sequence or 0

    def _bytes(self, sizes: list[list[int]], dtypes: list[str]) -> int:
        """Bytes of tensors; those of a type that is not known here are counted as a problem, and have none."""
        kinds, total = list(dtypes) + list(dtypes[-1:]) * (len(sizes) - len(dtypes)), 0
        for shape, kind in zip(sizes, kinds, strict=False):
            if kind in _ITEM_BYTES:
                total += prod(shape[:MAX_DIMS]) * _ITEM_BYTES[kind]
            else:
                self.problems[f"tensors of unknown type {kind[:40]}, whose bytes are not counted"] += 1
        return total


def _converted(value: Any, kind: Any, where: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError, OverflowError) as error:
        raise FormatError(f"{where}: {str(error)[:200]}: no dump of the flight recorder says that") from None


def read_dump(data: bytes, name: str) -> dict[str, Any]:
    """A dump as plain values.

    Args:
        data: the file.
        name: of the file, for errors.

    Raises:
        FormatError: it is no dump, or a pickle with anything but plain values.
    """
    try:
        plain = data[:1] in (b"{", b" ", b"\n")
        dump = msgspec.json.decode(data) if plain else plain_pickle(data)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise FormatError(f"{name}: no dump of the flight recorder: {str(error)[:200]}") from None
    if not isinstance(dump, dict) or not isinstance(dump.get("entries"), list):
        raise FormatError(f"{name}: no dump of the flight recorder: it has no entries (dump with collectives)")
    return dump


def _times(entry: _Entry) -> tuple[int, int, int, int]:
    """Queued, start, end and wait, as in the trace format."""
    created = entry.time_created_ns
    started = entry.time_discovered_started_ns or 0
    completed = entry.time_discovered_completed_ns or 0
    done = bool(entry.retired) or entry.state == "completed"
    end = completed - created if completed else NO_TIME if done else UNKNOWN
    if completed and entry.duration_ms is not None:
        return created, max(0, end - round(entry.duration_ms * 1e6)), end, UNKNOWN
    return created, started - created if started else UNKNOWN, end, UNKNOWN


def _signature(number: int, what: tuple[Any, ...]) -> CallSignature:
    op, group, channel, size, given, got, shapes, dtype = what
    return CallSignature(
        id=number,
        op=op,
        group=group,
        channel=channel,
        bytes=size,
        input_bytes=given,
        output_bytes=got,
        shapes=shapes,
        tensors=len(shapes),
        dtype=dtype,
    )
