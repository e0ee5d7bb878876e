"""Reads a table of measured kernels into columns.

Columns of the CSV (an empty cell means "does not apply"): source, gpu, op, dtype, m, n, k, layout, batch, seq,
heads, kv_heads, head_dim, causal, latency_ms, tflops, notes. Only `op` and one of `latency_ms` and `tflops` are
required in every row.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from echograph.errors import DataError
from echograph.ir.files import read_unpacked
from echograph.profiler.costs.device import FloatArray

TEXT = ("source", "gpu", "op", "dtype", "layout", "causal", "notes")
NUMBERS = ("m", "n", "k", "batch", "seq", "heads", "kv_heads", "head_dim", "latency_ms", "tflops")
REQUIRED = ("op", "dtype", "latency_ms")
NEEDED = {
    ("gemm", "gemm_best", "matmul", "linear", "bmm"): ("m", "n", "k"),
    ("ln", "softmax", "add", "mul", "div", "pow", "addu", "mulu", "divu", "powu", "relu", "gelu", "tanh"): (
        "m",
        "n",
    ),
    ("attn_fwd", "attn_fwd_bwd", "sdp_fwd", "sdp_bwd"): ("batch", "seq", "heads", "kv_heads", "head_dim"),
}
"""Operations that are fitted, and the sizes that each row of theirs has."""
MAX_TABLE_BYTES = 2**29
MAX_ROWS, MAX_TEXT, MAX_NUMBER = 5_000_000, 300, 1e10
# A tenth of a nanosecond, and a day.
MIN_LATENCY_MS, MAX_LATENCY_MS = 1e-7, 8.64e7


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTable:
    """Measured kernels, one array a column; a missing number is nan, a missing text empty."""

    text: dict[str, npt.NDArray[np.str_]]
    number: dict[str, FloatArray]

    def __len__(self) -> int:
        return len(self.text["op"])

    def where(self, mask: npt.NDArray[np.bool_]) -> KernelTable:
        """The rows where the mask is true."""
        return KernelTable(
            text={name: column[mask] for name, column in self.text.items()},
            number={name: column[mask] for name, column in self.number.items()},
        )

    def select(
        self, *, gpus: Iterable[str] = (), ops: Iterable[str] = (), dtypes: Iterable[str] = ()
    ) -> KernelTable:
        """Rows of any of these devices, operations and dtypes; an empty choice means all."""
        mask = np.ones(len(self), dtype=np.bool_)
        for column, wanted in (("gpu", tuple(gpus)), ("op", tuple(ops)), ("dtype", tuple(dtypes))):
            if wanted:
                mask &= np.isin(self.text[column], wanted)
        return self.where(mask)

    def seconds(self) -> FloatArray:
        """Measured seconds; nan where a row holds only a rate."""
        return np.asarray(self.number["latency_ms"] * 1e-3)

    def sources(self) -> dict[str, int]:
        """Rows of each source, by name."""
        names, counts = np.unique(self.text["source"], return_counts=True)
        return {str(name): int(count) for name, count in zip(names, counts, strict=True)}


def read_table(path: Path) -> KernelTable:
    """Reads kernels.csv or kernels.csv.gz.

    Raises:
        InputError: the file cannot be read.
        DataError: a column is missing, or a cell is no number.
    """
    data = read_unpacked(path, "give a kernels.csv or kernels.csv.gz", MAX_TABLE_BYTES)
    lines = csv.reader(io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", newline=""), strict=True)
    try:
        return _columns(path, lines)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: line {lines.line_num}: not a CSV table: {error}") from error


def _columns(path: Path, lines: Iterator[list[str]]) -> KernelTable:
    header = next(lines, [])
    missing = [name for name in REQUIRED if name not in header]
    if missing:
        raise DataError(f"{path}: column '{missing[0]}' is missing: see the columns in docs/accuracy.md")
    if twice := [name for name in {*TEXT, *NUMBERS} if header.count(name) > 1]:
        raise DataError(f"{path}: column '{min(twice)}' stands twice: leave one of them out")
    known: dict[str, list[str]] = {name: [] for name in (*TEXT, *NUMBERS) if name in header}
    columns = [(header.index(name), cells) for name, cells in known.items()]
    rows = 0
    for rows, line in enumerate(lines, start=1):
        if len(line) != len(header):
            raise DataError(f"{path}: line {rows + 1}: {len(line)} cells, expected {len(header)}")
        if rows > MAX_ROWS:
            raise DataError(f"{path}: more than {MAX_ROWS:,} rows: fit a part of it")
        for at, cells in columns:
            cells.append(line[at])
    if not rows:
        raise DataError(f"{path}: no rows: the first line names the columns, each further line is a kernel")
    blank = [""] * rows
    table = KernelTable(
        text={name: _texts(path, name, known.get(name, blank)) for name in TEXT},
        number={name: _numbers(path, name, known.get(name, blank)) for name in NUMBERS},
    )
    _check_sizes(path, table)
    return table


def _check_sizes(path: Path, table: KernelTable) -> None:
    """Every row of an operation that is fitted has its sizes, and a time or a rate."""
    untimed = np.isnan(table.number["latency_ms"]) & np.isnan(table.number["tflops"])
    for ops, sizes in NEEDED.items():
        of_these = np.isin(table.text["op"], ops)
        for what, absent in (("latency_ms", untimed), *((size, np.isnan(table.number[size])) for size in sizes)):
            rows = np.flatnonzero(of_these & absent)
            if len(rows):
                op = table.text["op"][rows[0]]
                raise DataError(
                    f"{path}: line {rows[0] + 2}: {op} without '{what}': give it, or leave the row out"
                )


def _texts(path: Path, name: str, cells: list[str]) -> npt.NDArray[np.str_]:
    # An array of texts takes for each what the longest takes.
    long = next((at for at, cell in enumerate(cells) if len(cell) > MAX_TEXT), None)
    if long is not None:
        raise DataError(f"{path}: line {long + 2}: '{name}' has more than {MAX_TEXT} characters")
    return np.asarray(cells, dtype=np.str_)


def _numbers(path: Path, name: str, cells: list[str]) -> FloatArray:
    try:
        found = np.asarray([float(cell) if cell else np.nan for cell in cells])
    except ValueError:
        at = next(at for at, cell in enumerate(cells) if cell and not _is_number(cell))
        raise DataError(f"{path}: line {at + 2}: '{name}' is '{cells[at][:40]}', no number") from None
    given = np.array([bool(cell) for cell in cells])
    timed = name == "latency_ms"
    least, most = (MIN_LATENCY_MS, MAX_LATENCY_MS) if timed else (1e-6 if name == "tflops" else 1, MAX_NUMBER)
    wrong = np.flatnonzero(given & ~((found >= least) & (found <= most)))
    if len(wrong):
        at = int(wrong[0])
        raise DataError(
            f"{path}: line {at + 2}: '{name}' is {cells[at][:40]}: give a number from {least:g} to {most:g}"
        )
    return found


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
