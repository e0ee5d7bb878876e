"""What a plan does to the utilisation: it divides the same FLOPs by another time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from small_models import HEADS, LAYERS, SEQUENCE, small_step

from echograph.errors import PlanError, UsageError
from echograph.simulator.result import Result
from echograph.workflow.plan import Plan
from echograph.workflow.predict import predict

pytest.importorskip("transformers", reason="needs the [torch] extra")
pytestmark = pytest.mark.torch

GPUS, BATCH = 8, 32


def predicted(model: str, **options: Any) -> Result:
    plan = Plan(gpus=GPUS, global_batch=BATCH, **options)
    return predict(small_step(model), plan, memory=False)[0]


def rank_flops(result: Result) -> tuple[float, float]:
    """FLOPs of a rank by both figures of the utilisation."""
    assert result.mfu is not None
    assert result.mfu_causal is not None
    able = result.step_ps / 1e12 * result.peak_flops_per_s
    return result.mfu * able, result.mfu_causal * able


@st.composite
def words(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A model, and words of a plan that it may take."""
    model = draw(st.sampled_from(["llama", "mixtral", "gpt2"]))
    size = st.sampled_from([1, 2, 4])
    tp, pp, cp = draw(size), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 1, 2]))
    method = draw(st.sampled_from(["ring", "all-to-all"]))
    assume(tp * cp <= HEADS and tp * pp * cp <= GPUS)
    found: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp, "cp_method": method}
    found["sequence_parallel"] = tp > 1 and draw(st.booleans())
    found["micro_batch"] = draw(st.sampled_from([2, 4]))
    found["zero"] = draw(st.sampled_from([0, 1, 2, 3]))
    found["recompute"] = draw(st.sampled_from(["none", "selective", "full", "2"]))
    found["precision"] = draw(st.sampled_from(["", "fp8"]))
    found["loss"] = draw(st.sampled_from(["eager", "fused"]))
    if pp > 1:
        found["vpp"] = draw(st.sampled_from([1, LAYERS // pp]))
        orders = ["", "zb-v"] if found["vpp"] == 2 and model == "llama" else [""]
        found["schedule"] = draw(st.sampled_from(orders if found["vpp"] > 1 else ["gpipe", "1f1b", "zb-h1"]))
    if model == "mixtral" and found["zero"] < 3:
        found["ep"] = draw(st.sampled_from([1, 2]))
        found["capacity_factor"] = draw(st.sampled_from([None, 1.25, 2.0]))
        found["expert_imbalance"] = draw(st.sampled_from([1.0, 4.0])) if found["ep"] > 1 else 1.0
    return model, found


@example(("mixtral", {"ep": 2, "expert_imbalance": 4.0}))
@example(("mixtral", {"ep": 2, "capacity_factor": 2.0}))
@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
@given(words())
def test_no_plan_changes_the_flops_of_the_model(drawn: tuple[str, dict[str, Any]]) -> None:
    model, options = drawn
    try:
        result = predicted(model, **options)
    except (PlanError, UsageError):
        assume(False)
    assert rank_flops(result) == pytest.approx(rank_flops(predicted(model)), rel=1e-6)


def test_rows_that_the_experts_drop_are_not_counted() -> None:
    rows = 2 * BATCH * SEQUENCE / GPUS
    of_experts = 3 * 2 * rows * LAYERS * 3 * 64 * 128
    (full, _), (half, _) = (
        rank_flops(predicted("mixtral", ep=2)),
        rank_flops(predicted("mixtral", ep=2, capacity_factor=0.5)),
    )
    assert full - half == pytest.approx(of_experts / 2, rel=1e-6)


def test_the_flops_are_those_of_the_model_worked_out_by_hand() -> None:
    """Of each token: two FLOPs for each weight of a product forward, four backward; and attention."""
    hidden, inner, heads, kv_heads, layers, vocabulary = 64, 128, HEADS, 4, LAYERS, 4096
    weights = layers * (hidden * hidden * (2 + 2 * kv_heads / heads) + 3 * hidden * inner) + hidden * vocabulary
    attention = layers * 4 * SEQUENCE * hidden
    tokens = BATCH * SEQUENCE / GPUS
    full, causal = rank_flops(predicted("llama"))
    assert full == pytest.approx(tokens * 3 * (2 * weights + attention), rel=1e-6)
    assert causal == pytest.approx(tokens * 3 * (2 * weights + attention / 2), rel=1e-6)
