"""Traces as older versions of the profiler wrote them, and those of other devices, mean what they mean today."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_traces import Event, launched, operator, step, trace, work, write

from echograph.profiler.analyses import ANALYSES
from echograph.profiler.replay import lower
from echograph.profiler.traces import Trace, TraceSet, read_trace
from echograph.profiler.traces.trace import NONE
from echograph.workflow.replay import replay

# The versions of PyTorch: what they called operators, annotations on the host and on the device, calls, work.
NAMES = {
    "1.8": ("Operator", "Operator", "User", "Runtime", "Kernel", "Memcpy", "Memset"),
    "1.9": ("cpu_op", "cpu_op", "gpu_user_Annotation", "Runtime", "Kernel", "Memcpy", "Memset"),
    "1.12": (
        "cpu_op",
        "user_annotation",
        "gpu_user_annotation",
        "cuda_runtime",
        "kernel",
        "gpu_memcpy",
        "gpu_memset",
    ),
}
TODAY = NAMES["1.12"]


def events() -> list[Event]:
    """Two steps: an operator with a kernel in it, a copy, a set, an annotation on the device."""
    found: list[Event] = []
    for number in (0, 1):
        at = 200 * number
        found += [
            step(number, at, 200),
            operator("aten::mm", at + 5, 60),
            *launched("gemm", at + 10, at + 20, 40, 10 * number + 1),
            *launched("Memcpy HtoD (Pinned -> Device)", at + 70, at + 80, 10, 10 * number + 2, cat="gpu_memcpy"),
            *launched("Memset (Device)", at + 90, at + 95, 5, 10 * number + 3, cat="gpu_memset"),
            operator("Optimizer.step#SGD.step", at + 100, 50) | {"cat": "user_annotation"},
            operator("forward", at + 20, 40, tid=7) | {"cat": "gpu_user_annotation", "pid": 0},
        ]
    return found


def as_written_by(version: str) -> list[Event]:
    """The same events with the version's categories and threads."""
    categories = dict(zip(TODAY, NAMES[version], strict=True))
    found = []
    for event in events():
        device = event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
        marks = event["cat"] == "gpu_user_annotation"
        tid: Any = event["tid"]
        if version == "1.8":
            tid = f"stream {tid}{' user' * marks}" if device else str(tid)
        elif version == "1.9" and marks:
            tid = f"stream {tid} annotations"
        found.append(event | {"cat": categories[event["cat"]], "tid": tid})
    return found


def every_table(one: Trace) -> dict[str, list[dict[str, Any]]]:
    names = [name for name in ANALYSES if name not in ("kernel-sequences", "memory-categories", "execution-trace")]
    options = {"trace-diff": {"test_step": 1}}
    return {name: ANALYSES[name](TraceSet({0: one}), **options.get(name, {})).records() for name in names}


@pytest.mark.parametrize("version", ["1.8", "1.9"])
def test_every_analysis_answers_alike_whatever_version_wrote_the_trace(tmp_path: Path, version: str) -> None:
    known = every_table(trace(tmp_path / "today", events()))
    assert every_table(trace(tmp_path / "old", as_written_by(version))) == known
    assert len(known["operators"]) == 1 and known["steps"][1]["launched"] == 3


def test_the_external_id_of_a_kernel_was_spelled_small(tmp_path: Path) -> None:
    found = trace(tmp_path, [work("gemm", 0, 1, 3, **{"external id": 12}), work("gemm", 2, 1, 4)])
    assert found.external_id.tolist() == [12, NONE]


def test_threads_that_are_text_are_the_same_in_every_part_of_a_file(tmp_path: Path) -> None:
    # Longer than what is read at once: the first parts have numbers alone, the last the names of streams too.
    pad = "x" * 3000
    rows = [operator(f"aten::op{n}", 20 * n, 10, padding=pad) | {"tid": "1234"} for n in range(900)]
    rows += [event | {"tid": "1234" if event["cat"] == "cuda_runtime" else "stream 7"} for event in
             launched("gemm", 8 * 20 + 3, 8 * 20 + 9, 4, 1)]  # fmt: skip
    rows += [operator("late", 20_000, 10) | {"tid": "1234"}, operator("other", 0, 5) | {"tid": "Thread-2"}]
    rows += [operator("number", 20_020, 10) | {"tid": 1234}]
    found = read_trace(write(tmp_path / "t.json", rows))
    host = found.of_category({"cpu_op", "cuda_runtime"})
    named = found.named({"other"})
    assert set(found.tid[host & ~named].tolist()) == {1234}
    assert found.process(int(found.tid[named][0])) == "Thread-2"
    assert found.stream[found.on_device].tolist() == [7] and found.tid[found.on_device].tolist() == [7]
    (row,) = ANALYSES["operators"](TraceSet({0: found})).records()
    assert (row["aten_op_name"], row["kernel_sequence"]) == ("aten::op8", "gemm")
    # And a replay takes as long as the job did.
    result = replay(lower(TraceSet({0: found}), "old").graph)
    assert result.step_ps == int(found.end.max())


@pytest.mark.parametrize("tid", [-549_452_224, -1])
def test_negative_threads_are_numbers(tmp_path: Path, tid: int) -> None:
    rows = [operator("a", 0, 1, tid=tid), operator("b", 2, 1) | {"tid": "text"}, operator("c", 4, 1, tid=tid)]
    found = trace(tmp_path, rows)
    assert found.tid[[0, 2]].tolist() == [tid, tid] and found.process(int(found.tid[1])) == "text"


@pytest.mark.parametrize(
    ("said", "stream"),
    [
        ("0x0", 0),
        ("0x1f", 31),
        ("0x7f5c3c000b70", 0x7F5C3C000B70),
        ("7", 7),
        (0, 0),
        ("stream 3", 3),
        (2**40, 2**40),
    ],
)
def test_streams_that_are_text_or_addresses(tmp_path: Path, said: int | str, stream: int) -> None:
    kernel = work("gemm", 0, 5, 1)
    kernel["args"]["stream"] = said
    found = trace(tmp_path, [kernel])
    assert found.stream.tolist() == [stream] and found.on_device.all()
    assert ANALYSES["temporal-breakdown"](TraceSet({0: found})).records()[0]["compute_time(us)"] == 5


def test_work_without_a_stream_is_on_that_of_its_thread(tmp_path: Path) -> None:
    rows = [work("gemm", 0, 5), work("gemm", 0, 5), work("gemm", 0, 5), work("gemm", 9, 5)]
    for row, tid in zip(rows, (3, "stream 4", "compute", "compute"), strict=True):
        del row["args"]["stream"]
        row["tid"] = tid
    first, second, *third = trace(tmp_path, rows).stream.tolist()
    assert (first, second) == (3, 4) and third[0] == third[1] > second


def test_cupti_has_a_number_for_no_stream(tmp_path: Path) -> None:
    found = trace(tmp_path, [work("Context Sync", 0, 5, 1, stream=2**32 - 1, cat="cuda_sync")])
    assert found.stream.tolist() == [NONE]


def test_a_transfer_of_no_time_has_no_bandwidth(tmp_path: Path) -> None:
    said = [{"memory bandwidth (GB/s)": "N/A"}, {"memory bandwidth (GB/s)": "2.5"}]
    rows = [work("Memset (Device)", at, 1, cat="gpu_memset", bytes=8, **args) for at, args in enumerate(said)]
    found = trace(tmp_path, rows)
    assert found.argument("memory bandwidth (GB/s)").tolist() == [NONE, 2.5] and not found.notes
