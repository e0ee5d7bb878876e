"""Counters of kernels, with operators and roofline, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hta_reference import PUBLISHED, exact
from small_traces import Event, call, job, operator, work

from echograph.errors import UsageError
from echograph.profiler.analyses import ANALYSES
from echograph.profiler.analyses.hardware_counters import flops_of

FMA, ADD = (f"smsp__sass_thread_inst_executed_op_f{kind}_pred_on.sum" for kind in ("fma", "add"))


def counted(name: str, ts: float, **counters: Any) -> Event:
    event = {"ph": "X", "cat": "cuda_profiler_range", "name": name, "pid": 0, "tid": 0, "ts": ts, "dur": 1}
    return event | {"args": counters}


EVENTS = [
    operator("aten::linear", 0, 50),
    operator("aten::addmm", 5, 40),
    call(10, 5, 1),
    operator("aten::relu", 60, 20),
    call(65, 5, 2),
    work("relu_kernel", 70, 4, 2),
    counted("addmm_kernel", 1, **{FMA: 1000, ADD: 500, "gpu__time_duration.sum": 2000, "dram__bytes.sum": 250}),
    counted("relu_kernel", 2, **{ADD: 40, "dram__bytes_read.sum": 30, "dram__bytes_write.sum": 10}),
]


def test_counters_with_operators_and_roofline(tmp_path: Path) -> None:
    table = ANALYSES["hardware-counters"](job(tmp_path, EVENTS), peak_gflops=3.0, peak_gbps=2.0)
    first, second = table.records()
    assert (first["op_stack"], first["top_level_op"], first["bottom_level_op"]) == (
        "aten::linear|aten::addmm",
        "aten::linear",
        "aten::addmm",
    )
    # 1,000 fused are 2,000 operations, with 500 additions 2,500; in 2 us 1.25e9 a second; 250 bytes.
    assert (first["flops"], first["time(us)"], first["GFLOP/s"]) == (2500, 2, 1.25)
    # 10 operations a byte of 2e9 bytes a second would be 20e9, and the device has 3e9.
    assert (first["bytes"], first["flops_per_byte"], first["roof_GFLOP/s"]) == (250, 10, 3)
    # Its time is that of the kernel that its launch led to; one operation a byte: memory is the roof.
    assert (second["flops"], second["time(us)"], second["GFLOP/s"]) == (40, 4, 0.01)
    assert (second["bytes"], second["flops_per_byte"], second["roof_GFLOP/s"]) == (40, 1, 2)
    assert second["op_stack"] == "aten::relu"
    assert (first[FMA], second[FMA], second["dram__bytes_read.sum"]) == (1000, None, 30)
    json.dumps(table.records(), allow_nan=False)


def test_ranges_that_are_not_launches_have_no_operators(tmp_path: Path) -> None:
    table = ANALYSES["hardware-counters"](job(tmp_path, [*EVENTS, counted("more", 3)]))
    assert [row["op_stack"] for row in table.records()] == ["", "", ""]
    assert table.notes == ("rank 0: 3 ranges of counters and 2 launches: whose they are is not known",)
    last = table.records()[2]
    assert (last["flops"], last["time(us)"], last["roof_GFLOP/s"]) == (None, None, None)


@pytest.mark.parametrize("kind", ["add", "mul", "fma"])
@pytest.mark.parametrize("precision", "dfh")
def test_all_precisions_count_and_fused_ones_twice(precision: str, kind: str) -> None:
    name = f"smsp__sass_thread_inst_executed_op_{precision}{kind}_pred_on.sum"
    assert flops_of({name: 10, "other": 3}) == (20 if kind == "fma" else 10)
    assert flops_of({"other": 3}) is None


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_traces_have_none_as_hta_says(measured_data: Path, name: str) -> None:
    theirs = json.loads((measured_data / "hta_reference" / name / "cupti_counters.json").read_text())
    table = ANALYSES["hardware-counters"](exact(measured_data, name))
    assert table.records() == theirs == []
    assert all("no hardware counters" in note for note in table.notes)


def test_a_negative_peak_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="datasheet"):
        ANALYSES["hardware-counters"](job(tmp_path, EVENTS), peak_gbps=-1.0)
