"""Attention: bounds, monotony, the causal half, head dims that a kernel pads."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from echograph.errors import UnavailableError, UnknownNameError
from echograph.profiler.costs import (
    CostEstimate,
    attention_backward,
    attention_forward,
    device_names,
    load_device,
)
from echograph.profiler.costs.attention import tile_rows

PAIRS = [(name, kernel) for name in device_names() for kernel in load_device(name).attention]


SLOWER = {("l40s", "trtllm"), ("rtx-pro-6000", "trtllm")}
"""TensorRT-LLM's kernel of head dim 192 takes 1.2 to 1.3 times as long there as that of 256 (435 and 444 rows)."""


@example(("gb200", "trtllm"), 1, 1, 1, 1, 1, False)
@example(("b300", "flash4"), 1, 1, 512, 1, 1, False)  # keys that fill no tile are padded once
@example(("b300", "flash4"), 65, 9, 86, 70, 44, True)
@example(("b300", "trtllm"), 2, 2, 1, 1, 177, True)
@example(("h100-sxm", "flash1"), 11, 1, 9530, 137, 51, True)  # tiles of half as many keys
@example(("a100-sxm-80", "flash1"), 506, 97, 1, 1, 70, False)
@given(
    st.sampled_from(PAIRS),
    st.integers(1, 512),
    st.integers(1, 128),
    st.integers(1, 200_000),
    st.integers(1, 200_000),
    st.integers(1, 320),
    st.booleans(),
)
def test_bounds_and_growth(
    pair: tuple[str, str], batch: int, heads: int, seq: int, kv_seq: int, head_dim: int, causal: bool
) -> None:
    device = load_device(pair[0])
    model = device.attention[pair[1]]
    shape = {"batch": batch, "heads": heads, "seq": seq, "kv_seq": kv_seq, "head_dim": head_dim}
    peak = device.datasheet.peak_flops_per_s[model.peak]
    for cost, factor, exists in (
        (attention_forward, 1.0, True),
        (attention_backward, 2.5, model.backward is not None),
    ):
        if not exists:
            continue

        def seconds_of(cost: Callable[..., CostEstimate] = cost, **other: int) -> float:
            return float(cost(device, **{**shape, **other}, causal=causal, kernel=pair[1]).seconds)

        seconds = seconds_of()
        attended = kv_seq if not causal else kv_seq - seq / 2 if seq <= kv_seq else kv_seq**2 / (2 * seq)
        flops = factor * 4.0 * batch * heads * seq * attended * head_dim
        padded = factor * 4.0 * batch * heads * (seq + 128) * (kv_seq + 128) * (head_dim + 128)
        # Fewer sequences and heads than SMs leave the others idle.
        idle = max(1.0, device.datasheet.sm_count / (batch * heads))
        assert flops / peak <= seconds < 100e-6 + 40.0 * padded * idle / peak
        assert seconds_of(seq=2 * seq, kv_seq=2 * kv_seq) > seconds
        assert seconds_of(batch=batch + 1) >= seconds
        assert seconds_of(heads=2 * heads) >= seconds
        if pair not in SLOWER or not 128 < head_dim <= 192:
            assert seconds_of(head_dim=head_dim + 64) >= seconds


def test_a_slower_kernel_of_a_narrower_head_is_a_measured_one() -> None:
    """Elements over efficiency grow with the head dim, but where rows of both say otherwise."""
    slower = set()
    for name in device_names():
        for kernel, model in load_device(name).attention.items():
            for of in (model.forward, model.backward):
                work = [dim / rate for dim, rate in zip(of.head_dims, of.efficiency, strict=True)] if of else []
                dims = of.head_dims if of else []
                slower |= {(kernel, dims[i]) for i in range(len(work) - 1) if work[i + 1] < work[i]}
    assert slower == {("trtllm", 192), ("flash4", 72)}


def test_flash_attention_1_takes_the_fewer_keys_at_once_the_longer_they_are() -> None:
    """256 of head dim 64, 128 of 128, and never more than there are, in whole tiles."""
    model = load_device("a100-sxm-80").attention["flash1"]
    width, keys = np.asarray([32.0, 64.0, 128.0, 64.0]), np.asarray([4096.0, 4096.0, 4096.0, 100.0])
    assert model.backward is not None
    for kernel in (model.forward, model.backward):
        assert np.asarray(tile_rows(kernel, width, keys)).tolist() == [256.0, 256.0, 128.0, 128.0]


def test_causal_attention_nears_half_of_full_attention_as_sequences_grow() -> None:
    device = load_device("h100-sxm")
    shape = {"batch": 1, "heads": 32, "head_dim": 128}
    ratios = [
        attention_forward(device, seq=seq, causal=True, **shape).seconds
        / attention_forward(device, seq=seq, causal=False, **shape).seconds
        for seq in (512, 4096, 65536)
    ]
    assert ratios[0] > ratios[1] > ratios[2]
    assert ratios[2] == pytest.approx(0.5, abs=0.02)


