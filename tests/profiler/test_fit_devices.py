"""Fits: the shipped profiles against rows that they have not seen, and the fit itself on rows it can explain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from echograph.errors import DataError, FormatError, InputError, OutputError
from echograph.profiler.costs import DeviceProfile, gemm, load_device
from echograph.profiler.costs.attention import pass_seconds
from echograph.profiler.costs.device import FloatArray
from echograph.profiler.costs.gemm import gemm_seconds
from echograph.profiler.fit.attention import attention_rows, inference_rows
from echograph.profiler.fit.device import fit_device, fitted_rows, products, refit, write_profile
from echograph.profiler.fit.facts import RowChoice, device_facts, read_facts
from echograph.profiler.fit.gemm import Products, fit_gemm
from echograph.profiler.fit.grid import fit_grid
from echograph.profiler.fit.regression import held_out, score
from echograph.profiler.fit.table import KernelTable, read_table, read_tables

BAR = 0.04


PRODUCTS = {
    "a100-sxm-80": ("bf16",),
    "h100-sxm": ("bf16", "fp8"),
    "h200": ("bf16", "fp8"),
    "b200": ("bf16", "fp8", "nvfp4"),
    "gb200": ("fp8", "nvfp4"),
    "b300": ("bf16", "fp8", "nvfp4"),
    "gb300": ("bf16", "fp8", "nvfp4"),
    "l40s": ("bf16", "fp8"),
    "rtx-pro-6000": ("bf16", "fp8", "nvfp4"),
}
"""The devices whose products are tabled, and in which types."""

NOISY = {("l40s", "bf16"): 0.06}
"""Tables whose neighbouring rows differ by more than the bar: a board that changes between two clocks."""


@pytest.fixture(scope="session")
def table(measured_data: Path) -> KernelTable:
    return read_table(measured_data / "kernels.csv.gz")


@pytest.fixture(scope="session")
def tables(measured_data: Path) -> KernelTable:
    names = ("kernels.csv.gz", "kernels2/gemm.csv.gz", "kernels2/attention.csv.gz")
    if not all((measured_data / name).is_file() for name in names):
        pytest.skip("no kernels2 among the measured tables")
    return read_tables([measured_data / name for name in names])


LONGEST = ("a100-sxm-80", "bf16")
"""Of the products, those with the most rows: as long as all the others together."""


def table_products(table: KernelTable, gpu: str, dtype: str) -> Products:
    return products(table.select(gpus=[gpu], ops=["gemm"], dtypes=["bfloat16" if dtype == "bf16" else dtype]))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=pytest.mark.slow if (name, dtype) == LONGEST else ())
        for name, dtypes in PRODUCTS.items()
        for dtype in dtypes
    ],
)
def test_products_meet_the_bar_on_unseen_shapes(tables: KernelTable, name: str, dtype: str) -> None:
    choice = device_facts(name).rows
    spellings = ["bf16", "bfloat16"] if dtype == "bf16" else [dtype]
    of_device = tables.select(gpus=choice.tensor, ops=["gemm"], dtypes=spellings)
    rows = products(fitted_rows(of_device, dtype, device_facts(name))).distinct()
    rows = rows.take(held_out(*rows.shape()))
    profile = load_device(name)
    error = score(np.asarray(gemm(profile, rows.m, rows.n, rows.k, dtype=dtype).seconds), rows.seconds)
    assert error.long is not None
    assert error.long.rows > 400
    assert error.long.median_abs <= NOISY.get((name, dtype), BAR)
    assert abs(error.long.bias) <= 0.02
    assert error == profile.gemm[dtype].label.held_out, "the profile states another error than it has"


BLOCKS = ("h100-sxm", "h200", "b200", "gb200", "b300", "gb300", "l40s")


@pytest.mark.parametrize("name", BLOCKS)
def test_products_of_blocks_are_off_by_what_the_profile_says(tables: KernelTable, name: str) -> None:
    """Of a table most of whose rows time the host, whose call is no part of what is predicted."""
    facts = device_facts(name)
    of_device = tables.select(gpus=facts.rows.tensor, ops=["gemm"], dtypes=["fp8_block"])
    rows = products(fitted_rows(of_device, "fp8_block", facts)).distinct()
    rows = rows.take(held_out(*rows.shape()))
    profile = load_device(name)
    error = score(np.asarray(gemm(profile, rows.m, rows.n, rows.k, dtype="fp8_block").seconds), rows.seconds)
    assert error.long is not None and error.long.rows > 150
    assert error.long.median_abs <= BAR
    stated = profile.gemm["fp8_block"].label.held_out.long
    assert stated is not None
    assert error.long.median_abs == pytest.approx(stated.median_abs, abs=2e-4)


@pytest.mark.parametrize("name", PRODUCTS)
def test_attention_meets_the_bar_on_unseen_shapes(tables: KernelTable, name: str) -> None:
    own = tables.select(gpus=device_facts(name).rows.tensor)
    rows = attention_rows(inference_rows(own)).distinct()
    rows = rows.take(rows.hidden())
    profile = load_device(name)
    model = profile.attention["trtllm"]
    predicted = pass_seconds(model, model.forward, profile.datasheet, rows.shape, causal=rows.causal)
    error = score(predicted, rows.seconds)
    assert error.long is not None
    assert error.long.rows > 400
    assert error.long.median_abs <= BAR
    assert error == model.forward.label.held_out


@pytest.mark.slow
@pytest.mark.parametrize("size", ["n", "k"])
def test_products_meet_the_bar_between_the_columns_of_the_grid(table: KernelTable, size: str) -> None:
    """Whole values of n or k are hidden, so that every tested shape lies between the shapes of the fit."""
    rows = table_products(table, "H100-SXM5-80GB", "bf16")
    hidden = np.isin(getattr(rows, size), [1536, 5120, 12288])
    sheet = load_device("h100-sxm").datasheet
    model = fit_gemm(rows.take(~hidden), sheet, peak="bf16", element_bytes=2.0, basis="")
    unseen = rows.take(hidden)
    error = score(gemm_seconds(model, sheet, *unseen.shape()), unseen.seconds)
    assert error.long is not None
    assert error.long.median_abs <= BAR


def synthetic(count: int, noise: float) -> Products:
    """Products of a model that the fit can express, with log-normal noise."""
    rng = np.random.default_rng(7)
    sizes = [np.rint(2.0 ** rng.uniform(8, 14, count) / 64) * 64 for _ in range(3)]
    profile = load_device("a100-sxm-80")
    model = msgspec.structs.replace(profile.gemm["bf16"], residual=None)
    ones = np.ones(count)
    seconds = gemm_seconds(model, profile.datasheet, ones, *sizes) * np.exp(noise * rng.standard_normal(count))
    return Products(batch=ones, m=sizes[0], n=sizes[1], k=sizes[2], seconds=seconds)


def test_the_fit_recovers_a_device_that_it_can_express() -> None:
    sheet = load_device("a100-sxm-80").datasheet
    model = fit_gemm(
        synthetic(1500, 0.02), sheet, peak="bf16", element_bytes=2.0, basis="synthetic", with_grid=False
    )
    assert model.label.held_out.long is not None
    assert model.label.held_out.long.median_abs < 0.03


@pytest.mark.parametrize("step", [64, 128])
def test_the_step_of_fp32_is_found(step: int) -> None:
    """Of batches whose depths no step but their own pads alike, and whose grid is one of batches."""
    profile = load_device("a100-sxm-80")
    made = msgspec.structs.replace(profile.gemm["fp32"], residual=None, k_step=step)
    sizes = (
        (16.0, 64.0, 512.0),
        (512.0, 1024.0),
        (512.0, 1024.0, 2048.0),
        (64.0, 96.0, 128.0, 192.0, 320.0, 1024.0),
    )
    b, m, n, k = (axis.ravel() for axis in np.meshgrid(*sizes))
    rows = Products(batch=b, m=m, n=n, k=k, seconds=gemm_seconds(made, profile.datasheet, b, m, n, k))
    model = fit_gemm(rows, profile.datasheet, peak="fp32", element_bytes=4.0, basis="")
    assert model.k_step == step
    assert model.residual is not None and model.residual.knots[0][-1] > 16 * 65_536
    assert model.label.held_out.long is not None and model.label.held_out.long.median_abs < 0.01


def test_the_fit_is_deterministic() -> None:
    sheet = load_device("a100-sxm-80").datasheet
    rows = synthetic(300, 0.05)
    once, again = (fit_gemm(rows, sheet, peak="bf16", element_bytes=2.0, basis="") for _ in range(2))
    assert once == again


@pytest.mark.parametrize("call_s", [5e-6, 3e-4])
def test_rows_that_time_the_host_are_left_out(tmp_path: Path, call_s: float) -> None:
    """A row takes the longer of kernel and call; a slow call now and then passes for a kernel."""
    made = synthetic(1500, 0.02)
    calls = call_s * np.exp(0.1 * np.random.default_rng(5).standard_normal(len(made.m)))
    timed = replace(made, seconds=np.maximum(made.seconds, calls))
    kept = fitted_rows(csv_table(tmp_path / "mine.csv", timed, "my card"), "bf16", device_facts("a100-sxm-80"))
    if call_s < 2e-5:
        assert len(kept) == len(made.m)
        return
    of_kernel = {
        shape
        for shape, s, c in zip(zip(made.m, made.n, made.k, strict=True), made.seconds, calls, strict=True)
        if s > c
    }
    sizes = list(zip(*(kept.number[size].tolist() for size in "mnk"), strict=True))
    assert len(sizes) > 0.7 * len(of_kernel)
    assert np.mean([size in of_kernel for size in sizes]) > 0.95


UNFILLED = "PyPI aiconfigurator-core 0.12.0: l40s/gemm/vllm/0.24.0"
MIB = 2**20


@pytest.mark.parametrize("filled_rows", [0, 200, 1600])
def test_weights_that_nobody_filled_speak_where_no_others_do(tmp_path: Path, filled_rows: int) -> None:
    """Those of new memory, which is zeros, never; those of used memory, unless others are dense."""
    made, mine = synthetic(1700, 0.0), synthetic(max(filled_rows, 1), 0.0)
    unfilled = csv_table(tmp_path / "unfilled.csv", made, "L40S", UNFILLED, "bfloat16")
    csv_table(tmp_path / "filled.csv", mine, "L40S", UNFILLED.replace("vllm", "trtllm"), "bfloat16")
    paths = [tmp_path / "unfilled.csv", *([tmp_path / "filled.csv"] if filled_rows else [])]
    kept = fitted_rows(read_tables(paths), "bf16", device_facts("l40s"))
    by_source = kept.sources()
    used = by_source.pop(UNFILLED, 0)
    assert sum(by_source.values()) == filled_rows
    small = 2.0 * made.n * made.k <= 192 * MIB
    assert 0 < np.sum(~small) < len(small)
    assert used == (0 if filled_rows > 1500 else np.sum(small))
    assert len(fitted_rows(unfilled, "fp8", device_facts("l40s"))) == 0


def test_a_model_of_weights_that_nobody_filled_says_so_and_is_as_uncertain_as_libraries(tmp_path: Path) -> None:
    made = synthetic(700, 0.01)
    rows = csv_table(tmp_path / "unfilled.csv", made, "my card", UNFILLED, "bfloat16")
    base = load_device("b200")
    label = refit(rows, base, [], date="2026-01-01").gemm["bf16"].label
    assert label.basis.endswith("whose weights nobody filled, up to 192 MiB of them")
    assert label.between_libraries == base.gemm["bf16"].label.between_libraries > 0.0
    assert label.spread >= label.between_libraries


def test_where_large_products_are_left_out_they_slow_down_as_a_relatives() -> None:
    b200, gb200 = load_device("b200").gemm["fp8_block"], load_device("gb200").gemm["fp8_block"]
    assert "fp8_block" in device_facts("gb200").rows.largest_product_TFLOP
    assert (gb200.throttle, gb200.throttle_flops) == (b200.throttle, b200.throttle_flops)


def test_where_rows_mislead_products_are_a_relatives_and_say_so() -> None:
    """Products of random numbers on a GB200 (ai-dynamo/aiconfigurator, gb200/gemm/trtllm/1.3.0rc20), ms."""
    m, n, k, measured = np.array(
        [
            (16384, 4096, 4096, 0.3673), (4096, 4096, 16384, 0.3570), (16384, 1536, 4096, 0.1268),
            (16384, 1024, 4096, 0.0898), (8192, 6144, 4096, 0.2546), (8192, 16384, 4096, 0.6680),
        ]
    ).T  # fmt: skip
    device, relative = load_device("gb200"), load_device("b200")
    assert device.gemm["bf16"].label.basis == "scaled from b200"
    assert device.gemm["bf16"].label.between_libraries == relative.gemm["bf16"].label.between_libraries
    ratio = np.asarray(gemm(device, m, n, k).seconds) * 1e3 / measured
    assert np.median(ratio) == pytest.approx(1.0, abs=0.06)  # 0.90 by a fit of its rows, of weights nobody filled


def test_a_products_operands_may_lie_in_the_cache() -> None:
    """Half of a cache is read at a share of the memory's time, sixteen caches at all of it."""
    known = load_device("l40s").gemm["bf16"]
    tireless = {name: 1e4 * peak for name, peak in load_device("l40s").datasheet.peak_flops_per_s.items()}
    sheet = msgspec.structs.replace(load_device("l40s").datasheet, peak_flops_per_s=tireless)
    plain = msgspec.structs.replace(known, residual=None, traffic_cached=1.0)
    cached = msgspec.structs.replace(plain, traffic_cached=0.25, cache_share=1.0)
    one, deep = np.ones(1), np.full(1, 64.0)
    for caches, share in ((0.5, 0.25 + 0.75 / 17), (16.0, 1.0)):
        side = np.full(1, np.sqrt(caches * sheet.l2_bytes / 2.0))
        seconds = [gemm_seconds(of, sheet, one, side, side, deep) - of.launch_s for of in (cached, plain)]
        moved = 2.0 * (2.0 * side * 64.0 + side * side)
        memory = moved / (sheet.memory_bandwidth_bytes_per_s * known.bandwidth_fraction)
        assert seconds[1] == pytest.approx(memory, rel=0.01)
        assert seconds[0] / seconds[1] == pytest.approx(share, rel=0.03)


