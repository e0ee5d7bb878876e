"""Rows as comma-separated values, which spreadsheets open as what they are."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from typing import Any

_FORMULAS = ("=", "+", "-", "@", "\t", "\r")


def csv_text(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table as CSV with a line of titles.

    A text that a spreadsheet would take for a formula gets an apostrophe before it, which makes it a text there,
    as it is one in a workbook. Numbers stay as they are.

    Args:
        titles: of the columns.
        rows: numbers, texts, or None for an empty cell.
    """
    lines = _Lines()
    # Cells are quoted that hold a character of the line's end: with "\n" alone, a "\r" would begin a row.
    writer = csv.writer(lines, lineterminator="\r\n")
    writer.writerow(map(_cell, titles))
    writer.writerows(map(_cell, row) for row in rows)
    return "".join(lines.all)


class _Lines:
    """Collects lines that end with a line feed."""

    def __init__(self) -> None:
        self.all: list[str] = []

    def write(self, line: str) -> None:
        """Takes a line as the writer ends it."""
        self.all.append(f"{line[:-2]}\n")


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULAS) else value
