r"""Seconds of fused (flash) attention, forward and backward, on one device.

The kernel deals tiles of T = 128 queries (forward) or keys (backward) of every batch entry and head to the SMs:

    pair_s  = 4 d / (efficiency * peak / SMs)      one query against one key, d: head dim that the kernel pads to
    fill_s  = 4 T (overhead + d overhead_per_element) / (peak / SMs)           filling and draining a tile
    tile_s  = T mean keys per query * pair_s + fill_s
    seconds = launch + max(longest tile, tiles tile_s / SMs + tail * longest tile) + traffic

times what a dense table says beyond that: a correction on a coarse grid of tiles (as of the longest), of the keys
of the longest tile, and of head dims. It falls by no more than the formula grows, so that no larger pass is a
shorter one; beyond the grid it stays what it is at the border.
Causal tiles see, on average, half of the keys plus half a tile (`edge` of one, where rows with and without a mask
tell it); tiles of a sliding window the window plus a tile. Where causal tiles are fewer than the SMs, their keys
are cut into as many splits as SMs idle, up to `splits`.
A kernel of larger tiles says so (`tile`, or `tile_elements` where wider heads have smaller ones, which fill and
drain as long), whether they have no more rows than there are keys, in steps of how many (`tile_fits`), and how
many keys it takes at once where it pads them (`key_tile`).
Tiles without a mask are all of one length, so a share of the kernel (`wave_rounding`) waits for the last wave to
fill. Where long kernels show that the clock falls, tiles take throttle * F / (F + throttle_flops) more, F: FLOPs.
Beyond the longest rows that were measured the overhead grows with the keys, so the rate stays what it was there.
The backward pass does 2.5 times the forward's FLOPs (five products for two), and its efficiency is relative to
that count. Traffic is what some kernels do beside: an inference kernel rotates the queries and writes the keys'
cache.

Source of the scheme: Dao, FlashAttention-2, 2023 (parallel over batch, heads and query blocks).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from echograph.errors import UnavailableError, UnknownNameError
from echograph.profiler.costs import dropout as drop
from echograph.profiler.costs.deterministic import SPREAD, in_one_order
from echograph.profiler.costs.device import (
    AttentionModel,
    AttentionPass,
    CostEstimate,
    Datasheet,
    DeviceProfile,
    FloatArray,
    as_floats,
    make_cost,
    widen,
)
from echograph.profiler.costs.gemm import correction
from echograph.profiler.costs.releases import attention_model, library_of

ATTENTION_KERNELS = ("trtllm", "flash1", "flash2", "flash3", "flash4", "cudnn")
"""Kernels that some device has a model of; a profile may name others of its own."""

TILE = 128.0
TILE_STEP = 64.0
"""Rows that the tiles of a kernel differ by, from head dim to head dim."""
BACKWARD_FLOPS = 2.5
"""FLOPs of the backward pass over those of the forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Arrays of one shape: batch, query heads, queries, head dim, key heads, keys, value head dim, window."""

    b: FloatArray
    h: FloatArray
    q: FloatArray
    d: FloatArray
    kv_h: FloatArray
    kv: FloatArray
    v_d: FloatArray
    window: FloatArray


def attention_shape(
    batch: npt.ArrayLike,
    heads: npt.ArrayLike,
    seq: npt.ArrayLike,
    head_dim: npt.ArrayLike,
    kv_heads: npt.ArrayLike | None = None,
    kv_seq: npt.ArrayLike | None = None,
    v_head_dim: npt.ArrayLike | None = None,
    window: npt.ArrayLike | None = None,
) -> AttentionShape:
    """Broadcasts the sizes against each other; None means as many keys or values as queries, and no window."""
    b, h, q, d, kv_h, kv, v_d, sees = as_floats(
        batch,
        heads,
        seq,
        head_dim,
        heads if kv_heads is None else kv_heads,
        seq if kv_seq is None else kv_seq,
        head_dim if v_head_dim is None else v_head_dim,
        np.inf if window is None else window,
    )
    return AttentionShape(b=b, h=h, q=q, d=d, kv_h=kv_h, kv=kv, v_d=v_d, window=sees)


def attention_forward(
    device: DeviceProfile,
    *,
    batch: npt.ArrayLike,
    heads: npt.ArrayLike,
    seq: npt.ArrayLike,
    head_dim: npt.ArrayLike,
    kv_heads: npt.ArrayLike | None = None,
    kv_seq: npt.ArrayLike | None = None,
    v_head_dim: npt.ArrayLike | None = None,
    causal: bool = True,
    window: npt.ArrayLike | None = None,
    kernel: str | None = None,
    dropout: bool = False,
) -> CostEstimate:
    """Cost of softmax(Q K^T) V in bf16 or fp16, one kernel.

    Args:
        device: the profile to ask.
        batch: sequences.
        heads: query heads.
        seq: queries per sequence.
        head_dim: elements of a query or key.
        kv_heads: key and value heads (default: `heads`).
        kv_seq: keys per sequence (default: `seq`).
        v_head_dim: elements of a value (default: `head_dim`).
        causal: queries see only the keys up to their own position, counted from the end.
        window: causal only: queries see only so many of the last of them (default: all).
        kernel: "flash2", "flash3", "cudnn", "trtllm", ..., or a release ("cudnn-2024"): default, the device's
            training kernel.
        dropout: some of the scores are dropped (`dropout.py`).

    Raises:
        UnknownNameError: no such kernel.
        UnavailableError: the device has no model of it.
    """
    model = _model(device, kernel)
    shape = attention_shape(batch, heads, seq, head_dim, kv_heads, kv_seq, v_head_dim, window)
    seconds = pass_seconds(model, model.forward, device.datasheet, shape, causal=causal)
    if not dropout:
        return _cost(model.forward, seconds)
    more = drop.dropout_seconds(device.datasheet, _pairs(shape, causal), backward=False)
    return _analytical(_cost(model.forward, seconds + more), drop.SPREAD)


def attention_backward(
    device: DeviceProfile,
    *,
    batch: npt.ArrayLike,
    heads: npt.ArrayLike,
    seq: npt.ArrayLike,
    head_dim: npt.ArrayLike,
    kv_heads: npt.ArrayLike | None = None,
    kv_seq: npt.ArrayLike | None = None,
    v_head_dim: npt.ArrayLike | None = None,
    causal: bool = True,
    window: npt.ArrayLike | None = None,
    kernel: str | None = None,
    deterministic: bool = False,
    dropout: bool = False,
) -> CostEstimate:
    """Cost of the gradients of Q, K and V, recomputing the scores; arguments as in `attention_forward`.

    `deterministic`: they are added up in one order (`deterministic.py`).

    Raises:
        UnknownNameError: no such kernel.
        UnavailableError: the device has no model of this kernel, or the kernel has no backward pass.
    """
    model = _model(device, kernel)
    if model.backward is None:
        known = [name for name, other in device.attention.items() if other.backward is not None]
        name = kernel or device.default_attention
        raise UnavailableError(f"attention kernel '{name}' has no backward pass on {device.name}", known)
    shape = attention_shape(batch, heads, seq, head_dim, kv_heads, kv_seq, v_head_dim, window)
    sheet = device.datasheet
    seconds, doubt = pass_seconds(model, model.backward, sheet, shape, causal=causal, backward=True), 0.0
    if dropout:
        seconds = seconds + drop.dropout_seconds(sheet, _pairs(shape, causal), backward=True)
        doubt = drop.SPREAD
    if deterministic:
        seconds = in_one_order(
            kernel or device.default_attention, sheet, seconds,
            b=shape.b, h=shape.h, q=shape.q, kv=shape.kv, d=shape.d, causal=causal,
        )  # fmt: skip
        doubt = float(np.hypot(doubt, SPREAD))
    cost = _cost(model.backward, seconds)
    return _analytical(cost, doubt) if doubt else cost


def _analytical(cost: CostEstimate, doubt: float) -> CostEstimate:
    return widen(cost, np.asarray(doubt))._replace(source="analytical")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How a pass is cut into tiles, an array each: what stands in the module's equations.

    Attributes:
        width: the head dim that the kernel pads to.
        tile: queries (backward: keys) of a tile.
        tiles: how many there are.
        visited: keys that a query's tile visits on average.
        seen: keys (backward: queries) that a tile visits on average.
        swept: those that the longest tile visits.
    """

    width: FloatArray
    tile: float | FloatArray
    tiles: FloatArray
    visited: FloatArray
    seen: FloatArray
    swept: FloatArray


