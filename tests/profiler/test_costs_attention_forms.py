"""Attention's closed form, written out from its description with constants that are all different."""

from __future__ import annotations

from math import ceil, exp, log

import msgspec
import pytest

from echograph.profiler.costs import (
    CostEstimate,
    DeviceProfile,
    attention_backward,
    attention_forward,
    load_device,
)

EFFICIENCY = {48: 0.31, 80: 0.53, 160: 0.71}
PADDED = (48, 80, 160)
CONSTANTS = {
    "overhead": 37.0, "overhead_per_element": 0.7, "tail": 0.43, "launch_s": 3.1e-6, "time_scale": 1.07,
    "query_traffic": 1.3, "kv_traffic": 2.9, "traffic_knee_bytes": 3e7, "traffic_sharpness": 0.8,
    "traffic_cached": 0.21, "plateau_keys": 20_000.0, "residual": None,
    "tile": 192, "tile_elements": 12_800, "tile_fits": 160, "key_tile": 96, "wave_rounding": 0.37,
    "splits": 2.3, "edge": 0.61, "throttle": 0.21, "throttle_flops": 3e12,
}  # fmt: skip
SHAPES = {
    "square": (3, 8, 512, 80, 8, 512, 80),
    "few tiles": (1, 2, 300, 64, 1, 900, 64),
    "queries of more than keys": (2, 16, 4000, 80, 4, 700, 80),
    "one query": (64, 32, 1, 128, 8, 65_536, 128),
    "one key": (64, 32, 65_536, 128, 8, 1, 128),
    "values of other width": (2, 16, 1024, 192, 16, 1024, 120),
    "narrow": (4, 12, 2048, 20, 12, 2048, 20),
    "long": (1, 64, 100_000, 160, 8, 100_000, 160),
}


def device(time_scale: float) -> DeviceProfile:
    """An H100 with one kernel; the faster it is, the sooner it comes to what no kernel can beat."""
    known = load_device("h100-sxm")
    model = known.attention["flash2"]
    assert model.backward is not None
    constants = CONSTANTS | {"time_scale": time_scale}
    made = {
        name: msgspec.structs.replace(
            of, head_dims=list(EFFICIENCY), efficiency=[e * by for e in EFFICIENCY.values()], **constants
        )
        for name, of, by in (("forward", model.forward, 1.0), ("backward", model.backward, 0.9))
    }
    model = msgspec.structs.replace(model, padded_head_dims=list(PADDED), **made)
    return msgspec.structs.replace(known, attention={"flash2": model})


def work(width: float, by: float) -> float:
    """Elements over efficiency: by the line between two fitted dims, in proportion beyond them."""
    at = {dim: dim / (efficiency * by) for dim, efficiency in EFFICIENCY.items()}
    if width < 48:
        return at[48] * max(width / 48, 0.5)
    if width > 160:
        return at[160] * width / 160
    low, high = (48, 80) if width <= 80 else (80, 160)
    return at[low] + (at[high] - at[low]) * (width - low) / (high - low)


def padded(dim: int) -> int:
    return next((known for known in PADDED if dim <= known), 64 * ceil(dim / 64))


def expected(of: DeviceProfile, shape: tuple[int, ...], causal: bool, backward: bool, time_scale: float) -> float:
    b, h, q, d, kv_h, kv, v_d = shape
    sheet = of.datasheet
    peak = sheet.peak_flops_per_s[of.attention["flash2"].peak]
    each = 10.0 if backward else 4.0
    sm_s = each / (peak / sheet.sm_count)
    width = (padded(d) + padded(v_d)) / 2
    pair_s, overhead_s = sm_s * work(width, 0.9 if backward else 1.0), sm_s * (37.0 + 0.7 * width)
    attended = kv if not causal else kv - q / 2 if q <= kv else kv**2 / (2 * q)
    keys = 96 * ceil(kv / 96)
    # 12,800 elements are 192 rows of 48, 128 of 80 and more; of keys in steps of 160 no more than there are.
    tile = min(192 if width == 48 else 128, 160 * ceil(kv / 160))
    # Queries before the first that sees a key: forward, a tile that holds one that does is whole.
    seeing = q if not causal else min(q, kv if backward else max(kv, tile))
    below = kv - seeing / 2 if seeing <= kv else kv**2 / (2 * seeing)
    visited = min(keys, max(96, min(kv, below + 0.61 * min(seeing, tile)) + 48)) if causal else keys
    tiled, swept = (kv if causal else keys, seeing) if backward else (seeing, keys)
    seen = min(swept, visited * seeing / tiled)
    waves = b * h * ceil(tiled / tile) / sheet.sm_count
    fill_s = 192 * overhead_s * max(1.0, visited / 20_000.0)
    mean_s = tile * seen * pair_s + fill_s
    splits = min(2.3, max(1.0, 1 / waves)) if causal else 1.0
    longest_s = tile * swept / splits * pair_s + fill_s
    filled = waves + (0.0 if causal else 0.37) * (ceil(waves) - waves)
    busy_s = max(longest_s, filled * mean_s + 0.43 * longest_s * min(1.0, waves))
    flops = each * b * h * q * attended * (d + v_d) / 2
    busy_s *= 1 + 0.21 * flops / (flops + 3e12)
    moved = 2 * b * d * (q * h * 1.3 + kv * kv_h * 2.9)
    streamed = 1 / (1 + exp(-0.8 * log(moved / 3e7)))
    traffic_s = moved * (streamed + (1 - streamed) * 0.21) / sheet.memory_bandwidth_bytes_per_s
    seconds = 3.1e-6 + time_scale * (busy_s + traffic_s)
    exact = flops / peak
    operands = 2 * b * (d + v_d) * (q * h + kv * kv_h)
    beyond = max(0.0, operands - sheet.l2_bytes) / sheet.memory_bandwidth_bytes_per_s
    return max(seconds, exact, beyond)


@pytest.mark.parametrize("time_scale", [1.07, 0.001])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_seconds_are_those_of_the_description(name: str, causal: bool, backward: bool, time_scale: float) -> None:
    of, (b, h, q, d, kv_h, kv, v_d) = device(time_scale), SHAPES[name]
    ask = attention_backward if backward else attention_forward
    found: CostEstimate = ask(
        of, batch=b, heads=h, seq=q, head_dim=d, kv_heads=kv_h, kv_seq=kv, v_head_dim=v_d, causal=causal,
        kernel="flash2",
    )  # fmt: skip
    wanted = expected(of, SHAPES[name], causal, backward, time_scale)
    assert float(found.seconds) == pytest.approx(wanted, rel=1e-12)
