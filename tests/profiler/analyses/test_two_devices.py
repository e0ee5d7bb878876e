"""Streams of two devices in one trace have the same numbers, and nothing to do with each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_traces import Event, call, job, launched, operator, step, work

from echograph.profiler.analyses import ANALYSES
from echograph.profiler.page.report import lanes_of
from echograph.profiler.replay import lower
from echograph.profiler.traces import TraceSet
from echograph.workflow.replay import replay

US = 1_000_000
NAMED = (0, 1)
TEXT = ("GPU A", "GPU B")


def on(device: int | str, events: list[Event]) -> list[Event]:
    """The same with the work on another device."""
    return [event if event["cat"] == "cuda_runtime" else event | {"pid": device} for event in events]


def one_device(device: int | str, late: float, number: int) -> list[Event]:
    """A kernel of 40 us, a gap of 10, a copy of 20 at 2 GB/s; all on stream 7."""
    return on(
        device,
        [
            *launched("gemm", late + 1, late + 10, 40, number),
            *launched(
                "Memcpy DtoH (Device -> Pinned)", late + 5, late + 60, 20, number + 1, cat="gpu_memcpy",
                bytes=40_000, **{"memory bandwidth (GB/s)": 2.0},
            ),
        ],
    )  # fmt: skip


def traces(tmp_path: Path, devices: tuple[int | str, int | str] = NAMED) -> TraceSet:
    """The second device does the same 20 us later: its work lies in the gaps of the first."""
    both = [*one_device(devices[0], 0, 1), *one_device(devices[1], 20, 11)]
    return job(tmp_path, [operator("aten::mm", 0, 30), *both])


def of_device(name: str, found: TraceSet, device: int | str, **options: Any) -> list[dict[str, Any]]:
    return [row for row in ANALYSES[name](found, **options).records() if row["device"] == device]


@pytest.mark.parametrize("devices", [NAMED, TEXT])
def test_idle_time_is_of_the_stream_of_a_device(tmp_path: Path, devices: tuple[int | str, int | str]) -> None:
    found = traces(tmp_path, devices)
    for device in devices:
        rows = of_device("idle", found, device)
        assert {row["stream"] for row in rows} == {7}
        assert sum(row["idle_time"] for row in rows) == 10
        (gap,) = [row for row in of_device("idle-intervals", found, device) if row["count"]]
        assert (gap["idle_category"], gap["mean"]) == ("kernel_wait", 10)


def test_queues_are_of_the_stream_of_a_device(tmp_path: Path) -> None:
    found = traces(tmp_path)
    rows = ANALYSES["queue-length"](found).records()
    assert max(row["queue_length"] for row in rows) == 2 and min(row["queue_length"] for row in rows) == 0
    for device in NAMED:
        assert [row["queue_length"] for row in rows if row["pid"] == device] == [1, 2, 1, 0]
        (summary,) = of_device("queue-length-summary", found, device)
        assert (summary["count"], summary["max"]) == (4, 2)
        (full,) = of_device("queue-full", found, device, max_queue_length=2)
        assert full["duration_at_max_queue_length"] == 5
    counters = ANALYSES["counters"](found, which="queue-length").records()
    assert [row["value"] for row in counters if row["pid"] == 1] == [1, 2, 1, 0]


def test_bandwidths_of_two_devices_do_not_add_up(tmp_path: Path) -> None:
    events = [work("Memset (Device)", 5, 10, cat="gpu_memset", **{"memory bandwidth (GB/s)": 3.0})]
    found = job(tmp_path, [*events, *on(1, events)])
    assert [row["memory_bw_gbps"] for row in ANALYSES["memory-bandwidth"](found).records()] == [3, 0, 3, 0]
    assert [row["max"] for row in ANALYSES["memory-bandwidth-summary"](found).records()] == [3, 3]


def test_the_critical_path_does_not_go_from_one_device_to_the_other(tmp_path: Path) -> None:
    # Both are launched at once; the second device is busy longer, and nothing of the first is before it.
    events = [*launched("short", 1, 10, 20, 1), *on(1, launched("long", 3, 12, 100, 2))]
    rows = ANALYSES["critical-path"](job(tmp_path, events)).records()
    assert [row["s_name"] for row in rows if row["stream"] == 7] == ["long"]
    assert not [row for row in rows if row["type"] == "critical_path_kernel_kernel_delay"]


def test_a_synchronised_device_is_not_waited_for_by_its_neighbour(tmp_path: Path) -> None:
    # The other device's kernel ends before the call does, and after all that the call waited for.
    sync = work("Context Sync", 20, 15, 9, cat="cuda_sync", stream=-1)
    events = [
        *launched("short", 1, 10, 20, 1),
        *on(1, launched("long", 3, 12, 22, 2)),
        call(15, 20, 9, "cudaDeviceSynchronize"),
        sync,
        operator("aten::after", 36, 5),
    ]
    found = job(tmp_path, events)
    rows = ANALYSES["critical-path"](found).records()
    assert [row["s_name"] for row in rows if row["stream"] == 7] == ["short"]
    across = ANALYSES["cross-rank-critical-path"](found).records()
    assert [row["name"] for row in across if row["line"].startswith("device")] == ["launch", "short"]


def test_streams_of_two_devices_are_replayed_apart(tmp_path: Path) -> None:
    found = traces(tmp_path)
    graph = lower(found, "two").graph
    assert {"device 0 stream 7", "device 1 stream 7"} <= set(graph.streams)
    result = replay(graph)
    assert result.step_ps == int(found[0].end.max())


def test_stragglers_compare_the_same_device_of_each_rank(tmp_path: Path) -> None:
    def rank(late: float, first: int) -> list[Event]:
        reduce = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
        # The second device comes to its collective at the same time on both ranks, the first does not.
        return [
            step(0, 0, 100),
            *on(first, launched(reduce, 5, 10 + late, 60 - late, 1)),
            *on(first + 1, launched(reduce, 6, 30, 40, 2)),
        ]

    rows = ANALYSES["stragglers"](job(tmp_path, rank(0, 0), rank(30, 2))).records()
    assert [(row["rank"], row["count"], row["mean_delay(us)"]) for row in rows] == [(1, 1, 30), (0, 1, 0)]


def test_a_page_shows_the_streams_of_two_devices_apart(tmp_path: Path) -> None:
    (one,) = traces(tmp_path).values()
    labels = [lane.label for lane in lanes_of(0, one, None, 1)]
    assert [label for label in labels if "stream" in label] == ["device 0, stream 7", "device 1, stream 7"]
