"""Memory-bound kernels, convolutions and the host."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echograph.errors import UnknownNameError
from echograph.profiler.costs import convolution, device_names, load_device, memory_bound
from echograph.profiler.costs.device import LIKE, MEMORY_KINDS

DEVICE = st.sampled_from(device_names())


@given(
    DEVICE, st.sampled_from(MEMORY_KINDS), st.integers(0, 10**12), st.integers(0, 10**12), st.integers(1, 10**6)
)
def test_never_beats_the_bandwidth(name: str, kind: str, read: int, written: int, row: int) -> None:
    device = load_device(name)
    cost = memory_bound(device, kind, bytes_read=read, bytes_written=written, row_bytes=row)
    floor = (read + written) / device.datasheet.memory_bandwidth_bytes_per_s
    assert device.memory_launch_s + floor <= cost.seconds <= device.memory_launch_s + 8.0 * floor


@pytest.mark.parametrize("name", device_names())
def test_large_elementwise_kernels_reach_most_of_the_bandwidth(name: str) -> None:
    device = load_device(name)
    gigabyte = 1e9 / device.datasheet.memory_bandwidth_bytes_per_s
    reach = gigabyte / memory_bound(device, "elementwise", bytes_read=5e8, bytes_written=5e8).seconds
    assert 0.7 < reach < 0.95


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
    host = load_device(name).host
    assert 1e-6 < host.launch_s < host.op_s < 1e-4


@pytest.mark.parametrize("name", device_names())
def test_a_view_costs_less_than_an_operation_with_a_kernel(name: str) -> None:
    host = load_device(name).host
    assert 0 < host.kernel_s < host.op_s
    assert host.op_s - host.kernel_s == pytest.approx(
        host.op_s - host.launch_s if host.view_s is None else host.view_s
    )


def test_a_kind_without_a_model_is_like_another_and_a_library_has_its_own() -> None:
    device = load_device("h100-sxm")
    bare = msgspec.structs.replace(
        device, memory={k: m for k, m in device.memory.items() if k not in LIKE and ":" not in k}
    )
    sizes = {"bytes_read": 4e8, "bytes_written": 2e8}
    for kind, other in LIKE.items():
        assert memory_bound(bare, kind, **sizes) == memory_bound(bare, other, **sizes)
    slow = msgspec.structs.replace(bare.memory["norm"], row_bytes=[8192.0], bandwidth_fraction=[0.1])
    ours = msgspec.structs.replace(bare, memory=bare.memory | {"norm:ours": slow})
    assert memory_bound(ours, "norm", **sizes) == memory_bound(ours, "norm", library="theirs", **sizes)
    apart = memory_bound(ours, "norm", library="ours", **sizes).seconds - bare.memory_launch_s
    assert apart == pytest.approx(6e8 / (0.1 * bare.datasheet.memory_bandwidth_bytes_per_s))


def test_a_scale_by_the_bytes_moved_holds_beyond_its_knots() -> None:
    device = load_device("h100-sxm")
    model = msgspec.structs.replace(
        device.memory["elementwise"], bandwidth_fraction=[0.8], moved_bytes=[1e8, 4e8], moved_scale=[0.5, 1.0]
    )
    ours = msgspec.structs.replace(device, memory=device.memory | {"elementwise": model})
    bandwidth = device.datasheet.memory_bandwidth_bytes_per_s
    for moved, fraction in ((1e7, 0.4), (1e8, 0.4), (2e8, 0.6), (4e8, 0.8), (1e10, 0.8)):
        seconds = memory_bound(ours, "elementwise", bytes_read=moved, bytes_written=0).seconds
        assert seconds - device.memory_launch_s == pytest.approx(moved / bandwidth / fraction)


def test_the_gradient_of_a_norms_weights_is_added_up_by_blocks_of_columns_or_at_once() -> None:
    device = load_device("gb200")
    kind = device.memory["norm_backward"]
    memory = {"norm_backward": msgspec.structs.replace(kind, column_cycles=6.0)}
    memory["norm_backward:fused"] = msgspec.structs.replace(kind, column_cycles=0.0, finish_s=1e-5)
    memory["norm_backward:compiled"] = msgspec.structs.replace(kind, column_cycles=0.0)
    device = msgspec.structs.replace(device, memory=memory)
    multiprocessors = device.datasheet.sm_count

    def ending_s(library: str, columns: int, element_bytes: float = 2.0) -> float:
        written = 1000 * columns * element_bytes
        took = [
            float(
                memory_bound(
                    device, "norm_backward", bytes_read=2 * written, bytes_written=written,
                    row_bytes=columns * element_bytes, element_bytes=element_bytes, library=name,
                ).seconds
            )
            for name in (library, "compiled")
        ]  # fmt: skip
        return took[0] - took[1]

    wave = 6.0 * 1000 / device.datasheet.clock_hz
    assert ending_s("", 128) == pytest.approx(wave)
    assert ending_s("", 32 * multiprocessors) == pytest.approx(wave)
    assert ending_s("", 32 * multiprocessors + 1) == pytest.approx(2 * wave)
    assert ending_s("", 32 * multiprocessors, element_bytes=4.0) == pytest.approx(wave)
    assert ending_s("fused", 128) == pytest.approx(1e-5) == ending_s("fused", 16384)
