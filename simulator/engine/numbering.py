"""The order in which tasks can be computed one after the other, each after all that it waits for.

Tasks of one program are numbered so already, as long as they wait for nobody else. Where programs meet, every
resource runs its line of tasks until one of them waits, and goes on when what it waits for has run. A host is kept
from running far ahead: that would be right as well, but whoever computes in this order would have to remember the
end of all that it issued.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from echograph.ir.columns import NONE, Int32, Int64
from echograph.simulator.engine.loops import effort, execute
from echograph.simulator.engine.schedule import deadlock
from echograph.simulator.tasks import HOST, TaskGraph

WINDOW = 256
"""Tasks by which a host is ahead of its program at most, unless its streams wait for what it issues later."""


def number(tasks: TaskGraph) -> Int32:
    """Tasks in an order in which they can be computed; those that meet are neighbours.

    Raises:
        DeadlockError: tasks wait for each other for ever; names two of them.
    """
    order = np.arange(len(tasks), dtype=np.int32)
    if not tasks.joined:
        return order
    line, bounds = _lines(tasks)
    members = np.bincount(tasks.join[tasks.join != NONE]).astype(np.int32)
    at = bounds[:-1].copy()
    hosts = tasks.lane[line[np.minimum(at, len(line) - 1)]] == HOST
    resources, meetings = np.zeros(tasks.resources, np.int32), np.zeros(len(members), np.int32)
    execute(
        _number,
        effort(tasks),
        (tasks.resource, tasks.deps.offsets, tasks.deps.values, tasks.join, members, line, bounds, hosts),
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
    resource: Any, offsets: Any, deps: Any, join: Any, members: Any, line: Any, bounds: Any, hosts: Any,
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
            chain[on], met = -1, join[task]
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
