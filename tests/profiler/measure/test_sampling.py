"""Sampling stops when the mean is known, the time is up, or there are enough samples."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from echograph.profiler.measure.sampling import MIN_SAMPLES, Samples, sample, student


def steps(*seconds: float) -> Callable[[], float]:
    values: Iterator[float] = iter(seconds)
    return lambda: next(values)


def test_equal_samples_are_enough_at_once() -> None:
    taken = sample(lambda: 1.5, max_samples=100, budget_s=1.0, clock=lambda: 0.0)
    assert taken.seconds == (1.5,) * MIN_SAMPLES
    assert taken.half_width == 0 and taken.mean == taken.median == 1.5


def test_noise_is_sampled_until_the_mean_is_known() -> None:
    chance = random.Random(1)
    taken = sample(lambda: chance.gauss(1.0, 0.1), max_samples=10_000, budget_s=1.0, clock=lambda: 0.0)
    # 2 % at 95 % of a 10 % deviation needs (1.96 * 0.1 / 0.02)^2 = 96 samples.
    assert 60 < len(taken.seconds) < 200
    assert taken.half_width <= 0.02
    assert taken.mean == pytest.approx(1.0, abs=0.03)


def test_the_budget_ends_it_but_not_before_the_least() -> None:
    chance = random.Random(2)
    now = [0.0]

    def run() -> float:
        now[0] += 1.0
        return chance.random()

    assert len(sample(run, max_samples=100, budget_s=20.0, clock=lambda: now[0]).seconds) == 20
    assert len(sample(run, max_samples=100, budget_s=0.0, clock=lambda: now[0]).seconds) == MIN_SAMPLES


def test_there_are_never_more_than_asked_for() -> None:
    chance = random.Random(3)
    for most in (1, 2, MIN_SAMPLES, 17):
        taken = sample(chance.random, max_samples=most, budget_s=1.0, clock=lambda: 0.0)
        assert len(taken.seconds) == most


def test_the_median_stands_a_sample_that_was_disturbed() -> None:
    taken = sample(steps(1.0, 1.0, 9.0, 1.0, 1.0), max_samples=5, budget_s=1.0, clock=lambda: 0.0)
    assert taken.median == 1.0 and taken.mean == pytest.approx(2.6)


def test_a_single_sample_has_no_spread_and_no_interval() -> None:
    assert Samples(seconds=(1.0,)).spread == 0 and Samples(seconds=(1.0,)).half_width == float("inf")


@pytest.mark.parametrize("degrees", [4, 5, 9, 30, 200])
def test_the_quantile_is_students(degrees: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    assert student(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=0.02)
