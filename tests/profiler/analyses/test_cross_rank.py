"""The critical path through all ranks, and the table of collectives, by hand and by what must add up."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from small_traces import Event, call, job, launched, operator, step

from echograph.errors import UsageError
from echograph.profiler.analyses import ANALYSES
from echograph.profiler.replay.job import job_work_items
from echograph.profiler.traces import TraceSet, read_traces

REAL = "traces/dlrm-v100-8-ranks"
KERNEL = "ncclKernel_AllReduce_RING_LL_Sum_float"


def late_rank(late: float, end: float) -> list[Event]:
    """An operator, then an all-reduce of 1 MB, then a kernel."""
    said: dict[str, Any] = {"Collective name": "allreduce", "In msg nelems": 250_000, "Out msg nelems": 250_000}
    said |= {"dtype": "Float", "Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Group size": 2}
    begin = 10 + late
    return [
        step(3, 0, end + 30),
        operator("aten::mm", 0, begin),
        *launched(KERNEL, begin - 4, begin, end - begin, 1, stream=20, **said),
        operator("aten::relu", begin + 10, 10),
        *launched("relu", begin + 12, end + 5, 20, 2, stream=20),
        call(begin + 22, end + 5 - begin, 3, "cudaDeviceSynchronize"),
    ]


def rows(traces: TraceSet, name: str, **options: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ANALYSES[name](traces, **options).records()
    return found


def test_the_path_goes_through_the_rank_that_others_wait_for(tmp_path: Path) -> None:
    traces = job(tmp_path, late_rank(0, 100), late_rank(40, 101))
    path = rows(traces, "cross-rank-critical-path")
    collectives = [row for row in path if row["bound_by"] == "communication"]
    assert [(row["rank"], row["duration(us)"], row["waited_for"]) for row in collectives] == [(1, 51, "")]
    # Before it the late rank's operator, until it launched; behind it the kernel of the rank that ends last.
    assert {row["rank"] for row in path} == {1}
    assert [row["name"] for row in path] == [
        "aten.mm", "launch", "all_reduce", "launch", "aten.relu", "cudaDeviceSynchronize", "gap",
    ]  # fmt: skip
    assert [row["duration(us)"] for row in path] == pytest.approx([46, 4, 51, 5, 20, 2, 3])
    times = [(row["start(us)"], row["duration(us)"]) for row in path]
    assert all(a + d == pytest.approx(b) for (a, d), (b, _) in pairwise(times))
    assert sum(d for _, d in times) == pytest.approx(131)


def test_the_path_crosses_from_rank_to_rank(tmp_path: Path) -> None:
    """The first rank ends last, and had waited for the second: there the path goes on."""
    first = late_rank(0, 100)
    first += launched("tail", 131, 133, 60, 7, stream=20)
    traces = job(tmp_path, first, late_rank(40, 100))
    path = rows(traces, "cross-rank-critical-path")
    ranks = [row["rank"] for row in path]
    assert ranks == sorted(ranks, reverse=True) and set(ranks) == {0, 1}
    (together,) = [row for row in path if row["bound_by"] == "communication"]
    assert (together["rank"], together["waited_for"], together["duration(us)"]) == (0, "rank 1", 50)
    summary = rows(traces, "cross-rank-critical-path-summary")
    assert sum(row["percentage"] for row in summary) == pytest.approx(100)
    assert sum(row["duration(us)"] for row in summary) == pytest.approx(193)


def test_one_step_of_it(tmp_path: Path) -> None:
    traces = job(tmp_path, late_rank(0, 100), [*late_rank(40, 101), operator("aten::mm", 140, 50)])
    path = rows(traces, "cross-rank-critical-path", step=3)
    assert sum(row["duration(us)"] for row in path) == pytest.approx(131)
    with pytest.raises(UsageError, match="step 9: no rank has it; the traces have 3"):
        rows(traces, "cross-rank-critical-path", step=9)


def test_collectives_by_hand(tmp_path: Path) -> None:
    (found,) = rows(job(tmp_path, late_rank(0, 100), late_rank(40, 101)), "collectives")
    assert found == {
        "name": "all_reduce",
        "group": "0",
        "number": 0,
        "ranks": "0,1",
        "bytes": 1_000_000,
        "start(us)": 10,
        "duration(us)": 51,
        "algorithm_bandwidth(GB/s)": pytest.approx(1e6 / 51e-6 / 1e9),
        "bus_bandwidth(GB/s)": pytest.approx(1e6 / 51e-6 / 1e9),
        "skew(us)": 40,
        "last_rank": 1,
        "mean_wait(us)": 20,
    }


def test_ranks_that_ran_it_unequally_often_are_named(tmp_path: Path) -> None:
    twice = late_rank(0, 100) + launched(KERNEL, 130, 131, 5, 9, stream=20)
    table = ANALYSES["collectives"](job(tmp_path, twice, [operator("aten::mm", 0, 10)]))
    assert not table.records()
    assert any("no collective was traced on several ranks" in note for note in table.notes)


def test_a_real_job_of_eight_ranks(measured_data: Path) -> None:
    traces = read_traces(measured_data / REAL)
    path = rows(traces, "cross-rank-critical-path")
    job_ = job_work_items(traces)
    last = max(int(trace.end.max()) for trace in job_.traces.values())
    first = min(int(trace.start.min()) for trace in job_.traces.values())
    assert sum(row["duration(us)"] for row in path) == pytest.approx((last - first) / 1e6)
    times = [(row["start(us)"], row["duration(us)"]) for row in path]
    assert all(a + d == pytest.approx(b) for (a, d), (b, _) in pairwise(times))
    # The path changes rank at collectives alone, and there to the rank that came last.
    for before, after in pairwise(path):
        if before["rank"] != after["rank"]:
            assert after["waited_for"] == f"rank {before['rank']}"
    found = rows(traces, "collectives")
    assert [row["name"] for row in found].count("all_to_all") == 5
    assert all(row["duration(us)"] > 0 and row["skew(us)"] >= row["mean_wait(us)"] for row in found)


def test_communication_counts_from_the_last_rank_and_is_beside_the_fabric(tmp_path: Path) -> None:
    traces = job(tmp_path, late_rank(0, 60), late_rank(30, 60))
    asked: list[tuple[Any, ...]] = []

    def fabric(*what: Any) -> float:
        asked.append(what)
        return 15e-6

    (row,) = rows(traces, "communication", cluster=fabric)
    assert asked == [("all_reduce", 1_000_000, (0, 1))]
    assert (row["name"], row["library"], row["group"], row["group_size"]) == ("all_reduce", "NCCL, RCCL", "0", 2)
    assert (row["bytes"], row["dtype"], row["count"], row["last_rank"]) == (1_000_000, "float", 1, 1)
    assert (row["mean(us)"], row["mean_wait(us)"]) == (20, 15)
    assert row["algorithm_bandwidth(GB/s)"] == row["bus_bandwidth(GB/s)"] == pytest.approx(1e6 / 20e-6 / 1e9)
    assert (row["predicted(us)"], row["excess(us)"]) == pytest.approx((15, 5))


def test_communication_of_one_rank_holds_its_waits(tmp_path: Path) -> None:
    answer = ANALYSES["communication"](job(tmp_path, late_rank(0, 60)))
    (row,) = answer.records()
    assert (row["mean(us)"], row["mean_wait(us)"], row["last_rank"], row["predicted(us)"]) == (
        50,
        None,
        None,
        None,
    )
    assert any("cluster=" in note for note in answer.notes)


def test_a_clusters_name_says_how_long_collectives_should_take(tmp_path: Path) -> None:
    from echograph.simulator.clusters import load_cluster
    from echograph.simulator.collectives import collective_time
    from echograph.workflow.analyze import analyze

    traces = job(tmp_path, late_rank(0, 60), late_rank(30, 60))
    (row,) = analyze(traces, "communication", cluster="dgx-h100").records()
    cluster = load_cluster("dgx-h100")
    expected = collective_time("all_reduce", 1_000_000, cluster.place((0, 1)), cluster).seconds
    assert row["predicted(us)"] == pytest.approx(expected * 1e6)
