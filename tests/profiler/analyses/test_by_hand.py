"""Analyses of traces that are small enough to compute the answer by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_traces import Event, call, job, launched, operator, step, work

from echograph.errors import UsageError
from echograph.profiler.analyses import ANALYSES
from echograph.profiler.analyses.work import KernelKind, kind_of_name

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def rows(name: str, folder: Path, *ranks: list[Event], **options: Any) -> list[dict[str, Any]]:
    return list(ANALYSES[name](job(folder, *ranks), **options).records())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (NCCL, KernelKind.COMMUNICATION),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", KernelKind.COMMUNICATION),
        ("void ncclKernel_Foo()", KernelKind.COMMUNICATION),
        ("void vllm::cross_device_reduce_1stage<half, 8>(...)", KernelKind.COMMUNICATION),
        ("Memcpy HtoD (Pinned -> Device)", KernelKind.MEMORY),
        ("hipMemcpyAsync", KernelKind.MEMORY),
        ("Memset (Device)", KernelKind.MEMORY),
        ("Event Sync", KernelKind.OTHER),
        ("Stream Wait Event", KernelKind.OTHER),
        ("volta_sgemm_128x32_nt", KernelKind.COMPUTATION),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>(...)", KernelKind.COMPUTATION),
        ("hipblaslt_gemm", KernelKind.COMPUTATION),
    ],
)
def test_what_a_kernel_is_for(name: str, kind: KernelKind) -> None:
    assert kind_of_name(name) is kind


def test_temporal_breakdown(tmp_path: Path) -> None:
    events = [
        work("gemm", 100, 10),
        work(NCCL, 105, 15, stream=20),
        work("Memcpy HtoD (Pinned -> Device)", 130, 5, cat="gpu_memcpy"),
        work("gemm", 132, 8, stream=9),
        work("Event Sync", 0, 500, stream=7, cat="cuda_sync"),
        operator("aten::mm", 0, 1000),
    ]
    (row,) = rows("temporal-breakdown", tmp_path, events)
    assert row == {
        "rank": 0,
        "idle_time(us)": 10,
        "compute_time(us)": 18,
        "non_compute_time(us)": 12,
        "kernel_time(us)": 40,
        "idle_time_pctg": 25,
        "compute_time_pctg": 45,
        "non_compute_time_pctg": 30,
    }


def test_kernel_types_and_overlap(tmp_path: Path) -> None:
    first = [
        work("gemm", 0, 10),
        work(NCCL, 6, 10, stream=20),
        work("Memset (Device)", 12, 2, cat="gpu_memset", stream=8),
    ]
    second = [work("gemm", 0, 8)]
    found = {
        row["kernel_type"]: (row["sum"], row["percentage"])
        for row in rows("kernel-types", tmp_path, first, second)
    }
    assert found == {
        "COMPUTATION": (14, 58.3),
        "COMMUNICATION": (4, 16.7),
        "COMPUTATION overlapping COMMUNICATION": (4, 16.7),
        "COMMUNICATION overlapping MEMORY": (2, 8.3),
    }
    overlap = rows("overlap", tmp_path, first, second)
    assert [(row["comp_comm_overlap_pctg"], row["overlapped_time(us)"]) for row in overlap] == [(40, 4), (None, 0)]


def test_kernels_and_their_durations(tmp_path: Path) -> None:
    events = [work("a", 0, 10), work("a", 20, 30), work("b", 60, 5), work("c", 70, 7), work(NCCL, 80, 1)]
    found = rows("kernels", tmp_path, events)
    assert [row["name"] for row in found] == ["a", "c", "b", NCCL]
    assert list(found[0].values()) == [
        "a",
        40,
        30,
        10,
        pytest.approx(14.142135623730951),
        20,
        "COMPUTATION",
        0,
        2,
    ]
    few = rows("kernels", tmp_path, events, top=1)
    assert [(row["name"], row["sum (us)"], row["count"], row["mean (us)"]) for row in few] == [
        ("a", 40, 2, 20),
        ("others", 12, 2, 6),
        (NCCL, 1, 1, 1),
    ]
    (first, *_) = rows("kernel-durations", tmp_path, events)
    assert (first["name"], first["count"], first["50% (us)"], first["25% (us)"]) == ("a", 2, 20, 15)


def test_idle_time_has_three_causes(tmp_path: Path) -> None:
    events = [
        *launched("first", 0, 10, 10, 1),
        *launched("soon", 5, 25, 5, 2),
        *launched("late host", 40, 50, 5, 3),
        *launched("another stream", 41, 100, 5, 4),
    ]
    found = {
        row["idle_category"]: (row["idle_time"], row["idle_time_ratio"]) for row in rows("idle", tmp_path, events)
    }
    assert found == {"host_wait": (20, 0.29), "kernel_wait": (5, 0.07), "other": (45, 0.64)}
    strict = rows("idle", tmp_path, events, kernel_delay_us=5)
    assert {row["idle_category"]: row["idle_time"] for row in strict} == {"host_wait": 20, "other": 50}
    counts = {
        row["idle_category"]: (row["count"], row["mean"]) for row in rows("idle-intervals", tmp_path, events)
    }
    assert counts == {"host_wait": (1, 20), "kernel_wait": (1, 5), "other": (1, 45)}


def test_kernels_that_overlap_leave_no_negative_gap(tmp_path: Path) -> None:
    events = [work("long", 0, 100), work("within", 10, 5), work("next", 110, 5)]
    found = {row["idle_category"]: row["idle_time"] for row in rows("idle", tmp_path, events)}
    assert found == {"kernel_wait": 10, "other": 0}


def test_a_kernel_launched_before_the_profile_is_no_wait_for_the_host(tmp_path: Path) -> None:
    events = [operator("late", 500, 1), work("a", 0, 10, 1), work("b", 12, 10, 2)]
    found = {row["idle_category"]: row["idle_time"] for row in rows("idle", tmp_path, events)}
    assert found == {"kernel_wait": 2, "other": 0}


def test_launches(tmp_path: Path) -> None:
    events = [
        call(0, 4, 1),
        work("a", 10, 2, 1),
        call(5, 80, 2, "hipLaunchKernel"),
        work("b", 20, 50, 2, stream=0),
        call(90, 3, 3, "cudaGraphLaunch"),
        work("g1", 300, 1, 3),
        work("g2", 302, 1, 3),
        call(95, 1, 4, "cudaMemcpyAsync"),
        work("Memcpy HtoD (Pinned -> Device)", 99, 1, 4, cat="gpu_memcpy"),
        call(97, 1, 5),
    ]
    found = rows("launches", tmp_path, events)
    assert [
        (r["correlation"], r["cpu_duration"], r["gpu_duration"], r["launch_delay"], r["name"]) for r in found
    ] == [
        (1, 4, 2, 6, "a"),
        (2, 80, 50, 0, "b"),
        (3, 3, 1, 207, "g1"),
        (3, 3, 1, 209, "g2"),
        (4, 1, 1, 3, "Memcpy HtoD (Pinned -> Device)"),
    ]
    assert len(rows("launches", tmp_path, events, memory=False)) == 4
    summary = {row["call"]: list(row.values())[2:] for row in rows("launch-summary", tmp_path, events)}
    assert summary == {
        "cudaLaunchKernel": [1, 1, 0, 0, 4],
        "hipLaunchKernel": [1, 0, 1, 0, 80],
        "cudaGraphLaunch": [2, 2, 0, 2, 3],
        "cudaMemcpyAsync": [1, 0, 0, 0, 1],
    }


QUEUED = [
    *launched("a", 0, 10, 5, 1),
    *launched("b", 2, 15, 5, 2),
    *launched("c", 4, 20, 5, 3, stream=9),
    *launched("d", 6, 40, 5, 4),
]


def test_queue_length(tmp_path: Path) -> None:
    found = rows("queue-length", tmp_path, QUEUED)
    assert [(r["ts"], r["stream"], r["queue_length"]) for r in found] == [
        (0, 7, 1),
        (2, 7, 2),
        (4, 9, 1),
        (6, 7, 3),
        (10, 7, 2),
        (15, 7, 1),
        (20, 9, 0),
        (40, 7, 0),
    ]
    summary = {
        row["stream"]: (row["count"], row["mean"], row["max"])
        for row in rows("queue-length-summary", tmp_path, QUEUED)
    }
    assert summary == {7: (6, 1.5, 3), 9: (2, 0.5, 1)}


def test_time_on_a_full_queue_of_every_stream(tmp_path: Path) -> None:
    full = {
        r["stream"]: r["duration_at_max_queue_length"]
        for r in rows("queue-full", tmp_path, QUEUED, max_queue_length=1)
    }
    assert full == {7: 40, 9: 16}
    (row,) = rows("queue-full", tmp_path, QUEUED, max_queue_length=2)
    assert (row["stream"], row["duration_at_max_queue_length"]) == (7, 13)
    assert row["relative_duration_at_max_queue_length"] == 13 / 40
    assert rows("queue-full", tmp_path, QUEUED) == []


def test_memory_bandwidth(tmp_path: Path) -> None:
    def copy(ts: float, dur: float, gbps: float | None, stream: int = 7) -> Event:
        said = {} if gbps is None else {"memory bandwidth (GB/s)": gbps}
        return work("Memcpy HtoD (Pinned -> Device)", ts, dur, stream=stream, cat="gpu_memcpy", **said)

    events = [copy(0, 10, 4.0), copy(5, 10, 0.1, stream=8), copy(15, 5, 3.0), copy(30, 0, 8.0), copy(40, 9, None)]
    found = [(row["ts"], row["name"], row["memory_bw_gbps"]) for row in rows("memory-bandwidth", tmp_path, events)]
    assert found == [
        (0, "Memcpy HtoD", 4.0),
        (5, "Memcpy HtoD", pytest.approx(4.1)),
        (10, "Memcpy HtoD", pytest.approx(0.1)),
        (15, "Memcpy HtoD", 0),
        (15, "Memcpy HtoD", pytest.approx(3.0)),
        (20, "Memcpy HtoD", 0),
        (30, "Memcpy HtoD", pytest.approx(8.0)),
        (31, "Memcpy HtoD", 0),
    ]
    (row,) = rows("memory-bandwidth-summary", tmp_path, events)
    assert (row["count"], row["max"]) == (5, pytest.approx(8.0))


def linear(at: float, correlation: int, *kernels: str) -> list[Event]:
    """`aten::linear` that calls `aten::addmm`, which launches some kernels."""
    found = [operator("aten::linear", at, 20), operator("aten::addmm", at + 1, 18)]
    for number, kernel in enumerate(kernels):
        found += launched(kernel, at + 2 + 2 * number, at + 30 + 5 * number, 4, correlation + number)
    return found


def test_kernel_sequences(tmp_path: Path) -> None:
    events = [*linear(0, 10, "gemm", "bias"), *linear(100, 20, "gemm", "bias"), *linear(200, 30, "splitk")]
    found = rows("kernel-sequences", tmp_path, events, operator="aten::linear", min_length=1)
    assert [list(row.values()) for row in found] == [
        ["aten::linear|gemm|bias", 2, 16, 40, 0],
        ["aten::linear|splitk", 1, 4, 20, 0],
    ]
    assert len(rows("kernel-sequences", tmp_path, events, operator="aten::", min_length=2)) == 1
    with pytest.raises(UsageError, match="name the operator"):
        rows("kernel-sequences", tmp_path, events)
    with pytest.raises(UsageError, match="no event's name contains 'aten::conv'"):
        rows("kernel-sequences", tmp_path, events, operator="aten::conv")


def test_operators_with_delays(tmp_path: Path) -> None:
    events = [
        *linear(0, 10, "gemm", "bias"),
        *linear(100, 20, "gemm", "bias"),
        *launched("alone", 300, 310, 1, 40),
    ]
    (row,) = rows("operators", tmp_path, events)
    assert row == {
        "rank": 0,
        "aten_op_name": "aten::addmm",
        "kernel_sequence": "gemm -> bias",
        "occurrence_count": 2,
        "avg_aten_op_launch_delay": 1,
        "avg_runtime_delay": 28,
    }


def test_operators_of_another_thread_do_not_take_a_launch(tmp_path: Path) -> None:
    # HTA gives a launch to the operator that started last on any thread.
    events = [
        operator("aten::mm", 0, 100),
        operator("aten::other", 5, 50, tid=2),
        *launched("gemm", 10, 200, 1, 1),
    ]
    assert [row["aten_op_name"] for row in rows("operators", tmp_path, events)] == ["aten::mm"]


def annotation(name: str, ts: float, dur: float, side: str = "gpu_user_annotation") -> Event:
    event = work(name, ts, dur, cat=side)
    del event["args"]["stream"]
    return event


def test_annotations(tmp_path: Path) -> None:
    spans = [annotation("fwd", 0, 10), annotation("fwd", 50, 20), annotation("opt[1].x", 90, 5)]
    events = [*spans, annotation("host", 0, 3, "user_annotation")]
    found = rows("annotations", tmp_path, events)
    assert [(row["name"], row["sum (us)"], row["mean (us)"], row["count"]) for row in found] == [
        ("fwd", 30, 15, 2),
        ("opt[1].x", 5, 5, 1),
    ]
    assert [row["name"] for row in rows("annotations", tmp_path, events, side="host")] == ["host"]
    assert [row["name"] for row in rows("annotations", tmp_path, events, pattern=r"opt\[\d\]")] == ["opt[1].x"]
    with pytest.raises(UsageError, match="side is 'device' or 'host'"):
        rows("annotations", tmp_path, events, side="both")
    with pytest.raises(UsageError, match="no regular expression"):
        rows("annotations", tmp_path, events, pattern="(")


def test_a_kernel_is_of_the_shortest_annotation_that_it_meets(tmp_path: Path) -> None:
    kernels = [work("a", 5, 2), work("b", 20, 2), work("c", 60, 2), work("d", 21, 2, stream=9)]
    events = [annotation("outer", 0, 50), annotation("inner", 18, 3), *kernels]
    found = {row["name"]: row["user_annotation"] for row in rows("annotated-kernels", tmp_path, events)}
    assert found == {"a": "outer", "b": "inner", "c": "", "d": ""}


def test_steps(tmp_path: Path) -> None:
    events = [step(7, 0, 50), step(8, 50, 50), *launched("a", 40, 60, 10, 1), *launched("b", 45, 75, 10, 2)]
    found = [list(row.values()) for row in rows("steps", tmp_path, events)]
    assert found == [[0, 7, 0, 50, 25, 2], [0, 8, 50, 50, None, 0]]


def late_ranks(name: str) -> list[list[Event]]:
    """Three ranks, two steps: rank 1 always comes last to a collective that ends everywhere at once."""
    starts = ((10, 60, 30), (110, 160, 120))
    found = []
    for rank in range(3):
        events = [step(0, 0, 100), step(1, 100, 100)]
        for number, row in enumerate(starts):
            start = row[rank]
            events += launched(name, 100 * number + 5, start, 90 + 100 * number - start, number + 1, stream=20)
        found.append(events)
    return found


@pytest.mark.parametrize("name", [NCCL, "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)"])
def test_stragglers_with_old_and_new_names_of_collectives(tmp_path: Path, name: str) -> None:
    # HTA knows the old names alone, and fails on the new ones.
    first, second = rows("stragglers", tmp_path, *late_ranks(name))
    assert (first["rank"], first["count"], first["mean_delay(us)"], first["steps"]) == (1, 2, 50, 2)
    assert (second["rank"], second["count"], second["mean_delay(us)"]) == (2, 2, 15)
    (only,) = rows("stragglers", tmp_path, *late_ranks(name), candidates=1)
    assert (only["rank"], only["count"]) == (1, 2)


def test_stragglers_need_ranks_steps_and_collectives(tmp_path: Path) -> None:
    for ranks, note in (
        ([late_ranks(NCCL)[0]], "two ranks"),
        ([[work("k", 0, 1)], [work("k", 0, 1)]], "no profiler steps"),
        ([[step(1, 0, 9), work("k", 0, 1)]] * 2, "no collective"),
    ):
        table = ANALYSES["stragglers"](job(tmp_path, *ranks))
        assert len(table) == 0
        assert note in table.notes[-1]
    with pytest.raises(UsageError, match="at least one"):
        rows("stragglers", tmp_path, *late_ranks(NCCL), candidates=0)


# What these answer is of the host too.
OF_HOST = {
    "call-stacks", "trace-diff", "critical-path", "critical-path-summary", "cross-rank-critical-path",
    "cross-rank-critical-path-summary", "phases",
}  # fmt: skip
OF_FILES = {"execution-trace", "memory-categories"}


@pytest.mark.parametrize("name", sorted(set(ANALYSES) - OF_HOST - OF_FILES))
def test_a_trace_without_device_work_gets_an_empty_answer(tmp_path: Path, name: str) -> None:
    options = {"operator": "aten"} if name == "kernel-sequences" else {}
    table = ANALYSES[name](job(tmp_path, [operator("aten::mm", 0, 1)], [operator("aten::mm", 0, 1)]), **options)
    assert len(table) == 0
    assert table.csv().count("\n") == 1
    assert len(table.columns) > 2


@pytest.mark.parametrize("name", ["temporal-breakdown", "idle", "kernels", "overlap", "memory-bandwidth"])
def test_what_a_rank_lacks_is_said_and_the_others_are_answered(tmp_path: Path, name: str) -> None:
    table = ANALYSES[name](job(tmp_path, [operator("a", 0, 1)], [work("k", 0, 1), work("k", 5, 1)]))
    assert any(note == "rank 0: nothing ran on a device while it was profiled" for note in table.notes)
    assert {row["rank"] for row in table.records()} <= {1}
