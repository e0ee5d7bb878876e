from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from layered import PARAMETER_BYTES, layered_step

from echograph.errors import PlanError
from echograph.ir.graph import JobGraph
from echograph.ir.passes.data_parallel import MIB, DataParallel
from echograph.ir.passes.fold import Fold
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.types import CollectiveKind, OpKind, Payload, Phase
from echograph.simulator.engine.static import run
from echograph.simulator.tasks import expand


def buckets(job: JobGraph) -> list[int]:
    ops = job.ops
    reduce = (ops.kind == OpKind.COLLECTIVE) & (ops.variant == CollectiveKind.ALL_REDUCE)
    return ops.nbytes[reduce].tolist()


def executed(job: JobGraph) -> list[str]:
    return [
        job.strings[job.ops.name[op]]
        for _, begin, end, _, _ in job.programs[0].calls.tolist()
        for op in range(begin, end)
    ]


@pytest.mark.parametrize("layers", [1, 7, 40])
@pytest.mark.parametrize("cap", [1 * MIB, 3 * MIB, 25 * MIB])
def test_buckets_are_those_of_torch(layers: int, cap: int) -> None:
    torch = pytest.importorskip("torch")
    import torch.distributed as dist

    step = layered_step(layers)
    ready = 2 * layers + 1
    tensors = [torch.empty(512, 512) for _ in range(ready)]
    groups, _ = dist._compute_bucket_assignment_by_size(tensors, [MIB, cap])
    expected = [len(group) * PARAMETER_BYTES for group in groups]
    assert buckets(DataParallel(replicas=4, bucket_bytes=cap)(step)) == expected


@pytest.mark.parametrize("folded", [False, True])
def test_every_gradient_is_reduced_once_and_nothing_else_changes(folded: bool) -> None:
    step = layered_step(9)
    job = DataParallel(replicas=16)(Fold()(step) if folded else step)
    assert sum(buckets(job)) == 19 * PARAMETER_BYTES
    assert set(job.ops.payload[job.ops.kind == OpKind.COLLECTIVE].tolist()) == {Payload.GRADIENT}
    names = executed(job)
    assert [n for n in names if not n.startswith("ddp.")] == executed(DataParallel(replicas=1)(step))
    assert names.count("ddp.copy_to_bucket") == names.count("ddp.copy_from_bucket") == 19


def test_folding_changes_neither_buckets_nor_order() -> None:
    step = layered_step(12)
    pass_ = DataParallel(replicas=8, bucket_bytes=5 * MIB)
    assert executed(pass_(step)) == executed(pass_(Fold()(step)))


def test_buckets_in_place_copy_nothing() -> None:
    names = executed(DataParallel(replicas=8, gradient_as_bucket_view=True)(layered_step(3)))
    assert not any("copy" in name for name in names)
    assert names.count("ddp.wait") == 1


def test_the_mesh_has_one_axis_of_all_ranks() -> None:
    job = DataParallel(replicas=1024)(layered_step(2))
    assert job.world_size == 1024
    assert [(a.name, a.size) for a in job.mesh] == [("dp", 1024)]
    assert len(job.programs) == 1


def test_one_replica_communicates_nothing() -> None:
    job = DataParallel(replicas=1)(layered_step(2))
    assert not np.any(job.ops.kind == OpKind.COLLECTIVE)


@pytest.mark.parametrize("replicas", [0, -8, 10**12])
def test_absurd_numbers_of_replicas_are_refused(replicas: int) -> None:
    with pytest.raises(PlanError, match="replicas"):
        DataParallel(replicas=replicas)(layered_step(1))


@pytest.mark.parametrize("replicas", [1, 8])
@pytest.mark.parametrize("folded", [False, True])
def test_gradients_accumulate_and_are_reduced_once(replicas: int, folded: bool) -> None:
    step = layered_step(5)
    job = DataParallel(replicas=replicas, micro_batches=3)(Fold()(step) if folded else step)
    names = executed(job)
    parameters = 11
    assert names.count("aten.loss") == 3
    assert names.count("aten.add_") == 2 * parameters
    assert names.count("aten._fused_adam_") == parameters
    assert names.count("ddp.copy_to_bucket") == (parameters if replicas > 1 else 0)
    assert max(i for i, n in enumerate(names) if n == "aten.loss_backward") < names.index("aten._fused_adam_")
    assert sorted(set(job.programs[0].calls[:, 4].tolist())) == [0, 1, 2]


