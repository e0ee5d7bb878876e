"""Batches of narrow products: unfused attention as charted, and nothing outside the charts' reach."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from echograph.profiler.costs import load_device
from echograph.profiler.costs.device import memory_bound
from echograph.profiler.costs.gemm import gemm, gemm_seconds, narrowness
from echograph.profiler.fit.gemm import fit_batched
from echograph.profiler.fit.table import read_table

CHARTED = {"a100-sxm-80": "A100-SXM4-80GB", "h100-sxm": "H100-SXM5-80GB"}


def as_f(*values: float) -> list[np.ndarray]:
    return [np.asarray([v], np.float64) for v in values]


@pytest.mark.parametrize("name", CHARTED)
def test_unfused_attention_takes_what_the_chart_says(measured_data: Path, name: str) -> None:
    device = load_device(name)
    rows = read_table(measured_data / "kernels.csv.gz").select(gpus=[CHARTED[name]], ops=["attn_fwd_bwd"])
    errors = []
    for i, note in enumerate(rows.text["notes"].tolist()):
        if not note.startswith("PyTorch;") or rows.text["causal"].tolist()[i] != "no":
            continue
        batch, seq, heads, dim = (int(rows.number[c][i]) for c in ("batch", "seq", "heads", "head_dim"))
        measured = 14.0 * batch * seq**2 * heads * dim / (float(rows.number["tflops"][i]) * 1e12)
        shapes = [(seq, seq, dim), (seq, dim, seq), (seq, dim, seq)]  # scores, output, and the like in backward
        products = 2 * sum(float(gemm(device, *s, batch=batch * heads, dtype="fp16").seconds) for s in shapes)
        scores, operand = 2 * batch * heads * seq**2, 2 * batch * heads * seq * dim
        softmax = [
            memory_bound(device, "softmax", bytes_read=n * scores, bytes_written=scores, row_bytes=2 * seq)
            for n in (1, 2)
        ]
        copies = 9 * float(memory_bound(device, "copy", bytes_read=operand, bytes_written=operand).seconds)
        predicted = products + sum(float(s.seconds) for s in softmax) + copies
        errors.append(predicted / measured - 1)
    assert len(errors) == 10
    assert np.mean(np.abs(errors)) < 0.06
    assert np.max(np.abs(errors)) < 0.13


@pytest.mark.parametrize("name", CHARTED)
def test_the_shipped_factor_is_the_fitted_one(measured_data: Path, name: str) -> None:
    device, table = load_device(name), read_table(measured_data / "kernels.csv.gz")
    fitted = fit_batched(table, [CHARTED[name]], device.gemm["bf16"], device.memory, device.datasheet)
    assert fitted == device.gemm["bf16"]
    assert fit_batched(table, ["B200-SXM"], device.gemm["bf16"], device.memory, device.datasheet) is None


def test_only_batches_of_narrow_products_are_dearer() -> None:
    device = load_device("a100-sxm-80")
    model = device.gemm["bf16"]

    def ratio(batch: int, m: int, n: int, k: int) -> float:
        plain = float(gemm_seconds(model, device.datasheet, *as_f(batch, m, n, k))[0])
        return float(gemm(device, m, n, k, batch=batch).seconds) / plain

    assert ratio(1, 2048, 2048, 64) == ratio(64, 2048, 2048, 256) == pytest.approx(1.0)
    assert ratio(64, 2048, 2048, 64) == ratio(64, 2048, 128, 2048) == pytest.approx(model.batched_scale)
    assert 1.0 < ratio(64, 2048, 2048, 192) < model.batched_scale
    assert narrowness(*as_f(2048, 2048, 192))[0] == pytest.approx(np.log2(256 / 192))
    narrow, wide = (float(gemm(device, 2048, 2048, k, batch=64).spread) for k in (64, 256))
    assert narrow > wide
