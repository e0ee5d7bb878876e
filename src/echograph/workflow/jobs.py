"""Several jobs on one system: where each is placed, what it reads and writes, and what they lose to each other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from echograph.errors import PlanError, UsageError
from echograph.ir.columns import Int64
from echograph.ir.graph import JobGraph, StepGraph
from echograph.ir.traced import is_traced
from echograph.options import option
from echograph.simulator.clusters import Cluster
from echograph.units import GB, GIB, format_bytes, format_time
from echograph.workflow.plan import Plan
from echograph.workflow.predict import lower, on_system
from echograph.workflow.system import System

if TYPE_CHECKING:
    from echograph.simulator.jobs import ContendedLink, JobShare, Storage

_Value = TypeVar("_Value")
MAX_NUMBER = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlacement:
    """Where jobs run that share a system, and what they read and write.

    A field of several values has one for each job, or one for all.

    The text of each field is its help on the command line.

    Raises:
        UsageError: a number out of range, or a field that needs another one.
    """

    place: tuple[str, ...] = option(
        (), "packed, interleaved (by node), or nodes of each job, as 0-3,8 (gpus:0-15).", "packed"
    )
    storage_gbps: float | None = option(None, "GB/s that the storage gives all jobs together.", "no storage")
    read_gib: tuple[float, ...] = option((), "GiB of samples that a job reads for a step, while it runs.", "none")
    checkpoint_gib: tuple[float, ...] = option((), "GiB of a checkpoint, for which a job stops.", "none")
    checkpoint_every: int = option(1, "Steps from one checkpoint to the next.")

    def __post_init__(self) -> None:
        amounts = {"--read-gib": self.read_gib, "--checkpoint-gib": self.checkpoint_gib}
        for name, values in amounts.items():
            if wrong := [v for v in values if not 0 <= v <= MAX_NUMBER]:
                raise UsageError(f"{name} {wrong[0]}: give a number from 0 to {MAX_NUMBER:,}")
            if values and self.storage_gbps is None:
                raise UsageError(f"{name}: say how fast the storage is, with --storage-gbps")
        if self.storage_gbps is not None:
            if not 0 < self.storage_gbps <= MAX_NUMBER:
                raise UsageError(f"--storage-gbps {self.storage_gbps:g}: give more than 0, to {MAX_NUMBER:,}")
            if not any(amounts.values()):
                raise UsageError("--storage-gbps: say what goes through it, with --read-gib or --checkpoint-gib")
        if not 1 <= self.checkpoint_every <= 10_000:
            raise UsageError(f"--checkpoint-every {self.checkpoint_every}: give 1 to 10,000 steps")
        if self.checkpoint_every != 1 and not self.checkpoint_gib:
            raise UsageError("--checkpoint-every: say how large a checkpoint is, with --checkpoint-gib")

    def of(self, jobs: int) -> list[Storage]:
        """What each of so many jobs reads and writes."""
        from echograph.simulator.jobs import Storage

        reads = _each("--read-gib", self.read_gib, jobs, 0.0)
        writes = _each("--checkpoint-gib", self.checkpoint_gib, jobs, 0.0)
        return [
            Storage(
                bytes_per_s=(self.storage_gbps or 0.0) * GB if read or write else 0.0,
                read_bytes=read * GIB,
                checkpoint_bytes=write * GIB,
                every=self.checkpoint_every if write else 1,
            )
            for read, write in zip(reads, writes, strict=True)
        ]


_PACKED = JobPlacement()


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """Several jobs on one system.

    Attributes:
        cluster: its name.
        jobs: what each takes.
        gpus: the GPUs of each job, as ranges.
        contended: the links that more than one of them loads and that may be asked for more than they bear.
    """

    cluster: str
    jobs: tuple[JobShare, ...]
    gpus: tuple[str, ...]
    contended: tuple[ContendedLink, ...]

    def to_json(self) -> dict[str, Any]:
        """The result, for programs."""
        return {
            "cluster": self.cluster,
            "jobs": [
                {**job.to_json(), "placed_on": where} for job, where in zip(self.jobs, self.gpus, strict=True)
            ],
            "contended": [link.to_json() for link in self.contended],
        }

    def __str__(self) -> str:
        lines = [f"{len(self.jobs)} job{'s' if len(self.jobs) > 1 else ''} on {self.cluster}"]
        for job, where in zip(self.jobs, self.gpus, strict=True):
            waits = job.alone_ps - job.step_ps
            stall = f", {format_time(waits)} of it for storage" if waits > 0 else ""
            steps = "1 step" if job.steps == 1 else f"{job.steps} steps"
            lines.append(
                f"  {job.name} on GPUs {where}: alone {format_time(job.alone_ps)}{stall}, "
                f"shared {format_time(job.shared_ps)} ({job.slowdown:.3f} times, {steps})"
            )
        for link in self.contended:
            name = link.name if link.alike == 1 else f"{link.name} and {link.alike - 1} like it"
            loads = ", ".join(f"{who} {format_bytes(n)}" for who, n in link.nbytes.items() if n)
            lines.append(f"  contended: {name}, {100 * link.utilisation:.0f}% used: {loads} a step")
        if not self.contended and len(self.jobs) > 1:
            lines.append("  no link is contended")
        return "\n".join(lines)


def simulate_jobs(
    graphs: Sequence[StepGraph | JobGraph],
    system: System | None = None,
    placement: JobPlacement = _PACKED,
    *,
    names: Sequence[str] = (),
    plans: Sequence[Plan] = (),
) -> SideBySide:
    """Predicts the steps of jobs that run at a time on one system, and share its links and storage.

    Args:
        graphs: jobs, or step graphs to be spread.
        system: where; None: the cluster of the first plan.
        placement: where each is placed, and what it reads and writes.
        names: what the jobs are called, numbered where two have one name; (): their models, numbered.
        plans: of each step graph, or one for all; (): data-parallel on one node.

    Returns:
        For each job the time of a step alone at its place and beside the others, and the links that they contend
        for. Collectives share links in both (as with `network="flows"`).

    Raises:
        UsageError: a placement that cannot be read, or not one for each job.
        PlanError: jobs do not fit the cluster, or a placement does not suit a job's groups.
        SimulationError: the ranks of a job cannot be told apart, or there are too many tasks.
    """
    from echograph.simulator.flows import alone
    from echograph.simulator.jobs import PlacedJob, simulate_together
    from echograph.simulator.network.topology import Topology
    from echograph.simulator.simulate import timed

    if not graphs:
        raise UsageError("no job to run: give at least one")
    spread = _each("plans", tuple(plans), len(graphs), Plan())
    system = system or System(spread[0].cluster)
    if system.profile is not None:
        raise UsageError(f"{system.cluster.name} is one measured device: give a cluster of several")
    # What is said of all jobs at once is of those that are not spread yet.
    said_of_all = len(plans) < len(graphs) and any(isinstance(graph, StepGraph) for graph in graphs)
    jobs = [
        _job(graph, Plan() if said_of_all and isinstance(graph, JobGraph) else plan, system)
        for graph, plan in zip(graphs, spread, strict=True)
    ]
    numbered = not names or len(set(names)) < len(names)
    names = names or [job.workload.model or job.name for job in jobs]
    names = [f"{name} {n}" for n, name in enumerate(names, 1)] if numbered else names
    placed = place_jobs(placement.place, [job.world_size for job in jobs], system.cluster)
    topology = Topology(cluster=system.cluster, gpus=1 + max(int(gpus.max()) for gpus in placed))
    parts = []
    for job, plan, name, gpus, storage in zip(jobs, spread, names, placed, placement.of(len(jobs)), strict=True):
        ready, host, sms = on_system(job, plan.stack or job.workload.stack, system)
        roles = timed(ready, system.cluster, host, sms=sms, estimate=alone(topology, gpus))
        parts.append(PlacedJob(name=name, roles=roles, gpus=gpus, storage=storage))
    found, contended = simulate_together(parts, system.cluster)
    return SideBySide(
        cluster=system.cluster.name,
        jobs=tuple(found),
        gpus=tuple(map(_ranges, placed)),
        contended=tuple(contended),
    )


def _job(graph: StepGraph | JobGraph, plan: Plan, system: System) -> JobGraph:
    if isinstance(graph, JobGraph) and is_traced(graph):
        raise UsageError("a traced job has its own durations, and does not share links: replay it")
    return lower(graph, plan, system)


def _each(name: str, values: tuple[_Value, ...], jobs: int, default: _Value) -> list[_Value]:
    """One value for each job, of those given for each, for all, or for none."""
    if len(values) not in (0, 1, jobs):
        raise UsageError(f"{name}: {len(values)} given for {jobs} jobs: give one for each, or one for all")
    return list(values) if len(values) == jobs else [values[0] if values else default] * jobs


def place_jobs(place: Sequence[str], sizes: Sequence[int], cluster: Cluster) -> list[Int64]:
    """int64 [ranks] for each job: the GPU of each rank.

    Args:
        place: "packed": each job from the next free node on; "interleaved": nodes in turn; or a list of each job:
            nodes ("0-3,8"), of which the first GPUs are taken, or GPUs ("gpus:0-15").
        sizes: how many GPUs each job has.
        cluster: where.

    Raises:
        UsageError: words that say no place, or a list too few or too long.
        PlanError: the jobs do not fit the cluster.
    """
    node = cluster.gpus_per_node
    words = tuple(place) or ("packed",)
    nodes = [-(-size // node) for size in sizes]
    if words in (("packed",), ("interleaved",)):
        if sum(nodes) * node > cluster.max_gpus:
            raise PlanError(
                f"cluster {cluster.name}: the jobs need {sum(nodes) * node:,} GPUs in whole nodes, it has "
                f"{cluster.max_gpus:,}"
            )
        first = [0, *accumulate(nodes)]
        taken = [np.arange(at, at + count) for at, count in zip(first, nodes, strict=False)]
        if words == ("interleaved",):
            turns = zip_longest(*([job] * count for job, count in enumerate(nodes)))
            order = np.array([job for turn in turns for job in turn if job is not None])
            taken = [np.flatnonzero(order == job) for job in range(len(sizes))]
        return [_of_nodes(its, node)[:size] for its, size in zip(taken, sizes, strict=True)]
    if len(words) != len(sizes):
        raise UsageError(
            f"--place: {len(words)} given for {len(sizes)} jobs: give packed, interleaved, or one for each job"
        )
    return [_listed(text, size, node) for text, size in zip(words, sizes, strict=True)]


def _of_nodes(nodes: Int64, gpus_per_node: int) -> Int64:
    gpus: Int64 = (nodes[:, None] * gpus_per_node + np.arange(gpus_per_node)).ravel()
    return gpus


def _listed(text: str, size: int, gpus_per_node: int) -> Int64:
    listed = text.removeprefix("gpus:")
    numbers: list[int] = []
    for part in listed.split(","):
        said = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        low, high = (int(said[1]), int(said[2] or said[1])) if said else (1, 0)
        if low > high or high - low > MAX_NUMBER // 100:
            raise UsageError(
                f"--place '{text[:60]}': give packed, interleaved, or nodes of each job as 0-3,8, or gpus:0-15"
            )
        numbers += range(low, high + 1)
    gpus = np.array(numbers, np.int64)
    if listed == text:
        gpus = _of_nodes(gpus, gpus_per_node)
    short = len(gpus) < size or (listed != text and len(gpus) != size) or len(gpus) >= size + gpus_per_node
    if short:
        raise UsageError(f"--place '{text[:60]}': that is {len(gpus):,} GPUs for a job of {size:,}")
    return gpus[:size]


def _ranges(gpus: Int64) -> str:
    """GPUs as "0-7,16-23"."""
    parts = np.split(gpus, np.flatnonzero(np.diff(gpus) != 1) + 1)
    said = [f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts]
    return ",".join(said) if len(said) <= 8 else ",".join([*said[:8], "..."])
