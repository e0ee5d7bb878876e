"""A job that is put together from the stages that differ is the one that the passes make of all."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pipelines import tied_step

from echograph.errors import PlanError
from echograph.ir import serde
from echograph.ir.graph import JobGraph, StepGraph
from echograph.ir.passes.base import Pass, run, split_at_job
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fully_shard import FullyShard
from echograph.ir.passes.mesh import MeshOrder
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.passes.pipeline.alike import NotAlike, whole
from echograph.ir.text import to_text
from echograph.simulator.clusters import load_cluster
from echograph.workflow.plan import Plan, passes
from echograph.workflow.shared import SharedJobs

GRAPHS = Path(__file__).parents[1] / "golden" / "predictions" / "graphs"
LAYERS = 12


@cache
def model(name: str) -> StepGraph:
    step = serde.load(GRAPHS / f"{name}.pb")
    assert isinstance(step, StepGraph)
    return step


def check(step: StepGraph, its: tuple[Pass, ...], jobs: SharedJobs | None = None) -> int:
    """That the job is the same, number by number and name by name; how many stages stand for others."""
    try:
        expected = run(step, its, to=JobGraph)
    except PlanError as error:
        with pytest.raises(PlanError) as refused:
            SharedJobs().job(step, its)
        assert str(refused.value) == str(error)
        return 0
    jobs = jobs or SharedJobs()
    sample = jobs.sample(step, its[:2])
    whole(sample)
    made = jobs.job(step, its)
    assert list(to_text(made)) == list(to_text(expected))
    assert (made.passes, made.name, made.workload) == (expected.passes, expected.name, expected.workload)
    assert made.strings != () and not any("\0" in text for text in made.strings)
    return len(sample.stand_for) - len({*sample.stand_for})


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    """Any pipeline of `LAYERS` layers, with stages that are equal and stages that are not."""
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "zb-h1", "interleaved"]))
    stages = draw(st.integers(2, 4 if schedule == "interleaved" else 9))
    chunks = draw(st.integers(2, LAYERS // stages)) if schedule == "interleaved" else 1
    count = stages * chunks
    layers = None
    if draw(st.booleans()):
        own = draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
        ends = [min(end, LAYERS - count + n) for n, end in enumerate(accumulate(own), 1)]
        layers = tuple(b - a for a, b in zip([0, *ends[:-1]], [*ends[:-1], LAYERS], strict=True))
    micro_batches = draw(st.integers(1, 3)) * stages if chunks > 1 else draw(st.integers(1, 7))
    return Pipeline(stages=stages, micro_batches=micro_batches, schedule=schedule, chunks=chunks, layers=layers)


@st.composite
def replicas(draw: st.DrawFn) -> Pass:
    """Any data parallelism."""
    count, zero = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([0, 1, 2, 3]))
    if zero == 3:
        return FullyShard(replicas=count)
    ahead, small = draw(st.booleans()) and zero > 0, draw(st.sampled_from([None, 1024]))
    return DataParallel(
        replicas=count, zero=zero, overlap_param_gather=ahead, overlap_grad_reduce=draw(st.booleans()),
        bucket_bytes=small,
    )  # fmt: skip


layers_that_differ = given(
    pipeline=pipelines(), data=replicas(), clip=st.booleans(), skip=st.booleans(),
    rows=st.one_of(
        st.just([8] * LAYERS),
        st.lists(st.sampled_from([8, 8, 8, 24]), min_size=LAYERS, max_size=LAYERS),
        st.sampled_from([[8, 24] * (LAYERS // 2), [8] * 6 + [24] * 6, [8] * 5 + [24] + [8] * 6]),
    ),
)  # fmt: skip


@settings(deadline=None, max_examples=25)
@layers_that_differ
def test_a_pipeline_of_layers_that_differ(
    pipeline: Pipeline, data: Pass, clip: bool, skip: bool, rows: list[int]
) -> None:
    check(tied_step(LAYERS, clip=clip, skip=skip, rows=rows), (pipeline, data))


@pytest.mark.slow
@settings(deadline=None, max_examples=400)
@layers_that_differ
def test_many_pipelines_of_layers_that_differ(
    pipeline: Pipeline, data: Pass, clip: bool, skip: bool, rows: list[int]
) -> None:
    check(tied_step(LAYERS, clip=clip, skip=skip, rows=rows), (pipeline, data))


@pytest.mark.parametrize(
    ("rows", "stand"),
    [([8] * LAYERS, 3), ([8, 24] * 6, 3), ([8] * 8 + [24] * 4, 1), ([8] * 4 + [24] * 2 + [8] * 6, 0)],
)
def test_a_stage_stands_for_those_that_do_the_same_alone(rows: list[int], stand: int) -> None:
    """What the stages around it make counts, too: they send it to it."""
    step = tied_step(LAYERS, rows=rows)
    its = Pipeline(stages=6, micro_batches=8), DataParallel(replicas=2, zero=1)
    assert check(step, its) == stand


@pytest.mark.parametrize(
    ("words", "stand"),
    [
        # Stages 3 and 4 pass on what stage 1 has nothing to do with, each from another distance.
        ({"skip_from": 5}, 0),
        # Those of the first three stages name the layer before, those of the others the one before that.
        ({"names": [0] + [1] * 5 + [2] * 6}, 2),
    ],
)
def test_a_stage_stands_for_none_that_passes_on_or_names_something_else(words: dict[str, Any], stand: int) -> None:
    its = Pipeline(stages=6, micro_batches=8), DataParallel(replicas=2, zero=1)
    assert check(tied_step(LAYERS, **words), its) == stand


@pytest.mark.parametrize("rows", [[16] * LAYERS, [16] * 6 + [24] * 6])
def test_jobs_of_several_steps_are_each_its_own(rows: list[int]) -> None:
    """Neither steps of one structure nor such as went through the same passes are taken for each other."""
    jobs, its = SharedJobs(), (Pipeline(stages=6, micro_batches=8), DataParallel(replicas=2, zero=1))
    for step in (tied_step(LAYERS), tied_step(LAYERS, rows=rows), replace(tied_step(LAYERS), name="another")):
        check(step, its, jobs)


@st.composite
def plans(draw: st.DrawFn) -> tuple[str, Plan]:
    """A model and a plan with a pipeline, which it may not be able to take."""
    name = draw(st.sampled_from(["bert", "gpt2-xl", "llama", "mixtral"]))
    pp, tp, dp = (draw(st.sampled_from(sizes)) for sizes in ((3, 4, 5, 6, 8), (1, 1, 2), (1, 2, 4)))
    ep = draw(st.sampled_from([1, 2])) if name == "mixtral" else 1
    vpp, zero = draw(st.sampled_from([1, 1, 2, 3])), draw(st.sampled_from([0, 1, 2, 3]))
    assume(not (zero == 3 and ep > 1))
    counts = st.integers(1, 3).map(lambda n: n * pp) if vpp > 1 else st.integers(1, 9)
    return name, Plan(
        gpus=tp * pp * dp * ep,
        tp=tp,
        pp=pp,
        vpp=vpp,
        ep=ep,
        zero=zero,
        schedule="" if vpp > 1 else draw(st.sampled_from(["", "gpipe", "zb-h1"])),
        global_batch=model(name).workload.batch_size * dp * ep * draw(counts),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        precision=draw(st.sampled_from(["", "fp8"])),
        overlap_param_gather=zero in (1, 2) and draw(st.booleans()),
        mesh_order=draw(st.sampled_from(["tp-cp-ep-dp-pp", "pp-tp-dp-cp-ep"])),
    )


few = settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


@few
@given(plans())
def test_any_plan(drawn: tuple[str, Plan]) -> None:
    of_model(*drawn, SharedJobs())


@pytest.mark.slow
@settings(few, max_examples=150)
@given(plans())
def test_many_plans_one_after_the_other(drawn: tuple[str, Plan]) -> None:
    of_model(*drawn, _JOBS[drawn[0]])


_JOBS = {name: SharedJobs() for name in ("bert", "gpt2-xl", "llama", "mixtral")}


def of_model(name: str, plan: Plan, jobs: SharedJobs) -> None:
    step = model(name)
    try:
        before, rest = split_at_job(passes(plan, step.workload, load_cluster("dgx-h100")))
        step = run(step, before, to=StepGraph)
    except PlanError:
        return
    assert all(isinstance(one, MeshOrder) for one in rest[2:])
    check(step, rest, jobs)


def test_chunks_that_turn_back_are_lowered_one_by_one() -> None:
    step = model("llama")
    its = Pipeline(stages=4, micro_batches=8, schedule="zb-v", chunks=2), DataParallel(replicas=2)
    with pytest.raises(NotAlike, match="turn back"):
        SharedJobs().sample(step, its)
    assert list(to_text(SharedJobs().job(step, its))) == list(to_text(run(step, its)))