def test_a_held_out_shape_is_held_out_as_a_whole() -> None:
    m = np.repeat(np.arange(1.0, 500.0), 3)
    hidden = held_out(m, 2 * m, 3 * m).reshape(-1, 3)
    assert np.all(hidden.min(axis=1) == hidden.max(axis=1))
    assert 0.15 < hidden.mean() < 0.25


def test_the_residual_grid_follows_a_trend_and_ignores_outliers() -> None:
    knots = ((256.0, 4096.0), (256.0, 4096.0), (256.0, 1024.0, 4096.0))
    rng = np.random.default_rng(3)
    sizes = [2.0 ** rng.uniform(8, 12, 400) for _ in range(3)]
    error = 0.05 * (np.log2(sizes[2]) - 10.0)
    error[::20] += 5.0
    grid = fit_grid(knots, [(sizes, 1.0)], error, np.ones(400), smoothness=0.01, ridge=0.01)
    values = np.asarray(grid.permille).reshape(2, 2, 3)
    assert np.allclose(values, np.asarray([-100, 0, 100]), atol=15)


@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("most", [0.0, 0.03])
def test_the_residual_grid_falls_by_no_more_than_it_may(axis: int, most: float) -> None:
    """It is the best of those: where the rows fall faster, it falls as fast as it may, through their middle."""
    knots = ((256.0, 1024.0, 4096.0),) * 3
    sizes = list(2.0 ** np.random.default_rng(3).uniform(8, 12, (3, 600)))
    error = -0.05 * (np.log2(sizes[axis]) - 10.0)
    pairs, ones = np.full(3 * 2 * 3 * 3, most), np.ones(600)
    kinds = {"smoothness": 0.01, "ridge": 0.01}
    free, bound = (fit_grid(knots, [(sizes, 1.0)], error, ones, falls=m, **kinds) for m in (None, pairs))
    for grid, falls in ((free, 100), (bound, 1000 * most)):
        values = np.moveaxis(np.asarray(grid.permille).reshape(3, 3, 3), axis, 0)
        assert values.mean(axis=(1, 2)) == pytest.approx([falls, 0, -falls], abs=5)
    for along in range(3):
        assert np.all(np.diff(np.asarray(bound.permille).reshape(3, 3, 3), axis=along) >= -1000 * most)


