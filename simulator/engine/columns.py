"""Many runs of one task graph side by side: the same pass as `static`, with a row of clocks for every resource.

A column is a rank, or a scenario: its tasks are those of all others, its durations its own. Columns may meet, as
the ranks of a role do in a collective. What is waited for lies in the order of `static.number`, which holds for
every column, since whoever waits in a column waits in the task graph. Of all ends only those that a later task
reads are remembered, so memory does not grow with the number of tasks times the columns.

Compiled only: import it where there is much to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from echograph.ir.columns import NONE, Float64, Int32, Int64
from echograph.simulator.engine.machine_code import kept
from echograph.simulator.tasks import DEVICE, TaskGraph


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """What columns have of their own.

    Attributes:
        kind: int32 [tasks], the row of `factor` for each task.
        factor: float64 [kinds, columns]: durations are multiplied with it and rounded to the picosecond.
        place: int32 [tasks], the row of `places` for each task; -1 where a column meets its like alone, or nobody.
        places: int32 [rows, columns]: where a column goes to meet, from 0 to columns - 1. All that are in one
            place start together, be they of one task or of those it meets.
        jitter: relative standard deviation of each duration of a stream that nobody is waited for in.
        seed: of the jitter.
    """

    kind: Int32
    factor: Float64
    place: Int32
    places: Int32
    jitter: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ends:
    """When columns end.

    Attributes:
        end: int64 [resources, columns], picoseconds, when each resource ends its last task.
        waited: int64 [resources, columns], picoseconds that a resource was ready and its like in other columns
            were not.
        start: int64 [tasks], when the tasks of the recorded column start; empty where none was recorded.
        duration: int64 [tasks], how long they take.
    """

    end: Int64
    waited: Int64
    start: Int64
    duration: Int64


def alone(tasks: TaskGraph, kind: Int32, factor: Float64) -> Columns:
    """Columns that never wait for each other."""
    columns = factor.shape[1]
    return Columns(
        kind=kind,
        factor=factor,
        place=np.full(len(tasks), NONE, np.int32),
        places=np.zeros((1, columns), np.int32),
    )


def run(tasks: TaskGraph, order: Int32, columns: Columns, record: int = NONE) -> Ends:
    """Runs all columns.

    Args:
        tasks: what each of them does.
        order: an order in which tasks can be computed, of `static.number`.
        columns: how they differ.
        record: the column whose start times are wanted; -1 for none.
    """
    # One layout and one type each, or the compiler would start again.
    factor = np.ascontiguousarray(columns.factor, np.float64)
    count = factor.shape[1]
    kind, place, places, deps = (
        np.ascontiguousarray(values, np.int32)
        for values in (columns.kind, columns.place, columns.places, tasks.deps.values)
    )
    slot = np.full(len(tasks), NONE, np.int32)
    uses = np.bincount(deps, minlength=len(tasks)).astype(np.int32)
    slots = int(_SLOTS(order, tasks.deps.offsets, deps, uses, slot))
    end, waited = (np.zeros((tasks.resources, count), np.int64) for _ in range(2))
    start, duration = (np.zeros(len(tasks) if record >= 0 else 0, np.int64) for _ in range(2))
    members = np.bincount(tasks.rendezvous[tasks.rendezvous != NONE], minlength=1).astype(np.int32)
    same = (factor == 1.0).all(axis=1)
    varies = (tasks.lane == DEVICE) & (tasks.rendezvous == NONE) & (place == NONE) & (columns.jitter > 0)
    _SWEEP(
        *(order, tasks.resource, tasks.duration, tasks.deps.offsets, deps, tasks.rendezvous, members, slot),
        *(kind, factor, same, place, places, varies, float(columns.jitter), np.uint64(columns.seed), record),
        *(np.zeros((max(1, slots), count), np.int64), np.zeros((max(1, int(members.max())), count), np.int64)),
        *(end, waited, start, duration),
    )
    return Ends(end=end, waited=waited, start=start, duration=duration)


def _slots(order: Any, offsets: Any, deps: Any, uses: Any, slot: Any) -> int:
    """Gives every task that others wait for a place for its end, until the last of them has read it."""
    free = np.empty(len(order), np.int32)
    unused = used = 0
    for task in order:
        for k in range(offsets[task], offsets[task + 1]):
            uses[deps[k]] -= 1
            if uses[deps[k]] == 0:
                free[unused] = slot[deps[k]]
                unused += 1
        if uses[task] == 0:
            continue
        if unused:
            unused -= 1
            slot[task] = free[unused]
        else:
            slot[task] = used
            used += 1
    return used


def _sweep(
    order: Any, resource: Any, duration: Any, offsets: Any, deps: Any, rendezvous: Any, members: Any, slot: Any,
    kind: Any, factor: Any, same: Any, place: Any, places: Any, varies: Any, jitter: Any, seed: Any, record: Any,
    ends: Any, ready: Any, free: Any, waited: Any, starts: Any, durations: Any,
) -> None:  # fmt: skip
    """The pass. `ready` is when each member of a meeting could start, a row for each."""
    columns = factor.shape[1]
    together, start, lasts = np.empty(columns, np.int64), np.empty(columns, np.int64), np.empty(columns, np.int64)
    here = 0
    for at in range(len(order)):
        task = order[at]
        mine, now = ready[here], free[resource[task]]
        for c in range(columns):
            mine[c] = now[c]
        for k in range(offsets[task], offsets[task + 1]):
            end = ends[slot[deps[k]]]
            for c in range(columns):
                mine[c] = max(mine[c], end[c])
        here += 1
        met = rendezvous[task]
        meets = met >= 0 or place[task] >= 0
        if met >= 0 and here < members[met]:
            continue
        if meets:
            together[:] = 0
            for member in range(here):
                _GATHER(ready[member], place[order[at - here + 1 + member]], places, together)
        for member in range(here):
            task, mine = order[at - here + 1 + member], ready[member]
            now = free[resource[task]]
            if meets:
                _SCATTER(together, place[task], places, start)
                if met < 0:
                    for c in range(columns):
                        waited[resource[task], c] += start[c] - mine[c]
            else:
                start[:] = mine
            if same[kind[task]] and not varies[task]:
                lasts[:] = duration[task]
            else:
                factors = factor[kind[task]]
                for c in range(columns):
                    noise = max(0.0, 1.0 + jitter * _NORMAL(seed, task, c)) if varies[task] else 1.0
                    lasts[c] = np.int64(np.rint(duration[task] * factors[c] * noise))
            for c in range(columns):
                now[c] = start[c] + lasts[c]
            if slot[task] >= 0:
                ends[slot[task]] = now
            if record >= 0:
                starts[task], durations[task] = start[record], lasts[record]
        here = 0


def _gather(ready: Any, row: Any, places: Any, together: Any) -> None:
    """Every place gets the latest of those that meet there."""
    for c in range(len(ready)):
        there = c if row < 0 else places[row, c]
        together[there] = max(together[there], ready[c])


def _scatter(together: Any, row: Any, places: Any, start: Any) -> None:
    """Every column gets what its place has."""
    for c in range(len(start)):
        start[c] = together[c if row < 0 else places[row, c]]


def _normal(seed: Any, task: Any, column: Any) -> Any:
    """A number of mean 0 and variance 1, nearly normal, that depends on the arguments alone.

    The sum of four uniform numbers, 16 bits each of one hash (the finaliser of SplitMix64, Steele et al. 2014).
    """
    bits = seed * np.uint64(0x9E3779B97F4A7C15) + np.uint64(task) * np.uint64(0xD1342543DE82EF95)
    bits += np.uint64(column)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits = bits ^ (bits >> np.uint64(31))
    mask, total = np.uint64(0xFFFF), 0.0
    for _ in range(4):
        total += float(bits & mask)
        bits >>= np.uint64(16)
    # Four uniform numbers of [0, 1) have the mean 2 and the variance 1/3.
    return (total / 65536.0 + 4 / 131072.0 - 2.0) * np.sqrt(3.0)


_NORMAL: Any = kept(_normal, nogil=True)
_GATHER: Any = kept(_gather, nogil=True)
_SCATTER: Any = kept(_scatter, nogil=True)
_SLOTS: Any = kept(_slots, nogil=True)
_SWEEP: Any = kept(_sweep, nogil=True)
