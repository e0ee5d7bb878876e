"""How long a step takes, and nothing else: for those who ask it of thousands of jobs."""

from __future__ import annotations

from echograph.ir.graph import JobGraph
from echograph.simulator.clusters import Cluster
from echograph.simulator.durations import durations
from echograph.simulator.engine import static
from echograph.simulator.host import Host
from echograph.simulator.tasks import expand


def step_time(job: JobGraph, cluster: Cluster, host: Host) -> int:
    """Picoseconds of the step, as `simulate` has them for roles in closed form on nodes that are all alike.

    Args:
        job: an annotated job graph.
        cluster: where it runs.
        host: what issuing costs.

    Raises:
        SimulationError: an operation has no duration, or the job is too large.
        DeadlockError: tasks wait for each other for ever.
        PlanError: a group does not fit the cluster.
    """
    job = host.runs(job)
    work, issue = host.times(job, durations(job, cluster).picoseconds)
    tasks = expand(job, work, issue, threads=host.threads)
    return int((static.run(tasks).start + tasks.duration).max(initial=0))
