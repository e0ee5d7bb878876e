"""What passes made of a step has the sizes of any other step of its structure, as if they had made it of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from echograph.errors import PlanError
from echograph.ir import serde
from echograph.ir.builder import GraphBuilder
from echograph.ir.columns import OP_COLUMNS, TENSOR_COLUMNS, Ragged
from echograph.ir.graph import JobGraph, StepGraph
from echograph.ir.passes.base import pass_text, run
from echograph.ir.passes.data_parallel import MIB, DataParallel
from echograph.ir.passes.fully_shard import FullyShard
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.passes.rewrite import PassLabel
from echograph.ir.passes.tensor_parallel import TensorParallel
from echograph.ir.structure import structure
from echograph.ir.types import DType, Phase, TensorRole

GRAPHS = Path(__file__).parents[1] / "golden" / "predictions" / "graphs"


@cache
def shared(model: str, ranks: int) -> StepGraph:
    step = serde.load(GRAPHS / f"{model}.pb")
    return run(step, (TensorParallel(size=ranks),), to=StepGraph)


def same(one: JobGraph, other: JobGraph) -> bool:
    for mine, its, columns in ((one.tensors, other.tensors, TENSOR_COLUMNS), (one.ops, other.ops, OP_COLUMNS)):
        for name in columns:
            a, b = getattr(mine, name), getattr(its, name)
            if isinstance(a, Ragged):
                if not (np.array_equal(a.values, b.values) and np.array_equal(a.offsets, b.offsets)):
                    return False
            elif not np.array_equal(a, b):
                return False
    if not all(np.array_equal(a.calls, b.calls) for a, b in zip(one.programs, other.programs, strict=True)):
        return False
    facts = ("blocks", "mesh", "groups", "workload")
    alike = all(getattr(one, name) == getattr(other, name) for name in facts)
    return alike and one.ops.attribute_values == other.ops.attribute_values


@pytest.mark.parametrize("model", ["llama", "bert", "mixtral"])
@pytest.mark.parametrize(("chunks", "schedule"), [(1, "1f1b"), (2, "interleaved"), (1, "zb-h1")])
def test_stages_have_the_sizes_of_another_step(model: str, chunks: int, schedule: str) -> None:
    two, four = shared(model, 2), shared(model, 4)
    assert structure(two) == structure(four)
    pipeline = Pipeline(stages=4, micro_batches=8, chunks=chunks, schedule=schedule)
    made, known = pipeline.alike(four), pipeline.alike(two)
    assert known.sized is not None
    found = known.of_step(four)
    assert same(found.job, made.job) and not same(found.job, known.job)
    assert (found.labels, found.stand_for) == (made.labels, made.stand_for)


@pytest.mark.parametrize("model", ["llama", "bert"])
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("bucket", [1, 200 * MIB])
def test_replicas_have_the_sizes_of_another_step(model: str, zero: int, bucket: int) -> None:
    pipeline = Pipeline(stages=4, micro_batches=8)
    two, four = (pipeline.alike(shared(model, ranks)) for ranks in (2, 4))
    few = DataParallel(replicas=3, zero=zero, bucket_bytes=bucket, first_bucket_bytes=bucket)
    many = DataParallel(replicas=16, zero=zero, bucket_bytes=bucket, first_bucket_bytes=bucket)
    known, (job, labels) = few.alike(two.job, two.labels), many.labelled(four.job, four.labels)
    found = known.of_graph(four.job, many)
    if found is None:  # buckets of such a size hold more of smaller shards
        assert not np.array_equal(job.ops.inputs.values, known.job.ops.inputs.values)
        return
    assert same(found, job) and known.labels == labels


STRUCTURES = [
    DataParallel(replicas=4, zero=2, bucket_bytes=2**40),
    DataParallel(replicas=8, zero=1, instances=2, bucket_bytes=2**40),
    DataParallel(replicas=4, zero=2, reduce_scatter=False, overlap_grad_reduce=False),
    FullyShard(replicas=4),
    FullyShard(replicas=8, shard=4),
    FullyShard(replicas=8, shard=2, reshard_after_forward=False),
    FullyShard(replicas=4, reduce_every_micro_batch=True, reduce_dtype=DType.FP32),
]


@pytest.mark.parametrize("model", ["llama", "bert", "mixtral"])
@pytest.mark.parametrize("few", STRUCTURES, ids=pass_text)
@pytest.mark.parametrize("stages", [1, 4])
def test_shards_have_the_sizes_of_another_step(model: str, few: DataParallel | FullyShard, stages: int) -> None:
    """Twice as many ranks of tensor parallelism and of what divides: the job that the pass makes."""
    steps: list[StepGraph | JobGraph] = [shared(model, ranks) for ranks in (2, 4)]
    labels: list[Sequence[Sequence[PassLabel]] | None] = [None, None]
    if stages > 1:
        made = [Pipeline(stages=stages, micro_batches=8).alike(shared(model, ranks)) for ranks in (2, 4)]
        steps, labels = [its.job for its in made], [its.labels for its in made]
    elif isinstance(few, DataParallel):
        return  # which are told apart by what lives through the step
    many = replace(few, replicas=2 * few.replicas)
    if isinstance(few, FullyShard) and few.shard is not None:
        many = replace(many, shard=2 * few.shard)
    assert few.few() == many.few()
    known, (job, its) = few.alike(steps[0], labels[0]), many.labelled(steps[1], labels[1])
    assert known.sized is not None
    found = known.of_graph(steps[1], many)
    assert found is not None
    assert same(found, job) and not same(found, known.job) and known.labels == its


def test_another_dimension_that_is_cut_is_another_job() -> None:
    """Stacked experts, fewer than ranks, are cut in their second dimension."""
    builder = GraphBuilder()
    stacked = builder.tensor("w", (4, 8, 8), DType.BF16, TensorRole.PARAMETER)
    gradient = builder.tensor("w.grad", (4, 8, 8), DType.BF16, TensorRole.GRADIENT)
    builder.compute("aten.mul", inputs=(stacked,), phase=Phase.FORWARD)
    builder.compute("aten.mul", inputs=(stacked,), outputs=(gradient,), phase=Phase.BACKWARD)
    builder.compute("aten._fused_adamw_", inputs=(stacked, gradient), phase=Phase.OPTIMIZER)
    step = builder.build(StepGraph)
    known = FullyShard(replicas=4).alike(step)
    assert known.sized is not None and known.of_graph(step, FullyShard(replicas=2)) is not None
    assert known.of_graph(step, FullyShard(replicas=8)) is None


def test_numbers_that_do_not_fit_are_refused_where_the_job_is_known() -> None:
    made = Pipeline(stages=4, micro_batches=8).alike(shared("llama", 2))
    shards = FullyShard(replicas=8, shard=4).alike(made.job, made.labels)
    with pytest.raises(PlanError, match="does not divide"):
        shards.of_graph(made.job, FullyShard(replicas=8, shard=3))
    copies = DataParallel(replicas=8, zero=1, instances=2).alike(made.job, made.labels)
    with pytest.raises(PlanError, match="do not divide"):
        copies.of_graph(made.job, DataParallel(replicas=8, zero=1, instances=3))


def test_buckets_that_hold_other_tensors_are_another_job() -> None:
    """25 MiB of gradients are more tensors of four ranks than of two."""
    pipeline, options = Pipeline(stages=4, micro_batches=8), DataParallel(replicas=2)
    two, four = (pipeline.alike(shared("bert", ranks)) for ranks in (2, 4))
    known = options.alike(two.job, two.labels)
    assert known.of_graph(two.job, options) is not None
    assert known.of_graph(four.job, options) is None


def test_another_structure_is_told_apart() -> None:
    """A step without tensor parallelism has no collectives."""
    whole = serde.load(GRAPHS / "llama.pb")
    assert structure(whole) != structure(shared("llama", 2))
    assert structure(whole) == structure(serde.load(GRAPHS / "llama.pb"))
