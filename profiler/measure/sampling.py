"""Whole steps end to end, and how often to measure: until the mean is known well enough, or the time is up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist, fmean, median, stdev

from echograph.profiler.measure.device import MeasuringDevice
from echograph.progress import Progress, silent

PRECISION = 0.02
"""Half of the 95 % confidence interval of the mean, relative to it, at which sampling stops."""
MIN_SAMPLES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Seconds that were measured, in order."""

    seconds: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean, seconds."""
        return fmean(self.seconds)

    @property
    def median(self) -> float:
        """Median, seconds."""
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """Relative standard error (one sigma) of the mean; 0 of a single sample."""
        if len(self.seconds) < 2 or self.mean <= 0:
            return 0.0
        return stdev(self.seconds) / sqrt(len(self.seconds)) / self.mean

    @property
    def half_width(self) -> float:
        """Half of the 95 % confidence interval of the mean, relative to the mean."""
        return student(len(self.seconds) - 1) * self.spread if len(self.seconds) > 1 else float("inf")


def student(degrees: int) -> float:
    """Two-sided 95 % quantile of Student's t (Cornish-Fisher expansion; within 2 % from 4 degrees on)."""
    z = NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


def sample(
    run: Callable[[], float],
    *,
    max_samples: int,
    budget_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Samples:
    """Measures at least `MIN_SAMPLES` times, then until the mean is known, or the budget is spent.

    Args:
        run: one measurement, seconds.
        max_samples: enough.
        budget_s: seconds from now after which no further sample is begun.
        clock: what the budget is counted with.
    """
    end = clock() + budget_s
    seconds: list[float] = []
    checked = MIN_SAMPLES
    while len(seconds) < max_samples:
        seconds.append(run())
        if len(seconds) < min(MIN_SAMPLES, max_samples):
            continue
        if clock() >= end:
            break
        # Looking after every sample would stop early by chance, and cost as much as what is measured.
        if len(seconds) >= checked:
            if Samples(seconds=tuple(seconds)).half_width <= PRECISION:
                break
            checked = len(seconds) * 5 // 4 + 1
    return Samples(seconds=tuple(seconds))


def time_steps(
    step: Callable[[], None], device: MeasuringDevice, steps: int, warm_up: int, progress: Progress = silent
) -> Samples:
    """Runs a step `warm_up` + `steps` times; the seconds of the latter, host and device together.

    A step ends when the device is idle, so that it holds all of its work, and none of the one before.
    """
    seconds = []
    for number in range(warm_up + steps):
        progress("running steps", number + 1, warm_up + steps)
        device.synchronize()
        began = device.host_clock()
        step()
        device.synchronize()
        seconds.append(device.host_clock() - began)
    return Samples(seconds=tuple(seconds[warm_up:]))
