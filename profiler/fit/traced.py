"""Corrections of a device's kernel costs, by kind, from kernels that a trace shows; never from steps.

A kernel is a kind (`kernel_key`) with what the models say that it takes. How much longer it took is a function of
that, constant where few kernels of a kind are known: the medians of up to four groups of equal number. A kind is
corrected only if that helps on kernels that the fit did not see: one half of the kernels judges the fit of the
other half, and the other way round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np

from echograph.profiler.costs.device import DeviceProfile, FitError, FloatArray, HeldOut, Label, TracedKernels

MOST_KNOTS, PER_KNOT = 4, 3
FEWEST = 4
"""Distinct kernels of a kind from which on a half can judge the other."""
LEAST_GAIN = 0.01
"""By which the median error on kernels held out becomes smaller at least: less is the trace's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedKernel:
    """A call of a kernel as it was measured.

    Attributes:
        key: of its kind.
        predicted_s: seconds that the models say.
        measured_s: seconds that it took.
    """

    key: str
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KindFit:
    """How a kind of kernel was corrected.

    Attributes:
        key: of the kind.
        kernels: distinct ones.
        before: median error of the models on kernels held out, relative to what was measured.
        after: that with the correction that the other half gives.
        kernels_s: seconds that all its calls took.
        correction: the correction by all kernels; None where it does not help or there are too few to tell.
    """

    key: str
    kernels: int
    before: float
    after: float
    kernels_s: float
    correction: TracedKernels | None


def fit_traced(calls: Iterable[TracedKernel], basis: str) -> list[KindFit]:
    """Corrections of kinds of kernels, those first whose calls took longest.

    Args:
        calls: measured calls; those of one kind with one prediction are one kernel, which took their median.
        basis: what the corrections rest on, for their labels.
    """
    of: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for call in calls:
        if call.predicted_s > 0 and call.measured_s > 0:
            of[call.key][call.predicted_s].append(call.measured_s)
    found = [_fit_kind(key, kernels, basis) for key, kernels in of.items()]
    return sorted(found, key=lambda fit: -fit.kernels_s)


def _fit_kind(key: str, kernels: dict[float, list[float]], basis: str) -> KindFit:
    predicted = np.array(sorted(kernels))
    measured = np.array([np.median(kernels[one]) for one in predicted.tolist()])
    took = sum(sum(times) for times in kernels.values())
    ratio = np.log(measured / predicted)
    held = np.zeros(len(predicted))
    for half in (0, 1):
        seen = np.arange(len(predicted)) % 2 == half
        if seen.any() and not seen.all():
            held[~seen] = _interpolated(_knots(predicted[seen], ratio[seen]), predicted[~seen])
    before, after = (float(np.median(np.abs(np.expm1(given - ratio)))) for given in (np.zeros(len(ratio)), held))
    correction = None
    if len(predicted) >= FEWEST and before - after >= LEAST_GAIN:
        at, log_factor = _knots(predicted, ratio)
        correction = TracedKernels(
            label=_label(held - ratio, basis), predicted_s=at.tolist(), factor=np.exp(log_factor).tolist()
        )
    return KindFit(
        key=key, kernels=len(predicted), before=before, after=after, kernels_s=took, correction=correction
    )


def _knots(predicted: FloatArray, ratio: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Where the correction is known, and its logarithm there: medians of groups of neighbours."""
    groups = min(MOST_KNOTS, max(1, len(predicted) // PER_KNOT))
    cuts = np.linspace(0, len(predicted), groups + 1).round().astype(int)
    spans = [slice(low, high) for low, high in pairwise(cuts.tolist())]
    at = np.array([np.median(predicted[span]) for span in spans])
    return at, np.array([np.median(ratio[span]) for span in spans])


def _interpolated(knots: tuple[FloatArray, FloatArray], predicted: FloatArray) -> FloatArray:
    return np.interp(np.log(predicted), np.log(knots[0]), knots[1])


def _label(error: FloatArray, basis: str) -> Label:
    """Where a correction comes from, and its errors on kernels that it was not made of."""
    relative = np.expm1(error)
    held = FitError(
        rows=len(error),
        median_abs=float(np.median(np.abs(relative))),
        mean_abs=float(np.mean(np.abs(relative))),
        bias=float(np.mean(relative)),
        rms=float(np.sqrt(np.mean(relative**2))),
    )
    # The spread of most: a few kernels of another library are no measure of the others.
    spread = min(10.0, float(1.4826 * np.median(np.abs(error))) + 0.01)
    return Label(source="fitted", basis=basis, spread=spread, spread_short=spread, held_out=HeldOut(long=held))


def with_traced(device: DeviceProfile, fits: Sequence[KindFit]) -> DeviceProfile:
    """A device whose kinds are corrected; earlier corrections of other kinds stay."""
    known = dict(device.traced or {})
    known |= {fit.key: fit.correction for fit in fits if fit.correction is not None}
    return msgspec.structs.replace(device, traced=known)
