"""`step_time` says what `simulate` says, and with blocking launches what a sum says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from layered import layered_step, timed

from echograph.ir.columns import NONE
from echograph.ir.graph import JobGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fold import Fold
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.types import OpKind
from echograph.simulator.clusters import load_cluster
from echograph.simulator.host import Host
from echograph.simulator.simulate import simulate
from echograph.simulator.step_time import step_time

CLUSTER = load_cluster("dgx-h100")
HOST = Host(op_ps=4_000_000, launch_ps=3_000_000)


def jobs() -> dict[str, JobGraph]:
    step = Fold()(layered_step(6))
    staged = Pipeline(stages=2, micro_batches=4)(step)
    return {
        "data parallel": DataParallel(replicas=16, micro_batches=3)(step),
        "pipeline": DataParallel(replicas=4)(staged),
    }


@pytest.mark.parametrize("kernel_ps", [10**5, 10**8])
@pytest.mark.parametrize("name", jobs())
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("blocking", [False, True])
def test_it_is_the_step_of_simulate(name: str, kernel_ps: int, waits: bool, blocking: bool) -> None:
    job, host = timed(jobs()[name], CLUSTER.device, kernel_ps), replace(HOST, waits=waits, blocking=blocking)
    assert step_time(job, CLUSTER, host) == simulate(job, CLUSTER, host).step_ps


def test_a_host_that_waits_for_messages_cannot_run_ahead() -> None:
    job = timed(jobs()["pipeline"], CLUSTER.device, 10**5)
    assert step_time(job, CLUSTER, replace(HOST, waits=True)) > step_time(job, CLUSTER, HOST)
    alone = timed(jobs()["data parallel"], CLUSTER.device, 10**5)
    assert step_time(alone, CLUSTER, replace(HOST, waits=True)) == step_time(alone, CLUSTER, HOST)


def test_blocking_launches_add_host_and_device_up() -> None:
    kernel_ps = 10**8
    job = timed(DataParallel(replicas=1)(Fold()(layered_step(6))), CLUSTER.device, kernel_ps)
    issue = HOST.issue(job)
    rows = [row for _, begin, end, _, _ in job.programs[0].calls.tolist() for row in range(begin, end)]
    busy, _, _ = job.ops.duration_on(CLUSTER.device)
    expected = sum(int(max(0, busy[row]) + issue[row]) for row in rows)
    assert step_time(job, CLUSTER, replace(HOST, blocking=True)) == expected
    assert step_time(job, CLUSTER, HOST) < expected


def test_what_the_graph_says_of_the_host_comes_first() -> None:
    job = timed(DataParallel(replicas=1)(Fold()(layered_step(3))), CLUSTER.device, 10**5)
    said = timed(job, "here/host", 7_000_000)
    known = said.ops.duration_on("here/host")[0] != NONE
    issue = replace(HOST, name="here/host").issue(said)
    assert known.any() and (issue[known] == 7_000_000).all()
    assert (issue[~known] == HOST.issue(job)[~known]).all()
    assert (HOST.issue(said) == HOST.issue(job)).all()


def test_communication_costs_the_host_what_the_process_group_takes() -> None:
    job = timed(DataParallel(replicas=16)(Fold()(layered_step(3))), CLUSTER.device, 10**5)
    dear = Host(op_ps=4_000_000, launch_ps=3_000_000, communication_ps=90_000_000)
    more = dear.issue(job) - HOST.issue(job)
    communicates = job.ops.kind == OpKind.COLLECTIVE
    assert communicates.any()
    assert (more == np.where(communicates, 86_000_000, 0)).all()
