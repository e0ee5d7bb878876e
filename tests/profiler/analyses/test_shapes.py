"""From kernels to code: operators, shapes, modules and lines behind kernels, and how long they should take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_traces import Event, launched, operator, write

from echograph.errors import UnknownNameError, UsageError
from echograph.profiler.analyses import ANALYSES
from echograph.profiler.costs import gemm, load_device
from echograph.profiler.costs.device import HARDWARE, device_names, profile_of_hardware
from echograph.profiler.traces import TraceSet, read_trace

A100 = [{"id": 0, "name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 85_000_000_000}]
MM: dict[str, Any] = {
    "Input Dims": [[4096, 1024], [1024, 4096]],
    "Input type": ["c10::BFloat16", "c10::BFloat16"],
    "Input Strides": [[1024, 1], [1, 1024]],
    "Concrete Inputs": ["", ""],
}


def python(name: str, ts: float, dur: float, *, tid: int = 1) -> Event:
    return operator(name, ts, dur, tid=tid) | {"cat": "python_function"}


def layer(ts: float, correlation: int, sequence: int) -> list[Event]:
    """A linear layer's product within its module, on the main thread."""
    return [
        python("train.py(7): step", ts, 90),
        python("nn.Module: Net_0", ts + 1, 80),
        python("torch/nn/modules/module.py(1500): _call_impl", ts + 2, 70),
        python("net.py(42): forward", ts + 3, 60),
        python("nn.Module: Linear_3", ts + 4, 50),
        python("torch/nn/modules/linear.py(116): forward", ts + 5, 40),
        operator("aten::mm", ts + 10, 20, **MM, **{"Sequence number": sequence, "Fwd thread id": 0}),
        *launched("gemm<bf16>", ts + 12, ts + 15, 100, correlation),
    ]


def backward(ts: float, correlation: int, sequence: int) -> list[Event]:
    """Its gradient on autograd's thread, and before it a product that is computed again."""
    name = "autograd::engine::evaluate_function: MmBackward0"
    inner = launched("gemm<bf16>", ts + 12, ts + 20, 80, correlation, stream=7)
    again = launched("gemm<bf16>", ts + 32, ts + 110, 90, correlation + 1, stream=7)
    inner[0]["tid"] = again[0]["tid"] = 2
    return [
        operator(name, ts, 80, tid=2, **{"Sequence number": sequence, "Fwd thread id": 1}),
        operator("aten::mm", ts + 10, 10, tid=2, **MM),
        *inner,
        operator("aten::mm", ts + 30, 10, tid=2, **MM, **{"Sequence number": 99, "Fwd thread id": 0}),
        *again,
    ]


@pytest.fixture
def traces(tmp_path: Path) -> TraceSet:
    events = [*layer(1000, 1, 5), *layer(2000, 2, 6), *backward(3000, 3, 5)]
    events += launched("Memcpy HtoD (Pageable -> Device)", 4000, 4010, 30, 9, cat="gpu_memcpy")
    return TraceSet({0: read_trace(write(tmp_path / "rank0.json", events, deviceProperties=A100))})


