"""Widths of the model's form: known ones come back, and no family judges itself."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from echograph.simulator.form import Form
from echograph.workflow.calibration.form import (
    LEVELS,
    PredictedStep,
    StepErrors,
    estimate_form,
    held,
    leave_one_out,
    step_errors,
)


def rows(
    family: str, seed: int, count: int = 40, spread: float = 0.02, longer: float = 0.2
) -> list[dict[str, Any]]:
    """Steps that are up to so much longer than predicted, evenly, with errors of durations of a spread beside."""
    random, found = np.random.default_rng(seed), []
    for number in range(count):
        error = float(random.uniform(0.0, longer))
        durations = [math.exp(side * 1.645 * spread) for side in (-1, 1)]
        found.append(
            {
                "id": f"{family}-{number}", "family": family, "predicted_s": 1.0, "measured_s": math.exp(error),
                "error": math.exp(-error) - 1, "durations_interval_s": durations, "unsaid": 0.0,
                "work": {"matrix products": 0.7, "host": 0.3},
            }
        )  # fmt: skip
    return found


def columns(steps: list[dict[str, Any]]) -> StepErrors:
    return step_errors(msgspec.convert(steps, list[PredictedStep]))


def families(count: int = 12) -> list[dict[str, Any]]:
    return [row for number in range(count) for row in rows(f"family{number}", number)]


def test_what_only_lengthens_steps_makes_intervals_longer_alone() -> None:
    form = estimate_form(columns(families()))
    for level in LEVELS:
        shorter, longer = form.widths[level]
        assert shorter == 0.0
        # What durations explain is left out, in quadrature.
        assert longer == pytest.approx(0.2 * level / 100, rel=0.1)


def test_a_few_broken_steps_do_not_decide() -> None:
    sound = families()
    broken = [row | {"measured_s": 4.0} for row in rows("family3", 99, 2)]
    before, after = (estimate_form(columns(steps)) for steps in (sound, sound + broken))
    for level in LEVELS:
        assert after.widths[level] == pytest.approx(before.widths[level], rel=0.05, abs=1e-3)


def test_a_family_counts_once_however_many_steps_it_has() -> None:
    once = families(4)
    again = [row | {"id": f"{row['id']}-{n}"} for n in range(5) for row in once if row["family"] == "family2"]
    more = [row for row in once if row["family"] != "family2"] + again
    assert estimate_form(columns(more)).widths == estimate_form(columns(once)).widths


def test_the_part_of_a_step_that_was_measured_has_no_such_error() -> None:
    whole = columns(families())
    half = columns([row | {"work": {"matrix products": 0.5}} for row in families()])
    for level in LEVELS:
        twice = estimate_form(half).widths[level][1] / estimate_form(whole).widths[level][1]
        assert twice == pytest.approx(2.0, rel=1e-2)
    assert len(columns([row | {"work": {}} for row in rows("measured", 1)]).family) == 0


def test_intervals_hold_what_they_say_of_families_that_had_no_part_in_them() -> None:
    errors = columns(families())
    found = [
        held(name, [(errors.of(errors.family == name), form)]) for name, form in leave_one_out(errors).items()
    ]
    for level in LEVELS:
        assert np.mean([one.held[level] for one in found]) == pytest.approx(level / 100, abs=0.05)
    mine = errors.family == "family4"
    assert leave_one_out(errors)["family4"] == estimate_form(errors.of(~mine))


def test_a_family_unlike_all_others_is_missed() -> None:
    errors = columns(families() + rows("other", 77, longer=1.0))
    missed = held("other", [(errors.of(errors.family == "other"), leave_one_out(errors)["other"])])
    assert missed.held[90] < 0.4


def test_what_is_held_is_what_the_interval_says() -> None:
    steps = rows("one", 5)
    form = Form(
        label="",
        source="",
        date="",
        steps=0,
        families=0,
        widths={50: (0.0, 0.05), 80: (0.01, 0.12), 90: (0.02, 0.15)},
    )
    for step in steps:
        step["unsaid"] = 0.05
    found = held("one", [(columns(steps), form)])
    for level in LEVELS:
        bounds = [
            form.interval(s["predicted_s"], s["durations_interval_s"], s["work"], s["unsaid"], level)
            for s in steps
        ]
        inside = [low <= s["measured_s"] <= high for s, (low, high) in zip(steps, bounds, strict=True)]
        assert found.held[level] == pytest.approx(np.mean(inside))
    assert found.half_width == pytest.approx(np.median([(high - low) / 2 for low, high in bounds]))


def test_of_all_families_each_counts_alike() -> None:
    steps = [*rows("small", 1, 10, longer=0.1), *rows("large", 2, 90, longer=1.0)]
    form = Form(label="", source="", date="", steps=0, families=0, widths=dict.fromkeys(LEVELS, (0.2, 0.2)))
    errors = columns(steps)
    parts = [(errors.of(errors.family == name), form) for name in ("small", "large")]
    large = held("large", [parts[1]]).held[90]
    weights = np.hstack([part.weights for part, _ in parts])
    assert held("alike", parts, weights).held[90] == pytest.approx((1.0 + large) / 2)
    assert held("all", parts).held[90] == pytest.approx((10 + 90 * large) / 100)
