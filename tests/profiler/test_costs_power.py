"""The clock that a limit of power leaves: bounds, and the law it follows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echograph.profiler.costs import attention_forward, gemm, load_device
from echograph.profiler.costs.device import PowerModel
from echograph.profiler.costs.power import FLOOR, PACED_OF_PRODUCTS, SLOPE, sustained_clock, volts


def clock_of(power: PowerModel, *kernel: float) -> float:
    """The clock of one kernel: joules of its FLOPs and of its bytes, seconds that the clock paces, and others."""
    return sustained_clock(power, *kernel)


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
    clock = clock_of(power, core, memory, core_s, other_s)
    assert 0.0 < clock <= 1.0

    def watts(at: float) -> float:
        return power.static_W + (core * volts(at) ** 2 + memory) / (core_s / at + other_s)

    if core_s + other_s <= 0.0:
        assert clock == 1.0
    elif clock < 1.0 and core_s > 1e-3 and watts(0.05) < limit:
        assert watts(clock) <= limit * (1 + 1e-9)
        assert watts(min(1.0, clock + 1e-6)) > limit * (1 - 1e-3)


def test_a_lower_limit_is_a_lower_clock_and_memory_bound_work_does_not_care() -> None:
    clocks = [clock_of(board(limit), 600.0, 20.0, 1.0, 0.0) for limit in (800, 700, 600, 500, 400)]
    assert clocks[0] == 1.0
    assert clocks == sorted(clocks, reverse=True)
    assert clocks[2] < 0.95
    assert clock_of(board(400.0), 0.0, 100.0, 0.0, 1.0) == 1.0


def test_the_voltage_falls_with_the_clock_to_its_floor() -> None:
    assert volts(1.0) == 1.0
    assert volts(0.9) == pytest.approx(1.0 - 0.1 * SLOPE)
    assert volts(0.3) == volts(0.1) == FLOOR
    # Below the floor all but the static watts go with the clock: halving them halves it.
    half, quarter = (clock_of(board(150.0 + watts), 1000.0, 0.0, 1.0, 0.0) for watts in (150.0, 75.0))
    assert half == pytest.approx(2.0 * quarter, rel=1e-6)


def test_kernels_of_a_step_share_a_clock() -> None:
    """A product that draws too much runs faster beside work that draws little, as the mean is what counts."""
    power = board(500.0)
    alone = clock_of(power, 600.0, 20.0, 1.0, 0.0)
    beside = clock_of(power, 600.0, 20.0 + 60.0, 1.0, 1.0)
    assert alone < beside <= 1.0


MEASURED_AT_500_W = [((8192, 8192, 8192), 585.23), ((65536, 8192, 7168), 575.12), ((65536, 3584, 8192), 546.31)]
"""TFLOP/s of products in bf16 on an H100 under 500 W: rows, columns, depth (pytorch/FBGEMM, pull request 2546)."""


@pytest.mark.parametrize(("sizes", "measured"), MEASURED_AT_500_W)
def test_products_under_500_w_run_as_fast_as_was_measured(sizes: tuple[int, int, int], measured: float) -> None:
    device = load_device("h100-sxm-hbm2e")
    m, n, k = sizes
    burst = float(gemm(device, m=m, n=n, k=k).seconds)
    assert device.power is not None
    flops, moved = 2.0 * m * n * k, 2.0 * (m * k + k * n + m * n)
    joules = flops * device.power.joules_per_flop["bf16"], moved * device.power.joules_per_byte
    paced = PACED_OF_PRODUCTS * burst
    clock = clock_of(device.power, *joules, paced, burst - paced)
    seconds = paced / clock + burst - paced
    assert 2e-12 * m * n * k / seconds == pytest.approx(measured, rel=0.05)
    assert 2e-12 * m * n * k / burst > 1.25 * measured


@pytest.mark.parametrize(("seq", "measured"), [(8192, 287.696), (16384, 304.199)])
def test_long_passes_of_attention_are_as_slow_as_was_measured(seq: int, measured: float) -> None:
    """Of 122 and 463 ms (pytorch/benchmark, pull request 2296); the energy is another board's, an H200's."""
    device = load_device("h100-sxm-hbm2e")
    assert device.power is not None
    burst = float(attention_forward(device, batch=128, heads=8, seq=seq, head_dim=128, causal=False).seconds)
    flops = 4.0 * 128 * 8 * seq**2 * 128
    joules = flops * device.power.joules_of("bf16", "flash2")
    seconds = burst / clock_of(
        device.power, joules, 8.0 * 128 * 8 * seq * 128 * device.power.joules_per_byte, burst, 0.0
    )
    assert 1e-12 * flops / seconds == pytest.approx(measured, rel=0.12)
    assert 1e-12 * flops / burst > 1.25 * measured