def csv_table(path: Path, rows: Products, gpu: str, source: str = "mine", dtype: str = "bf16") -> KernelTable:
    lines = ["source,gpu,op,dtype,m,n,k,latency_ms"]
    for m, n, k, seconds in zip(rows.m, rows.n, rows.k, rows.seconds, strict=True):
        lines.append(f"{source},{gpu},gemm,{dtype},{m},{n},{k},{seconds * 1e3!r}")
    path.write_text("\n".join(lines).replace("np.float64(", "").replace(")", ""))
    return read_table(path)


def test_a_users_own_table_refits_what_it_measures(tmp_path: Path) -> None:
    base = load_device("h100-sxm")
    mine = refit(csv_table(tmp_path / "mine.csv", synthetic(400, 0.01), "my card"), base, [], date="2026-01-01")
    assert mine.gemm["bf16"].label.basis == "400 rows of mine on my card"
    assert mine.gemm["fp8"] == base.gemm["fp8"]
    assert mine.attention == base.attention
    assert mine.provenance.tables == {"mine": 400}
    path = tmp_path / "mine.json"
    write_profile(mine, path)
    assert load_device(path) == mine
    assert not list(tmp_path.glob("*.part"))


def test_too_few_rows_are_refused(tmp_path: Path) -> None:
    few = csv_table(tmp_path / "few.csv", synthetic(20, 0.0), "my card")
    with pytest.raises(DataError, match="200 rows on my card"):
        refit(few, load_device("h100-sxm"), [], date="2026-01-01")
    facts = msgspec.structs.replace(device_facts("a100-sxm-80"), rows=RowChoice(tensor=["other"]))
    with pytest.raises(DataError, match="no rows for other"):
        fit_device(few, "new", facts, relative=None, date="2026-01-01")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "column 'op' is missing"),
        ("op,dtype\ngemm,bf16\n", "'latency_ms' is missing"),
        ("op,dtype,latency_ms\ngemm,bf16\n", "line 2: 2 cells, expected 3"),
        ("op,dtype,latency_ms\ngemm,bf16,soon\n", "'latency_ms'"),
    ],
)
def test_broken_tables_are_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "kernels.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_table(path)


