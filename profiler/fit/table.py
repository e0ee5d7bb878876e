"""Reads a table of measured kernels into columns.

Columns of the CSV (an empty cell means "does not apply"): source, gpu, op, dtype, m, n, k, layout, batch, seq,
heads, kv_heads, head_dim, causal, latency_ms, tflops, notes. Only `op` and one of `latency_ms` and `tflops` are
required in every row.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from echograph.errors import DataError
from echograph.ir.files import read_unpacked
from echograph.profiler.costs.cost import FloatArray

TEXT = ("source", "gpu", "op", "dtype", "layout", "causal", "notes")
NUMBERS = ("m", "n", "k", "batch", "seq", "heads", "kv_heads", "head_dim", "latency_ms", "tflops")
REQUIRED = ("op", "dtype", "latency_ms")
MAX_TABLE_BYTES = 2**29


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
    try:
        data = read_unpacked(path, "give a kernels.csv or kernels.csv.gz", MAX_TABLE_BYTES)
        lines = list(csv.reader(io.StringIO(data.decode("utf-8"))))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: not a CSV table: {error}") from error
    return _columns(path, lines)


def _columns(path: Path, lines: list[list[str]]) -> KernelTable:
    if len(lines) < 2:
        raise DataError(f"{path}: no rows: the first line names the columns, each further line is a kernel")
    header, body = lines[0], lines[1:]
    missing = [name for name in REQUIRED if name not in header]
    if missing:
        raise DataError(f"{path}: column '{missing[0]}' is missing: see the columns in docs/accuracy.md")
    ragged = next((i for i, line in enumerate(body) if len(line) != len(header)), None)
    if ragged is not None:
        raise DataError(f"{path}: line {ragged + 2}: {len(body[ragged])} cells, expected {len(header)}")
    cells = dict(zip(header, zip(*body, strict=True), strict=True))
    blank = ("",) * len(body)
    return KernelTable(
        text={name: np.asarray(cells.get(name, blank), dtype=np.str_) for name in TEXT},
        number={name: _numbers(path, name, cells.get(name, blank)) for name in NUMBERS},
    )


def _numbers(path: Path, name: str, cells: tuple[str, ...]) -> FloatArray:
    try:
        return np.asarray([float(cell) if cell else np.nan for cell in cells])
    except ValueError as error:
        raise DataError(f"{path}: column '{name}': {error}") from error
