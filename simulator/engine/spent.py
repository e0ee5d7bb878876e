"""What programs spend a step on whose clocks went through segments: `breakdown` without a timeline in between.

The tasks of a lane follow each other. So when they run is written lane by lane, those that touch and count alike
as one, and a step is walked through once, from one change on any lane to the next. Times and order are those of
`segments.program_timeline`; compiled, this is some ten times quicker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from echograph.ir.columns import Int64
from echograph.simulator.breakdown import Breakdown, layers_of, of_spent
from echograph.simulator.engine.machine_code import array, compiled, interpreted
from echograph.simulator.engine.segments import NEVER, SegmentChain, SegmentRun, Stretches


class _Tasks(NamedTuple):
    """What the operations of chains are, as columns.

    Attributes:
        ops_at: [chains + 1], where the operations of each chain begin in `row`.
        row: of the operation table.
        starts: [operations, 2, entries] of each chain: from its entries to when host and device start.
        starts_at: [chains], where they begin.
        entries: [chains], how many.
        layer: of each row, that of its task on the device.
        lane: of each row.
        device: of each row, picoseconds.
        host: of each row, picoseconds.
        sizes: lanes, layers, the last of which is the host's; and picoseconds of the step.
    """

    ops_at: Int64
    row: Int64
    starts: Int64
    starts_at: Int64
    entries: Int64
    layer: Int64
    lane: Int64
    device: Int64
    host: Int64
    sizes: Int64


class _Spent(NamedTuple):
    """What the loop writes, of one program.

    Attributes:
        filled: [lanes], intervals of each lane.
        first: [lanes], where they begin.
        start: picoseconds.
        end: picoseconds.
        layer: of each interval.
        spent: [layers + 1], picoseconds, the last of no layer.
    """

    filled: Int64
    first: Int64
    start: Int64
    end: Int64
    layer: Int64
    spent: Int64


def breakdowns_of(run: SegmentRun, *, compile_it: bool = True) -> Callable[[int], Breakdown]:
    """What works out the breakdown of a program, by its number.

    Args:
        run: what ran.
        compile_it: whether the loop is compiled.
    """
    job, layers = run.segments.job, layers_of(run.segments.job)
    lanes = 1 + len(job.streams)
    sizes = np.array([lanes, layers.idle, int(run.ends[0])], np.int64)
    work, constants = run.work, [_starts(chain) for chain in run.chains]
    rows = [row for chain in run.chains for matrix in chain.matrices for row in matrix.kind.rows]
    none = np.zeros(0, np.int64)
    columns = (
        np.cumsum([0, *(len(its) for its in constants)]),
        np.array(rows, np.int64),
        np.concatenate([none, *(its.ravel() for its in constants)]),
        np.cumsum([0, *(its.size for its in constants)])[:-1],
        np.array([its.shape[2] for its in constants], np.int64),
        layers.of_op,
        np.array(work.lane, np.int64),
        work.device[:, 0],
        work.host[:, 0],
        sizes,
    )
    tasks = _Tasks(*(array(column, np.int64) for column in columns))

    def of_program(number: int) -> Breakdown:
        count = int(run.segments.sequences[number].start[-1])
        state = _Spent(
            filled=np.zeros(lanes, np.int64), first=np.zeros(lanes, np.int64), start=np.zeros(2 * count, np.int64),
            end=np.zeros(2 * count, np.int64), layer=np.zeros(2 * count, np.int64),
            spent=np.zeros(layers.idle + 1, np.int64),
        )  # fmt: skip
        inputs = run.stretches, tasks, run.entries, run.begins, number
        if compile_it:
            compiled(_spend, _write, _add, _latest, _walk)(*inputs, state)
        else:
            interpreted(_spend, *inputs, outputs=state)
        return of_spent(job, layers, state.spent.tolist(), number)

    return of_program


def _starts(chain: SegmentChain) -> Int64:
    """Int64 [operations, 2, entries]: from the entries of a chain to when host and device start each operation."""
    found = []
    for matrix, before in zip(chain.matrices, chain.before, strict=True):
        # From the chain's entries to the segment's, and on from these; sums of two `NEVER` stay what they are.
        into = (matrix.starts[:, :, :, None] + before).max(axis=2)
        found.append(np.maximum(into, NEVER))
    return np.concatenate(found)


# The loop, which is compiled.


def _latest(tasks: _Tasks, entries: Int64, at: int, first: int, count: int) -> int:
    """When a task starts, by constants from `at` on, and entries from `first` on."""
    latest: int = tasks.starts[at] + entries[first]
    for each in range(1, count):
        latest = max(latest, tasks.starts[at + each] + entries[first + each])
    return latest


def _add(state: _Spent, lane: int, start: int, duration: int, layer: int) -> None:
    """One more task of a lane."""
    if duration <= 0:
        return
    last = state.first[lane] + state.filled[lane] - 1
    if state.filled[lane] > 0 and state.layer[last] == layer and state.end[last] == start:
        state.end[last] = start + duration
        return
    state.start[last + 1], state.end[last + 1], state.layer[last + 1] = start, start + duration, layer
    state.filled[lane] += 1


def _write(
    stretches: Stretches, tasks: _Tasks, entries: Int64, begins: Int64, program: int, state: _Spent
) -> None:
    """Writes the tasks of a program, each to its lane."""
    host = tasks.sizes[1] - 1
    for stretch in range(stretches.bounds[program], stretches.bounds[program + 1]):
        chain, first = stretches.chain[stretch], stretches.entry_at[stretch]
        if chain < 0:
            row = stretches.row[stretch]
            _add(state, 0, entries[first], tasks.host[row], host)
            begin = begins[stretches.rendezvous[stretch]]
            _add(state, tasks.lane[row], begin, tasks.device[row], tasks.layer[row])
            continue
        count, at = tasks.entries[chain], tasks.starts_at[chain]
        for op in range(tasks.ops_at[chain], tasks.ops_at[chain + 1]):
            row = tasks.row[op]
            if tasks.host[row] > 0:
                _add(state, 0, _latest(tasks, entries, at, first, count), tasks.host[row], host)
            at += count
            if tasks.device[row] > 0:
                start = _latest(tasks, entries, at, first, count)
                _add(state, tasks.lane[row], start, tasks.device[row], tasks.layer[row])
            at += count


def _walk(tasks: _Tasks, state: _Spent) -> None:
    """Goes through the step; each moment is of the first layer that a lane is in. Uses up the intervals."""
    now, until, idle = 0, tasks.sizes[2], tasks.sizes[1]
    while now < until:
        layer, change = idle, until
        for lane in range(tasks.sizes[0]):
            while state.filled[lane] > 0 and state.end[state.first[lane]] <= now:
                state.first[lane] += 1
                state.filled[lane] -= 1
            if state.filled[lane] > 0:
                its = state.first[lane]
                if state.start[its] <= now:
                    layer = min(layer, state.layer[its])
                    change = min(change, state.end[its])
                else:
                    change = min(change, state.start[its])
        state.spent[layer] += change - now
        now = change


def _spend(
    stretches: Stretches, tasks: _Tasks, entries: Int64, begins: Int64, program: int, state: _Spent
) -> None:
    """Where the time of a program goes."""
    # How many tasks each lane has at most, so that each has its own place.
    for stretch in range(stretches.bounds[program], stretches.bounds[program + 1]):
        chain = stretches.chain[stretch]
        if chain < 0:
            state.filled[0] += 1
            state.filled[tasks.lane[stretches.row[stretch]]] += 1
            continue
        for op in range(tasks.ops_at[chain], tasks.ops_at[chain + 1]):
            state.filled[0] += 1
            state.filled[tasks.lane[tasks.row[op]]] += 1
    place = 0
    for lane in range(tasks.sizes[0]):
        state.first[lane] = place
        place += state.filled[lane]
        state.filled[lane] = 0
    _write(stretches, tasks, entries, begins, program, state)
    _walk(tasks, state)
