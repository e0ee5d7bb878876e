"""When the operations of pieces start, from the clocks with which they begin."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from echograph.ir.columns import NONE, Int64
from echograph.ir.timeline import Lane, Timeline
from echograph.simulator.pieces.passages import Chain, Passage
from echograph.simulator.pieces.run import Run


def program_timeline(run: Run, program: int) -> Timeline:
    """What one program did, in its order; causes are not worked out (-1)."""
    job, line = run.pieces.job, run.pieces.lines[program]
    count = int(line.start[-1])
    start, op = np.zeros((count, 2), np.int64), np.zeros(count, np.int64)
    for passage, first, entries in _by_passage(run, program):
        position = line.start[first][:, None] + np.arange(len(passage.kind.rows))
        op[position] = np.array(passage.kind.rows)
        found = np.zeros((*position.shape, 2), np.int64)
        for entry in range(passage.starts.shape[2]):
            np.maximum(found, passage.starts[:, :, entry] + entries[:, entry, None, None], out=found)
        start[position] = found
    for step, its in zip(run.steps[program], run.entries[program], strict=True):
        if step.chain is None:
            here = int(line.start[step.first])
            op[here] = step.row
            start[here] = its[0, 0], run.met[int(line.meeting[step.first])].start
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


def _by_passage(run: Run, program: int) -> Iterator[tuple[Passage, Int64, Int64]]:
    """Numbers of pieces that are alike, and int64 [pieces, entries] with which they begin."""
    alike: dict[Chain, tuple[list[int], list[Int64]]] = {}
    for step, entry in zip(run.steps[program], run.entries[program], strict=True):
        if step.chain is not None:
            firsts, entries = alike.setdefault(step.chain, ([], []))
            firsts.append(step.first)
            entries.append(entry[:, 0])
    found: dict[Passage, list[tuple[Int64, Int64]]] = {}
    for chain, (firsts, entries) in alike.items():
        first, entry = np.array(firsts), np.array(entries)
        for at, (passage, before) in enumerate(zip(chain.passages, chain.before, strict=True)):
            into = (before[None] + entry[:, None]).max(axis=2)
            found.setdefault(passage, []).append((first + at, into))
    for passage, places in found.items():
        yield passage, np.concatenate([first for first, _ in places]), np.concatenate([into for _, into in places])
