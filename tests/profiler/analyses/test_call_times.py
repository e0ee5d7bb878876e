"""Host time by call stack."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from hta_reference import PUBLISHED, answer, exact, traces
from small_traces import call, job, launched, operator, work

from echograph.errors import UsageError
from echograph.profiler.analyses import ANALYSES
from echograph.profiler.traces.relations import call_stacks, launches
from echograph.profiler.traces.trace import NONE


def test_self_and_total_by_depth(tmp_path: Path) -> None:
    events = [
        operator("aten::linear", 0, 50),
        operator("aten::addmm", 5, 30),
        *launched("gemm", 10, 100, 40, 1),
        call(20, 4, 2, "cudaMemcpyAsync"),
        work("Memcpy DtoD (Device -> Device)", 150, 6, 2, cat="gpu_memcpy"),
        operator("aten::t", 40, 5),
        operator("aten::addmm", 60, 10),
        operator("aten::linear", 0, 7, tid=2),
    ]
    rows = ANALYSES["call-stacks"](job(tmp_path, events)).records()
    assert [list(row.values()) for row in rows] == [
        [0, 0, "aten::linear", 2, 57, 22, 2, 46],
        [0, 0, "aten::addmm", 1, 10, 10, 0, 0],
        [0, 1, "aten::addmm", 1, 30, 25, 2, 46],
        [0, 1, "aten::t", 1, 5, 5, 0, 0],
        [0, 2, "cudaMemcpyAsync", 1, 4, 4, 1, 6],
        [0, 2, "cudaLaunchKernel", 1, 1, 1, 1, 40],
    ]
    few = ANALYSES["call-stacks"](job(tmp_path, events), name="aten::", max_depth=0).records()
    assert few == rows[:2]


@pytest.mark.parametrize(
    ("options", "line"),
    [({"max_depth": -2}, "max_depth: -2 is below -1"), ({"name": "conv"}, "'conv' in its name")],
)
def test_a_wrong_question_gets_one_line(tmp_path: Path, options: dict[str, object], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        ANALYSES["call-stacks"](job(tmp_path, [operator("aten::mm", 0, 1)]), **options)


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_time_is_lost_or_counted_twice(measured_data: Path, name: str) -> None:
    job_traces = exact(measured_data, name)
    rows = ANALYSES["call-stacks"](job_traces).records()
    for rank, trace in job_traces.items():
        own = [row for row in rows if row["rank"] == rank]
        bottom = sum(row["host_time(us)"] for row in own if row["depth"] == 0)
        alone = sum(row["self_time(us)"] for row in own)
        # In the trace of the AMD device some calls of one thread overlap; both count.
        assert alone == pytest.approx(bottom, rel=0.01 if name == "mi300x-resnet" else 1e-9)
        assert alone >= bottom * (1 - 1e-9)
        assert all(row["self_time(us)"] >= 0 for row in own)
        assert sum(row["count"] for row in own) == len(call_stacks(trace).order)
        calls, works = launches(trace)
        launched = trace.on_device[works] & (call_stacks(trace).place[calls] != NONE)
        assert sum(row["num_kernels"] for row in own if row["depth"] == 0) == launched.sum()


@pytest.mark.parametrize("name", ["a100-nccl-args", "critical-path-alexnet", "critical-path-simple-add"])
def test_as_hta_has_them(measured_data: Path, name: str) -> None:
    theirs = {int(row["index"]): row for row in answer(measured_data, name, "trace_df.rank0.csv") or []}
    (trace,) = traces(measured_data, name).values()
    stacks, index = call_stacks(trace), trace.index.tolist()
    expected: dict[tuple[int, str], list[float]] = defaultdict(lambda: [0.0] * 3)
    apart = set()
    for row in stacks.order.tolist():
        known, parent = theirs[index[row]], int(stacks.parent[row])
        within = theirs.get(int(known["parent"]))
        if (within["index"] if within else NONE) != (index[parent] if parent != NONE else NONE):
            # HTA is at a loss with events without duration: it puts later ones into them.
            apart |= {known["s_name"], *(r["s_name"] for r in (within, theirs.get(index[parent])) if r)}
        for place, number in enumerate((1, known["dur"], known["dur"])):
            expected[int(known["depth"]), known["s_name"]][place] += number
        if within:
            # What HTA's rounding makes negative covers nothing.
            expected[int(within["depth"]), within["s_name"]][2] -= max(0, known["dur"])
    rows = ANALYSES["call-stacks"](traces(measured_data, name)).records()
    compared = [row for row in rows if row["name"] not in apart]
    assert len(compared) > 70
    for row in compared:
        ours = [row["count"], row["host_time(us)"], row["self_time(us)"]]
        assert ours == expected[row["depth"], row["name"]], row["name"]


@pytest.mark.parametrize("name", ["critical-path-alexnet", "critical-path-simple-add"])
def test_waits_are_no_kernels(measured_data: Path, name: str) -> None:
    # HTA counts "Stream Sync" and its like as kernels of an operator. With them counted, we answer as it does.
    theirs = answer(measured_data, name, "trace_df.rank0.csv") or []
    (trace,) = traces(measured_data, name).values()
    rows = ANALYSES["call-stacks"](traces(measured_data, name)).records()
    waits = int((~trace.on_device[launches(trace).works]).sum())
    assert waits > 0
    assert sum(row["num_kernels"] for row in rows if row["depth"] == 0) + waits == sum(
        row["num_kernels"] for row in theirs if row["depth"] == 0
    )
