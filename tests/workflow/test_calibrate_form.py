"""Spreads of the model's form: known ones come back, broken steps do not decide, and no family judges itself."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from echograph.simulator.form import KINDS, Form
from echograph.workflow.calibration.form import (
    LEVELS,
    PredictedStep,
    StepErrors,
    estimate,
    held,
    leave_one_out,
    step_errors,
)

TRUE = {"matrix products": 0.05, "attention": 0.3, "host": 0.15}


def rows(family: str, seed: int, count: int = 40, spread: float = 0.02) -> list[dict[str, Any]]:
    """Steps whose errors are those of `TRUE`, drawn anew for each, and of durations of a spread."""
    random, found = np.random.default_rng(seed), []
    for number in range(count):
        share = dict(zip(TRUE, random.dirichlet([1.0] * len(TRUE)).tolist(), strict=True))
        sizes = [share[kind] * error for kind, error in TRUE.items()]
        error = float(random.normal(0.0, math.hypot(spread, *sizes)))
        durations = [math.exp(side * 1.645 * spread) for side in (-1, 1)]
        found.append(
            {
                "id": f"{family}-{number}", "family": family, "predicted_s": 1.0, "measured_s": math.exp(error),
                "error": math.exp(-error) - 1, "durations_interval_s": durations, "work": share, "unsaid": 0.0,
            }
        )  # fmt: skip
    return found


def columns(steps: list[dict[str, Any]]) -> StepErrors:
    return step_errors(msgspec.convert(steps, list[PredictedStep]))


def families(count: int = 12) -> list[dict[str, Any]]:
    return [row for number in range(count) for row in rows(f"family{number}", number)]


def test_spreads_come_back_and_kinds_that_no_step_has_stay_at_the_common_one() -> None:
    form = estimate(columns(families(60)))
    assert form.spread["attention"] == pytest.approx(0.3, rel=0.25)
    assert form.spread["host"] == pytest.approx(0.15, rel=0.25)
    # What the least has is held up by the common spread.
    assert 0.05 < form.spread["matrix products"] < 0.13
    assert form.spread["bubble"] == pytest.approx(form.spread["hidden communication"])
    assert form.spread["matrix products"] < form.spread["bubble"] < form.spread["attention"]


def test_broken_steps_do_not_decide() -> None:
    sound = families()
    broken = [row | {"measured_s": 4.0} for row in rows("family3", 99, 2)]
    before, after = (estimate(columns(steps)) for steps in (sound, sound + broken))
    for kind in TRUE:
        assert after.spread[kind] == pytest.approx(before.spread[kind], rel=0.1, abs=0.01)
    assert after.quantile[90] == pytest.approx(before.quantile[90], rel=0.05)


def test_a_family_counts_once_however_many_steps_it_has() -> None:
    once = families(4)
    again = [row | {"id": f"{row['id']}-{n}"} for n in range(5) for row in once if row["family"] == "family2"]
    more = [row for row in once if row["family"] != "family2"] + again
    few, many = estimate(columns(once)), estimate(columns(more))
    assert many.spread == pytest.approx(few.spread, rel=1e-3)
    assert many.quantile == pytest.approx(few.quantile, rel=1e-3)


def test_intervals_hold_what_they_say_of_families_that_had_no_part_in_them() -> None:
    errors = columns(families())
    found = [held(name, errors.of(errors.family == name), form) for name, form in leave_one_out(errors).items()]
    for level in LEVELS:
        assert np.mean([one.held[level] for one in found]) == pytest.approx(level / 100, abs=0.05)
    mine = errors.family == "family4"
    without = estimate(errors.of(~mine))
    assert leave_one_out(errors)["family4"] == without


def test_what_is_held_is_what_the_interval_says() -> None:
    steps = rows("one", 5)
    form = Form(
        label="", source="", date="", steps=0, families=0, spread=dict.fromkeys(KINDS, 0.1),
        quantile={50: 0.6, 80: 1.3, 90: 1.7},
    )  # fmt: skip
    for step in steps:
        step["unsaid"] = 0.05
    found = held("one", columns(steps), form)
    for level in LEVELS:
        bounds = [
            form.interval(s["predicted_s"], s["durations_interval_s"], s["work"], s["unsaid"], level)
            for s in steps
        ]
        inside = [low <= s["measured_s"] <= high for s, (low, high) in zip(steps, bounds, strict=True)]
        assert found.held[level] == pytest.approx(np.mean(inside))
    assert found.half_width == pytest.approx(np.median([(high - low) / 2 for low, high in bounds]))
