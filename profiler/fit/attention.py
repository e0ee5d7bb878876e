"""Fits attention passes to measured kernels: tables of one pass each, and charts.

Charts give the rate of forward and backward together, or of the forward alone. Where only the sum is known, the
forward's share of it is taken from the device whose forward is known, at the same shape. Where only forward is
known, backward runs at the ratio of the two that cuDNN shows on the same architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import msgspec
import numpy as np
import numpy.typing as npt

from echograph.profiler.costs.attention import (
    AttentionShape,
    attention_shape,
    correction_sizes,
    keys_visited,
    padded,
    pass_seconds,
    tiling_of,
)
from echograph.profiler.costs.device import (
    AttentionModel,
    AttentionPass,
    Datasheet,
    FloatArray,
    Grid,
    Label,
)
from echograph.profiler.fit.facts import RowChoice, device_facts
from echograph.profiler.fit.gemm import MOST_THROTTLE, RIDGE, SMOOTHNESS
from echograph.profiler.fit.grid import finely, fit_grid, may_fall
from echograph.profiler.fit.regression import (
    disagreement,
    first_rows,
    held_out,
    judged,
    logit,
    minimize,
    sigmoid,
    spreads,
    subsample,
    weights,
)
from echograph.profiler.fit.table import KernelTable

PADDED_HEAD_DIMS = {
    "flash1": [32, 64, 128],
    "flash2": [32, 64, 96, 128, 192, 256],
    "flash3": [64, 96, 128, 192, 256],
    "flash4": [64, 72, 80, 96, 128, 192, 256],
    "cudnn": [64, 128, 192, 256],
    "trtllm": [32, 64, 80, 96, 128, 160, 192, 256],
}
"""Head dims that each kernel is compiled for; others run as the next larger. FlashAttention-4 takes 72 as 80, but
checks the edge of every load, which the rows show: it has a rate of its own."""

TILES = {
    "flash1": {"tile": 256, "tile_elements": 16384, "tile_fits": 128},
    "flash3": {"tile": 192, "tile_elements": 18432},
    "flash4": {"tile": 256, "key_tile": 128},
}
"""Tiles of kernels that have not 128 queries or keys of one, and keys of a step, of kernels that pad them.
FlashAttention-1 takes 256 keys of head dim 64, where there are more than 128, and 128 of 128
(csrc/flash_attn/src/fmha_fwd_hdim64.cu and fmha_fwd_hdim128.cu at v1.0.9: FMHA_kernel_traits). FlashAttention-3
takes 192 queries of head dims 64 and 96, and 128 of larger ones (hopper/tile_size.h: tile_size_fwd_sm90).
FlashAttention-4 has two tiles of 128 queries in flight (flash_attn/cute/flash_fwd_sm100.py: m_block_size, q_stage
and n_block_size)."""

HALF_TILE = 0.5
"""Assumed where the clock is fitted too: of the longest tile what the last wave leaves idle. The rows, of fourteen
waves and more, do not tell it apart from the clock."""

MIN_THROTTLED = 24
"""Rows that bear two parameters more: three for each."""

TRAFFIC = (
    *("query_traffic", "kv_traffic", "traffic_knee_bytes", "traffic_sharpness", "traffic_cached"),
    "launch_s",
)
"""What a dense table tells of what nothing hides, in the order of the search."""

MOST_EDGE = 100.0
"""Tiles that one visits beyond its mask: more than any row can show."""

LEAST_KEYS, LEAST_WIDTH = 1, 16
"""Below the knots of a correction: the least of each that a pass has."""

CHART_LAUNCH_S = 5e-6
"""Launch and drain of a chart's kernel: its rates, at milliseconds a kernel, do not show it."""

LIBRARIES = {
    "flash2": ("flash_attention", "vllm_flash_attn_fa2", "vllm_vit_flash_attn_fa2"),
    "flash3": ("fa3", "flash_attention_v3"),
    "flash4": ("vllm_vit_flash_attn_fa4",),
}
"""The `kernel` cells of forward passes that each kernel is fitted on."""

