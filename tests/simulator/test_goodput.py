"""Goodput against a simulation of failures, and the best interval against its neighbours."""

from __future__ import annotations

from math import sqrt

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


def test_rare_failures_give_youngs_interval() -> None:
    assert best_interval(1e-7, 60) == pytest.approx(sqrt(2 * 60 / 1e-7), rel=0.01)


@pytest.mark.parametrize(
    "change", [{"node_mtbf_s": 0}, {"checkpoint_s": -1}, {"restart_s": -1}, {"interval_s": 0}]
)
def test_a_wrong_figure_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Reliability(**({"node_mtbf_s": 1.0, "checkpoint_s": 1.0, "restart_s": 1.0} | change))
