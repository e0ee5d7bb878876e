"""What all pages share: the document around a page, its style, and tables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

from echograph.profiler.analyses.table import AnswerTable
from echograph.units import PS_PER_US, format_bytes, format_time

ROWS = 40
_LONGEST = 1000
# Texts that a column cannot show as they are; the page's style cuts them, the whole is shown when pointed at.
_LONG = 60
_OF_RANK = re.compile(r"rank (\d+): (.*)")


def document(title: str, parts: Iterable[str], scripts: Sequence[str] = ()) -> str:
    """A page, whole.

    Args:
        title: as text.
        parts: of its body, as HTML; empty ones are left out.
        scripts: JavaScript, run when the body is there.
    """
    style = Path(__file__).with_name("page.css").read_text()
    body = "\n".join(filter(None, parts))
    code = "".join(f"<script>{script}</script>\n" for script in scripts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>\n{style}</style></head>\n'
        f"<body>\n{body}\n{code}</body></html>\n"
    )


def notes(lines: Iterable[str], title: str = "To look at") -> str:
    """Lines that a reader must not miss; nothing where there are none. What several ranks say stands once."""
    ranks: dict[str, list[str]] = {}
    for line in dict.fromkeys(lines):
        said = _OF_RANK.match(line)
        ranks.setdefault(said[2] if said else line, []).extend([said[1]] if said else [])
    items = "".join(f"<li>{_of_ranks(of)}{escape(line)}</li>" for line, of in ranks.items())
    return f'<h2>{escape(title)}</h2><ul class="alarm">{items}</ul>' if items else ""


def _of_ranks(ranks: Sequence[str]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}: " if ranks else ""


def key(names: Sequence[str], colours: Sequence[int] = ()) -> str:
    """What the colours of a chart mean.

    Args:
        names: of the series.
        colours: of each, 0 to 8; counted from 0 where it does not say.
    """
    shown = zip(names, colours or range(len(names)), strict=False)
    return (
        '<div class="key">' + "".join(f'<span><i class="b{c}"></i>{escape(n)}</span>' for n, c in shown) + "</div>"
    )


def table_script() -> str:
    """The JavaScript that sorts and searches the tables of answers."""
    return Path(__file__).with_name("table.js").read_text()


def table(content: AnswerTable, limit: int = ROWS) -> str:
    """A table's first rows, numbers to the right; and how many more there are.

    Args:
        content: what to show.
        limit: how many rows.
    """
    rows = list(islice(content.rows(), limit))
    texts = [any(isinstance(row[at], str) for row in rows) for at in range(len(content.columns))]
    head = "".join(f"<th{_kind(text)}>{escape(t)}</th>" for t, text in zip(content.columns, texts, strict=True))
    lines = (
        "".join(f"<td{_kind(text)}{_told(v)}>{cell(v)}</td>" for v, text in zip(row, texts, strict=True))
        for row in rows
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    inner = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    more = len(content) - len(rows)
    said = f'<p class="note">... and {more:,} rows more: ask for them with --csv or --json.</p>' if more else ""
    return f'<div class="scroll"><table class="answer">{inner}</table></div>{said}'


def data(name: str, content: Any) -> str:
    """Data that stands in the page as JSON.

    Args:
        name: `id` of its element.
        content: of what JSON has.
    """
    # No text within can end the element, or begin a comment.
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def tiles(shown: Iterable[tuple[str, str]]) -> str:
    """The few numbers that say most.

    Args:
        shown: each with what it is.
    """
    boxes = (f'<div class="tile"><b>{escape(value)}</b><span>{escape(said)}</span></div>' for value, said in shown)
    return f'<div class="tiles">{"".join(boxes)}</div>'


def banner(title: str, text: str) -> str:
    """What a reader must see before anything else."""
    return f'<p class="banner" role="alert"><b>{escape(title)}</b> {escape(text)}</p>'


def folded(title: str, content: str) -> str:
    """Content that a click shows."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def cell(value: Any) -> str:
    """A value of a table, as HTML: at most four digits behind the point, the longest names cut."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, str) and len(value) > _LONGEST:
        return escape(value[: _LONGEST - 1]) + "…"
    return escape(f"{value:,}" if type(value) is int and abs(value) >= 10**5 else str(value))


def number(value: float) -> str:
    """A number that people read: whole from a hundred thousand up, else at most four digits after the point."""
    if abs(value) >= 1e5:
        return f"{value:,.0f}"
    shown = f"{value:,.4f}" if abs(value) < 10 else f"{value:,.2f}"
    return shown.rstrip("0").rstrip(".") or "0"


def with_unit(value: float, unit: str) -> str:
    """A number with its unit; times and sizes in the largest unit that keeps them above one.

    Args:
        value: in that unit.
        unit: "us", "bytes", another, or empty for none.
    """
    if unit == "us":
        return format_time(value * PS_PER_US)
    return format_bytes(value) if unit == "bytes" else f"{number(value)} {unit}".rstrip()


def _told(value: Any) -> str:
    long = isinstance(value, str) and len(value) > _LONG
    return f' title="{escape(value[: 2 * _LONGEST])}"' if long else ""


def _kind(text: bool) -> str:
    return ' class="text"' if text else ""
