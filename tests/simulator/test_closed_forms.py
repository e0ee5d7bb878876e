"""Small jobs whose interval, limits and issue times are worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import numpy as np
import pytest

from echograph.errors import SimulationError
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import JobGraph
from echograph.ir.types import (
    Attention,
    CollectiveKind,
    Convolution,
    DType,
    Duration,
    Gemm,
    MultiTensor,
    Phase,
    Source,
    TensorRole,
)
from echograph.simulator import interval
from echograph.simulator.clusters import load_cluster
from echograph.simulator.host import Host
from echograph.simulator.limits import OTHER_RANKS, families, largest_first
from echograph.simulator.result import Result
from echograph.simulator.simulate import simulate

CLUSTER = load_cluster("dgx-h100")
IDLE = Host(op_ps=0, launch_ps=0)
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
@pytest.mark.parametrize("most", [0, interval.MAX_TASKS], ids=["along the path", "by further runs"])
@pytest.mark.parametrize("engine", ["auto", "static"])
def test_errors_of_a_family_move_together_and_families_apart(
    monkeypatch: pytest.MonkeyPatch, times: int, most: int, engine: str
) -> None:
    monkeypatch.setattr(interval, "MAX_TASKS", most)
    result = simulate(chain(MIXED, times), CLUSTER, IDLE, engine=engine)
    around = round(1.645 * times * sqrt(400**2 + 300**2 + 200**2))
    assert result.step_ps == 5450 * times
    assert result.interval_ps == (5450 * times - around, 5450 * times + around)


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
    busy = simulate(chain(kernels), CLUSTER, Host(op_ps=900, launch_ps=100, spread=0.5))
    # One issue, then the device is busy to the end; half as long again, every issue is waited for.
    assert busy.step_ps == 900 + 4 * 1000
    slower, faster = 4 * 1350 + 1000 - busy.step_ps, busy.step_ps - (450 + 4 * 1000)
    assert busy.interval_ps == (busy.step_ps - round(1.645 * faster), busy.step_ps + round(1.645 * slower))
    sure = simulate(chain(kernels), CLUSTER, Host(op_ps=900, launch_ps=100))
    assert sure.interval_ps == (sure.step_ps, sure.step_ps)
    free = simulate(chain(kernels), CLUSTER, Host(op_ps=0, launch_ps=0, spread=0.5))
    assert free.interval_ps == (free.step_ps, free.step_ps)


# -- limits ------------------------------------------------------------------------------------------------------


def test_a_step_is_limited_by_the_families_of_its_path_the_largest_first() -> None:
    result: Result = simulate(chain(MIXED), CLUSTER, Host(op_ps=7, launch_ps=1))
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
        (2**62, 0.0, Host(op_ps=0, launch_ps=0), True),
        (2**62, 0.9, Host(op_ps=0, launch_ps=0), True),
        (2**62, 1.1, Host(op_ps=0, launch_ps=0), False),
        (2**62, 0.9, Host(op_ps=0, launch_ps=0, spread=0.2), False),
        (2**61, 0.0, Host(op_ps=2**61, launch_ps=0, spread=0.9), True),
        (2**61, 0.0, Host(op_ps=2**61, launch_ps=0, spread=1.1), False),
        (2**61, 0.9, Host(op_ps=2**61, launch_ps=0), True),
        (2**61, 1.1, Host(op_ps=2**61, launch_ps=0), False),
        (2**62, 0.0, Host(op_ps=2**62, launch_ps=0), False),
    ],
)
def test_a_step_that_the_clock_cannot_hold_is_refused(kernel: int, spread: float, host: Host, fits: bool) -> None:
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
    host = Host(op_ps=40, launch_ps=30)
    assert host.issue(job).tolist() == [40, 10, 40, 0, 40, 55, 0, 40]
    through = Host(op_ps=40, launch_ps=30, communication_ps=90)
    assert through.issue(job).tolist() == [40, 10, 40, 0, 90, 55, 0, 40]
    named = Host(op_ps=40, launch_ps=30, name="my host")
    assert named.issue(job).tolist() == [40, 10, 40, 0, 40, 55, 0, 77]
    work = np.arange(8)
    assert [times.tolist() for times in host.times(job, work)] == [work.tolist(), host.issue(job).tolist()]
    blocking = Host(op_ps=40, launch_ps=30, blocking=True)
    device, issue = blocking.times(job, work)
    assert device.tolist() == [40, 11, 42, 3, 44, 5, 6, 47]
    assert issue.tolist() == [0, 0, 0, 0, 0, 55, 0, 0]
