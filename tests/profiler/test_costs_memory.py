"""Memory-bound kernels, convolutions and the host."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echograph.errors import UnknownNameError
from echograph.profiler.costs import convolution, device_names, framework_op, launch, load_device, memory_bound
from echograph.profiler.costs.device import MEMORY_KINDS

DEVICE = st.sampled_from(device_names())


@given(
    DEVICE, st.sampled_from(MEMORY_KINDS), st.integers(0, 10**12), st.integers(0, 10**12), st.integers(1, 10**6)
)
def test_never_beats_the_bandwidth(name: str, kind: str, read: int, written: int, row: int) -> None:
    device = load_device(name)
    cost = memory_bound(device, kind, bytes_read=read, bytes_written=written, row_bytes=row)
    floor = (read + written) / device.datasheet.memory_bandwidth_bytes_per_s
    assert device.memory_launch_s + floor <= cost.seconds <= device.memory_launch_s + 4.0 * floor


@pytest.mark.parametrize("name", device_names())
def test_large_elementwise_kernels_reach_most_of_the_bandwidth(name: str) -> None:
    device = load_device(name)
    gigabyte = 1e9 / device.datasheet.memory_bandwidth_bytes_per_s
    reach = gigabyte / memory_bound(device, "elementwise", bytes_read=5e8, bytes_written=5e8).seconds
    assert 0.8 < reach < 0.95


def test_unknown_kind_lists_the_choices() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'softmax'"):
        memory_bound(load_device("h100-sxm"), "softmx", bytes_read=1, bytes_written=1)
    with pytest.raises(ValueError, match="bytes"):
        memory_bound(load_device("h100-sxm"), "copy", bytes_read=-1, bytes_written=0)


@given(
    DEVICE,
    st.integers(1, 256),
    st.integers(1, 2048),
    st.integers(1, 2048),
    st.sampled_from((1, 9, 49)),
    st.integers(1, 50_000),
    st.sampled_from(("forward", "input_gradient", "weight_gradient")),
)
def test_convolution_is_bounded_by_the_peak(
    name: str, batch: int, channels: int, filters: int, window: int, positions: int, which: str
) -> None:
    device = load_device(name)
    dtype = "bf16" if "bf16" in device.gemm else "fp16"
    cost = convolution(
        device,
        batch=batch,
        in_channels=channels,
        out_channels=filters,
        kernel=window,
        in_positions=positions,
        out_positions=positions,
        pass_=which,
        dtype=dtype,
    )
    flops = 2.0 * batch * positions * channels * filters * window
    assert cost.seconds >= flops / device.datasheet.peak_flops_per_s[dtype]
    assert cost.source == "analytical"


@pytest.mark.parametrize("name", device_names())
def test_an_eager_operation_costs_more_than_its_launch(name: str) -> None:
    device = load_device(name)
    assert 1e-6 < launch(device).seconds < framework_op(device).seconds < 1e-4


@pytest.mark.parametrize("name", device_names())
def test_a_view_costs_less_than_an_operation_with_a_kernel(name: str) -> None:
    host = load_device(name).host
    assert 0 < host.kernel_s < host.op_s
    assert host.op_s - host.kernel_s == pytest.approx(
        host.op_s - host.launch_s if host.view_s is None else host.view_s
    )
