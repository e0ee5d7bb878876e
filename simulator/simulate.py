"""A job on a cluster, from the graph to the result: the path of every prediction, in order.

How closely it is simulated, its roles or every rank, collectives one by one or the links that they share, is
`fidelity`, at the end.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from echograph.errors import SimulationError, UnknownNameError, UsageError
from echograph.ir.columns import Int64, distinct
from echograph.ir.graph import JobGraph
from echograph.ir.passes.model import MICRO_BATCH_AXES
from echograph.ir.timeline import Timeline
from echograph.ir.types import COMMUNICATIONS, OpKind, Source
from echograph.simulator.breakdown import Spread, role_of, spread
from echograph.simulator.clusters import Cluster
from echograph.simulator.contention import beside_collectives
from echograph.simulator.durations import Durations, Estimate, NetworkModel, durations
from echograph.simulator.engine import ENGINES, Roles, StepRun, of_tasks, simulate_roles
from echograph.simulator.form import Form, shares
from echograph.simulator.host import IssueTimes
from echograph.simulator.limits import Scale, factors, interval
from echograph.simulator.memory import Runtime, largest_memory
from echograph.simulator.network.topology import Topology
from echograph.simulator.ranks import EveryRank, Mesh, RankPath, RankTimes, of_ranks, rank_path, run_every_rank
from echograph.simulator.result import Result
from echograph.simulator.tasks import TaskGraph, check_tasks
from echograph.units import to_s

if TYPE_CHECKING:
    from echograph.simulator.flows import LinkUse

_RUNTIME = Runtime()
_NOTHING: Mapping[str, float] = MappingProxyType({})
_TOO_LONG = f"the step would take more than {to_s(2**63) / 86_400:.0f} days: check its durations"


def simulate(
    job: JobGraph,
    cluster: Cluster,
    host: IssueTimes,
    *,
    peak_flops_per_s: float = 0.0,
    engine: str = "auto",
    ranks: EveryRank | None = None,
    network: str = "auto",
    trace_ranks: Sequence[int] = (),
    scales: Sequence[Scale] = (),
    sms: Mapping[str, float] = _NOTHING,
    plan: dict[str, Any] | None = None,
    memory: bool = True,
    runtime: Runtime = _RUNTIME,
    form: Form | None = None,
    unsaid: float = 0.0,
) -> Result:
    """Predicts one step of a job.

    Args:
        job: an annotated job graph.
        cluster: where it runs.
        host: what issuing costs.
        peak_flops_per_s: dense peak of the device for the model's type, for the utilisation.
        engine: "auto" or a name of `engine.ENGINES`.
        ranks: how ranks differ, to simulate every one; None simulates each role once. What is said of a rank is
            then said of the one that ends last, and the interval is that of the roles, moved to its step.
        network: "closed-form": collectives take what their formula says, whatever else runs; "flows": they share
            links, and every rank is simulated; "auto": flows where links are degraded.
        trace_ranks: ranks whose timelines are wanted, too.
        scales: what is made longer or shorter than it is.
        sms: share of the multiprocessors that reductions take from kernels beside them, by their group's label.
        plan: the plan as the user gave it, for the result.
        memory: whether to work out memory, too, which takes about as long as the rest.
        runtime: what the framework takes of memory besides tensors.
        form: how sure the form of the model is; None: the interval is of the errors of durations alone.
        unsaid: standard error of the logarithm of the step for what the plan leaves unsaid, beside a form.

    Raises:
        SimulationError: an operation has no duration, the job deadlocks, or is too large or too long.
        PlanError: a group does not fit the cluster.
        UsageError: an engine that cannot simulate every rank or links, or a scale that selects nothing.
    """
    began = time.perf_counter()
    asked = fidelity(job, cluster, engine=engine, network=network, ranks=ranks)
    topology, alone = _links(job, cluster) if asked.network == "flows" else (None, None)
    roles = timed(job, cluster, host, scales=scales, sms=sms, estimate=alone)
    job, times = roles.job, roles.times
    check_tasks(job)
    _check_range(job, times, roles.issue, host)
    of_roles, ran_on = simulate_roles(roles, "auto" if asked.ranks is not None else asked.engine)
    if asked.ranks is None:
        ran = _run_roles(job, of_roles, ran_on, trace_ranks)
    else:
        ran = _run_ranks(roles, asked.ranks, asked.engine, topology, trace_ranks)
    step, last = ran.step, ran.step.last
    longer = step.end_ps - of_roles.end_ps
    low, high = (max(0, bound + longer) for bound in interval(roles, of_roles))
    work = shares(job, cluster, times, of_roles)
    within = (low, high) if form is None else form.interval(step.end_ps, (low, high), work, unsaid)
    replicas = prod(axis.size for axis in job.mesh if axis.name in MICRO_BATCH_AXES)
    samples = job.workload.batch_size * replicas * _micro_batches(job, last)
    return Result(
        model=job.workload.model or job.name,
        cluster=cluster.name,
        device=cluster.device,
        gpus=job.world_size,
        plan={**(plan or {}), "global_batch": samples},
        step_ps=step.end_ps,
        interval_ps=(round(within[0]), round(within[1])),
        durations_interval_ps=(low, high),
        work=work,
        samples=samples,
        tokens=samples * job.workload.sequence_length,
        model_flops=_on_average(job, job.workload.model_flops, samples),
        causal_attention_flops=_on_average(job, job.workload.causal_attention_flops, samples),
        peak_flops_per_s=peak_flops_per_s,
        breakdown=step.breakdown,
        ends_last=role_of(job, last, ran.rank_of(job, last)),
        roles=tuple(program.role for program in job.programs),
        write_spread=cache(partial(_spread, job, step, every=ran.ranks is not None)),
        limits=step.limits if ran.path is None else ran.path.limits,
        path=ran.path,
        memory=largest_memory(job, cluster.memory_bytes, runtime) if memory else None,
        sources=_shares(step, times),
        collectives=_collectives(job, step, times),
        engine=ran.engine,
        network=asked.network,
        degraded=asked.degraded,
        links=ran.links,
        ranks=ran.ranks,
        draws_ps=ran.draws_ps,
        simulated_ranks=len(job.programs) * ran.columns,
        tasks=2 * job.unfolded_ops * ran.columns,
        wall_s=time.perf_counter() - began,
        write_timeline=step.write,
        times=times,
        traced=ran.traced,
    )


def timed(
    job: JobGraph,
    cluster: Cluster,
    host: IssueTimes,
    *,
    scales: Sequence[Scale] = (),
    sms: Mapping[str, float] = _NOTHING,
    estimate: Estimate | None = None,
    network: NetworkModel | None = None,
) -> Roles:
    """The job as its host runs it, with what its operations take; as of `simulate`.

    Args:
        job: an annotated job graph.
        cluster: where it runs.
        host: what issuing costs.
        scales: what is made longer or shorter.
        sms: share of the multiprocessors that reductions take from kernels beside them.
        estimate: another model of the network.
        network: the cluster's, where it is kept over jobs.
    """
    job = host.runs(job)
    times = durations(job, cluster, estimate, network)
    times = replace(times, picoseconds=beside_collectives(job, times.picoseconds, sms))
    times, issue = _scaled(job, times, host, scales)
    return Roles(job=job, times=times, issue=issue, host=host)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Run:
    """The result of one simulation run: of each role once, or of the column of ranks that ends last."""

    step: StepRun
    engine: str
    columns: int = 1
    ranks: RankTimes | None = None
    draws_ps: tuple[int, ...] = ()
    path: RankPath | None = None
    links: tuple[LinkUse, ...] = ()
    traced: Timeline | None = None

    def rank_of(self, job: JobGraph, program: int) -> int | None:
        """The rank of a program whose tasks are told; None where all of its ranks are alike."""
        return None if self.ranks is None else int(Mesh(job).ranks()[program, self.ranks.column])


def _run_roles(job: JobGraph, step: StepRun, engine: str, trace_ranks: Sequence[int]) -> _Run:
    traced = of_ranks(job, trace_ranks, lambda _: step.write()) if trace_ranks else None
    return _Run(step=step, engine=engine, traced=traced)


def _links(job: JobGraph, cluster: Cluster) -> tuple[Topology, Estimate]:
    """The links that a job can load, and what a collective takes that has its links alone."""
    from echograph.simulator.flows import alone, links_of

    topology = links_of(job, cluster)
    return topology, alone(topology)


def _run_ranks(
    roles: Roles, every: EveryRank, engine: str, topology: Topology | None, trace_ranks: Sequence[int]
) -> _Run:
    job, tasks = roles.job, roles.tasks
    shared = None
    if topology is not None:
        from echograph.simulator.flows import flows

        shared = flows(job, tasks, roles.times, topology)
    if engine == "auto":
        engine = "events" if shared is not None and shared.contended else "static"
    runs, most = every.draws + len(trace_ranks), None
    if engine == "events":
        check_effort(job, tasks, runs)
        most = left_over(job, tasks, runs)
    run = partial(run_every_rank, job, tasks, engine=engine, sharing=shared.sharing if shared else None)
    noisy = [replace(every, seed=every.seed + draw) for draw in range(1, every.draws)]
    steps = [int(run(one, column=0)[1].end_ps.max()) for one in noisy]
    timeline, ends = run(every)
    step = of_tasks(job, timeline)
    traced = None
    if trace_ranks:
        traced = of_ranks(job, trace_ranks, lambda c: run(every, column=c)[0])
    path = rank_path(job, every, ends, timeline, lambda c: run(every, column=c)[0], most)
    return _Run(
        step=step,
        path=path,
        engine=engine,
        columns=job.world_size // len(job.programs),
        ranks=ends,
        draws_ps=(step.end_ps, *steps) if steps else (),
        links=shared.busiest(step.end_ps) if shared else (),
        traced=traced,
    )


def _spread(job: JobGraph, step: StepRun, *, every: bool) -> Spread:
    """How breakdowns differ: between roles, or where every rank is simulated, between those of one column."""
    roles = range(len(job.programs))
    return spread(step.breakdowns(), [1 if every else job.rank_count(number) for number in roles])


def _scaled(job: JobGraph, times: Durations, host: IssueTimes, scales: Sequence[Scale]) -> tuple[Durations, Int64]:
    factor, of_host = factors(job, scales)
    work, issue = host.times(job, _times(times.picoseconds, factor))
    # What the host does itself has a name, too, by which it may be scaled.
    longer = of_host * np.where(job.ops.kind == OpKind.HOST, factor, 1.0)
    return replace(times, picoseconds=_times(work, np.ones(len(work)))), _times(issue, longer)


def _times(picoseconds: Int64, factor: npt.NDArray[np.float64]) -> Int64:
    """Durations made longer or shorter; a sum that 64 bits did not hold is below zero, and refused as well."""
    changed = np.rint(picoseconds * factor)
    if not ((changed >= 0) & (changed < 2**63)).all():
        raise SimulationError(_TOO_LONG)
    return np.where(factor == 1.0, picoseconds, changed.astype(np.int64))


def _check_range(job: JobGraph, times: Durations, issue: Int64, host: IssueTimes) -> None:
    """Refuses what the clock, 64-bit picoseconds, cannot hold, the longest step of the interval included."""
    device = np.where(job.ops.kind == OpKind.HOST, 0.0, times.picoseconds) * (1.0 + times.spread + host.spread)
    longest = float(np.dot(job.run_counts(), device + issue * (1.0 + times.spread + host.spread)))
    if not longest < 2**63:
        raise SimulationError(_TOO_LONG)


def _on_average(job: JobGraph, flops: int, samples: int) -> int:
    """What a rank has of FLOPs of a micro-batch, on average over all ranks."""
    return flops * samples // (max(1, job.workload.batch_size) * job.world_size)


def _micro_batches(job: JobGraph, program: int) -> int:
    return max(1, len(distinct(job.programs[program].calls[:, 4])))


def _shares(step: StepRun, times: Durations) -> dict[str, float]:
    busy = np.bincount(times.source, weights=step.busy, minlength=5)
    total = float(busy.sum()) or 1.0
    return {source.name.lower(): float(busy[source]) / total for source in Source}


def _collectives(job: JobGraph, step: StepRun, times: Durations) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    ops, count_of = job.ops, job.run_counts(step.last)
    communicates = np.isin(ops.kind, COMMUNICATIONS)
    for row in np.flatnonzero(communicates & (count_of > 0)).tolist():
        group, count = job.groups[int(ops.group[row])], int(count_of[row])
        label = group.label
        entry = found.setdefault(label, {"calls": 0, "bytes_per_rank": 0, "busy_s": 0.0, "algorithms": []})
        entry["calls"] += count
        entry["bytes_per_rank"] += count * int(ops.nbytes[row])
        entry["busy_s"] += float(step.busy_of_last[row]) / 1e12
        choice = times.algorithm.get(row)
        if choice and choice not in entry["algorithms"]:
            entry["algorithms"].append(choice)
    return found


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