def tiling_of(
    model: AttentionModel,
    kernel: AttentionPass,
    shape: AttentionShape,
    *,
    causal: bool | npt.NDArray[np.bool_],
    backward: bool = False,
) -> Tiling:
    """How a pass is cut into tiles, for every shape."""
    width = (padded(model, shape.d) + padded(model, shape.v_d)) / 2.0
    tile = tile_rows(kernel, width, shape.kv)
    # Of more queries than keys those at the front see nothing, and tiles of theirs alone take nothing.
    seeing = np.minimum(shape.q, shape.kv if backward else np.maximum(shape.kv, tile))
    seeing = np.where(causal, seeing, shape.q)
    visited = keys_visited(replace(shape, q=seeing), causal, tile, kernel.key_tile, kernel.edge)
    keys = _whole(shape.kv, kernel.key_tile)
    # The padding of keys is in `visited` where there is no mask: there the tiles have it as well.
    tiled, swept = (np.where(causal, shape.kv, keys), seeing) if backward else (seeing, keys)
    return Tiling(
        width=width,
        tile=tile,
        tiles=shape.b * shape.h * np.ceil(tiled / tile),
        visited=visited,
        seen=np.minimum(swept, visited * seeing / tiled),
        swept=np.minimum(swept, shape.window + tile),
    )


