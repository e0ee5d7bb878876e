"""The event loop, compiled.

A line is a resource in a column: it runs the tasks of the resource one after the other. It waits for a task (it
then stands in a chain at the line that runs that task), or at a meeting for the other members (a chain at the
first that came), or for the end of its activity. An activity is a task, or the tasks that meet, in the order in
which they end; the first leads it, and stands in the heap.
"""

from __future__ import annotations

import hashlib
import inspect
from typing import Any

import numpy as np

from echograph.simulator.engine import columns, events_heap, events_rates
from echograph.simulator.engine.columns import _NORMAL
from echograph.simulator.engine.events_heap import (
    CHANGED,
    DUE,
    LONGEST,
    NODES,
    NOW,
    OPTIONS,
    SIZE,
    VACANT,
    Part,
    part,
    push,
    settle,
)
from echograph.simulator.engine.events_rates import begin, end, ends, share
from echograph.simulator.engine.machine_code import kept

DONE = 2**31 - 1
"""In place of a task: there is none any more."""
TASK = np.dtype(
    [
        *(("duration", "i8"), ("deps", "i8"), ("load", "f8"), ("start", "i8")),
        *((name, "i4") for name in ("resource", "after", "join", "fellow", "row", "route", "kind", "steady")),
    ],
    align=True,
)
"""`deps`: where the dependencies begin. `after`: the next task of the resource. `fellow`: the next of those that
meet, in a circle. `row`: of the places. `steady`: 2 takes its duration, 1 times the factor of its `kind`, 0 and
noise. `start`: in the recorded column."""
LINE = np.dtype(
    [
        *(("need", "i8"), ("duration", "i8"), ("since", "i8"), ("waited", "i8")),
        *((name, "i4") for name in ("task", "column", "chain", "waiters", "meets", "place", "missing", "next")),
    ],
    align=True,
)
"""`need`: the dependency waited for, or the first not looked at. `duration`: of its task. `since`: when ready, or
when all was done. `waiters`: the chain of lines that wait for a task of this one. For the first at a meeting: what
it `meets` for and in which `place`, how many are `missing`, and the `next` in the table of meetings."""


def _sources() -> str:
    """What changes with the sources of `run`: of them, the cache of compiled code knows this file alone."""
    code = "".join(inspect.getsource(module) for module in (columns, events_heap, events_rates))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


END = np.dtype([("time", "i8"), ("item", "i4"), (f"of_{_sources()}", "i4")])
"""A place of the heap. Its type tells compiled code of other sources apart."""


def _kept(function: Part) -> Part:
    """Compiles a function, or takes it from disk."""
    return kept(function, **OPTIONS)


@_kept
def chain(tasks: Any, first: Any, joins: Any) -> None:
    """Fills `after` and `fellow` of all tasks, and the first task of each resource.

    Args:
        tasks: tasks, with an end mark.
        first: int32 [resources], `DONE`.
        joins: int32 [2, joins], -1: of each the first task and the last.
    """
    for task in range(len(tasks) - 2, -1, -1):
        this = tasks[task]
        this.after, first[this.resource] = first[this.resource], task
        this.fellow = task
        met = this.join
        if met >= 0:
            if joins[0, met] < 0:
                joins[1, met] = task
            else:
                this.fellow = joins[0, met]
            joins[0, met] = tasks[joins[1, met]].fellow = task


