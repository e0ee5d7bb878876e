"""The one way every physical model is fitted, which rows a fit may see, and how wrong it is on the others.

A fit is robust, deterministic least squares on log time. A row is held out by a hash of its shape alone, so that
one shape measured twice, or by two sources, falls on one side as a whole; the same shape is held out on every
device. A table of few shapes is judged by leaving each out in turn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from echograph.errors import MissingExtraError
from echograph.profiler.costs.device import SHORT_KERNEL_S, FitError, FloatArray, HeldOut

Fitted = TypeVar("Fitted")

OUTLIER = 0.05
"""Log error beyond which a row pulls with constant, no longer growing, force."""

STEP = 1e-3
"""Relative step of the numerical gradient: wide enough to see past the corners of waves and tiles."""

MAX_ROWS = 4000
MAX_EVALUATIONS = 60


def minimize(residuals: Callable[[FloatArray], FloatArray], start: FloatArray) -> FloatArray:
    """The parameters that minimise the residuals in a soft-L1 sense, from a fixed start.

    Raises:
        MissingExtraError: scipy is not installed (predicting never needs it).
    """
    try:
        from scipy.optimize import least_squares
    except ImportError as error:
        raise MissingExtraError("scipy", "fit", "fitting a device profile") from error
    result = least_squares(
        residuals, start, loss="soft_l1", f_scale=OUTLIER, diff_step=STEP, max_nfev=MAX_EVALUATIONS
    )
    return np.asarray(result.x)


def misfit(residuals: FloatArray) -> float:
    """What `minimize` makes least."""
    return float(np.sum(OUTLIER**2 * (np.sqrt(1.0 + (residuals / OUTLIER) ** 2) - 1.0)))


def weights(seconds: FloatArray) -> FloatArray:
    """One for long kernels, less for those whose time is mostly launch and timer noise."""
    return np.clip(seconds / SHORT_KERNEL_S, 0.2, 1.0)


def subsample(rows: int, limit: int = MAX_ROWS) -> npt.NDArray[np.intp]:
    """A fixed choice of at most `limit` rows: thirty parameters do not need more."""
    if rows <= limit:
        return np.arange(rows)
    return np.sort(np.random.default_rng(0).permutation(rows)[:limit])


def first_rows(*columns: FloatArray) -> npt.NDArray[np.intp]:
    """Which rows, ascending, repeat no earlier one: a measurement may stand in two tables.

    Args:
        columns: [rows] each, of what tells two measurements apart.
    """
    return np.sort(np.unique(np.stack(columns), axis=1, return_index=True)[1])


def sigmoid(x: float | FloatArray) -> FloatArray:
    """Maps the real line to (0, 1)."""
    return np.asarray(1.0 / (1.0 + np.exp(-np.asarray(x))))


def logit(x: float | FloatArray) -> FloatArray:
    """The inverse of `sigmoid`."""
    return np.asarray(np.log(np.asarray(x) / (1.0 - np.asarray(x))))


ONE_IN = 5
FEW_SHAPES = 100
"""Below this many shapes one in five is less than twenty, whose median says little (of three points of a chart
4.3 %, of all twenty-four 6.6 %): each is judged by a fit to all others."""
DESCRIPTION = (
    "one shape in five, by blake2b of its sizes; duplicates of a shape stay together. Of fewer than "
    f"{FEW_SHAPES} shapes each in turn, by a fit to all others; what ships is fitted to all"
)


def held_out(*sizes: FloatArray) -> npt.NDArray[np.bool_]:
    """True where the shape is held out; each argument is one size of the shape, [rows]."""
    shapes = np.stack(sizes, axis=1).astype(np.int64)
    return np.asarray([_bucket(shape) == 0 for shape in shapes.tolist()], dtype=np.bool_)


def _bucket(shape: list[int]) -> int:
    digest = hashlib.blake2b(",".join(map(str, shape)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % ONE_IN


def fit_error(predicted: FloatArray, measured: FloatArray) -> FitError | None:
    """Relative errors of a prediction, in seconds against seconds; None of no rows."""
    if not len(measured):
        return None
    error = predicted / measured - 1.0
    return FitError(
        rows=len(measured),
        median_abs=round(float(np.median(np.abs(error))), 4),
        mean_abs=round(float(np.mean(np.abs(error))), 4),
        bias=round(float(np.mean(error)), 4),
        rms=round(float(np.sqrt(np.mean(error**2))), 4),
    )


def score(predicted: FloatArray, measured: FloatArray) -> HeldOut:
    """Errors of long and short kernels apart."""
    long = measured >= SHORT_KERNEL_S
    return HeldOut(
        long=fit_error(predicted[long], measured[long]), short=fit_error(predicted[~long], measured[~long])
    )


def judged(
    fit: Callable[[npt.NDArray[np.bool_]], Fitted],
    predict: Callable[[Fitted], FloatArray],
    sizes: Sequence[FloatArray],
    seconds: FloatArray,
) -> tuple[Fitted, HeldOut]:
    """A fit, and its error on shapes that it had not seen; with few shapes, that of fits that each lack one.

    Args:
        fit: to the rows of a mask.
        predict: seconds of all rows.
        sizes: of the shape, each [rows].
        seconds: measured, [rows].
    """
    shape = np.unique(np.stack(sizes, axis=1), axis=0, return_inverse=True)[1].ravel()
    shapes = int(shape.max()) + 1 if len(shape) else 0
    if not 1 < shapes < FEW_SHAPES:
        hidden = held_out(*sizes)
        best = fit(~hidden)
        return best, score(predict(best)[hidden], seconds[hidden])
    unseen = np.empty_like(seconds)
    for left_out in range(shapes):
        hidden = shape == left_out
        unseen[hidden] = predict(fit(~hidden))[hidden]
    return fit(np.ones(len(seconds), dtype=np.bool_)), score(unseen, seconds)


def disagreement(sizes: Sequence[FloatArray], library: npt.NDArray[np.int32], seconds: FloatArray) -> float:
    """How far libraries are apart on the same shape: their relative one-sigma spread, pooled over the shapes.

    Args:
        sizes: of the shape, each [rows].
        library: a number for each library, [rows].
        seconds: measured, [rows]; short kernels are left out.

    Returns:
        0 where no shape was measured by two libraries.
    """
    long = seconds >= SHORT_KERNEL_S
    if not np.any(long):
        return 0.0
    _, shape = np.unique(np.stack([size[long] for size in sizes]), axis=1, return_inverse=True)
    pairs, pair = np.unique(np.stack([shape.ravel(), library[long]]), axis=1, return_inverse=True)
    level = np.bincount(pair.ravel(), np.log(seconds[long])) / np.bincount(pair.ravel())
    libraries = np.bincount(pairs[0])
    mean = np.bincount(pairs[0], level) / libraries
    free = int(np.sum(libraries - 1))
    return round(float(np.sqrt(np.sum((level - mean[pairs[0]]) ** 2) / free)), 4) if free else 0.0


UNTESTED_SPREAD = 0.15
"""Assumed one-sigma error of a fit to so few rows that none fell on the held-out side."""


def spreads(error: HeldOut, floor: float = 0.01) -> tuple[float, float]:
    """The (long, short) one-sigma spread of a fit, `floor` at least; where one kind has no rows, the other's."""
    known = [part.rms for part in (error.long, error.short) if part is not None]
    if not known:
        return UNTESTED_SPREAD, 2.0 * UNTESTED_SPREAD
    long = error.long.rms if error.long is not None else max(known)
    short = error.short.rms if error.short is not None else max(known)
    return max(floor, long), max(floor, short, long)
