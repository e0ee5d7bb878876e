"""Trilinear interpolation of a correction over log2 sizes, fading to nothing outside its knots."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from echograph.profiler.costs.cost import FloatArray
from echograph.profiler.costs.device import Grid

LIMIT = 0.25
"""No correction moves a time by more than this (natural log)."""

FADE_OCTAVES = 2.0
"""Outside the knots the correction falls by e every this many octaves."""


def corners(
    knots: Sequence[Sequence[float]], sizes: Sequence[FloatArray]
) -> tuple[npt.NDArray[np.intp], FloatArray, FloatArray]:
    """The eight knots around each point.

    Args:
        knots: increasing sizes along each of the three axes.
        sizes: three arrays of shape [points].

    Returns:
        Flat knot indices [8, points], their weights [8, points], and octaves outside the knots [points].
    """
    low, weight, outside = [], [], []
    for axis, size in zip(knots, sizes, strict=True):
        log_axis, log_size = np.log2(axis), np.log2(size)
        index = np.clip(np.searchsorted(log_axis, log_size, side="right") - 1, 0, len(axis) - 2)
        part = (log_size - log_axis[index]) / (log_axis[index + 1] - log_axis[index])
        low.append(index)
        weight.append(np.clip(part, 0.0, 1.0))
        outside.append(np.maximum(0.0, np.maximum(log_axis[0] - log_size, log_size - log_axis[-1])))
    flat, weights = [], []
    for bits in itertools.product((0, 1), repeat=3):
        corner = [index + bit for bit, index in zip(bits, low, strict=True)]
        flat.append(np.ravel_multi_index(corner, [len(axis) for axis in knots]))
        weights.append(
            np.prod([part if bit else 1.0 - part for bit, part in zip(bits, weight, strict=True)], axis=0)
        )
    return np.stack(flat), np.stack(weights), np.sum(outside, axis=0)


def correction(grid: Grid, sizes: Sequence[FloatArray]) -> tuple[FloatArray, FloatArray]:
    """The correction of log time at each point, and how far to trust it (1 inside, falling to 0)."""
    flat, weights, outside = corners(grid.knots, sizes)
    values = np.asarray(grid.permille, dtype=np.float64)[flat] / 1000.0
    trust = np.exp(-outside / FADE_OCTAVES)
    return np.clip((values * weights).sum(axis=0), -LIMIT, LIMIT) * trust, trust
