"""How long a step takes, and nothing else: for those who ask it of thousands of jobs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from echograph.ir.columns import Int64
from echograph.ir.graph import JobGraph
from echograph.ir.types import OpKind
from echograph.simulator import engine as engines
from echograph.simulator.clusters import Cluster
from echograph.simulator.durations import durations, meeting
from echograph.simulator.host import Host
from echograph.simulator.tasks import expand

WAIT = "pp.wait"
"""How the pipeline pass calls it when a stage waits for what it receives."""


def step_time(
    job: JobGraph, cluster: Cluster, host: Host, *, blocking: bool = False, host_waits: bool = False
) -> int:
    """Picoseconds of the step, as `simulate` has them for roles in closed form.

    Args:
        job: an annotated job graph.
        cluster: where it runs.
        host: what issuing costs.
        blocking: whether a launch returns when its kernel has ended (`CUDA_LAUNCH_BLOCKING=1`): while the host
            issues, the device then stands still.
        host_waits: whether the host waits for what a pipeline stage receives, and issues nothing until then.

    Raises:
        SimulationError: an operation has no duration, or the job is too large.
        DeadlockError: tasks wait for each other for ever.
        PlanError: a group does not fit the cluster.
    """
    work, issue = durations(job, cluster).picoseconds, host.issue(job)
    if blocking:
        work, issue = _one_after_the_other(job, work, issue)
    if host_waits:
        job = _with_waiting_hosts(job)
    tasks = expand(job, work, issue, lambda number, row: meeting(job, number, row))
    starts, _ = engines.run(tasks)
    return int((starts.start + tasks.duration).max(initial=0))


def _with_waiting_hosts(job: JobGraph) -> JobGraph:
    """The job with the waits for messages, which stand on the compute stream, as work of the host."""
    waits = [index for index, text in enumerate(job.strings) if text == WAIT]
    rows = np.isin(job.ops.name, waits) & (job.ops.kind == OpKind.COMPUTE)
    return replace(job, ops=replace(job.ops, kind=np.where(rows, OpKind.HOST, job.ops.kind)))


def _one_after_the_other(job: JobGraph, work: Int64, issue: Int64) -> tuple[Int64, Int64]:
    own = job.ops.kind == OpKind.HOST
    return work + np.where(own, 0, issue), np.where(own, issue, 0)
