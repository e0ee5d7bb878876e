"""Tables as texts: aligned for terminals, comma-separated for spreadsheets, and HTML for notebooks."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_FORMULAS = ("=", "+", "-", "@", "\t", "\r")


def printable(text: str) -> str:
    """Text as a terminal may show it: what would control the terminal or turn the line around is spelt out.

    These are the control characters (C0, DEL, C1), the ends of lines and paragraphs, the marks of bidirectional
    text, and what no encoding has. They are spelt as JSON spells them, so what programs read stays what it was.
    """
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def text_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Aligned columns, numbers to the right; as wide as they need to be, so that other programs can cut them.

    Args:
        titles: of the columns.
        rows: numbers, texts, or None, which is a dash.
    """
    cells = [list(map(printable, titles)), *([_text_cell(value) for value in row] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(titles))]
    right = [all(line[i][:1].isdigit() or line[i] == "-" for line in cells[1:]) for i in range(len(titles))]
    aligned = (
        [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)] for line in cells
    )
    return "\n".join("  ".join(line).rstrip() for line in aligned)


def _text_cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else printable(str(value))


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