@pytest.mark.parametrize("micro_batches", [0, -1, 10**9])
def test_absurd_numbers_of_micro_batches_are_refused(micro_batches: int) -> None:
    with pytest.raises(PlanError, match="micro-batches"):
        DataParallel(replicas=2, micro_batches=micro_batches)(layered_step(1))


def test_each_stage_of_a_pipeline_reduces_its_own_gradients() -> None:
    step = Fold()(layered_step(6))
    pipeline = Pipeline(stages=3, micro_batches=4)(step)
    job = DataParallel(replicas=8)(pipeline)
    assert [(a.name, a.size) for a in job.mesh] == [("pp", 3), ("dp", 8)]
    reduced = 0
    for program in job.programs:
        ops = [op for _, begin, end, _, _ in program.calls.tolist() for op in range(begin, end)]
        names = [job.strings[job.ops.name[op]] for op in ops]
        first_update = names.index("aten._fused_adam_")
        assert max(i for i, n in enumerate(names) if n.startswith("ddp.bucket_")) < first_update
        reduced += sum(
            int(job.ops.nbytes[op]) for op, n in zip(ops, names, strict=True) if n.startswith("ddp.bucket_")
        )
    assert reduced == 13 * PARAMETER_BYTES
    with pytest.raises(PlanError, match="micro-batches already"):
        DataParallel(replicas=2, micro_batches=2)(pipeline)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("zero", [0, 1])
def test_a_stage_sends_its_last_message_before_it_waits_for_reductions(zero: int, overlap: bool) -> None:
    pipeline = Pipeline(stages=4, micro_batches=4)(Fold()(layered_step(8)))
    job = DataParallel(replicas=8, zero=zero, overlap_grad_reduce=overlap)(pipeline)
    for program in job.programs:
        rows = [op for _, begin, end, _, _ in program.calls.tolist() for op in range(begin, end)]
        sends = [at for at, op in enumerate(rows) if job.ops.kind[op] == OpKind.SEND]
        waits = [at for at, op in enumerate(rows) if job.strings[job.ops.name[op]] in ("ddp.wait", "zero.wait")]
        assert waits
        assert max(sends, default=-1) < min(waits)


def test_stages_reduce_side_by_side() -> None:
    """A pipeline's step grows by the reduction of one stage, not by that of all, one after the other."""
    slow = 10**9

    def step(replicas: int) -> int:
        pipeline = Pipeline(stages=4, micro_batches=4)(Fold()(layered_step(8)))
        job = DataParallel(replicas=replicas, overlap_grad_reduce=False)(pipeline)
        reduces = (job.ops.kind == OpKind.COLLECTIVE) & (job.ops.payload == Payload.GRADIENT)
        time = np.where(reduces, slow, np.where(job.ops.phase == Phase.OPTIMIZER, 0, 1000)).astype(np.int64)
        tasks = expand(job, time, np.zeros(len(time), np.int64))
        start = run(tasks)
        return int((start + tasks.duration).max())

    assert slow < step(8) - step(1) < 1.01 * slow


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_an_optimizer_that_begins_a_call_is_one_that_begins_within(zero: int) -> None:
    step = layered_step(3)
    ((block, begin, end, instance, micro_batch),) = step.programs[0].calls.tolist()
    cut = int(np.flatnonzero(step.ops.phase == Phase.OPTIMIZER)[0])
    assert begin < cut < end
    calls = [(block, begin, cut, instance, micro_batch), (block, cut, end, instance, micro_batch)]
    apart = replace(step, programs=(replace(step.programs[0], calls=np.array(calls, np.int64)),))
    lower = DataParallel(replicas=4, micro_batches=3, zero=zero)
    jobs = [lower(each) for each in (step, apart)]
    assert executed(jobs[0]) == executed(jobs[1])
    assert jobs[0].programs[0].calls.tolist() == jobs[1].programs[0].calls.tolist()
    assert all((job.programs[0].calls[:, 1] < job.programs[0].calls[:, 2]).all() for job in jobs)
