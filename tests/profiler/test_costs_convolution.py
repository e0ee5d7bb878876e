"""Convolutions as implicit products: rows, columns, depth and bytes of each pass, written out by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from echograph.errors import UnknownNameError
from echograph.profiler.costs import convolution, load_device
from echograph.profiler.costs.gemm import gemm_model, physical_seconds

DEVICE = load_device("h100-sxm")
BATCH, WINDOW, BEFORE, AFTER = 5, 9, 784, 196


def seconds(groups: int, m: float, n: float, k: float, moved: float, dtype: str) -> float:
    """Of a product for each group, without correction."""
    model = gemm_model(DEVICE, dtype)
    sizes = [np.asarray(float(size)) for size in (groups, m, n, k, moved)]
    return float(physical_seconds(model, DEVICE.datasheet, *sizes, quantize=False))


@pytest.mark.parametrize(("dtype", "nbytes"), [("bf16", 2), ("fp32", 4), ("fp8", 1)])
@pytest.mark.parametrize(
    ("inputs", "outputs", "groups"), [(48, 80, 1), (48, 96, 4), (96, 96, 96), (4, 8, 1), (4, 2, 1)]
)
def test_every_pass_is_a_product(dtype: str, nbytes: int, inputs: int, outputs: int, groups: int) -> None:
    # Input channels are read in 16 bytes at least, if there are so many.
    lane = 16 // nbytes
    read, made = max(inputs / groups, min(lane, inputs)), outputs / groups
    rows = {"forward": BATCH * AFTER, "input_gradient": BATCH * BEFORE, "weight_gradient": made}
    columns = {"forward": made, "input_gradient": read, "weight_gradient": read * WINDOW}
    depth = {
        "forward": read * WINDOW,
        "input_gradient": made * WINDOW * AFTER / BEFORE,
        "weight_gradient": BATCH * AFTER,
    }
    moved = nbytes * (BATCH * (inputs * BEFORE + outputs * AFTER) + inputs * outputs * WINDOW / groups)
    peak = DEVICE.datasheet.peak_flops_per_s[gemm_model(DEVICE, dtype).peak]
    least = 2 * BATCH * AFTER * inputs * made * WINDOW / peak
    shape: dict[str, Any] = {
        "batch": BATCH, "in_channels": inputs, "out_channels": outputs, "kernel": WINDOW, "in_positions": BEFORE,
        "out_positions": AFTER, "groups": groups,
    }  # fmt: skip
    for pass_, m in rows.items():
        found = convolution(DEVICE, **shape, pass_=pass_, dtype=dtype)
        product = seconds(groups, m, columns[pass_], depth[pass_], moved, dtype)
        assert found.seconds == pytest.approx(max(product, least), rel=1e-12), pass_
        assert (found.spread, found.source) == (0.3, "analytical")


def test_no_convolution_is_faster_than_the_peak() -> None:
    """Not even by a profile whose products are."""
    gemm = DEVICE.gemm["bf16"]
    eager = msgspec.structs.replace(
        gemm, efficiency=[2.0] * len(gemm.tiles), overhead_k=[0.0] * len(gemm.tiles), launch_s=0.0, throttle=0.0
    )
    device = msgspec.structs.replace(DEVICE, gemm={"bf16": eager})
    peak = device.datasheet.peak_flops_per_s["bf16"]
    for groups in (1, 4):
        found = convolution(
            device, batch=256, in_channels=2048, out_channels=4096, kernel=9, in_positions=1024,
            out_positions=1024, **({} if groups == 1 else {"groups": groups}),
        )  # fmt: skip
        least = 2 * 256 * 1024 * 2048 * 4096 * 9 / groups / peak
        assert found.seconds == pytest.approx(least, rel=1e-12)


def test_an_unknown_pass_lists_the_choices() -> None:
    sizes = dict.fromkeys(("batch", "in_channels", "out_channels", "kernel", "in_positions", "out_positions"), 1.0)
    with pytest.raises(UnknownNameError, match="did you mean 'forward'"):
        convolution(DEVICE, **sizes, pass_="forwards")  # type: ignore[arg-type]
