"""A traced job on other ranks or another network is what the trace can tell, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_traces import Event, call, launched, operator, trace, work, write

from echograph.errors import PlanError, UsageError
from echograph.ir.graph import JobGraph
from echograph.profiler.replay import lower
from echograph.profiler.replay.job import CPU, UNNAMED
from echograph.profiler.traces import TraceSet, read_trace, read_traces
from echograph.simulator.limits import parse_scale
from echograph.workflow.replay import replay
from echograph.workflow.system import System

CLUSTER = "dgx-a100"
KERNEL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def reduced(ranks: list[int], nbytes: int = 4_000_000) -> list[Event]:
    """An operator, and an all-reduce of a group of ranks that takes 50 us."""
    said = {
        "Collective name": "allreduce", "In msg nelems": nbytes // 4, "Out msg nelems": nbytes // 4,
        "dtype": "Float", "Process Group Name": "0", "Process Group Ranks": str(ranks), "Group size": len(ranks),
    }  # fmt: skip

    return [operator("aten::mm", 0, 100), call(5, 1, 1), work(KERNEL, 10, 50, 1, stream=20, **said)]


def job_of(folder: Path, events: list[Event], world: int, **header: Any) -> JobGraph:
    """The job of one traced rank, of a job of so many."""
    job = {"backend": "nccl", "rank": 0, "world_size": world}
    path = write(folder / "rank0.json", events, distributedInfo=job, **header)
    return lower(TraceSet({0: read_trace(path)}), "traced").graph


def test_a_job_without_collectives_is_not_that_of_more_ranks(tmp_path: Path) -> None:
    job = job_of(tmp_path, [operator("aten::mm", 0, 100), *launched("gemm", 5, 10, 50, 1)], 1)
    with pytest.raises(
        UsageError, match="--gpus 16: the trace has no collective, so it does not say what 16 ranks"
    ):
        replay(job, system=System(CLUSTER), gpus=16)
    assert replay(job, system=System(CLUSTER)).step_ps == replay(job).step_ps


@pytest.mark.parametrize(("ranks", "world"), [([0], 1), (list(range(8)), 8)])
def test_collectives_of_all_ranks_are_timed_anew_for_more(tmp_path: Path, ranks: list[int], world: int) -> None:
    job = job_of(tmp_path, reduced(ranks), world)
    (measured,) = replay(job).collectives.values()
    assert measured["busy_s"] == pytest.approx(50e-6)
    busy = []
    for gpus in (16, 64):
        result = replay(job, system=System(CLUSTER), gpus=gpus)
        (found,) = result.collectives.values()
        assert (result.gpus, result.job.world_size) == (gpus, gpus) and found["algorithms"] != ["none/none"]
        busy.append(found["busy_s"])
    assert busy[0] < busy[1]


def test_collectives_of_ranks_that_were_not_traced_are_not_timed(tmp_path: Path) -> None:
    whole = job_of(tmp_path / "whole", reduced(list(range(8))), 8)
    with pytest.raises(
        UsageError, match="1 collectives, 'all_reduce' first, are of ranks that were not traced"
    ) as no:
        replay(whole, system=System(CLUSTER))
    assert "say with --gpus how many ranks the job has" in str(no.value)
    some = job_of(tmp_path / "some", reduced([0, 1]), 8)
    for options in ({"system": System(CLUSTER)}, {"system": System(CLUSTER), "gpus": 16}):
        with pytest.raises(UsageError, match=r"import the traces of all ranks$"):
            replay(some, **options)  # type: ignore[arg-type]


def test_collectives_of_ranks_that_were_traced_in_part_are_not_timed_as_if_they_had_no_others(
    tmp_path: Path,
) -> None:
    said = list(range(8))
    for rank in (0, 1):
        job = {"backend": "nccl", "rank": rank, "world_size": 8}
        write(tmp_path / f"rank{rank}.json", reduced(said), rank=None, distributedInfo=job)
    job = lower(read_traces(tmp_path, last_step=True), "traced").graph
    assert replay(job).step_ps == 100_000_000
    for options in ({"system": System(CLUSTER)}, {"system": System(CLUSTER), "gpus": 16}):
        with pytest.raises(
            UsageError, match="2 collectives, 'all_reduce' first, are of ranks that were not traced"
        ):
            replay(job, **options)  # type: ignore[arg-type]


def test_a_group_of_one_rank_of_several_is_not_the_world(tmp_path: Path) -> None:
    job = job_of(tmp_path, reduced([0]), 8)
    with pytest.raises(PlanError, match="collectives of one rank of several, so it is not only data-parallel"):
        replay(job, system=System(CLUSTER), gpus=16)
    assert replay(job, system=System(CLUSTER)).step_ps == replay(job).step_ps


def test_groups_of_some_of_the_traced_ranks_stay_refused(tmp_path: Path) -> None:
    for rank in range(3):
        events = reduced([0, 1]) if rank < 2 else [operator("aten::mm", 0, 10)]
        write(tmp_path / f"rank{rank}.json", events, rank=rank)
    job = lower(read_traces(tmp_path, last_step=True), "traced").graph
    with pytest.raises(PlanError, match="is of some ranks, so it is not only data-parallel"):
        replay(job, system=System(CLUSTER), gpus=6)


def test_an_all_reduce_that_goes_round_nccl_is_communication(tmp_path: Path) -> None:
    kernel = "void vllm::cross_device_reduce_1stage<__half, 2>(vllm::RankData*)"
    events = [operator("aten::mm", 0, 5), *launched(kernel, 5, 10, 50, 1)]
    for rank in (0, 1):
        write(tmp_path / f"rank{rank}.json", events, rank=rank)
    lowered = lower(read_traces(tmp_path, last_step=True), "traced")
    assert any("2 collectives whose other ranks are not in the traces, or not known" in n for n in lowered.notes)
    assert replay(lowered.graph).step_ps == 60_000_000
    assert replay(lowered.graph, scales=[parse_scale("comm=0.5")]).step_ps == 35_000_000
    assert replay(lowered.graph, scales=[parse_scale("compute=0.5")]).step_ps == 60_000_000


def test_other_durations_stand_in_the_place_of_measured_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "rank0.json", [operator("aten::mm", 0, 5), *launched("gemm", 5, 10, 50, 1)])
    trace = read_trace(path)
    row = int(trace.on_device.nonzero()[0][0])
    before, after = (
        replay(lower(TraceSet({0: trace}), "traced", instead=instead).graph)
        for instead in ({}, {0: {row: 20_000_000}})
    )
    assert (before.step_ps, after.step_ps) == (60_000_000, 30_000_000)
    assert after.sources["analytical"] > 0 == before.sources["analytical"]


H100 = {"id": 0, "name": "NVIDIA H100"}


@pytest.mark.parametrize(
    ("header", "name"),
    [({}, UNNAMED), ({"deviceProperties": []}, UNNAMED), ({"deviceProperties": [{"id": 0}]}, UNNAMED),
     ({"deviceProperties": [{"id": 0, "name": " "}]}, UNNAMED), ({"deviceProperties": "x"}, UNNAMED),
     ({"deviceProperties": [H100]}, "NVIDIA H100"),
     ({"deviceProperties": [{"id": 3, "name": "NVIDIA T4"}, H100]}, "NVIDIA H100")],
)  # fmt: skip
def test_a_device_that_ran_is_no_cpu(tmp_path: Path, header: dict[str, Any], name: str) -> None:
    job = job_of(tmp_path, launched("gemm", 5, 10, 50, 1), 1, **header)
    assert replay(job).device == name


def test_a_device_that_did_nothing_is_not_the_device(tmp_path: Path) -> None:
    job = job_of(tmp_path, [operator("aten::mm", 0, 5)], 1, deviceProperties=[H100])
    assert replay(job).device == CPU


def test_a_thread_whose_events_take_no_time_is_replayed(tmp_path: Path) -> None:
    found = trace(
        tmp_path, [operator("aten::a", 1, 5), operator("aten::b", 2, 0, tid=2), operator("aten::c", 9, 1)]
    )
    result = replay(lower(TraceSet({0: found}), "traced").graph)
    assert result.step_ps == int(found.end.max())


def test_a_size_that_one_rank_says_is_that_of_all(tmp_path: Path) -> None:
    """Of a rank whose profile began behind the launch only the kernel is known, without a record."""
    for rank in (0, 1):
        events = reduced([0, 1])
        if rank:
            events = [operator("aten::mm", 0, 100), work(KERNEL, 10, 50, 1, stream=20)]
        groups = [{"pg_name": "0", "ranks": [0, 1]}]
        job = {"backend": "nccl", "rank": rank, "world_size": 2, "pg_config": groups}
        write(tmp_path / f"rank{rank}.json", events, distributedInfo=job)
    graph = lower(read_traces(tmp_path), "traced").graph
    assert replay(graph, system=System(CLUSTER)).step_ps > 0
    assert sorted(graph.ops.nbytes[graph.ops.nbytes > 0].tolist()) == [4_000_000, 4_000_000]
