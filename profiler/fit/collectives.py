"""Readers of measured collectives: raw nccl-tests logs, and tables gathered from them."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from echograph.errors import DataError
from echograph.ir.files import read_unpacked

TimedCollective: TypeAlias = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv", "barrier"
]
KINDS: tuple[str, ...] = get_args(TimedCollective)
MAX_BYTES = 256 << 20
MAX_ROWS = 2_000_000
MAX_RANKS, MAX_SIZE_BYTES, MAX_SECONDS = 1 << 24, 1 << 53, 86_400
_SPELLINGS = {
    "alltoall": "all_to_all",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "sendrecv": "send_recv",
}
# mpirun puts its tag wherever a line came in two pieces, so not only in front.
_MPI_TAG = re.compile(r"\[\d+,\d+\]<\w+>:")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\b.*?\bon\s+(\S+)\s+device\s+\d+\s+\[\S+\]\s+(.+?)\s*$")
_TEST = re.compile(r"#\s*Collective test starting:\s*(\w+?)_perf\b")
_VERSION = re.compile(r"NCCL version\s+([\d.]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """One measured collective.

    Args:
        kind: the collective.
        ranks: size of the group.
        nodes: hosts it ran on.
        size_bytes: nccl-tests' `size`.
        seconds: out-of-place time.
        dtype: element type as the source spells it, or "".
        gpu: GPU as the source spells it, or "".
        interconnect: links as the source spells them, or "".
        nccl: NCCL version, or "".
        source: where the row is from.
        note: what else the source says of the run, or "".
    """

    kind: TimedCollective
    ranks: int
    nodes: int
    size_bytes: int
    seconds: float
    dtype: str = ""
    gpu: str = ""
    interconnect: str = ""
    nccl: str = ""
    source: str = ""
    note: str = ""


def read_nccl_tests(path: str | Path, kind: TimedCollective | None = None) -> list[CollectiveRow]:
    """Reads the output of one nccl-tests program, plain or as `mpirun --tag-output` prints it.

    Rows of zero bytes or zero time are left out. Out-of-place times are taken.

    Args:
        path: the log; `.gz` is unpacked.
        kind: the collective, where the log does not tell: logs before 2.18 name no program, and all_gather and
            all_to_all look alike.

    Raises:
        DataError: the file cannot be read, names no ranks, has no row, or its collective is not known.
    """
    lines = [_MPI_TAG.sub("", line) for line in _text(Path(path)).splitlines()]
    ranks = {m[1]: (m[2], m[3]) for line in lines if (m := _RANK.search(line))}
    if not ranks:
        raise DataError(f"nccl-tests log {path}: no '# Rank' lines; give the whole output of the program")
    table = [row for line in lines if (row := _table_row(line))]
    if not table:
        raise DataError(f"nccl-tests log {path}: no row of the table (size, count, type, ..., time, algbw, busbw)")
    known = kind or _kind_named(lines) or _kind_guessed(table, len(ranks))
    if known is None:
        raise DataError(
            f"nccl-tests log {path}: cannot tell the collective; name it with kind (one of {', '.join(KINDS)})"
        )
    version = next((m[1] for line in lines if (m := _VERSION.search(line))), "")
    return [
        CollectiveRow(
            kind=known,
            ranks=len(ranks),
            nodes=len({host for host, _ in ranks.values()}),
            size_bytes=row.size_bytes,
            seconds=row.microseconds * 1e-6,
            dtype=row.dtype,
            gpu=next(iter(ranks.values()))[1],
            nccl=version,
            source=Path(path).name,
        )
        for row in table
        if row.size_bytes > 0 and row.microseconds > 0
    ]


def read_collectives_csv(path: str | Path) -> list[CollectiveRow]:
    """Reads a table of measured collectives, CSV or CSV in gzip.

    Columns collective, n_gpus, n_nodes, size_bytes and time_us are needed; dtype, gpu, interconnect, nccl,
    source and notes are read where they stand.

    Raises:
        DataError: the file cannot be read, lacks a column, or a value is not what it should be (names the line).
    """
    reader = csv.DictReader(io.StringIO(_text(Path(path)), newline=""), strict=True)
    try:
        missing = {"collective", "n_gpus", "n_nodes", "size_bytes", "time_us"} - set(reader.fieldnames or ())
        if missing:
            raise DataError(f"collectives table {path}: lacks column {', '.join(sorted(missing))}")
        rows = list(islice(_csv_rows(reader, path), MAX_ROWS + 1))
    except csv.Error as error:
        raise DataError(f"collectives table {path}: line {reader.line_num}: {error}: not a CSV table") from None
    if len(rows) > MAX_ROWS:
        raise DataError(f"collectives table {path}: more than {MAX_ROWS:,} rows: fit a part of it")
    return rows


def _csv_rows(reader: Iterable[dict[str, str]], path: str | Path) -> Iterator[CollectiveRow]:
    for number, line in enumerate(reader, start=2):
        try:
            if None in line or None in line.values():
                raise ValueError("more or fewer cells than the first line")
            row = CollectiveRow(
                kind=_kind(line["collective"]),
                ranks=int(line["n_gpus"]),
                nodes=int(line["n_nodes"]),
                size_bytes=_bytes(line["size_bytes"]),
                seconds=float(line["time_us"]) * 1e-6,
                dtype=line.get("dtype") or "",
                gpu=line.get("gpu") or "",
                interconnect=line.get("interconnect") or "",
                nccl=line.get("nccl") or "",
                source=line.get("source") or "",
                note=line.get("notes") or "",
            )
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError(f"collectives table {path}: line {number}: {str(error)[:100]}") from error
        sized = MAX_RANKS >= row.ranks >= row.nodes >= 1 and MAX_SIZE_BYTES >= row.size_bytes >= 0
        if not (sized and 0 <= row.seconds <= MAX_SECONDS):
            raise DataError(
                f"collectives table {path}: line {number}: needs n_gpus >= n_nodes >= 1, size and time >= 0, and "
                f"no more than {MAX_RANKS:,} GPUs, 2^53 bytes and a day"
            )
        yield row


def _bytes(text: str) -> int:
    # Some tables have sizes as decimal numbers.
    return int(text) if text.strip().isdecimal() else int(float(text))


@dataclass(frozen=True, slots=True)
class _TableRow:
    size_bytes: int
    dtype: str
    redop: str
    rooted: bool
    microseconds: float
    bus_over_alg: float


def _table_row(line: str) -> _TableRow | None:
    """One line of the table: size count type redop [root] then twice time algbw busbw errors."""
    words = line.split()
    if len(words) not in (11, 12, 13) or not (words[0].isdigit() and words[1].isdigit()):
        return None
    try:
        time, alg, bus = (float(word) for word in words[-8:-5])
        size = int(words[0])
    except ValueError:
        return None
    if size > MAX_SIZE_BYTES or not all(0 <= value < float("inf") for value in (time, alg, bus)):
        return None
    rooted = len(words) == 13 and words[4] != "-1"
    return _TableRow(size, words[2], words[3], rooted, time, bus / alg if alg > 0 else 0.0)


def _kind(name: str) -> TimedCollective:
    kind = _SPELLINGS.get(name, name)
    if kind not in KINDS:
        raise ValueError(f"unknown collective '{name[:40]}'")
    return kind  # type: ignore[return-value]


def _kind_named(lines: Iterable[str]) -> TimedCollective | None:
    name = next((m[1] for line in lines if (m := _TEST.search(line))), None)
    try:
        return _kind(name) if name else None
    except ValueError:
        return None


def _kind_guessed(table: list[_TableRow], ranks: int) -> TimedCollective | None:
    """The collective that has a reduction and this ratio of busbw to algbw; two decimals are printed."""
    largest = max(table, key=lambda row: row.size_bytes)
    if largest.rooted:
        return "broadcast" if largest.redop == "none" else "reduce"
    if largest.redop == "none" or ranks < 2:
        return None
    factors: dict[TimedCollective, float] = {
        "all_reduce": 2 * (ranks - 1) / ranks,
        "reduce_scatter": (ranks - 1) / ranks,
    }
    near: list[TimedCollective] = [
        kind for kind, factor in factors.items() if abs(largest.bus_over_alg / factor - 1) < 0.02
    ]
    return near[0] if len(near) == 1 else None


def _text(path: Path) -> str:
    content = read_unpacked(path, "give a table of collectives (CSV, may be gzipped)", MAX_BYTES)
    return content.decode("utf-8", errors="replace")
