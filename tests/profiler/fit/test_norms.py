"""Fits of norms to tables that formulas made, and how a table of few shapes is judged."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("scipy", reason="fitting needs the [dev] extra")

from echograph.profiler.costs import load_device
from echograph.profiler.costs.device import column_waves
from echograph.profiler.fit.memory import fit_norms
from echograph.profiler.fit.regression import FEW_SHAPES, held_out, judged
from echograph.profiler.fit.table import KernelTable, read_table

SHEET, LAUNCH_S = load_device("gb200").datasheet, 4e-6
CYCLES, FINISH_S, FRACTION = 6.0, 1e-5, 0.5
SHAPES = [
    (8192, 1024),
    (4096, 4096),
    (8192, 4096),
    (16384, 4096),
    (8192, 5120),
    (4096, 6144),
    (4096, 8192),
    (8192, 16384),
]


def norms(path: Path) -> KernelTable:
    """Backward passes of PyTorch and cuDNN, whose weights' gradients are added up either way."""
    rate = FRACTION * SHEET.memory_bandwidth_bytes_per_s
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(("op", "dtype", "m", "n", "kernel", "part", "latency_ms"))
        for m, n in SHAPES:
            bytes_s = LAUNCH_S + 3.0 * 2.0 * m * n / rate
            waves = float(column_waves(n, SHEET.sm_count))
            columns_s = CYCLES * m * waves / SHEET.clock_hz
            for kernel, rest_s in (("pytorch", columns_s), ("cudnn", FINISH_S)):
                out.writerow(("rms_norm", "bfloat16", m, n, kernel, "bwd", 1e3 * (bytes_s + rest_s)))
    return read_table(path)


def test_what_adds_up_the_gradient_of_the_weights_is_found(tmp_path: Path) -> None:
    bandwidth = SHEET.memory_bandwidth_bytes_per_s
    found = fit_norms(norms(tmp_path / "norms.csv"), SHEET, bandwidth, LAUNCH_S, "made")
    assert set(found) == {"norm_backward", "norm_backward:fused"}
    by_columns, at_once = found["norm_backward"], found["norm_backward:fused"]
    assert (by_columns.column_cycles, by_columns.finish_s) == (pytest.approx(CYCLES, rel=0.02), 0.0)
    assert (at_once.column_cycles, at_once.finish_s) == (0.0, pytest.approx(FINISH_S, rel=0.05))
    for model in found.values():
        assert model.bandwidth_fraction == pytest.approx([FRACTION] * len(model.row_bytes), rel=0.02)
        assert model.label.held_out.long is not None
        assert model.label.held_out.long.rows == len(SHAPES)
        assert model.label.held_out.long.median_abs < 0.01


@pytest.mark.parametrize("shapes", [FEW_SHAPES - 1, FEW_SHAPES])
def test_few_shapes_are_left_out_one_by_one_and_many_by_their_hash(shapes: int) -> None:
    sizes = np.repeat(np.arange(1.0, shapes + 1), 2)  # each measured twice
    seconds = 1e-3 * sizes
    fits: list[npt.NDArray[np.bool_]] = []

    def fit(seen: npt.NDArray[np.bool_]) -> float:
        fits.append(seen)
        return float(np.mean(seconds[seen]))

    best, error = judged(fit, lambda mean: np.full(len(seconds), mean), (sizes,), seconds)
    assert error.long is not None
    hidden = held_out(sizes)
    if shapes >= FEW_SHAPES:
        assert [seen.tolist() for seen in fits] == [(~hidden).tolist()]
        assert (best, error.long.rows) == (float(np.mean(seconds[~hidden])), int(np.sum(hidden)))
        return
    assert [int(np.sum(~seen)) for seen in fits] == [2] * shapes + [0]
    assert all(len(set(sizes[~seen])) <= 1 for seen in fits)
    assert best == float(np.mean(seconds))
    left_out = (np.sum(seconds) - 2 * seconds) / (len(seconds) - 2)
    assert error.long.mean_abs == pytest.approx(np.mean(np.abs(left_out / seconds - 1)), abs=1e-4)