def test_backward_takes_two_to_four_times_the_forward() -> None:
    for name in device_names():
        device = load_device(name)
        shape = {"batch": 4, "heads": 32, "seq": 4096, "head_dim": 128}
        ratio = attention_backward(device, **shape).seconds / attention_forward(device, **shape).seconds
        assert 2.0 < ratio < 4.0, name


def test_head_dims_run_as_the_next_one_that_is_compiled() -> None:
    device = load_device("a100-sxm-80")
    shape = {"batch": 2, "heads": 16, "seq": 8192, "kernel": "flash2"}
    at = {d: attention_forward(device, head_dim=d, **shape).seconds for d in (64, 80, 96, 128, 160, 192, 256)}
    assert at[64] < at[80] < at[128] < at[160] < at[256]
    # What they move of queries, keys and values differs all the same.
    assert at[80] == pytest.approx(at[96], rel=0.03)
    assert at[160] == pytest.approx(at[192], rel=0.03)


def test_newer_kernels_are_faster_on_the_device_they_are_for() -> None:
    device = load_device("h100-sxm")
    shape = {"batch": 4, "heads": 16, "seq": 4096, "head_dim": 128}
    flash1, flash2, flash3 = (
        attention_forward(device, kernel=k, **shape).seconds for k in ("flash1", "flash2", "flash3")
    )
    assert flash3 < flash2 < flash1


def test_unknown_kernels_list_the_choices() -> None:
    shape = {"batch": 1, "heads": 1, "seq": 1, "head_dim": 64}
    with pytest.raises(UnknownNameError, match="did you mean 'flash2'"):
        attention_forward(load_device("a100-sxm-80"), kernel="flash22", **shape)
    with pytest.raises(
        UnavailableError, match=r"a100-sxm-80 has no attention kernel 'flash3'; available: .*flash2"
    ):
        attention_forward(load_device("a100-sxm-80"), kernel="flash3", **shape)
    with pytest.raises(UnavailableError, match=r"'trtllm' has no backward pass on h100-sxm; available: .*flash2"):
        attention_backward(load_device("h100-sxm"), kernel="trtllm", **shape)


def test_head_dims_are_those_that_a_kernel_exists_for() -> None:
    """The next larger one; beyond the largest, the next multiple of 64."""
    device = load_device("h100-sxm")
    shape = {"batch": 8, "heads": 32, "seq": 8192, "causal": False, "kernel": "flash2"}
    known = sorted(device.attention["flash2"].padded_head_dims)
    largest = -(-known[-1] // 64) * 64

    def seconds(head_dim: int) -> float:
        return float(attention_forward(device, head_dim=head_dim, **shape).seconds)

    for below, dim in zip([0, *known], known, strict=False):
        assert seconds(below + 1) == pytest.approx(seconds(dim), rel=1e-9)
    for multiple in (largest + 64, largest + 128):
        assert seconds(multiple - 63) == seconds(multiple - 1) == seconds(multiple) < seconds(multiple + 1)
    assert seconds(largest + 64) > 1.05 * seconds(known[-1])


def test_a_window_costs_what_it_shows_and_no_more_than_the_whole() -> None:
    device = load_device("h100-sxm")
    shape = {"batch": 1, "heads": 64, "seq": 32768, "head_dim": 128, "kernel": "flash3"}
    whole = attention_forward(device, **shape)
    assert (
        attention_forward(device, window=32768, **shape)
        == attention_forward(device, window=10**6, **shape)
        == whole
    )
    narrow, wide = (attention_forward(device, window=w, **shape).seconds for w in (1024, 4096))
    assert narrow < wide < whole.seconds
    # A band of 4,096 of 32,768 keys is 0.234 of the triangle; its edges are whole tiles.
    assert 0.234 < wide / whole.seconds < 0.3
    assert attention_backward(device, window=1024, **shape).seconds < attention_backward(device, **shape).seconds


def test_beyond_the_longest_measured_the_rate_stays() -> None:
    device = load_device("h100-sxm")
    model = device.attention["flash2"]
    measured = msgspec.structs.replace(model.forward, plateau_keys=8192.0)
    level = msgspec.structs.replace(model, forward=measured)
    ours = msgspec.structs.replace(device, attention={"flash2": level}, default_attention="flash2")
    shape = {"batch": 1, "heads": 32, "head_dim": 128, "causal": False}
    at, beyond = (attention_forward(ours, seq=seq, **shape).seconds / seq**2 for seq in (65536, 262144))
    assert beyond == pytest.approx(at, rel=0.02)
    before, after = (
        attention_forward(device, seq=seq, kernel="flash2", **shape).seconds / seq**2 for seq in (8192, 131072)
    )
    assert after < 0.95 * before
