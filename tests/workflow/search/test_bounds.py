"""Bounds are below what is predicted, for any plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random

import numpy as np
import pytest

from echograph.errors import EchoError, PlanError
from echograph.ir.graph import StepGraph
from echograph.profiler.costs import estimate
from echograph.profiler.costs.power import sustained_clock
from echograph.simulator.clusters import cluster_names, load_cluster
from echograph.simulator.collectives import CollectiveName
from echograph.simulator.durations import NetworkModel
from echograph.workflow.plan import Plan
from echograph.workflow.predict import predict
from echograph.workflow.scenario import Scenario
from echograph.workflow.search.bounds import Bounds, _points
from echograph.workflow.search.space import space
from echograph.workflow.search.step_cost import HELD
from echograph.workflow.system import System

OVER = {
    "schedule": ("", "gpipe", "1f1b", "zb-h1", "interleaved", "zb-v"),
    "recompute": ("none", "selective", "selective-op", "full", "2"),
    "cp": (1, 2),
}


@cache
def _system(cluster: str, power_limit_W: float | None = None) -> System:
    return System(cluster, power_limit_W=power_limit_W)


def check(
    graph: StepGraph, base: Plan, over: dict[str, tuple[object, ...]], draws: int, seed: int = 0,
    power_limit_W: float | None = None,
) -> None:  # fmt: skip
    """Draws plans of a space: each is predicted no faster and no smaller than its bounds."""
    system = _system(base.cluster, power_limit_W)
    among = space(graph, system.cluster, base, over)
    bounds = Bounds(graph, system, Scenario(), boards=base.gpus or 1)
    choices = [dict(chosen) for chosen in among.choices()]
    compared = 0
    for chosen in Random(seed).sample(choices, min(4 * draws, len(choices))):
        try:
            plan = among.plan(chosen)
            second = bounds.second(plan, chosen["gpus"])
            result, _ = predict(graph, plan, system)
        except EchoError:
            continue
        first = bounds.first(plan, chosen["gpus"])
        assert result.memory is not None
        for bound in (first, second):
            assert type(bound.step_ps) is type(bound.memory_bytes) is float  # as results have them
            assert bound.step_ps <= result.step_ps, plan.given
            assert bound.memory_bytes <= result.memory.device_bytes, plan.given
        assert bounds.by_less(plan, chosen["gpus"]) <= second.step_ps * (1 + 1e-9), plan.given
        compared += 1
        if compared == draws:
            break
    assert compared >= draws // 2


some_plans = pytest.mark.parametrize("draws", [3, pytest.param(24, marks=pytest.mark.slow)])


@some_plans
def test_bounds_of_dense_plans_hold(dense: StepGraph, draws: int) -> None:
    check(dense, Plan(gpus=16, global_batch=64), OVER, draws)


@some_plans
def test_bounds_of_expert_plans_hold(experts: StepGraph, draws: int) -> None:
    check(experts, Plan(gpus=16, global_batch=64), OVER, draws)


@some_plans
def test_bounds_of_context_parallel_plans_hold(dense: StepGraph, draws: int) -> None:
    check(dense, Plan(gpus=16, global_batch=64), OVER | {"cp": (2,), "recompute": ("none", "full")}, draws)


@some_plans
def test_bounds_of_uneven_stages_hold(dense: StepGraph, draws: int) -> None:
    layouts = {"pp": (2, 4), "vpp": (1, 2), "stage_layers": ("1,3", "3,1", "0,4", "0,1,2,1", "1,1,1,1")}
    check(dense, Plan(gpus=8, global_batch=32), layouts | {"cp": (1,)}, draws)


@some_plans
def test_bounds_of_boards_that_power_slows_hold(dense: StepGraph, draws: int) -> None:
    check(dense, Plan(gpus=16, global_batch=64), OVER, draws, power_limit_W=220)


@pytest.mark.parametrize("plan", [Plan(gpus=16), Plan(gpus=16, pp=4), Plan(gpus=16, tp=2, pp=2, zero=1)])
def test_bounds_count_the_slowest_board_and_the_clock_of_each_stage(dense: StepGraph, plan: Plan) -> None:
    plan, system = replace(plan, micro_batch=2, global_batch=256), _system("dgx-h100", 220)
    clocks = list[float]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            estimate, "sustained_clock", lambda *spent: clocks.append(sustained_clock(*spent)) or clocks[-1]
        )
        result, _ = predict(dense, plan, system, memory=False)
    of_one, of_all = (Bounds(dense, system, Scenario(), boards=boards) for boards in (1, 16))
    assert 1.005 * of_one.second(plan, 16).step_ps < of_all.second(plan, 16).step_ps <= result.step_ps
    (stages,) = of_all._stages.values()
    assert len(stages.stretch) == plan.pp and max(clocks) < 0.97
    over = 1 / stages.stretch / np.array(clocks[-plan.pp :])
    assert (over >= 1).all() and (over < 1.08).all(), over


def test_what_is_added_to_gradients_of_the_head_counts(dense: StepGraph) -> None:
    """Its gradient is a view of what the product makes."""
    cost = Bounds(dense, _system("dgx-h100"), Scenario()).step(Plan(gpus=8))
    assert cost.adding_ps[-1] > 1.2 * cost.adding_ps[1]


def test_rings_are_waited_for(dense: StepGraph) -> None:
    cost = Bounds(dense, _system("dgx-h100"), Scenario()).step(Plan(gpus=16, cp=2, global_batch=32))
    assert cost.forward.waits_ps.any()


def test_what_others_found_of_a_step_is_taken(dense: StepGraph) -> None:
    system, plan = _system("dgx-h100"), Plan(gpus=16, tp=2, pp=2, global_batch=32)
    one, other = (Bounds(dense, system, Scenario()) for _ in range(2))
    assert not other.knows(plan)
    other.learn(plan, one.step(plan))
    assert other.knows(replace(plan, pp=4, zero=1)) and not other.knows(replace(plan, tp=4))
    assert other.second(plan, 16) == one.second(plan, 16)
    other.learn(replace(plan, tp=4), PlanError("heads do not divide"))
    with pytest.raises(PlanError, match="heads"):
        other.second(replace(plan, tp=4), 16)


@some_plans
@pytest.mark.parametrize(
    "over",
    [
        {"precision": ("fp8", "bf16")},
        pytest.param({"stack": ("megatron-core", "torchtitan", "deepspeed")}, marks=pytest.mark.slow),
    ],
)
def test_bounds_hold_with_words_that_change_kernels(
    dense: StepGraph, over: dict[str, tuple[str, ...]], draws: int
) -> None:
    check(dense, Plan(gpus=8, global_batch=32), over, draws)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["dgx-a100", "dgx-b200", "ethernet-100g"])
def test_bounds_hold_elsewhere(dense: StepGraph, cluster: str) -> None:
    check(dense, Plan(gpus=32, global_batch=128, cluster=cluster), OVER, 60)


def test_a_scenario_that_shortens_work_lowers_bounds(dense: StepGraph) -> None:
    system, plan = _system("dgx-h100"), Plan(gpus=8, global_batch=32, micro_batch=2)
    whole = Bounds(dense, system, Scenario()).second(plan, 8).step_ps
    scenario = Scenario(scale=("compute=0.25",))
    assert Bounds(dense, system, scenario).second(plan, 8).step_ps == pytest.approx(whole / 4)
    result, _ = predict(dense, plan, system, scenario)
    assert whole / 4 <= result.step_ps


def test_the_second_bound_counts_the_bubble(dense: StepGraph) -> None:
    """A lone micro-batch leaves each stage waiting; of many, what a sample takes is a stage's kernels alone."""
    bounds = Bounds(dense, _system("dgx-h100"), Scenario())
    plans = [Plan(gpus=8, pp=2, zero=1, micro_batch=2, global_batch=batch) for batch in (8, 8192)]
    few, many = (bounds.second(plan, 8).step_ps / (plan.global_batch or 1) for plan in plans)
    cost = bounds.step(plans[0])
    first_layer_ps = float(cost.forward.kernels_ps[:, 0].sum()) / 8
    own_ps = float((cost.forward.kernels_ps + cost.backward.kernels_ps)[:, 2:].sum()) / 8
    assert few >= own_ps + first_layer_ps
    assert few > 1.02 * many


