"""Fits attention passes to measured kernels: an inference kernel's table, and training kernels' charts.

Charts give the rate of forward and backward together, or of the forward alone. Where only the sum is known, the
forward's share of it is taken from the device whose forward is known, at the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import msgspec
import numpy as np
import numpy.typing as npt

from echograph.profiler.costs.attention import AttentionShape, attention_shape, pass_seconds
from echograph.profiler.costs.cost import CostSource, FloatArray
from echograph.profiler.costs.device import AttentionModel, AttentionPass, Datasheet, Label
from echograph.profiler.fit.facts import device_facts
from echograph.profiler.fit.regression import held_out, logit, minimize, score, sigmoid, spreads, weights
from echograph.profiler.fit.table import KernelTable

PADDED_HEAD_DIMS = {
    "flash1": [32, 64, 128],
    "flash2": [32, 64, 96, 128, 192, 256],
    "flash3": [64, 96, 128, 192, 256],
    "cudnn": [64, 128, 192, 256],
    "trtllm": [32, 64, 80, 96, 128, 160, 192, 256],
}
"""Head dims that each kernel is compiled for; others run as the next larger."""

CHART_LAUNCH_S = 5e-6
"""Launch and drain of a chart's kernel: its rates, at milliseconds a kernel, do not show it."""

