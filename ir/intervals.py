"""Unions and overlaps of intervals of time, and what a stretch of time is spent on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from echograph.ir.columns import NONE, Int64, distinct


class Intervals(NamedTuple):
    """Intervals that do not touch, ascending; picoseconds.

    Attributes:
        start: when each begins.
        end: when each ends; later than it begins, except where a single moment stands alone.
    """

    start: Int64
    end: Int64

    @property
    def length(self) -> int:
        """Picoseconds that they cover."""
        return int((self.end - self.start).sum())


def union(start: Int64, end: Int64) -> Intervals:
    """What any of the intervals covers; those that touch become one.

    Args:
        start: int64 [n], in any order.
        end: int64 [n], none before its start.
    """
    if not len(start):
        return Intervals(start, end)
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    latest = np.maximum.accumulate(end)
    first = np.concatenate(([True], start[1:] > latest[:-1]))
    last = np.concatenate((first[1:], [True]))
    return Intervals(start[first], latest[last])


class IntervalCoverage(NamedTuple):
    """Which sets of intervals run at once; a combination's index has the bits of its sets.

    Attributes:
        length: int64 [2**n]: picoseconds during which exactly these sets run; 0 for none of them.
        met: whether the combination occurs, be it for no time: one ends at the moment at which another begins.
    """

    length: Int64
    met: npt.NDArray[np.bool_]


def coverage(sets: Sequence[Intervals]) -> IntervalCoverage:
    """How long each combination of sets runs at once.

    Args:
        sets: n sets of intervals, each without overlaps in itself; the first is bit 0.
    """
    times = np.concatenate([times for one in sets for times in one])
    change = np.concatenate(
        [np.full(len(one.start), sign << bit) for bit, one in enumerate(sets) for sign in (1, -1)]
    )
    order = np.argsort(times, kind="stable")
    running = np.cumsum(change[order])[:-1]
    length, met = np.zeros(1 << len(sets), np.int64), np.zeros(1 << len(sets), np.bool_)
    np.add.at(length, running, np.diff(times[order]))
    met[running] = True
    length[0], met[0] = 0, False
    return IntervalCoverage(length, met)


def spent_in_layers(start: Int64, end: Int64, layer: Int64, layers: int, until: int) -> list[int]:
    """Picoseconds from 0 of each layer, as `layered` lays them out, and last of none; they add up to `until`.

    Args:
        start: int64 [n], when each interval begins, picoseconds.
        end: int64 [n], none before its start.
        layer: int64 [n], of each interval, from 0 (counts first) to `layers` - 1.
        layers: how many there are.
        until: where the stretch ends.
    """
    spent, covered, before = [0] * (layers + 1), Intervals(start[:0], end[:0]), 0
    for number in distinct(layer).tolist():
        mine = layer == number
        covered = union(np.append(covered.start, start[mine]), np.append(covered.end, end[mine]))
        now = int(np.maximum(np.minimum(covered.end, until) - covered.start, 0).sum())
        spent[number], before = now - before, now
    spent[layers] = until - before
    return spent


class Pieces(NamedTuple):
    """A stretch of time in pieces without a gap, each of the first layer that covers it.

    Attributes:
        start: int64 [n], picoseconds.
        end: int64 [n]; later than the start.
        layer: int64 [n]; the number of layers where none covers the piece.
        row: int64 [n], of the intervals of that layer, the one that began last; -1 where none covers the piece.
    """

    start: Int64
    end: Int64
    layer: Int64
    row: Int64


def layered(start: Int64, end: Int64, layer: Int64, layers: int, until: int, since: int = 0) -> Pieces:
    """Splits a stretch of time by what runs, the first of several layers that does: a breakdown laid out in time.

    Args:
        start: int64 [n], when each interval begins, picoseconds.
        end: int64 [n], none before its start.
        layer: int64 [n], of each interval, from 0 (counts first) to `layers` - 1.
        layers: how many there are.
        until: where the stretch ends.
        since: where it begins.
    """
    count = len(start)
    times = np.clip(np.concatenate([start, end, [since, until]]), since, until)
    order = np.argsort(times, kind="stable")
    times, event = times[order], order[:-1]
    opens, of = event < count, np.concatenate([layer, layer, [layers, layers]])[event]
    found, row = np.full(len(event), layers, np.int64), np.full(len(event), NONE, np.int64)
    # From the last layer to the first, each over those behind it.
    for number in distinct(layer)[::-1].tolist():
        mine = np.flatnonzero(of == number)
        running = np.cumsum(np.where(opens[mine], 1, -1)) > 0
        latest = np.maximum.accumulate(np.where(opens[mine], mine, 0))
        # What holds after one event of the layer holds until its next.
        lasts = np.diff(mine, append=len(event))
        where = mine[0] + np.flatnonzero(np.repeat(running, lasts))
        found[where], row[where] = number, event[np.repeat(latest[running], lasts[running])]
    kept = np.flatnonzero(times[1:] > times[:-1])
    # Neighbours of which nothing tells which interval they are of are one.
    new = np.ones(len(kept), np.bool_)
    new[1:] = (found[kept][1:] != found[kept][:-1]) | (row[kept][1:] != row[kept][:-1])
    first = kept[new]
    return Pieces(times[first], np.append(times[first[1:]], times[-1:])[: len(first)], found[first], row[first])
