"""Traces become jobs that run again as measured, and that follow when part of them is changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from small_traces import Event, call, job, launched, operator, step, trace, work, write

from echograph.errors import InputError, UsageError
from echograph.ir.graph import JobGraph
from echograph.ir.types import CollectiveKind, Copy, OpKind, Phase, Source
from echograph.profiler.replay import lower
from echograph.profiler.traces import TraceSet, read_traces
from echograph.simulator.limits import parse_scale
from echograph.workflow.replay import replay, steps
from echograph.workflow.system import System

SETS = (
    "critical-path-alexnet",
    "critical-path-simple-add",
    "dlrm-v100-8-ranks",
    "mi300x-resnet",
    pytest.param("a100-nccl-args", marks=pytest.mark.slow),
    pytest.param("v100-float-timestamps", marks=pytest.mark.slow),
    pytest.param("v100-ddp-216k-events", marks=pytest.mark.slow),
)
US = 1e-6


def graph_of(traces: TraceSet) -> JobGraph:
    return lower(traces, "traced").graph


def step_us(traces: TraceSet, *changes: str, rank: int = 0, name: str = "trace") -> float:
    """How long a step of a rank takes, by the simulator."""
    result = replay(graph_of(traces), scales=[parse_scale(text) for text in changes])
    found = [s for s in steps(result) if (s.role, s.name) == (f"rank {rank}", name)]
    return found[0].replayed_s / US


def operations(graph: JobGraph, kind: OpKind) -> list[str]:
    return [graph.strings[graph.ops.name[row]] for row in np.flatnonzero(graph.ops.kind == kind).tolist()]


def test_the_only_trace_may_be_of_any_rank(tmp_path: Path) -> None:
    # Its collectives were measured: that their rank has no place in a cluster of one does not matter.
    reduce = launched("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", 12, 20, 30, 1, stream=20)
    events = [operator("aten::mm", 0, 40), *launched("gemm", 5, 8, 9, 2), *reduce]
    graph = graph_of(TraceSet({1: trace(tmp_path, events, rank=1)}))
    assert operations(graph, OpKind.COLLECTIVE)
    assert replay(graph).step_ps == 50 * 1_000_000


@pytest.mark.parametrize("name", SETS)
def test_measured_steps_come_back(measured_data: Path, name: str) -> None:
    traces = read_traces(measured_data / "traces" / name, last_step=True)
    graph = graph_of(traces)
    result = replay(graph)
    found = steps(result)
    assert {s.role for s in found} == {f"rank {rank}" for rank in traces}
    assert max(abs(s.error) for s in found) < 0.001
    spans = {s.role: s.measured_s for s in found if s.name == "trace"}
    for rank, one in traces.items():
        assert spans[f"rank {rank}"] == pytest.approx((one.end.max() - one.start.min()) / 1e12)
    # What a device did is in the graph, all of it: nothing is lost, or counted twice.
    ops = graph.ops
    assert set(ops.duration_source.tolist()) == {Source.MEASURED}
    device = ~np.isin(ops.kind, (OpKind.HOST, OpKind.COLLECTIVE))
    measured = sum(int(t.duration[t.on_device].sum()) for t in traces.values())
    communication = sum(
        int(one.duration[one.on_device & _nccl(traces, rank)].sum()) for rank, one in traces.items()
    )
    unknown = int(ops.duration.values[device[ops.duration.rows]].sum()) - (measured - communication)
    # Communication whose kind no name tells is work like any other.
    assert 0 <= unknown <= communication
    assert int(device.sum()) + operations(graph, OpKind.COLLECTIVE).__len__() == sum(
        int(t.on_device.sum()) for t in traces.values()
    )


def _nccl(traces: TraceSet, rank: int) -> np.ndarray:
    named = np.array(["nccl" in text for text in traces[rank].strings] + [False])
    return named[traces[rank].name]


def synchronized() -> list[Event]:
    """One thread: 10 us of an operator, a kernel of 20, a call that returns 2 us after it, 8 us more."""
    return [
        operator("aten::mm", 0, 10),
        *launched("gemm", 6, 10, 20, 1),
        call(12, 20, 2, "cudaStreamSynchronize"),
        operator("aten::add", 34, 8),
    ]


def test_a_synchronised_thread_by_hand(tmp_path: Path) -> None:
    traces = job(tmp_path, synchronized())
    assert step_us(traces) == pytest.approx(42)
    # The kernel could begin at 6 and began at 10; it ends at 10 + 10, the call 2 later, then gap and operator.
    assert step_us(traces, "compute=0.5") == pytest.approx(20 + 2 + 2 + 8)
    # Not before the call: at 12 the thread is there, 2 for the call, 2 and 8 as before.
    assert step_us(traces, "compute=0") == pytest.approx(12 + 2 + 2 + 8)
    assert step_us(traces, "compute=3") == pytest.approx(10 + 60 + 2 + 2 + 8)
    # Host and launch delay halve: launched at 3, begun at 5.
    assert step_us(traces, "host=0.5") == pytest.approx(3 + 2 + 20 + 1 + 1 + 4)


def test_a_kernel_that_a_busy_stream_holds_up(tmp_path: Path) -> None:
    events = [operator("aten::mm", 0, 8), *launched("a", 1, 4, 30, 1), *launched("b", 3, 35, 10, 2)]
    traces = job(tmp_path, events)
    assert step_us(traces) == pytest.approx(45)
    assert step_us(traces, "compute=0.5") == pytest.approx(4 + 15 + 1 + 5)


def test_streams_that_wait_by_an_event(tmp_path: Path) -> None:
    """With the profiler's own word on what is waited for, and by the times alone."""
    common = [
        operator("aten::mm", 0, 20),
        *launched("a", 1, 4, 30, 1),
        call(5, 1, 3, "cudaEventRecord"),
        call(7, 1, 4, "cudaStreamWaitEvent"),
        *launched("b", 9, 35, 10, 5, stream=20),
    ]
    said = {"wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": 3}
    sync = work("Stream Wait Event", 7, 0, 4, stream=20, cat="cuda_sync", **said)
    for number, events in enumerate(([*common, sync], common)):
        traces = job(tmp_path / str(number), events)
        assert step_us(traces) == pytest.approx(45)
        assert step_us(traces, "compute=2") == pytest.approx(4 + 60 + 1 + 20)


