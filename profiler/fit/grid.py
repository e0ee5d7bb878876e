"""Fits the correction of a physical model: a coarse grid over three logs of sizes, by ridge regression.

A correction is what a table says beyond its model, and that may be anything; a search follows a time that falls
as the work grows. So a correction may be fitted under the condition that it falls from knot to knot by no more
than the model without it grows there (`may_fall`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from operator import add

import numpy as np
import numpy.typing as npt

from echograph.errors import MissingExtraError
from echograph.profiler.costs.device import FloatArray, Grid
from echograph.profiler.costs.gemm import LIMIT, corners
from echograph.profiler.fit.regression import OUTLIER

GRID_PASSES = 4

BETWEEN = 4
"""Steps between two knots at which the growth of the time without a correction is looked at."""

KEPT_GROWTH = 0.95
"""Of that growth a correction may take back so much; the rest is left for what lies between the steps."""

SLACK = 1e-9
"""Of log time: what arithmetic leaves of a condition that holds."""


def fit_grid(
    knots: Sequence[Sequence[float]],
    parts: Sequence[tuple[Sequence[FloatArray], float | FloatArray]],
    error: FloatArray,
    weight: FloatArray,
    *,
    smoothness: float,
    ridge: float,
    falls: FloatArray | None = None,
) -> Grid:
    """The grid that explains log errors best, pulled to zero and to its neighbours.

    Args:
        knots: increasing sizes along each of three axes.
        parts: of a row's time: the three sizes [rows] of what takes it, and its share of the time.
        error: log(measured / modelled), [rows].
        weight: trust in each row, [rows].
        smoothness: price of a difference between neighbours, per octave.
        ridge: price of a correction.
        falls: by how much a value may lie below that of its lower neighbour (along the first axis, then the
            second, then the third); None: by anything.

    Raises:
        MissingExtraError: scipy is not installed.
    """
    try:
        import scipy.sparse as sparse
        from scipy.sparse.linalg import spsolve
    except ImportError as reason:
        raise MissingExtraError("scipy", "fit", "fitting a device profile") from reason
    shape = tuple(len(axis) for axis in knots)
    count, rows = int(np.prod(shape)), len(error)
    every = np.tile(np.arange(rows), 8)
    designs = []
    for sizes, share in parts:
        flat, near = corners(knots, sizes)
        designs.append(sparse.csr_matrix(((near * share).ravel(), (every, flat.ravel())), shape=(rows, count)))
    design = reduce(add, designs)
    start, end, price = _neighbours(knots, shape)
    pairs = np.tile(np.arange(len(start)), 2)
    differences = sparse.csr_matrix(
        (np.concatenate([price, -price]), (pairs, np.concatenate([start, end]))), shape=(len(start), count)
    )
    penalty = smoothness * differences.T @ differences + ridge * sparse.eye(count)
    trust, values = weight.copy(), np.zeros(count)
    for last in (*(False,) * (GRID_PASSES - 1), True):
        weighted = sparse.diags(trust**2)
        normal, pulled = (design.T @ weighted @ design + penalty).tocsc(), design.T @ (trust**2 * error)
        # Which rows are outliers the rows say by themselves: the last pass alone has to grow.
        if last and falls is not None:
            values = _growing(normal.toarray(), pulled, end, start, -falls)
        else:
            values = spsolve(normal, pulled)
        trust = weight / np.sqrt(1.0 + ((error - design @ values) / OUTLIER) ** 2)
    return _rounded(knots, values)


def _growing(
    normal: FloatArray,
    pulled: FloatArray,
    end: npt.NDArray[np.intp],
    start: npt.NDArray[np.intp],
    least: FloatArray,
) -> FloatArray:
    """Least squares under `values[end] - values[start] >= least`, exactly (Lawson and Hanson, 1974, chapter 23).

    Args:
        normal: the matrix of the normal equations, positive definite.
        pulled: their right side.
        end: upper knots of pairs.
        start: lower knots of pairs.
        least: by how much the upper is above the lower at least.
    """
    from scipy.linalg import cholesky, solve_triangular
    from scipy.optimize import nnls

    lower = cholesky(normal, lower=True)
    free = solve_triangular(lower, pulled, lower=True)
    rows = np.arange(len(end))
    steps = np.zeros((len(end), len(pulled)))
    steps[rows, end], steps[rows, start] = 1.0, -1.0
    turned = solve_triangular(lower, steps.T, lower=True)
    short = least - free @ turned
    held, move = np.zeros(len(end), dtype=np.bool_), np.zeros(len(pulled))
    # Few conditions bind: each turn holds those that the last broke, until none is broken.
    while np.any(broken := (short - move @ turned > SLACK) & ~held):
        held |= broken
        distance = np.vstack([turned[:, held], short[held]])
        target = np.append(np.zeros(len(pulled)), 1.0)
        share, _ = nnls(distance, target)
        off = distance @ share - target
        move = -off[:-1] / off[-1]
    return np.asarray(solve_triangular(lower, free + move, lower=True, trans=1))


def limited(grid: Grid, falls: FloatArray) -> Grid:
    """The nearest grid that falls from knot to knot by no more than it may."""
    values = np.asarray(grid.permille) / 1000.0
    start, end, _ = _neighbours(grid.knots, tuple(len(axis) for axis in grid.knots))
    return _rounded(grid.knots, _growing(np.eye(len(values)), values, end, start, -falls))


def _rounded(knots: Sequence[Sequence[float]], values: FloatArray) -> Grid:
    """A correction in whole permille, which leaves every condition in whole permille as it is."""
    permille = np.clip(np.rint(values * 1000.0), -LIMIT * 1000.0, LIMIT * 1000.0)
    first, second, third = ([float(v) for v in axis] for axis in knots)
    return Grid(knots=(first, second, third), permille=permille.astype(int).tolist())


def _neighbours(
    knots: Sequence[Sequence[float]], shape: tuple[int, ...]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], FloatArray]:
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


def finely(axis: Sequence[float]) -> FloatArray:
    """The knots of an axis, and the steps between them at which growth is looked at."""
    parts = [np.geomspace(*pair, BETWEEN, endpoint=False) for pair in pairwise(axis)]
    return np.concatenate([*parts, [axis[-1]]])


def may_fall(
    knots: Sequence[Sequence[float]], sizes: Sequence[FloatArray], times: Sequence[FloatArray]
) -> FloatArray:
    """By how much a correction may lie below that of the next smaller size, so that the time still grows.

    What a model says of a size counts as no more than what it says of any larger one, as of a head dim whose
    kernel is slower than the next (measured).

    Args:
        knots: of the grid along each axis.
        sizes: of a mesh whose axes are those of `finely`; one that begins below the first knot begins one earlier.
        times: logs of times without a correction, each on this mesh; the one that grows least decides.

    Returns:
        Of log time, in whole permille, for neighbours in the order of `fit_grid`.
    """
    lead = tuple(
        slice((points - 1) // BETWEEN + 1 - len(axis), None)
        for points, axis in zip(sizes[0].shape, knots, strict=True)
    )
    octaves = [np.log2(size) for size in sizes]
    found = [
        np.concatenate([_least_growth(log_s, along, axis)[lead].ravel() for axis, along in enumerate(octaves)])
        for log_s in times
    ]
    return np.asarray(np.floor(KEPT_GROWTH * np.min(found, axis=0) * 1000.0) / 1000.0)


def _least_growth(log_s: FloatArray, octaves: FloatArray, axis: int) -> FloatArray:
    """By how much log times grow between neighbours along an axis, at the least rate in the cells around them."""
    least = np.flip(np.minimum.accumulate(np.flip(log_s, axis), axis), axis)
    more, wide = np.diff(least, axis=axis), np.diff(octaves, axis=axis)
    # Keys that fill no step of the kernel are as many as before.
    rate = np.divide(more, wide, out=np.full(more.shape, np.inf), where=wide > 0)
    for along, points in enumerate(log_s.shape):
        # Along the axis itself the step below tells of a time that begins to grow within the first.
        knots = range(0, points - (along == axis), BETWEEN)
        below, above = (1, BETWEEN) if along == axis else (BETWEEN, BETWEEN + 1)
        cells = [range(max(0, at - below), min(rate.shape[along], at + above)) for at in knots]
        rate = np.stack([np.take(rate, cell, along).min(axis=along) for cell in cells], axis=along)
    at_knots = tuple(slice(None, None, BETWEEN) for _ in log_s.shape)
    return np.asarray(rate * np.diff(octaves[at_knots], axis=axis))
