"""The timeline shows what ran, however much of it there is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from html_pages import Page
from hypothesis import given
from hypothesis import strategies as st
from small_traces import job, launched, operator, step, work

from echograph.profiler.analyses.critical_path import critical_graph
from echograph.profiler.page.lanes import Spans, TimelineTrack, coarse
from echograph.profiler.page.report import timeline

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
spans = st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**5)), min_size=1, max_size=400)


def lane_of(times: list[tuple[int, int]]) -> TimelineTrack:
    times = sorted(times)
    start = np.array([t for t, _ in times], np.int64)
    end = start + np.array([d for _, d in times], np.int64)
    index = np.arange(len(times))
    found = Spans(start, end, index, index % 3, np.ones(len(times), np.int64))
    return TimelineTrack(head="rank 0", label="stream 7", spans=found, strings=tuple(map(str, index)))


@given(spans, st.integers(20, 200))
def test_joining_keeps_every_event_and_every_long_one(times: list[tuple[int, int]], most: int) -> None:
    lane = lane_of(times)
    ((found,), grain) = coarse([lane], most + sum(d >= 10**5 // 2 for _, d in times))
    joined = found.spans
    assert joined.many.sum() == len(times)
    assert (joined.start[0], joined.end.max()) == (lane.spans.start[0], lane.spans.end.max())
    assert (np.diff(joined.start) >= 0).all()
    alone = {(s, e) for s, e, n in zip(joined.start, joined.end, joined.many, strict=True) if n == 1}
    long = lane.spans.end - lane.spans.start >= max(grain, 1)
    assert {(s, e) for s, e in zip(lane.spans.start[long], lane.spans.end[long], strict=True)} <= alone
    assert grain == 0 or len(joined.start) < len(times)


@given(spans)
def test_a_joined_span_covers_what_it_stands_for(times: list[tuple[int, int]]) -> None:
    lane = lane_of(times)
    ((found,), _) = coarse([lane], 10 + sum(d >= 10**5 // 2 for _, d in times))
    at = np.repeat(np.arange(len(found.spans.start)), found.spans.many)
    assert (found.spans.start[at] <= lane.spans.start).all()
    assert (found.spans.end[at] >= lane.spans.end).all()


def content(text: str) -> dict[str, Any]:
    page = Page(text)
    (script,) = page.texts("script")
    return dict(json.loads(script))


def test_lanes_hold_streams_threads_and_the_critical_path(tmp_path: Path) -> None:
    events = [
        step(1, 0, 100),
        operator("aten::mm", 5, 20),
        *launched("gemm</script>", 10, 30, 10, 1),
        *launched(NCCL, 20, 40, 30, 2, stream=20),
        work("Memset (Device)", 75, 1, stream=7, cat="gpu_memset"),
    ]
    traces = job(tmp_path, events)
    found = content(timeline(traces, {0: critical_graph(traces[0])}))
    lanes = {(lane["label"], i): lane for i, lane in enumerate(found["lanes"])}
    labels = [label for label, _ in lanes]
    assert labels == ["critical path", "thread 1", "thread 1", "thread 1", "stream 7", "stream 20"]
    shown = {
        label: [
            (found["names"][n], int(s), d, c)
            for n, s, d, c in zip(lane["name"], np.cumsum(lane["start"]), lane["dur"], lane["colour"], strict=True)
        ]
        for (label, _), lane in lanes.items()
        if label.startswith("stream")
    }
    assert shown == {
        "stream 7": [("gemm</script>", 30_000, 10_000, "0"), ("Memset (Device)", 75_000, 1_000, "2")],
        "stream 20": [(NCCL, 40_000, 30_000, "1")],
    }
    assert found["span"] == 100_000
    on_path = content(timeline(traces, {0: critical_graph(traces[0])}))["lanes"][0]
    graph = critical_graph(traces[0])
    assert sum(on_path["dur"]) >= graph.path().length // 1000


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    traces = job(tmp_path, *([work("k", 0, 1)] for _ in range(20)))
    text = timeline(traces, {})
    assert "Ranks 0 to 15 of 20." in text
    assert {lane["head"] for lane in content(text)["lanes"]} == {f"rank {n}" for n in range(16)}
    assert timeline(job(tmp_path / "none", []), {}) == ""
