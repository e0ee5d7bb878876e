"""Convolutions as implicit products: rows, columns, depth and bytes of each pass, written out by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from echograph.errors import UnknownNameError
from echograph.ir.types import Compute, Convolution, DType, Phase, Tensor, TensorRole
from echograph.profiler.costs import convolution, load_device
from echograph.profiler.costs.estimate import cost_of
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


def cost(device: str, dtype: DType) -> float:
    image, weight, result = (
        Tensor(id=at, name="", shape=shape, dtype=dtype, role=TensorRole.ACTIVATION)
        for at, shape in enumerate(((32, 256, 56, 56), (64, 256, 1, 1), (32, 64, 56, 56)))
    )
    plain = Convolution(stride=(1, 1), padding=(0, 0), dilation=(1, 1), transposed=False, groups=1)
    op = Compute(id=0, name="aten.convolution", phase=Phase.FORWARD, flops=1, attributes=plain)
    return float(cost_of(op, ([image, weight], [result]), load_device(device)).seconds)


def plain_cost(device: str, dtype: str) -> float:
    found = convolution(
        load_device(device), batch=32, in_channels=256, out_channels=64, kernel=1, in_positions=56 * 56,
        out_positions=56 * 56, dtype=dtype,
    )  # fmt: skip
    return float(found.seconds)


@pytest.mark.parametrize("device", ["a100-sxm-40", "h100-sxm", "b200", "l40s"])
def test_convolutions_of_fp32_run_in_tf32_where_pytorch_lets_them(device: str) -> None:
    assert cost(device, DType.FP32) == plain_cost(device, "tf32") < plain_cost(device, "fp32")
    assert cost(device, DType.FP64) == 2 * plain_cost(device, "fp32")


@pytest.mark.parametrize("device", ["v100-sxm2", "mi300x"])
def test_elsewhere_convolutions_of_fp32_run_in_fp32(device: str) -> None:
    assert cost(device, DType.FP32) == plain_cost(device, "fp32")
