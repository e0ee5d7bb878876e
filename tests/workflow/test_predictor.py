"""A step put together from the passes that differ is that of the whole job, to the picosecond."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from echograph.errors import EchoError
from echograph.ir import serde
from echograph.ir.graph import JobGraph, StepGraph
from echograph.ir.passes.base import run, split_at_job
from echograph.ir.passes.pipeline.alike import NotAlike
from echograph.simulator.result import Result
from echograph.workflow.plan import Plan, passes
from echograph.workflow.predict import predict, simulate
from echograph.workflow.predictor import Predictor
from echograph.workflow.scenario import Scenario
from echograph.workflow.shared import SharedSteps
from echograph.workflow.system import System

GRAPHS = Path(__file__).parents[1] / "golden" / "predictions" / "graphs"
MODELS = ("bert", "gpt2-xl", "llama", "mixtral", "vit")


@cache
def graph(name: str) -> StepGraph:
    step = serde.load(GRAPHS / f"{name}.pb")
    assert isinstance(step, StepGraph)
    return step


@cache
def predictor(name: str) -> Predictor:
    return Predictor(graph(name), System("dgx-h100"))


@st.composite
def plans(draw: st.DrawFn) -> tuple[str, Plan]:
    """A model and a plan, which it may not be able to take."""
    model = draw(st.sampled_from(MODELS))
    pp, tp, dp = (draw(st.sampled_from(sizes)) for sizes in ((1, 2, 3, 4, 6), (1, 1, 2), (1, 2, 4)))
    ep = draw(st.sampled_from([1, 2, 4])) if model == "mixtral" else 1
    cp = draw(st.sampled_from([1, 2, 4])) if model == "llama" else 1
    vpp = draw(st.sampled_from([1, 1, 2, 6])) if pp > 1 else 1
    zero = draw(st.sampled_from([0, 1, 2, 3]))
    assume(not (zero == 3 and ep > 1))
    schedule = "" if pp == 1 or vpp > 1 else draw(st.sampled_from(["", "gpipe", "1f1b", "zb-h1"]))
    counts = st.integers(1, 4).map(lambda n: n * pp) if vpp > 1 else st.integers(1, 13)
    return model, Plan(
        gpus=tp * pp * dp * ep * cp,
        tp=tp,
        cp=cp,
        sequence_parallel=tp > 1 and draw(st.booleans()),
        pp=pp,
        vpp=vpp,
        ep=ep,
        zero=zero,
        schedule=schedule,
        global_batch=graph(model).workload.batch_size * dp * ep * draw(counts),
        recompute=draw(st.sampled_from(["none", "none", "selective", "full"])),
        overlap_param_gather=zero in (1, 2) and draw(st.booleans()),
        overlap_grad_reduce=draw(st.sampled_from([None, False])),
        reshard_after_forward=draw(st.sampled_from([None, True])) if zero == 3 else None,
        mesh_order=draw(st.sampled_from(["tp-cp-ep-dp-pp", "tp-cp-ep-dp-pp", "pp-tp-dp-cp-ep"])),
    )


few = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


@few
@given(plans())
def test_any_plan(drawn: tuple[str, Plan]) -> None:
    check(*drawn)


@pytest.mark.slow
@settings(few, max_examples=300)
@given(plans())
def test_many_plans(drawn: tuple[str, Plan]) -> None:
    check(*drawn)


def alone(model: str, plan: Plan) -> Result:
    """A prediction of the job that the passes make of all stages, which shares nothing."""
    step, system = graph(model), System("dgx-h100")
    job = run(step, passes(plan, step.workload, system.cluster), to=JobGraph)
    return simulate(job, system, plan=plan, memory=False)


def check(model: str, plan: Plan) -> None:
    try:
        whole = alone(model, plan)
    except EchoError as error:
        with pytest.raises(type(error)):
            predictor(model).predict(plan, memory=False, interval=False)
        return
    assert predictor(model)._step(plan).step_ps == whole.step_ps


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("gpt2-xl", Plan(gpus=16, pp=4, vpp=3, global_batch=64, zero=1)),
        ("mixtral", Plan(gpus=32, tp=2, pp=4, ep=4, global_batch=64)),
        ("llama", Plan(gpus=32, tp=2, pp=4, global_batch=96, zero=3)),
        ("bert", Plan(gpus=1024)),
        ("llama", Plan(gpus=32, tp=2, pp=4, vpp=2, schedule="zb-v", global_batch=96)),
        ("llama", Plan(gpus=16, cp=4, pp=2, vpp=4, global_batch=64, zero=1)),
    ],
)
def test_the_rest_of_a_result_is_that_of_the_whole_job(model: str, plan: Plan) -> None:
    whole = alone(model, plan)
    step = predictor(model).predict(plan, memory=False, interval=False)
    assert (step.step_ps, step.samples, step.tokens, step.gpus) == (
        whole.step_ps, whole.samples, whole.tokens, whole.gpus
    )  # fmt: skip
    assert step.plan == whole.plan
    assert (step.breakdown, step.limits, step.interval_ps) == (whole.breakdown, whole.limits, whole.interval_ps)
    assert step.mfu == whole.mfu and step.memory is None
    assert replace(predictor(model).predict(plan, memory=False, interval=False), gpus=1).gpus == 1


@pytest.mark.parametrize("vpp", [1, 4, 8])
@pytest.mark.parametrize("cp", [2, 4])
def test_messages_around_a_ring_are_none_between_stages(cp: int, vpp: int) -> None:
    plan = Plan(gpus=4 * cp, cp=cp, pp=2, vpp=vpp, global_batch=64)
    found = predictor("llama")._step(plan)
    for engine in ("auto", "static"):
        whole, _ = predict(graph("llama"), plan, System("dgx-h100"), engine=engine, memory=False)
        assert found.step_ps == whole.step_ps


def test_with_memory_and_interval_it_is_the_whole_prediction() -> None:
    plan = Plan(gpus=16, pp=4, global_batch=64)
    whole, _ = predict(graph("gpt2-xl"), plan, System("dgx-h100"))
    found = predictor("gpt2-xl").predict(plan)
    assert (found.step_ps, found.interval_ps, found.memory) == (whole.step_ps, whole.interval_ps, whole.memory)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(gpus=8, pp=2, micro_batch=1, global_batch=64, stack="megatron-core"),
        Plan(gpus=8, zero=3, global_batch=32),
    ],
)
def test_memory_alone_has_the_bytes_of_the_whole_prediction(plan: Plan) -> None:
    """It is told without durations, and without what the peak is made of."""
    memory, whole = predictor("llama").memory(plan, inf), predict(graph("llama"), plan)[0].memory
    assert memory is not None and whole is not None and whole.tensors
    assert memory == replace(whole, peak_at={}, by_role={}, contributors=(), tensors=())


def test_a_scenario_is_not_left_out() -> None:
    plan, scenario = Plan(gpus=16, pp=4, global_batch=64), Scenario(jitter=0.1)
    whole, _ = predict(graph("gpt2-xl"), plan, System("dgx-h100"), scenario, memory=False)
    found = Predictor(graph("gpt2-xl"), System("dgx-h100"), scenario).predict(plan, memory=False, interval=False)
    assert found.step_ps == whole.step_ps
    assert found.step_ps > predictor("gpt2-xl").predict(plan, memory=False, interval=False).step_ps


def test_hosts_that_wait_are_told() -> None:
    plan = Plan(gpus=16, pp=4, global_batch=64)
    system = System("dgx-h100", host_waits=True)
    whole, _ = predict(graph("gpt2-xl"), plan, system, memory=False)
    assert Predictor(graph("gpt2-xl"), system)._step(plan).step_ps == whole.step_ps


def test_stages_that_stand_for_others_are_lowered_once() -> None:
    """Sixteen stages are three that differ; with layers of other numbers, more."""
    from echograph.ir.passes.pipeline import Pipeline

    even = Pipeline(stages=16, micro_batches=32).alike(graph("gpt2-xl"))
    assert len(even.job.programs) == 3
    assert even.stand_for == (0, *[1] * 14, 15)
    odd = Pipeline(stages=4, micro_batches=8, layers=(10, 13, 13, 12)).alike(graph("gpt2-xl"))
    assert odd.stand_for == (0, 1, 1, 3)
    other = Pipeline(stages=4, micro_batches=8, layers=(10, 13, 14, 11)).alike(graph("gpt2-xl"))
    assert other.stand_for == (0, 1, 2, 3)


def test_what_a_step_is_laid_out_of_is_known_for_other_sizes_and_counts() -> None:
    """More micro-batches, and samples of another size, take other times and wait for the same."""
    once = Predictor(graph("llama"), System("dgx-h100"))
    size = graph("llama").workload.batch_size
    for dp, count in ((2, 8), (2, 24), (4, 12), (2, 2)):
        plan = Plan(gpus=4 * dp, pp=4, zero=1, global_batch=size * dp * count)
        whole, _ = predict(graph("llama"), plan, System("dgx-h100"), memory=False)
        assert once._step(plan).step_ps == whole.step_ps
    few, many = (len(its.labels[0]) for its in once._layouts.values() if not isinstance(its, NotAlike))
    assert len(once._layouts) == 2 and {few, many} == {2 * 2 + 1, 2 * 3 + 1}


def test_stages_that_were_written_are_in_no_cycle() -> None:
    from echograph.ir.passes.pipeline import Chunk, Pipeline

    gc.collect()
    was = gc.isenabled()
    gc.disable()
    try:
        Pipeline(stages=4, chunks=2, schedule="interleaved", micro_batches=8).alike(graph("gpt2-xl"))
        assert not any(isinstance(each, Chunk) for each in gc.get_objects())
    finally:
        (gc.enable if was else gc.disable)()


def test_what_cannot_be_put_together_is_refused() -> None:
    plan = Plan(gpus=4, pp=2, vpp=2, ep=2, global_batch=16, overlap_moe_expert_parallel_comm=True)
    with pytest.raises(NotAlike, match="pairs"):
        predictor("mixtral")._step(plan)
    whole, _ = predict(graph("mixtral"), plan, System("dgx-h100"), memory=False)
    assert predictor("mixtral").predict(plan, memory=False, interval=False).step_ps == whole.step_ps


def test_steps_that_begin_with_the_same_passes_are_shared() -> None:
    step = graph("llama")
    shared, system = SharedSteps(step), System("dgx-h100")
    plan = Plan(gpus=4, tp=2, recompute="full", global_batch=4 * step.workload.batch_size)
    before = [
        split_at_job(passes(one, step.workload, system.cluster))[0]
        for one in (plan, replace(plan, cp=2), replace(plan, pp=2))
    ]
    first, longer, again = map(shared.after, before)
    assert again is first and longer is not first
    assert longer.passes[: len(first.passes)] == first.passes
    alone = run(step, before[1], to=StepGraph)
    assert [*serde.encode(longer)] == [*serde.encode(alone)]


def test_many_steps_are_not_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echograph.workflow.shared.MOST_STEPS", 2)
    step, system = graph("llama"), System("dgx-h100")
    shared = SharedSteps(step)
    plans = [Plan(gpus=tp, tp=tp, global_batch=4 * step.workload.batch_size) for tp in (1, 2, 4)]
    before = [split_at_job(passes(plan, step.workload, system.cluster))[0] for plan in plans]
    made = [shared.after(its) for its in before]
    # What was asked for last is there still, with what it begins with.
    assert shared.after(before[2]) is made[2] and shared.after(before[0]) is made[0]
    assert shared.after(before[1]) is not made[1]


@pytest.mark.parametrize("collects", [True, False])
def test_cycles_are_looked_for_as_before(collects: bool) -> None:
    was = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        plan = Plan(gpus=2, pp=2, global_batch=4 * graph("bert").workload.batch_size)
        predictor("bert").predict(plan, memory=False, interval=False)
        assert gc.isenabled() == collects
    finally:
        (gc.enable if was else gc.disable)()


def test_what_others_froze_stays_frozen() -> None:
    """Objects that whoever calls keeps from being looked through."""
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        plan = Plan(gpus=2, pp=2, global_batch=4 * graph("bert").workload.batch_size)
        predictor("bert").predict(plan, memory=False, interval=False)
        assert gc.get_freeze_count() > frozen // 2 > 0  # some are no longer referred to
    finally:
        gc.unfreeze()
