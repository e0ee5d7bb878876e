"""What programs spend a step on whose clocks went through segments: `breakdown` without a timeline in between.

The tasks of a lane follow each other. So when they run is written lane by lane, those that touch and count alike
as one, and a step is walked through once, from one change on any lane to the next. Tasks that touch whatever the
clocks with which their chain begins are one from the outset. Times and order are those of
`segments.program_timeline`; compiled, this is some ten times quicker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from echograph.ir.columns import Int64
from echograph.simulator.breakdown import Breakdown, BreakdownLayers, layers_of, of_spent
from echograph.simulator.engine.machine_code import array, compiled, interpreted
from echograph.simulator.engine.segments import NEVER, SegmentChain, SegmentRun, Stretches


class _Tasks(NamedTuple):
    """What chains do, as columns. A piece is tasks of a lane that count alike and touch whatever the clocks.

    Attributes:
        pieces_at: [chains + 1], where the pieces of each chain begin; those of a lane ascend in time.
        lane_of: of each piece.
        layer_of: of each piece.
        duration: of each piece, picoseconds.
        starts_at: of each piece, where its constants begin in `starts`.
        starts: of each piece, from the entries of its chain to when it starts.
        entries: [chains], how many.
        layer: of each row, that of its task on the device.
        lane: of each row.
        device: of each row, picoseconds.
        host: of each row, picoseconds.
        sizes: lanes, layers, the last of which is the host's; and picoseconds of the step.
    """

    pieces_at: Int64
    lane_of: Int64
    layer_of: Int64
    duration: Int64
    starts_at: Int64
    starts: Int64
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
    tasks = _tasks(run, layers, lanes)
    at_most = _at_most(run.stretches, np.diff(tasks.pieces_at))

    def of_program(number: int) -> Breakdown:
        count = at_most[number]
        state = _Spent(
            filled=np.zeros(lanes, np.int64), first=np.zeros(lanes, np.int64), start=np.zeros(count, np.int64),
            end=np.zeros(count, np.int64), layer=np.zeros(count, np.int64),
            spent=np.zeros(layers.idle + 1, np.int64),
        )  # fmt: skip
        inputs = run.stretches, tasks, run.entries, run.begins, number
        if compile_it:
            compiled(_spend, _write, _add, _walk)(*inputs, state)
        else:
            interpreted(_spend, *inputs, outputs=state)
        return of_spent(job, layers, state.spent.tolist(), number)

    return of_program


def _at_most(stretches: Stretches, pieces: Int64) -> list[int]:
    """How many intervals each program has at most: pieces, and two of each rendezvous."""
    count = np.cumsum(np.append(0, np.append(pieces, 2)[stretches.chain]))
    found: list[int] = np.diff(count[stretches.bounds]).tolist()
    return found


def _tasks(run: SegmentRun, layers: BreakdownLayers, lanes: int) -> _Tasks:
    """The columns of what ran."""
    work = run.work
    lane, device, host = np.array(work.lane, np.int64), work.device[:, 0], work.host[:, 0]
    none = np.zeros(0, np.int64)
    found: list[tuple[Int64, Int64, Int64, Int64]] = []
    for chain in run.chains:
        rows = np.array([row for matrix in chain.matrices for row in matrix.kind.rows], np.int64)
        its_lane = np.stack([np.zeros_like(rows), lane[rows]], axis=1).ravel()
        its_layer = np.stack([np.full_like(rows, layers.host), layers.of_op[rows]], axis=1).ravel()
        duration = np.stack([host[rows], device[rows]], axis=1).ravel()
        starts = _starts(chain)
        found.append(_pieces(its_lane, its_layer, duration, starts.reshape(len(duration), -1)))
    entries = np.array([starts.shape[1] for *_, starts in found], np.int64)
    pieces = np.array([len(its) for its, *_ in found], np.int64)
    columns = (
        np.append(0, np.cumsum(pieces)),
        *(np.concatenate([none, *(its[column] for its in found)]) for column in range(3)),
        np.cumsum(np.append(0, np.repeat(entries, pieces)))[:-1],
        np.concatenate([none, *(starts.ravel() for *_, starts in found)]),
        entries,
        layers.of_op,
        lane,
        device,
        host,
        np.array([lanes, layers.idle, int(run.ends[0])]),
    )
    return _Tasks(*(array(column, np.int64) for column in columns))


def _pieces(lane: Int64, layer: Int64, duration: Int64, starts: Int64) -> tuple[Int64, Int64, Int64, Int64]:
    """Tasks of a chain as pieces: lane, layer, duration, and int64 [pieces, entries], from entries to the start.

    Args:
        lane: of each task.
        layer: of each task.
        duration: of each task, picoseconds.
        starts: int64 [tasks, entries], from the entries to the start of each.
    """
    order = np.argsort(lane, kind="stable")
    order = order[duration[order] > 0]
    lane, layer, duration, starts = (column[order] for column in (lane, layer, duration, starts))
    touches = starts[1:] == starts[:-1] + duration[:-1, None]
    touches |= np.maximum(starts[1:], starts[:-1]) < NEVER // 2  # what holds neither back
    new = np.ones(len(order), np.bool_)
    new[1:] = (lane[1:] != lane[:-1]) | (layer[1:] != layer[:-1]) | ~touches.all(axis=1)
    first = np.flatnonzero(new)
    return lane[first], layer[first], np.add.reduceat(duration, first) if len(first) else duration, starts[first]


def _starts(chain: SegmentChain) -> Int64:
    """Int64 [operations, 2, entries]: from the entries of a chain to when host and device start each operation."""
    found = []
    for matrix, before in zip(chain.matrices, chain.before, strict=True):
        # From the chain's entries to the segment's, and on from these; sums of two `NEVER` stay what they are.
        into = (matrix.starts[:, :, :, None] + before).max(axis=2)
        found.append(np.maximum(into, NEVER))
    return np.concatenate(found)


# The loop, which is compiled.


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
        for piece in range(tasks.pieces_at[chain], tasks.pieces_at[chain + 1]):
            at = tasks.starts_at[piece]
            start = tasks.starts[at] + entries[first]
            for each in range(1, tasks.entries[chain]):
                start = max(start, tasks.starts[at + each] + entries[first + each])
            _add(state, tasks.lane_of[piece], start, tasks.duration[piece], tasks.layer_of[piece])


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
    # How many intervals each lane has at most, so that each has its own place.
    for stretch in range(stretches.bounds[program], stretches.bounds[program + 1]):
        chain = stretches.chain[stretch]
        if chain < 0:
            state.filled[0] += 1
            state.filled[tasks.lane[stretches.row[stretch]]] += 1
            continue
        for piece in range(tasks.pieces_at[chain], tasks.pieces_at[chain + 1]):
            state.filled[tasks.lane_of[piece]] += 1
    place = 0
    for lane in range(tasks.sizes[0]):
        state.first[lane] = place
        place += state.filled[lane]
        state.filled[lane] = 0
    _write(stretches, tasks, entries, begins, program, state)
    _walk(tasks, state)
