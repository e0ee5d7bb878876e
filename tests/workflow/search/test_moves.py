"""Moves make a plan better, and what they say they gained is what predictions of the same passes differ by."""

from __future__ import annotations

from itertools import pairwise

import pytest

from echograph.errors import UnknownNameError, UsageError
from echograph.ir.graph import StepGraph
from echograph.workflow.plan import Plan
from echograph.workflow.predict import predict
from echograph.workflow.search.moves import TunedPlan, improve, moves
from echograph.workflow.system import System

PLAN = Plan(gpus=4, global_batch=16, micro_batch=2, recompute="full", overlap_grad_reduce=False)


@pytest.mark.parametrize(
    ("method", "most"),
    [("greedy", 15), *(pytest.param(m, 30, marks=pytest.mark.slow) for m in ("greedy", "annealing"))],
)
def test_the_moves_lead_from_the_plan_to_the_best(dense: StepGraph, method: str, most: int) -> None:
    system = System("dgx-h100")
    found = improve(dense, PLAN, system, method=method, most=most)
    assert found.first_s == predict(dense, PLAN, system)[0].step_s
    assert found.step_s < found.first_s and found.predicted <= most
    assert found.step_s == predict(dense, Plan(passes=found.passes), system)[0].step_s
    assert found.taken[0].before_s == found.first_s and found.taken[-1].after_s == found.step_s
    assert all(one.after_s == other.before_s for one, other in pairwise(found.taken))
    if method == "greedy":
        assert all(move.after_s < move.before_s for move in found.taken)
    assert found.passes in str(found)


def test_each_kind_of_move_is_there(dense: StepGraph) -> None:
    said = {what for what, _ in moves(TunedPlan(Plan(zero=1, gpus=8, global_batch=16)), dense)}
    for words in (
        "--micro-batch 1", "--recompute 2", "--precision fp8", "--overlap-grad-reduce false",
        "--overlap-param-gather true", "--mesh-order tp-cp-ep-pp-dp", "buckets of 50 MiB", "fusion",
    ):  # fmt: skip
        assert words in said


def test_what_does_not_fit_is_not_taken(dense: StepGraph) -> None:
    system = System("dgx-h100")
    memory = predict(dense, PLAN, system)[0].memory
    assert memory is not None
    found = improve(dense, PLAN, system.with_memory(memory.device_bytes), most=12)
    plan = found.setting.plan
    assert found.step_s <= found.first_s
    kept = predict(dense, Plan(passes=found.passes), system)[0].memory
    assert kept is not None and kept.device_bytes <= memory.device_bytes, plan


def test_what_is_wrong_is_said(dense: StepGraph) -> None:
    with pytest.raises(UnknownNameError, match="greedy"):
        improve(dense, PLAN, method="gredy")
    with pytest.raises(UsageError, match="--global-batch"):
        improve(dense, Plan(gpus=4))