def test_unreadable_and_unwritable_paths(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        read_table(tmp_path / "absent.csv")
    (tmp_path / "broken.csv.gz").write_bytes(b"\x1f\x8b broken")
    with pytest.raises((DataError, InputError)):
        read_table(tmp_path / "broken.csv.gz")
    with pytest.raises(OutputError):
        write_profile(load_device("h100-sxm"), tmp_path / "absent" / "x.json")
    with pytest.raises(FormatError):
        load_device(_text(tmp_path / "x.json", "[]"))


def _text(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_gradients_of_weights_in_tf32_are_slow_on_hopper_alone() -> None:
    """Its instruction transposes operands of 16 bits only; other architectures borrow nothing of that."""
    for name, slower in (("h200", 1.64), ("h800", 1.64), ("b200", 1.0), ("mi300x", 1.0), ("a100-sxm-80", 1.0)):
        device = load_device(name)
        sizes = {"m": 4096, "n": 4096, "k": 8192}
        forward, weights = (gemm(device, dtype="tf32", layout=layout, **sizes).seconds for layout in ("TN", "NT"))
        assert weights / forward == pytest.approx(slower, rel=0.08)  # in bf16 it is 1.05 on B200


def test_every_relative_of_the_datasheet_file_stands_before_its_borrowers() -> None:
    facts = read_facts()
    names = list(facts)
    for name, device in facts.items():
        assert not device.relative or names.index(device.relative) < names.index(name)


def test_every_device_of_the_datasheet_file_ships() -> None:
    for name, device in read_facts().items():
        shipped: DeviceProfile = load_device(name)
        assert shipped.datasheet == device.datasheet()
        blocks = {"fp8_block"} if "fp8" in device.peak_TFLOPs else set()
        assert set(shipped.gemm) == set(device.peak_TFLOPs) | blocks


def seconds_of(profile: DeviceProfile, m: FloatArray) -> FloatArray:
    return np.asarray(gemm(profile, m, m, m).seconds)


def test_a_scaled_device_differs_from_its_relative_by_its_datasheet() -> None:
    m = np.array([2048.0, 8192.0])
    ratio = seconds_of(load_device("h20"), m) / seconds_of(load_device("h100-sxm"), m)
    assert np.all(ratio > 5.0)
    assert np.all(seconds_of(load_device("h800"), m) == seconds_of(load_device("h100-sxm"), m))
