"""The page of two predictions: what differs first, then both side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from echograph.profiler.page import charts
from echograph.profiler.page.frame import data, document, tiles
from echograph.units import format_bytes, format_count
from echograph.workflow.report import parts

_Record = Mapping[str, Any]
_Pair = Sequence[tuple[str, _Record]]

COMPARISON = "comparison"
_DIFFERENCES = (
    "How much longer (to the right) or shorter (to the left) each part of the step is in the second prediction; "
    "together they are what the step differs by."
)


def comparison_page(found: _Record, before: _Record, after: _Record, names: tuple[str, str]) -> str:
    """Two predictions as HTML that loads nothing, with the comparison's JSON in it.

    Args:
        found: the comparison.
        before: a result.
        after: another one.
        names: names of the two results.
    """
    both = list(zip(names, (before, after), strict=True))
    body = [
        *_head(found, both),
        _plan(found, both),
        _differences(found),
        parts.section(
            "Where the step goes",
            "Each moment of the role that ends last counts once, for the first part that applies.",
            parts.stacked_bars([(_timed(name, record), record["breakdown_s"]) for name, record in both]),
            _figures(found, names),
        ),
        _limits(both),
        _memory(both),
        _communication(both),
        parts.section(
            "This page as data",
            f"The JSON of echosim compare is its element '{COMPARISON}'.",
            data(COMPARISON, found),
        ),
    ]
    return document(f"{names[0]} against {names[1]}", body)


def _timed(name: str, record: _Record) -> str:
    """A prediction with its step time, and whose step is split."""
    last = record.get("breakdown_of")
    of_role = f", {last['name']}" if last else ""
    return f"{name}: {parts.seconds(record['step_time_s'])}{of_role}"


def _head(found: _Record, both: _Pair) -> list[str]:
    lines = [
        f"{name}: {record['model']} on {record['gpus']:,} GPUs of {record['cluster']}: {parts.plan_line(record)}"
        for name, record in both
    ]
    shown = []
    for name in ("step_time_s", "tokens_per_s", "samples_per_s", "mfu"):
        row = found["figures"].get(name)
        if row and row["ratio"] is not None:
            said = f"{_FIGURES[name]}: {_figure(name, row['before'])} to {_figure(name, row['after'])}"
            shown.append((f"{100 * (row['ratio'] - 1):+.1f} %", said))
    paragraphs = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return [f"<h1>{escape(both[0][0])} against {escape(both[1][0])}</h1>", paragraphs, tiles(shown), _apart(both)]


def _apart(both: _Pair) -> str:
    """Whether the intervals leave open which of the two is faster."""
    (low, high), (other_low, other_high) = (record["step_time_interval_s"] for _, record in both)
    if high < other_low or other_high < low:
        text = "The 90 % intervals of the step times do not overlap."
    else:
        text = (
            "The 90 % intervals of the step times overlap. Errors that both share, such as those of the same "
            "kernels, move both alike, so the difference is surer than each."
        )
    return f"<p>{escape(text)}</p>"


def _plan(found: _Record, both: _Pair) -> str:
    rows = [
        (key, *(str(record[key]) for _, record in both))
        for key in ("model", "cluster", "device")
        if both[0][1].get(key) != both[1][1].get(key) and key not in found["plan"]
    ]
    rows += [
        (key.replace("_", " "), *(_value(value) for value in values)) for key, values in found["plan"].items()
    ]
    table = parts.grid(("option", *(name for name, _ in both)), rows, (1, 2))
    return parts.section("What is set otherwise", "" if rows else "Nothing: both have the same plan.", table)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {size}" for key, size in value.items()) or "–"
    return "–" if value in (None, "") else str(value)


def _differences(found: _Record) -> str:
    """The parts of the step by how much they differ."""
    split = [
        (name, row["difference"]) for name, row in found["figures"].items() if name in _PARTS or "exposed " in name
    ]
    split = sorted((part for part in split if part[1]), key=lambda part: -abs(part[1]))
    rows = [(name, [max(0.0, us), min(0.0, us)]) for name, us in ((n, s * parts.US_PER_S) for n, s in split)]
    bars = charts.bars(rows, ["longer", "shorter"], "us", _CHANGE)
    return parts.section("What becomes longer and shorter", _DIFFERENCES, bars if split else "")


_FIGURES = {
    "step_time_s": "step time",
    "tokens_per_s": "tokens/s",
    "samples_per_s": "samples/s",
    "mfu": "utilisation",
    "peak_bytes": "allocated at the peak",
}
_CHANGE = (1, 2)
_PARTS = ("compute", "host", "bubble", "wait")


def _figures(found: _Record, names: tuple[str, str]) -> str:
    rows = [
        (
            _FIGURES.get(name, name),
            *(_figure(name, row[key]) for key in ("before", "after", "difference")),
            "–" if row["ratio"] is None else f"{row['ratio']:.3f}",
        )
        for name, row in found["figures"].items()
    ]
    return parts.grid(("figure", *names, "difference", "ratio"), rows)


def _figure(name: str, value: float | None) -> str:
    """A figure of the comparison as people read it."""
    if value is None:
        return "–"
    if name == "peak_bytes":
        return format_bytes(value)
    if name in ("tokens_per_s", "samples_per_s"):
        return format_count(value)
    return parts.percent(value) if name == "mfu" else parts.seconds(value)


def _limits(both: _Pair) -> str:
    bars = parts.limit_bars(both)
    text = "The critical path of each, by kind of work: what would have to be faster for the step to be shorter."
    return parts.section("What limits the step", text, bars)


def _memory(both: _Pair) -> str:
    known = [(f"{name}: {parts.memory_said(r['memory'])}", r["memory"]) for name, r in both if r["memory"]]
    text = "What is allocated at the moment when most is, on the role that needs most."
    return parts.section("Memory at the peak", text, parts.memory_bars(known) if known else "")


def _communication(both: _Pair) -> str:
    rows = [
        (f"{name}: {axis}", *parts.communication(record, axis))
        for axis in dict.fromkeys(axis for _, record in both for axis in record["collectives"])
        for name, record in both
        if axis in record["collectives"]
    ]
    text = "All communication of a rank in one step, by the axes of its groups."
    return parts.section("Communication", text, parts.grid(parts.COMMUNICATION, rows, (5,)))
