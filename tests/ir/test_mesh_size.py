"""A data-parallel job for other ranks: as lowered for so many, or as a traced one would be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from layered import layered_step

from echograph.errors import PlanError
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import JobGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fold import Fold
from echograph.ir.passes.mesh import ResizeAxes, ResizeWorld
from echograph.ir.text import to_text
from echograph.ir.types import CollectiveKind, DType, Duration, Source


def test_a_resized_job_is_that_of_so_many_ranks() -> None:
    step = Fold()(layered_step(3))
    for replicas in (2, 3, 64):
        wanted = DataParallel(replicas=replicas, micro_batches=2)(step)
        job = ResizeAxes(sizes={"dp": replicas, "tp": 5})(DataParallel(replicas=8, micro_batches=2)(step))
        assert list(to_text(job)) == list(to_text(wanted))
        assert job.world_size == replicas


def test_what_depends_on_the_size_is_refused() -> None:
    job = DataParallel(replicas=8, micro_batches=2, zero=1)(Fold()(layered_step(3)))
    assert ResizeAxes(sizes={"dp": 8})(job) is job
    with pytest.raises(PlanError, match="axis dp: programs or tensors of the job depend on its size"):
        ResizeAxes(sizes={"dp": 4})(job)


def _listed(kind: CollectiveKind = CollectiveKind.ALL_REDUCE, ranks: tuple[int, ...] = (0, 1, 2)) -> JobGraph:
    """Three ranks of two programs that reduce together, as a trace has them."""
    builder = GraphBuilder(streams=("compute", "comm"))
    everyone = builder.group("all", ranks=ranks)
    builder.group("pair, unused", ranks=(0, 2))
    took = (Duration(device="trace", picoseconds=70, source=Source.IMPORTED),)
    for mine in ((0, 2), (1,)):
        begin = builder.op_count()
        builder.compute("work", durations=took)
        builder.collective(
            "it", kind, group=everyone, bytes_per_rank=24, dtype=DType.FP32, stream=1, durations=took
        )
        builder.program([(0, begin, begin + 2, 0, 0)], role=f"{len(mine)} ranks", ranks=mine)
    return builder.build(JobGraph)


def test_a_traced_job_gets_other_ranks_that_do_what_theirs_modulo_the_old_number_did() -> None:
    job = _listed()
    assert ResizeWorld(gpus=3)(job) is job
    for gpus, of_programs in ((8, [(0, 2, 3, 5, 6), (1, 4, 7)]), (2, [(0,), (1,)]), (1, [(0,)])):
        made = ResizeWorld(gpus=gpus)(job)
        assert made.world_size == gpus
        assert [program.ranks for program in made.programs] == of_programs
        assert [group.ranks for group in made.groups] == [tuple(range(gpus))] * 2
        kept = [op for op in made.ops if op.durations]
        assert {op.name for op in kept} == {"work"}
        assert made.ops.nbytes.tolist() == job.ops.nbytes.tolist()


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (lambda: _listed(CollectiveKind.ALL_TO_ALL), "what an all_to_all moves depends on the number of ranks"),
        (lambda: _listed(CollectiveKind.GATHER), "what an gather moves depends on the number of ranks"),
        (lambda: _listed(CollectiveKind.SCATTER), "what an scatter moves depends on the number of ranks"),
        (
            lambda: DataParallel(replicas=3)(layered_step(2)),
            "it was lowered by a plan: lower its step graph for 5",
        ),
    ],
)
def test_a_job_that_is_not_purely_data_parallel_keeps_its_ranks(job: Callable[[], JobGraph], says: str) -> None:
    with pytest.raises(PlanError, match=f"^a job of 3 ranks cannot run on 5: {says}"):
        ResizeWorld(gpus=5)(job())
