"""How sure a step time is: what the errors of its durations do to it.

Each *family* of durations (one fit: matrix products, attention, ...) is made longer, and then shorter, by its own
standard error, and the step simulated again: errors inside a family move together, families apart. The longer
steps make the upper half of the interval, the shorter ones the lower: a host that is slower than thought may bind
the step, one that is faster changes nothing.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

from echograph.ir.columns import NONE, Float64, Int64, distinct
from echograph.ir.graph import JobGraph
from echograph.simulator.durations import Durations
from echograph.simulator.engine.static import finishes
from echograph.simulator.host import HostTimes
from echograph.simulator.limits import family_of
from echograph.simulator.tasks import DEVICE

if TYPE_CHECKING:
    from echograph.simulator.roles import Roles, StepRun


NINETY_PERCENT = 1.645
"""Half-width of the central 90 % of a normal distribution, in standard deviations."""

MAX_TASKS = 200_000_000
"""Tasks of all further simulations together that are run one by one, about a second's; beyond, the critical path
stands for them."""


def interval(roles: Roles, step: StepRun) -> tuple[int, int]:
    """The central 90 % of the step time, picoseconds.

    Args:
        roles: durations with their relative standard errors, and the host with its own.
        step: with the durations as they are.
    """
    if step.scenario_ends is not None:
        return _bounds(step.end_ps, step.scenario_ends)
    # A kind of task is an operation, or the host: it has one error.
    tasks, count = roles.tasks, len(roles.job.ops)
    kind = np.where(tasks.lane == DEVICE, tasks.op, count).astype(np.int32)
    if roles.factor.shape[1] * len(tasks) > MAX_TASKS:
        path = step.write().critical_path()
        moves = _families(roles.job, roles.times, roles.host)[:, kind[path]] @ tasks.duration[path]
        longer = shorter = float((moves**2).sum())
        return _around(step.end_ps, shorter, longer)
    return _bounds(step.end_ps, finishes(tasks, kind, roles.factor))


def scenarios(job: JobGraph, times: Durations, host: HostTimes) -> Float64:
    """Factors on durations, float64 [rows + 1, scenarios], last row the host: families longer, then shorter."""
    errors = _families(job, times, host)
    factors: Float64 = np.maximum(0.0, 1.0 + np.concatenate([errors, -errors]).T)
    return factors


def _bounds(step: int, ends: Int64) -> tuple[int, int]:
    """The central 90 % of a step time, picoseconds, from when the step ends in each of `scenarios`."""
    moves = (ends - step).reshape(2, -1).astype(np.float64)
    longer = float((np.maximum(0.0, moves[0]) ** 2).sum())
    shorter = float((np.maximum(0.0, -moves[1]) ** 2).sum())
    return _around(step, shorter, longer)


def _around(step: int, shorter: float, longer: float) -> tuple[int, int]:
    return max(0, step - round(NINETY_PERCENT * sqrt(shorter))), step + round(NINETY_PERCENT * sqrt(longer))


def _families(job: JobGraph, times: Durations, host: HostTimes) -> np.ndarray:
    """For each family, the relative error of every operation and of the host, 0 for those of other families."""
    family = np.append(family_of(job)[0], NONE)
    spread = np.append(np.where(times.picoseconds > 0, times.spread, 0.0), 0.0)
    errors = [np.where(family == which, spread, 0.0) for which in distinct(family[spread > 0])]
    if host.spread and host.op_ps:
        errors.append(np.where(family == NONE, host.spread, 0.0))
    return np.array(errors).reshape(-1, len(family))
