"""Reads the logs of collective_trace: lines of [TRACE], [BATCH], [BARRIER] and [COALESCE].

They say how long a call took, and not when it was: so there are counts and durations, and nothing to merge ranks
by. Sizes are computed from shape and dtype where a line has them, since its own mixes what goes in with what comes
out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from math import prod
from typing import Any, TypeVar

import numpy as np

from echograph.errors import FormatError, InputError
from echograph.ir.comms.record import COLUMNS, NO_TIME, UNKNOWN, CallRows, CallSignature, CallSource
from echograph.ir.files import open_file

BATCH = 1 << 16
MAX_SIGNATURES = 1 << 20
MAX_LINE_BYTES = 1 << 16
MAX_RANK, MAX_SIZE, MAX_MS = 1 << 24, 1 << 62, 1e12
T = TypeVar("T", int, float)
TAG = re.compile(r"\[(?:TRACE|BATCH|BARRIER|COALESCE)\]")
_ITEM_BYTES = {
    "float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2,
    "uint8": 1, "int8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
_UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
_LINE = re.compile(
    r"\[(?P<tag>TRACE|BATCH|BARRIER|COALESCE)\]\s*global rank\s+(?P<rank>\d+)\s*(?:in\s+(?P<group>\S+)\s*)?"
    r"-\s*(?P<op>\w+)\s*[-:]\s*(?P<rest>.*)"
)
_RANKS = re.compile(r"=\s*\[([\d,\s]*)\]")
_SHAPE = re.compile(r"[Ss]hape:\s*\[?\(?([\d,\s]*)\)?")
_DTYPE = re.compile(r"[Dd]type:\s*(?:torch\.)?(\w+)")
_DURATION = re.compile(r"Duration:\s*([\d.]+(?:e-?\d+)?)\s*ms")
_SIZE = re.compile(r"Size:\s*([\d.]+)\s*([KMG]?B)")
_BYTES = re.compile(r"^\s*(\d+)\s*bytes|sizes:\s*(\d+)")
_NAME = re.compile(r"name:\s*(\w+)")
_ASYNC = re.compile(r"async:\s*(\d)")


class CollectiveTraceSource(CallSource):
    """A log of one rank."""

    kind = "collective_trace"
    timed = False

    def open(self) -> None:
        """Finds the rank.

        Raises:
            InputError: the file cannot be read.
            FormatError: no line of it is one of collective_trace.
        """
        number = 0
        try:
            calls = ((at, match) for at, line in self._lines() if (match := _LINE.search(line)))
            number, found = next(calls, (0, None))
            if found is None:
                raise FormatError(f"{self.path}: no [TRACE], [BATCH], [BARRIER] or [COALESCE] line")
            self.rank = _whole(found["rank"], "global rank", MAX_RANK)
        except OSError as error:
            raise InputError(f"{self.path}: {error.strerror or error}") from None
        except ValueError as error:
            raise FormatError(f"{self.path}: line {number}: {error}") from None

    def rows(self) -> Iterator[CallRows]:
        """Rows with a sequence by group, and a duration in the end's place.

        Raises:
            FormatError: a line says what cannot be; names line and field.
        """
        known: dict[tuple[Any, ...], int] = {}
        issued: dict[str, int] = {}
        batch: list[tuple[int, ...]] = []
        for number, line in self._lines():
            if not TAG.search(line):
                continue
            try:
                parsed = _parse(line)
            except ValueError as error:
                raise FormatError(f"{self.path}: line {number}: {error}: leave the line out") from None
            if parsed is None or len(known) >= MAX_SIGNATURES:
                self.problems["unreadable lines"] += 1
                continue
            what, ranks, duration_ns = parsed
            _, _, size, dims, dtype, *_ = what
            if dims and prod(dims) and not size:
                self.problems[f"calls of unknown type {dtype[:40]}, whose bytes are not counted"] += 1
            self.groups.setdefault(what[1], ranks)
            self.world = max(self.world, *ranks, self.rank + 1)
            if what not in known:
                known[what] = len(self.signatures)
                self.signatures.append(_signature(len(self.signatures), what))
            sequence = issued[what[1]] = issued.get(what[1], -1) + 1
            batch.append((known[what], sequence, 0, UNKNOWN, duration_ns, UNKNOWN))
            if len(batch) == BATCH:
                yield np.array(batch, dtype=np.int64)
                batch.clear()
        yield np.array(batch, dtype=np.int64).reshape(-1, COLUMNS)

    def _lines(self) -> Iterator[tuple[int, str]]:
        """Lines with their numbers; of one that is longer than a call's, its beginning."""
        with open_file(self.path) as stream:
            for number in count(1):
                if not (line := stream.readline(MAX_LINE_BYTES)):
                    return
                yield number, line.decode("utf-8", errors="replace")
                while not line.endswith(b"\n") and (line := stream.readline(MAX_LINE_BYTES)):
                    pass


