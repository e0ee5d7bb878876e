"""rocprofv3's JSON: what its records say is what analyses see."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echograph.errors import DataError, InputError
from echograph.profiler.analyses import ANALYSES
from echograph.profiler.traces import read_traces

NCCL = "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)"
KINDS = [
    {"kind": "NONE", "operations": []},
    {"kind": "HIP_RUNTIME_API", "operations": ["hipInit", "hipLaunchKernel", "hipMemcpyAsync"]},
    {"kind": "MEMORY_COPY", "operations": ["MEMORY_COPY_NONE", "MEMORY_COPY_HOST_TO_DEVICE"]},
    {"kind": "MARKER_CORE_API", "operations": ["roctxMarkA", "roctxThreadRangeA"]},
]
CPU, GPU = {"handle": 70}, {"handle": 71}
START = 63_857_982_592_000_000  # a machine that runs for two years


def record(kind: int, operation: int, at: float, dur: float, call: int, **rest: Any) -> dict[str, Any]:
    """A record, times in microseconds."""
    times = {"start_timestamp": START + round(1000 * at), "end_timestamp": START + round(1000 * (at + dur))}
    return {
        "kind": kind,
        "operation": operation,
        "thread_id": 9,
        "correlation_id": {"internal": call},
        **times,
        **rest,
    }


def kernel(number: int, at: float, dur: float, call: int, stream: int | None = 3) -> dict[str, Any]:
    dispatch = {"agent_id": GPU, "queue_id": {"handle": 18}, "kernel_id": number}
    said = {} if stream is None else {"stream_id": {"handle": stream}}
    return record(11, 2, at, dur, call, dispatch_info=dispatch, **said)


def tool(pid: int = 908, stream: int | None = 3, **lists: Any) -> dict[str, Any]:
    records = {
        "kernel_dispatch": [kernel(1, 10, 20, 1, stream), kernel(2, 15, 25, 2, 4 if stream else None)],
        "memory_copy": [record(2, 1, 50, 5, 3, src_agent_id=CPU, dst_agent_id=GPU, bytes=4096)],
        "hip_api": [record(1, 1, 1, 2, 1), record(1, 1, 4, 1, 2), record(1, 2, 6, 1, 3)],
        "marker_api": [record(3, 1, 0, 8, 7)],
    }
    return {
        "metadata": {"pid": pid},
        "agents": [
            {"id": CPU, "type": 1, "logical_node_type_id": 0},
            {"id": GPU, "type": 2, "logical_node_type_id": 5, "product_name": "AMD Instinct MI300X"},
        ],
        "kernel_symbols": [
            {"kernel_id": 1, "kernel_name": "_Z4gemm.kd", "formatted_kernel_name": "gemm"},
            {"kernel_id": 2, "kernel_name": NCCL},
        ],
        "strings": {"buffer_records": KINDS, "marker_api": [{"key": 7, "value": "forward"}]},
        "buffer_records": records | lists,
    }


def written(path: Path, *tools: dict[str, Any]) -> Path:
    data = json.dumps({"rocprofiler-sdk-tool": tools}).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["908_results.json", "rank0_results.json.gz"])
def test_one_process(name: str, tmp_path: Path) -> None:
    traces = read_traces(written(tmp_path / name, tool()))
    (row,) = ANALYSES["rank-times"](traces).records()
    assert row == {
        "rank": 0, "computation(us)": 5.0, "overlapped(us)": 15.0, "communication(us)": 10.0, "memory(us)": 5.0,
        "idle(us)": 10.0, "whole(us)": 45.0,
    }  # fmt: skip
    launches = [tuple(row.values())[2:] for row in ANALYSES["launches"](traces).records()]
    assert launches == [
        (2.0, 20.0, 7.0, "hipLaunchKernel", "gemm"),
        (1.0, 25.0, 10.0, "hipLaunchKernel", NCCL),
        (1.0, 5.0, 43.0, "hipMemcpyAsync", "Memcpy HtoD"),
    ]
    (span,) = ANALYSES["annotations"](traces, side="host").records()
    assert (span["name"], span["sum (us)"]) == ("forward", 8.0)
    trace = traces[0]
    assert {trace.process(int(pid)) for pid in trace.pid[trace.on_device]} == {5}
    assert trace.header["deviceProperties"] == [{"id": 5, "name": "AMD Instinct MI300X"}]
    assert trace.argument("bytes")[trace.named({"Memcpy HtoD"})].tolist() == [4096]


def test_before_streams_were_said_a_queue_is_one(tmp_path: Path) -> None:
    trace = read_traces(written(tmp_path / "a.json", tool(stream=None)))[0]
    assert set(trace.stream[trace.of_category({"kernel"})].tolist()) == {18}


def test_without_hip_the_calls_of_hsa_launch(tmp_path: Path) -> None:
    calls = [record(1, 1, 2, 1, 1)]
    both = read_traces(written(tmp_path / "a.json", tool(hsa_api=calls)))
    assert ANALYSES["launches"](both).records()[0]["cpu_duration"] == 2.0
    alone = read_traces(written(tmp_path / "b.json", tool(hip_api=[], hsa_api=calls)))
    assert ANALYSES["launches"](alone).records()[0]["cpu_duration"] == 1.0


def test_processes_of_a_file_are_ranks_and_what_is_not_read_is_said(tmp_path: Path) -> None:
    more = {"scratch_memory": [{"anything": 1}], "pc_sample_host_trap": []}
    traces = read_traces(written(tmp_path / "a.json", tool(20, **more), tool(10, kernel_dispatch=[])))
    assert [*traces] == [0, 1]
    assert [row["computation(us)"] for row in ANALYSES["rank-times"](traces).records()] == [0.0, 5.0]
    said = " ".join(traces.notes)
    assert "not read: scratch_memory" in said
    assert "2 processes: taken for ranks" in said


def test_names_that_are_not_there(tmp_path: Path) -> None:
    broken = tool(kernel_dispatch=[kernel(9, 0, 1, 1)], memory_copy=[record(99, 1, 5, 1, 2)])
    names = read_traces(written(tmp_path / "a.json", broken))[0].strings
    assert {"kernel 9", "operation 1 of kind 99"} <= set(names)


DATA = json.dumps({"rocprofiler-sdk-tool": [tool()]}).encode()


@settings(max_examples=150, deadline=None)
@given(cut=st.integers(25, len(DATA)), at=st.integers(25, len(DATA) - 1), byte=st.sampled_from(b'0{["-n}9]'))
def test_damage_is_one_line(cut: int, at: int, byte: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    data = bytearray(DATA)
    data[at] = byte
    path = tmp_path_factory.mktemp("damage") / "a.json"
    for content in (data, data[:cut]):
        path.write_bytes(content)
        try:
            ANALYSES["kernels"](read_traces(path))
        except InputError as error:
            assert "\n" not in str(error)


def test_what_is_broken_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a whole JSON of rocprofv3"):
        read_traces(written(tmp_path / "a.json", tool(hip_api=[{"kind": "x"}])))
