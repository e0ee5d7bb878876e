"""Collectives of one group follow each other; nothing else moves."""

from __future__ import annotations

import numpy as np

from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import JobGraph
from echograph.ir.passes.mesh import OneCommunicator
from echograph.ir.types import CollectiveKind, DType, Duration, OpKind, Phase, Source
from echograph.ir.verify import verify
from echograph.simulator.engine import static
from echograph.simulator.tasks import expand


def side_by_side() -> JobGraph:
    """Two ranks; on each, two collectives of one group and one of another, on a stream each."""
    builder = GraphBuilder(streams=("main",))
    every, pair = builder.group("world", ranks=(0, 1)), builder.group("pair", ranks=(0, 1))
    for rank in range(2):
        begin = builder.op_count()
        builder.compute("work", phase=Phase.OTHER, durations=(duration(3),))
        for number, group in enumerate((every, every, pair)):
            builder.collective(
                "all_reduce", CollectiveKind.ALL_REDUCE, group=group, bytes_per_rank=8, dtype=DType.FP32,
                phase=Phase.OTHER, stream=builder.stream(f"gloo {number}"), durations=(duration(10),),
            )  # fmt: skip
        builder.program([(0, begin, builder.op_count(), 0, 0)], role=f"rank {rank}", ranks=(rank,))
    return builder.build(JobGraph)


def duration(picoseconds: int) -> Duration:
    return Duration(device="d", picoseconds=picoseconds, source=Source.MEASURED)


def makespan(job: JobGraph) -> int:
    took = job.ops.duration.values
    tasks = expand(job, took, np.zeros_like(took))
    return int((static.run(tasks) + tasks.duration).max())


def test_a_group_has_one_stream_and_others_theirs() -> None:
    job = side_by_side()
    moved = OneCommunicator()(job)
    verify(moved)
    collective = moved.ops.kind == OpKind.COLLECTIVE
    names = [moved.streams[stream] for stream in moved.ops.stream[collective].tolist()]
    assert names == ["communicator world", "communicator world", "communicator pair"] * 2
    assert np.array_equal(moved.ops.stream[~collective], job.ops.stream[~collective])
    assert (makespan(job), makespan(moved)) == (10, 20)
