"""The static pass: tasks one after the other, each after its resource, its dependencies and those it meets."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from echograph.ir.columns import NONE, Int32, Int64
from echograph.simulator.engine.loops import COMPILE_FROM, effort, execute
from echograph.simulator.engine.numbering import number
from echograph.simulator.engine.schedule import Starts
from echograph.simulator.tasks import TaskGraph

if TYPE_CHECKING:
    from echograph.simulator.engine.columns import Factors
    from echograph.simulator.roles import Roles
    from echograph.simulator.steps import Step


def simulate(roles: Roles) -> Step:
    """One step, task by task.

    Raises:
        DeadlockError: tasks wait for each other for ever.
    """
    return roles.run(run)


def run(tasks: TaskGraph) -> Starts:
    """Start times of all tasks.

    Raises:
        DeadlockError: tasks wait for each other for ever; names two of them.
    """
    return run_in_order(tasks, number(tasks), np.zeros(0, np.int64))


def run_in_order(tasks: TaskGraph, order: Int32, earliest: Int64) -> Starts:
    """Start times of all tasks, computed in an order that is known.

    Args:
        tasks: what to run.
        order: of `numbering.number`.
        earliest: int64 [tasks], picoseconds before which tasks do not start, the same for tasks that meet; none if
            empty. What starts only then has no cause.
    """
    start, cause = np.zeros(len(tasks), np.int64), np.zeros(len(tasks), np.int64)
    execute(
        _pass,
        effort(tasks),
        (
            *(order, tasks.resource, tasks.duration, tasks.deps.offsets, tasks.deps.values),
            *(tasks.join, np.bincount(tasks.join[tasks.join != NONE], minlength=1), earliest),
        ),
        (start, cause, np.zeros(tasks.resources, np.int64), np.full(tasks.resources, NONE, np.int64)),
    )
    return Starts(start=start, cause=cause)


def finishes(tasks: TaskGraph, kind: Int32, factor: Factors) -> Int64:
    """The end of the last task, picoseconds, in scenarios that differ in durations.

    Args:
        tasks: what to run in each of them.
        kind: int32 [tasks], the row of `factor` for each task.
        factor: float64 [kinds, scenarios]: durations are multiplied with it and rounded to the picosecond.

    Raises:
        DeadlockError: tasks wait for each other for ever.
    """
    if not len(tasks):
        return np.zeros(factor.shape[1], np.int64)
    if effort(tasks) * factor.shape[1] >= COMPILE_FROM:
        from echograph.simulator.engine import columns

        found = columns.run(tasks, number(tasks), columns.alone(tasks, kind, factor)).end
        latest: Int64 = found.max(axis=0)
        return latest
    ends = []
    for scenario in factor.T:
        duration = np.rint(tasks.duration * scenario[kind]).astype(np.int64)
        ends.append(int((run(replace(tasks, duration=duration)).start + duration).max()))
    return np.array(ends, np.int64)


def _pass(
    order: Any, resource: Any, duration: Any, offsets: Any, deps: Any, join: Any, members: Any, earliest: Any,
    start: Any, cause: Any, free: Any, last: Any,
) -> None:  # fmt: skip
    left, bound = 0, len(earliest) > 0
    for at in range(len(order)):
        task = order[at]
        on, met = resource[task], join[task]
        now, why = free[on], last[on]
        for k in range(offsets[task], offsets[task + 1]):
            end = start[deps[k]] + duration[deps[k]]
            if end > now:
                now, why = end, deps[k]
        if met < 0:
            if bound and now < earliest[task]:
                now, why = earliest[task], -1
            start[task], cause[task] = now, why
            free[on], last[on] = now + duration[task], task
            continue
        if left == 0:
            left, latest, reason, who = members[met], now, why, task
        if now > latest or (now == latest and task < who):
            latest, reason, who = now, why, task
        left -= 1
        if left == 0:
            if bound and latest < earliest[task]:
                latest, reason = earliest[task], -1
            for k in range(at - members[met] + 1, at + 1):
                task = order[k]
                on = resource[task]
                start[task], cause[task] = latest, reason
                free[on], last[on] = latest + duration[task], task
