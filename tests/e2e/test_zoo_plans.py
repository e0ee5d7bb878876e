"""Every model of the zoo, as it is, lowers under at least six plans; where one does not fit it, it says so."""

from __future__ import annotations

from typing import Any

import pytest

from echograph.errors import EchoError, GraphError
from echograph.frontend.pytorch.spec import StepSpec
from echograph.models import get_model, model_names
from echograph.workflow.compile import compile_entry
from echograph.workflow.plan import Plan
from echograph.workflow.predict import lower

pytestmark = [pytest.mark.torch, pytest.mark.slow]

PLANS: dict[str, dict[str, Any]] = {
    "DDP": {"gpus": 64},
    "ZeRO-1": {"gpus": 64, "zero": 1, "global_batch": 128},
    "ZeRO-2": {"gpus": 64, "zero": 2},
    "FSDP": {"gpus": 64, "zero": 3},
    "HSDP": {"gpus": 64, "zero": 3, "hsdp_replicas": 8},
    "recompute": {"gpus": 64, "recompute": "full"},
    "TP": {"gpus": 64, "tp": 2},
    "TP+SP": {"gpus": 64, "tp": 2, "sequence_parallel": True},
    "PP": {"gpus": 64, "pp": 2, "global_batch": 128},
    "3D": {"gpus": 64, "tp": 2, "pp": 2, "zero": 1, "global_batch": 128},
    "ZB-H1": {"gpus": 64, "pp": 2, "schedule": "zb-h1", "global_batch": 128},
    "CP": {"gpus": 64, "cp": 2},
    "EP": {"gpus": 64, "ep": 8},
    "FSDP+TP": {"gpus": 64, "tp": 2, "zero": 3},
}


@pytest.mark.parametrize("name", model_names())
def test_lowers_under_at_least_six_plans(name: str) -> None:
    graph = compile_entry(get_model(name), StepSpec(), batch_size=1)
    refused: dict[str, str] = {}
    for plan, options in PLANS.items():
        try:
            job = lower(graph, Plan(**options))
        except GraphError:
            raise  # a pass that makes what does not verify is wrong, whatever the plan
        except EchoError as error:
            refused[plan] = str(error)
        else:
            assert job.world_size == 64
    taken = len(PLANS) - len(refused)
    print(f"{name:<26} {taken} of {len(PLANS)}", *(f"\n    {p}: {w}" for p, w in refused.items()))
    assert taken >= 6, refused
    assert all("\n" not in why for why in refused.values())
