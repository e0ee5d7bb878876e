"""Small jobs whose interval, limits, issue times and meetings are worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import numpy as np
import pytest

from echograph.errors import SimulationError
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import Axis, JobGraph
from echograph.ir.types import (
    Attention,
    CollectiveKind,
    Convolution,
    DType,
    Duration,
    Gemm,
    MultiTensor,
    Payload,
    Phase,
    Source,
    TensorRole,
)
from echograph.simulator import engine as engines
from echograph.simulator.clusters import load_cluster
from echograph.simulator.collectives import CollectiveEstimate, CollectiveName
from echograph.simulator.durations import durations
from echograph.simulator.groups import rendezvous_key
from echograph.simulator.host import IssueTimes
from echograph.simulator.limits import OTHER_RANKS, PRODUCTS_CORRELATION, averaged, families, largest_first
from echograph.simulator.result import Result
from echograph.simulator.simulate import simulate

CLUSTER = load_cluster("dgx-h100")
IDLE = IssueTimes(op_ps=0, launch_ps=0)
GEMM, CONVOLUTION = Gemm(), Convolution(stride=(1,), padding=(0,), dilation=(1,))
ATTENTION = Attention(heads=1, kv_heads=1, head_dim=16)


def took(picoseconds: int, spread: float = 0.0, device: str = CLUSTER.device) -> Duration:
    return Duration(device=device, picoseconds=picoseconds, source=Source.FITTED, spread=spread)


def chain(kernels: Sequence[tuple[Any, int, float]], times: int = 1) -> JobGraph:
    """Kernels one after the other: attributes, picoseconds, spread; all of them so often."""
    builder = GraphBuilder()
    for attributes, picoseconds, spread in kernels:
        builder.compute(
            "kernel", phase=Phase.FORWARD, flops=1, attributes=attributes, durations=(took(picoseconds, spread),)
        )
    builder.program([(0, 0, len(kernels), 0, n) for n in range(times)])
    return builder.build(JobGraph)


MIXED = [(GEMM, 1000, 0.1), (GEMM, 3000, 0.1), (None, 600, 0.5), (ATTENTION, 800, 0.25), (CONVOLUTION, 50, 0.0)]


@pytest.mark.parametrize("times", [1, 8])
@pytest.mark.parametrize("most", [0, engines.MAX_COLUMN_TASKS], ids=["along the path", "by further runs"])
@pytest.mark.parametrize("engine", ["auto", "static"])
def test_errors_of_a_family_move_together_and_families_apart(
    monkeypatch: pytest.MonkeyPatch, times: int, most: int, engine: str
) -> None:
    monkeypatch.setattr(engines, "MAX_COLUMN_TASKS", most)
    result = simulate(chain(MIXED, times), CLUSTER, IDLE, engine=engine)
    # Two products of one fit, unlike each other.
    products = 400 * averaged(np.array([1000, 3000]), np.array([times, times]))
    around = round(1.645 * times * sqrt(products**2 + 300**2 + 200**2))
    assert result.step_ps == 5450 * times
    # Durations are whole picoseconds, each of them.
    assert result.interval_ps == pytest.approx((5450 * times - around, 5450 * times + around), abs=times)


@pytest.mark.parametrize("copies", [1, 5])
def test_errors_of_unlike_products_cancel_in_part(copies: int) -> None:
    """One product errs as its fit does, however often it runs; unlike ones share a part of their errors."""
    once = np.ones(copies, np.int64)
    assert averaged(np.full(copies, 700), once) == 1.0
    unlike = np.arange(100, 10_100, 100) + 1_000_000_000
    alike = averaged(np.repeat(unlike, copies), np.ones(100 * copies, np.int64))
    assert alike == averaged(unlike, np.full(100, copies))  # written out or folded
    assert alike == pytest.approx(sqrt(PRODUCTS_CORRELATION + (1 - PRODUCTS_CORRELATION) / 100), rel=1e-4)
    part = sqrt(PRODUCTS_CORRELATION + (1 - PRODUCTS_CORRELATION) * (0.25**2 + 0.75**2))
    assert averaged(np.array([1000, 3000]), np.array([1, 1])) == pytest.approx(part)
    assert averaged(np.array([1000, 1500]), np.array([1, 2])) == pytest.approx(part)


@pytest.mark.parametrize("source", [Source.FITTED, Source.ANALYTICAL])
def test_what_no_fit_stands_behind_is_as_doubtful_together_as_alone(source: Source) -> None:
    builder = GraphBuilder()
    for picoseconds in (1000, 3000):
        duration = Duration(device=CLUSTER.device, picoseconds=picoseconds, source=source, spread=0.1)
        builder.compute("kernel", phase=Phase.FORWARD, flops=1, attributes=GEMM, durations=(duration,))
    builder.program([(0, 0, 2, 0, 0)])
    left = averaged(np.array([1000, 3000]), np.array([1, 1])) if source is Source.FITTED else 1.0
    around = round(1.645 * 400 * left)
    found = simulate(builder.build(JobGraph), CLUSTER, IDLE).interval_ps
    assert found == pytest.approx((4000 - around, 4000 + around), abs=1)


@pytest.mark.parametrize("more", [-1, 0])
def test_steps_that_are_too_long_to_run_again_are_told_along_their_path(
    monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    """A kernel beside the path may come to bind the step; the path alone does not show it."""
    builder = GraphBuilder(streams=("compute", "beside"))
    for stream, picoseconds, spread in ((0, 1000, 0.0), (1, 900, 0.5)):
        builder.compute(
            "kernel", phase=Phase.FORWARD, flops=1, stream=stream, attributes=GEMM if stream else None,
            durations=(took(picoseconds, spread),),
        )  # fmt: skip
    builder.program([(0, 0, 2, 0, 0)])
    # Two tasks an operation, the host's and the device's; the step itself, and one family longer and shorter.
    monkeypatch.setattr(engines, "MAX_COLUMN_TASKS", 4 * 3 + more)
    found = simulate(builder.build(JobGraph), CLUSTER, IDLE, engine="static").interval_ps
    assert found == ((1000, 1000) if more else (1000, 1000 + round(1.645 * 350)))


@pytest.mark.parametrize("times", [1, 8])
def test_what_others_hide_moves_nothing(times: int) -> None:
    """Kernels beside a longer one, not sure by a half, are in no bound, be they run in pieces or task by task."""
    builder = GraphBuilder(streams=("compute", "beside"))
    for stream, picoseconds, spread in ((0, 1000, 0.0), (1, 600, 0.5), (1, 0, 0.9)):
        builder.compute(
            "kernel", phase=Phase.FORWARD, flops=1, stream=stream, attributes=GEMM if stream else None,
            durations=(took(picoseconds, spread),),
        )  # fmt: skip
    builder.program([(0, 0, 3, 0, n) for n in range(times)])
    assert simulate(builder.build(JobGraph), CLUSTER, IDLE).interval_ps == (1000 * times, 1000 * times)


def test_the_interval_begins_at_nothing() -> None:
    assert simulate(chain([(GEMM, 1000, 0.9)]), CLUSTER, IDLE).interval_ps == (0, 1000 + round(1.645 * 900))


def test_a_host_that_is_slower_than_thought_binds_the_step_and_a_faster_one_changes_nothing() -> None:
    kernels = [(GEMM, 1000, 0.0)] * 4
    busy = simulate(chain(kernels), CLUSTER, IssueTimes(op_ps=900, launch_ps=100, spread=0.5))
    # One issue, then the device is busy to the end; half as long again, every issue is waited for.
    assert busy.step_ps == 900 + 4 * 1000
    slower, faster = 4 * 1350 + 1000 - busy.step_ps, busy.step_ps - (450 + 4 * 1000)
    assert busy.interval_ps == (busy.step_ps - round(1.645 * faster), busy.step_ps + round(1.645 * slower))
    sure = simulate(chain(kernels), CLUSTER, IssueTimes(op_ps=900, launch_ps=100))
    assert sure.interval_ps == (sure.step_ps, sure.step_ps)
    free = simulate(chain(kernels), CLUSTER, IssueTimes(op_ps=0, launch_ps=0, spread=0.5))
    assert free.interval_ps == (free.step_ps, free.step_ps)


# -- limits ------------------------------------------------------------------------------------------------------


def test_a_step_is_limited_by_the_families_of_its_path_the_largest_first() -> None:
    result: Result = simulate(chain(MIXED), CLUSTER, IssueTimes(op_ps=7, launch_ps=1))
    assert list(result.limits.items()) == [
        ("matrix products", 4000), ("attention", 800), ("other kernels", 600), ("convolutions", 50), ("host", 7),
    ]  # fmt: skip


def test_what_takes_no_time_limits_nothing_and_the_rest_is_other_ranks() -> None:
    job = chain(MIXED)
    numbers = families(job)
    assert numbers.tolist() == [[4] * 5, [0, 0, 3, 1, 2]]
    total = np.array([5, 0, 9, 1, 0])
    assert list(largest_first(job, total, 15).items()) == [
        ("convolutions", 9), ("matrix products", 5), ("other kernels", 1),
    ]  # fmt: skip
    assert list(largest_first(job, total, 22).items())[:2] == [("convolutions", 9), (OTHER_RANKS, 7)]
    assert largest_first(job, total, 16)[OTHER_RANKS] == 1
    assert largest_first(job, np.zeros(1), 0) == {}


# -- the clock ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "spread", "host", "fits"),
    [
        (2**62, 0.0, IssueTimes(op_ps=0, launch_ps=0), True),
        (2**62, 0.9, IssueTimes(op_ps=0, launch_ps=0), True),
        (2**62, 1.1, IssueTimes(op_ps=0, launch_ps=0), False),
        (2**62, 0.9, IssueTimes(op_ps=0, launch_ps=0, spread=0.2), False),
        (2**61, 0.0, IssueTimes(op_ps=2**61, launch_ps=0, spread=0.9), True),
        (2**61, 0.0, IssueTimes(op_ps=2**61, launch_ps=0, spread=1.1), False),
        (2**61, 0.9, IssueTimes(op_ps=2**61, launch_ps=0), True),
        (2**61, 1.1, IssueTimes(op_ps=2**61, launch_ps=0), False),
        (2**62, 0.0, IssueTimes(op_ps=2**62, launch_ps=0), False),
    ],
)
def test_a_step_that_the_clock_cannot_hold_is_refused(
    kernel: int, spread: float, host: IssueTimes, fits: bool
) -> None:
    """64 bits of picoseconds, the longest step of the interval included."""
    job = chain([(None, kernel, spread)])
    if fits:
        assert simulate(job, CLUSTER, host).step_ps == kernel + host.op_ps
        return
    with pytest.raises(SimulationError, match="more than 107 days"):
        simulate(job, CLUSTER, host)


# -- the host ----------------------------------------------------------------------------------------------------


def issued() -> JobGraph:
    """A kernel, a view, two parts of one launch, a communication, host work, and a kernel with its own time."""
    builder = GraphBuilder(streams=("compute", "comm"))
    x = builder.tensor("x", (8,), DType.FP32, TensorRole.ACTIVATION)
    view = builder.tensor("view", (8,), DType.FP32, TensorRole.ACTIVATION, alias_of=x)
    forward: dict[str, Any] = {"phase": Phase.FORWARD}
    builder.compute("kernel", outputs=(x,), flops=1, durations=(took(100),), **forward)
    builder.compute("aten.view", inputs=(x,), outputs=(view,), **forward)
    for leads in (True, False):
        builder.compute(
            "part", flops=1, durations=(took(10),), attributes=MultiTensor(parts=2, leads=leads), **forward
        )
    group = builder.group("all", ranks=(0,))
    builder.collective(
        "sum", CollectiveKind.ALL_REDUCE, group=group, bytes_per_rank=8, dtype=DType.FP32, stream=1,
        durations=(took(20),),
    )  # fmt: skip
    builder.host("wait", durations=(Duration(device="trace", picoseconds=55, source=Source.IMPORTED),))
    builder.host("unknown")
    builder.compute("timed", flops=1, durations=(took(100), took(77, device="my host")), **forward)
    builder.program([(0, 0, 8, 0, 0)], ranks=(0,))
    return builder.build(JobGraph)


def test_what_issuing_takes() -> None:
    job = issued()
    assert job.ops.is_view.tolist() == [False, True, False, False, False, False, False, False]
    host = IssueTimes(op_ps=40, launch_ps=30)
    assert host.issue(job).tolist() == [40, 10, 40, 0, 40, 55, 0, 40]
    through = IssueTimes(op_ps=40, launch_ps=30, communication_ps=90)
    assert through.issue(job).tolist() == [40, 10, 40, 0, 90, 55, 0, 40]
    forward = IssueTimes(op_ps=40, launch_ps=30, work_ps={Phase.FORWARD: 7})
    assert forward.issue(job).tolist() == [37, 7, 37, 0, 40, 55, 0, 37]
    named = IssueTimes(op_ps=40, launch_ps=30, name="my host")
    assert named.issue(job).tolist() == [40, 10, 40, 0, 40, 55, 0, 77]
    work = np.arange(8)
    assert [times.tolist() for times in host.times(job, work)] == [work.tolist(), host.issue(job).tolist()]
    blocking = IssueTimes(op_ps=40, launch_ps=30, blocking=True)
    device, issue = blocking.times(job, work)
    assert device.tolist() == [40, 11, 42, 3, 44, 5, 6, 47]
    assert issue.tolist() == [0, 0, 0, 0, 0, 55, 0, 0]


# -- who communicates --------------------------------------------------------------------------------------------


def stages() -> JobGraph:
    """Four stages of 2 x 2 ranks: tp neighbours, dp two apart, pp four apart. Each sums and sends on."""
    builder = GraphBuilder(streams=("compute", "comm", "send", "recv"))
    builder.mesh = (Axis(name="pp", size=4), Axis(name="dp", size=2), Axis(name="tp", size=2))
    tp, dp, both = builder.group("tp", axes=("tp",)), builder.group("dp", axes=("dp",)), ("pp", "tp")
    wide, pp = builder.group("wide", axes=both), builder.group("pp", axes=("pp",))
    ends = builder.group("ends", axes=("pp",), positions=(0, 3))
    for stage in range(4):
        begin = builder.op_count()
        for group, kind in ((tp, CollectiveKind.ALL_REDUCE), (dp, CollectiveKind.ALL_GATHER)):
            builder.collective("it", kind, group=group, bytes_per_rank=8, dtype=DType.FP32, stream=1)
        builder.collective("all", CollectiveKind.BARRIER, group=wide, bytes_per_rank=4, dtype=DType.FP32, stream=1)
        if stage in (0, 3):
            builder.collective(
                "ends", CollectiveKind.REDUCE_SCATTER, group=ends, bytes_per_rank=16, dtype=DType.FP32, stream=1
            )
        message: dict[str, Any] = {"group": pp, "tag": 0, "nbytes": 32 + stage, "payload": Payload.ACTIVATION}
        if stage:
            builder.recv("recv", **{**message, "nbytes": 31 + stage}, peer=-1, stream=3)
        if stage < 3:
            builder.send("send", **message, peer=1, stream=2)
        builder.program([(0, begin, builder.op_count(), 0, 0)], role=f"stage {stage}", coordinates={"pp": stage})
    return builder.build(JobGraph)


def test_who_takes_part_in_a_communication() -> None:
    """Of the first group of its kind, asked once for all alike: a message has two ranks, not all stages."""
    job, asked = stages(), list[tuple[str, float, list[int]]]()

    def ask(kind: CollectiveName, nbytes: float, ranks: Sequence[int]) -> CollectiveEstimate:
        asked.append((kind, nbytes, list(ranks)))
        return CollectiveEstimate(
            seconds=2e-6, spread=0.25, algorithm="mine", protocol="LL", source="", bus_bandwidth=0.0, steps=1
        )

    found = durations(job, CLUSTER, ask)
    assert asked == [
        ("all_reduce", 8, [0, 1]), ("all_gather", 8, [0, 2]), ("barrier", 4, [0, 1, 4, 5, 8, 9, 12, 13]),
        ("reduce_scatter", 16, [0, 12]), ("send_recv", 32, [0, 4]),
        ("send_recv", 32, [4, 0]), ("send_recv", 33, [4, 8]),
        ("send_recv", 33, [8, 4]), ("send_recv", 34, [8, 12]),
        ("send_recv", 34, [12, 8]),
    ]  # fmt: skip
    assert set(found.picoseconds.tolist()) == {2_000_000}
    assert set(found.source.tolist()) == {Source.FITTED}
    assert set(found.spread.tolist()) == {0.25}
    assert set(found.algorithm.values()) == {"mine/LL"}
    assert sorted(found.estimates) == sorted(found.algorithm) == list(range(len(job.ops)))


def test_who_meets_for_a_communication() -> None:
    """Stages meet for what crosses them: messages by sender, receiver and tag; what lies in a stage is its own."""
    job = stages()
    keys = [
        [rendezvous_key(job, number, row) for row in range(program.calls[0, 1], program.calls[0, 2])]
        for number, program in enumerate(job.programs)
    ]
    assert all(of_stage[:2] == [None, None] for of_stage in keys)
    assert len({of_stage[2] for of_stage in keys}) == 1
    assert keys[0][3] == keys[3][3] is not None
    assert keys[0][4] == keys[1][3]
    assert keys[1][4] == keys[2][3]
    assert keys[2][4] == keys[3][4]
    distinct = {key for of_stage in keys for key in of_stage if key is not None}
    assert len(distinct) == 5


def test_programs_that_stand_for_several_ranks_do_not_meet_in_a_list_of_ranks() -> None:
    """Only a program that lists its ranks, or has a place on every axis, is in such a list."""
    for axes, pinned, meets in ((("pp",), ("pp",), True), (("pp", "dp"), ("pp",), False)):
        builder = GraphBuilder(streams=("compute", "comm"))
        builder.mesh = tuple(Axis(name=axis, size=2) for axis in axes)
        group = builder.group("listed", ranks=range(2 ** len(axes)))
        for stage in range(2):
            row = builder.collective(
                "it", CollectiveKind.ALL_REDUCE, group=group, bytes_per_rank=8, dtype=DType.FP32, stream=1
            )
            places = dict.fromkeys(pinned, stage)
            builder.program([(0, row, row + 1, 0, 0)], role=f"stage {stage}", coordinates=places)
        job = builder.build(JobGraph)
        keys = [rendezvous_key(job, number, number) for number in range(2)]
        assert keys == ([(0, ()), (0, ())] if meets else [None, None])
