"""What kernels wait for communication of their own call, told without a simulation, against simulations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from random_jobs import random_job

import echograph as eg
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import Axis, JobGraph
from echograph.ir.types import CollectiveKind, DType, OpKind, Payload, Phase, TensorRole
from echograph.simulator.engine import static
from echograph.simulator.exposed import exposed_ps
from echograph.simulator.tasks import expand
from echograph.workflow.plan import Plan
from echograph.workflow.predict import lower
from echograph.workflow.system import System

LLAMA = Path(__file__).parents[1] / "golden" / "predictions" / "graphs" / "llama.pb"

PRODUCT, REDUCES, BESIDE = 5_000, 3_000, 1_000


def one_call(*, beside: bool) -> JobGraph:
    """A product, an all-reduce of what it makes, and a kernel that reads that; with another one beside."""
    builder = GraphBuilder(streams=("compute", "comm"))
    group = builder.group("tp", ranks=range(2))

    def made(name: str) -> int:
        return builder.tensor(name, (8,), DType.FP32, TensorRole.ACTIVATION)

    x, y, z = made("x"), made("y"), made("z")
    builder.compute("first", phase=Phase.FORWARD, outputs=(x,))
    builder.collective(
        "all_reduce", CollectiveKind.ALL_REDUCE, group=group, bytes_per_rank=32, dtype=DType.FP32,
        phase=Phase.FORWARD, stream=1, inputs=(x,), outputs=(y,),
    )  # fmt: skip
    if beside:
        builder.compute("beside", phase=Phase.FORWARD, inputs=(x,), outputs=(made("w"),))
    builder.compute("last", phase=Phase.FORWARD, inputs=(y,), outputs=(z,))
    builder.program([(0, 0, builder.op_count(), 0, 0)], ranks=(0, 1))
    return builder.build(JobGraph)


@pytest.mark.parametrize(("beside", "waits"), [(False, REDUCES), (True, REDUCES - BESIDE)])
def test_kernels_wait_for_what_they_read_beyond_the_kernels_beside_it(beside: bool, waits: int) -> None:
    job = one_call(beside=beside)
    takes = [PRODUCT, REDUCES, *([BESIDE] if beside else []), PRODUCT]
    assert exposed_ps(job, np.array(takes)) == {(0, len(takes)): waits}
    assert exposed_ps(job, np.where(job.ops.kind == OpKind.COLLECTIVE, 0, takes)) == {}


def one_ring_or_sync(kind: str) -> JobGraph:
    """A product, messages around a ring or a wait of the host for it, and a kernel that is to run behind."""
    builder = GraphBuilder(streams=("compute", "send", "recv"))
    builder.mesh = (Axis(name="pp", size=2), Axis(name="cp", size=2))
    group = builder.group("ring", axes=("pp",) if kind == "stages" else ("cp",))

    def made(name: str) -> int:
        return builder.tensor(name, (8,), DType.FP32, TensorRole.ACTIVATION)

    x, y, z = made("x"), made("y"), made("z")
    about = {"group": group, "nbytes": 32, "phase": Phase.FORWARD, "payload": Payload.ACTIVATION}
    builder.compute("first", phase=Phase.FORWARD, outputs=(x,))
    if kind == "host":
        builder.collective(
            "counts", CollectiveKind.ALL_GATHER, group=group, bytes_per_rank=32, dtype=DType.FP32,
            phase=Phase.FORWARD, stream=1, inputs=(x,), outputs=(y,),
        )  # fmt: skip
        builder.host("sync", phase=Phase.FORWARD, inputs=(y,))
        builder.compute("last", phase=Phase.FORWARD, outputs=(z,))
    else:
        builder.send("send", peer=1, tag=0, stream=1, inputs=(x,), **about)
        builder.recv("recv", peer=-1, tag=0, stream=2, outputs=(y,), **about)
        builder.compute("last", phase=Phase.FORWARD, inputs=(y,), outputs=(z,))
    builder.program([(0, 0, builder.op_count(), 0, 0)])
    return builder.build(JobGraph, whole=False)


@pytest.mark.parametrize(("kind", "waits"), [("ring", REDUCES), ("stages", None), ("host", REDUCES)])
def test_kernels_wait_for_rings_and_for_what_the_host_waits_for(kind: str, waits: int | None) -> None:
    job = one_ring_or_sync(kind)
    takes = np.array([PRODUCT, REDUCES, REDUCES, PRODUCT])
    assert exposed_ps(job, takes) == ({} if waits is None else {(0, 4): waits})


def test_no_step_is_shorter_than_its_kernels_and_what_they_wait() -> None:
    """Whatever else a step of one program does: what is told of its calls is a lower bound."""
    waited = 0
    for seed in range(0, 400, 4):
        job = random_job(seed)
        takes = np.random.default_rng(seed).integers(0, 50, len(job.ops))
        found = exposed_ps(job, takes)
        kernels = np.isin(job.ops.kind, (OpKind.COMPUTE, OpKind.COPY))
        runs = job.run_counts()
        busiest = int(np.argmax(np.bincount(job.ops.stream, weights=takes * kernels * runs)))
        busy = int((takes * runs)[kernels & (job.ops.stream == busiest)].sum())
        waits = sum(found.get((begin, end), 0) for _, begin, end, *_ in job.programs[0].calls.tolist())
        tasks = expand(job, takes, np.zeros_like(takes))
        assert busy + waits <= int((static.run(tasks) + tasks.duration).max())
        waited += bool(waits)
    assert waited > 10


@pytest.mark.parametrize(("cluster", "higher"), [("dgx-h100", True), ("dgx-a100", False)])
def test_a_board_that_waits_has_a_higher_clock_where_power_sets_it(cluster: str, higher: bool) -> None:
    system = System(cluster)
    spread_out = System(cluster, settings={"node.nvlink_GBps": "50"})
    step = lower(eg.load(LLAMA), Plan(gpus=2, tp=2, sequence_parallel=True), system)
    device = system.cluster.device
    near, far = (its.annotate(step).ops.duration_on(device)[0] for its in (system, spread_out))
    assert (far <= near).all()
    assert (far < near).any() == higher
