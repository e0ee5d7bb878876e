"""Reads dumps of PyTorch's flight recorder, in their JSON form or as the pickle that PyTorch writes.

Nothing is unpickled: `pickletools` only takes the file apart into its opcodes, and the few that build
dictionaries, lists, tuples, strings, numbers, truth values and None are followed. A dump has no others; whatever
has is refused.
"""

from __future__ import annotations

import json
import pickletools
import re
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from echograph.errors import FormatError, InputError
from echograph.ir.comms_record import COLUMNS, UNKNOWN, What
from echograph.ir.comms_source import NO_TIME, Rows, Source
from echograph.profiler.comms.bandwidth import message_bytes
from echograph.profiler.comms.groups import spell_ranks

MAX_BYTES = 1 << 30
_ITEM_BYTES = {
    "Double": 8, "Long": 8, "ComplexFloat": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2,
    "Byte": 1, "Char": 1, "Bool": 1, "Float8_e4m3fn": 1, "Float8_e5m2": 1,
}  # fmt: skip
_NAMES = {
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_gather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
}
_RANK = re.compile(r"(\d+)(?:\.\w+)?$")


class FlightRecorderSource(Source):
    """One rank's dump: the last calls before it, as many as the recorder's buffer holds."""

    kind = "flight recorder"

    def open(self) -> None:
        """Reads the whole dump.

        Raises:
            InputError: the file cannot be read, or is larger than 1 GiB.
            FormatError: it is no dump.
        """
        try:
            with self.path.open("rb") as stream:
                data = stream.read(MAX_BYTES + 1)
        except OSError as error:
            raise InputError(f"{self.path}: {error.strerror or error}") from None
        if len(data) > MAX_BYTES:
            raise InputError(f"{self.path}: holds more than {MAX_BYTES} bytes")
        self._dump = read_dump(data, str(self.path))
        number = _RANK.search(self.path.name)
        self.rank = int(number[1]) if number else 0
        for name, config in (self._dump.get("pg_config") or {}).items():
            ranks = tuple(int(r) for r in re.findall(r"\d+", str(config.get("ranks", ""))))
            if ranks:
                self.groups[str(name)] = ranks
                self.world = max(self.world, ranks[-1] + 1)

    def rows(self) -> Iterator[Rows]:
        """Rows of the dump."""
        known: dict[tuple[Any, ...], int] = {}
        names: dict[str, str] = {}
        rows = []
        for entry in self._dump["entries"]:
            try:
                what, sequence = self._what(entry, names)
                times = _times(entry)
            except (KeyError, TypeError, ValueError, IndexError):
                self.problems["unreadable entries"] += 1
                continue
            if what not in known:
                known[what] = len(self.whats)
                self.whats.append(_as_what(len(self.whats), what))
            rows.append((known[what], sequence, *times))
        yield np.array(rows, dtype=np.int64).reshape(-1, COLUMNS)

    def _what(self, entry: dict[str, Any], names: dict[str, str]) -> tuple[tuple[Any, ...], int]:
        group = str(entry["process_group"][0])
        ranks = self.groups.get(group, ())
        name = names.setdefault(group, spell_ranks(ranks) + f"={group}" if ranks else f"group {group}")
        self.groups.setdefault(name, ranks)
        op, _, peer = str(entry["profiling_name"]).partition(":")[2].partition(" ")
        op = _NAMES.get(op, op)
        given, got = (_bytes(entry[f"{side}_sizes"], entry[f"{side}_dtypes"]) for side in ("input", "output"))
        shapes = tuple(tuple(int(n) for n in shape) for shape in entry["input_sizes"])[:8]
        dtype = str((entry["input_dtypes"] or [""])[0]).lower()
        point_to_point = bool(entry.get("is_p2p"))
        channel = f"{name}:{peer}@{self.rank}" if point_to_point else name
        sequence = int(entry["p2p_seq_id" if point_to_point else "collective_seq_id"])
        return (op, name, channel, message_bytes(op, given, got, len(ranks)), given, got, shapes, dtype), sequence


def read_dump(data: bytes, name: str) -> dict[str, Any]:
    """A dump as plain values.

    Args:
        data: the file.
        name: of the file, for errors.

    Raises:
        FormatError: it is no dump, or a pickle with anything but plain values.
    """
    try:
        dump = json.loads(data) if data[:1] in (b"{", b" ", b"\n") else plain_pickle(data)
    except (ValueError, IndexError, TypeError, KeyError, RecursionError) as error:
        raise FormatError(f"{name}: no dump of the flight recorder: {str(error)[:200]}") from None
    if not isinstance(dump, dict) or not isinstance(dump.get("entries"), list):
        raise FormatError(f"{name}: no dump of the flight recorder: it has no entries (dump with collectives)")
    return dump


def plain_pickle(data: bytes) -> Any:
    """What a pickle of plain values holds.

    Raises:
        ValueError: it holds something else: an object, a function, a reference to a module.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    for opcode, argument, _ in pickletools.genops(data):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case "MARK":
                marks.append(len(stack))
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_TUPLE":
                stack.append(())
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode.name])
            case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                memo[len(memo) if argument is None else argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[int(argument or 0)])
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(opcode.name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "TUPLE" | "APPENDS" | "SETITEMS":
                at = marks.pop()
                items = stack[at:]
                del stack[at:]
                _put_in(stack, opcode.name, items)
            case "APPEND":
                item = stack.pop()
                stack[-1].append(item)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                stack[-1][key] = value
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BINUNICODE8" | "BININT" | "BININT1" | "BININT2" | "LONG1":
                stack.append(argument)
            case "BINFLOAT":
                stack.append(argument)
            case other:
                raise ValueError(f"a pickle with {other}, which plain values do not have")
    raise ValueError("a pickle that does not end")


def _put_in(stack: list[Any], how: str, items: list[Any]) -> None:
    if how == "TUPLE":
        stack.append(tuple(items))
    elif how == "APPENDS":
        stack[-1].extend(items)
    else:
        stack[-1].update(zip(items[::2], items[1::2], strict=True))


def _times(entry: dict[str, Any]) -> tuple[int, int, int, int]:
    """Queued, start, end and wait, as in the trace format."""
    created = int(entry["time_created_ns"])
    started = int(entry.get("time_discovered_started_ns") or 0)
    completed = int(entry.get("time_discovered_completed_ns") or 0)
    done = bool(entry.get("retired")) or entry.get("state") == "completed"
    end = completed - created if completed else NO_TIME if done else UNKNOWN
    duration_ms = entry.get("duration_ms")
    if completed and duration_ms is not None:
        return created, max(0, end - round(float(duration_ms) * 1e6)), end, UNKNOWN
    return created, started - created if started else UNKNOWN, end, UNKNOWN


def _bytes(sizes: list[list[int]], dtypes: list[str]) -> int:
    kinds = list(dtypes) + list(dtypes[-1:]) * (len(sizes) - len(dtypes))
    return sum(prod(shape) * _ITEM_BYTES.get(str(kind), 0) for shape, kind in zip(sizes, kinds, strict=False))


def _as_what(number: int, what: tuple[Any, ...]) -> What:
    op, group, channel, size, given, got, shapes, dtype = what
    return What(
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
