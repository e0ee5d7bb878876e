"""Lanes of time that a page can zoom into, whatever ran on them: traces of ranks, or a step that was simulated.

So that a page stays small whatever there is to show, spans shorter than a grain of time are joined with their
neighbours: the smallest grain (a power of two) is taken with which everything is within a number of spans.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from echograph.ir.columns import Int64
from echograph.profiler.page.frame import data, key
from echograph.units import format_time

_NS, _NAME, _TENTHS = 1000, 120, 9


class Spans(NamedTuple):
    """Spans of a lane by their start; several that were joined stand as one.

    Attributes:
        start: picoseconds.
        end: picoseconds.
        name: code of what runs, of the longest where several were joined.
        colour: of the page's style.
        many: how many it stands for.
        filled: share of its length, 0 to 1, that is of its colour; None: all of it.
        under: colour of the rest, -1 for none; None: none anywhere.
    """

    start: Int64
    end: Int64
    name: Int64
    colour: Int64
    many: Int64
    filled: npt.NDArray[np.float64] | None = None
    under: Int64 | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimelineTrack:
    """A row of the timeline.

    Attributes:
        head: whose lanes it is one of, on a line above the first of them; empty for a lane that stands alone.
        label: which stream or thread; the same for all depths of a thread.
        spans: what ran.
        strings: texts that their names stand for.
        detail: whether it is shown only when details are asked for.
    """

    head: str
    label: str
    spans: Spans
    strings: tuple[str, ...]
    detail: bool = False


def drawing(lanes: list[TimelineTrack], most: int, colours: dict[str, int], note: str = "") -> str:
    """The lanes as HTML; `script` draws them.

    Args:
        lanes: in their order on the page.
        most: spans in all; where there are more, the shortest are joined.
        colours: what the colours mean.
        note: of what is shown.
    """
    if not lanes:
        return ""
    lanes, grain = coarse(lanes, most)
    joined = f" Spans shorter than {format_time(grain)} are joined with their neighbours." if grain else ""
    more = '<button data-detail aria-pressed="false">streams</button>' if any(x.detail for x in lanes) else ""
    return (
        f"{key(list(colours), list(colours.values()))}"
        '<div class="timeline" tabindex="0" id="timeline"><div class="bar-top"><button data-zoom="0.5" '
        'aria-label="zoom in">+</button><button data-zoom="2" aria-label="zoom out">−</button>'
        f'<button data-zoom="0">all</button>{more}<span class="where"></span></div>'
        '<div class="lanes"><canvas></canvas></div><div class="told">Point at a span.</div></div>'
        '<p class="note">Drag to move; + and −, Ctrl and the wheel, or a double click to zoom.'
        f"{escape(note + joined)} <noscript>The timeline needs JavaScript; the tables below do not.</noscript>"
        f"</p>{data('lanes', _content(lanes))}"
    )


def script() -> str:
    """The JavaScript that draws lanes."""
    return Path(__file__).with_name("timeline.js").read_text()


def coarse(lanes: list[TimelineTrack], most: int) -> tuple[list[TimelineTrack], int]:
    """The lanes with so many spans at most, and the grain with which they are: picoseconds, 0 for none.

    The longest spans of a lane are never lost: only what is shorter than the grain is joined.

    Args:
        lanes: as they were traced.
        most: spans in all.
    """
    grain, found = 0, lanes
    while sum(len(lane.spans.start) for lane in found) > most:
        grain = 2 * grain or _NS
        found = [replace(lane, spans=_joined(lane.spans, grain)) for lane in lanes]
    return found, grain


def _joined(spans: Spans, grain: int) -> Spans:
    """Short spans that begin in the same grain of time become one, of the name and colour of the longest."""
    long = spans.end - spans.start >= grain
    cell = spans.start // grain
    # A long span stands alone, and parts what is before it from what is after.
    new = np.concatenate(([True], (cell[1:] != cell[:-1]) | long[1:] | long[:-1]))[: len(cell)]
    group = np.cumsum(new) - 1
    first = np.flatnonzero(new)
    if not len(first):
        return spans
    by_length = np.lexsort((spans.start - spans.end, group))
    longest = by_length[first]
    start, end = spans.start[first], np.maximum.reduceat(spans.end, first)
    filled = spans.filled
    if filled is not None:
        ran = np.add.reduceat(filled * (spans.end - spans.start), first)
        filled = np.minimum(ran / np.maximum(end - start, 1), 1.0)
    return Spans(
        start,
        end,
        spans.name[longest],
        spans.colour[longest],
        np.add.reduceat(spans.many, first),
        filled,
        None if spans.under is None else spans.under[longest],
    )


def _content(lanes: list[TimelineTrack]) -> dict[str, Any]:
    """Lanes for the script: nanoseconds, starts as the distance from the start before."""
    first = min(int(lane.spans.start[0]) for lane in lanes)
    names: dict[str, int] = {}
    rows = []
    for lane in lanes:
        spans = lane.spans
        start, end = (spans.start - first) // _NS, -((first - spans.end) // _NS)
        texts = [lane.strings[code][:_NAME] for code in spans.name.tolist()]
        several = np.flatnonzero(spans.many > 1)
        row = {
            "head": lane.head,
            "label": lane.label,
            "start": np.diff(start, prepend=0).tolist(),
            "dur": (end - start).tolist(),
            "name": [names.setdefault(text, len(names)) for text in texts],
            "colour": "".join(map(str, spans.colour.tolist())),
            "count": [several.tolist(), spans.many[several].tolist()],
            "detail": lane.detail,
        }
        if spans.filled is not None:
            row["filled"] = "".join(map(str, np.rint(spans.filled * _TENTHS).astype(int).tolist()))
        if spans.under is not None:
            row["under"] = "".join("-" if colour < 0 else str(colour) for colour in spans.under.tolist())
        rows.append(row)
    last = max(int(lane.spans.end.max()) for lane in lanes)
    return {"span": -((first - last) // _NS), "origin": first // _NS, "names": list(names), "lanes": rows}
