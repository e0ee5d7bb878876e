"""Seconds of a convolution, as the implicit matrix product that the library runs: analytical, never fitted."""

from __future__ import annotations

import numpy as np

from echograph.errors import UnknownNameError
from echograph.profiler.costs.cost import CostEstimate, as_floats, make_cost
from echograph.profiler.costs.device import DeviceProfile
from echograph.profiler.costs.gemm import gemm_model, physical_seconds

PASSES = ("forward", "input_gradient", "weight_gradient")

SPREAD = 0.3
"""Assumed: no convolution was measured; implicit products reach some 70-100 % of an explicit one's rate."""


def convolution(
    device: DeviceProfile,
    *,
    batch: float,
    in_channels: float,
    out_channels: float,
    kernel: float,
    in_positions: float,
    out_positions: float,
    groups: float = 1,
    pass_: str = "forward",
    dtype: str = "bf16",
) -> CostEstimate:
    """Cost of one pass of a convolution of any rank.

    Args:
        device: the profile to ask.
        batch: images.
        in_channels: channels of the input, all groups together.
        out_channels: channels of the output, all groups together.
        kernel: elements of the window (height times width).
        in_positions: pixels of the input.
        out_positions: pixels of the output.
        groups: channel groups (depthwise: `in_channels`).
        pass_: "forward", "input_gradient" or "weight_gradient".
        dtype: of the operands.

    Raises:
        UnknownNameError: no such pass or dtype.
        UnavailableError: the device has no units for this dtype, or no model of them.
    """
    if pass_ not in PASSES:
        raise UnknownNameError("pass", pass_, PASSES)
    model = gemm_model(device, dtype)
    lane = 16.0 / model.element_bytes
    channels_in = max(in_channels / groups, min(lane, in_channels))
    channels_out = max(out_channels / groups, 1.0)
    m, n, k = {
        "forward": (batch * out_positions, channels_out, channels_in * kernel),
        "input_gradient": (
            batch * in_positions,
            channels_in,
            channels_out * kernel * out_positions / in_positions,
        ),
        "weight_gradient": (channels_out, channels_in * kernel, batch * out_positions),
    }[pass_]
    images = batch * (in_channels * in_positions + out_channels * out_positions)
    moved = model.element_bytes * (images + in_channels * out_channels * kernel / groups)
    b, rows, cols, depth, total = as_floats(groups, m, n, k, moved)
    sheet = device.datasheet
    seconds = physical_seconds(model, sheet, b, rows, cols, depth, total, quantize=False)
    flops = 2.0 * b * batch * out_positions * in_channels / groups * channels_out * kernel
    floor = np.maximum(flops / sheet.peak_flops_per_s[model.peak], 0.0)
    return make_cost(np.maximum(seconds, floor), SPREAD, SPREAD, "analytical")
