"""Fits of experts' layers, of a recurrence over chunks and of a fused loss, to tables that formulas made."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

pytest.importorskip("scipy", reason="fitting needs the [dev] extra")

from echograph.profiler.costs import grouped_gemm, load_device
from echograph.profiler.costs.gemm import grouped_seconds
from echograph.profiler.fit.experts import KERNELS, fit_experts, layers
from echograph.profiler.fit.memory import fit_loss
from echograph.profiler.fit.scan import BYTES_OF_A_TOKEN, CONVOLUTION, FLOPS_OF_A_TOKEN, MODEL, SCAN, fit_scans
from echograph.profiler.fit.table import KernelTable, read_table

H100 = load_device("h100-sxm")
SHEET, LAUNCH_S = H100.datasheet, 4e-6
AROUND_S, EXPERT_S, TIMES = 2e-5, 2e-7, (3.0, 2.0, 1.5)
"""What stands around the products: a time, a time an expert, multiples of the bytes of three steps."""
MADE = msgspec.structs.replace(H100.gemm["bf16"], residual=None, splits=[1], launch_s=LAUNCH_S)


def table(path: Path, rows: list[dict[str, object]]) -> KernelTable:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    return read_table(path)


def layer_s(tokens: float, hidden: float, inner: float, experts: float, topk: float, ep: float) -> float:
    """A layer of equal loads on one rank, by the formulas that the fit is to find."""
    rows, here, routed = tokens * topk / experts, experts / ep, tokens * topk / ep
    sizes = [(rows, 2 * inner, hidden), (rows, hidden, inner)]
    products = sum(float(grouped_seconds(MADE, SHEET, np.asarray(here), *map(np.asarray, size))) for size in sizes)
    # Two bytes an element: every token is read, cast and written; those routed here are copied and read again.
    moved = (6.0 * tokens * hidden, 6.0 * routed * hidden, 6.0 * routed * inner)
    around = sum(times * part for times, part in zip(TIMES, moved, strict=True))
    return AROUND_S + EXPERT_S * here + products + around / SHEET.memory_bandwidth_bytes_per_s


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> KernelTable:
    rows: list[dict[str, object]] = []
    for tokens in (1024, 2048, 4096, 8192, 16384):
        for hidden, inner in ((2048, 768), (4096, 1536), (4096, 14336), (7168, 2048), (5120, 8192)):
            for experts, topk, ep in ((8, 2, 1), (8, 2, 4), (32, 4, 1), (64, 8, 1), (64, 8, 16), (128, 8, 8)):
                seconds = layer_s(tokens, hidden, inner, experts, topk, ep)
                row = {
                    "source": "made/2", "op": "fused_experts", "dtype": "bfloat16", "kernel": KERNELS[0],
                    "m": tokens, "n": hidden, "k": inner, "experts": experts, "topk": topk, "tp": 1, "ep": ep,
                    "balance": "balanced", "latency_ms": 1e3 * seconds,
                }  # fmt: skip
                rows.append(row)
                rows.append(row | {"source": "made/1", "latency_ms": 1.2e3 * seconds})
                rows.append(row | {"kernel": "another", "latency_ms": 9e3 * seconds})
                rows.append(row | {"balance": "power_law_1.2", "latency_ms": 3e3 * seconds})
    return table(tmp_path_factory.mktemp("experts") / "experts.csv", rows)


def test_products_of_experts_are_found_in_whole_layers(measured: KernelTable) -> None:
    """What stands around them is told from them, older versions and other libraries are not fitted."""
    model = fit_experts(measured, SHEET, peak="bf16", element_bytes=2.0, launch_s=LAUNCH_S, basis="made")
    error = model.label.held_out.long
    assert error is not None and error.rows > 10
    assert error.median_abs < 0.02
    # Two versions a fifth apart.
    assert model.label.between_libraries == pytest.approx(np.log(1.2) / np.sqrt(2.0), rel=0.01)
    sizes = [np.asarray(v) for v in ([8.0, 64.0], [1024.0, 512.0], [4096.0, 4096.0], [4096.0, 7168.0])]
    assert grouped_seconds(model, SHEET, *sizes) == pytest.approx(grouped_seconds(MADE, SHEET, *sizes), rel=0.1)


def test_layers_that_the_cache_holds_are_left_out(measured: KernelTable) -> None:
    """They are timed inside it, however fast: halving their times changes nothing."""
    part = layers(measured)
    inside = part.working_set(2.0) <= SHEET.l2_bytes
    assert 0 < np.sum(inside) < len(inside) / 2
    halved = np.where(inside, 0.5, 1.0) * measured.number["latency_ms"]
    other = KernelTable(text=measured.text, number=measured.number | {"latency_ms": halved})
    fits = [
        fit_experts(of, SHEET, peak="bf16", element_bytes=2.0, launch_s=LAUNCH_S, basis="")
        for of in (measured, other)
    ]
    assert fits[0] == fits[1]


def test_slips_of_a_tuner_are_told_by_the_same_chip_and_judge_still(measured: KernelTable) -> None:
    """Layers of one width take 1.3 times as long here: without the other device they are fitted, with it not."""
    slow = np.where(measured.number["n"] == 4096, 1.3, 1.0)
    ms = measured.number["latency_ms"]
    here = KernelTable(text=measured.text, number=measured.number | {"latency_ms": slow * ms})
    # The other device is faster by a constant, which is no slip.
    there = KernelTable(text=measured.text, number=measured.number | {"latency_ms": 0.9 * ms})
    fit = {"peak": "bf16", "element_bytes": 2.0, "launch_s": LAUNCH_S, "basis": ""}
    taken, told = fit_experts(here, SHEET, **fit), fit_experts(here, SHEET, **fit, same_chip=there)
    sizes = [np.asarray(v) for v in ([8.0, 64.0], [1024.0, 512.0], [28672.0, 3072.0], [4096.0, 4096.0])]
    clean = grouped_seconds(MADE, SHEET, *sizes)
    assert grouped_seconds(told, SHEET, *sizes) == pytest.approx(clean, rel=0.1)
    assert np.max(grouped_seconds(taken, SHEET, *sizes) / clean) > 1.2
    rows = [model.label.held_out.long.rows for model in (taken, told) if model.label.held_out.long is not None]
    assert rows[0] == rows[1]
    assert told.label.held_out.long is not None and told.label.held_out.long.bias < -0.05


def test_a_rank_has_its_share_of_experts_and_of_their_width(tmp_path: Path) -> None:
    row = {"op": "fused_experts", "dtype": "bfloat16", "m": 4096, "n": 7168, "k": 2048, "experts": 128, "topk": 8}
    one = layers(table(tmp_path / "one.csv", [row | {"tp": 4, "ep": 8, "latency_ms": 1}]))
    assert [one.tokens, one.experts, one.rows, one.hidden, one.inner] == [[4096], [16], [256], [7168], [512]]


def test_small_experts_share_a_launch() -> None:
    """Sixty-four products of 64 rows fill the device together, where one of them does not."""
    made = msgspec.structs.replace(MADE, label=H100.gemm["bf16"].label)
    grouped = msgspec.structs.replace(H100.grouped, products={"bf16": made}, together={"weight_gradient": 1.5})
    device = msgspec.structs.replace(H100, grouped=grouped)
    alone = msgspec.structs.replace(H100, grouped=msgspec.structs.replace(grouped, products={}))
    rows = [64.0] * 64
    assert grouped_gemm(device, rows, 1024, 1024).seconds < 0.5 * grouped_gemm(alone, rows, 1024, 1024).seconds
    equal = grouped_gemm(device, rows, 1024, 1024)
    whole = grouped_seconds(made, SHEET, *map(np.asarray, (64.0, 64.0, 1024.0, 1024.0)))
    assert equal.seconds == pytest.approx(float(whole))
    skewed = grouped_gemm(device, [1.0] * 32 + [127.0] * 32, 1024, 1024)
    assert skewed.seconds > equal.seconds
    assert grouped_gemm(device, [0.0, *rows], 1024, 1024) == equal
    lone = msgspec.structs.replace(device, grouped=msgspec.structs.replace(device.grouped, together={}))
    more, less = (grouped_gemm(d, rows, 1024, 1024, pass_="weight_gradient").seconds for d in (device, lone))
    assert more == pytest.approx(1.5 * less)


def test_a_recurrence_and_its_convolution_are_those_of_the_whole_layer(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = []
    for batch in (1, 2, 4, 8, 16):
        for seq in (4096, 8192, 16384):
            tokens = batch * seq
            whole = {
                CONVOLUTION: LAUNCH_S + BYTES_OF_A_TOKEN * tokens / (0.6 * SHEET.memory_bandwidth_bytes_per_s),
                SCAN: FLOPS_OF_A_TOKEN * tokens / (0.1 * SHEET.peak_flops_per_s["bf16"]),
            }
            for kernel, seconds in whole.items():
                rows += [
                    {
                        "source": "made/sglang/1", "op": "gated_deltanet", "dtype": "bfloat16", "kernel": kernel,
                        "notes": MODEL, "batch": batch, "seq": seq, "latency_ms": 1e3 * seconds / ranks,
                    }
                    for ranks in (1, 2, 4, 8, 16)
                ]  # fmt: skip
    rows.append(rows[0] | {"seq": 65536, "latency_ms": 1.0})  # for one number of ranks: which one is not said
    found = fit_scans(table(tmp_path / "scans.csv", rows), SHEET, LAUNCH_S, "made")
    assert found is not None
    convolution, scan = found
    assert convolution.bandwidth_fraction == [pytest.approx(0.6, rel=1e-3)]
    assert scan.efficiency == pytest.approx(0.1, rel=1e-3)
    assert (scan.label.source, scan.label.spread) == ("analytical", 0.5)


def test_a_fused_loss_is_found_by_the_length_of_its_rows(tmp_path: Path) -> None:
    rows = []
    for power in range(12, 18):
        moved = 3.0 * 2.0 * 8192 * 2.0**power
        size = json.dumps({"S": 2048, "B": 4, "TP": 1})
        rows.append(
            {
                "op": "megatron_cross_entropy", "dtype": "bf16?", "notes": f"vocab size (V)={2**power} {size} x",
                "latency_ms": 1e3 * (LAUNCH_S + moved / (0.6 * SHEET.memory_bandwidth_bytes_per_s)),
            }
        )  # fmt: skip
    model = fit_loss(table(tmp_path / "loss.csv", rows), SHEET.memory_bandwidth_bytes_per_s, LAUNCH_S, "made")
    assert model is not None
    assert model.bandwidth_fraction == pytest.approx([0.6] * len(model.row_bytes), rel=0.02)
    assert fit_loss(read_table(tmp_path / "loss.csv").where(np.arange(6) < 2), 1e12, LAUNCH_S, "") is None