def test_backward_on_a_thread_of_its_own(tmp_path: Path) -> None:
    """It goes on from the forward pass, and the main thread from it; forward operations are linked."""
    forward = {"Sequence number": 4, "Fwd thread id": 0}
    backward = {"Sequence number": 4, "Fwd thread id": 1}
    events = [
        step(1, 0, 100),
        operator("aten::mm", 0, 20, **forward),
        *launched("fwd", 5, 12, 10, 1),
        operator("autograd::engine::evaluate_function: MmBackward0", 25, 30, tid=2, **backward),
        call(30, 1, 2, tid=2),
        work("bwd", 35, 15, 2),
        operator("Optimizer.step#SGD.step", 60, 30) | {"cat": "user_annotation"},
        operator("aten::add_", 62, 20),
        *launched("update", 65, 70, 5, 3),
    ]
    traces = job(tmp_path, events)
    graph = graph_of(traces)
    assert step_us(traces, name="ProfilerStep#1") == pytest.approx(100)
    # The launch, of 1 us, is a call of its own.
    backward_us = step_us(traces, "op:autograd*=0.5", name="ProfilerStep#1")
    assert backward_us == pytest.approx(100 - 29 / 2)
    assert step_us(traces, "host=0.5", name="ProfilerStep#1") == pytest.approx(50)
    kernels = [graph.ops[row] for row in np.flatnonzero(graph.ops.kind == OpKind.COMPUTE).tolist()]
    assert [kernel.phase for kernel in kernels] == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]
    assert getattr(kernels[1], "forward_op") == kernels[0].id  # noqa: B009
    assert [kernel.name for kernel in kernels][::2] == ["aten.mm", "aten.add_"]


def two_ranks() -> tuple[list[Event], list[Event]]:
    """An all-reduce on gloo that takes 40 us once both are there; the second rank comes 30 us later."""

    def rank(late: float) -> list[Event]:
        said = {"Input Dims": [[1000]], "Input type": ["float"]}
        transfer = operator("gloo:all_reduce", 105 + late, 75 - late, tid=9, **said) | {"cat": "user_annotation"}
        return [
            step(0, 0, 200),
            operator("aten::mm", 0, 100 + late),
            operator("c10d::allreduce_", 102 + late, 5),
            transfer,
            operator("aten::add_", 185, 10),
        ]

    return rank(0), rank(30)


