"""Reads tables of measured kernels into columns.

Columns of the CSV (an empty cell means "does not apply"): source, gpu, op, dtype, kernel, part, m, n, k,
layout, batch, seq, heads, kv_heads, head_dim, head_dim_v, kv_seq, window, causal, experts, topk, tp, ep,
balance, latency_ms, tflops, notes. Only `op` and one of `latency_ms` and `tflops` are required in every row.

Tables of millions of rows hold few distinct cells, so a column of text is codes into its distinct words, and a
number is read once for each way that it is written.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from echograph.errors import DataError
from echograph.ir.files import read_unpacked
from echograph.profiler.costs.device import FloatArray

TEXT = ("source", "gpu", "op", "dtype", "layout", "causal", "notes", "kernel", "part", "balance")
NUMBERS = (
    *("m", "n", "k", "batch", "seq", "heads", "kv_heads", "head_dim", "head_dim_v", "kv_seq", "window"),
    *("experts", "topk", "tp", "ep"),
    *("latency_ms", "tflops"),
)
REQUIRED = ("op", "dtype", "latency_ms")
NEEDED = {
    ("gemm", "gemm_best", "matmul", "linear", "bmm"): ("m", "n", "k"),
    ("attn_fwd", "attn_fwd_bwd", "sdp_fwd", "sdp_bwd"): ("batch", "seq", "heads", "kv_heads", "head_dim"),
    ("fused_experts",): ("m", "n", "k", "experts", "topk", "tp", "ep"),
}
"""Operations that are fitted, and the sizes that each row of theirs has."""
MAX_TABLE_BYTES = 2**29
MAX_ROWS, MAX_TEXT, MAX_NUMBER = 5_000_000, 300, 1e10
# A tenth of a nanosecond, and a day.
MIN_LATENCY_MS, MAX_LATENCY_MS = 1e-7, 8.64e7
LEAST = {"latency_ms": MIN_LATENCY_MS, "tflops": 1e-6, "window": 0.0}
"""The least number of a column; 1 of those that are not here. A window of 0 is none."""

_Mask: TypeAlias = npt.NDArray[np.bool_]

UNFILLED_WEIGHTS = (("aiconfigurator", "/gemm/vllm/", "bfloat16"),)
"""Tables whose products have weights that nobody filled: words of their `source`, and their dtype.

That collector times vLLM's RowParallelLinear without loading weights, so that they are what `torch.empty` gives
(github.com/ai-dynamo/aiconfigurator, collector/vllm/collect_gemm.py); its other dtypes and libraries draw random
numbers or fill them.
"""


@dataclass(frozen=True, slots=True)
class Words:
    """A column of text: `names[codes]`, [rows]."""

    names: npt.NDArray[np.str_]
    codes: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.codes)

    def where(self, mask: _Mask) -> Words:
        """The rows where the mask is true."""
        return Words(self.names, self.codes[mask])

    def tolist(self) -> list[str]:
        """The text of each row."""
        return [str(name) for name in self.names[self.codes]]

    def among(self, wanted: Iterable[str]) -> _Mask:
        """True where the text is one of these."""
        return np.asarray(np.isin(self.names, list(wanted))[self.codes], dtype=np.bool_)

    def starting(self, prefix: str) -> _Mask:
        """True where the text begins so."""
        return np.asarray(np.char.startswith(self.names, prefix)[self.codes], dtype=np.bool_)

    def counts(self) -> dict[str, int]:
        """Rows of each text that occurs, by text."""
        rows = np.bincount(self.codes, minlength=len(self.names)).tolist()
        return {str(name): int(n) for name, n in sorted(zip(self.names.tolist(), rows, strict=True)) if n}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTable:
    """Measured kernels, one array a column; a missing number is nan, a missing text empty."""

    text: dict[str, Words]
    number: dict[str, FloatArray]

    def __len__(self) -> int:
        return len(self.text["op"])

    def where(self, mask: npt.NDArray[np.bool_]) -> KernelTable:
        """The rows where the mask is true."""
        return KernelTable(
            text={name: column.where(mask) for name, column in self.text.items()},
            number={name: column[mask] for name, column in self.number.items()},
        )

    def select(
        self, *, gpus: Iterable[str] = (), ops: Iterable[str] = (), dtypes: Iterable[str] = ()
    ) -> KernelTable:
        """Rows of any of these devices, operations and dtypes; an empty choice means all."""
        mask = np.ones(len(self), dtype=np.bool_)
        for column, wanted in (("gpu", tuple(gpus)), ("op", tuple(ops)), ("dtype", tuple(dtypes))):
            if wanted:
                mask &= self.text[column].among(wanted)
        return self.where(mask)

    def unfilled(self) -> _Mask:
        """True of products whose weights nobody filled (`UNFILLED_WEIGHTS`), [rows]."""
        source, mask = self.text["source"], np.zeros(len(self), dtype=np.bool_)
        for *words, dtype in UNFILLED_WEIGHTS:
            named = [name for name in source.names.tolist() if all(word in name for word in words)]
            mask |= source.among(named) & self.text["dtype"].among([dtype])
        return mask

    def seconds(self) -> FloatArray:
        """Measured seconds; nan where a row holds only a rate."""
        return np.asarray(self.number["latency_ms"] * 1e-3)

    def sources(self) -> dict[str, int]:
        """Rows of each source, by name."""
        return self.text["source"].counts()


def read_tables(paths: Sequence[Path]) -> KernelTable:
    """Reads several tables as one, in their order; errors as `read_table`."""
    tables = [read_table(path) for path in paths]
    if len(tables) == 1:
        return tables[0]
    return KernelTable(
        text={name: _joined([table.text[name] for table in tables]) for name in TEXT},
        number={name: np.concatenate([table.number[name] for table in tables]) for name in NUMBERS},
    )


def _joined(parts: Sequence[Words]) -> Words:
    names, codes = np.unique(np.concatenate([part.names for part in parts]), return_inverse=True)
    ends = np.cumsum([len(part.names) for part in parts])[:-1]
    known = np.split(codes.astype(np.int32).ravel(), ends)
    return Words(names, np.concatenate([of[part.codes] for of, part in zip(known, parts, strict=True)]))


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


@dataclass(frozen=True, slots=True)
class _Cells:
    """A column as it is read: each way of writing a cell, in the order of its first row, and the rows' codes."""

    known: dict[str, int]
    codes: list[int]

    def words(self) -> Words:
        return Words(np.asarray(list(self.known), dtype=np.str_), np.asarray(self.codes, dtype=np.int32))

    def line(self, cell: str) -> int:
        """The first line of the file that has this cell; the header is line 1."""
        return self.codes.index(self.known[cell]) + 2