def _parse(line: str) -> tuple[tuple[Any, ...], tuple[int, ...], int] | None:
    """Operation, group, bytes, shape, dtype, asynchronous, coalesced; the ranks; nanoseconds."""
    found = _LINE.search(line)
    if found is None:
        return None
    rest = found["rest"]
    duration = _DURATION.search(rest)
    if duration is None and found["tag"] != "BATCH":
        return None
    members = _RANKS.search(rest)
    ranks = tuple(_whole(r, "rank", MAX_RANK) for r in members[1].split(",") if r.strip()) if members else ()
    shape = _SHAPE.search(rest)
    dims = tuple(_whole(d, "shape", MAX_SIZE) for d in shape[1].split(",") if d.strip()) if shape else ()
    dtype = _DTYPE.search(rest)
    name = _NAME.search(rest)
    asynchronous = _ASYNC.search(rest)
    op = f"{name[1]}_coalesced" if found["tag"] == "COALESCE" and name else found["op"]
    group = found["group"] or ",".join(map(str, ranks)) or "not named"
    group = f"{group}={','.join(map(str, ranks))}" if ranks else group
    size = _size(rest, dims, dtype[1] if dtype else "")
    what = (op, group, size, dims, dtype[1] if dtype else "", bool(asynchronous and asynchronous[1] == "1"))
    nanoseconds = NO_TIME if duration is None else round(_decimal(duration[1], "duration", MAX_MS) * 1e6)
    return what, ranks, nanoseconds


def _size(rest: str, dims: tuple[int, ...], dtype: str) -> int:
    if dims and dtype in _ITEM_BYTES:
        return _at_most(prod(dims) * _ITEM_BYTES[dtype], "shape", MAX_SIZE)
    if (plain := _BYTES.search(rest)) is not None:
        return _whole(plain[1] or plain[2], "size", MAX_SIZE)
    size = _SIZE.search(rest)
    return round(_decimal(size[1], "size", MAX_SIZE / _UNITS[size[2]]) * _UNITS[size[2]]) if size else 0


def _whole(text: str, name: str, most: int) -> int:
    # A text that is longer has more digits than any limit, or zeros before them.
    return _at_most(int(text.strip()) if len(text) < 100 and text.strip().isdecimal() else most + 1, name, most)


def _decimal(text: str, name: str, most: float) -> float:
    try:
        return _at_most(float(text), name, most)
    except ValueError:
        raise ValueError(f"its {name} is '{text[:20]}', which no call has") from None


def _at_most(value: T, name: str, most: float) -> T:
    if not 0 <= value <= most:
        raise ValueError(f"its {name} is above {most:g}, which no call has")
    return value


def _signature(number: int, what: tuple[Any, ...]) -> CallSignature:
    op, group, size, dims, dtype, asynchronous = what
    return CallSignature(
        id=number,
        op=op,
        group=group,
        channel=group,
        bytes=size,
        input_bytes=size,
        output_bytes=size,
        shapes=(dims,) if dims else (),
        dtype=dtype,
        asynchronous=asynchronous,
        coalesced=op.endswith("_coalesced"),
    )
