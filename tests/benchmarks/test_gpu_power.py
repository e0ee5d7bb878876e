"""What was measured on a GPU, and what the profiles make of it."""

from __future__ import annotations

import csv
from math import gcd
from statistics import median

import pytest
from benchmarks import gpu_power, gpu_products

from echograph.profiler.costs import gemm, load_device
from echograph.profiler.costs.power import PACED_OF_PRODUCTS, sustained_clock

RUNS = gpu_power.rows_of()
UNALIGNED = gpu_power.TABLE.with_name("h200_unaligned.csv")


def test_the_profile_has_the_energies_that_were_measured() -> None:
    power, measured = load_device("h200").power, gpu_power.energies(RUNS)
    assert power is not None
    assert power.static_W == pytest.approx(measured["rest W"], rel=0.02)
    for dtype in ("bf16", "fp8"):
        assert power.joules_per_flop[dtype] == pytest.approx(measured[dtype], rel=0.03)
    for kernel, name in (("flash2", "flash"), ("cudnn", "cudnn")):
        assert power.joules_per_attention_flop[kernel] == pytest.approx(measured[name], rel=0.03)


@pytest.mark.parametrize("copies", [0, 1, 3])
def test_products_beside_copies_run_at_the_clock_of_the_mean_power(copies: int) -> None:
    """Alone a product is 18 % slower than beside three copies, whose power is below the limit."""
    device = load_device("h200")
    run = RUNS[{0: "products", 1: "products and copies in turns of 4", 3: "one product, three copies"}[copies]]
    burst, power = float(RUNS["one product, three copies"]["ms"]["mm"]) / 1e3, device.power
    assert power is not None
    copied = 4.0 * 2**30 * copies
    copy_s = copies * float(run["ms"].get("cp", 0.0)) / 1e3
    joules = gpu_power.PRODUCT_FLOPS * power.joules_per_flop["bf16"]
    paced = PACED_OF_PRODUCTS * burst
    clock = sustained_clock(power, joules, copied * power.joules_per_byte, paced, burst - paced + copy_s)
    assert paced / clock + burst - paced == pytest.approx(float(run["ms"]["mm"]) / 1e3, rel=0.04)


def test_unaligned_products_take_as_long_as_was_measured() -> None:
    """By median over what is alike; a product of 4,097 rows takes 1.0 to 8 times what one of 4,096 does."""
    device = load_device("h200")
    ratios: dict[tuple[str, int], list[float]] = {}
    with UNALIGNED.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            m, n, k = (int(row[size]) for size in "mnk")
            if row["dtype"] == "tf32":
                continue
            seconds = float(gemm(device, m, n, k, dtype=row["dtype"], layout=row["layout"].upper()).seconds)
            width = 2 if row["dtype"] == "bf16" else 4
            rows = {"tn": (n, k), "nn": (n, k), "nt": (m, n)}[row["layout"]]
            aligned = min(gcd(size * width, 16) for size in rows)
            ratios.setdefault((row["dtype"], aligned), []).append(seconds / (float(row["us"]) / 1e6))
    assert set(ratios) == {("bf16", of) for of in (2, 4, 8, 16)} | {("fp32", of) for of in (4, 8, 16)}
    for kind, each in ratios.items():
        assert median(each) == pytest.approx(1.0, abs=0.12), kind
        assert sum(abs(ratio - 1.0) < 0.45 for ratio in each) >= 0.9 * len(each), kind


def test_padded_products_are_aligned() -> None:
    device = load_device("h200")
    plain, padded = (float(gemm(device, 8192, 50257, 768, padded=padded).seconds) for padded in (False, True))
    assert plain > 5.0 * padded
    assert padded == pytest.approx(float(gemm(device, 8192, 50256, 768).seconds), rel=0.02)


def test_products_are_measured_as_the_committed_table_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    table = gpu_power.TABLE.with_name("h200_products.csv")
    with table.open(newline="", encoding="utf-8") as lines:
        rows = [(r["dtype"], r["layout"], int(r["m"]), int(r["n"]), int(r["k"])) for r in csv.DictReader(lines)]
    assert rows == list(gpu_products.shapes())
    gpu_products.compare("h200", table)
    assert "h200_products bf16 tn: 60 rows" in capsys.readouterr().out