def _columns(path: Path, lines: Iterator[list[str]]) -> KernelTable:
    header = next(lines, [])
    missing = [name for name in REQUIRED if name not in header]
    if missing:
        raise DataError(f"{path}: column '{missing[0]}' is missing: see the columns in docs/accuracy/kernels.md")
    if twice := [name for name in {*TEXT, *NUMBERS} if header.count(name) > 1]:
        raise DataError(f"{path}: column '{min(twice)}' stands twice: leave one of them out")
    read = {name: _Cells({}, []) for name in (*TEXT, *NUMBERS) if name in header}
    columns = [(header.index(name), cells.known, cells.codes) for name, cells in read.items()]
    rows = 0
    for rows, line in enumerate(lines, start=1):
        if len(line) != len(header):
            raise DataError(f"{path}: line {rows + 1}: {len(line)} cells, expected {len(header)}")
        if rows > MAX_ROWS:
            raise DataError(f"{path}: more than {MAX_ROWS:,} rows: fit a part of it")
        for at, known, codes in columns:
            codes.append(known.setdefault(line[at], len(known)))
    if not rows:
        raise DataError(f"{path}: no rows: the first line names the columns, each further line is a kernel")
    blank = _Cells({"": 0}, [0] * rows)
    table = KernelTable(
        text={name: _texts(path, name, read.get(name, blank)) for name in TEXT},
        number={name: _numbers(path, name, read.get(name, blank)) for name in NUMBERS},
    )
    _check_sizes(path, table)
    return table


def _check_sizes(path: Path, table: KernelTable) -> None:
    """Every row of an operation that is fitted has its sizes, and a time or a rate."""
    untimed = np.isnan(table.number["latency_ms"]) & np.isnan(table.number["tflops"])
    for ops, sizes in NEEDED.items():
        of_these = table.text["op"].among(ops)
        for what, absent in (("latency_ms", untimed), *((size, np.isnan(table.number[size])) for size in sizes)):
            rows = np.flatnonzero(of_these & absent)
            if len(rows):
                op = table.text["op"]
                raise DataError(
                    f"{path}: line {rows[0] + 2}: {op.names[op.codes[rows[0]]]} without '{what}': give it, "
                    "or leave the row out"
                )


def _texts(path: Path, name: str, cells: _Cells) -> Words:
    # An array of texts takes for each what the longest takes.
    long = next((cell for cell in cells.known if len(cell) > MAX_TEXT), None)
    if long is not None:
        raise DataError(f"{path}: line {cells.line(long)}: '{name}' has more than {MAX_TEXT} characters")
    return cells.words()


def _numbers(path: Path, name: str, cells: _Cells) -> FloatArray:
    least, most = LEAST.get(name, 1), MAX_LATENCY_MS if name == "latency_ms" else MAX_NUMBER
    found = []
    for cell in cells.known:
        try:
            value = float(cell or "nan")
        except ValueError:
            raise DataError(f"{path}: line {cells.line(cell)}: '{name}' is '{cell[:40]}', no number") from None
        if cell and not least <= value <= most:
            bounds = f"give a number from {least:g} to {most:g}"
            raise DataError(f"{path}: line {cells.line(cell)}: '{name}' is {cell[:40]}: {bounds}")
        found.append(value)
    return np.asarray(found, dtype=np.float64)[np.asarray(cells.codes, dtype=np.int32)]
