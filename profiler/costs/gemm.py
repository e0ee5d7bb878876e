"""Seconds of a matrix product C[b, m, n] = A[m, k] B[k, n] on one device, and of a convolution.

A kernel cuts C into tiles of tm x tn, optionally cuts k into s slices, and deals the pieces to the SMs in waves:

    pieces    = b * ceil(m / tm) * ceil(n / tn) * s
    waves     = r * ceil(pieces / SMs) + (1 - r) * max(pieces / SMs, 1)         r: wave_rounding
    depth     = max(k / s, 128), or k / s in whole steps of k_step
    tile_s    = 2 tm tn (depth + overhead_k) / (efficiency * peak / SMs)
    compute   = min over tiles and slices of (waves * tile_s + cost of adding slices up)
    compute  *= 1 + throttle * F / (F + throttle_flops)                          F: FLOPs of the product
    memory    = bytes * (c + (1 - c) / (1 + (cache_share * cache / bytes)^4)) / (bandwidth * bandwidth_fraction)
                                                                                 c: traffic_cached
    seconds   = launch + (compute^p + memory^p)^(1/p)                            p: overlap_power

then times what the measurements say beyond that: a correction on a coarse grid of log shapes, the layout,
alignment, and what batches of products take that are narrower than those of the tables (attention's). From knot to
knot the correction falls by no more than these equations grow, and beyond the grid it stays what it is at the
border, so that more work takes no less time. Accumulation into fp32 adds the share of its traffic that nothing
hides. The library is assumed to choose the best tile, as cuBLAS nearly does.

A convolution is the implicit matrix product that the library runs: analytical, never fitted.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from echograph.errors import UnavailableError, UnknownNameError
from echograph.profiler.costs.device import (
    CostEstimate,
    Datasheet,
    DeviceProfile,
    FloatArray,
    GemmModel,
    Grid,
    Quantize,
    as_floats,
    make_cost,
    widen,
)

LIMIT = 0.25
"""No correction moves a time by more than this (natural log)."""


def corners(
    knots: Sequence[Sequence[float]], sizes: Sequence[FloatArray]
) -> tuple[npt.NDArray[np.intp], FloatArray]:
    """The eight knots around each point; one outside counts as at the border.

    Args:
        knots: increasing sizes along each of the three axes.
        sizes: three arrays of shape [points].

    Returns:
        Flat knot indices [8, points], and their weights [8, points].
    """
    low, weight = [], []
    for axis, size in zip(knots, sizes, strict=True):
        log_axis, log_size = np.log2(axis), np.log2(size)
        index = np.clip(np.searchsorted(log_axis, log_size, side="right") - 1, 0, len(axis) - 2)
        part = (log_size - log_axis[index]) / (log_axis[index + 1] - log_axis[index])
        low.append(index)
        weight.append(np.clip(part, 0.0, 1.0))
    flat, weights = [], []
    for bits in itertools.product((0, 1), repeat=3):
        corner = [index + bit for bit, index in zip(bits, low, strict=True)]
        flat.append(np.ravel_multi_index(corner, [len(axis) for axis in knots]))
        weights.append(
            np.prod([part if bit else 1.0 - part for bit, part in zip(bits, weight, strict=True)], axis=0)
        )
    return np.stack(flat), np.stack(weights)


def correction(grid: Grid, sizes: Sequence[FloatArray]) -> FloatArray:
    """The correction of log time at each point; outside the knots it stays what it is at the border."""
    flat, near = corners(grid.knots, sizes)
    values = np.asarray(grid.permille, dtype=np.float64)[flat] / 1000.0
    return np.asarray(np.clip((values * near).sum(axis=0), -LIMIT, LIMIT))


DTYPES = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "fp8": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "fp8_block": "fp8_block",
    "nvfp4": "nvfp4",
    "fp32": "fp32",
    "float32": "fp32",
    "tf32": "tf32",
}
"""Spellings of a dtype, and the model that answers for it.

