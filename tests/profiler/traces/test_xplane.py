"""XLA's XPlane files: streams, calls, steps and devices become the columns that analyses read."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echograph.errors import DataError, InputError
from echograph.profiler.analyses import ANALYSES
from echograph.profiler.traces import read_traces
from echograph.proto import xplane_pb2 as pb

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
# What ran: its name, when it began and how long that took in microseconds, and what is said of it.
Event = tuple[str, float, float, dict[str, int | str]]


class Writer:
    """Makes planes as XLA does: names and statistics by number."""

    def __init__(self) -> None:
        self.space = pb.Space()

    def plane(self, name: str, lines: dict[str, Sequence[Event]], **facts: str | int) -> Writer:
        """Adds a plane with its lines, whose times count from 1 ms; a text is a reference, as XLA writes it."""
        plane = self.space.planes.add(name=name)
        known: dict[str, int] = {}

        def number(text: str) -> int:
            known.setdefault(text, len(known) + 1)
            plane.stat_metadata[known[text]].name = text
            return known[text]

        for key, value in facts.items():
            said = plane.stats.add(metadata_id=number(key))
            setattr(said, "str_value" if isinstance(value, str) else "uint64_value", value)
        for title, events in lines.items():
            line = plane.lines.add(id=len(plane.lines), name=title, timestamp_ns=1_000_000)
            for place, (label, start, took, stats) in enumerate(events):
                meta = 100 * len(plane.lines) + place
                plane.event_metadata[meta].name = label
                times = {"offset_ps": round(1e6 * start), "duration_ps": round(1e6 * took)}
                event = line.events.add(metadata_id=meta, **times)
                for key, value in stats.items():
                    stat = event.stats.add(metadata_id=number(key))
                    if isinstance(value, str):
                        stat.ref_value = number(value)
                    else:
                        stat.int64_value = value
        return self

    def write(self, path: Path) -> Path:
        """The file, gzipped where its name says so."""
        data = self.space.SerializeToString()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path


def gpu(writer: Writer, number: int, shift: float = 0.0) -> Writer:
    """A product of 20 us, an all-reduce of 30 beside its last 10, and a copy of 5."""
    first = 10 * number
    details: dict[str, int | str] = {"correlation_id": first + 3, "memcpy_details": "kind:host size:4096"}
    copy: Event = ("MemcpyH2D", 60 + shift, 5, details)
    lines: dict[str, Sequence[Event]] = {
        "Stream #7(Kernel)": [("gemm", 10 + shift, 20, {"correlation_id": first + 1, "hlo_op": "dot.1"})],
        "Stream #8(Kernel,Memcpy)": [(NCCL, 20 + shift, 30, {"correlation_id": first + 2}), copy],
        "XLA Modules": [("jit_step", 0, 100, {})],
        "Steps": [("7", 0, 90, {})],
    }
    return writer.plane(f"/device:GPU:{number}", lines, device_vendor="Nvidia")


def host(writer: Writer, *devices: int, step: bool = True) -> Writer:
    calls: list[Event] = []
    for number in devices:
        first = 10 * number
        calls.append(("cuLaunchKernel", 1, 2, {"correlation_id": first + 1}))
        calls.append(("cudaLaunch", 4, 1, {"correlation_id": first + 2}))
    threads: dict[str, Sequence[Event]] = {"worker": calls, "python": [("$train.py:3 step", 0, 80, {})]}
    if step:
        threads["python"] = [*threads["python"], ("train", 0, 70, {"step_num": 4})]
    return writer.plane("/host:CPU", threads)


@pytest.mark.parametrize("name", ["host.xplane.pb", "host.xplane.pb.gz"])
def test_one_device(name: str, tmp_path: Path) -> None:
    traces = read_traces(host(gpu(Writer(), 3), 3).write(tmp_path / name), last_step=True)
    (row,) = ANALYSES["rank-times"](traces).records()
    assert row == {
        "rank": 0, "computation(us)": 10.0, "overlapped(us)": 10.0, "communication(us)": 20.0, "memory(us)": 5.0,
        "idle(us)": 10.0, "whole(us)": 55.0,
    }  # fmt: skip
    launches = [tuple(row.values())[2:] for row in ANALYSES["launches"](traces).records()]
    assert launches == [(2.0, 20.0, 7.0, "cuLaunchKernel", "gemm"), (1.0, 30.0, 15.0, "cudaLaunch", NCCL)]
    (step,) = ANALYSES["steps"](traces).records()
    assert (step["step"], step["dur"], step["launched"]) == (4, 70.0, 2)
    trace = traces[0]
    assert trace.argument("bytes")[trace.named({"MemcpyH2D"})].tolist() == [4096]
    assert trace.header["deviceProperties"] == [{"id": 3, "name": "Nvidia"}]
    assert len(trace.of_category({"python_function"}).nonzero()[0]) == 1


def test_devices_are_ranks(tmp_path: Path) -> None:
    writer = host(gpu(gpu(Writer(), 0), 1, shift=5.0), 0, 1)
    writer.plane("/device:GPU:2", {"Stream #1": []}).plane("/host:metadata", {"a": [("x", 0, 1, {})]})
    traces = read_traces(writer.write(tmp_path / "a.xplane.pb"))
    assert [*traces] == [0, 1]
    delays = [row["launch_delay"] for row in ANALYSES["launches"](traces).records()]
    assert delays == [7.0, 15.0, 12.0, 20.0]
    assert [row["step"] for row in ANALYSES["steps"](traces).records()] == [4, 4]
    said = " ".join(traces.notes)
    assert "2 devices: each is taken for a rank" in said
    assert "not read: /host:metadata" in said


def test_a_device_without_streams_shows_its_innermost_operators(tmp_path: Path) -> None:
    work: list[Event] = [("while.1", 0, 50, {}), ("fusion.2", 0, 20, {}), ("all-reduce.3", 30, 20, {})]
    lines: dict[str, Sequence[Event]] = {"XLA Ops": work, "Steps": [("11", 0, 60, {}), ("12", 60, 60, {})]}
    facts = {"profile_start_time": 1_700_000_000_000_000_000}
    writer = Writer().plane("/device:TPU:0", lines).plane("Task Environment", {}, **facts)
    traces = read_traces(writer.write(tmp_path / "a.xplane.pb"), last_step=True)
    names = [(row["name"], row["kernel_type"]) for row in ANALYSES["kernels"](traces).records()]
    assert names == [("fusion.2", "COMPUTATION"), ("all-reduce.3", "COMMUNICATION")]
    assert [row["step"] for row in ANALYSES["steps"](traces).records()] == [11, 12]
    assert traces[0].origin == (1_700_000_000_000_000_000 + 1_000_000) * 1000


def test_what_has_no_device_and_no_host_is_one_line(tmp_path: Path) -> None:
    path = Writer().plane("/host:metadata", {"a": [("x", 0, 1, {})]}).write(tmp_path / "a.xplane.pb")
    with pytest.raises(DataError, match=r"without a plane of a device or the host \(it has /host:metadata\)"):
        read_traces(path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DataError, match="no XPlane of XLA's profiler, or truncated"):
        read_traces(path)


DATA = host(gpu(Writer(), 0), 0).space.SerializeToString()


@settings(max_examples=200, deadline=None)
@given(cut=st.integers(3, len(DATA)), at=st.integers(2, len(DATA) - 1), byte=st.integers(0, 255))
def test_damage_is_one_line(cut: int, at: int, byte: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    data = bytearray(DATA)
    data[at] = byte
    path = tmp_path_factory.mktemp("damage") / "a.xplane.pb"
    for content in (data, data[:cut]):
        path.write_bytes(content)
        try:
            ANALYSES["kernels"](read_traces(path))
        except InputError as error:
            assert "\n" not in str(error)
