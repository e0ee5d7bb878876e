"""Tables as texts: comma-separated values, which spreadsheets open as what they are, and HTML for notebooks."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from html import escape
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


# -- HTML -----------------------------------------------------------------------------------------------------


MOST_SHOWN = 50
"""Rows that are shown; the others are counted."""


def html_table(
    titles: Sequence[str], rows: Iterable[Sequence[Any]], count: int | None = None, notes: Iterable[str] = ()
) -> str:
    """A table as HTML that loads nothing.

    Args:
        titles: of the columns.
        rows: numbers, texts, or None for an empty cell.
        count: how many rows there are, where some are left out; None: these.
        notes: lines below it.
    """
    shown = [[_html_cell(value) for value in row] for row in rows]
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in shown)
    more = [f"{count - len(shown)} more rows"] if count is not None and count > len(shown) else []
    below = "".join(f"<p>{escape(line)}</p>" for line in (*more, *notes))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"


def _html_cell(value: Any) -> str:
    if value is None:
        return "<td></td>"
    if isinstance(value, float):
        return f'<td style="text-align:right">{value:.6g}</td>'
    if isinstance(value, int) and not isinstance(value, bool):
        return f'<td style="text-align:right">{value:,}</td>'
    return f'<td style="text-align:left">{escape(str(value))}</td>'
