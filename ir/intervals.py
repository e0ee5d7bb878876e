"""Unions and overlaps of intervals of time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from echograph.ir.columns import Int64


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
