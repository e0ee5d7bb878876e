"""One HTML page of a report: nothing is loaded from anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from echograph.profiler.comms.report import Report

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:78rem;padding:0 1rem;color:#1c2430}
body{background:#fff}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin:2rem 0 .4rem}table{border-collapse:collapse;width:100%}
td,th{padding:.25rem .6rem;text-align:right;border-bottom:1px solid #e3e7ec;white-space:nowrap}
td:first-child,th:first-child{text-align:left}th{color:#566173;font-weight:600}.scroll{overflow-x:auto}
.bar{display:flex;width:14rem;height:.8rem;background:#f0f2f5}.wait{background:#d9822b}
.transfer{background:#2b6cb0}
.rest{background:#a0aec0}p.note{color:#566173}
.key span{display:inline-block;width:.8rem;height:.8rem;margin:0 .3rem 0 1rem}
.alarm{border-left:4px solid #c53030;padding-left:.8rem}
@media (prefers-color-scheme:dark){body{background:#14181f;color:#e4e8ee}td,th{border-color:#2c3440}
th,p.note{color:#9aa6b6}.bar{background:#252c37}}
"""


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
        '<p class="note key">Time of all ranks together: <span class="wait"></span>waiting for the last rank '
        '<span class="transfer"></span>transfer <span class="rest"></span>not told apart</p>',
    ]
    operations = sorted(report.operations, key=lambda row: -row["total_s"])
    rates = ("algbw_GBps", "busbw_GBps")
    parts.append(_table("Operations", operations, ("operation", "shape", "dtype", "bytes"), rates))
    parts.append(_table("Groups", report.groups, ("name",), ()))
    parts.append(_table("Phases", report.phases, ("name",), ()))
    parts.append(_table("Ranks", report.ranks, ("rank",), ("times_last", "lateness_s")))
    body = "\n".join(part for part in parts if part)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>{body}</body>'
        "</html>\n"
    )


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
    inside = "".join(f'<div class="{name}" style="width:{100 * v / longest:.2f}%"></div>' for name, v in shares)
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
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<h2>To look at</h2><ul class="alarm">{items}</ul>' if items else ""


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
