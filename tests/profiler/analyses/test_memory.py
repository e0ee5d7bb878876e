"""What the allocator held: against PyTorch's own accounts, and against the trace's conservation of bytes."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hta_reference import exact
from small_traces import job, operator, trace

from echograph.errors import DataError, InputError, UsageError
from echograph.profiler.analyses import ANALYSES
from echograph.profiler.analyses.memory import CATEGORIES
from echograph.profiler.traces import TraceSet, read_traces


def said(ts: float, change: int, allocated: int, *, device: tuple[int, int] = (1, 0)) -> dict[str, Any]:
    args = {"Device Type": device[0], "Device Id": device[1], "Bytes": change, "Total Allocated": allocated}
    args["Total Reserved"] = 1024
    return {
        "ph": "i",
        "cat": "cpu_instant_event",
        "s": "t",
        "name": "[memory]",
        "pid": 10,
        "tid": 1,
        "ts": ts,
        "args": args,
    }


def test_memory_of_each_device_by_time(tmp_path: Path) -> None:
    events = [operator("a", 100, 50), said(120, -64, 64), said(110.5, 128, 128), said(130, 8, 8, device=(0, -1))]
    rows = ANALYSES["memory-timeline"](job(tmp_path, events, [operator("b", 100, 1), said(900, 1, 1)]))
    assert [tuple(row.values()) for row in rows.records()] == [
        (0, 10.5, "cuda:0", 128, 128, 1024),
        (0, 20.0, "cuda:0", -64, 64, 1024),
        (0, 30.0, "cpu", 8, 8, 1024),
    ]
    # What is said after the last event that is kept belongs to the step that is left out.
    assert rows.notes == ("rank 1: no memory in its profile: profile with profile_memory=True",)


def test_what_is_allocated_changes_by_what_is_said(measured_data: Path) -> None:
    table = ANALYSES["memory-timeline"](exact(measured_data, "v100-ddp-216k-events"))
    held: dict[str, int] = {}
    breaks: dict[str, int] = defaultdict(int)
    for row in table.records():
        if row["device"] in held and held[row["device"]] + row["change_bytes"] != row["allocated_bytes"]:
            breaks[row["device"]] += 1
        held[row["device"]] = row["allocated_bytes"]
    # Threads that allocate in one microsecond are in the order of the file.
    assert len(table) > 20_000
    assert sum(breaks.values()) < 0.01 * len(table)


def test_categories_by_hand(tmp_path: Path) -> None:
    raw = [[-1, 1, 100, 0], [5000, 2, 8, 4], [5000, 2, 2, 7], [6500, 3, -8, 4], [6500, 3, 8, 5]]
    (tmp_path / "memory.json").write_text(json.dumps(raw))
    table = ANALYSES["memory-categories"](job(tmp_path, [operator("a", 0, 1)]), file=str(tmp_path / "memory.json"))
    kept = [{k: v for k, v in row.items() if v or k == "ts"} for row in table.records()]
    assert kept == [
        {"ts": 0, "parameter": 100, "activation": 8, "unknown": 2, "total": 110},
        {"ts": 1.5, "parameter": 100, "gradient": 8, "unknown": 2, "total": 110},
    ]


@pytest.mark.torch
def test_both_are_what_pytorch_says(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(64, 32)
    optimizer = torch.optim.Adam(model.parameters())
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, profile_memory=True, with_stack=True
    ) as profiler:
        for _ in range(2):
            model(torch.randn(16, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    raw, summed = tmp_path / "m.raw.json.gz", tmp_path / "m.json"
    for target in (raw, summed):
        profiler.export_memory_timeline(str(target), device="cpu")
    traces = read_traces(tmp_path / "trace.json", last_step=True)
    table = ANALYSES["memory-categories"](traces, file=str(raw)).records()
    times, sizes = json.loads(summed.read_text())
    # PyTorch's own sums have a column for nothing, as their first, and whole microseconds.
    theirs = dict(zip(times, (tuple(size[1:]) for size in sizes), strict=True))
    ours = {times[0] + row["ts"]: tuple(row[name] for name in CATEGORIES) for row in table}
    assert ours[max(ours)] == theirs[max(theirs)]
    assert set(theirs.values()) <= {*ours.values(), theirs[times[0]]}
    assert max(row["total"] for row in table) == max(map(sum, theirs.values()))
    changes = sum(row["change_bytes"] for row in ANALYSES["memory-timeline"](traces).records())
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert changes == sum(e["args"]["Bytes"] for e in events if e["name"] == "[memory]") != 0


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"{}", "no memory timeline"),
        (b"[[1, 2, 3]]", "no memory timeline"),
        (b"[[1, 2, 3, 9]]", "a category beyond 0 to 7"),
        (gzip.compress(b"[[1, 2, 3, 4]]", mtime=0)[:-12] + b"x" * 12, "damaged"),
    ],
)
def test_what_is_no_timeline_is_refused(tmp_path: Path, content: bytes, line: str) -> None:
    (tmp_path / "m").write_bytes(content)
    with pytest.raises(DataError, match=line):
        ANALYSES["memory-categories"](TraceSet({0: trace(tmp_path, [])}), file=str(tmp_path / "m"))


def test_without_a_file_there_is_no_answer(tmp_path: Path) -> None:
    traces = TraceSet({0: trace(tmp_path, [])})
    with pytest.raises(UsageError, match="name the file"):
        ANALYSES["memory-categories"](traces)
    with pytest.raises(InputError, match="nowhere: No such file"):
        ANALYSES["memory-categories"](traces, file="nowhere")
