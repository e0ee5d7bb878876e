"""Fits a fabric's latencies and bandwidths to measured collectives.

What predicts is passed in, so this knows nothing of algorithms: `predict` maps parameters (dotted name -> positive
number) to the seconds of every row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echograph.errors import DataError
from echograph.profiler.fit.collectives import CollectiveRow

Predict = Callable[[Mapping[str, float]], NDArray[np.float64]]
Vector = NDArray[np.float64]

OUTLIER_LOG = 0.05
DIFFERENCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricFit:
    """Parameters that fit, and how well.

    Args:
        parameters: dotted name -> value.
        error: mean absolute relative error on the rows fitted, by collective.
        undetermined: parameters that the rows hardly constrain, so that they stay near where they started.
    """

    parameters: dict[str, float]
    error: dict[str, float]
    undetermined: tuple[str, ...]


def fit_fabric(
    rows: Sequence[CollectiveRow],
    predict: Predict,
    start: Mapping[str, float],
    *,
    upper: Mapping[str, float] | None = None,
    prior_log: float = 1.0,
    iterations: int = 60,
) -> FabricFit:
    """Least squares in the logarithm of time, robust against outliers, over the logarithms of the parameters.

    Levenberg-Marquardt (Marquardt 1963) with the soft-L1 loss as iteratively reweighted squares: a row that is
    off by more than 5 % weighs less. A weak prior, worth one row that is off by 5 % when a parameter moves by a
    factor e, keeps at their start the parameters that no row speaks of.

    Args:
        rows: measured collectives.
        predict: parameters -> seconds of each row, in the rows' order.
        start: first guess, every value above 0.
        upper: largest value a parameter may take, by the last part of its name ("efficiency": 1.05).
        prior_log: width of the prior in natural logarithms.
        iterations: most steps.

    Raises:
        DataError: no rows, a time or a start that is not above 0, or predictions of another length.
    """
    names = list(start)
    measured = np.array([row.seconds for row in rows])
    first = np.array([start[name] for name in names], dtype=np.float64)
    if not len(rows) or measured.min() <= 0:
        raise DataError("fit: needs rows whose times are all above 0")
    if first.min() <= 0:
        raise DataError(f"fit: start of {names[int(first.argmin())]} is not above 0")
    limits = np.array([(upper or {}).get(name.rsplit(".", 1)[-1], np.inf) for name in names])

    def residuals(x: Vector) -> Vector:
        seconds = predict(dict(zip(names, np.exp(x).tolist(), strict=True)))
        if seconds.shape != measured.shape:
            raise DataError(f"fit: {len(seconds)} predictions for {len(rows)} rows")
        return np.asarray(np.log(seconds / measured))

    origin, ceiling = np.log(first), np.log(limits)
    x, jacobian = _minimise(residuals, np.minimum(origin, ceiling), origin, ceiling, prior_log, iterations)
    ratio = np.exp(residuals(x))
    moved = np.sum(jacobian**2, axis=0) * prior_log**2
    return FabricFit(
        parameters=dict(zip(names, np.exp(x).tolist(), strict=True)),
        error=error_by_kind(rows, ratio * measured),
        undetermined=tuple(name for name, weight in zip(names, moved, strict=True) if weight < 1),
    )


def error_by_kind(rows: Sequence[CollectiveRow], seconds: Vector) -> dict[str, float]:
    """Mean absolute relative error by collective.

    Args:
        rows: measured collectives.
        seconds: predicted, in the rows' order.
    """
    off = np.abs(seconds / np.array([row.seconds for row in rows]) - 1)
    kinds = sorted({row.kind for row in rows})
    return {kind: float(off[[row.kind == kind for row in rows]].mean()) for kind in kinds}


def size_fold(row: CollectiveRow, folds: int = 4) -> int:
    """The fold that a row is in, from 0: whole sizes share one, by a hash of the size in bytes.

    A fit judged on sizes it never saw cannot have learned a table.
    """
    digest = hashlib.sha256(str(int(row.size_bytes)).encode()).digest()
    return int.from_bytes(digest[:8], "big") % folds


def _minimise(
    residuals: Callable[[Vector], Vector],
    x: Vector,
    origin: Vector,
    ceiling: Vector,
    prior_log: float,
    iterations: int,
) -> tuple[Vector, NDArray[np.float64]]:
    """Levenberg-Marquardt on soft-L1; returns the point and the Jacobian of the residuals there."""

    def loss(r: Vector, x: Vector) -> float:
        data = 2 * np.sum(np.sqrt(1 + (r / OUTLIER_LOG) ** 2) - 1)
        return float(data + np.sum(((x - origin) / prior_log) ** 2))

    damping, r = 1e-2, residuals(x)
    jacobian = _jacobian(residuals, x, r)
    for _ in range(iterations):
        weight = 1 / (OUTLIER_LOG**2 * np.sqrt(1 + (r / OUTLIER_LOG) ** 2))
        normal = jacobian.T @ (weight[:, None] * jacobian) + np.eye(len(x)) / prior_log**2
        gradient = jacobian.T @ (weight * r) + (x - origin) / prior_log**2
        before = loss(r, x)
        while damping < 1e8:
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
            trial = np.minimum(x + np.clip(step, -1, 1), ceiling)
            trial_r = residuals(trial)
            if loss(trial_r, trial) < before:
                break
            damping *= 4
        else:
            break
        x, r, damping = trial, trial_r, max(damping / 8, 1e-9)
        jacobian = _jacobian(residuals, x, r)
        if before - loss(r, x) < 1e-6 * before:
            break
    return x, jacobian


def _jacobian(residuals: Callable[[Vector], Vector], x: Vector, r: Vector) -> NDArray[np.float64]:
    columns = []
    for i in range(len(x)):
        moved = x.copy()
        # Backwards, so that a parameter at its ceiling stays legal.
        moved[i] -= DIFFERENCE
        columns.append((r - residuals(moved)) / DIFFERENCE)
    return np.stack(columns, axis=1)