@_kept
def run(
    tasks: Any, deps: Any, factor: Any, places: Any, attend: Any, jitter: Any, seed: Any, record: Any, lasted: Any,
    lines: Any, meetings: Any, todo: Any, heap: Any, count: Any,
    routed: Any, routes: Any, hops: Any, links: Any, flows: Any, changed: Any, near: Any, fellows: Any,
    nodes: Any,
) -> Any:  # fmt: skip
    """Runs until nothing is left that would end; or returns False, to be called again with more nodes."""
    now = count[NOW]
    while True:
        while count[DUE]:
            if count[NODES] + count[LONGEST] > len(nodes):
                count[NOW] = now
                return False
            count[DUE] -= 1
            number = todo[count[DUE]]
            leader = _ready(tasks, deps, places, attend, lines, meetings, now, number)
            if leader < 0:
                continue
            task = tasks[lines[leader].task]
            if task.join >= 0 or task.row >= 0:
                leader, longest, route, load, place = _gather(
                    tasks, factor, places, jitter, seed, record, lines, fellows, now, leader
                )
            else:
                line = lines[leader]
                line.duration = longest = _lasts(tasks, factor, jitter, seed, line.task, line.column)
                route, load, place = task.route, task.load, line.column
                if line.column == record:
                    task.start = now
            if lines[leader].duration == 0:
                leader = _finish(tasks, deps, record, lasted, lines, todo, count, now, leader)
                if leader < 0:
                    continue
            left = lines[leader].duration
            row = routed[route, place] if route >= 0 and load > 0 else -1
            if row >= 0:
                begin(
                    routes, hops, links, flows, nodes, changed, heap, count, now, leader, row, load, left, longest
                )
            else:
                push(heap, flows, count, now + left, leader)
        settle(heap, flows, count)
        if count[SIZE] and heap[0].time == now:
            item = heap[0].item
            count[VACANT] = 1
            if item < 0 and ends(flows[~item]) > now:
                push(heap, flows, count, ends(flows[~item]), item)
                continue
            line = item if item >= 0 else flows[~item].line
            duration = lines[line].duration
            leader = _finish(tasks, deps, record, lasted, lines, todo, count, now, line)
            if leader >= 0:
                left = lines[leader].duration - duration
                if item < 0:
                    flow = flows[~item]
                    flow.left, flow.over, flow.since, flow.line = left, 0.0, now, leader
                    left, leader = ends(flow) - now, item
                push(heap, flows, count, now + left, leader)
            elif item < 0:
                end(routes, hops, links, flows, nodes, changed, count, ~item)
        elif count[CHANGED]:
            if not share(routes, hops, links, flows, nodes, changed, near, fellows, heap, count, now):
                count[NOW] = now
                return False
        elif count[SIZE]:
            now = heap[0].time
        else:
            return True


@part
def _ready(
    tasks: Any, deps: Any, places: Any, attend: Any, lines: Any, meetings: Any, now: Any, number: Any
) -> Any:
    """Has a line wait, or returns who leads the activity that begins."""
    line = lines[number]
    task = tasks[line.task]
    base = number - task.resource
    for need in range(line.need, tasks[line.task + 1].deps):
        other = lines[base + tasks[deps[need]].resource]
        if other.task <= deps[need]:
            line.need = need
            line.chain, other.waiters = other.waiters, number
            return -1
    line.since, line.chain = now, -1
    if task.join < 0 and task.row < 0:
        return number
    place = line.column if task.row < 0 else places[task.row, line.column]
    what = task.join if task.join >= 0 else len(tasks) + line.task
    key = np.uint64(what) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(place) * np.uint64(0xD1342543DE82EF95)
    slot = np.int64((key ^ (key >> np.uint64(32))) & np.uint64(len(meetings) - 1))
    before, leader = -1, meetings[slot]
    while leader >= 0 and (lines[leader].meets != what or lines[leader].place != place):
        before, leader = leader, lines[leader].next
    if leader < 0:
        line.missing = _attendance(tasks, attend, line.task, place) - 1
        if line.missing:
            line.meets, line.place = what, place
            line.next, meetings[slot] = meetings[slot], number
            return -1
        return number
    first = lines[leader]
    line.chain, first.chain = first.chain, number
    first.missing -= 1
    if first.missing:
        return -1
    if before >= 0:
        lines[before].next = first.next
    else:
        meetings[slot] = first.next
    return leader


