from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from layered import PARAMETER_BYTES, layered_step, timed

from echograph.errors import DeadlockError, SimulationError
from echograph.ir.builder import GraphBuilder
from echograph.ir.exporters.chrome import chrome_trace
from echograph.ir.graph import Axis, JobGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fold import Fold
from echograph.ir.timeline import Lane
from echograph.ir.types import ANY_HOST, CollectiveKind, DType, Duration, OpKind, Source, TensorRole
from echograph.simulator.clusters import load_cluster
from echograph.simulator.host import IssueTimes
from echograph.simulator.limits import Scale
from echograph.simulator.memory.lifetimes import Allocations
from echograph.simulator.result import Result
from echograph.simulator.simulate import simulate

CLUSTER = load_cluster("dgx-h100")
HOST = IssueTimes(op_ps=4_000_000, launch_ps=3_000_000)
US = 1_000_000


def job(gpus: int, layers: int = 6, kernel_ps: int = 200 * US, **options: object) -> JobGraph:
    step = Fold()(layered_step(layers))
    return timed(DataParallel(replicas=gpus, **options)(step), CLUSTER.device, kernel_ps)


def run(gpus: int, **options: object) -> Result:
    return simulate(job(gpus, **options), CLUSTER, HOST)


@pytest.mark.parametrize("gpus", [1, 8, 1024])
@pytest.mark.parametrize("kernel_ps", [US // 10, 50 * US])
def test_the_breakdown_adds_up_to_the_step_exactly(gpus: int, kernel_ps: int) -> None:
    result = run(gpus, kernel_ps=kernel_ps)
    assert result.breakdown.total == result.step_ps > 0


def test_one_gpu_has_no_communication() -> None:
    result = run(1)
    assert result.collectives == {}
    assert result.breakdown.exposed_communication == {"dp": 0}


def test_weak_scaling_is_monotone_and_only_communication_grows() -> None:
    results = [run(gpus, kernel_ps=20 * US) for gpus in (8, 16, 64, 256, 1024)]
    steps = [r.step_ps for r in results]
    assert steps == sorted(steps)
    assert len({r.breakdown.compute for r in results}) == 1
    exposed = [r.breakdown.exposed_communication["dp"] for r in results]
    assert exposed == sorted(exposed)


def test_folded_and_unfolded_graphs_take_the_same_time() -> None:
    step = layered_step(5)
    both = [
        simulate(timed(DataParallel(replicas=64)(graph), CLUSTER.device, 30 * US), CLUSTER, HOST)
        for graph in (step, Fold()(step))
    ]
    assert both[0].step_ps == both[1].step_ps
    assert both[0].breakdown == both[1].breakdown
    assert both[0].memory == both[1].memory


def test_engines_give_the_same_prediction() -> None:
    graph = job(64)
    static, events = (simulate(graph, CLUSTER, HOST, engine=name) for name in ("static", "events"))
    assert np.array_equal(static.timeline.start, events.timeline.start)
    assert static.breakdown == events.breakdown


def test_a_launch_bound_step_takes_what_the_host_takes() -> None:
    result = run(1, kernel_ps=US // 10)
    issued = result.timeline.lane == Lane.HOST
    assert result.step_ps == int(result.timeline.duration[issued].sum()) + US // 10
    assert result.breakdown.host > 0.9 * result.step_ps


def test_all_reduces_overlap_backward_and_end_before_the_optimizer() -> None:
    graph = job(64, bucket_bytes=2 * PARAMETER_BYTES)
    result = simulate(graph, CLUSTER, HOST)
    timeline = result.timeline
    device = timeline.lane == Lane.DEVICE
    kind, phase = graph.ops.kind[timeline.op], graph.ops.phase[timeline.op]
    reduces = np.flatnonzero(device & (kind == OpKind.COLLECTIVE))
    backward_end = timeline.end[device & (phase == 2) & (kind == OpKind.COMPUTE)].max()
    optimizer_start = timeline.start[device & (phase == 4)].min()
    assert timeline.start[reduces].min() < backward_end
    assert timeline.end[reduces].max() <= optimizer_start
    assert np.all(np.diff(timeline.start[reduces]) >= timeline.duration[reduces][:-1])


def test_the_interval_holds_the_step_and_grows_with_the_spread() -> None:
    narrow, wide = (
        simulate(timed(DataParallel(replicas=8)(layered_step(3)), CLUSTER.device, 90 * US, spread), CLUSTER, HOST)
        for spread in (0.02, 0.2)
    )
    for result in (narrow, wide):
        assert result.interval_ps[0] <= result.step_ps <= result.interval_ps[1]
    assert wide.interval_ps[1] - wide.step_ps > 3 * (narrow.interval_ps[1] - narrow.step_ps)


def test_memory_counts_every_persistent_tensor_once() -> None:
    memory = run(8, layers=4).memory
    assert memory is not None
    parameters = 1 + 4 * 2
    assert memory.by_role["parameter"] == parameters * PARAMETER_BYTES
    assert memory.by_role["optimizer_state"] == parameters * PARAMETER_BYTES
    assert memory.fits


def test_an_operation_without_a_duration_is_named() -> None:
    graph = DataParallel(replicas=2)(layered_step(2))
    with pytest.raises(SimulationError, match=r"aten.embedding.*no duration on device 'h100-sxm'"):
        simulate(graph, CLUSTER, HOST)


def test_two_runs_give_the_same_bytes() -> None:
    first, second = (run(256).to_json() for _ in range(2))
    for record in (first, second):
        record["simulation"].pop("wall_s")
    assert json.dumps(first) == json.dumps(second)


def test_the_chrome_trace_holds_every_interval_that_takes_time() -> None:
    graph = job(16)
    result = simulate(graph, CLUSTER, HOST)
    trace = json.loads("".join(chrome_trace(graph, result.timeline)))
    events = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] != "user_annotation"]
    assert len(events) == int((result.timeline.duration > 0).sum())
    ends = max(e["ts"] + e["dur"] for e in events)
    assert ends == pytest.approx(result.step_ps / 1e6)
    modules = {e["args"]["module"] for e in events}
    assert "layers.3.linear1" in modules
    assert not any("{}" in m for m in modules)


def test_a_deadlock_names_the_programs_and_operations_that_wait() -> None:
    builder = GraphBuilder(streams=("compute", "comm"))
    builder.mesh = (Axis(name="pp", size=2),)
    groups = [builder.group(name, axes=("pp",)) for name in ("first", "second")]
    took = (Duration(device="trace", picoseconds=5, source=Source.IMPORTED),)
    ops = [
        builder.collective(
            f"reduce {group}", CollectiveKind.ALL_REDUCE, group=groups[group], bytes_per_rank=8, dtype=DType.FP32,
            stream=1, durations=took,
        )
        for group in (0, 1, 1, 0)
    ]  # fmt: skip
    for stage in (0, 1):
        calls = [(0, ops[2 * stage], ops[2 * stage] + 2, 0, 0)]
        builder.program(calls, role=f"stage {stage}", coordinates={"pp": stage})
    crossed = builder.build(JobGraph)
    with pytest.raises(
        DeadlockError, match=r"stage 0 at operation 0 \(reduce 0\), stage 1 at operation 2 \(reduce 1\)"
    ):
        simulate(crossed, CLUSTER, HOST)


# -- what 64 bits do not hold ----------------------------------------------------------------------------------


def one_operation(picoseconds: int, kind: str = "compute", **columns: int) -> JobGraph:
    builder = GraphBuilder()
    add = builder.compute if kind == "compute" else builder.host
    took = Duration(device=CLUSTER.device, picoseconds=picoseconds, source=Source.MEASURED)
    add("long", durations=(took,), **columns)
    return builder.build(JobGraph)


@pytest.mark.parametrize("kind", ["compute", "host"])
@pytest.mark.parametrize(
    "host", [HOST, replace(HOST, blocking=True), replace(HOST, threads=True)], ids=["eager", "blocking", "threads"]
)
def test_a_duration_that_the_clock_does_not_hold_is_refused(kind: str, host: IssueTimes) -> None:
    with pytest.raises(SimulationError, match="more than 107 days: check its durations"):
        simulate(one_operation(2**63 - 1, kind), CLUSTER, host)


@pytest.mark.parametrize("kind", ["compute", "host"])
def test_a_duration_that_a_scale_makes_too_long_is_refused(kind: str) -> None:
    job = one_operation(10**15, kind)
    with pytest.raises(SimulationError, match="more than 107 days: check its durations"):
        simulate(job, CLUSTER, HOST, scales=[Scale(selector="op:long", factor=1e5)])


def test_durations_beyond_the_precision_of_a_float_stay_exact() -> None:
    threads = IssueTimes(op_ps=0, launch_ps=0, threads=True)
    for kind in ("compute", "host"):
        assert simulate(one_operation(2**61 + 1, kind), CLUSTER, threads).step_ps == 2**61 + 1


def test_tensors_whose_bytes_have_no_sum_are_refused() -> None:
    builder = GraphBuilder()
    tensors = [builder.tensor(f"w{n}", (2**57,), DType.FP32, TensorRole.PARAMETER) for n in range(9)]
    builder.compute("aten.add", inputs=tensors, flops=1)
    with pytest.raises(SimulationError, match="a step's tensors are beyond 2\\^62 bytes together"):
        Allocations(builder.build(JobGraph))


def test_the_host_pays_for_the_first_operation_of_a_cuda_graph_alone() -> None:
    def step(graphed: bool) -> JobGraph:
        builder = GraphBuilder(name="step")
        tensor = builder.tensor("x", (8, 8), DType.FP32, TensorRole.INPUT)
        for number in range(5):
            made = builder.tensor("y", (8, 8), DType.FP32, TensorRole.ACTIVATION)
            durations = [Duration(device=CLUSTER.device, picoseconds=US // 10, source=Source.MEASURED)]
            if graphed and number:
                durations.append(Duration(device=ANY_HOST, picoseconds=0, source=Source.ANALYTICAL))
            builder.compute(
                "aten.relu", inputs=(tensor,), outputs=(made,), bytes_read=256, bytes_written=256,
                durations=durations,
            )  # fmt: skip
            tensor = made
        builder.program([(0, 0, 5, 0, 0)])
        return builder.build(JobGraph)

    assert HOST.issue(step(False)).tolist() == [HOST.op_ps] * 5
    assert HOST.issue(step(True)).tolist() == [HOST.op_ps, 0, 0, 0, 0]
    assert simulate(step(True), CLUSTER, HOST).step_ps == HOST.op_ps + 5 * (US // 10)