def test_ranks_that_meet_on_gloo(tmp_path: Path) -> None:
    traces = job(tmp_path, *two_ranks())
    graph = graph_of(traces)
    (first, second) = (graph.ops[r] for r in np.flatnonzero(graph.ops.kind == OpKind.COLLECTIVE).tolist())
    for found in (first, second):
        assert getattr(found, "collective") == CollectiveKind.ALL_REDUCE  # noqa: B009
        assert getattr(found, "bytes_per_rank") == 4000  # noqa: B009
        assert graph.groups[getattr(found, "group")].ranks == (0, 1)  # noqa: B009
        assert found.durations[0].picoseconds == 45 * 1_000_000
    for rank in (0, 1):
        assert step_us(traces, rank=rank) == pytest.approx(200)
        # Both wait for it: without it the later rank's call, its wakening and the rest remain.
        assert step_us(traces, "comm=0", rank=rank) == pytest.approx(200 - 45, abs=3)
        assert step_us(traces, "comm=2", rank=rank) == pytest.approx(200 + 45)
    # A slower operator on one rank holds up both.
    assert step_us(traces, "op:aten.mm=2", rank=0) == pytest.approx(200 + 130)


def test_more_ranks_over_a_network(tmp_path: Path) -> None:
    graph = graph_of(job(tmp_path, *two_ranks()))
    result = replay(graph, gpus=8, system=System("dgx-a100"))
    assert (result.gpus, result.job.world_size) == (8, 8)
    assert result.sources["measured"] > 0 and result.collectives["world"]["algorithms"]
    found = {s.role: s.replayed_s for s in steps(result) if s.name == "trace"}
    assert len(found) == 2 and max(found.values()) < 200 * US + 1e-3
    with pytest.raises(UsageError, match="say whose network, with --cluster"):
        replay(graph, gpus=4)


def test_sizes_have_to_be_known_to_be_modelled(tmp_path: Path) -> None:
    kernel = "ncclKernel_AllReduce_RING_LL_Sum_float"
    events: Sequence[Event] = [operator("aten::mm", 0, 10), *launched(kernel, 2, 5, 20, 1, stream=20)]
    graph = graph_of(job(tmp_path, list(events), list(events)))
    assert replay(graph).step_ps == 25 * 1_000_000
    with pytest.raises(UsageError, match=r"2 collectives, 'all_reduce' first, have no size in the trace"):
        replay(graph, system=System("dgx-a100"))


def test_clocks_that_contradict_one_another_are_aligned_first(tmp_path: Path) -> None:
    first, second = two_ranks()
    for event in second:
        event["ts"] += 10_000.0
    lowered = lower(job(tmp_path, first, second), "skewed")
    assert any("clocks aligned by 1 collectives" in note for note in lowered.notes)
    result = replay(lowered.graph)
    assert result.step_ps < 300 * 1_000_000
    assert max(abs(s.error) for s in steps(result)) < 0.05


def test_collectives_of_ranks_that_were_not_traced_take_what_they_took(tmp_path: Path) -> None:
    lowered = lower(job(tmp_path, two_ranks()[0]), "alone")
    assert any("whose other ranks are not in the traces" in note for note in lowered.notes)
    result = replay(lowered.graph)
    assert result.step_ps == 200 * 1_000_000


def test_work_whose_launch_is_not_in_the_trace_keeps_its_time(tmp_path: Path) -> None:
    events = [work("early", 3, 10), work("next", 15, 5), operator("aten::mm", 0, 12), *launched("b", 5, 25, 5, 1)]
    traces = job(tmp_path, events)
    assert step_us(traces) == pytest.approx(30)
    assert step_us(traces, "compute=2") == pytest.approx(3 + 20 + 2 + 10 + 5 + 10)