OTHERS = {
    "flash2": ("vllm_flash_attn",),
    "flash3": ("vllm_flash_attn_fa3", "vllm_vit_flash_attn_fa3"),
    "flash4": ("flash_attention_v4",),
}
"""Those of the same kernel in other libraries, which tell how far they are apart."""

CHARTS = {f"flash{year}": f"FlashAttention{year}" for year in (1, 2, 3, 4)} | {"cudnn": "cuDNN"}
"""How the charts' notes begin, by kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attentions:
    """Measured attention kernels, [rows]."""

    shape: AttentionShape
    causal: npt.NDArray[np.bool_]
    seconds: FloatArray

    def take(self, index: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> Attentions:
        """The rows of an index or mask."""
        names = (field.name for field in fields(AttentionShape))
        shape = AttentionShape(**{name: getattr(self.shape, name)[index] for name in names})
        return Attentions(shape=shape, causal=self.causal[index], seconds=self.seconds[index])

    def distinct(self) -> Attentions:
        """Each measurement once."""
        s = self.shape
        return self.take(first_rows(s.b, s.h, s.q, s.d, s.kv_h, self.seconds))

    def sizes(self) -> tuple[FloatArray, ...]:
        """What tells two shapes apart, each [rows]."""
        s = self.shape
        window = np.where(np.isfinite(s.window), s.window, 0.0)
        sizes = (s.b, s.h, s.q, s.d, s.kv_h, self.causal.astype(np.float64))
        return (*sizes, *((window,) if np.any(window) else ()))

    def hidden(self) -> npt.NDArray[np.bool_]:
        """True where the shape is held out."""
        return held_out(*self.sizes())


def attention_rows(table: KernelTable, flops_factor: float = 1.0, full_causal: bool = False) -> Attentions:
    """Rows of a table as shapes and seconds.

    Args:
        table: rows with batch, seq, heads, kv_heads, head_dim, causal and latency_ms or tflops.
        flops_factor: FLOPs of what was timed over those of a forward pass.
        full_causal: the rates count masked pairs too, and every row is causal (SimuMax).
    """
    number = table.number
    causal = np.ones(len(table), dtype=np.bool_) if full_causal else table.text["causal"].among(["yes"])
    v_dim = np.minimum(number["head_dim"], 128.0) if full_causal else number["head_dim"]
    v_dim = np.where(np.isnan(number["head_dim_v"]), v_dim, number["head_dim_v"])
    kv_seq = np.where(np.isnan(number["kv_seq"]), number["seq"], number["kv_seq"])
    window = np.where(number["window"] > 0, number["window"], np.inf)
    b, h, q, d, kv_h = (number[name] for name in ("batch", "heads", "seq", "head_dim", "kv_heads"))
    shape = attention_shape(b, h, q, d, kv_h, kv_seq, v_dim, window)
    pairs = shape.q * shape.kv * (1.0 if full_causal else np.where(causal, 0.5, 1.0))
    flops = flops_factor * 2.0 * shape.b * shape.h * pairs * (shape.d + shape.v_d)
    by_rate = flops / (number["tflops"] * 1e12)
    return Attentions(
        shape=shape, causal=causal, seconds=np.where(np.isnan(table.seconds()), by_rate, table.seconds())
    )


def fit_pass(
    rows: Attentions,
    sheet: Datasheet,
    name: str,
    *,
    basis: str,
    backward: bool = False,
    dense: bool = False,
    between_libraries: float = 0.0,
    throttled: bool = False,
) -> AttentionPass:
    """Fits one pass of one kernel on the rows that are not held out.

    Args:
        rows: measured kernels of one kind.
        sheet: the device's datasheet.
        name: the kernel's name, for the head dims it pads to.
        basis: what the label says of the rows.
        backward: the rows are backward passes.
        dense: also fit launch, traffic that nothing hides, and a residual grid (needs a dense table).
        between_libraries: spread of the libraries that were measured, which the pass's is not below.
        throttled: also fit by how much the clock falls in long kernels, if there are rows enough.
    """
    least = _Sought(dims=(1,), name=name)
    empty = _model(name, least.kernel(least.start()))
    widths = (padded(empty, rows.shape.d) + padded(empty, rows.shape.v_d)) / 2.0
    longest = float(np.max(keys_visited(rows.shape, rows.causal)))

    def predict(kernel: AttentionPass, on: Attentions) -> FloatArray:
        return pass_seconds(empty, kernel, sheet, on.shape, causal=on.causal, backward=backward)

    def fit(mask: npt.NDArray[np.bool_]) -> AttentionPass:
        few = np.flatnonzero(mask)
        seen = rows.take(few[subsample(len(few))])
        weight, log_time = weights(seen.seconds), np.log(seen.seconds)
        sought = _Sought(
            dims=tuple(int(width) for width in np.unique(widths)),
            name=name,
            traffic=dense,
            splits=dense and bool(np.any(rows.causal)),
            edge=dense and bool(np.any(rows.causal)) and not np.all(rows.causal),
            throttle=throttled and len(few) >= MIN_THROTTLED,
        )

        def residuals(p: FloatArray) -> FloatArray:
            return np.asarray(weight * (np.log(predict(sought.kernel(p), seen)) - log_time))

        kernel = msgspec.structs.replace(sought.kernel(minimize(residuals, sought.start())), plateau_keys=longest)
        if not dense:
            return kernel
        return msgspec.structs.replace(kernel, residual=_fit_residual(empty, kernel, sheet, rows.take(mask)))

    kernel, error = judged(fit, lambda kernel: predict(kernel, rows), rows.sizes(), rows.seconds)
    spread, spread_short = spreads(error, floor=max(0.01, between_libraries))
    label = Label(
        source="fitted",
        basis=basis,
        spread=spread,
        spread_short=spread_short,
        held_out=error,
        between_libraries=between_libraries,
    )
    return msgspec.structs.replace(kernel, label=label)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sought:
    """What the search for a pass looks for, beside efficiencies, overheads and the tail.

    Attributes:
        dims: padded head dims, each of an efficiency.
        name: the kernel's; one of `TILES` also has a share of waves that are whole.
        traffic: what nothing hides, and the launch.
        splits: of the keys of causal rows, where SMs idle.
        edge: of causal tiles beyond their mask, which rows with and without a mask tell.
        throttle: of the clock, by FLOPs.
    """

    dims: tuple[int, ...]
    name: str
    traffic: bool = False
    splits: bool = False
    edge: bool = False
    throttle: bool = False

    def start(self) -> FloatArray:
        """Where the search starts; positive numbers are searched as logs, fractions as logits."""
        parts = [
            np.full(len(self.dims), logit(0.5)),
            [np.log(1e4), np.log(1e2), np.log(0.5)],
            [np.log(3.0), np.log(6.0), np.log(5e7), 0.0, np.log(0.5), np.log(5e-6)] if self.traffic else [],
            [np.log(0.5)] if self.splits else [],
            [np.log(0.5)] if self.edge else [],
            [0.0] if self.name in TILES else [],
            [logit(0.2), np.log(1e14)] if self.throttle else [],
        ]
        return np.concatenate([np.asarray(part, dtype=np.float64) for part in parts])

    def kernel(self, p: FloatArray) -> AttentionPass:
        """The pass of a vector of what is looked for."""
        count = len(self.dims)
        rest = iter(p[count:].tolist())
        found = AttentionPass(
            label=Label(source="fitted", basis="", spread=0.0, spread_short=0.0),
            head_dims=list(self.dims),
            efficiency=sigmoid(p[:count]).tolist(),
            overhead=float(np.exp(next(rest))),
            overhead_per_element=float(np.exp(next(rest))),
            tail=float(np.exp(next(rest))),
            launch_s=CHART_LAUNCH_S,
        )
        more: dict[str, float] = {**TILES.get(self.name, {})}
        if self.traffic:
            more |= {name: float(np.exp(next(rest))) for name in TRAFFIC}
        if self.splits:
            more["splits"] = 1.0 + float(np.exp(next(rest)))
        if self.edge:
            more["edge"] = min(float(np.exp(next(rest))), MOST_EDGE)
        if self.name in TILES:
            more["wave_rounding"] = float(sigmoid(next(rest)))
        if self.throttle:
            throttle, flops = float(MOST_THROTTLE * sigmoid(next(rest))), float(np.exp(next(rest)))
            more |= {"throttle": throttle, "throttle_flops": flops, "tail": HALF_TILE}
        return msgspec.structs.replace(found, **more)


def _fit_residual(model: AttentionModel, kernel: AttentionPass, sheet: Datasheet, rows: Attentions) -> Grid:
    """What the rows of a forward pass say beyond the physical model, so that no larger pass is a shorter one."""
    error = np.log(rows.seconds / pass_seconds(model, kernel, sheet, rows.shape, causal=rows.causal))
    tiling = tiling_of(model, kernel, rows.shape, causal=rows.causal)
    sizes = correction_sizes(kernel, sheet, tiling, rows.causal)
    knots = (tuple(sheet.sm_count * waves for waves in WAVE_KNOTS), KEY_KNOTS, WIDTH_KNOTS)
    return fit_grid(
        knots,
        [(sizes, 1.0)],
        error,
        weights(rows.seconds),
        smoothness=SMOOTHNESS,
        ridge=RIDGE,
        falls=_may_fall(kernel, sheet, knots),
    )


def _may_fall(kernel: AttentionPass, sheet: Datasheet, knots: Sequence[Sequence[float]]) -> FloatArray:
    """By how much a correction over `correction_sizes` may fall (`grid.may_fall`), of a kernel that has none."""
    # Below the first knot of keys and widths the correction stays, and the time has to grow there as well.
    wider = [knots[0], [LEAST_KEYS, *knots[1]], [LEAST_WIDTH, *knots[2]]]
    fine = [finely(axis) for axis in wider]
    whole, keys, width = np.meshgrid(*fine, indexing="ij")
    keys = np.ceil(keys / kernel.key_tile) * kernel.key_tile
    model = AttentionModel(peak="bf16", padded_head_dims=fine[2].tolist(), forward=kernel)
    # Times are those of whole waves: the correction takes the share of a wave that rounding adds for tiles.
    kernel = msgspec.structs.replace(kernel, wave_rounding=0.0)
    # Of a narrow head less traffic adds to the time than of the width that it is padded to.
    still = msgspec.structs.replace(kernel, query_traffic=0.0, kv_traffic=0.0)
    times: list[FloatArray] = []
    for causal in (False, True):
        one = tiling_of(model, kernel, attention_shape(1.0, 1.0, keys, width), causal=causal)
        shape = attention_shape(1.0, whole * one.swept / one.seen / one.tiles, keys, width)
        each = (pass_seconds(model, moves, sheet, shape, causal=causal) for moves in (kernel, still))
        times.extend(np.log(seconds) for seconds in each)
    return may_fall(knots, (whole, keys, width), times)


def chart_rows(table: KernelTable, kernel: str, op: str) -> KernelTable:
    """The points of one kernel in the FlashAttention charts."""
    part = table.select(ops=[op], dtypes=["fp16/bf16"])
    return part.where(part.text["notes"].starting(CHARTS[kernel] + ";"))


def split_by_share(both: Attentions, share: Callable[[Attentions], FloatArray]) -> tuple[Attentions, Attentions]:
    """Forward and backward rows out of rows of their sum, by the forward's share at each shape."""
    part = share(both)
    return (
        Attentions(shape=both.shape, causal=both.causal, seconds=both.seconds * part),
        Attentions(shape=both.shape, causal=both.causal, seconds=both.seconds * (1.0 - part)),
    )


