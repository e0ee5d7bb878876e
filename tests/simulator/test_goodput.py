"""Goodput against a simulation of failures, and the best interval against its neighbours."""

from __future__ import annotations

from math import exp, inf, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echograph.errors import UsageError
from echograph.simulator.goodput import Reliability, best_interval, goodput


def simulated(rate: float, interval: float, reliability: Reliability, segments: int, seed: int) -> float:
    """Training time over all time, failure by failure."""
    random = np.random.default_rng(seed)
    need, total = interval + reliability.checkpoint_s, 0.0
    for _ in range(segments):
        while (failure := random.exponential(1 / rate)) < need:
            total += failure
            while (again := random.exponential(1 / rate)) < reliability.restart_s:
                total += again
            total += reliability.restart_s
        total += need
    return segments * interval / total


@pytest.mark.parametrize(
    ("mtbf", "checkpoint", "restart", "interval"), [(5e3, 60, 300, 900), (2e4, 30, 600, 3600)]
)
def test_it_is_what_a_simulation_of_failures_gives(
    mtbf: float, checkpoint: float, restart: float, interval: float
) -> None:
    reliability = Reliability(
        node_mtbf_s=10 * mtbf, checkpoint_s=checkpoint, restart_s=restart, interval_s=interval
    )
    expected = goodput(1.0, 10, reliability).share
    assert simulated(1 / mtbf, interval, reliability, 40_000, 1) == pytest.approx(expected, rel=0.01)


@given(st.floats(1e3, 1e7), st.floats(0.1, 900), st.floats(0, 1800), st.integers(1, 10_000))
def test_no_interval_is_better_than_the_best(mtbf: float, checkpoint: float, restart: float, nodes: int) -> None:
    def share(interval: float | None) -> float:
        how = Reliability(node_mtbf_s=mtbf, checkpoint_s=checkpoint, restart_s=restart, interval_s=interval)
        return goodput(1.0, nodes, how).share

    best = best_interval(nodes / mtbf, checkpoint)
    assert share(None) == pytest.approx(share(best))
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert share(best * factor) <= share(best) * (1 + 1e-9)
    assert 0 <= share(best) <= 1


def test_goodput_is_dalys_formula() -> None:
    """Ten nodes, one of which fails every hour and a half: worked out by hand."""
    reliability = Reliability(node_mtbf_s=54_000, checkpoint_s=60, restart_s=300, interval_s=900)
    found = goodput(2.0, 10, reliability)
    segment = 5400 * exp(300 / 5400) * (exp(960 / 5400) - 1)
    assert found.share == pytest.approx(900 / segment, rel=1e-12)
    assert (found.interval_s, found.job_mtbf_s) == (900, pytest.approx(5400))
    assert found.best_interval_s == best_interval(1 / 5400, 60)
    assert found.step_s == pytest.approx(2.0 * segment / 900)
    assert list(found.to_json().values()) == [
        found.share, 900, found.best_interval_s, found.job_mtbf_s, found.step_s,
    ]  # fmt: skip


@pytest.mark.parametrize("over", [False, True])
def test_a_job_that_fails_all_the_time_never_finishes_a_segment(over: bool) -> None:
    """Up to 700 failures are expected in a segment with its checkpoint and a restart; exp(709) is the largest."""
    reliability = Reliability(node_mtbf_s=1.0, checkpoint_s=100, restart_s=200, interval_s=401 if over else 400)
    found = goodput(1.0, 1, reliability)
    assert (found.share == 0) == over
    assert found.step_s == (inf if over else 1 / found.share)
    assert (found.to_json()["step_time_with_failures_s"] is None) == over


def test_rare_failures_give_youngs_interval() -> None:
    assert best_interval(1e-7, 60) == pytest.approx(sqrt(2 * 60 / 1e-7), rel=0.01)


@pytest.mark.parametrize(
    "change",
    [
        {"node_mtbf_s": 0},
        {"checkpoint_s": 0},
        {"restart_s": -0.1},
        {"interval_s": 0},
        {"node_mtbf_s": inf},
        {"checkpoint_s": inf},
        {"restart_s": inf},
        {"interval_s": inf},
    ],
)
def test_a_wrong_figure_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Reliability(**({"node_mtbf_s": 1.0, "checkpoint_s": 1.0, "restart_s": 1.0} | change))


def test_the_least_figures_that_are_accepted() -> None:
    assert Reliability(node_mtbf_s=1e-9, checkpoint_s=1e-9, restart_s=0, interval_s=1e-9).restart_s == 0
