"""A whole training is its steps, and says what it assumes."""

from __future__ import annotations

from typing import Any

import pytest

from echograph.errors import UsageError
from echograph.units import parse_bytes, parse_count
from echograph.workflow.plan import Plan
from echograph.workflow.predict import predict
from echograph.workflow.scenario import Scenario
from echograph.workflow.system import System
from echograph.workflow.training import TrainingOptions, training


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("transformers", reason="needs the [torch] extra")
    import echograph as eg

    return eg.compile("distilbert-base-uncased", batch_size=2, seq_len=128)


def test_a_training_is_its_steps(predicted: Any) -> None:
    system = System("dgx-h100")
    result, _ = predict(predicted, Plan(gpus=16), system)
    asked = TrainingOptions(train_tokens="1B", gpu_hour=2.5, pue=1.2, g_per_kwh=400.0)
    whole = training(result, system, asked)
    assert whole is not None
    assert whole.steps == -(-(10**9) // (16 * 2 * 128))
    assert whole.days == pytest.approx(whole.steps * result.step_s / 86_400)
    assert whole.gpu_hours == pytest.approx(16 * 24 * whole.days)
    assert whole.price == pytest.approx(2.5 * whole.gpu_hours)
    assert whole.energy_kwh is not None and system.device is not None and system.device.power is not None
    watts = whole.energy_kwh / 1.2 / whole.gpu_hours * 1000
    assert system.device.power.static_W < watts <= system.device.power.limit_W
    assert whole.co2_kg == pytest.approx(whole.energy_kwh * 0.4)
    assert whole.days_interval[0] < whole.days < whole.days_interval[1]


def test_failures_make_it_longer(predicted: Any) -> None:
    system, asked = System("dgx-h100"), TrainingOptions(train_tokens="1B")
    scenario = Scenario(node_mtbf_hours=10.0, checkpoint_s=60.0, restart_s=600.0)
    plain, failing = (
        training(predict(predicted, Plan(gpus=16), system, one)[0], system, asked)
        for one in (Scenario(), scenario)
    )
    assert plain is not None and failing is not None
    assert failing.days > plain.days


@pytest.mark.parametrize("more", [{"gpu_hour": 2.0}, {"train_tokens": "x"}, {"train_tokens": "1T", "pue": 0.5}])
def test_what_is_wrong_is_said(more: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="give"):
        TrainingOptions(**more)


@pytest.mark.parametrize(
    ("text", "count"),
    [("1T", 10**12), ("300B", 3 * 10**11), ("2e12", 2 * 10**12), ("1.5M", 1_500_000), ("x", None)],
)
def test_counts_are_read(text: str, count: int | None) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    ("text", "size"), [("72GiB", 72 * 2**30), ("80 GB", 80 * 10**9), ("80", None), ("iB", None)]
)
def test_sizes_are_read(text: str, size: int | None) -> None:
    assert parse_bytes(text) == size
