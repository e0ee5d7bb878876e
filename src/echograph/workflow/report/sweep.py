"""The page of a sweep: how it scales, where the time goes, its efficiency, two axes at once, and the table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from echograph.profiler.page import charts
from echograph.profiler.page.charts import Curve
from echograph.profiler.page.frame import banner, data, document, tiles
from echograph.units import format_bytes, format_count
from echograph.workflow.report import parts
from echograph.workflow.sweep.grid import GridAxis
from echograph.workflow.sweep.run import Sweep
from echograph.workflow.sweep.store import ERROR

_Row = Mapping[str, Any]
_GPUS = "gpus"
MOST_CURVES, MOST_BARS, MOST_ROWS, MOST_MAPS = 8, 40, 500, 6
_LOW, _HIGH = "step_time_interval_s.low", "step_time_interval_s.high"
_EXPOSED = "breakdown_s.exposed_communication."


def sweep_page(found: Sweep) -> str:
    """A sweep as HTML that loads nothing, with its JSON in it.

    Args:
        found: the sweep.
    """
    rows = found.answered
    along = _along(found.axes, rows)
    series = _series(found, along)
    names = ", ".join(f"{axis.name} ({len(axis.values)})" for axis in found.axes)
    missing = len(found.rows) - len(rows)
    body = [
        f"<h1>{escape(found.model)}: {len(found.rows):,} points</h1><p>{escape(f'Over {names}.')}</p>",
        banner("Not finished:", "it was interrupted; the same command goes on.") if found.ended else "",
        _tiles(rows),
        f'<p class="note">{missing:,} points have no prediction; the table says why.</p>' if missing else "",
        _curves(series, along),
        _breakdowns(found, rows),
        _efficiency(series),
        _maps(found, rows),
        parts.section("Every point", _said_of_table(len(found.rows)), _table(found)),
        parts.section(
            "This page as data",
            "The JSON of echosim sweep is its element 'sweep'.",
            data("sweep", found.to_json()),
        ),
    ]
    return document(f"{found.model}: sweep", body)


def _said_of_table(count: int) -> str:
    shown = "" if count <= MOST_ROWS else f"The first {MOST_ROWS} of {count:,}. "
    return f"{shown}The file of --output has all figures of each."


def _tiles(rows: Sequence[_Row]) -> str:
    if not rows:
        return ""
    fast = max(rows, key=_rate)
    thrifty = max(rows, key=lambda row: _rate(row) / row["plan.gpus"])
    shown = [
        (f"{format_count(_rate(fast))}/s", f"the most {_what(fast)}, on {fast['plan.gpus']:,} GPUs"),
        (
            f"{format_count(_rate(thrifty) / thrifty['plan.gpus'])}/s",
            f"the most of one GPU, of {thrifty['plan.gpus']:,}",
        ),
        (parts.seconds(min(row["step_time_s"] for row in rows)), "the shortest step"),
    ]
    too_large = sum(row.get("memory.fits") is False for row in rows)
    return tiles([*shown, *([(f"{too_large:,}", "points do not fit in memory")] if too_large else [])])


def _rate(row: _Row) -> float:
    return float(row["tokens_per_s"] or row["samples_per_s"])


def _what(row: _Row) -> str:
    return "tokens" if row["tokens_per_s"] else "samples"


def _along(axes: Sequence[GridAxis], rows: Sequence[_Row]) -> str:
    """What lies on the horizontal axis: the GPUs where they differ, else the axis of numbers with most values."""
    if len({row["plan.gpus"] for row in rows}) > 1:
        return "plan.gpus"
    numeric = [axis for axis in axes if all(_number(value) is not None for value in axis.values)]
    return max(numeric, key=lambda axis: len(axis.values)).name if numeric else ""


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


def _series(found: Sweep, along: str) -> dict[str, list[_Row]]:
    """Rows that differ in the horizontal axis alone, by what they have in common."""
    series: dict[str, list[_Row]] = {}
    others = [axis.name for axis in found.axes if axis.name != along and not (axis.name == _GPUS == along[5:])]
    for row in found.answered:
        series.setdefault(_label(others, row) or found.model, []).append(row)
    if not along:
        return {}
    return {name: sorted(of, key=lambda row: float(row[along])) for name, of in series.items()}


def _label(names: Sequence[str], row: _Row) -> str:
    return ", ".join(f"{name.rpartition('.')[2]} {row[name]}" for name in names)


def _shown(series: Mapping[str, Sequence[_Row]]) -> Iterator[tuple[str, Sequence[_Row]]]:
    return itertools.islice(series.items(), MOST_CURVES)


def _curves(series: Mapping[str, Sequence[_Row]], along: str) -> str:
    unit = "GPUs" if along == "plan.gpus" else along.rpartition(".")[2]
    made = {}
    for name, rows in _shown(series):
        work = [_rate(row) * row["step_time_s"] for row in rows]
        made[name] = Curve(
            x=[float(row[along]) for row in rows],
            y=[_rate(row) for row in rows],
            low=[amount / row[_HIGH] for amount, row in zip(work, rows, strict=True)],
            high=[amount / row[_LOW] for amount, row in zip(work, rows, strict=True)],
        )
    more = f" The first {MOST_CURVES} of {len(series)} series." if len(series) > MOST_CURVES else ""
    what = _what(next(iter(series.values()))[0]) if series else ""
    said = f"{what.capitalize()} a second, with 90 % intervals. A scale that spans tenfold is logarithmic.{more}"
    return parts.section("How it scales", said, charts.curves(made, unit, f"{what}/s"))


def _breakdowns(found: Sweep, rows: Sequence[_Row]) -> str:
    shown, names = rows[:MOST_BARS], [axis.name for axis in found.axes]
    more = f" The first {MOST_BARS} of {len(rows):,} points." if len(rows) > MOST_BARS else ""
    bars = [(_label(names, row), _breakdown(row)) for row in shown]
    said = f"Each moment of the role that ends last counts once, for the first part that applies.{more}"
    return parts.section("Where the time goes", said, parts.stacked_bars(bars) if bars else "")


def _breakdown(row: _Row) -> dict[str, Any]:
    exposed = {name.removeprefix(_EXPOSED): row[name] for name in row if name.startswith(_EXPOSED)}
    return {
        "exposed_communication": {axis: value for axis, value in exposed.items() if value is not None},
        **{name: row[f"breakdown_s.{name}"] for name in ("compute", "host", "bubble", "wait")},
    }


def _efficiency(series: Mapping[str, Sequence[_Row]]) -> str:
    """What each GPU does beside what it does where there are fewest."""
    made = {}
    for name, rows in _shown(series):
        if len({row["plan.gpus"] for row in rows}) < 2:
            continue
        first = min(rows, key=lambda row: row["plan.gpus"])
        alone = _rate(first) / first["plan.gpus"]
        share = [100 * _rate(row) / row["plan.gpus"] / alone for row in rows]
        made[name] = Curve([float(row["plan.gpus"]) for row in rows], share, share, share)
    return parts.section(
        "Efficiency",
        "What one GPU does, in per cent of what it does in the series' smallest job.",
        charts.curves(made, "GPUs", "%", from_zero=True),
    )


def _maps(found: Sweep, rows: Sequence[_Row]) -> str:
    """The throughput of a GPU over the first two axes that vary, one map for each place on the others."""
    varying = [axis for axis in found.axes if len(axis.values) > 1]
    if len(varying) < 2:
        return ""
    (down, across), others = varying[:2], [axis.name for axis in varying[2:]]
    maps: dict[str, dict[tuple[Any, Any], _Row]] = {}
    for row in rows:
        maps.setdefault(_label(others, row), {})[row[down.name], row[across.name]] = row
    drawn = []
    for name, cells in itertools.islice(maps.items(), MOST_MAPS):
        lines = [(str(a), [_cell(cells.get((a, b))) for b in across.values]) for a in down.values]
        drawn.append((f"<h3>{escape(name)}</h3>" if name else "") + _heat(across, down, lines))
    more = f" The first {MOST_MAPS} of {len(maps)} maps." if len(maps) > MOST_MAPS else ""
    return parts.section(
        "Two axes at once", f"Throughput of one GPU: more colour is more throughput.{more}", *drawn
    )


def _heat(
    across: GridAxis, down: GridAxis, lines: Sequence[tuple[str, Sequence[tuple[float, str] | None]]]
) -> str:
    corner = f"{down.name.rpartition('.')[2]} \\ {across.name.rpartition('.')[2]}"
    return charts.heat([str(value) for value in across.values], lines, corner)


def _cell(row: _Row | None) -> tuple[float, str] | None:
    if row is None:
        return None
    each = _rate(row) / row["plan.gpus"]
    return each, format_count(each)


_COLUMNS: tuple[tuple[str, Callable[[_Row], str]], ...] = (
    ("step", lambda row: parts.seconds(row["step_time_s"])),
    ("90 % interval", lambda row: f"{parts.seconds(row[_LOW])} to {parts.seconds(row[_HIGH])}"),
    ("throughput", lambda row: f"{format_count(_rate(row))}/s"),
    ("MFU", lambda row: "–" if row["mfu"] is None else parts.percent(row["mfu"])),
    ("memory in all", lambda row: _memory(row)),
)


def _memory(row: _Row) -> str:
    held = row.get("memory.device_bytes")
    return (
        "–" if held is None else format_bytes(held) + (" does not fit" if row.get("memory.fits") is False else "")
    )


def _table(found: Sweep) -> str:
    names = [axis.name for axis in found.axes]
    lines = []
    for row in found.rows[:MOST_ROWS]:
        said = (
            ["–"] * (len(_COLUMNS) - 1) + [str(row[ERROR])]
            if row.get(ERROR)
            else [show(row) for _, show in _COLUMNS]
        )
        lines.append([*(str(row[name]) for name in names), *said])
    titles = [*(name.rpartition(".")[2] for name in names), *(title for title, _ in _COLUMNS)]
    return parts.grid(titles, lines)