@part
def _attendance(tasks: Any, attend: Any, task: Any, place: Any) -> Any:
    """How many lines meet in a place."""
    count, member = 0, task
    while True:
        count += attend[tasks[member].row, place] if tasks[member].row >= 0 else 1
        member = tasks[member].fellow
        if member == task:
            return count


@part
def _gather(
    tasks: Any, factor: Any, places: Any, jitter: Any, seed: Any, record: Any, lines: Any, fellows: Any,
    now: Any, leader: Any,
) -> Any:  # fmt: skip
    """Begins a meeting: puts its members into the order in which they end, and finds whose route it takes."""
    lowest, longest, equal, member, count = DONE, np.int64(0), True, leader, 0
    while member >= 0:
        line = lines[member]
        task = tasks[line.task]
        line.duration = _lasts(tasks, factor, jitter, seed, line.task, line.column)
        if line.column == record:
            task.start = now
        if task.join < 0:
            line.waited += now - line.since
        if task.route >= 0:
            lowest = min(lowest, line.task)
        longest = max(longest, line.duration)
        equal &= line.duration == lines[leader].duration
        member = line.chain
        count += 1
    one = lines[leader]
    row = tasks[one.task].row
    place = places[row, one.column] if row >= 0 else one.column
    if not equal:
        leader = _sort(lines, leader, count, fellows)
    if lowest == DONE:
        return leader, longest, np.int32(-1), 0.0, place
    return leader, longest, tasks[lowest].route, tasks[lowest].load, place


@part
def _sort(lines: Any, leader: Any, count: Any, fellows: Any) -> Any:
    """Puts the members of a meeting in the order of their durations, and returns the first.

    Merges runs of doubling width, from one row of `fellows` to the other.
    """
    for k in range(count):
        fellows[0, k] = leader
        leader = lines[leader].chain
    width, row = 1, 0
    while width < count:
        for first in range(0, count, 2 * width):
            middle, last = min(first + width, count), min(first + 2 * width, count)
            one, other = first, middle
            for k in range(first, last):
                if other == last:
                    from_one = True
                elif one == middle:
                    from_one = False
                else:
                    from_one = lines[fellows[row, one]].duration <= lines[fellows[row, other]].duration
                fellows[1 - row, k] = fellows[row, one if from_one else other]
                one += from_one
                other += not from_one
        width, row = 2 * width, 1 - row
    for k in range(count):
        lines[fellows[row, k]].chain = fellows[row, k + 1] if k + 1 < count else -1
    return fellows[row, 0]


@part
def _lasts(tasks: Any, factor: Any, jitter: Any, seed: Any, task: Any, column: Any) -> Any:
    this = tasks[task]
    if this.steady == 2:
        return this.duration
    noise = 1.0 if this.steady else max(0.0, 1.0 + jitter * _NORMAL(seed, task, column))
    return np.int64(np.rint(this.duration * factor[this.kind, column] * noise))


@part
def _finish(
    tasks: Any, deps: Any, record: Any, lasted: Any, lines: Any, todo: Any, count: Any, now: Any, leader: Any
) -> Any:
    """Ends the tasks of an activity that take no longer than the leader's; returns the next leader, or -1.

    Their lines, and those that wait for these tasks, may go on.
    """
    duration, member, top = lines[leader].duration, leader, count[DUE]
    while member >= 0 and lines[member].duration == duration:
        line, number = lines[member], member
        member, task = line.chain, line.task
        if line.column == record:
            lasted[task] = now - tasks[task].start
        line.task = tasks[task].after
        if line.task == DONE:
            line.since = now
        else:
            line.need = tasks[line.task].deps
            todo[top] = number
            top += 1
        waiter, line.waiters = line.waiters, -1
        while waiter >= 0:
            other, this = lines[waiter], waiter
            waiter = other.chain
            if deps[other.need] == task:
                todo[top] = this
                top += 1
            else:
                other.chain, line.waiters = line.waiters, this
    count[DUE] = top
    return member
