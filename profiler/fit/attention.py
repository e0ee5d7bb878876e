"""Fits attention passes to measured kernels: an inference kernel's table, and training kernels' charts.

Charts give the rate of forward and backward together, or of the forward alone. Where only the sum is known, the
forward's share of it is taken from the device whose forward is known, at the same shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import msgspec
import numpy as np
import numpy.typing as npt

from echograph.profiler.costs.attention import AttentionShape, attention_shape, pass_seconds
from echograph.profiler.costs.cost import FloatArray, Source
from echograph.profiler.costs.device import AttentionModel, AttentionPass, Datasheet, Label
from echograph.profiler.fit.holdout import held_out, score, spreads
from echograph.profiler.fit.robust import logit, minimize, sigmoid, weights
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
    causal = np.ones(len(table), dtype=np.bool_) if full_causal else table.text["causal"] == "yes"
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
    source: Source = "fitted",
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
    return part.where(np.char.startswith(part.text["notes"], CHARTS[kernel] + ";"))


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