def test_the_first_bound_counts_the_bubble_and_what_is_computed_again(dense: StepGraph) -> None:
    """Of products alone: stages of two layers send theirs once the first of these is through, or later."""
    bounds = Bounds(dense, _system("dgx-h100"), Scenario())
    base = Plan(gpus=8, zero=1, micro_batch=2, global_batch=16)
    alone = bounds.first(base, 8).step_ps
    assert alone > 0
    assert bounds.first(replace(base, tp=2, cp=2), 8).step_ps == pytest.approx(alone)
    staged = bounds.first(replace(base, pp=2), 8).step_ps
    assert 1.05 * alone < staged < 1.5 * alone
    assert bounds.first(replace(base, pp=2, global_batch=16 * 256), 8).step_ps < 256 * alone * 1.2
    again = bounds.first(replace(base, recompute="full"), 8).step_ps
    assert 1.1 * alone < again < 4 / 3 * alone
    # Unless it ends early, or as software does it.
    assert bounds.first(replace(base, recompute="full", recompute_early_stop=True), 8).step_ps == alone


@pytest.mark.parametrize("graph", ["dense", pytest.param("experts", marks=pytest.mark.slow)])
@pytest.mark.parametrize("recompute", ["none", pytest.param("selective", marks=pytest.mark.slow), "full"])
def test_what_a_captured_step_holds_grows_with_its_samples(
    graph: str, recompute: str, request: pytest.FixtureRequest
) -> None:
    """Two steps say it of all others, to the byte."""
    bounds = Bounds(request.getfixturevalue(graph), _system("dgx-h100"), Scenario())
    for size in (1, 3, 6, 1024):
        made, asked = (which(size, recompute) for which in (bounds._held_by, bounds._as_captured))
        assert np.array_equal(np.round(asked.before), made.before)
        assert np.array_equal(np.round(asked.rest), made.rest)


