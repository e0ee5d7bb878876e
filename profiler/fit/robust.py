"""The one way every physical model is fitted: robust, deterministic least squares on log time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from echograph.errors import MissingExtraError
from echograph.profiler.costs.cost import SHORT_KERNEL_S, FloatArray

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


def weights(seconds: FloatArray) -> FloatArray:
    """One for long kernels, less for those whose time is mostly launch and timer noise."""
    return np.clip(seconds / SHORT_KERNEL_S, 0.2, 1.0)


def subsample(rows: int, limit: int = MAX_ROWS) -> npt.NDArray[np.intp]:
    """A fixed choice of at most `limit` rows: thirty parameters do not need more."""
    if rows <= limit:
        return np.arange(rows)
    return np.sort(np.random.default_rng(0).permutation(rows)[:limit])


def sigmoid(x: float | FloatArray) -> FloatArray:
    """Maps the real line to (0, 1)."""
    return np.asarray(1.0 / (1.0 + np.exp(-np.asarray(x))))


def logit(x: float | FloatArray) -> FloatArray:
    """The inverse of `sigmoid`."""
    return np.asarray(np.log(np.asarray(x) / (1.0 - np.asarray(x))))