def test_several_devices_of_one_rank_have_streams_of_their_own(tmp_path: Path) -> None:
    second = work("b", 5, 20, 2) | {"pid": 1}
    events = [operator("aten::mm", 0, 10), *launched("a", 1, 4, 20, 1), call(2, 1, 2), second]
    graph = graph_of(job(tmp_path, events))
    assert {"device 0 stream 7", "device 1 stream 7"} <= set(graph.streams)
    assert step_us(job(tmp_path / "again", events)) == pytest.approx(25)


def test_a_trace_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no complete event in it: nothing to replay"):
        lower(TraceSet({0: trace(tmp_path, [])}))


def test_a_launched_graph_of_kernels_on_two_streams(tmp_path: Path) -> None:
    """All of them are launched by one call; the second stream's is held up by nothing else."""
    kernels = [work("a", 8, 10, 1), work("b", 18, 4, 1), work("c", 9, 30, 1, stream=8)]
    events = [operator("aten::mm", 0, 12), call(4, 6, 1, "cudaGraphLaunch"), *kernels]
    traces = job(tmp_path, events)
    assert step_us(traces) == pytest.approx(39)
    assert step_us(traces, "compute=0.5") == pytest.approx(9 + 15)
    assert step_us(traces, "compute=0") == pytest.approx(12)


def test_a_trace_without_a_host(tmp_path: Path) -> None:
    traces = job(tmp_path, [step(1, 0, 50), work("a", 5, 10), work("b", 20, 10)])
    assert step_us(traces, name="ProfilerStep#1") == pytest.approx(50)
    assert step_us(traces, "compute=2") == pytest.approx(max(50, 5 + 20 + 5 + 20))


def test_ranks_of_one_file(tmp_path: Path) -> None:
    """A file that says which of its processes are ranks is a job of several."""
    events = []
    for rank, found in enumerate(two_ranks()):
        events += [one | {"pid": rank} for one in found]
    path = write(tmp_path / "all.json", events, rank=None, processRanks={"0": 0, "1": 1})
    graph = graph_of(read_traces(path, last_step=True))
    assert [program.role for program in graph.programs] == ["rank 0", "rank 1"]
    assert replay(graph).step_ps == 200 * 1_000_000


def test_what_one_thread_shows_at_once_runs_at_once(tmp_path: Path) -> None:
    """Receives of gloo lie on one thread, whatever they overlap."""
    events = [
        operator("aten::mm", 0, 10),
        operator("c10d::recv_", 11, 2),
        operator("c10d::recv_", 14, 2),
        *(operator("gloo:recv", 12 + 3 * n, 50, tid=9) | {"cat": "user_annotation"} for n in range(2)),
        operator("aten::add", 70, 5),
    ]
    lowered = lower(job(tmp_path, events), "messages")
    assert any("2 sends and receives take what they took" in note for note in lowered.notes)
    assert replay(lowered.graph).step_ps == 75 * 1_000_000


def test_groups_of_the_same_ranks_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """The ranks begin two collectives of two groups in two orders, side by side."""

    def rank(names: str) -> list[Event]:
        found = [operator("aten::mm", 0, 10)]
        for number, name in enumerate(names):
            said = {"Collective name": "allreduce", "In msg nelems": 4, "Out msg nelems": 4, "dtype": "Float"}
            said |= {"Process Group Name": name, "Process Group Ranks": "[0, 1]"}
            begin = 2.0 + number
            found += launched("ncclDevKernel", begin, begin + 2, 20 - begin, number + 1, stream=ord(name), **said)
        return found

    graph = graph_of(job(tmp_path, rank("AB"), rank("BA")))
    assert {group.name for group in graph.groups} == {"world (A)", "world (B)"}
    result = replay(graph)
    assert max(abs(found.error) for found in steps(result)) < 1e-9


@pytest.mark.parametrize("said", [2**64, 1e300, math.inf, -4, 0.5])
def test_a_copy_of_bytes_that_nothing_has_is_of_none(said: float, tmp_path: Path) -> None:
    copies = [
        *launched("Memcpy HtoD", 10, 20, 5, 1, cat="gpu_memcpy", bytes=4096),
        *launched("Memcpy HtoD", 30, 40, 5, 2, cat="gpu_memcpy", bytes=said),
    ]
    graph = lower(job(tmp_path, copies)).graph
    assert [op.nbytes for op in graph.ops if isinstance(op, Copy)] == [4096, 0]
