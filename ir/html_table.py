"""Rows as a table of HTML, for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

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
    shown = [[_cell(value) for value in row] for row in rows]
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in shown)
    more = [f"{count - len(shown)} more rows"] if count is not None and count > len(shown) else []
    below = "".join(f"<p>{escape(line)}</p>" for line in (*more, *notes))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"


def _cell(value: Any) -> str:
    if value is None:
        return "<td></td>"
    if isinstance(value, float):
        return f'<td style="text-align:right">{value:.6g}</td>'
    if isinstance(value, int) and not isinstance(value, bool):
        return f'<td style="text-align:right">{value:,}</td>'
    return f'<td style="text-align:left">{escape(str(value))}</td>'
