"""Products: never above peak, never faster than memory, no wild value, monotone in every dimension."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echograph.errors import UnavailableError, UnknownNameError
from echograph.profiler.costs import device_names, gemm, grouped_gemm, load_device
from echograph.profiler.costs.device import FloatArray, GemmModel
from echograph.profiler.costs.gemm import (
    DTYPES,
    LAYOUTS,
    TABLED_FROM,
    compute_seconds,
    gemm_model,
    grouped_seconds,
)

SIZE = st.integers(1, 10**6)
DEVICE = st.sampled_from(device_names())


@given(DEVICE, SIZE, SIZE, SIZE, st.sampled_from(sorted(DTYPES)), st.sampled_from(LAYOUTS))
def test_never_beats_the_datasheet_and_never_runs_wild(
    name: str, m: int, n: int, k: int, dtype: str, layout: str
) -> None:
    device = load_device(name)
    try:
        model = gemm_model(device, dtype)
    except UnavailableError:
        return
    seconds, spread, source = gemm(device, m, n, k, dtype=dtype, layout=layout)
    sheet = device.datasheet
    compute = 2.0 * m * n * k / sheet.peak_flops_per_s[model.peak]
    moved = (m * k + k * n + m * n) * model.element_bytes
    assert seconds >= compute
    assert seconds >= (moved - sheet.l2_bytes) / sheet.memory_bandwidth_bytes_per_s
    # Tiles hold 64 rows and columns at least: a product that fills none of them pays for a whole one.
    padded = 2.0 * max(m, 64) * max(n, 64) * max(k, 128) / sheet.peak_flops_per_s[model.peak]
    cast = 8.0 * m * k / sheet.memory_bandwidth_bytes_per_s
    worst = 8.0 if m % 32 == n % 32 == k % 32 == 0 else 60.0  # unaligned products take up to 7.3 times as long
    assert seconds < 200e-6 + worst * (padded + cast + 2.0 * moved / sheet.memory_bandwidth_bytes_per_s)
    assert 0.0 < spread < 1.0
    assert source in ("fitted", "analytical")


TWICE = 0.999
"""What twice the size takes at least of the time before: fits look at growth in steps of a quarter octave."""

LITTLE_MORE = 0.99
"""The same of 16 more rows, columns or depth. A tile that is not full has room for them and takes as long, while
the correction moves on to the next knot."""

BATCHES = 0.97
"""The same of batches, whose correction is that of one product of all their rows. Narrow ones are not asked: what
they take longer (1.42 to 1.70 times of 128 columns, not at all of 256) is one factor, which no size explains."""


def many_sizes(count: int) -> tuple[FloatArray, ...]:
    """Rows, columns, depths and batches, some of them powers of two, all of whole 16-byte lanes."""
    rng = np.random.default_rng(5)
    sizes = 2.0 ** rng.uniform(0, 17, (3, count))
    sizes = np.where(rng.random(count) < 0.3, 2.0 ** np.round(np.log2(sizes)), 16.0 * np.ceil(sizes / 16.0))
    return (*sizes, np.round(2.0 ** rng.uniform(0, 9, count)))


def fall(seconds: Callable[..., FloatArray], sizes: tuple[FloatArray, ...]) -> tuple[float, float]:
    """Least times over those before: of products with one or all sizes doubled, and with one a little larger."""
    m, n, k = sizes
    before = seconds(m, n, k)
    twice = [seconds(2 * m, n, k), seconds(m, 2 * n, k), seconds(m, n, 2 * k), seconds(2 * m, 2 * n, 2 * k)]
    little = [seconds(m + 16, n, k), seconds(m, n + 16, k), seconds(m, n, k + 16)]
    return float(np.min(np.stack(twice) / before)), float(np.min(np.stack(little) / before))


@pytest.mark.parametrize("name", device_names())
def test_a_product_that_is_more_takes_no_less_time(name: str) -> None:
    device = load_device(name)
    m, n, k, batch = many_sizes(600)
    for dtype in device.gemm:

        def seconds(
            m: FloatArray, n: FloatArray, k: FloatArray, batch: npt.ArrayLike = 1, dtype: str = dtype
        ) -> FloatArray:
            return np.asarray(gemm(device, m, n, k, batch=batch, dtype=dtype, padded=True).seconds)

        twice, little = fall(seconds, (m, n, k))
        assert twice >= TWICE, dtype
        assert little >= LITTLE_MORE, dtype
        assert np.all(seconds(m, n, k, batch=batch + 1) >= BATCHES * seconds(m, n, k, batch=batch)), dtype
        wide = (np.maximum(m, TABLED_FROM), np.maximum(n, TABLED_FROM), np.maximum(k, TABLED_FROM))
        assert min(fall(partial(seconds, batch=batch), wide)) >= BATCHES, dtype


@pytest.mark.parametrize("name", [name for name in device_names() if load_device(name).grouped.products])
def test_a_group_that_is_more_takes_no_less_time(name: str) -> None:
    device = load_device(name)
    m, n, k, count = many_sizes(600)
    for dtype, model in device.grouped.products.items():

        def seconds(
            m: FloatArray, n: FloatArray, k: FloatArray, count: FloatArray = count, model: GemmModel = model
        ) -> FloatArray:
            return grouped_seconds(model, device.datasheet, count, m, n, k)

        twice, little = fall(seconds, (m, n, k))
        assert twice >= TWICE, dtype
        assert little >= LITTLE_MORE, dtype
        assert np.all(seconds(m, n, k, count=count + 1) >= seconds(m, n, k)), dtype


def test_arrays_and_scalars_agree() -> None:
    device = load_device("a100-sxm-80")
    m, n, k = np.array([256.0, 4096.0]), np.array([12288.0, 50257.0]), np.array([4096.0, 1600.0])
    cost = gemm(device, m, n, k)
    assert isinstance(cost.seconds, np.ndarray)
    for i in range(2):
        alone = gemm(device, m[i], n[i], k[i])
        assert isinstance(alone.seconds, float)
        assert cost.seconds[i] == pytest.approx(alone.seconds, rel=1e-12)


def test_waves_quantise() -> None:
    """216 tiles fill 108 SMs twice; one more row of tiles costs nearly a third wave."""
    device = load_device("a100-sxm-80")
    full, over = gemm(device, 12 * 256, 18 * 128, 4096), gemm(device, 13 * 256, 18 * 128, 4096)
    assert over.seconds / full.seconds > 1.15


@pytest.mark.parametrize("step", [32, 64, 128])
def test_products_in_fp32_go_through_k_in_whole_steps(step: int) -> None:
    """A depth is padded to whole steps, and no slice is charged more than that."""
    device = load_device("h100-sxm")
    model = msgspec.structs.replace(device.gemm["fp32"], k_step=step, throttle=0.0)
    m, n = np.asarray(4096.0), np.asarray(4096.0)
    seconds = {
        k: float(compute_seconds(model, device.datasheet, np.asarray(1.0), m, n, np.asarray(k)))
        for k in (32.0, 96.0, 100.0, 128.0)
    }
    assert seconds[100.0] == seconds[128.0]
    assert (seconds[96.0] == seconds[128.0]) == (step > 32)
    assert (seconds[32.0] == seconds[128.0]) == (step == 128)


def test_a_batch_of_products_costs_less_than_its_products_alone() -> None:
    device = load_device("h100-sxm")
    alone, together = gemm(device, 512, 512, 64), gemm(device, 512, 512, 64, batch=64)
    assert alone.seconds < together.seconds < 64 * alone.seconds


def test_fp8_quantisation_can_be_left_out() -> None:
    device = load_device("h100-sxm")
    whole = gemm(device, 8192, 8192, 8192, dtype="fp8").seconds
    bare = gemm(device, 8192, 8192, 8192, dtype="fp8", quantize=False).seconds
    assert bare < whole < gemm(device, 8192, 8192, 8192).seconds


def test_odd_operands_are_slower_in_the_layouts_that_read_them() -> None:
    device = load_device("a100-sxm-80")
    even = gemm(device, 8192, 50256, 1600, layout="NN").seconds
    assert gemm(device, 8192, 50257, 1600, layout="NN").seconds > 1.3 * even
    assert even < gemm(device, 8192, 50257, 1600, layout="TN").seconds < 1.2 * even


def test_accumulating_into_fp32_costs_traffic() -> None:
    device = load_device("b200")
    plain = gemm(device, 4096, 7168, 1024, layout="NT").seconds
    assert gemm(device, 4096, 7168, 1024, layout="NT", accumulator_bytes=4.0).seconds > 1.2 * plain


def test_unknown_names_list_the_choices() -> None:
    with pytest.raises(UnavailableError, match="a100-sxm-80 has no FP8 units; available: bf16, fp16, fp32, tf32"):
        gemm(load_device("a100-sxm-80"), 1, 1, 1, dtype="fp8")
    with pytest.raises(UnknownNameError, match=r"unknown dtype 'fp9'.*known: bf16, fp16, fp32, tf32"):
        gemm(load_device("a100-sxm-80"), 1, 1, 1, dtype="fp9")
    with pytest.raises(UnknownNameError, match="layout"):
        gemm(load_device("a100-sxm-80"), 1, 1, 1, layout="TT")
    with pytest.raises(ValueError, match="positive"):
        gemm(load_device("a100-sxm-80"), 0, 1, 1)


def test_grouped_products_add_up_and_skip_idle_experts() -> None:
    device = load_device("a100-sxm-80")  # which has no model of groups in one launch
    one = grouped_gemm(device, [512], 4096, 7168).seconds
    eight = grouped_gemm(device, [512] * 8 + [0] * 8, 4096, 7168).seconds
    assert math.isclose(eight, 8 * one, rel_tol=1e-9)
    assert grouped_gemm(device, [0, 0], 4096, 7168).seconds == 0.0
    with pytest.raises(UnknownNameError, match="pass"):
        grouped_gemm(device, [1], 1, 1, pass_="sideways")
