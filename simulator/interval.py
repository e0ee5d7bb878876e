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

from echograph.ir.columns import NONE, Float64, distinct
from echograph.ir.graph import JobGraph
from echograph.simulator.durations import Durations
from echograph.simulator.engine.static import run_columns
from echograph.simulator.host import IssueTimes
from echograph.simulator.limits import family_of

if TYPE_CHECKING:
    from echograph.simulator.engine import Roles, StepRun


NINETY_PERCENT = 1.645
"""Half-width of the central 90 % of a normal distribution, in standard deviations."""

MAX_TASKS = 200_000_000
"""Tasks of all scenarios together that are run one by one, about a second's; beyond, the critical path
stands for them."""


def interval(roles: Roles, step: StepRun) -> tuple[int, int]:
    """The central 90 % of the step time, picoseconds.

    Args:
        roles: durations with their relative standard errors, and the host with its own.
        step: with the durations as they are.
    """
    ends = step.scenario_ends
    if ends is None:
        ends = run_columns(roles.tasks, roles.columns).last[1:]
    if len(ends) < roles.factor.shape[1] - 1:
        path = step.write().critical_path()
        errors = _families(roles.job, roles.times, roles.host)[:, roles.columns.kind[path]]
        longer = shorter = float(((errors @ roles.tasks.duration[path]) ** 2).sum())
    else:
        moves = (ends - step.end_ps).reshape(2, -1).astype(np.float64)
        longer = float((np.maximum(0.0, moves[0]) ** 2).sum())
        shorter = float((np.maximum(0.0, -moves[1]) ** 2).sum())
    below, above = (round(NINETY_PERCENT * sqrt(variance)) for variance in (shorter, longer))
    return max(0, step.end_ps - below), step.end_ps + above


def scenarios(job: JobGraph, times: Durations, host: IssueTimes) -> Float64:
    """Factors on durations, the step's own, then those of families that take longer, then shorter.

    Returns:
        float64 [rows + 1, 1 + scenarios], the last row the host.
    """
    errors = _families(job, times, host)
    factors: Float64 = np.maximum(0.0, 1.0 + np.concatenate([np.zeros((1, errors.shape[1])), errors, -errors]).T)
    return factors


def _families(job: JobGraph, times: Durations, host: IssueTimes) -> np.ndarray:
    """For each family, the relative error of every operation and of the host, 0 for those of other families."""
    family = np.append(family_of(job)[0], NONE)
    spread = np.append(np.where(times.picoseconds > 0, times.spread, 0.0), 0.0)
    errors = [np.where(family == which, spread, 0.0) for which in distinct(family[spread > 0])]
    if host.spread and host.op_ps:
        errors.append(np.where(family == NONE, host.spread, 0.0))
    return np.array(errors).reshape(-1, len(family))
