"""Fits a residual grid: ridge regression of log error, smooth along each axis, robust to outliers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from echograph.errors import MissingExtraError
from echograph.profiler.costs.cost import FloatArray
from echograph.profiler.costs.device import Grid
from echograph.profiler.costs.grid import LIMIT, corners
from echograph.profiler.fit.robust import OUTLIER

PASSES = 4


def fit_grid(
    knots: Sequence[Sequence[float]],
    sizes: Sequence[FloatArray],
    error: FloatArray,
    weight: FloatArray,
    *,
    smoothness: float,
    ridge: float,
) -> Grid:
    """The grid that explains log errors best, pulled to zero and to its neighbours.

    Args:
        knots: increasing sizes along each of three axes.
        sizes: three arrays [rows].
        error: log(measured / modelled), [rows].
        weight: trust in each row, [rows].
        smoothness: price of a difference between neighbours, per octave.
        ridge: price of a correction.

    Raises:
        MissingExtraError: scipy is not installed.
    """
    try:
        import scipy.sparse as sparse
        from scipy.sparse.linalg import spsolve
    except ImportError as reason:
        raise MissingExtraError("scipy", "fit", "fitting a device profile") from reason
    flat, part, _ = corners(knots, sizes)
    shape = tuple(len(axis) for axis in knots)
    count, rows = int(np.prod(shape)), len(error)
    design = sparse.csr_matrix((part.ravel(), (np.tile(np.arange(rows), 8), flat.ravel())), shape=(rows, count))
    start, end, price = _neighbours(knots, shape)
    pairs = np.tile(np.arange(len(start)), 2)
    differences = sparse.csr_matrix(
        (np.concatenate([price, -price]), (pairs, np.concatenate([start, end]))), shape=(len(start), count)
    )
    penalty = smoothness * differences.T @ differences + ridge * sparse.eye(count)
    trust, values = weight.copy(), np.zeros(count)
    for _ in range(PASSES):
        weighted = sparse.diags(trust**2)
        values = spsolve((design.T @ weighted @ design + penalty).tocsc(), design.T @ (trust**2 * error))
        trust = weight / np.sqrt(1.0 + ((error - design @ values) / OUTLIER) ** 2)
    limited = np.clip(np.rint(values * 1000.0), -LIMIT * 1000.0, LIMIT * 1000.0)
    first, second, third = ([float(v) for v in axis] for axis in knots)
    return Grid(knots=(first, second, third), permille=limited.astype(int).tolist())


def _neighbours(
    knots: Sequence[Sequence[float]], shape: tuple[int, ...]
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Flat indices of adjacent knots and the root of the price of their difference."""
    index = np.arange(int(np.prod(shape))).reshape(shape)
    start, end, price = [], [], []
    for axis, values in enumerate(knots):
        low = np.take(index, range(shape[axis] - 1), axis)
        octaves = np.diff(np.log2(np.asarray(values, dtype=np.float64)))
        along = octaves.reshape([-1 if a == axis else 1 for a in range(len(shape))])
        start.append(low.ravel())
        end.append(np.take(index, range(1, shape[axis]), axis).ravel())
        price.append(np.broadcast_to(1.0 / np.sqrt(along), low.shape).ravel())
    return np.concatenate(start), np.concatenate(end), np.concatenate(price)