def correction_sizes(
    kernel: AttentionPass, sheet: Datasheet, tiling: Tiling, causal: bool | npt.NDArray[np.bool_]
) -> list[FloatArray]:
    """What the correction depends on: tiles as of the longest, its keys, the width.

    The first two grow with the queries and keys of a pass, masked or not. Keys beyond the longest rows that were
    measured count as those, and the last wave of tiles by the share of it that is waited for.
    """
    waves = tiling.tiles / sheet.sm_count
    waves = np.where(causal | (waves <= 1.0), waves, waves + kernel.wave_rounding * (np.ceil(waves) - waves))
    return [
        sheet.sm_count * waves * tiling.seen / tiling.swept,
        tiling.swept * np.minimum(1.0, kernel.plateau_keys / tiling.visited),
        tiling.width,
    ]


def pass_seconds(
    model: AttentionModel,
    kernel: AttentionPass,
    sheet: Datasheet,
    shape: AttentionShape,
    *,
    causal: bool | npt.NDArray[np.bool_],
    backward: bool = False,
) -> FloatArray:
    """Seconds of one pass for every shape."""
    peak = sheet.peak_flops_per_s[model.peak]
    flops_per_pair = 4.0 * (BACKWARD_FLOPS if backward else 1.0)
    unit_s = flops_per_pair / (peak / sheet.sm_count)
    tiling = tiling_of(model, kernel, shape, causal=causal, backward=backward)
    pair_s = unit_s * _work_per_pair(kernel, tiling.width)
    # Filling and draining take as long of a tile that has fewer rows.
    overhead_s = kernel.tile * unit_s * (kernel.overhead + kernel.overhead_per_element * tiling.width)
    overhead_s = overhead_s * np.maximum(1.0, tiling.visited / kernel.plateau_keys)
    mean_s = tiling.tile * tiling.seen * pair_s + overhead_s
    waves = tiling.tiles / sheet.sm_count
    # Libraries split the keys of a causal pass whose tiles are fewer than the SMs.
    splits = np.where(causal, np.clip(1.0 / waves, 1.0, kernel.splits), 1.0)
    longest_s = tiling.tile * tiling.swept / splits * pair_s + overhead_s
    full = waves + np.where(causal, 0.0, kernel.wave_rounding) * (np.ceil(waves) - waves)
    busy = np.maximum(longest_s, full * mean_s + kernel.tail * longest_s * np.minimum(1.0, waves))
    if kernel.throttle:
        flops = flops_per_pair * _pairs(shape, causal) * (shape.d + shape.v_d) / 2.0
        busy = busy * (1.0 + kernel.throttle * flops / (flops + kernel.throttle_flops))
    windowed = np.where(shape.window < shape.kv, kernel.windowed_scale, 1.0)
    scale = kernel.time_scale * windowed
    seconds = kernel.launch_s + scale * (busy + _traffic_seconds(kernel, sheet, shape))
    if kernel.residual is not None:
        sizes = correction_sizes(kernel, sheet, tiling, causal)
        seconds = seconds * np.exp(correction(kernel.residual, sizes))
    return np.maximum(seconds, _floor_seconds(sheet, shape, peak, flops_per_pair, causal))


def _pairs(shape: AttentionShape, causal: bool | npt.NDArray[np.bool_]) -> FloatArray:
    return np.asarray(shape.b * shape.h * shape.q * _keys_attended(shape, causal))


def _floor_seconds(
    sheet: Datasheet,
    shape: AttentionShape,
    peak: float,
    flops_per_pair: float,
    causal: bool | npt.NDArray[np.bool_],
) -> FloatArray:
    """What no kernel can beat: the exact FLOPs at peak, and compulsory traffic beyond L2."""
    dims = (shape.d + shape.v_d) / 2.0
    flops = flops_per_pair * shape.b * shape.h * shape.q * _keys_attended(shape, causal) * dims
    moved = 4.0 * shape.b * dims * (shape.q * shape.h + shape.kv * shape.kv_h)
    compulsory = np.maximum(0.0, moved - sheet.l2_bytes) / sheet.memory_bandwidth_bytes_per_s
    return np.maximum(flops / peak, compulsory)


def attention_flops(
    shape: AttentionShape, causal: bool | npt.NDArray[np.bool_], *, backward: bool = False
) -> FloatArray:
    """FLOPs of a pass; of a causal one those that the mask leaves."""
    each = 4.0 * (BACKWARD_FLOPS if backward else 1.0)
    return each * _pairs(shape, causal) * (shape.d + shape.v_d) / 2.0


