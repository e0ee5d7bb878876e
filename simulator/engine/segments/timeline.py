"""When the operations of segments start, from the clocks with which they begin."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from echograph.ir.columns import NONE, Int64
from echograph.ir.timeline import Lane, Timeline
from echograph.simulator.engine.segments.run import SegmentRun
from echograph.simulator.engine.segments.transfer import SegmentChain, TransferMatrix


def program_timeline(run: SegmentRun, program: int) -> Timeline:
    """What one program did, in its order; causes are not worked out (-1)."""
    job, sequence = run.segments.job, run.segments.sequences[program]
    count = int(sequence.start[-1])
    start, op = np.zeros((count, 2), np.int64), np.zeros(count, np.int64)
    for matrix, first, entries in _by_matrix(run, program):
        position = sequence.start[first][:, None] + np.arange(len(matrix.kind.rows))
        op[position] = np.array(matrix.kind.rows)
        found = np.zeros((*position.shape, 2), np.int64)
        for entry in range(matrix.starts.shape[2]):
            np.maximum(found, matrix.starts[:, :, entry] + entries[:, entry, None, None], out=found)
        start[position] = found
    for stretch, its in zip(run.stretches[program], run.entries[program], strict=True):
        if stretch.chain is None:
            here = int(sequence.start[stretch.first])
            op[here] = stretch.row
            start[here] = its[0, 0], run.met[int(sequence.rendezvous[stretch.first])].start
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


def _by_matrix(run: SegmentRun, program: int) -> Iterator[tuple[TransferMatrix, Int64, Int64]]:
    """Numbers of segments that are alike, and int64 [segments, entries] with which they begin."""
    alike: dict[SegmentChain, tuple[list[int], list[Int64]]] = {}
    for stretch, entry in zip(run.stretches[program], run.entries[program], strict=True):
        if stretch.chain is not None:
            firsts, entries = alike.setdefault(stretch.chain, ([], []))
            firsts.append(stretch.first)
            entries.append(entry[:, 0])
    found: dict[TransferMatrix, list[tuple[Int64, Int64]]] = {}
    for chain, (firsts, entries) in alike.items():
        first, entry = np.array(firsts), np.array(entries)
        for at, (matrix, before) in enumerate(zip(chain.matrices, chain.before, strict=True)):
            into = (before[None] + entry[:, None]).max(axis=2)
            found.setdefault(matrix, []).append((first + at, into))
    for matrix, places in found.items():
        yield matrix, np.concatenate([first for first, _ in places]), np.concatenate([into for _, into in places])
