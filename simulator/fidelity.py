"""How closely a job is simulated: its roles or every rank, collectives one by one or the links that they share."""

from __future__ import annotations

from dataclasses import dataclass, replace

from echograph.errors import SimulationError, UnknownNameError, UsageError
from echograph.ir.graph import JobGraph
from echograph.simulator.clusters import Cluster
from echograph.simulator.engine import ENGINES
from echograph.simulator.ranks import EveryRank
from echograph.simulator.tasks import TaskGraph

NETWORKS = ("auto", "closed-form", "flows")
MAX_EVENTS = 2_000_000_000
"""Tasks of all ranks that the event engine is let run, a quarter of an hour at two million a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """What is simulated.

    Attributes:
        engine: its name; "auto" leaves it to what there is to simulate.
        network: "closed-form" or "flows".
        ranks: how ranks differ, where every one is simulated.
        degraded: what of the cluster is degraded, in words.
    """

    engine: str
    network: str
    ranks: EveryRank | None
    degraded: tuple[str, ...]


def fidelity(job: JobGraph, cluster: Cluster, *, engine: str, network: str, ranks: EveryRank | None) -> Fidelity:
    """What is simulated for what is asked: what is degraded needs every rank, and its links need flows.

    Raises:
        UnknownNameError: no such network.
        UsageError: an engine that cannot simulate every rank or links, or degraded links in closed form.
    """
    if network not in NETWORKS:
        raise UnknownNameError("network", network, NETWORKS)
    if network == "closed-form" and cluster.degraded:
        raise UsageError(
            f"--network closed-form: knows no single links, but '{cluster.degraded[0].link}' is degraded: "
            "choose flows"
        )
    if network == "auto":
        network = "flows" if cluster.degraded else "closed-form"
    slow = _slow_ranks(job, cluster)
    if ranks is None and (slow or network == "flows"):
        ranks = EveryRank()
    if ranks is not None:
        slow = {rank: slow.get(rank, 1.0) * ranks.slow.get(rank, 1.0) for rank in {*slow, *ranks.slow}}
        ranks = replace(ranks, slow=slow)
        engine = _engine(engine, network)
    words = [f"{d.link} at {100 * d.bandwidth:.3g}%" for d in cluster.degraded]
    words += [f"node {n.node} computes at {100 * n.compute:.3g}%" for n in cluster.slow_nodes]
    return Fidelity(engine=engine, network=network, ranks=ranks, degraded=tuple(words))


def check_effort(job: JobGraph, tasks: TaskGraph, runs: int) -> None:
    """Refuses what would take the event engine too long.

    Args:
        job: the job.
        tasks: its tasks.
        runs: how often all ranks run: draws, and traces.

    Raises:
        SimulationError: more tasks than `MAX_EVENTS`.
    """
    count = len(tasks) * (job.world_size // len(job.programs))
    if count * runs > MAX_EVENTS:
        times = f", {runs} times," if runs > 1 else ""
        raise SimulationError(
            f"{count:,} tasks of all ranks{times} are over the event engine's limit of {MAX_EVENTS:,}: give fewer "
            "micro-batches, GPUs, draws or ranks to trace, or --network closed-form"
        )


def left_over(job: JobGraph, tasks: TaskGraph, runs: int) -> int:
    """How often all ranks may run besides, as of `check_effort`."""
    count = len(tasks) * (job.world_size // len(job.programs))
    return max(0, MAX_EVENTS // max(1, count) - runs)


def _slow_ranks(job: JobGraph, cluster: Cluster) -> dict[int, float]:
    """Factor on the durations of kernels by rank."""
    slow: dict[int, float] = {}
    for entry in cluster.slow_nodes:
        first = entry.node * cluster.gpus_per_node
        for rank in range(first, min(first + cluster.gpus_per_node, job.world_size)):
            slow[rank] = slow.get(rank, 1.0) / entry.compute
    return slow


def _engine(engine: str, network: str) -> str:
    """The engine that simulates every rank."""
    if engine not in ("auto", *ENGINES):
        raise UnknownNameError("engine", engine, ENGINES)
    able = ("auto", "events") if network == "flows" else ("auto", "static", "events")
    if engine not in able:
        what = "no links that are shared" if engine == "static" else "roles, not every rank"
        raise UsageError(f"engine '{engine}' simulates {what}: leave the choice of one of them out")
    return "static" if network == "closed-form" and engine != "events" else engine
