"""The clock that a board's power leaves to a step that runs for long.

Tables time bursts of one kernel, at the clock that a cool board boosts to. A step runs for hours, and the board
lowers its clock until the power over some milliseconds, many kernels, is within its limit:

    volts(x)   = max(FLOOR, 1 - SLOPE (1 - x))              x: the clock, over that of a burst
    seconds(x) = core_s / x + other_s                       only what the clock paces grows
    watts(x)   = static + (flops joules_per_flop volts(x)^2 + bytes joules_per_byte) / seconds(x)

and x is the largest, of at most 1, whose watts are within the limit. Above the floor power falls faster than the
clock, below it at the same pace, which is why a low limit costs much.
"""

from __future__ import annotations

from statistics import NormalDist

from echograph.profiler.costs.device import PowerModel

FLOOR, SLOPE = 0.7, 0.75
"""Assumed: the least voltage that a chip of these runs at, over the highest, and its fall with the clock."""

SLOWEST = 0.05
HALVINGS = 40


def volts(clock: float) -> float:
    """The voltage of a clock; both over those of a burst."""
    return max(FLOOR, 1.0 - SLOPE * (1.0 - clock))


def sustained_clock(power: PowerModel, core_j: float, memory_j: float, core_s: float, other_s: float) -> float:
    """The clock that a long run settles at, over that of a burst.

    Args:
        power: of the device.
        core_j: energy of all FLOPs at full voltage.
        memory_j: energy of all bytes.
        core_s: time that the clock paces, in bursts.
        other_s: all other time of the device.
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
