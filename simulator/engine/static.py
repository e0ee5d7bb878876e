"""The static engine: one pass over the tasks, each after its resource, its dependencies and its rendezvous.

It goes by a topological order, in which each task comes after all that it waits for. Tasks of one program are
numbered so already, as long as they wait for nobody else. Where programs have a rendezvous, every resource runs
its queue of tasks until one of them waits, and goes on when what it waits for has run. The order holds for every
column (`engine.columns`), since whoever waits in a column waits in the task graph: so one pass serves any number
of ranks or scenarios. Of all ends only those that a later task reads are remembered, so memory does not grow with
the number of tasks times the columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from echograph.ir.columns import NONE, Bools, Float64, Int32, Int64
from echograph.simulator.engine.columns import Columns, Ends, alone, deadlock
from echograph.simulator.engine.machine_code import array, compiled, interpreted
from echograph.simulator.tasks import DEVICE, HOST, TaskGraph

if TYPE_CHECKING:
    from echograph.simulator.engine import Roles, StepRun


def simulate(roles: Roles) -> StepRun:
    """One step, task by task, and the scenarios of its interval beside it.

    Raises:
        DeadlockError: tasks wait for each other for ever.
    """
    ends = run_columns(roles.tasks, roles.columns, record=0)
    return roles.step(ends.start, ends.last[1:])


def run(tasks: TaskGraph) -> Int64:
    """int64 [tasks], picoseconds, when each task starts.

    Raises:
        DeadlockError: tasks wait for each other for ever; names two of them.
    """
    return run_columns(tasks, alone(tasks), record=0).start


COMPILE_FROM = 300_000
"""Steps from which compiled code pays, in visits of a task on its own."""


def run_columns(tasks: TaskGraph, columns: Columns, record: int = NONE, order: Int32 | None = None) -> Ends:
    """Runs all columns.

    Args:
        tasks: what each of them does.
        columns: how they differ.
        record: the column whose start times are wanted; -1 for none.
        order: of `topological_order`, if it is known.

    Raises:
        DeadlockError: tasks wait for each other for ever; names two of them.
    """
    order, count = topological_order(tasks) if order is None else order, len(columns)
    compile_it = len(tasks) * (1 + count) >= COMPILE_FROM or columns.jitter > 0
    work = _work(tasks)
    # A few ends of each task are remembered all, or one of each.
    slot = _slots(work, order) if compile_it and count > 1 else np.arange(len(tasks), dtype=np.int32)
    clocks = _Clocks(
        end=np.zeros((int(slot.max(initial=0)) + 1, count), np.int64),
        ready=np.zeros((max(1, int(work.members.max())), count), np.int64),
        together=np.zeros(count, np.int64),
        free=np.zeros((tasks.resources, count), np.int64),
        waited=np.zeros((tasks.resources, count), np.int64),
        start=np.zeros(len(tasks) if record >= 0 else 0, np.int64),
        duration=np.zeros(len(tasks) if record >= 0 else 0, np.int64),
    )
    inputs = (work, order, slot, _differences(tasks, columns), record)
    if compile_it:
        compiled(_pass, _meet, noise)(*inputs, clocks)
    else:
        interpreted(_pass, *inputs, outputs=clocks)
    return Ends(end=clocks.free, waited=clocks.waited, start=clocks.start, duration=clocks.duration)


class _Work(NamedTuple):
    """A task graph for the loops: the arrays of `TaskGraph`, dependencies as `offsets` and `deps`.

    Attributes:
        members: int32, how many tasks each rendezvous has.
    """

    resource: Int32
    duration: Int64
    offsets: Int64
    deps: Int32
    rendezvous: Int32
    members: Int32


def _work(tasks: TaskGraph) -> _Work:
    return _Work(
        resource=array(tasks.resource, np.int32),
        duration=array(tasks.duration, np.int64),
        offsets=array(tasks.deps.offsets, np.int64),
        deps=array(tasks.deps.values, np.int32),
        rendezvous=array(tasks.rendezvous, np.int32),
        members=np.bincount(tasks.rendezvous[tasks.rendezvous != NONE], minlength=1).astype(np.int32),
    )


class _Differences(NamedTuple):
    """`Columns` for the pass.

    Attributes:
        same: bool [kinds], whether a kind takes as long in all columns as in the task graph.
        varies: bool [tasks], whether jitter moves a task.
    """

    kind: Int32
    factor: Float64
    same: Bools
    place: Int32
    places: Int32
    varies: Bools
    jitter: float
    seed: np.uint64


def _differences(tasks: TaskGraph, columns: Columns) -> _Differences:
    return _Differences(
        kind=array(columns.kind, np.int32),
        factor=array(columns.factor, np.float64),
        same=(columns.factor == 1.0).all(axis=1),
        place=array(columns.place, np.int32),
        places=array(columns.places, np.int32),
        varies=jittered(tasks, columns),
        jitter=float(columns.jitter),
        seed=np.uint64(columns.seed),
    )


def jittered(tasks: TaskGraph, columns: Columns) -> Bools:
    """Bool [tasks], whose duration is noisy: what a stream does without waiting for others in a rendezvous."""
    waits = (tasks.rendezvous != NONE) | (columns.place != NONE)
    noisy: Bools = (tasks.lane == DEVICE) & ~waits & (columns.jitter > 0)
    return noisy


class _Clocks(NamedTuple):
    """What the pass writes: picoseconds, a column for each of `Columns`.

    Attributes:
        end: int64 [slots, columns], ends that tasks to come will read.
        ready: int64 [members, columns], when each member of a rendezvous could start.
        together: int64 [columns], when those in each place start.
        free: int64 [resources, columns], when each resource has ended what it ran.
        waited: as of `Ends`, and so are the others.
    """

    end: Int64
    ready: Int64
    together: Int64
    free: Int64
    waited: Int64
    start: Int64
    duration: Int64


def _pass(work: _Work, order: Int32, slot: Int32, columns: _Differences, record: int, clocks: _Clocks) -> None:
    """Every task starts at the latest of what it waits for: the longest path, in one pass."""
    resource, offsets, deps, ends, varies = work.resource, work.offsets, work.deps, clocks.end, columns.varies
    every, here = range(len(clocks.together)), 0
    for at in range(len(order)):
        task = order[at]
        ready, free = clocks.ready[here], clocks.free[resource[task]]
        for c in every:
            ready[c] = free[c]
        for k in range(offsets[task], offsets[task + 1]):
            end = ends[slot[deps[k]]]
            for c in every:
                ready[c] = end[c] if end[c] > ready[c] else ready[c]
        # The tasks of a rendezvous are neighbours in the order: the last of them starts all.
        here += 1
        met = work.rendezvous[task]
        if met >= 0 and here < work.members[met]:
            continue
        if met >= 0 or columns.place[task] >= 0:
            _meet(order[at - here + 1 : at + 1], met < 0, resource, columns, clocks)
        for member in range(here):
            task = order[at - here + 1 + member]
            start, free = clocks.ready[member], clocks.free[resource[task]]
            lasts, kind = work.duration[task], columns.kind[task]
            factor = columns.factor[kind]
            if varies[task]:
                for c in every:
                    noisy = max(0.0, 1.0 + columns.jitter * noise(columns.seed, task, c))
                    free[c] = start[c] + round(lasts * factor[c] * noisy)
            elif columns.same[kind]:
                for c in every:
                    free[c] = start[c] + lasts
            else:
                for c in every:
                    free[c] = start[c] + round(lasts * factor[c])
            if slot[task] >= 0:
                end = ends[slot[task]]
                for c in every:
                    end[c] = free[c]
            if record >= 0:
                clocks.start[task], clocks.duration[task] = start[record], free[record] - start[record]
        here = 0


def _meet(members: Int32, single: bool, resource: Int32, columns: _Differences, clocks: _Clocks) -> None:
    """All tasks that have a rendezvous start, in each place, when the last of them is ready.

    Args:
        members: the tasks.
        single: whether it is one task, that waits for its like in other columns and nobody else.
        resource: of all tasks.
        columns: says where the places are.
        clocks: `ready` becomes when they start.
    """
    places, together = columns.places, clocks.together
    every = range(len(together))
    for c in every:
        together[c] = 0
    for member in range(len(members)):
        ready, row = clocks.ready[member], columns.place[members[member]]
        for c in every:
            there = c if row < 0 else places[row][c]
            together[there] = max(together[there], ready[c])
    for member in range(len(members)):
        ready, row = clocks.ready[member], columns.place[members[member]]
        waited = clocks.waited[resource[members[member]]]
        for c in every:
            start = together[c if row < 0 else places[row][c]]
            if single:
                waited[c] += start - ready[c]
            ready[c] = start


def noise(seed: np.uint64, task: int, column: int) -> float:
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
    return (total / 65536.0 + 4 / 131072.0 - 2.0) * float(np.sqrt(3.0))


def _slots(work: _Work, order: Int32) -> Int32:
    """int32 [tasks]: places for the ends that are waited for, free again when the last task has read them."""
    uses = np.bincount(work.deps, minlength=len(order)).astype(np.int32)
    slot, free = np.full(len(order), NONE, np.int32), np.empty(len(order), np.int32)
    compiled(_assign_slots)(work, order, uses, free, slot)
    return slot


def _assign_slots(work: _Work, order: Int32, uses: Int32, free: Int32, slot: Int32) -> None:
    unused = used = 0
    for task in order:
        for k in range(work.offsets[task], work.offsets[task + 1]):
            before = work.deps[k]
            uses[before] -= 1
            if uses[before] == 0:
                free[unused] = slot[before]
                unused += 1
        if uses[task] == 0:
            continue
        if unused:
            unused -= 1
            slot[task] = free[unused]
        else:
            slot[task] = used
            used += 1


WINDOW = 256
"""Tasks by which a host is ahead of its program at most, unless its streams wait for what it issues later.