`fp8` has one scale a tensor; `fp8_block` one for each 128 of an activation and each 128 x 128 of a weight
(DeepSeek's recipe); `nvfp4` one for each 16.
"""

STAND_IN = {"fp16": "bf16"}
"""Where a device has no model of its own for a dtype: fp16 runs on the same units as bf16, at the same rate."""

LAYOUTS = ("TN", "NN", "NT")
"""As cuBLAS names them: TN is a forward linear, NN its input gradient, NT its weight gradient."""

RESULT_BYTES, SINGLE_BYTES = 2.0, 4.0
"""Bytes per element of a result in bf16, which products write otherwise, and of a buffer in fp32."""

MISALIGNMENT_DOUBT = 0.5
"""Assumed: what a misaligned dimension adds may be off by half of itself."""

TABLED_FROM, CHARTED_TO = 256.0, 128.0
"""The narrowest dense products of the tables, and the widest of the charts that batches are fitted on."""

CACHE_SHARPNESS = 4.0
"""How sharply bytes turn from the cache's to the memory's around the share of the cache that they may fill."""

MIN_SLICE_K = 128.0
"""A slice of k shorter than this costs as much as this, where a model has no step of k."""


def gemm(
    device: DeviceProfile,
    m: npt.ArrayLike,
    n: npt.ArrayLike,
    k: npt.ArrayLike,
    *,
    batch: npt.ArrayLike = 1,
    dtype: str = "bf16",
    layout: str = "TN",
    accumulator_bytes: float = 0.0,
    quantize: bool = True,
    padded: bool = False,
) -> CostEstimate:
    """Cost of a (batched) matrix product.

    Args:
        device: the profile to ask.
        m: rows of C, per product (a linear layer's tokens).
        n: columns of C (a linear layer's outputs).
        k: the dimension summed over.
        batch: independent products of this shape in one launch.
        dtype: of the operands; the result is written in bf16 (fp32 for fp32 and tf32).
        layout: "TN", "NN" or "NT": which operands are read transposed.
        accumulator_bytes: per element of the buffer that the result is added to (a main gradient); 0: of none.
        quantize: below 16 bits only: include the cast of A from bf16 with its scale, as the measured rows do.
        padded: whether dimensions that are no multiples of 16 bytes are padded.

    Raises:
        UnknownNameError: no such dtype or layout.
        UnavailableError: the device has no units for this dtype, or no model of them.
    """
    model = gemm_model(device, dtype)
    if layout not in LAYOUTS:
        raise UnknownNameError("layout", layout, LAYOUTS)
    b, rows, cols, depth = as_floats(batch, m, n, k)
    seconds = gemm_seconds(model, device.datasheet, b, rows, cols, depth, quantize=quantize)
    slower = np.ones(rows.shape) if padded else misalignment(model, layout, rows, cols, depth)
    seconds = seconds * model.transposed_scale.get(layout, 1.0) * slower
    narrow = np.where(b > 1.0, narrowness(rows, cols, depth), 0.0)
    seconds = seconds * model.batched_scale**narrow
    if accumulator_bytes:
        seconds = seconds + accumulate_seconds(model, device.datasheet, b * rows * cols, accumulator_bytes)
    cost = make_cost(seconds, model.label.spread, model.label.spread_short, model.label.source)
    if not np.all(slower == 1.0):
        cost = widen(cost, MISALIGNMENT_DOUBT * (slower - 1.0) / slower)
    return widen(cost, model.batched_spread * narrow) if np.any(narrow) else cost


def narrowness(m: FloatArray, n: FloatArray, k: FloatArray) -> FloatArray:
    """How far the least dimension of a product lies outside the dense tables: 0 inside, 1 from the charts' on."""
    least = np.maximum(1.0, np.minimum(np.minimum(m, n), k))
    return np.asarray(np.clip(np.log(TABLED_FROM / least) / np.log(TABLED_FROM / CHARTED_TO), 0.0, 1.0))


def gemm_model(device: DeviceProfile, dtype: str) -> GemmModel:
    """The model that answers for a dtype.

    Raises:
        UnknownNameError: no such dtype.
        UnavailableError: the device has no units for it, or no model of them.
    """
    name = DTYPES.get(dtype, dtype)
    model = device.gemm.get(name) or device.gemm.get(STAND_IN.get(name, name))
    if model is not None:
        return model
    what = "model of matrix products" if name in device.datasheet.peak_flops_per_s else "units"
    able = [n for n in dict.fromkeys(DTYPES.values()) if n in device.gemm or STAND_IN.get(n) in device.gemm]
    if name not in DTYPES:
        raise UnknownNameError("dtype", dtype, able, hint=f"matrix products on {device.name}")
    raise UnavailableError(f"device {device.name} has no {name.upper()} {what}", able)


def gemm_seconds(
    model: GemmModel,
    sheet: Datasheet,
    b: FloatArray,
    m: FloatArray,
    n: FloatArray,
    k: FloatArray,
    *,
    quantize: bool = True,
) -> FloatArray:
    """Seconds of aligned TN products; arrays of one shape."""
    out_bytes = max(2.0, model.element_bytes)
    moved = b * ((m * k + k * n) * model.element_bytes + m * n * out_bytes)
    seconds = physical_seconds(model, sheet, b, m, n, k, moved, quantize=quantize)
    if model.residual is not None:
        seconds = seconds * np.exp(correction(model.residual, correction_sizes(model, b, m, n, k)))
    peak = sheet.peak_flops_per_s[model.peak]
    compulsory = np.maximum(0.0, moved - sheet.l2_bytes) / sheet.memory_bandwidth_bytes_per_s
    return np.maximum(seconds, np.maximum(2.0 * b * m * n * k / peak, compulsory))


def correction_sizes(
    model: GemmModel, b: FloatArray, m: FloatArray, n: FloatArray, k: FloatArray
) -> list[FloatArray]:
    """What the correction depends on: a batch's rows (fewer than a tile's fill one), columns and depth."""
    return [b * np.maximum(m, tile_rows(model)), n, k]


def tile_rows(model: GemmModel) -> float:
    """Rows of the least tile, which fewer rows fill all the same."""
    return float(min(rows for rows, _ in model.tiles))


def physical_seconds(
    model: GemmModel,
    sheet: Datasheet,
    b: FloatArray,
    m: FloatArray,
    n: FloatArray,
    k: FloatArray,
    moved: FloatArray,
    *,
    quantize: bool = True,
) -> FloatArray:
    """The module's equations, before any correction; `moved` is bytes read and written."""
    compute = compute_seconds(model, sheet, b, m, n, k)
    memory = _missed(model, sheet, moved) / (sheet.memory_bandwidth_bytes_per_s * model.bandwidth_fraction)
    longer, shorter = np.maximum(compute, memory), np.minimum(compute, memory)
    power = model.overlap_power
    body = longer * (1.0 + (shorter / longer) ** power) ** (1.0 / power)
    seconds = model.launch_s + body * model.time_scale
    if quantize and model.quantize is not None:
        seconds = seconds + quantize_seconds(model.quantize, b * m * k)
    return np.asarray(seconds)


def _missed(model: GemmModel, sheet: Datasheet, moved: FloatArray) -> FloatArray:
    """Of the bytes those that the memory is asked for: what fits into the cache costs a share."""
    if model.traffic_cached == 1.0:
        return moved
    room = model.cache_share * sheet.l2_bytes / np.maximum(moved, 1.0)
    return np.asarray(
        moved * (model.traffic_cached + (1.0 - model.traffic_cached) / (1.0 + room**CACHE_SHARPNESS))
    )


def compute_seconds(
    model: GemmModel, sheet: Datasheet, b: FloatArray, m: FloatArray, n: FloatArray, k: FloatArray
) -> FloatArray:
    """Seconds on the tensor cores with the best tile and split."""
    peak_per_sm = sheet.peak_flops_per_s[model.peak] / sheet.sm_count
    pieces, rate, depth = _candidates(model, b, m, n, k)
    waves = pieces / sheet.sm_count
    waves = model.wave_rounding * np.ceil(waves) + (1.0 - model.wave_rounding) * np.maximum(waves, 1.0)
    slices = np.asarray(model.splits, dtype=np.float64).reshape(1, -1, *(1,) * m.ndim)
    partial_bytes = model.split_traffic * (slices + 1.0) * 4.0 * b * m * n
    joining = model.split_s + partial_bytes / sheet.memory_bandwidth_bytes_per_s
    every = waves * depth / (rate * peak_per_sm) + np.where(slices > 1, joining, 0.0)
    best = every.min(axis=(0, 1))
    flops = 2.0 * b * m * n * k
    return np.asarray(best * (1.0 + model.throttle * flops / (flops + model.throttle_flops)))


def _candidates(
    model: GemmModel, b: FloatArray, m: FloatArray, n: FloatArray, k: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Pieces, efficiency per FLOP of a tile row, and depth, each [tiles, splits, *shape]."""
    ones = (1,) * m.ndim
    tile = np.asarray(model.tiles, dtype=np.float64)
    tile_m, tile_n = tile[:, 0].reshape(-1, 1, *ones), tile[:, 1].reshape(-1, 1, *ones)
    slices = np.asarray(model.splits, dtype=np.float64).reshape(1, -1, *ones)
    efficiency = np.asarray(model.efficiency).reshape(-1, 1, *ones)
    overhead = np.asarray(model.overhead_k).reshape(-1, 1, *ones)
    pieces = b * np.ceil(m / tile_m) * np.ceil(n / tile_n) * slices
    step = model.k_step
    depth = np.ceil(k / slices / step) * step if step else np.maximum(k / slices, MIN_SLICE_K)
    return pieces, efficiency / (2.0 * tile_m * tile_n), depth + overhead


def accumulator_traffic(outputs: npt.ArrayLike, element_bytes: float = SINGLE_BYTES) -> FloatArray:
    """Bytes that a buffer of so many elements moves beyond a bf16 result: it is read, too, and of its own type."""
    return np.asarray((2.0 * element_bytes - RESULT_BYTES) * np.asarray(outputs))


def accumulate_seconds(
    model: GemmModel, sheet: Datasheet, outputs: FloatArray, element_bytes: float = SINGLE_BYTES
) -> FloatArray:
    """Seconds, beyond a bf16 result's, of adding to a buffer of so many elements of so many bytes each."""
    traffic = accumulator_traffic(outputs, element_bytes) / sheet.memory_bandwidth_bytes_per_s
    return np.asarray(model.accumulate_exposure * traffic)


def quantize_seconds(model: Quantize, elements: FloatArray) -> FloatArray:
    """Seconds of casting `elements` activations to fp8; dearer per element once they leave L2."""
    octave = np.clip(model.sharpness * np.log(elements / model.knee_elements), -60.0, 60.0)
    streamed = model.streamed_s_per_element / (1.0 + np.exp(-octave))
    return np.asarray(model.launch_s + elements * (model.cached_s_per_element + streamed))


def misalignment(model: GemmModel, layout: str, m: FloatArray, n: FloatArray, k: FloatArray) -> FloatArray:
    """Slowdown of a product whose contiguous dimensions are no multiples of 16 bytes."""
    if model.alignment is None:
        return np.ones(m.shape)
    first, second = {"TN": (k, k), "NN": (k, n), "NT": (m, n)}[layout]
    worst = np.minimum(_aligned_bytes(first, model), _aligned_bytes(second, model))
    return np.maximum(
        _lookup(model.alignment.operand, worst), _lookup(model.alignment.output, _aligned_bytes(n, model))
    )


def _aligned_bytes(dim: FloatArray, model: GemmModel) -> npt.NDArray[np.int64]:
    return np.gcd(np.rint(dim * model.element_bytes).astype(np.int64), 16)


def _lookup(table: dict[int, float], aligned: npt.NDArray[np.int64]) -> FloatArray:
    keys = sorted(table)
    values = np.asarray([table[key] for key in keys])
    return np.asarray(values[np.searchsorted(np.asarray(keys), aligned)])


PASSES = {"forward": "TN", "input_gradient": "NN", "weight_gradient": "NT"}


def grouped_gemm(
    device: DeviceProfile,
    rows: npt.ArrayLike,
    n: float,
    k: float,
    *,
    pass_: str = "forward",
    dtype: str = "bf16",
    accumulator_bytes: float = 0.0,
    quantize: bool = True,
) -> CostEstimate:
    """Cost of C_e[rows_e, n] = A_e[rows_e, k] B_e[k, n] over the experts e of one rank.

    Args:
        device: the profile to ask.
        rows: tokens of each local expert, [experts]; an expert without tokens costs nothing.
        n: outputs of an expert.
        k: inputs of an expert.
        pass_: "forward"; "input_gradient" (sums over n, gives k); "weight_gradient" (sums over the rows).
        dtype: of the operands.
        accumulator_bytes: per element of the buffers that weight gradients are added to; 0: of none.
        quantize: as in `gemm`.

    Raises:
        UnknownNameError: no such pass or dtype.
        UnavailableError: the device has no units for this dtype, or no model of them.
    """
    if pass_ not in PASSES:
        raise UnknownNameError("pass", pass_, PASSES)
    busy = np.asarray(rows, dtype=np.float64).ravel()
    busy = busy[busy > 0]
    name = DTYPES.get(dtype, dtype)
    together = device.grouped.products.get(name) or device.grouped.products.get(STAND_IN.get(name, name))
    label = device.grouped.label if together is None else together.label
    if not len(busy):
        return make_cost(np.asarray(0.0), label.spread, label.spread_short, label.source)
    if together is None:
        alone = _one_by_one(device, busy, n, k, pass_, dtype, accumulator_bytes, quantize)
        source = label.source if gemm_model(device, dtype).label.source == "fitted" else "analytical"
        return make_cost(
            np.asarray(np.sum(alone) * device.grouped.scale[pass_]), label.spread, label.spread_short, source
        )
    sheet, count = device.datasheet, np.asarray(float(len(busy)))
    sizes = as_floats(count, *group_sizes(pass_, busy, n, k))
    # Each expert takes its share of a group of its like.
    shares = grouped_seconds(together, sheet, *sizes, with_residual=pass_ != "weight_gradient")
    seconds = np.asarray(np.mean(shares) * device.grouped.together.get(pass_, 1.0))
    if accumulator_bytes:
        seconds = seconds + accumulate_seconds(together, sheet, count * n * k, accumulator_bytes)
    cast = gemm_model(device, dtype).quantize
    if quantize and cast is not None:
        columns = k if pass_ == "forward" else n
        seconds = seconds + quantize_seconds(cast, np.asarray(np.sum(busy) * columns))
    return make_cost(seconds, label.spread, label.spread_short, label.source)


def group_sizes(
    pass_: str, rows: npt.ArrayLike, n: npt.ArrayLike, k: npt.ArrayLike
) -> tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]:
    """Rows, columns and depth of an expert's product in a pass."""
    return {"forward": (rows, n, k), "input_gradient": (rows, k, n), "weight_gradient": (n, k, rows)}[pass_]


def grouped_seconds(
    model: GemmModel,
    sheet: Datasheet,
    count: FloatArray,
    m: FloatArray,
    n: FloatArray,
    k: FloatArray,
    *,
    with_residual: bool = True,
) -> FloatArray:
    """Seconds of `count` products of one shape in one launch, operands in their dtype; arrays of one shape.

    The correction is over an expert's own sizes, where that of `gemm_seconds` is over a batch's.
    """
    moved = count * ((m * k + k * n) * model.element_bytes + m * n * max(2.0, model.element_bytes))
    seconds = physical_seconds(model, sheet, count, m, n, k, moved, quantize=False)
    if with_residual and model.residual is not None:
        seconds = seconds * np.exp(correction(model.residual, [m, n, k]))
    peak = sheet.peak_flops_per_s[model.peak]
    return np.maximum(seconds, 2.0 * count * m * n * k / peak)


def _one_by_one(
    device: DeviceProfile,
    rows: FloatArray,
    n: float,
    k: float,
    pass_: str,
    dtype: str,
    accumulator_bytes: float,
    quantize: bool,
) -> FloatArray:
    """Seconds of each expert's product alone."""
    m, columns, depth = group_sizes(pass_, rows, n, k)
    single = gemm(
        device,
        m,
        columns,
        depth,
        dtype=dtype,
        layout=PASSES[pass_],
        accumulator_bytes=accumulator_bytes,
        quantize=quantize,
    )
    return np.asarray(single.seconds)


_CONVOLUTION_SPREAD = 0.3
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
    return make_cost(np.maximum(seconds, floor), _CONVOLUTION_SPREAD, _CONVOLUTION_SPREAD, "analytical")
