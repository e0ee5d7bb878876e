"""Nsight Systems' SQLite export: what is in its tables is what analyses see."""

from __future__ import annotations

import gzip
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echograph.errors import DataError, InputError
from echograph.profiler.analyses import ANALYSES
from echograph.profiler.traces import read_traces

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
TEXTS = ("gemm", NCCL, "cudaLaunchKernel_v7000", "cuLaunchKernelEx_ptsz", "forward")
KERNEL = "start, end, deviceId, contextId, streamId, correlationId, globalPid, shortName"
MEMORY = "start, end, deviceId, contextId, streamId, correlationId, globalPid, bytes"


def gid(process: int, thread: int = 0) -> int:
    """A serialised global number: a host, a machine, the process, the thread."""
    return (1 << 56) | (process << 24) | thread


def export(path: Path, processes: dict[int, int], *, more: str = "") -> Path:
    """Processes with their device: a product of 10 us, an all-reduce of 20, beside its last 5, a copy of 4."""
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        db.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(TEXTS))
        db.execute("CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INT)")
        db.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (1700000000000000000)")
        db.execute("CREATE TABLE TARGET_INFO_GPU (name TEXT)")
        db.execute("INSERT INTO TARGET_INFO_GPU VALUES ('NVIDIA H100 80GB HBM3')")
        db.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({KERNEL})")
        db.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY ({MEMORY}, copyKind)")
        db.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, end, globalTid, correlationId, nameId)")
        db.execute("CREATE TABLE NVTX_EVENTS (start, end, eventType, text, globalTid, textId)")
        db.execute("CREATE TABLE OSRT_API (start, end, nameId)")
        kernels, copies = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY"
        for process, device in processes.items():
            own, thread = gid(process), gid(process, process + 1)
            rows = [(9000, 19_000, device, 1, 7, 1, own, 0), (14_000, 34_000, device, 1, 20, 2, own, 1)]
            db.executemany(f"INSERT INTO {kernels} VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
            db.execute(f"INSERT INTO {copies} VALUES (40000, 44000, {device}, 1, 7, 3, {own}, 4096, 1)")
            calls = [(1000, 2000, thread, 1, 2), (2500, 3000, thread, 2, 3), (3500, 3600, thread, 3, 99)]
            db.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", calls)
            ranges = [(500, 4000, 59, None, thread, 4), (600, 900, 60, "here", thread, None)]
            ranges += [(700, None, 59, "open", thread, None), (800, 900, 34, "mark", thread, None)]
            db.executemany("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?)", ranges)
        db.executescript(more)
    db.close()
    return path


def test_one_process(tmp_path: Path) -> None:
    traces = read_traces(export(tmp_path / "report_rank2.sqlite", {4711: 3}))
    (row,) = ANALYSES["rank-times"](traces).records()
    assert row == {
        "rank": 2, "computation(us)": 5.0, "overlapped(us)": 5.0, "communication(us)": 15.0, "memory(us)": 4.0,
        "idle(us)": 6.0, "whole(us)": 35.0,
    }  # fmt: skip
    launches = [tuple(row.values())[2:] for row in ANALYSES["launches"](traces).records()]
    assert launches == [
        (1.0, 10.0, 7.0, "cudaLaunchKernel", "gemm"),
        (0.5, 20.0, 11.0, "cuLaunchKernelEx", NCCL),
        (0.1, 4.0, 36.4, "call 99", "Memcpy HtoD"),
    ]
    spans = ANALYSES["annotations"](traces, side="host").records()
    assert [(row["name"], row["sum (us)"]) for row in spans] == [("forward", 3.5), ("here", 0.3)]
    trace = traces[2]
    assert trace.origin == 1_700_000_000_000_000_500 * 1000
    assert trace.argument("bytes")[trace.named({"Memcpy HtoD"})].tolist() == [4096]
    assert trace.header["deviceProperties"] == [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]
    said = " ".join(traces.notes)
    assert "1 events left out: their times are none" in said
    assert "not read: OSRT_API" in said


def test_processes_are_ranks_by_their_devices(tmp_path: Path) -> None:
    traces = read_traces(export(tmp_path / "a.sqlite", {30: 0, 10: 1, 20: 2}))
    assert [*traces] == [0, 1, 2]
    host = [trace.pid[~trace.on_device].tolist() for trace in traces.values()]
    assert [set(of) for of in host] == [{30}, {10}, {20}]
    assert traces[1].process(int(traces[1].pid[traces[1].on_device][0])) == "device 1 of process 10"
    assert "3 processes used devices: taken for ranks, by the numbers of their devices" in " ".join(traces.notes)
    # Each sees one device of its own as number 0: nothing but their own numbers tells them apart.
    same = read_traces(export(tmp_path / "b.sqlite", {30: 0, 10: 0}))
    assert set(same[0].pid[~same[0].on_device].tolist()) == {10}
    assert "taken for ranks, by their own numbers" in " ".join(same.notes)


def test_another_database_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE rocpd_op (start, end)")
    db.close()
    with pytest.raises(DataError, match=r"no table of Nsight Systems that says what ran \(it has rocpd_op\)"):
        read_traces(path)
    packed = export(tmp_path / "b.sqlite", {1: 0}).read_bytes()
    (tmp_path / "b.sqlite.gz").write_bytes(gzip.compress(packed))
    with pytest.raises(DataError, match="unpack or export it anew"):
        read_traces(tmp_path / "b.sqlite.gz")
    (tmp_path / "report.nsys-rep").write_bytes(b"QDSTRM")
    with pytest.raises(DataError, match="export it first: nsys export --type sqlite"):
        read_traces(tmp_path / "report.nsys-rep")


def test_a_view_is_not_read(tmp_path: Path) -> None:
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x AS start, x AS end FROM n"
    path = tmp_path / "a.sqlite"
    with sqlite3.connect(path) as db:
        db.execute(f"CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS {endless}")
    db.close()
    with pytest.raises(DataError, match="no table of Nsight Systems"):
        read_traces(path)


@settings(max_examples=60, deadline=None)
@given(cut=st.floats(0, 1), at=st.floats(0, 0.999), byte=st.integers(0, 255))
def test_damage_is_one_line(cut: float, at: float, byte: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("damage")
    data = bytearray(export(folder / "a.sqlite", {1: 0}).read_bytes())
    data[int(at * len(data))] = byte
    (folder / "b.sqlite").write_bytes(data[: max(20, int(cut * len(data)))])
    try:
        ANALYSES["kernels"](read_traces(folder / "b.sqlite"))
    except InputError as error:
        assert "\n" not in str(error)
