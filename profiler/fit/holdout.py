"""Which rows a fit may see, and how wrong it is on the others.

A row is held out by a hash of its shape alone, so that one shape measured twice, or by two sources, falls on one
side as a whole; the same shape is held out on every device.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from echograph.profiler.costs.cost import SHORT_KERNEL_S, FloatArray
from echograph.profiler.costs.device import FitError, HeldOut

ONE_IN = 5
DESCRIPTION = "one shape in five, by blake2b of its sizes; duplicates of a shape stay together"


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


UNTESTED_SPREAD = 0.15
"""Assumed one-sigma error of a fit to so few rows that none fell on the held-out side."""


def spreads(error: HeldOut, floor: float = 0.01) -> tuple[float, float]:
    """The (long, short) one-sigma spread of a fit; where one kind has no rows, the other's stands in."""
    known = [part.rms for part in (error.long, error.short) if part is not None]
    if not known:
        return UNTESTED_SPREAD, 2.0 * UNTESTED_SPREAD
    long = error.long.rms if error.long is not None else max(known)
    short = error.short.rms if error.short is not None else max(known)
    return max(floor, long), max(floor, short, long)
