"""When the operations of pieces start, from the clocks with which they begin."""

from __future__ import annotations

import numpy as np

from echograph.ir.columns import NONE, Int64
from echograph.ir.timeline import Lane, Timeline
from echograph.simulator.pieces.run import Run


def program_timeline(run: Run, program: int) -> Timeline:
    """What one program did, in its order; causes are not worked out (-1)."""
    job, line = run.pieces.job, run.pieces.lines[program]
    count = int(line.start[-1])
    start, op = np.zeros((count, 2), np.int64), np.zeros(count, np.int64)
    for number, (pieces, entries) in _by_kind(run, program).items():
        kind, passage = run.pieces.kinds[number], run.passages[number]
        position = line.start[pieces][:, None] + np.arange(len(kind.rows))
        op[position] = np.array(kind.rows)
        if passage is None:
            start[position, 0] = entries[:, 0, None]
            start[position, 1] = [[run.met[meeting].start] for meeting in line.meeting[pieces].tolist()]
            continue
        starts, found = passage.starts, np.full((len(pieces), len(kind.rows), 2), 0)
        for entry in range(starts.shape[2]):
            np.maximum(found, starts[:, :, entry] + entries[:, entry, None, None], out=found)
        start[position] = found
    calls = job.programs[program].calls
    lengths = calls[:, 2] - calls[:, 1]
    instance, micro_batch = (np.repeat(calls[:, field].astype(np.int32), 2 * lengths) for field in (3, 4))
    op = np.repeat(op, 2)
    duration = np.where(np.arange(2 * count) % 2, run.work.device[op, 0], run.work.host[op, 0])
    return Timeline(
        program=np.full(2 * count, program, np.int32),
        lane=np.tile(np.array([Lane.HOST, Lane.DEVICE], np.uint8), count),
        stream=job.ops.stream[op],
        op=op,
        instance=instance,
        micro_batch=micro_batch,
        start=start.ravel(),
        duration=duration,
        cause=np.full(2 * count, NONE, np.int64),
        programs=tuple(p.role or f"rank {i}" for i, p in enumerate(job.programs)),
        streams=job.streams,
    )


def _by_kind(run: Run, program: int) -> dict[int, tuple[Int64, Int64]]:
    """The pieces of each kind, and int64 [pieces, entries] with which they begin, first scenario."""
    found: dict[int, tuple[list[Int64], list[Int64]]] = {}
    alike: dict[tuple[int, int], tuple[list[int], list[Int64]]] = {}
    kind_of = run.pieces.lines[program].kind.tolist()
    for (piece, count), entry in zip(run.steps[program], run.entries[program], strict=True):
        firsts, entries = alike.setdefault((kind_of[piece], count), ([], []))
        firsts.append(piece)
        entries.append(entry[:, 0])
    for (number, count), (firsts, entries) in alike.items():
        pieces, values = found.setdefault(number, ([], []))
        first, entry = np.array(firsts), np.array(entries)
        passage = run.passages[number]
        for at in range(count):
            pieces.append(first + at)
            values.append(entry if passage is None or not at else after(passage.times(at)[:, :, 0], entry))
    return {number: (np.concatenate(pieces), _stack(values)) for number, (pieces, values) in found.items()}


def after(constants: Int64, entries: Int64) -> Int64:
    """Int64 [runs, exits] of int64 [exits, entries] and [runs, entries]."""
    ends: Int64 = (constants[None] + entries[:, None, : constants.shape[1]]).max(axis=2)
    return ends


def _stack(values: list[Int64]) -> Int64:
    """Entries of pieces of one kind; steps of several have no inlets, which nothing holds back."""
    from echograph.simulator.pieces.passages import NEVER

    width = max(value.shape[1] for value in values)
    return np.concatenate([np.pad(v, ((0, 0), (0, width - v.shape[1])), constant_values=NEVER) for v in values])
