"""Statistics of groups of values."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from echograph.ir.columns import Int64

_Floats = npt.NDArray[np.float64]
DESCRIPTION = ("count", "mean", "std", "min", "25%", "50%", "75%", "max")


class ValueGroups(NamedTuple):
    """Values in groups of equal keys, groups by ascending key.

    Attributes:
        keys: one a group.
        first: where each group begins in `order`.
        order: rows, group by group; within a group in their old order.
    """

    keys: Int64
    first: Int64
    order: Int64

    @property
    def sizes(self) -> Int64:
        """Rows in each group."""
        return np.diff(self.first, append=len(self.order))


def groups(keys: npt.NDArray[Any]) -> ValueGroups:
    """Groups rows by an integer key."""
    order = np.argsort(keys, kind="stable")
    sorted_keys = keys[order]
    first = np.flatnonzero(np.concatenate((np.ones(min(1, len(keys)), np.bool_), np.diff(sorted_keys) != 0)))
    return ValueGroups(sorted_keys[first].astype(np.int64), first, order)


class Summary(NamedTuple):
    """Statistics of each group; `std` is that of a sample (n - 1), 0 for a single value."""

    sum: _Floats
    max: _Floats
    min: _Floats
    std: _Floats
    mean: _Floats


def summary(grouped: ValueGroups, values: npt.NDArray[Any]) -> Summary:
    """Sum, extremes, deviation and mean of each group."""
    count = grouped.sizes
    if not len(count):
        return Summary(*(np.zeros(0) for _ in Summary._fields))
    ordered = values[grouped.order].astype(np.float64)
    total = np.add.reduceat(ordered, grouped.first)
    mean = total / count
    square = np.add.reduceat((ordered - np.repeat(mean, count)) ** 2, grouped.first)
    deviation = np.sqrt(square / np.maximum(count - 1, 1))
    largest, least = np.maximum.reduceat(ordered, grouped.first), np.minimum.reduceat(ordered, grouped.first)
    return Summary(total, largest, least, deviation, mean)


def describe(values: npt.NDArray[Any]) -> tuple[float, ...]:
    """Count, mean, standard deviation (n - 1), least, quartiles (linear) and largest; NaN where there is none."""
    count = len(values)
    if not count:
        return (0, *(float("nan"),) * 7)
    quarters = np.percentile(values, (0, 25, 50, 75, 100))
    deviation = float(np.std(values, ddof=1)) if count > 1 else float("nan")
    least, *middle, largest = (float(q) for q in quarters)
    return (count, float(np.mean(values)), deviation, least, *middle, largest)