def forward_share(model: AttentionModel, sheet: Datasheet) -> Callable[[Attentions], FloatArray]:
    """The share of the forward pass that a fitted kernel shows."""
    backward = model.backward
    if backward is None:
        raise ValueError("a kernel without a backward pass has no share")

    def share(rows: Attentions) -> FloatArray:
        ahead = pass_seconds(model, model.forward, sheet, rows.shape, causal=rows.causal)
        back = pass_seconds(model, backward, sheet, rows.shape, causal=rows.causal, backward=True)
        return np.asarray(ahead / (ahead + back))

    return share


WAVE_KNOTS = (0.03125, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 16.0, 64.0, 512.0)
KEY_KNOTS = (64, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
WIDTH_KNOTS = (64, 96, 128, 192, 256)


DENSE_ROWS = 500
BOTH_FLOPS = 3.5
BACKWARD_FLOPS = 2.5
FEW_ROWS_SPREAD = 0.05
"""Assumed least one-sigma error of a fit to a chart of some thirty points, read off by eye."""

SHARE_DEVICE = "h100-sxm"
"""Where forward and backward of one kernel (flash2) are both charted."""

SMALL_HEAD = 0.7
"""Assumed efficiency at head dim 64 over that at 128, where no table of the device has both."""

SMALL_DIM, LARGE_DIM = 64, 128
RATIO_MIN_HEADS = 32
NO_RATIO = (0.8, "assumed: backward at 0.8 of the forward's rate")


def fit_attention(
    table: KernelTable, choice: RowChoice, sheet: Datasheet, used: dict[str, int]
) -> dict[str, AttentionModel]:
    """Models by kernel; empty where the table has no attention on these devices.

    Args:
        table: all rows (one device's charts also split another's sums).
        choice: the `gpu` cells of this device.
        sheet: its datasheet.
        used: rows used by source, added to.
    """
    gpus = choice.tensor
    own = table.select(gpus=gpus) if gpus else table.where(np.zeros(len(table), dtype=np.bool_))
    models: dict[str, AttentionModel] = {}
    dense = inference_rows(own)
    if len(dense) >= DENSE_ROWS:
        basis = _note(dense, used, "inference kernel, with its rotation and cache write")
        models["trtllm"] = _model(
            "trtllm", fit_pass(attention_rows(dense).distinct(), sheet, "trtllm", basis=basis, dense=True)
        )
    small = _small_head(models["trtllm"].forward) if "trtllm" in models else SMALL_HEAD
    ratio = backward_ratio(table, choice)
    for name in ("flash2", "flash3", "flash4", "cudnn"):
        forward = _forward(own, name, sheet, used)
        if forward is not None:
            forward = _with_large(forward, small)
            models[name] = _with_backward(own, name, forward, sheet, used, ratio)
    for name in ("flash1", "flash2"):
        both = chart_rows(own, name, "attn_fwd_bwd")
        if len(both) and name not in models:
            models[name] = _from_sum(table, name, both, sheet, used)
    timed = table.select(gpus=choice.attention, ops=["attention"], dtypes=["bfloat16"])
    if choice.attention and len(timed):
        models["cudnn"] = _both_timed(timed, choice, sheet, used, small)
    elif len(own.select(ops=["sdp_fwd"])):
        models["cudnn"] = _from_pairs(table, own, sheet, used)
    return models


def _forward(own: KernelTable, name: str, sheet: Datasheet, used: dict[str, int]) -> AttentionPass | None:
    """The forward pass of a kernel: from its tables, else its chart; None where neither has it."""
    tables = own.select(ops=["attn_fwd"], dtypes=["bfloat16"])
    tables = tables.where(tables.text["kernel"].among(LIBRARIES.get(name, ())))
    if len(tables) < DENSE_ROWS:
        chart = chart_rows(own, name, "attn_fwd")
        if not len(chart):
            return None
        return _floored(fit_pass(attention_rows(chart), sheet, name, basis=_note(chart, used, "chart")))
    others = own.select(ops=["attn_fwd"], dtypes=["bfloat16"])
    others = others.where(others.text["kernel"].among((*LIBRARIES[name], *OTHERS[name])))
    every, rows = attention_rows(others), attention_rows(tables)
    s = every.shape
    sizes = (s.b, s.h, s.q, s.d, s.kv_h, every.causal.astype(np.float64))
    apart = disagreement(sizes, others.text["kernel"].codes, every.seconds)
    basis = _note(tables, used, "forward")
    return fit_pass(rows, sheet, name, basis=basis, dense=True, between_libraries=apart)


def inference_rows(own: KernelTable) -> KernelTable:
    """The causal rows of the inference kernel, which stand under two names."""
    dense = own.select(ops=["attn_fwd"], dtypes=["bf16", "bfloat16"])
    causal = dense.text["causal"].among(["yes"])
    return dense.where(dense.text["kernel"].among([""]) | dense.text["kernel"].among(["torch_flow"]) & causal)


def _both_timed(
    timed: KernelTable, choice: RowChoice, sheet: Datasheet, used: dict[str, int], small: float
) -> AttentionModel:
    """The passes of cuDNN, each timed.

    Head dim 64 is timed with sliding windows alone: without them it is as much slower than 128 as the inference
    kernel shows it. Backward kernels of tens of milliseconds run a tenth slower than those of five, whatever the
    length of their sequences, as the clock falls; forward ones do not show it.
    """
    if choice.attention_TFLOPs:
        peaks = sheet.peak_flops_per_s | {"bf16": choice.attention_TFLOPs * 1e12}
        sheet = msgspec.structs.replace(sheet, peak_flops_per_s=peaks)
    passes = []
    for part, what in (("fwd", "forward"), ("bwd", "backward")):
        rows = _freest(timed.where(timed.text["part"].among([part])))
        shapes, windowed = attention_rows(rows), rows.number["window"] > 0
        basis, backward = _note(rows, used, what), part == "bwd"
        plain = fit_pass(
            shapes.take(~windowed), sheet, "cudnn", basis=basis, backward=backward, throttled=backward
        )
        plain = _floored(plain if plain.head_dims[0] <= SMALL_DIM else _with_small(plain, small))
        model = _model("cudnn", plain)
        seen = shapes.take(windowed & ~shapes.hidden())
        modelled = pass_seconds(model, plain, sheet, seen.shape, causal=seen.causal, backward=backward)
        scale = round(float(np.median(seen.seconds / modelled)), 4) if len(modelled) else 1.0
        passes.append(msgspec.structs.replace(plain, windowed_scale=scale))
    return msgspec.structs.replace(_model("cudnn", passes[0]), backward=passes[1])


def _freest(rows: KernelTable) -> KernelTable:
    """The rows without those of a kernel that sums in a fixed order, where it was timed in any order too."""
    s = attention_rows(rows).shape
    sizes = (x.tolist() for x in (s.b, s.h, s.q, s.d, s.window))
    shapes = list(zip(*sizes, rows.text["causal"].tolist(), strict=True))
    fixed = rows.text["notes"].starting("deterministic=True")
    free = {shape for shape, is_fixed in zip(shapes, fixed, strict=True) if not is_fixed}
    return rows.where(np.asarray([not f or shape not in free for f, shape in zip(fixed, shapes, strict=True)]))


def _with_backward(
    own: KernelTable,
    name: str,
    ahead: AttentionPass,
    sheet: Datasheet,
    used: dict[str, int],
    ratio: tuple[float, str],
) -> AttentionModel:
    """A fitted forward; backward from the chart of the sum, else at a ratio seen elsewhere."""
    model = _model(name, ahead)
    both = chart_rows(own, name, "attn_fwd_bwd")
    if len(both):
        rows = attention_rows(both, BOTH_FLOPS)
        rest = rows.seconds - pass_seconds(model, ahead, sheet, rows.shape, causal=rows.causal)
        rest_rows = Attentions(shape=rows.shape, causal=rows.causal, seconds=rest)
        basis = _note(both, used, "chart of forward and backward, less the fitted forward")
        back = _floored(fit_pass(rest_rows, sheet, name, basis=basis, backward=True))
    else:
        back = _slower(ahead, *ratio)
    return msgspec.structs.replace(model, backward=back)


def _from_sum(
    table: KernelTable, name: str, both: KernelTable, sheet: Datasheet, used: dict[str, int]
) -> AttentionModel:
    """Forward and backward from a chart of their sum, split as flash2 splits it on the device charted in full."""
    facts = device_facts(SHARE_DEVICE)
    there = table.select(gpus=facts.rows.tensor)
    forward = _forward(there, "flash2", facts.datasheet(), {})
    if forward is None:
        raise ValueError(f"the table has no chart of {SHARE_DEVICE}'s forward pass")
    whole = _with_backward(there, "flash2", forward, facts.datasheet(), {}, NO_RATIO)
    share = forward_share(whole, facts.datasheet())
    ahead, back = split_by_share(attention_rows(both, BOTH_FLOPS), share)
    basis = _note(both, used, f"chart of forward and backward, split as flash2 splits it on {SHARE_DEVICE}")
    return msgspec.structs.replace(
        _model(name, _floored(fit_pass(ahead, sheet, name, basis=basis))),
        backward=_floored(fit_pass(back, sheet, name, basis=basis, backward=True)),
    )


def _from_pairs(table: KernelTable, own: KernelTable, sheet: Datasheet, used: dict[str, int]) -> AttentionModel:
    """Both passes timed apart; head dim 64 is as much slower than 128 as cuDNN shows it on another device."""
    forward, backward = own.select(ops=["sdp_fwd"]), own.select(ops=["sdp_bwd"])
    basis = _note(forward, used, "causal; head dim 64 scaled as on h100-sxm")
    ahead = fit_pass(attention_rows(forward, full_causal=True), sheet, "cudnn", basis=basis)
    basis = _note(backward, used, "causal; head dim 64 scaled as on h100-sxm")
    rows = attention_rows(backward, BACKWARD_FLOPS, full_causal=True)
    back = fit_pass(rows, sheet, "cudnn", basis=basis, backward=True)
    facts = device_facts(SHARE_DEVICE)
    chart = chart_rows(table.select(gpus=facts.rows.tensor), "cudnn", "attn_fwd")
    if not len(chart):
        return msgspec.structs.replace(_model("cudnn", _floored(ahead)), backward=_floored(back))
    there = fit_pass(attention_rows(chart), facts.datasheet(), "cudnn", basis="")
    ratio = there.efficiency[there.head_dims.index(64)] / there.efficiency[there.head_dims.index(128)]
    return msgspec.structs.replace(
        _model("cudnn", _with_small(_floored(ahead), ratio)), backward=_with_small(_floored(back), ratio)
    )


def backward_ratio(table: KernelTable, choice: RowChoice) -> tuple[float, str]:
    """The backward pass's rate over the forward's, of kernels timed in both (a median), and its source."""
    timed = table.select(gpus=choice.attention, ops=["attention"], dtypes=["bfloat16"])
    if choice.attention and len(timed):
        rows = attention_rows(timed)
        back = timed.text["part"].among(["bwd"])
        rates = np.where(back, BACKWARD_FLOPS, 1.0) / rows.seconds
        s = rows.shape
        keys = list(zip(*(x.tolist() for x in (s.b, s.h, s.q, s.d, s.window, rows.causal)), strict=True))
        forward = {key: rate for key, rate, is_back in zip(keys, rates, back, strict=True) if not is_back}
        found = [
            rate / forward[key]
            for key, rate, is_back in zip(keys, rates, back, strict=True)
            if is_back and key in forward
        ]
        ratio = float(np.median(found))
        return ratio, f"backward at {ratio:.2f} of the forward's rate, cuDNN's median on {choice.attention[0]}"
    pairs = table.select(ops=["sdp_fwd", "sdp_bwd"])
    pairs = pairs.where(pairs.number["heads"] >= RATIO_MIN_HEADS)
    forward, backward = (_rates(pairs.select(ops=[op])) for op in ("sdp_fwd", "sdp_bwd"))
    found = [backward[shape] / rate for shape, rate in forward.items() if shape in backward]
    if not found:
        return NO_RATIO
    ratio = float(np.median(found))
    return ratio, f"backward at {ratio:.2f} of the forward's rate, a median over MooreThreads/SimuMax rows"


def _rates(rows: KernelTable) -> dict[tuple[str, str], float]:
    """Rates by device and shape (the notes name it, up to the efficiency)."""
    shapes = [note.split(" eff=")[0] for note in rows.text["notes"].tolist()]
    return dict(
        zip(zip(rows.text["gpu"].tolist(), shapes, strict=True), rows.number["tflops"].tolist(), strict=True)
    )


def _slower(ahead: AttentionPass, ratio: float, basis: str) -> AttentionPass:
    """A backward pass at a fixed ratio of the forward's rate."""
    return msgspec.structs.replace(
        ahead,
        query_traffic=ahead.query_traffic * BACKWARD_FLOPS,
        kv_traffic=ahead.kv_traffic * BACKWARD_FLOPS,
        time_scale=round(ahead.time_scale / ratio, 4),
        label=Label(source="analytical", basis=basis, spread=0.15, spread_short=0.3),
    )


def _with_large(kernel: AttentionPass, ratio: float) -> AttentionPass:
    """The pass with a knot at head dim 128, where none that large was measured; no faster than what was."""
    if kernel.head_dims[-1] >= LARGE_DIM:
        return kernel
    most = kernel.efficiency[-1] * LARGE_DIM / kernel.head_dims[-1]
    basis = f"{kernel.label.basis}; head dim 128 as the inference kernel"
    return msgspec.structs.replace(
        kernel,
        head_dims=[*kernel.head_dims, LARGE_DIM],
        efficiency=[*kernel.efficiency, min(kernel.efficiency[0] / ratio, most)],
        label=msgspec.structs.replace(kernel.label, basis=basis),
    )


def _small_head(kernel: AttentionPass) -> float:
    """The efficiency at head dim 64 over that at 128."""
    rates = dict(zip(kernel.head_dims, kernel.efficiency, strict=True))
    return rates[64] / rates[128] if {64, 128} <= set(rates) else SMALL_HEAD


def _with_small(kernel: AttentionPass, ratio: float) -> AttentionPass:
    """The pass with a knot at head dim 64, below those that were measured."""
    return msgspec.structs.replace(
        kernel,
        head_dims=[64, *kernel.head_dims],
        efficiency=[kernel.efficiency[0] * ratio, *kernel.efficiency],
    )


def _floored(kernel: AttentionPass) -> AttentionPass:
    """A handful of held-out points cannot vouch for less than the reading error of a chart."""
    label = kernel.label
    wide = max(FEW_ROWS_SPREAD, label.spread)
    label = msgspec.structs.replace(label, spread=wide, spread_short=max(wide, label.spread_short))
    return msgspec.structs.replace(kernel, label=label)


def _model(name: str, forward: AttentionPass) -> AttentionModel:
    return AttentionModel(peak="bf16", padded_head_dims=PADDED_HEAD_DIMS[name], forward=forward)


def _note(rows: KernelTable, used: dict[str, int], what: str) -> str:
    for name, count in rows.sources().items():
        used[name] = used.get(name, 0) + count
    sources = ", ".join(sorted({name.split(":")[0] for name in rows.sources()}))
    return f"{len(rows)} rows of {sources} ({what})"
