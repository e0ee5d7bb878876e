"""The static pass: tasks one after the other, each after its resource, its dependencies and those it meets.

It goes by a topological order (`number`). Tasks of one program are numbered so already, as long as they wait for
nobody else. Where programs meet, every resource runs its line of tasks until one of them waits, and goes on when
what it waits for has run. A host is kept from running far ahead: that would be right as well, but whoever computes
in this order would have to remember the end of all that it issued.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from echograph.ir.columns import NONE, Int32, Int64
from echograph.simulator.engine.schedule import COMPILE_FROM, Starts, deadlock, effort, execute
from echograph.simulator.tasks import HOST, TaskGraph

if TYPE_CHECKING:
    from echograph.ir.columns import Float64
    from echograph.simulator.roles import Roles, StepRun


def simulate(roles: Roles) -> StepRun:
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
        order: of `number`.
        earliest: int64 [tasks], picoseconds before which tasks do not start, the same for tasks that meet; none if
            empty. What starts only then has no cause.
    """
    start, cause = np.zeros(len(tasks), np.int64), np.zeros(len(tasks), np.int64)
    execute(
        _pass,
        effort(tasks),
        (
            *(order, tasks.resource, tasks.duration, tasks.deps.offsets, tasks.deps.values),
            *(tasks.rendezvous, np.bincount(tasks.rendezvous[tasks.rendezvous != NONE], minlength=1), earliest),
        ),
        (start, cause, np.zeros(tasks.resources, np.int64), np.full(tasks.resources, NONE, np.int64)),
    )
    return Starts(start=start, cause=cause)


def finishes(tasks: TaskGraph, kind: Int32, factor: Float64) -> Int64:
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
    order: Any, resource: Any, duration: Any, offsets: Any, deps: Any, rendezvous: Any, members: Any,
    earliest: Any, start: Any, cause: Any, free: Any, last: Any,
) -> None:  # fmt: skip
    left, bound = 0, len(earliest) > 0
    for at in range(len(order)):
        task = order[at]
        on, met = resource[task], rendezvous[task]
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


WINDOW = 256
"""Tasks by which a host is ahead of its program at most, unless its streams wait for what it issues later."""


def number(tasks: TaskGraph) -> Int32:
    """Tasks in an order in which they can be computed; those that meet are neighbours.

    Raises:
        DeadlockError: tasks wait for each other for ever; names two of them.
    """
    order = np.arange(len(tasks), dtype=np.int32)
    if not tasks.has_rendezvous:
        return order
    line, bounds = _lines(tasks)
    members = np.bincount(tasks.rendezvous[tasks.rendezvous != NONE]).astype(np.int32)
    at = bounds[:-1].copy()
    hosts = tasks.lane[line[np.minimum(at, len(line) - 1)]] == HOST
    resources, meetings = np.zeros(tasks.resources, np.int32), np.zeros(len(members), np.int32)
    execute(
        _number,
        effort(tasks),
        (tasks.resource, tasks.deps.offsets, tasks.deps.values, tasks.rendezvous, members, line, bounds, hosts),
        (
            *(at, order, np.zeros(len(tasks), np.bool_), np.full(len(tasks), NONE, np.int32)),
            *(resources, meetings + NONE, meetings, resources.copy(), np.ones(tasks.resources, np.bool_)),
        ),
    )
    stuck = line[at[at < bounds[1:]]]
    if len(stuck):
        raise deadlock(stuck.tolist())
    return order


def _lines(tasks: TaskGraph) -> tuple[Int32, Int64]:
    """Tasks by resource, in the order in which it runs them, and where each resource's begin."""
    # Sorting by 16-bit keys takes linear time.
    key = tasks.resource.astype(np.uint16) if tasks.resources <= 2**16 else tasks.resource
    count = np.bincount(tasks.resource, minlength=tasks.resources)
    return np.argsort(key, kind="stable").astype(np.int32), np.concatenate([[0], np.cumsum(count)])


def _number(
    resource: Any, offsets: Any, deps: Any, rendezvous: Any, members: Any, line: Any, bounds: Any, hosts: Any,
    at: Any, order: Any, done: Any, waiter: Any, chain: Any, gate: Any, arrived: Any, stack: Any, idle: Any,
) -> None:  # fmt: skip
    """Fills `order`; `at` ends where each resource stands.

    Resources that wait for one task, or at one meeting, are a chain: `waiter` or `gate` its head, `chain` the
    next. Hosts that are ahead are idle until the streams can do no more.
    """
    count, before, top, window = 0, -1, 0, WINDOW
    while count > before or window < len(resource):
        if count == before:
            window = len(resource)
        before = count
        for on in range(len(at) - 1, -1, -1):
            if idle[on]:
                idle[on], stack[top] = False, on
                top += 1
        while top:
            on = stack[top - 1]
            if at[on] == bounds[on + 1]:
                top -= 1
                continue
            task, missing = line[at[on]], -1
            # The window's first task is an issue, the next one what it issued.
            if hosts[on] and task - window >= line[bounds[on]] and not done[task - window + 1]:
                idle[on] = True
                top -= 1
                continue
            for k in range(offsets[task], offsets[task + 1]):
                if not done[deps[k]]:
                    missing = deps[k]
                    break
            if missing >= 0:
                chain[on], waiter[missing] = waiter[missing], on
                top -= 1
                continue
            chain[on], met = -1, rendezvous[task]
            if met >= 0:
                arrived[met] += 1
                chain[on] = gate[met]
                if arrived[met] < members[met]:
                    gate[met] = on
                    top -= 1
                    continue
            first = on
            while on >= 0:
                task = line[at[on]]
                done[task], order[count] = True, task
                count += 1
                at[on] += 1
                if on != first:
                    stack[top] = on
                    top += 1
                woken = waiter[task]
                while woken >= 0:
                    stack[top] = woken
                    top += 1
                    woken = chain[woken]
                on = chain[on]
