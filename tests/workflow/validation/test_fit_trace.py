"""`echoprof fit --trace`: what kernels of a trace take becomes a profile that predictions then rest on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echograph.errors import DataError
from echograph.profiler.analyses.shapes import shape_uses
from echograph.profiler.costs import gemm, load_device
from echograph.profiler.costs.device import read_profile
from echograph.profiler.traces import read_traces
from echograph.workflow.calibration.profiles import fit

A100 = [{"id": 0, "name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 85_000_000_000}]
SIZES = [1024 * n for n in range(1, 13)]


def products(folder: Path, factor: float) -> Path:
    """A trace of products that take so many times what the A100's model says."""
    device, events, at = load_device("a100-sxm-80"), list[dict[str, Any]](), 0.0
    for number, m in enumerate(SIZES, start=1):
        took = factor * float(gemm(device, m, 2048, 4096, layout="NN").seconds) * 1e6
        shapes = {"Input Dims": [[m, 4096], [4096, 2048]], "Input type": ["c10::BFloat16"] * 2}
        common = {"ph": "X", "pid": 1, "tid": 1}
        events += [
            {**common, "cat": "cpu_op", "name": "aten::mm", "ts": at, "dur": 5, "args": shapes},
            {**common, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at + 1, "dur": 1,
             "args": {"correlation": number}},
            {**common, "cat": "kernel", "name": "gemm", "ts": at + 10, "dur": took, "tid": 7, "pid": 0,
             "args": {"stream": 7, "correlation": number}},
        ]  # fmt: skip
        at += took + 20
    folder.mkdir()
    (folder / "rank0.json").write_text(json.dumps({"deviceProperties": A100, "traceEvents": events}))
    return folder


def test_a_device_whose_products_take_longer_is_corrected(tmp_path: Path) -> None:
    traces = products(tmp_path / "job", 1.5)
    table = fit(tmp_path / "profiles", trace=traces)
    (row,) = table.records()
    assert (row["what"], row["kernels"], row["corrected"]) == ("product forward bf16", len(SIZES), "yes")
    assert row["median error before"] == pytest.approx(1 / 3, abs=1e-3)
    assert row["median error"] < 0.01
    profile = read_profile(tmp_path / "profiles" / "a100-sxm-80.json")
    assert profile.traced["product forward bf16"].label.basis == "kernels of the trace job"
    (use, *_) = shape_uses(read_traces(traces), str(tmp_path / "profiles" / "a100-sxm-80.json"))
    cost = use.predicted()
    assert cost is not None and float(cost.seconds) == pytest.approx(use.mean_s, rel=0.01)


def test_a_model_that_is_right_is_not_corrected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing to write"):
        fit(tmp_path / "profiles", trace=products(tmp_path / "job", 1.0))
    assert not (tmp_path / "profiles").exists()
