"""Rows as comma-separated values, which spreadsheets open as what they are."""

from __future__ import annotations

import csv
import io
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
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_cell, titles))
    writer.writerows(map(_cell, row) for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULAS) else value
