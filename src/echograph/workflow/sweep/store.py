"""What a sweep has finished: a journal of one line of JSON a point, and tables of rows made of it.

A line is on the disk before the next point is asked for. A process that is killed loses what it was at; a line
that it did not finish is not read. Lines are found by what their points ask (`grid.SweepPoint.key`), so a grid
that grows, or another one over the same file, repeats nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from echograph.errors import DataError, MissingExtraError, OutputError, UsageError
from echograph.ir import files
from echograph.ir.tables import csv_text

JOURNAL = ".points.jsonl"
_KEY, _RECORD = "point", "result"
ERROR = "error"
TABLES = (".csv", ".parquet")


def journal_of(table: Path) -> Path:
    """The journal beside a table."""
    return table.with_name(table.name + JOURNAL)


def read_journal(path: Path) -> dict[str, dict[str, Any]]:
    """Finished points, by their keys; the last line may be cut off.

    Raises:
        DataError: a line before the last is no point of a sweep.
    """
    found: dict[str, dict[str, Any]] = {}
    if not path.exists():
        return found
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            found[record[_KEY]] = record[_RECORD]
        except (ValueError, KeyError, TypeError):
            if number < len(lines):
                raise DataError(
                    f"{path}: line {number} is no point of a sweep: delete it, or write to another file"
                ) from None
    return found


class Journal(Protocol):
    """Where finished points are written down."""

    def add(self, key: str, record: Mapping[str, Any]) -> None:
        """Writes one down; it is on the disk when this returns."""
        ...


class _File:
    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._end_line()

    def _end_line(self) -> None:
        """A line that was cut off goes, so that the next one does not join it."""
        size = os.fstat(self.descriptor).st_size
        content = os.pread(self.descriptor, size, 0) if size else b"\n"
        if not content.endswith(b"\n"):
            os.ftruncate(self.descriptor, content.rfind(b"\n") + 1)

    def add(self, key: str, record: Mapping[str, Any]) -> None:
        line = json.dumps({_KEY: key, _RECORD: record}, separators=(",", ":")).encode() + b"\n"
        os.write(self.descriptor, line)
        os.fsync(self.descriptor)


class _Nowhere:
    def add(self, key: str, record: Mapping[str, Any]) -> None:
        """Keeps nothing."""


@contextmanager
def journal(path: Path | None) -> Iterator[Journal]:
    """A journal that points are added to; None: they are kept nowhere.

    Raises:
        OutputError: the file cannot be written.
    """
    if path is None:
        yield _Nowhere()
        return
    try:
        file = _File(path)
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror or error}") from None
    try:
        yield file
    finally:
        os.close(file.descriptor)


def flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """Every scalar of a result, by the path of keys that leads to it; bounds of intervals as `low` and `high`."""
    found: dict[str, Any] = {}
    left: list[tuple[str, Any]] = [(key, value) for key, value in reversed(list(record.items()))]
    while left:
        name, value = left.pop()
        if isinstance(value, Mapping):
            left += [(f"{name}.{key}", inner) for key, inner in reversed(list(value.items()))]
        elif name.endswith("_interval_s") and isinstance(value, list | tuple):
            found[f"{name}.low"], found[f"{name}.high"] = value
        elif value is None or isinstance(value, str | int | float | bool):
            found[name] = value
    return found


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows as columns, in the order in which rows name them first; None where a row has none."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def check_table(path: Path) -> None:
    """Refuses a table that could not be written.

    Raises:
        UsageError: its name says another kind of file.
        MissingExtraError: what writes it is not installed.
    """
    if path.suffix not in TABLES:
        raise UsageError(f"--output {path}: give a name that ends in {' or '.join(TABLES)}")
    if path.suffix == ".parquet":
        _arrow()


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows as CSV or Parquet, whole or not at all."""
    table = columns(rows)
    if path.suffix == ".parquet":
        arrow, parquet = _arrow()
        sink = arrow.BufferOutputStream()
        parquet.write_table(arrow.table(table), sink)
        files.write_whole(path, [sink.getvalue().to_pybytes()])
    else:
        files.write_whole(path, [csv_text(list(table), zip(*table.values(), strict=True))])


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError("pyarrow", "parquet", "a Parquet file") from None
    return pyarrow, pyarrow.parquet
