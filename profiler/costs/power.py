"""The clock that a board's power leaves to a step that runs for long.

Tables time bursts of one kernel, at the clock that a cool board boosts to. A step runs for hours, and the board
lowers its clock until its mean power is within its limit. It takes some 100 ms to do so, so that all kernels of a
step have one clock: on an H200 a product of 1.4 ms is as fast beside copies, in turns of 1 to 64 kernels, as the
mean power of both allows, and at its full clock beside three copies, while alone it runs 18 % longer
(benchmarks/measured/h200_power.csv; docs/accuracy/power.md):

    volts(x)   = max(FLOOR, 1 - SLOPE (1 - x))              x: the clock, over that of a burst
    seconds(x) = core_s / x + other_s                       only what the clock paces grows
    watts(x)   = static + (core_J volts(x)^2 + bytes joules_per_byte) / seconds(x)
    core_J     = flops joules_per_flop, of kernels without tensor cores vector_W seconds

summed over the kernels of a rank's micro-batch, and x is the largest, of at most 1, whose watts are within the
limit. Above the floor power falls faster than the clock, below it at the same pace, which is why a low limit costs
much. While kernels wait for communication of their own layer (tensor-, context- and expert-parallel) the board is
at rest, which other_s counts: the clock is higher then. Of a collective itself the bytes that it reads and writes
are counted, and not the multiprocessors that it takes; nor are waits for other stages or at the end of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from echograph.ir.columns import Float64
from echograph.profiler.costs.device import PowerModel

FLOOR, SLOPE = 0.7, 0.58
"""The least voltage that a chip of these runs at, over the highest, which is assumed, and its fall with the clock:
told from loops of three products in bf16 on an H100 under 500 W, measured at 585, 575 and 546 TFLOP/s
(pytorch/FBGEMM, pull request 2546), for which the model says 567, 549 and 552. From what an H200 draws at 0.69 to
0.95 of its full clock the fall is 0.4 to 0.8 (benchmarks/measured/h200_power.csv)."""

PACED_OF_PRODUCTS = 0.6
"""Of a product's time what the clock paces: products of six shapes in bf16 ran 1.18 to 1.23 times longer alone
than with rests, at 0.73 to 0.77 of the clock of a burst, in FP8 1.21 to 1.22 times at 0.68 to 0.73, which is 0.46
to 0.66 (benchmarks/measured/h200_power.csv; a seventh, of 69 GFLOP, ran faster alone)."""

PACED_AT = 0.75
"""A product at this share of the peak, which the best ones reach, is paced as much; a slower one by less."""

SLOWEST = 0.05
HALVINGS = 40
BOUND_HALVINGS, BOUND_MARGIN = 16, 1e-6
"""Of clocks that are no more than bounds: 1.5e-5 is near enough; and what sums in another order may be off."""


def volts(clock: float) -> float:
    """The voltage of a clock; both over those of a burst."""
    return max(FLOOR, 1.0 - SLOPE * (1.0 - clock))


def sustained_clock(power: PowerModel, core_j: float, memory_j: float, core_s: float, other_s: float) -> float:
    """The clock that long runs of kernels settle at, over that of a burst.

    Args:
        power: of the device.
        core_j: energy of what the multiprocessors do, at full voltage.
        memory_j: energy of the bytes that move.
        core_s: time that the clock paces, in bursts.
        other_s: all other time.

    Returns:
        Above 0 and at most 1.
    """

    def within(clock: float) -> bool:
        seconds = core_s / clock + other_s
        return power.static_W * seconds + core_j * volts(clock) ** 2 + memory_j <= power.limit_W * seconds

    if core_s + other_s <= 0.0 or within(1.0):
        return 1.0
    low, high = SLOWEST, 1.0
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if within(middle) else (low, middle)
    return low


def highest_clock(power: PowerModel, spent: Float64, perhaps: Sequence[Float64] = ()) -> Float64:
    """[parts] A clock that long runs of kernels are not above, whatever else they spend.

    Args:
        power: of the device.
        spent: [4, parts], of what surely runs: joules of cores and of memory, and seconds that the clock paces, no
            more than there are; other seconds, no fewer.
        perhaps: [4, parts or 1] each, of what may run besides, or not.
    """
    every = [np.broadcast_to(its, spent.shape) for its in (spent, *perhaps)]
    core_j, memory_j, core_s, other_s = np.stack(every, axis=1)
    unused_W = power.static_W - power.limit_W
    paced_j, fixed_j = unused_W * core_s, unused_W * other_s + memory_j
    high = np.ones(spent.shape[1:])
    low = SLOWEST * high
    for _ in range(BOUND_HALVINGS):
        middle = 0.5 * (low + high)
        beyond = paced_j / middle + core_j * np.maximum(FLOOR, 1.0 - SLOPE * (1.0 - middle)) ** 2 + fixed_j
        above = beyond[0] + np.minimum(0.0, beyond[1:]).sum(axis=0) > 0.0
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return np.minimum(1.0, high * (1.0 + BOUND_MARGIN))


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
