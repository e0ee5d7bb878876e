"""What a cost is: seconds, how far they may be off, and where they come from."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float64]
CostSource: TypeAlias = Literal["fitted", "analytical"]

SHORT_KERNEL_S = 20e-6
"""Below this a kernel is dominated by launch and drain, and its measurement by noise (seconds)."""


class CostEstimate(NamedTuple):
    """The predicted duration of one kernel, or of one per element of the shape arrays.

    Attributes:
        seconds: duration on the device, launch gap excluded.
        spread: relative one-sigma error of the model on rows that it had not seen.
        source: "fitted" on measurements of this device, or "analytical" (scaled or assumed).
    """

    seconds: float | FloatArray
    spread: float | FloatArray
    source: CostSource


def as_floats(*values: npt.ArrayLike) -> list[FloatArray]:
    """The values as float arrays of one common shape (0-d for scalars).

    Raises:
        ValueError: shapes do not broadcast, or a value is not positive.
    """
    arrays = np.broadcast_arrays(*(np.asarray(v, dtype=np.float64) for v in values))
    if any(np.any(~(a > 0)) for a in arrays):
        raise ValueError("every dimension of a kernel is a positive number")
    return [np.asarray(a) for a in arrays]


def make_cost(seconds: FloatArray, spread: float, spread_short: float, source: CostSource) -> CostEstimate:
    """A cost whose spread depends on the length of the kernel; 0-d arrays become floats."""
    wide = np.where(seconds < SHORT_KERNEL_S, spread_short, spread)
    if seconds.ndim == 0:
        return CostEstimate(float(seconds), float(wide), source)
    return CostEstimate(seconds, wide, source)


def widen(cost: CostEstimate, doubt: FloatArray) -> CostEstimate:
    """The cost with one more independent relative error."""
    spread = np.hypot(cost.spread, doubt)
    return cost._replace(spread=float(spread) if spread.ndim == 0 else spread)