def keys_visited(
    shape: AttentionShape,
    causal: bool | npt.NDArray[np.bool_],
    tile: float | FloatArray = TILE,
    key_tile: int = 1,
    edge: float = 0.5,
) -> FloatArray:
    """Keys that a query's tile visits on average: the diagonal tile whole, without a mask the last step.

    Args:
        shape: of the pass.
        causal: whether there is a mask.
        tile: queries of a tile.
        key_tile: keys of a step, which are visited together.
        edge: what a masked tile visits beyond its mask, in tiles.
    """
    edges = edge * np.where(shape.window < shape.kv, 2.0, 1.0)
    seen = np.minimum(shape.kv, _keys_attended(shape, causal) + edges * np.minimum(shape.q, tile))
    if key_tile == 1:
        return np.asarray(seen)
    # The last step of a tile is half of it beyond the mask, on average.
    keys = _whole(shape.kv, key_tile)
    return np.where(causal, np.clip(seen + key_tile / 2.0, key_tile, keys), keys)


def tile_rows(kernel: AttentionPass, width: FloatArray, keys: FloatArray) -> float | FloatArray:
    """Queries or keys of a tile, by padded head dim: as many as its elements hold, 128 at least."""
    if not kernel.tile_elements:
        return float(kernel.tile)
    held = np.floor(kernel.tile_elements / width / TILE_STEP) * TILE_STEP
    rows = np.minimum(float(kernel.tile), np.maximum(TILE, held))
    return np.minimum(rows, _whole(keys, kernel.tile_fits)) if kernel.tile_fits else rows


def _whole(keys: FloatArray, step: int) -> FloatArray:
    return keys if step == 1 else np.asarray(np.ceil(keys / step) * step)


def _keys_attended(shape: AttentionShape, causal: bool | npt.NDArray[np.bool_]) -> FloatArray:
    """Keys that a query attends to on average, the diagonal counted half."""
    below = np.where(shape.q <= shape.kv, shape.kv - shape.q / 2.0, shape.kv * shape.kv / (2.0 * shape.q))
    # Of the keys below the diagonal a window leaves a band; the first queries have fewer than fill it.
    sees = np.minimum(shape.window, shape.kv)
    filling = np.maximum(0.0, sees - np.maximum(0.0, shape.kv - shape.q))
    banded = np.minimum(below, sees - filling * filling / (2.0 * shape.q))
    return np.where(causal, banded, shape.kv)


def _work_per_pair(kernel: AttentionPass, width: FloatArray) -> FloatArray:
    """Padded elements over efficiency, between (and beyond) the fitted head dims."""
    dims = np.asarray(kernel.head_dims, dtype=np.float64)
    work = dims / np.asarray(kernel.efficiency)
    below = work[0] * np.maximum(width / dims[0], 0.5)
    above = work[-1] * width / dims[-1]
    inside = np.interp(width, dims, work)
    return np.asarray(np.where(width < dims[0], below, np.where(width > dims[-1], above, inside)))


def padded(model: AttentionModel, dim: FloatArray) -> FloatArray:
    """The head dim that a compiled kernel exists for; beyond the largest, multiples of 64."""
    known = np.asarray(sorted(model.padded_head_dims), dtype=np.float64)
    index = np.minimum(np.searchsorted(known, dim), len(known) - 1)
    return np.where(dim <= known[-1], known[index], np.ceil(dim / 64.0) * 64.0)


def _traffic_seconds(kernel: AttentionPass, sheet: Datasheet, shape: AttentionShape) -> FloatArray:
    per_query, per_key = shape.h * kernel.query_traffic, shape.kv_h * kernel.kv_traffic
    moved = 2.0 * shape.b * shape.d * (shape.q * per_query + shape.kv * per_key)
    safe = np.maximum(moved, 1.0)
    octave = np.clip(kernel.traffic_sharpness * np.log(safe / kernel.traffic_knee_bytes), -60.0, 60.0)
    streamed = 1.0 / (1.0 + np.exp(-octave))
    price = streamed + (1.0 - streamed) * kernel.traffic_cached
    return np.asarray(moved * price / sheet.memory_bandwidth_bytes_per_s)


def _model(device: DeviceProfile, kernel: str | None) -> AttentionModel:
    name = device.default_attention if kernel is None else kernel
    model = attention_model(device, name)
    if model is None:
        if library_of(name) in ATTENTION_KERNELS:
            raise UnavailableError(f"device {device.name} has no attention kernel '{name}'", device.attention)
        raise UnknownNameError("attention kernel", name, device.attention, hint=f"on {device.name}")
    return model


def _cost(kernel: AttentionPass, seconds: FloatArray) -> CostEstimate:
    return make_cost(seconds, kernel.label.spread, kernel.label.spread_short, kernel.label.source)
