"""What passes made of a step has the sizes of any other step of its structure, as if they had made it of that."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from echograph.ir import serde
from echograph.ir.columns import OP_COLUMNS, TENSOR_COLUMNS, Ragged
from echograph.ir.graph import JobGraph, StepGraph
from echograph.ir.passes.base import run
from echograph.ir.passes.data_parallel import MIB, DataParallel
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.passes.tensor_parallel import TensorParallel
from echograph.ir.structure import structure

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
