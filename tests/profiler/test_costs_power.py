"""The clock that a limit of power leaves: bounds, and the law it follows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echograph.profiler.costs.device import PowerModel
from echograph.profiler.costs.power import FLOOR, SLOPE, sustained_clock, volts


def board(limit_W: float, static_W: float = 150.0) -> PowerModel:
    joules = {"bf16": 1e-12}
    return PowerModel(
        limit_W=limit_W, static_W=static_W, joules_per_flop=joules, joules_per_byte=3e-11, source="made up"
    )


@given(st.floats(200, 1500), st.floats(0, 2000), st.floats(0, 200), st.floats(0, 3), st.floats(0, 3))
def test_the_power_is_within_the_limit_and_no_clock_is_given_away(
    limit: float, core: float, memory: float, core_s: float, other_s: float
) -> None:
    power = board(limit)
    clock = sustained_clock(power, core, memory, core_s, other_s)
    assert 0.0 < clock <= 1.0

    def watts(at: float) -> float:
        return power.static_W + (core * volts(at) ** 2 + memory) / (core_s / at + other_s)

    if core_s + other_s <= 0.0:
        assert clock == 1.0
    elif clock < 1.0 and core_s > 1e-3 and watts(0.05) < limit:
        assert watts(clock) <= limit * (1 + 1e-9)
        assert watts(min(1.0, clock + 1e-6)) > limit * (1 - 1e-3)


def test_a_lower_limit_is_a_lower_clock_and_memory_bound_work_does_not_care() -> None:
    clocks = [sustained_clock(board(limit), 600.0, 20.0, 1.0, 0.0) for limit in (800, 700, 600, 500, 400)]
    assert clocks[0] == 1.0
    assert clocks == sorted(clocks, reverse=True)
    assert clocks[2] < 0.95
    assert sustained_clock(board(400.0), 0.0, 100.0, 0.0, 1.0) == 1.0


def test_the_voltage_falls_with_the_clock_to_its_floor() -> None:
    assert volts(1.0) == 1.0
    assert volts(0.9) == pytest.approx(1.0 - 0.1 * SLOPE)
    assert volts(0.3) == volts(0.1) == FLOOR
    # Below the floor all but the static watts go with the clock: halving them halves it.
    half, quarter = (sustained_clock(board(150.0 + watts), 1000.0, 0.0, 1.0, 0.0) for watts in (200.0, 100.0))
    assert half == pytest.approx(2.0 * quarter, rel=1e-6)
