"""Plans of a search share what they have in common, and each step is that of the plan alone."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from echograph.errors import EchoError
from echograph.ir.graph import StepGraph
from echograph.workflow.plan import Plan
from echograph.workflow.predict import predict
from echograph.workflow.predictor import Predictor
from echograph.workflow.system import System

SHARDED = ({"zero": 2}, {"zero": 3}, {"zero": 3, "hsdp_replicas": 2})


@pytest.mark.parametrize("words", SHARDED, ids=str)
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("of", ["dense", "experts"])
def test_sharding_is_written_once_for_all_micro_batches(
    of: str, words: dict[str, Any], pp: int, request: pytest.FixtureRequest
) -> None:
    """What divides the model looks at parameters; activations of any size go through."""
    step: StepGraph = request.getfixturevalue(of)
    mine = Predictor(step, System("dgx-h100"))
    for micro_batch in (4, 3, 6):
        plan = Plan(gpus=4 * pp, pp=pp, global_batch=96, micro_batch=micro_batch, **words)
        whole, _ = predict(step, plan, System("dgx-h100"), memory=False)
        assert mine._step(plan).step_ps == whole.step_ps
    assert list(map(len, mine.jobs._replicas.values())) == [1]


@pytest.mark.parametrize("tp", [2, 4])
def test_other_parameters_are_not_taken_for_the_same(tp: int, dense: StepGraph) -> None:
    mine = Predictor(dense, System("dgx-h100"))
    for ranks, cp in product((1, tp), (1, 2)):
        plan = Plan(gpus=16, tp=ranks, cp=cp, pp=2, zero=3, global_batch=96, micro_batch=2)
        whole, _ = predict(dense, plan, System("dgx-h100"), memory=False)
        assert mine.predict(plan, memory=False, interval=False).step_ps == whole.step_ps


@pytest.mark.slow
@pytest.mark.parametrize("of", ["dense", "experts"])
def test_every_plan_of_a_space(of: str, request: pytest.FixtureRequest) -> None:
    from random import Random

    from echograph.workflow.search.space import space

    step: StepGraph = request.getfixturevalue(of)
    system = System("dgx-h100")
    among = space(step, system.cluster, Plan(gpus=16, global_batch=96), {})
    choices = list(among.choices())
    mine, taken = Predictor(step, system), 0
    for chosen in Random(5).sample(choices, 150):
        plan = among.plan(chosen)
        try:
            whole, _ = predict(step, plan, system, memory=False)
        except EchoError:
            continue
        taken += 1
        assert mine.predict(plan, memory=False, interval=False).step_ps == whole.step_ps, plan.given
    assert taken > 75
