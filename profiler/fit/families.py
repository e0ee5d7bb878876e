"""Fits every attention kernel that a table speaks of on one device."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from echograph.profiler.costs.attention import pass_seconds
from echograph.profiler.costs.device import AttentionModel, AttentionPass, Datasheet, Label
from echograph.profiler.fit.attention import (
    PADDED_HEAD_DIMS,
    Attentions,
    attention_rows,
    chart_rows,
    fit_pass,
    forward_share,
    split_by_share,
)
from echograph.profiler.fit.facts import device_facts
from echograph.profiler.fit.table import KernelTable

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
    if np.any(own.text["op"] == "sdp_fwd"):
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