def records(traces: TraceSet, name: str, **options: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ANALYSES[name](traces, **options).records()
    return found


def test_each_kernel_knows_its_operator_module_and_line(traces: TraceSet) -> None:
    first, _, gradient, again, copied = records(traces, "kernel-origins")
    assert (first["operator"], first["phase"], first["dtypes"]) == ("aten::mm", "forward", "bf16 bf16")
    assert first["shapes"] == "[4096,1024] [1024,4096].T"
    assert (first["module"], first["source"]) == ("Net_0.Linear_3", "net.py:42 forward")
    # What differentiates is of the module that it differentiates; what is computed again is none of its.
    assert (gradient["phase"], gradient["module"]) == ("backward", "Net_0.Linear_3")
    assert gradient["source"] == "net.py:42 forward"
    assert again["phase"] == "recompute"
    assert (copied["operator"], copied["module"], copied["shapes"]) == ("", "", "")


def test_all_lines_are_shown_when_asked_for(traces: TraceSet) -> None:
    first = records(traces, "kernel-origins", stack=True)[0]
    assert first["source"] == "net.py:42 forward < train.py:7 step"


def test_equal_shapes_are_one_row_with_rates_and_a_prediction(traces: TraceSet) -> None:
    forward = next(row for row in records(traces, "shapes") if row["phase"] == "forward" and row["operator"])
    flops, moved = 2 * 4096 * 4096 * 1024, 2 * (2 * 4096 * 1024 + 4096 * 4096)
    assert (forward["kind"], forward["calls"], forward["kernels"]) == ("product", 2, 1)
    assert (forward["sum (us)"], forward["mean (us)"]) == (200, 100)
    assert (forward["FLOPs"], forward["bytes"]) == (flops, moved)
    assert forward["TFLOP/s"] == pytest.approx(flops / 100e-6 / 1e12)
    assert forward["GB/s"] == pytest.approx(moved / 100e-6 / 1e9)
    device = load_device("a100-sxm-80")
    peak = device.datasheet.peak_flops_per_s["bf16"]
    assert forward["bound_by"] == "compute"
    assert forward["percent_of_peak"] == pytest.approx(100 * flops / peak / 100e-6)
    expected = 1e6 * float(gemm(device, 4096, 4096, 1024, dtype="bf16", layout="TN").seconds)
    assert forward["predicted (us)"] == pytest.approx(expected)
    assert forward["excess (us)"] == pytest.approx(200 - 2 * expected)


def test_only_what_is_surely_too_slow_is_slow(tmp_path: Path) -> None:
    expected = 1e6 * float(gemm(load_device("a100-sxm-80"), 4096, 4096, 1024, dtype="bf16").seconds)
    events = []
    for number, took in enumerate((expected, expected * 1.01, 3 * expected), start=1):
        given = MM | {"Input Dims": [[4096, 1024], [1024, 4096]]}
        name = "aten::mm" if number < 3 else "aten::_scaled_mm"
        events += [operator(name, 1000 * number, 20, **given)]
        events += launched("gemm", 1000 * number + 2, 1000 * number + 10, round(took, 3), number)
    found = TraceSet({0: read_trace(write(tmp_path / "rank0.json", events, deviceProperties=A100))})
    (slow,) = records(found, "slow-kernels")
    assert slow["operator"] == "aten::_scaled_mm" and slow["ratio"] == pytest.approx(3, rel=1e-3)
    assert 0 < slow["sure_excess (us)"] < slow["excess (us)"] == pytest.approx(2 * expected, rel=1e-3)


def test_copies_to_the_host_are_not_what_the_memory_could_do(tmp_path: Path) -> None:
    events = [
        operator("aten::copy_", 10, 20, **{"Input Dims": [[1024], [1024]], "Input type": ["float", "float"]}),
        *launched("Memcpy DtoH (Device -> Pageable)", 12, 20, 500, 1, cat="gpu_memcpy"),
    ]
    found = TraceSet({0: read_trace(write(tmp_path / "rank0.json", events, deviceProperties=A100))})
    (row,) = records(found, "shapes")
    assert (row["kind"], row["bytes"], row["predicted (us)"], row["percent_of_peak"]) == (
        "transfer",
        8192,
        None,
        None,
    )
    assert records(found, "slow-kernels") == []


def test_products_in_tf32_are_told_by_their_kernels(tmp_path: Path) -> None:
    given = {"Input Dims": [[4096, 1024], [1024, 4096]], "Input type": ["float", "float"]}
    events = []
    for number, name in enumerate(("ampere_sgemm_128x64_nn", "cutlass_tensorop_s1688tf32gemm"), start=1):
        events.append(operator("aten::mm", 1000 * number, 20, **given))
        events += launched(name, 1000 * number + 2, 1000 * number + 10, 500, number)
    found = TraceSet({0: read_trace(write(tmp_path / "rank0.json", events, deviceProperties=A100))})
    plain, wide = sorted(records(found, "shapes"), key=lambda row: row["shapes"])
    assert wide["shapes"].endswith("TF32") and not plain["shapes"].endswith("TF32")
    assert plain["predicted (us)"] > 2 * wide["predicted (us)"]
    assert wide["roof_TFLOP/s"] > 2 * plain["roof_TFLOP/s"]


def test_a_call_takes_as_long_as_any_of_its_kernels_runs(tmp_path: Path) -> None:
    events = [operator("aten::mm", 10, 40, **MM)]
    events += launched("a", 12, 20, 100, 1) + launched("b", 14, 80, 100, 2, stream=8)
    found = TraceSet({0: read_trace(write(tmp_path / "rank0.json", events, deviceProperties=A100))})
    (row,) = records(found, "shapes")
    assert (row["kernels"], row["sum (us)"]) == (2, 160)


def test_a_whole_operator_stands_for_what_it_calls(tmp_path: Path) -> None:
    image, weight = [2, 6, 9, 8], [4, 6, 3, 3]
    values = ["", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]
    given = {
        "Input Dims": [image, weight, [], [], [], [], [], [], []],
        "Input type": ["float", "float", "", *["ScalarList"] * 3, "Scalar", "ScalarList", "Scalar"],
        "Concrete Inputs": values,
    }
    events = [operator("aten::convolution", 10, 60, **given), operator("aten::cudnn_convolution", 15, 20)]
    events += launched("implicit_gemm", 20, 30, 50, 1)
    events += [operator("aten::add_", 40, 20), *launched("add", 45, 90, 10, 2)]
    found = TraceSet({0: read_trace(write(tmp_path / "rank0.json", events, deviceProperties=A100))})
    (row,) = records(found, "shapes")
    assert (row["operator"], row["kernels"], row["kernel"]) == ("aten::convolution", 2, "implicit_gemm")
    assert row["FLOPs"] == 2 * 2 * 9 * 8 * 4 * 6 * 9
    assert row["shapes"] == "[2,6,9,8] [4,6,3,3] padding=1,1"


def test_without_shapes_or_a_known_device_a_note_says_what_to_do(tmp_path: Path) -> None:
    events = [operator("aten::mm", 10, 20), *launched("gemm", 12, 20, 100, 1)]
    found = TraceSet({0: read_trace(write(tmp_path / "rank0.json", events))})
    answer = ANALYSES["shapes"](found)
    assert answer.records()[0]["kind"] == "other"
    assert any("record_shapes=True" in note for note in answer.notes)
    assert any("does not name its device" in note and "device=" in note for note in answer.notes)
    with pytest.raises(UnknownNameError):
        ANALYSES["shapes"](found, device="h1000")
    with pytest.raises(UsageError, match="there is other"):
        ANALYSES["shapes"](found, kind="product")


def test_a_profile_can_be_named(traces: TraceSet) -> None:
    slower = records(traces, "shapes", kind="product", device="v100-sxm2")
    assert slower[0]["predicted (us)"] > records(traces, "shapes", kind="product")[0]["predicted (us)"]


def test_hardware_has_profiles_that_are_shipped() -> None:
    assert {profile for _, profile in HARDWARE} - {"a100-sxm"} <= set(device_names())
    assert profile_of_hardware("NVIDIA A100-PG509-200", 42_297_524_224) == "a100-sxm-40"
    assert profile_of_hardware("NVIDIA A100-SXM4-80GB") == "a100-sxm-80"
    assert profile_of_hardware("NVIDIA H100 80GB HBM3") == "h100-sxm"
    assert profile_of_hardware("NVIDIA H100 PCIe") == "h100-pcie"
    assert profile_of_hardware("AMD Instinct MI300X VF") == "mi300x"
    assert profile_of_hardware("NVIDIA GeForce RTX 3090") is None


def test_errors_of_the_prediction_add_up_by_kind(tmp_path: Path) -> None:
    expected = 1e6 * float(gemm(load_device("a100-sxm-80"), 4096, 4096, 1024, dtype="bf16").seconds)
    events = [operator("aten::mm", 1000, 20, **MM), *launched("gemm", 1002, 1010, round(expected, 3), 1)]
    events += [operator("aten::_scaled_mm", 2000, 20, **MM), *launched("g", 2002, 2010, round(2 * expected, 3), 2)]
    events += [operator("mine::op", 3000, 20), *launched("k", 3002, 3010, 50, 3)]
    found = TraceSet({0: read_trace(write(tmp_path / "rank0.json", events, deviceProperties=A100))})
    rows = {row["kind"]: row for row in records(found, "prediction-errors")}
    product, whole = rows["product"], rows["all"]
    assert product["ratio"] == pytest.approx(1.5, rel=1e-3)
    # The slower of the two shapes takes more than half of the time.
    assert product["median_error"] == pytest.approx(0.5, rel=1e-3)
    assert product["within_spread"] == pytest.approx(100 / 3, rel=1e-3)
    assert rows["other"]["percent_predicted"] == 0 and rows["other"]["predicted (us)"] == 0
    assert whole["measured (us)"] == pytest.approx(3 * expected + 50, rel=1e-3)
    assert whole["percent_predicted"] == pytest.approx(300 * expected / (3 * expected + 50), rel=1e-3)