CHARTS = {"flash1": "FlashAttention1", "flash2": "FlashAttention2", "flash3": "FlashAttention3", "cudnn": "cuDNN"}
"""How the charts' notes begin, by kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attentions:
    """Measured attention kernels, [rows]."""

    shape: AttentionShape
    causal: npt.NDArray[np.bool_]
    seconds: FloatArray

    def take(self, index: npt.NDArray[np.bool_]) -> Attentions:
        """The rows of a mask."""
        names = (field.name for field in fields(AttentionShape))
        shape = AttentionShape(**{name: getattr(self.shape, name)[index] for name in names})
        return Attentions(shape=shape, causal=self.causal[index], seconds=self.seconds[index])

    def hidden(self) -> npt.NDArray[np.bool_]:
        """True where the shape is held out."""
        s = self.shape
        return held_out(s.b, s.h, s.q, s.d, s.kv_h, self.causal.astype(np.float64))


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
    shape = attention_shape(
        number["batch"], number["heads"], number["seq"], number["head_dim"], number["kv_heads"], None, v_dim
    )
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
    traffic: bool = False,
    source: CostSource = "fitted",
) -> AttentionPass:
    """Fits one pass of one kernel on the rows that are not held out.

    Args:
        rows: measured kernels of one kind.
        sheet: the device's datasheet.
        name: the kernel's name, for the head dims it pads to.
        basis: what the label says of the rows.
        backward: the rows are backward passes.
        traffic: also fit launch and side traffic (an inference kernel; needs a dense table).
        source: what the label says the model is.
    """
    hidden = rows.hidden()
    seen = rows.take(~hidden)
    empty = AttentionModel(peak="bf16", padded_head_dims=PADDED_HEAD_DIMS[name], forward=_unpack(np.zeros(4), [1]))
    dims = sorted({float(w) for w in ((rows.shape.d + rows.shape.v_d) / 2.0).tolist()})
    weight, log_time = weights(seen.seconds), np.log(seen.seconds)

    def predict(p: FloatArray, on: Attentions) -> FloatArray:
        kernel = _unpack(p, [int(d) for d in dims])
        return pass_seconds(empty, kernel, sheet, on.shape, causal=on.causal, backward=backward)

    def residuals(p: FloatArray) -> FloatArray:
        return np.asarray(weight * (np.log(predict(p, seen)) - log_time))

    best = minimize(residuals, _start(len(dims), traffic))
    error = score(predict(best, rows.take(hidden)), rows.seconds[hidden])
    spread, spread_short = spreads(error)
    label = Label(source=source, basis=basis, spread=spread, spread_short=spread_short, held_out=error)
    return msgspec.structs.replace(_unpack(best, [int(d) for d in dims]), label=label)


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


def _start(dims: int, traffic: bool) -> FloatArray:
    side = [np.log(3.0), np.log(6.0), np.log(5e7), 0.0, np.log(0.5), np.log(5e-6)] if traffic else []
    return np.concatenate([np.full(dims, logit(0.5)), [np.log(1e4), np.log(1e2), np.log(0.5)], side])


def _unpack(p: FloatArray, dims: list[int]) -> AttentionPass:
    count = len(dims)
    kernel = AttentionPass(
        label=Label(source="fitted", basis="", spread=0.0, spread_short=0.0),
        head_dims=dims,
        efficiency=sigmoid(p[:count]).tolist(),
        overhead=float(np.exp(p[count])),
        overhead_per_element=float(np.exp(p[count + 1])),
        tail=float(np.exp(p[count + 2])),
        launch_s=CHART_LAUNCH_S,
    )
    side = np.exp(p[count + 3 :]).tolist()
    if len(side) != 6:
        return kernel
    return msgspec.structs.replace(
        kernel,
        query_traffic=side[0],
        kv_traffic=side[1],
        traffic_knee_bytes=side[2],
        traffic_sharpness=side[3],
        traffic_cached=side[4],
        launch_s=side[5],
    )


DENSE_ROWS = 500
BOTH_FLOPS = 3.5
BACKWARD_FLOPS = 2.5
FEW_ROWS_SPREAD = 0.05
"""Assumed least one-sigma error of a fit to a chart of some thirty points, read off by eye."""

SHARE_DEVICE = "h100-sxm"
"""Where forward and backward of one kernel (flash2) are both charted."""

RATIO_MIN_HEADS = 32


def fit_attention(
    table: KernelTable, gpus: Sequence[str], sheet: Datasheet, used: dict[str, int]
) -> dict[str, AttentionModel]:
    """Models by kernel; empty where the table has no attention on these devices.

    Args:
        table: all rows (one device's charts also split another's sums).
        gpus: the `gpu` cells of this device.
        sheet: its datasheet.
        used: rows used by source, added to.
    """
    own = table.select(gpus=gpus) if gpus else table.where(np.zeros(len(table), dtype=np.bool_))
    models: dict[str, AttentionModel] = {}
    dense = own.select(ops=["attn_fwd"], dtypes=["bf16"])
    if len(dense) >= DENSE_ROWS:
        basis = _note(dense, used, "inference kernel, with its rotation and cache write")
        models["trtllm"] = _model(
            "trtllm", fit_pass(attention_rows(dense), sheet, "trtllm", basis=basis, traffic=True)
        )
    for name in ("flash2", "flash3", "cudnn"):
        forward = chart_rows(own, name, "attn_fwd")
        if len(forward):
            models[name] = _from_forward(table, own, name, forward, sheet, used)
    for name in ("flash1", "flash2"):
        both = chart_rows(own, name, "attn_fwd_bwd")
        if len(both) and name not in models:
            models[name] = _from_sum(table, name, both, sheet, used)
    if len(own.select(ops=["sdp_fwd"])):
        models["cudnn"] = _from_pairs(table, own, sheet, used)
    return models


def _from_forward(
    table: KernelTable, own: KernelTable, name: str, forward: KernelTable, sheet: Datasheet, used: dict[str, int]
) -> AttentionModel:
    """Forward from its chart; backward from the chart of the sum, else from a ratio seen elsewhere."""
    ahead = _floored(fit_pass(attention_rows(forward), sheet, name, basis=_note(forward, used, "chart")))
    model = _model(name, ahead)
    both = chart_rows(own, name, "attn_fwd_bwd")
    if len(both):
        rows = attention_rows(both, BOTH_FLOPS)
        rest = rows.seconds - pass_seconds(model, ahead, sheet, rows.shape, causal=rows.causal)
        rest_rows = Attentions(shape=rows.shape, causal=rows.causal, seconds=rest)
        basis = _note(both, used, "chart of forward and backward, less the fitted forward")
        back = _floored(fit_pass(rest_rows, sheet, name, basis=basis, backward=True))
    else:
        back = _slower(ahead, *backward_ratio(table))
    return msgspec.structs.replace(model, backward=back)


def _from_sum(
    table: KernelTable, name: str, both: KernelTable, sheet: Datasheet, used: dict[str, int]
) -> AttentionModel:
    """Forward and backward from a chart of their sum, split as flash2 splits it on the device charted in full."""
    facts = device_facts(SHARE_DEVICE)
    there = table.select(gpus=facts.rows.tensor)
    whole = _from_forward(table, there, "flash2", chart_rows(there, "flash2", "attn_fwd"), facts.datasheet(), {})
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


def backward_ratio(table: KernelTable) -> tuple[float, str]:
    """The backward pass's rate over the forward's, of kernels timed in both (a median), and its source."""
    pairs = table.select(ops=["sdp_fwd", "sdp_bwd"])
    pairs = pairs.where(pairs.number["heads"] >= RATIO_MIN_HEADS)
    forward, backward = (_rates(pairs.select(ops=[op])) for op in ("sdp_fwd", "sdp_bwd"))
    found = [backward[shape] / rate for shape, rate in forward.items() if shape in backward]
    if not found:
        return 0.8, "assumed: backward at 0.8 of the forward's rate"
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
        efficiency=[round(e * ratio, 4) for e in ahead.efficiency],
        label=Label(source="analytical", basis=basis, spread=0.15, spread_short=0.3),
    )


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
