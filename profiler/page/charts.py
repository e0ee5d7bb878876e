"""Charts as inline SVG that stays readable on any width: places are shares of it, text has its own size.

Numbers go in as they are; where a unit is given it is said, nothing is converted. Colours are those of the page's
style: series i has colour i (`page.css`), 8 is the colour of what is left over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from html import escape
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from echograph.profiler.page.frame import key, with_unit
from echograph.units import format_count

_Floats = npt.NDArray[np.float64]

COLOURS = 8
_ROW, _BAR, _TEXT = 34, 10, 12
_HEIGHT, _POINTS, _BINS, _CURVES = 150, 600, 30, 260
_TOP, _ROOM = _TEXT + 6, 0.14
_LABEL, _LONGEST = 160, 400


def bars(
    rows: Sequence[tuple[str, Sequence[float]]], series: Sequence[str], unit: str = "", colours: Sequence[int] = ()
) -> str:
    """A bar for each row, made of its parts; negative ones to the left, where there is one series.

    Args:
        rows: label and one value a series.
        series: names of the parts.
        unit: of the values.
        colours: of the series.
    """
    chosen = list(colours) or [i % COLOURS for i in range(len(series))]
    sums = [sum(values) for _, values in rows]
    low, high = min(0.0, *sums, 0.0), max(100.0 if unit == "%" else 0.0, *sums, 0.0)
    scale = 100 / ((high - low) or 1.0)
    parts = []
    for place, (label, values) in enumerate(rows):
        y, at = place * _ROW, -low * scale
        shown = with_unit(sum(values), unit)
        parts.append(_label(label, y))
        parts.append(f'<text class="muted" x="100%" y="{y + _TEXT}" text-anchor="end">{escape(shown)}</text>')
        parts.append(f'<rect class="empty" x="0" y="{y + 18}" width="100%" height="{_BAR}"/>')
        for name, colour, value in zip(series, chosen, values, strict=True):
            wide = abs(value) * scale
            start = at - wide if value < 0 else at
            at += wide if value >= 0 else 0
            if wide:
                told = escape(f"{label}: {name} {with_unit(value, unit)}")
                parts.append(
                    f'<rect class="f{colour}" x="{start:.3f}%" y="{y + 18}" width="{wide:.3f}%" '
                    f'height="{_BAR}"><title>{told}</title></rect>'
                )
    legend = key(series, chosen) if len(series) > 1 else ""
    return legend + _svg(len(rows) * _ROW, parts)


def lines(series: Mapping[str, tuple[_Floats, _Floats]], x_unit: str, y_unit: str) -> str:
    """Values that hold until the next one, over time; of many in one place the largest is drawn.

    Args:
        series: name to places, ascending, and the values from there on.
        x_unit: of the places.
        y_unit: of the values.
    """
    drawn = {name: points for name, points in series.items() if len(points[0])}
    if not drawn:
        return ""
    first = min(float(x[0]) for x, _ in drawn.values())
    last = max(float(x[-1]) for x, _ in drawn.values())
    low = min(0.0, *(float(y.min()) for _, y in drawn.values()))
    high = max(float(y.max()) for _, y in drawn.values())
    inner = []
    for colour, (x, y) in enumerate(drawn.values()):
        at, peak = _envelope(x, y, first, last)
        down = (1 - (peak - low) / ((high - low) or 1.0)) * _HEIGHT
        points = " ".join(f"{a:.4g},{b:.4g}" for a, b in zip(at * _POINTS, down, strict=True))
        inner.append(
            f'<polyline class="f{colour % COLOURS}" style="fill:none" vector-effect="non-scaling-stroke" '
            f'points="{points}"/>'
        )
    parts = [
        f'<svg y="{_TEXT}" height="{_HEIGHT}" viewBox="0 0 {_POINTS} {_HEIGHT}" preserveAspectRatio="none">'
        f"{''.join(inner)}</svg>",
        _grid(low, high, y_unit),
        *_ends(first, last, x_unit),
    ]
    return (key(list(drawn)) if len(drawn) > 1 else "") + _svg(_HEIGHT + 36, parts)


def histogram(values: _Floats, unit: str) -> str:
    """How often values occur, in bins of equal ratio (or of equal width, where they span less than tenfold).

    Args:
        values: those that are not finite are left out; zeros have a bin of their own, as the first.
        unit: of the values.
    """
    known = values[np.isfinite(values)]
    above = known[known > 0]
    if not len(above):
        return bars([("0", [float(len(known))])], ["count"]) if len(known) else ""
    low, high = float(above.min()), float(above.max())
    ratio = high / low >= 10
    edges = np.geomspace(low, high, _BINS + 1) if ratio else np.linspace(low, high or 1.0, _BINS + 1)
    edges[0], edges[-1] = low, high
    if low == high:
        edges = np.array([low, low])
        count = np.array([len(above)])
    else:
        count = np.histogram(above, edges)[0]
    zeros = int((known <= 0).sum())
    bins = [(float(a), float(b), int(n)) for a, b, n in zip(edges, edges[1:], count, strict=False)]
    if zeros:
        bins.insert(0, (0.0, 0.0, zeros))
    most, wide = max(n for *_, n in bins), 100 / len(bins)
    parts = []
    for place, (start, end, found) in enumerate(bins):
        tall = _HEIGHT * found / most
        told = f"{with_unit(start, unit)} to {with_unit(end, unit)}: {found:,}"
        parts.append(
            f'<rect class="f0" x="{place * wide + 0.1 * wide:.3f}%" y="{_TEXT + _HEIGHT - tall:.1f}" '
            f'width="{0.8 * wide:.3f}%" height="{tall:.1f}"><title>{escape(told)}</title></rect>'
        )
    parts += [_grid(0.0, float(most), ""), *_ends(0.0 if zeros else low, high, unit)]
    said = f'<p class="note">{len(known):,} values{", bins of equal ratio" if ratio else ""}.</p>'
    return said + _svg(_HEIGHT + 36, parts)


def ranges(
    rows: Sequence[tuple[str, Sequence[float]]],
    unit: str,
    said: str = "Least to largest, the middle half, the median",
) -> str:
    """For each row where its values lie: a line from the least to the largest, a box around the middle half.

    The scale is logarithmic where all values are above 0 and span a hundredfold or more.

    Args:
        rows: label and five values: least, quartiles, largest.
        unit: of the values.
        said: what these are.
    """
    known = np.array([values for _, values in rows if np.isfinite(values).all()])
    if not known.size:
        return ""
    ratio = bool(known.min() > 0 and known.max() >= 100 * known.min())
    low, high = float(known.min() if ratio else min(0.0, known.min())), float(known.max())

    parts: list[str] = []
    drawn = [(label, values) for label, values in rows if np.isfinite(values).all()]
    for at, (label, values) in enumerate(drawn):
        y = at * _ROW
        least, first, middle, third, most = (98 * _share(value, low, high, ratio=ratio) for value in values)
        shown = with_unit(values[2], unit)
        told = escape(f"{label}: " + ", ".join(with_unit(value, unit) for value in values))
        parts.append(_label(label, y))
        parts.append(f'<text class="muted" x="100%" y="{y + _TEXT}" text-anchor="end">{escape(shown)}</text>')
        parts.append(f'<rect class="empty" x="0" y="{y + 18}" width="100%" height="{_BAR}"/>')
        for x, wide, tall, colour in (
            (least, most - least, 2, 8),
            (first, third - first, _BAR, 0),
            (middle, 0.0, _BAR, 1),
        ):
            parts.append(
                f'<rect class="f{colour}" x="{x:.3f}%" y="{y + 18 + (_BAR - tall) / 2}" '
                f'width="{max(wide, 0.3):.3f}%" height="{tall}"><title>{told}</title></rect>'
            )
    foot = len(drawn) * _ROW
    parts += _ends(low, high, unit, foot + _TEXT)
    scale = ", logarithmic" if ratio else ""
    return f'<p class="note">{escape(said)}{scale}.</p>' + _svg(foot + 20, parts)


def points(
    named: Sequence[tuple[str, float, float]], x_unit: str, y_unit: str, roofs: Sequence[tuple[float, float]] = ()
) -> str:
    """A mark for each pair of numbers above 0, both on a logarithmic scale.

    Args:
        named: label, place and value.
        x_unit: of the places.
        y_unit: of the values.
        roofs: place and value of what is the most that is possible there: a short line each.
    """
    drawn = [(label, x, y) for label, x, y in named if 0 < x < np.inf and 0 < y < np.inf]
    if not drawn:
        return ""
    above = [(x, y) for x, y in dict.fromkeys(roofs) if 0 < x < np.inf and 0 < y < np.inf]
    xs, ys = [*(x for _, x, _ in drawn), *(x for x, _ in above)], [*(y for *_, y in drawn), *(y for _, y in above)]
    left, right, low, high = min(xs), max(xs), min(ys), max(ys)
    parts = []
    # The ends of the scale stand above and below all marks.
    room = _HEIGHT - 2 * _TEXT
    for x, y in above:
        across, down = 0.5 + 98 * _share(x, left, right, ratio=True), 1 - _share(y, low, high, ratio=True)
        parts.append(f'<rect class="f8" x="{across:.2f}%" width="1%" y="{_TOP + room * down:.1f}" height="2"/>')
    for label, x, y in drawn:
        told = escape(f"{label[:_LONGEST]}: {with_unit(x, x_unit)}, {with_unit(y, y_unit)}")
        across, up = _share(x, left, right, ratio=True), _share(y, low, high, ratio=True)
        parts.append(
            f'<circle class="f0" cx="{1 + 98 * across:.2f}%" cy="{_TOP + room * (1 - up):.1f}" r="4" '
            f'fill-opacity="0.6"><title>{told}</title></circle>'
        )
    foot = _TEXT + _HEIGHT
    parts.append(f'<line class="grid" x1="0" x2="100%" y1="{foot}" y2="{foot}"/>')
    parts.append(f'<text class="muted halo" x="0" y="{_TEXT - 2}">{escape(with_unit(high, y_unit))}</text>')
    parts.append(f'<text class="muted halo" x="0" y="{foot - 3}">{escape(with_unit(low, y_unit))}</text>')
    parts += _ends(left, right, x_unit)
    said = "Both scales logarithmic." + (" Lines: the most that the device could." if above else "")
    return f'<p class="note">{said}</p>' + _svg(_HEIGHT + 36, parts)


class Curve(NamedTuple):
    """Values at places, ascending, each with the interval that it lies in."""

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def curves(series: Mapping[str, Curve], x_unit: str, y_unit: str, *, from_zero: bool = False) -> str:
    """Lines through marks over the bands of their intervals; scales are logarithmic where values span tenfold.

    Args:
        series: name to curve; all values are above 0.
        x_unit: of the places.
        y_unit: of the values.
        from_zero: whether the vertical scale begins at 0, in equal steps.
    """
    drawn = {name: curve for name, curve in series.items() if len(curve.x)}
    if not drawn:
        return ""
    xs = [value for curve in drawn.values() for value in curve.x]
    ys = [value for curve in drawn.values() for value in (*curve.low, *curve.high, *curve.y)]
    left, right, least, most = min(xs), max(xs), 0.0 if from_zero else min(ys), max(ys)
    across = partial(_share, low=left, high=right, ratio=left > 0 and right >= 10 * left)
    up = partial(_share, low=least, high=most, ratio=least > 0 and most >= 10 * least)
    # Room for the ends of the scale below and above the curves.
    room, tall = (0.0 if from_zero else 18.0), _CURVES
    inner, marks = [], []
    for number, (name, curve) in enumerate(drawn.items()):
        colour = number % COLOURS
        at = [across(x) * _POINTS for x in curve.x]
        sides = curve.y, curve.low, curve.high
        down = [[4 + (1 - up(value)) * (tall - room - 4) for value in side] for side in sides]
        around = [*zip(at, down[2], strict=True), *reversed(list(zip(at, down[1], strict=True)))]
        inner.append(
            f'<polygon class="f{colour}" style="stroke:none" fill-opacity="0.15" points="{_joined(around)}"/>'
        )
        inner.append(
            f'<polyline class="f{colour}" style="fill:none" vector-effect="non-scaling-stroke" '
            f'points="{_joined(zip(at, down[0], strict=True))}"/>'
        )
        for x, y, low, high, place, height in zip(*curve, at, down[0], strict=True):
            within = f"{counted(low, y_unit)} to {counted(high, y_unit)}"
            told = f"{name}: {with_unit(x, x_unit)}: {counted(y, y_unit)} ({within})"
            marks.append(
                f'<circle class="f{colour}" cx="{100 * place / _POINTS:.2f}%" cy="{_TEXT + height:.1f}" r="3">'
                f"<title>{escape(told)}</title></circle>"
            )
    parts = [
        f'<svg y="{_TEXT}" height="{tall}" viewBox="0 0 {_POINTS} {tall}" preserveAspectRatio="none">'
        f"{''.join(inner)}</svg>",
        *marks,
        f'<line class="grid" x1="0" x2="100%" y1="{_TEXT + tall}" y2="{_TEXT + tall}"/>',
        f'<text class="muted halo" x="0" y="{_TEXT - 2}">{escape(counted(most, y_unit))}</text>',
        f'<text class="muted halo" x="0" y="{_TEXT + tall - 3}">{escape(counted(least, y_unit))}</text>',
        *_ends(left, right, x_unit, tall + 30),
        *_between([(x, across(x)) for x in sorted(set(xs))], tall + 30),
    ]
    return key(list(drawn)) + _svg(tall + 36, parts)


def counted(value: float, unit: str) -> str:
    """A number with its unit, thousands of it in short."""
    return f"{format_count(value)} {unit}".rstrip() if abs(value) >= 1000 else with_unit(value, unit)


def _joined(places: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.2f},{y:.2f}" for x, y in places)


def heat(
    columns: Sequence[str], rows: Sequence[tuple[str, Sequence[tuple[float, str] | None]]], corner: str = ""
) -> str:
    """A table whose cells have the more colour the larger their number is among all.

    Args:
        columns: titles.
        rows: title and cells: a number and what is written of it; None where there is nothing.
        corner: what stands above the titles of the rows.
    """
    numbers = [cell[0] for _, cells in rows for cell in cells if cell is not None]
    if not numbers:
        return ""
    low, high = min(numbers), max(numbers)
    return _heat(columns, rows, corner, "heat", [(low, high)] * len(columns))


def compared_heat(
    columns: Sequence[str], rows: Sequence[tuple[str, Sequence[tuple[float, str]]]], corner: str, least: float
) -> str:
    """A table whose cells have the more colour the larger their number is in its column; rows can be compared.

    The page's script tells two rows apart that are clicked (`table.js`): the numbers are microseconds.

    Args:
        columns: titles.
        rows: title and cells: a number and what is written of it; at least one.
        corner: what stands above the titles of the rows.
        least: a difference within a column that takes all colour, at least: less than that is noise.
    """
    numbers = np.array([[cell[0] for cell in cells] for _, cells in rows])
    ends = [(float(of.min()), float(max(of.max(), of.min() + least))) for of in numbers.T]
    return _heat(columns, rows, corner, "heat compare", ends)


def _heat(
    columns: Sequence[str],
    rows: Sequence[tuple[str, Sequence[tuple[float, str] | None]]],
    corner: str,
    kind: str,
    ends: Sequence[tuple[float, float]],
) -> str:
    """Rows of cells, each coloured by where its number is between the ends of its column."""
    head = "".join(f"<th>{escape(title)}</th>" for title in columns)
    body = []
    for title, cells in rows:
        line = "".join(
            "<td>–</td>"
            if cell is None
            else f'<td data-value="{cell[0]:.10g}" style="background:color-mix(in srgb,var(--c0) '
            f'{5 + 55 * _share(cell[0], *end, ratio=False):.0f}%,transparent)">{escape(cell[1])}</td>'
            for cell, end in zip(cells, ends, strict=True)
        )
        body.append(f'<tr><th class="text">{escape(title)}</th>{line}</tr>')
    return (
        f'<div class="scroll"><table class="{kind}"><tr><th class="text">{escape(corner)}</th>{head}</tr>'
        f"{''.join(body)}</table></div>"
    )


def _share(value: float, low: float, high: float, *, ratio: bool) -> float:
    """How far a value is from one end to the other, 0 to 1; of a scale of equal ratios, or of equal steps."""
    if low == high:
        return 0.5 if ratio else 0.0
    return math.log(value / low) / math.log(high / low) if ratio else (value - low) / (high - low)


def _envelope(x: _Floats, y: _Floats, first: float, last: float) -> tuple[_Floats, _Floats]:
    """Steps as points of a line: places from 0 to 1 and values; at most some `_POINTS` columns, each its peak."""
    share = (x - first) / ((last - first) or 1.0)
    if len(x) <= _POINTS:
        at = np.append(np.repeat(share, 2)[1:], 1.0)
        return at, np.repeat(y, 2)
    column = np.minimum((share * _POINTS).astype(np.int64), _POINTS - 1)
    peak = np.full(_POINTS, -np.inf)
    np.maximum.at(peak, column, y)
    # What held when a column began belongs to it too.
    before = np.searchsorted(column, np.arange(_POINTS), "left") - 1
    held = np.where(before >= 0, y[np.maximum(before, 0)], 0.0)
    return (np.arange(_POINTS) + 0.5) / _POINTS, np.maximum(peak, held)


def _grid(low: float, high: float, unit: str) -> str:
    """Lines at the least, the middle and the largest value, with these."""
    drawn = []
    for share in (0.0, 0.5, 1.0):
        y = _TEXT + _HEIGHT * (1 - share)
        shown = escape(with_unit(low + share * (high - low), unit))
        drawn.append(f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(f'<text class="muted halo" x="0" y="{y - 3:.1f}">{shown}</text>')
    return "".join(drawn)


def _ends(first: float, last: float, unit: str, y: float = _HEIGHT + 30) -> list[str]:
    """What stands at both ends of the horizontal axis."""
    left, right = (escape(with_unit(value, unit)) for value in (first, last))
    return [
        f'<text class="muted" x="0" y="{y}">{left}</text>',
        f'<text class="muted" x="100%" y="{y}" text-anchor="end">{right}</text>',
    ]


def _between(places: Sequence[tuple[float, float]], y: float) -> list[str]:
    """Numbers along the horizontal axis, those that have room beside the one before and both ends.

    Args:
        places: numbers, ascending, and their shares of the axis.
        y: where they stand.
    """
    drawn, free = [], _ROOM
    for value, share in places:
        if free <= share <= 1 - _ROOM:
            text = f'<text class="muted" x="{100 * share:.2f}%" y="{y}" text-anchor="middle">{value:,g}</text>'
            drawn.append(text)
            free = share + _ROOM
    return drawn


def _svg(height: int, parts: Sequence[Any]) -> str:
    return f'<svg role="img" height="{height}">{"".join(parts)}</svg>'


def _label(label: str, y: float) -> str:
    """A label cut to what stands free on the page; the whole of it when it is pointed at."""
    told = f"<title>{escape(label[:_LONGEST])}</title>"
    return f'<svg y="{y}" width="74%" height="17"><text y="{_TEXT}">{escape(label[:_LABEL])}{told}</text></svg>'
