"""How many GPUs a training needs, which cluster has the best plan, what fits: beside predictions alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from echograph.errors import PlanError, UnknownNameError, UsageError
from echograph.ir.graph import StepGraph
from echograph.workflow.plan import Plan
from echograph.workflow.predict import predict
from echograph.workflow.scenario import Scenario
from echograph.workflow.search import search, sizing
from echograph.workflow.search.sizing import compare_clusters, gpus_needed, most_step_s, what_fits
from echograph.workflow.system import System
from echograph.workflow.training import TrainingOptions, training

PLAN = Plan(global_batch=64, micro_batch=2)
NODE = {"tp": (1,), "pp": (1,), "cp": (1,), "zero": (0,), "recompute": ("none",), "micro_batch": (2,)}


def steps_by_gpus(graph: StepGraph, system: System) -> dict[int, Any]:
    return {n: predict(graph, replace(PLAN, gpus=n), system)[0] for n in (1, 2, 4, 8, 16, 32)}


def test_the_fewest_gpus_are_the_first_that_train_in_time(dense: StepGraph) -> None:
    system = System("dgx-h100")
    results = steps_by_gpus(dense, system)
    for gpus in (4, 16):
        days = training(results[gpus], system, TrainingOptions(train_tokens="1T"))
        assert days is not None
        asked = TrainingOptions(train_tokens="1T", days=days.days * (1 + 1e-9))
        most = most_step_s(dense, PLAN.global_batch, asked)
        expected = min(n for n, result in results.items() if result.step_s <= most)
        found = gpus_needed(dense, PLAN, system, Scenario(), asked)
        assert found.gpus == expected == gpus
        assert found.step_s == results[expected].step_s


def test_failures_take_more_gpus(dense: StepGraph) -> None:
    system = System("dgx-h100")
    days = training(steps_by_gpus(dense, system)[8], system, TrainingOptions(train_tokens="1T"))
    assert days is not None
    asked = TrainingOptions(train_tokens="1T", days=days.days * 1.001)
    failing = Scenario(node_mtbf_hours=20.0, checkpoint_s=120.0, restart_s=600.0)
    assert gpus_needed(dense, PLAN, system, Scenario(), asked).gpus == 8
    assert gpus_needed(dense, PLAN, system, failing, asked).gpus > 8


def test_what_cannot_be_in_time_is_said(dense: StepGraph) -> None:
    asked = TrainingOptions(train_tokens="1000T", days=0.001)
    with pytest.raises(PlanError, match="fast enough: a step may take"):
        gpus_needed(dense, PLAN, System("dgx-h100"), Scenario(), asked)
    with pytest.raises(UsageError, match="--global-batch"):
        gpus_needed(dense, Plan(), System("dgx-h100"), Scenario(), asked)
    with pytest.raises(UsageError, match="--train-tokens"):
        TrainingOptions(days=30.0)


def test_a_search_within_a_time_is_one_without_the_slower_ones(dense: StepGraph) -> None:
    base, over = Plan(global_batch=64), NODE | {"gpus": (2, 4, 8)}
    every = search(dense, base, over=over, top=100)
    steps = sorted(one.step_s for one in every.best)
    most = steps[len(steps) // 2]
    found = search(dense, base, over=over, top=100, most_step_s=most, objective="cost")
    assert sorted(one.step_s for one in found.best) == [step for step in steps if step <= most]
    assert found.losers.too_slow == len(steps) - len(found.best) > 0
    fewest = search(dense, base, over=over, top=100, most_step_s=most, objective="gpus")
    assert [one.gpus for one in fewest.best] == sorted(one.gpus for one in found.best)


def test_each_cluster_has_its_best_plan(dense: StepGraph) -> None:
    base, clusters = Plan(gpus=8, global_batch=64), ["dgx-h100", "dgx-a100"]
    over = NODE | {"zero": (0, 1)}
    found = compare_clusters(dense, base, clusters, asked=TrainingOptions(train_tokens="1B"), over=over)
    assert [row.cluster for row in found.rows] == clusters
    for row in found.rows:
        alone = search(dense, replace(base, cluster=row.cluster), over=over, top=1).best[0]
        assert row.best is not None and row.training is not None
        assert (row.best.step_s, row.best.plan) == (alone.step_s, alone.plan)
        assert row.training.gpu_hours == pytest.approx(row.training.days * 24 * 8)
    assert found.rows[0].joules is not None  # the H100's power is known
    assert "dgx-a100" in str(found)


def test_a_cluster_without_a_plan_says_why_and_an_unknown_one_ends_it(dense: StepGraph) -> None:
    base = Plan(gpus=8, global_batch=64)
    found = compare_clusters(
        dense, base, ["dgx-h100", "dgx-a100"], over=NODE | {"precision": ("fp8",)}
    )  # which A100s cannot compute
    assert found.rows[0].best is not None
    assert found.rows[1].best is None and found.rows[1].why
    with pytest.raises(UnknownNameError):
        compare_clusters(dense, base, ["dgx-h100", "dgx-x100"], over=NODE)
    with pytest.raises(UsageError, match="several"):
        compare_clusters(dense, base, ["dgx-h100"], over=NODE)


def test_the_largest_fits_and_one_more_does_not(dense: StepGraph) -> None:
    system, plan = System("dgx-h100"), Plan(gpus=8)
    system = system.with_memory(3 * 2**29)
    found = {one.of: one for one in what_fits(dense, plan, system)}
    assert set(found) == {"micro-batch", "layers"}
    assert found["micro-batch"].size > 2 and found["layers"].size > 4

    def fits(size: int) -> bool:
        memory = predict(dense, replace(plan, micro_batch=size), system)[0].memory
        assert memory is not None
        return memory.fits

    size = found["micro-batch"].size
    assert fits(size) and not fits(size + 1)


def test_what_fits_is_found_in_few_tries(dense: StepGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    system, plan, tried = System("dgx-h100").with_memory(3 * 2**29), Plan(gpus=8), []
    layers = what_fits(dense, plan, system, progress=lambda stage, *_: tried.append(stage))[1]
    assert not layers.tried_all
    own = [int(stage.rsplit(" ")[-1].replace(",", "")) for stage in tried if "layers" in stage]
    assert layers.size in own and layers.size + 1 in own, "the next larger was tried, and does not fit"
    doubled = (layers.size // 4).bit_length() + 1
    assert len(own) <= doubled + 5, "memory is nearly a line: few are tried between the last two"
    # Memory is followed layer by layer, so a device that holds thousands would take minutes to fill.
    monkeypatch.setattr(sizing, "MOST_LAYERS", 10)
    layers = what_fits(dense, plan, system)[1]
    assert layers.size == 10 and layers.tried_all and "nothing larger was tried" in str(layers)
    assert layers.to_json()["at_least"] is True


@pytest.mark.slow
def test_the_longest_sequence_is_one_that_was_captured(dense: StepGraph) -> None:
    tried = []

    def capture(tokens: int) -> StepGraph:
        tried.append(tokens)
        if tokens > 2048:
            raise PlanError("no longer")
        return dense

    sequence = what_fits(dense, Plan(gpus=8), System("dgx-h100"), capture)[-1]
    assert tried == [512, 1024, 2048, 4096]
    assert sequence.why == "no longer" and "no longer" in str(sequence)