Any distance would be right, but whoever computes in this order remembers the end of all that was issued."""


def topological_order(tasks: TaskGraph) -> Int32:
    """Tasks in an order in which they can be computed; those of a rendezvous are neighbours.

    Raises:
        DeadlockError: tasks wait for each other for ever; names two of them.
    """
    count, resources = len(tasks), tasks.resources
    if not tasks.has_rendezvous:
        return np.arange(count, dtype=np.int32)
    work, task, bounds = _work(tasks), tasks.queues.values, tasks.queues.offsets
    hosts = tasks.lane[task[np.minimum(bounds[:-1], count - 1)]] == HOST
    progress = _Progress(
        head=bounds[:-1].copy(),
        order=np.arange(count, dtype=np.int32),
        done=np.zeros(count, np.bool_),
        waiter=np.full(count, NONE, np.int32),
        following=np.zeros(resources, np.int32),
        gate=np.full(len(work.members), NONE, np.int32),
        arrived=np.zeros(len(work.members), np.int32),
        stack=np.zeros(resources, np.int32),
        idle=np.ones(resources, np.bool_),
    )
    # A task on its way through here takes about three times as long as in the pass over one column.
    if 4 * count >= COMPILE_FROM:
        compiled(_order)(work, _Queues(task, bounds, hosts), WINDOW, progress)
    else:
        interpreted(_order, work, _Queues(task, bounds, hosts), WINDOW, outputs=progress)
    stuck = task[progress.head[progress.head < bounds[1:]]]
    if len(stuck):
        raise deadlock(stuck.tolist())
    return progress.order


class _Queues(NamedTuple):
    """The queues of all resources.

    Attributes:
        task: int32 [tasks], by resource.
        bounds: int64 [resources + 1], where each resource's begin.
        hosts: bool [resources], whether it is a host.
    """

    task: Int32
    bounds: Int64
    hosts: Bools


class _Progress(NamedTuple):
    """How far resources are.

    Resources that wait for one task, or in one rendezvous, are a wait list: `waiter` or `gate` is its head,
    `following` the next. Hosts that are ahead are idle until the streams can do no more.

    Attributes:
        head: int64 [resources], places in the queues.
        order: int32 [tasks], what comes of it.
        done: bool [tasks].
        waiter: int32 [tasks], a resource that waits for the task, or -1.
        following: int32 [resources], the next of its wait list, or -1.
        gate: int32 [rendezvous], a resource that waits there, or -1.
        arrived: int32 [rendezvous], how many have come.
        stack: int32 [resources], those that may go on.
        idle: bool [resources].
    """

    head: Int64
    order: Int32
    done: Bools
    waiter: Int32
    following: Int32
    gate: Int32
    arrived: Int32
    stack: Int32
    idle: Bools


def _order(work: _Work, queues: _Queues, window: int, progress: _Progress) -> None:
    """Fills the order; `head` ends where each resource stands."""
    offsets, deps, queue, bounds = work.offsets, work.deps, queues.task, queues.bounds
    head, done, waiter, following, stack, idle = (
        progress.head, progress.done, progress.waiter, progress.following, progress.stack, progress.idle,
    )  # fmt: skip
    count, before, top = 0, -1, 0
    while count > before or window < len(done):
        if count == before:
            # Nothing moves while hosts keep near: let them run ahead.
            window = len(done)
        before = count
        for on in range(len(head) - 1, -1, -1):
            if idle[on]:
                idle[on], stack[top] = False, on
                top += 1
        while top:
            on = stack[top - 1]
            if head[on] == bounds[on + 1]:
                top -= 1
                continue
            task, missing = queue[head[on]], -1
            # The window's first task is an issue, the next one what it issued.
            if queues.hosts[on] and task - window >= queue[bounds[on]] and not done[task - window + 1]:
                idle[on] = True
                top -= 1
                continue
            for k in range(offsets[task], offsets[task + 1]):
                if not done[deps[k]]:
                    missing = deps[k]
                    break
            if missing >= 0:
                following[on], waiter[missing] = waiter[missing], on
                top -= 1
                continue
            following[on], met = -1, work.rendezvous[task]
            if met >= 0:
                progress.arrived[met] += 1
                following[on] = progress.gate[met]
                if progress.arrived[met] < work.members[met]:
                    progress.gate[met] = on
                    top -= 1
                    continue
            # This task runs, and so do those of its rendezvous; all these resources go on, and who waits for them.
            first = on
            while on >= 0:
                task = queue[head[on]]
                done[task], progress.order[count] = True, task
                count += 1
                head[on] += 1
                if on != first:
                    stack[top] = on
                    top += 1
                woken = waiter[task]
                while woken >= 0:
                    stack[top] = woken
                    top += 1
                    woken = following[woken]
                on = following[on]
