"""Measured collectives, and the latencies and bandwidths of a fabric that are fitted to them.

Rows come from raw nccl-tests logs and from tables gathered from them. What predicts is passed to the fit, which
knows nothing of algorithms: `predict` maps parameters (dotted name -> positive number) to the seconds of every
row.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

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
_COLUMNS = {
    "op": "collective",
    "gpus": "n_gpus",
    "nodes": "n_nodes",
    "bytes": "size_bytes",
    "latency_us": "time_us",
    "fabric": "interconnect",
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

    Columns collective, n_gpus, n_nodes, size_bytes and time_us are needed, or op, gpus, nodes, bytes and
    latency_us; dtype, gpu, interconnect, nccl, source and notes are read where they stand.

    Raises:
        DataError: the file cannot be read, lacks a column, or a value is not what it should be (names the line).
    """
    reader = csv.DictReader(io.StringIO(_text(Path(path)), newline=""), strict=True)
    try:
        reader.fieldnames = [_COLUMNS.get(name, name) for name in reader.fieldnames or ()]
        missing = {"collective", "n_gpus", "n_nodes", "size_bytes", "time_us"} - set(reader.fieldnames)
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


Predict = Callable[[Mapping[str, float]], NDArray[np.float64]]
Vector = NDArray[np.float64]

OUTLIER_LOG = 0.05
DIFFERENCE = 1e-4
MOST_STEPS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricFit:
    """Parameters that fit, and how well.

    Args:
        parameters: dotted name -> value.
        error: mean absolute relative error on the rows fitted, by collective.
        undetermined: parameters that the rows hardly constrain, so that they stay near where they started.
    """

    parameters: dict[str, float]
    error: dict[str, float]
    undetermined: tuple[str, ...]


def fit_fabric(
    rows: Sequence[CollectiveRow],
    predict: Predict,
    start: Mapping[str, float],
    *,
    upper: Mapping[str, float] | None = None,
) -> FabricFit:
    """Least squares in the logarithm of time, robust against outliers, over the logarithms of the parameters.

    Levenberg-Marquardt (Marquardt 1963) with the soft-L1 loss as iteratively reweighted squares: a row that is
    off by more than 5 % weighs less. A weak prior, worth one row that is off by 5 % when a parameter moves by a
    factor e, keeps at their start the parameters that no row speaks of.

    Args:
        rows: measured collectives.
        predict: parameters -> seconds of each row, in the rows' order.
        start: first guess, every value above 0.
        upper: largest value a parameter may take, by the last part of its name ("efficiency": 1.05).

    Raises:
        DataError: no rows, a time or a start that is not above 0, or predictions of another length.
    """
    names = list(start)
    measured = np.array([row.seconds for row in rows])
    first = np.array([start[name] for name in names], dtype=np.float64)
    if not len(rows) or measured.min() <= 0:
        raise DataError("fit: needs rows whose times are all above 0")
    if first.min() <= 0:
        raise DataError(f"fit: start of {names[int(first.argmin())]} is not above 0")
    limits = np.array([(upper or {}).get(name.rsplit(".", 1)[-1], np.inf) for name in names])

    def residuals(x: Vector) -> Vector:
        seconds = predict(dict(zip(names, np.exp(x).tolist(), strict=True)))
        if seconds.shape != measured.shape:
            raise DataError(f"fit: {len(seconds)} predictions for {len(rows)} rows")
        return np.asarray(np.log(seconds / measured))

    origin, ceiling = np.log(first), np.log(limits)
    x, jacobian = _minimise(residuals, np.minimum(origin, ceiling), origin, ceiling)
    ratio = np.exp(residuals(x))
    moved = np.sum(jacobian**2, axis=0)
    return FabricFit(
        parameters=dict(zip(names, np.exp(x).tolist(), strict=True)),
        error=error_by_kind(rows, ratio * measured),
        undetermined=tuple(name for name, weight in zip(names, moved, strict=True) if weight < 1),
    )


def error_by_kind(rows: Sequence[CollectiveRow], seconds: Vector) -> dict[str, float]:
    """Mean absolute relative error by collective.

    Args:
        rows: measured collectives.
        seconds: predicted, in the rows' order.
    """
    off = np.abs(seconds / np.array([row.seconds for row in rows]) - 1)
    kinds = sorted({row.kind for row in rows})
    return {kind: float(off[[row.kind == kind for row in rows]].mean()) for kind in kinds}


def size_fold(row: CollectiveRow, folds: int = 4) -> int:
    """The fold that a row is in, from 0: whole sizes share one, by a hash of the size in bytes.

    A fit judged on sizes it never saw cannot have learned a table.
    """
    digest = hashlib.sha256(str(int(row.size_bytes)).encode()).digest()
    return int.from_bytes(digest[:8], "big") % folds


def _minimise(
    residuals: Callable[[Vector], Vector],
    x: Vector,
    origin: Vector,
    ceiling: Vector,
) -> tuple[Vector, NDArray[np.float64]]:
    """Levenberg-Marquardt on soft-L1; returns the point and the Jacobian of the residuals there."""

    def loss(r: Vector, x: Vector) -> float:
        data = 2 * np.sum(np.sqrt(1 + (r / OUTLIER_LOG) ** 2) - 1)
        return float(data + np.sum((x - origin) ** 2))

    damping, r = 1e-2, residuals(x)
    jacobian = _jacobian(residuals, x, r)
    for _ in range(MOST_STEPS):
        weight = 1 / (OUTLIER_LOG**2 * np.sqrt(1 + (r / OUTLIER_LOG) ** 2))
        normal = jacobian.T @ (weight[:, None] * jacobian) + np.eye(len(x))
        gradient = jacobian.T @ (weight * r) + (x - origin)
        before = loss(r, x)
        while damping < 1e8:
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
            trial = np.minimum(x + np.clip(step, -1, 1), ceiling)
            trial_r = residuals(trial)
            if loss(trial_r, trial) < before:
                break
            damping *= 4
        else:
            break
        x, r, damping = trial, trial_r, max(damping / 8, 1e-9)
        jacobian = _jacobian(residuals, x, r)
        if before - loss(r, x) < 1e-6 * before:
            break
    return x, jacobian


def _jacobian(residuals: Callable[[Vector], Vector], x: Vector, r: Vector) -> NDArray[np.float64]:
    columns = []
    for i in range(len(x)):
        moved = x.copy()
        # Backwards, so that a parameter at its ceiling stays legal.
        moved[i] -= DIFFERENCE
        columns.append((r - residuals(moved)) / DIFFERENCE)
    return np.stack(columns, axis=1)
