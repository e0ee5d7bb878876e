"""The clock that a board's power leaves to a step that runs for long.

Tables time bursts of one kernel, at the clock that a cool board boosts to. A step runs for hours, and the board
lowers its clock until its power is within its limit. Each kernel is taken to have a clock of its own, the slower
of two limits; boards take some 50 to 100 ms to lower it, so that one for a step is nearer to what they do, but
makes steps come out short (docs/accuracy.md, "Choices made while looking"):

    volts(x)   = max(FLOOR, 1 - SLOPE (1 - x))              x: the clock, over that of a burst
    seconds(x) = core_s / x + other_s                       only what the clock paces grows
    watts(x)   = static + (flops joules_per_flop volts(x)^2 + bytes joules_per_byte) / seconds(x)

and x is the largest, of at most 1, whose watts are within the limit. Above the floor power falls faster than the
clock, below it at the same pace, which is why a low limit costs much.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from echograph.ir.columns import Bools, Float64
from echograph.profiler.costs.device import PowerModel

FLOOR, SLOPE = 0.7, 0.58
"""The least voltage that a chip of these runs at, over the highest, which is assumed, and its fall with the clock:
with it an H100 that sustains 675 TFLOP/s in bf16 under 700 W has 560 under 500 W on three products, where loops of
them were measured at 585, 575 and 546 (pytorch/FBGEMM, pull request 2546)."""

SLOWEST = 0.05
HALVINGS = 40


def volts(clock: Float64) -> Float64:
    """The voltage of a clock; both over those of a burst."""
    return np.maximum(FLOOR, 1.0 - SLOPE * (1.0 - clock))


def sustained_clock(
    power: PowerModel, core_j: Float64, memory_j: Float64, core_s: Float64, other_s: Float64
) -> Float64:
    """The clocks that long runs of kernels settle at, over that of a burst.

    Args:
        power: of the device.
        core_j: [kernels] energy of a kernel's FLOPs at full voltage.
        memory_j: [kernels] energy of its bytes.
        core_s: [kernels] time that the clock paces, in bursts.
        other_s: [kernels] all other time of it.

    Returns:
        [kernels], above 0 and at most 1.
    """

    def within(clock: Float64) -> Bools:
        seconds = core_s / clock + other_s
        drawn: Bools = power.static_W * seconds + core_j * volts(clock) ** 2 + memory_j <= power.limit_W * seconds
        return drawn

    low, high = np.full(core_s.shape, SLOWEST), np.ones(core_s.shape)
    at_full = within(high) | (core_s + other_s <= 0.0)
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        fits = within(middle)
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    return np.where(at_full, 1.0, low)


def slowest_of(boards: int, spread: float) -> float:
    """How much longer the slowest of so many boards takes than a typical one, where the clock sets the pace.

    Boards of one model differ in the clock that their power allows: their speeds are taken as normal, and the
    slowest as it is expected to be (Blom 1958, Statistical Estimates and Transformed Beta-Variables, section 6.9).

    Args:
        boards: those of a job, all of which a step waits for.
        spread: standard deviation of the time that one takes, over the mean.

    Returns:
        A factor of at least 1, and 1 of a single board.
    """
    return 1.0 + spread * NormalDist().inv_cdf((boards - 0.375) / (boards + 0.25))
