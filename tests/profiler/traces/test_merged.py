"""The traces of several ranks in one file are told apart by what merging tools call their processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_traces import launched, write

from echograph.profiler.analyses import ANALYSES
from echograph.profiler.traces import read_traces
from echograph.profiler.traces.merged import merged_ranks

Event = dict[str, Any]


def merged(path: Path, pid: Callable[[int, int], int | str], called: Callable[[int], str] | None = None) -> Path:
    """Three ranks whose kernels last 10, 20 and 30 microseconds, in one file."""
    events: list[Event] = []
    for rank in range(3):
        own = [event | {"pid": pid(rank, event["pid"])} for event in launched("gemm", 1, 5, 10 + 10 * rank, 7)]
        events += own
        if called is not None:
            names = {"ph": "M", "tid": 0, "name": "process_name", "args": {"name": called(rank)}}
            events += [names | {"pid": event["pid"]} for event in own]
    events.append({"ph": "M", "name": "process_name", "pid": 1.5, "args": 3})
    events.append({"ph": "M", "name": "process_labels", "pid": "Spans", "args": {"labels": "of no rank"}})
    return write(path, events, rank=None)


TOOLS: dict[str, tuple[Callable[[int, int], int | str], Callable[[int], str] | None]] = {
    "TraceLens": (lambda rank, pid: 1000 * rank + pid, lambda rank: f"RANK {rank} - GPU"),
    "text": (lambda rank, pid: f"rank{rank}_{pid}", None),
    "SGLang": (lambda rank, pid: f"[TP{rank:02d}] {pid}", None),
    "SGLang, two axes": (lambda rank, pid: f"[TP-{rank % 2}-PP-{rank // 2}] {pid}", None),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_ranks_of_one_file(tool: str, tmp_path: Path) -> None:
    path = merged(tmp_path / "m.json", *TOOLS[tool])
    traces = read_traces(path)
    rows = ANALYSES["rank-times"](traces).records()
    expected = [10.0, 30.0, 20.0] if tool == "SGLang, two axes" else [10.0, 20.0, 30.0]
    assert [(row["rank"], row["computation(us)"]) for row in rows] == list(enumerate(expected))
    # What shares a correlation number on another rank is none of its work.
    assert ANALYSES["launches"](traces).records()[1]["gpu_duration"] == expected[1]
    assert any("the traces of 3 ranks in one file" in note for note in traces.notes)
    assert list(read_traces(path, [1])) == [1]


def test_one_rank_alone_is_not_merged(tmp_path: Path) -> None:
    events = launched("gemm", 1, 5, 10, 7)
    name = {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 3: python"}}
    traces = read_traces(write(tmp_path / "a.json", [*events, name], rank=4))
    assert [*traces] == [4] and not traces.notes


def test_which_names_are_ranks() -> None:
    found = merged_ranks({"1": ["RANK 3 - GPU"], "2": ["rank_12"], "3": ["frank 4"], "4": []})
    assert found is not None
    assert (found.ranks, found.unnamed) == ({"1": 3, "2": 12}, 2)
    placed = merged_ranks({"[TP1-EP10] a": ["[TP1-EP10] a"], "[TP1-EP9] a": ["[TP1-EP9] a"]})
    assert placed is not None
    assert placed.labels == ("TP1-EP9", "TP1-EP10")
    assert str(placed).endswith("their numbers are the order of TP1-EP9 to TP1-EP10")
    assert merged_ranks({"1": ["rank 3"], "2": ["rank 3"]}) is None
    assert merged_ranks({}) is None
