"""Kernels of CUDA graphs have the operators of what was captured, and compiled ones the lines that call them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_traces import Event, call, job, operator, work, write

from echograph.profiler.analyses import ANALYSES

MM, RELU = "sgemm_128", "void relu<float>(float*)"


def capture(at: float, number: int, *names: str, says: bool = True) -> list[Event]:
    """A capture of kernels, each in an operator of its own with its own size."""
    events = [call(at, 1, number, "hipStreamBeginCapture"), call(at + 90, 1, number + 50, "hipStreamEndCapture")]
    for place, name in enumerate(names, start=1):
        begin, shape = at + 10 * place, {"Input Dims": [[number, place]], "Input type": ["float"]}
        events.append(operator(f"aten::op{place}", begin, 5, **shape))
        one = call(begin + 1, 1, number + place, "hipLaunchKernel")
        events.append(one | {"args": one["args"] | ({"kernel": name} if says else {})})
    return events


def replay(at: float, number: int, *names: str, **args: Any) -> list[Event]:
    """A launch of a graph, whose kernels the device runs in the order of the names."""
    ran = [work(name, at + 5 + 10 * n, 4, number, **args) for n, name in enumerate(names)]
    return [call(at, 2, number, "hipGraphLaunch"), *reversed(ran)]


def operators(tmp_path: Path, events: list[Event]) -> list[tuple[str, str]]:
    rows = ANALYSES["kernel-origins"](job(tmp_path, events)).records()
    return [(row["operator"], row["shapes"]) for row in sorted(rows, key=lambda row: row["ts"])]


@pytest.mark.parametrize("says", [True, False])
def test_each_replay_has_what_was_captured(tmp_path: Path, says: bool) -> None:
    events = [*capture(0, 100, MM, RELU, says=says), *replay(200, 7, MM, RELU), *replay(300, 8, MM, RELU)]
    assert operators(tmp_path, events) == [("aten::op1", "[100,1]"), ("aten::op2", "[100,2]")] * 2
    rows = ANALYSES["shapes"](job(tmp_path, events)).records()
    assert {row["operator"]: (row["calls"], row["sum (us)"]) for row in rows} == {
        "aten::op1": (2, 8),
        "aten::op2": (2, 8),
    }


def test_nodes_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """On several streams the device need not begin a graph's kernels in the order of the capture."""
    launch, *ran = replay(200, 7, MM, RELU)
    ran = [one | {"args": one["args"] | {"graph node id": 8 + place}} for place, one in enumerate(ran)]
    assert operators(tmp_path, [*capture(0, 100, RELU, MM), launch, *ran]) == [
        ("aten::op2", "[100,2]"),
        ("aten::op1", "[100,1]"),
    ]


def test_another_graph_is_not_taken(tmp_path: Path) -> None:
    other, longer = capture(0, 100, MM, MM), capture(0, 100, MM, RELU, MM, says=False)
    for events in (other, longer, []):
        assert operators(tmp_path, [*events, *replay(200, 7, MM, RELU)]) == [("", "")] * 2
    # What is captured after a launch was not launched.
    assert operators(tmp_path, [*replay(1, 7, MM, RELU), *capture(200, 100, MM, RELU)]) == [("", "")] * 2


def test_calls_that_add_no_work_are_passed_by(tmp_path: Path) -> None:
    events = [*capture(0, 100, MM, "empty", RELU), *replay(200, 7, MM, RELU)]
    assert operators(tmp_path, events) == [("aten::op1", "[100,1]"), ("aten::op3", "[100,3]")]


def test_a_capture_without_calls_to_spare_is_taken_first(tmp_path: Path) -> None:
    events = [*capture(0, 100, MM, "more", RELU), *capture(100, 300, MM, RELU), *replay(300, 7, MM, RELU)]
    assert operators(tmp_path, events) == [("aten::op1", "[300,1]"), ("aten::op2", "[300,2]")]


def test_graphs_that_are_alike_take_turns(tmp_path: Path) -> None:
    captured = [*capture(0, 100, MM), *capture(100, 300, MM)]
    launched = [one for turn in range(4) for one in replay(300 + 50 * turn, 7 + turn, MM)]
    shapes = [shape for _, shape in operators(tmp_path, [*captured, *launched])]
    assert shapes == ["[100,1]", "[300,1]"] * 2
    (note,) = ANALYSES["kernel-origins"](job(tmp_path, [*captured, *launched])).notes
    assert "4 launches of CUDA graphs fit several captures" in note and "a guess" in note
    # Where calls do not say their kernels, nothing speaks for it.
    silent = [*capture(0, 100, MM, says=False), *capture(100, 300, RELU, says=False)]
    assert operators(tmp_path, [*silent, *launched]) == [("", "")] * 4
    # One launch too many: which is which is not known.
    assert operators(tmp_path, [*captured, *launched, *replay(900, 30, MM)]) == [("", "")] * 5


def test_a_capture_in_another_trace(tmp_path: Path) -> None:
    captured = write(tmp_path / "captured.json", [*capture(0, 100, MM, RELU), *capture(100, 300, RELU, MM)])
    traces = job(tmp_path, [*replay(5, 7, RELU, MM), *replay(50, 8, MM), *[call(90, 1, 9), work("own", 95, 1, 9)]])
    table = ANALYSES["kernel-origins"](traces, captured=str(captured))
    rows = sorted(table.records(), key=lambda row: row["ts"])
    assert [(row["operator"], row["shapes"]) for row in rows] == [
        ("aten::op1", "[300,1]"),
        ("aten::op2", "[300,2]"),
        ("", ""),
        ("", ""),
    ]
    alone = job(tmp_path / "alone", [*replay(50, 8, "other")])
    assert "launches no CUDA graph" in ANALYSES["kernel-origins"](alone, captured=str(captured)).notes[0]


def test_work_of_the_data_loader_says_so(tmp_path: Path) -> None:
    loader = operator("enumerate(DataLoader)#_SingleProcess.__next__", 0, 50) | {"cat": "user_annotation"}
    events = [loader, operator("aten::copy_", 5, 20), call(6, 1, 1), work("copy", 8, 5, 1)]
    events += [operator("aten::mm", 60, 20), call(61, 1, 2), work(MM, 70, 5, 2)]
    rows = ANALYSES["kernel-origins"](job(tmp_path, events)).records()
    assert [row["phase"] for row in rows] == ["data loading", "forward"]


def test_compiled_kernels_have_the_line_that_calls_them(tmp_path: Path) -> None:
    def python(name: str, ts: float, dur: float) -> Event:
        return operator(name, ts, dur) | {"cat": "python_function"}

    generated = "/var/cache/torchinductor_me/ab/cab.py"
    name = "triton_poi_fused_add_0"
    events = [
        python("train.py(31): step", 0, 90),
        python("torch/_dynamo/eval_frame.py(700): _fn", 1, 80),
        python(f"{generated}(40): call", 2, 70),
        python("triton/backends/nvidia/driver.py(500): __call__", 3, 60),
        operator(name, 4, 30, kernel_file=generated),
        *[call(5, 1, 1), work(name, 20, 5, 1)],
    ]
    (row,) = ANALYSES["kernel-origins"](job(tmp_path, events)).records()
    assert row["source"] == f"train.py:31 step via {generated}:40 call"
    (row,) = ANALYSES["kernel-origins"](job(tmp_path, events[4:])).records()
    assert row["source"] == generated
    (row,) = ANALYSES["shapes"](job(tmp_path, events[4:])).records()
    assert row["source"] == generated