@pytest.mark.parametrize("pp", [1, 2])
def test_a_layer_waits_for_its_own_communication(dense: StepGraph, pp: int) -> None:
    """Between ranks of tensor parallelism nothing is hidden, and the bound comes near; split passes may hide."""
    system = _system("dgx-h100")
    counted, kernels = Bounds(dense, system, Scenario()), Bounds(dense, system, Scenario(jitter=0.1))
    base = {"gpus": 8 * pp, "tp": 8, "pp": pp, "global_batch": 32}
    plan = Plan(**base)
    step_ps = predict(dense, plan, system, memory=False)[0].step_ps
    lower, higher = (bounds.second(plan, 8 * pp).step_ps for bounds in (kernels, counted))
    assert 1.2 * lower < higher <= step_ps
    without = counted.step(plan).backward.waits_ps.sum()
    assert without > 0
    if pp > 1:
        split = counted.second(Plan(**base, schedule="zb-h1"), 16).step_ps
        assert lower < split < higher


@pytest.mark.parametrize(
    ("schedule", "stage", "chunks", "kept"),
    [("1f1b", 0, 1, 4), ("1f1b", 3, 1, 1), ("gpipe", 0, 1, 16), ("interleaved", 0, 2, 11), ("zb-h1", 0, 1, 4)],
)
def test_micro_batches_in_flight_are_those_of_the_schedule(
    schedule: str, stage: int, chunks: int, kept: int
) -> None:
    """Narayanan et al., SC 2021: stages - stage of 1F1B; with chunks (chunks - 1) stages + 2 (stages - 1) + 1."""
    points = _points(schedule, stage, 4, 16, chunks, True)
    gradients, alive = points[:, :chunks], points[:, chunks:]
    assert alive.sum(axis=1).max() == kept
    assert (gradients[alive.sum(axis=1) == kept].sum(axis=1).max() == chunks) == (schedule != "gpipe")


@pytest.mark.parametrize(
    "plan",
    [
        Plan(gpus=8, pp=2, vpp=2, micro_batch=1, global_batch=64),
        Plan(gpus=8, pp=2, zero=1, global_batch=64, recompute="full"),
        Plan(gpus=8, pp=2, vpp=2, zero=3, micro_batch=1, global_batch=64),
        Plan(gpus=8, tp=2, schedule="zb-h1", pp=2, micro_batch=1, global_batch=64),
        Plan(gpus=8, micro_batch=1, global_batch=32),
    ],
)
def test_the_second_bound_of_memory_is_near(dense: StepGraph, plan: Plan) -> None:
    """It counts what is in flight, and gradients; what is left is communication and what a kernel works with."""
    bound = Bounds(dense, _system("dgx-h100"), Scenario()).second(plan, 8).memory_bytes
    result, _ = predict(dense, plan, _system("dgx-h100"))
    assert result.memory is not None
    counted = sum(result.memory.by_role.get(role.name.lower(), 0) for role in HELD)
    beside = sum(result.memory.overhead_bytes.values())
    assert 0.55 * counted < bound - beside <= result.memory.peak_bytes


def test_what_replicas_exchange_at_the_end_is_counted(dense: StepGraph) -> None:
    """ZeRO-1 gathers parameters once all is updated; ahead of the next step's layers it may be hidden."""
    bounds = Bounds(dense, _system("ethernet-100g"), Scenario())
    plan = Plan(gpus=32, pp=2, zero=1, global_batch=64, cluster="ethernet-100g")
    after, ahead = (bounds.second(replace(plan, overlap_param_gather=each), 32).step_ps for each in (False, True))
    ranks, before = range(0, 16), bounds.step(plan).held.before[0]
    gather = NetworkModel(_system("ethernet-100g").cluster).time("all_gather", float(before[2]), ranks)
    assert after - ahead == pytest.approx(1e12 * gather.seconds, rel=0.2)
    many = bounds.second(replace(plan, zero=2, micro_batch=1), 32).step_ps
    assert many > 1.2 * after


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("name", cluster_names())
def test_all_buckets_at_once_take_no_longer_than_one_by_one(name: str, kind: CollectiveName) -> None:
    """What bounds take for granted of what replicas exchange, on every cluster that ships."""
    network = NetworkModel(load_cluster(name))
    for count, apart in ((2, 1), (8, 1), (8, 4), (32, 2), (64, 8)):
        if count * apart > network.cluster.max_gpus:
            continue
        ranks = range(0, count * apart, apart)
        for size in (2.0**power for power in range(10, 34, 3)):
            alone = network.time(kind, size, ranks).seconds
            assert all(network.time(kind, n * size, ranks).seconds <= n * alone * (1 + 1e-9) for n in (2, 7, 64))


def test_in_another_order_of_the_mesh_kernels_alone_count(dense: StepGraph) -> None:
    system = _system("dgx-h100")
    bounds, base = Bounds(dense, system, Scenario()), Plan(gpus=16, tp=8, global_batch=32)
    assert bounds.step(base).forward.waits_ps.any()
    cost = bounds.step(replace(base, mesh_order="dp-tp-cp-ep-pp"))
    assert not cost.forward.waits_ps.any() and not cost.backward.waits_ps.any()
