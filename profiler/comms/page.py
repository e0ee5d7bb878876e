"""One HTML page of a report: nothing is loaded from anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from echograph.profiler.comms.report import Report
from echograph.profiler.page.frame import document, key, notes


def page(report: Report, title: str) -> str:
    """The report as HTML.

    Args:
        report: what to show.
        title: of the page.
    """
    ranks = len({rank["rank"] for rank in report.ranks})
    many = "" if len(report.groups) == 1 else "s"
    parts = [
        f"<h1>{escape(title)}</h1><p>{report.calls:,} calls on {ranks} ranks, {len(report.groups)} group{many}."
        "</p>",
        _alarms(report),
        '<p class="note">Time of all ranks together:</p>',
        key(["waiting for the last rank", "transfer", "not told apart"], list(_COLOURS.values())),
    ]
    operations = sorted(report.operations, key=lambda row: -row["total_s"])
    rates = ("algbw_GBps", "busbw_GBps")
    parts.append(_table("Operations", operations, ("operation", "shape", "dtype", "bytes"), rates))
    parts.append(_table("Groups", report.groups, ("name",), ()))
    parts.append(_table("Phases", report.phases, ("name",), ()))
    parts.append(_table("Ranks", report.ranks, ("rank",), ("times_last", "lateness_s")))
    return document(title, parts)


# Of the page's style.
_COLOURS = {"wait": 1, "transfer": 0, "rest": 8}
_TITLES = {
    "name": "name",
    "bytes": "size",
    "times_last": "times last",
    "lateness_s": "late by",
    "algbw_GBps": "algbw GB/s",
    "busbw_GBps": "busbw GB/s",
}


def _table(title: str, rows: Sequence[Mapping[str, Any]], first: Sequence[str], after: Sequence[str]) -> str:
    if not rows:
        return ""
    longest = max(row["total_s"] for row in rows) or 1.0
    heads = [*first, "calls", "total", "average", "", "exposed", "hidden", *after]
    lines = ["".join(f"<th>{escape(_TITLES.get(head, head))}</th>" for head in heads)]
    for row in rows:
        cells = [_cell(name, row[name]) for name in first]
        cells += [f"{row['calls']:,}", seconds(row["total_s"]), seconds(row["mean_s"]), _bar(row, longest)]
        known = row["exposed_s"] + row["hidden_s"] > 0
        cells += [seconds(row[name]) if known else "–" for name in ("exposed_s", "hidden_s")]
        cells += [_cell(name, row[name]) for name in after]
        lines.append("".join(f"<td>{cell}</td>" for cell in cells))
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<h2>{escape(title)}</h2><div class="scroll"><table>{body}</table></div>'


def _bar(row: Mapping[str, Any], longest: float) -> str:
    rest = max(0.0, row["total_s"] - row["wait_s"] - row["transfer_s"])
    shares = (("wait", row["wait_s"]), ("transfer", row["transfer_s"]), ("rest", rest))
    told = ", ".join(f"{name} {seconds(value)}" for name, value in shares)
    inside = "".join(
        f'<div class="b{_COLOURS[name]}" style="width:{100 * v / longest:.2f}%"></div>' for name, v in shares
    )
    return f'<div class="bar" title="{told}">{inside}</div>'


def _alarms(report: Report) -> str:
    lines = [
        f"rank {s['rank']}: {s['operation']} {s['sequence']} of {s['channel']} had not ended after "
        f"{s['seconds']:g} s; not arrived: {', '.join(map(str, s['missing'])) or 'nobody'}"
        for s in report.stuck
    ]
    lines += [
        f"rank {u['rank']}: {u['operation']} {u['sequence']} of {u['channel']} has no end"
        for u in report.unfinished
    ]
    lines += [f"{count:,} {problem}" for problem, count in report.problems.items()]
    lines += report.skipped
    return notes(lines)


def _cell(name: str, value: Any) -> str:
    if name == "bytes":
        return escape(size(value))
    if name.endswith("_s"):
        return seconds(value)
    return f"{value:.3g}" if isinstance(value, float) else escape(str(value))


def seconds(value: float) -> str:
    """A time in words: 1.5 s, 12.3 ms, 45.6 us."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}" if value < 1000 * scale else f"{value / scale:,.0f} {unit}"
    return f"{value / 1e-6:.3g} us" if value > 0 else "0"


def size(value: int) -> str:
    """Bytes in words: 512 B, 4 KiB, 64 MiB."""
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            return f"{amount:.4g} {unit}"
        amount /= 1024
    return ""
