"""A job on a cluster, from the graph to the result: the path of every prediction, in order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from echograph.errors import DeadlockError, SimulationError
from echograph.ir.columns import Int64, distinct
from echograph.ir.graph import JobGraph
from echograph.ir.passes.data_parallel_axes import MICRO_BATCH_AXES
from echograph.ir.timeline import Timeline
from echograph.ir.types import COMMUNICATIONS, OpKind, Source
from echograph.simulator import engine as engines
from echograph.simulator.breakdown import Spread, role_of, spread
from echograph.simulator.clusters import Cluster
from echograph.simulator.durations import Durations, durations, meeting
from echograph.simulator.fidelity import Fidelity, check_effort, fidelity, left_over
from echograph.simulator.flows import LinkUse, alone, flows, links_of
from echograph.simulator.host import Host
from echograph.simulator.interval import bounds, interval, scenarios
from echograph.simulator.memory import largest_memory
from echograph.simulator.network.topology import Topology
from echograph.simulator.pieces.predict import run_pieces, runs
from echograph.simulator.rank_path import RankPath, rank_path
from echograph.simulator.rank_timelines import of_ranks
from echograph.simulator.ranks import EveryRank, Mesh, RankTimes, run_every_rank
from echograph.simulator.result import Result
from echograph.simulator.steps import Step, of_pieces, of_tasks, write_timeline
from echograph.simulator.tasks import TaskGraph, check_tasks, expand
from echograph.simulator.what_if import Scale, factors
from echograph.units import to_s

_TOO_LONG = f"the step would take more than {to_s(2**63) / 86_400:.0f} days: check its durations"


def simulate(
    job: JobGraph,
    cluster: Cluster,
    host: Host,
    *,
    peak_flops_per_s: float = 0.0,
    engine: str = "auto",
    ranks: EveryRank | None = None,
    network: str = "auto",
    trace_ranks: Sequence[int] = (),
    scales: Sequence[Scale] = (),
    plan: dict[str, Any] | None = None,
    memory: bool = True,
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
        plan: the plan as the user gave it, for the result.
        memory: whether to work out memory, too, which takes about as long as the rest.

    Raises:
        SimulationError: an operation has no duration, the job deadlocks, or is too large or too long.
        PlanError: a group does not fit the cluster.
        UsageError: an engine that cannot simulate every rank or links, or a scale that selects nothing.
    """
    began, job = time.perf_counter(), host.runs(job)
    asked = fidelity(job, cluster, engine=engine, network=network, ranks=ranks)
    topology = links_of(job, cluster) if asked.network == "flows" else None
    times = durations(job, cluster, alone(topology) if topology else None)
    times, issue = _scaled(job, times, host, scales)
    check_tasks(job)
    _check_range(job, times, issue, host)
    roles = _Roles(job, times, issue, host, asked)
    if asked.ranks is None:
        ran = _run_roles(roles, trace_ranks)
    else:
        ran = _run_ranks(job, roles, asked.ranks, asked.engine, times, topology, trace_ranks)
    step, last = ran.step, ran.step.last
    longer = step.end_ps - roles.step.end_ps
    low, high = (max(0, bound + longer) for bound in roles.interval)
    replicas = prod(axis.size for axis in job.mesh if axis.name in MICRO_BATCH_AXES)
    samples = job.workload.batch_size * replicas * _micro_batches(job, last)
    return Result(
        model=job.workload.model or job.name,
        cluster=cluster.name,
        device=cluster.device,
        gpus=job.world_size,
        plan={**(plan or {}), "global_batch": samples},
        step_ps=step.end_ps,
        interval_ps=(low, high),
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
        memory=largest_memory(job, cluster.memory_bytes) if memory else None,
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Run:
    """What came of a job: of its roles, or of the column that ends last."""

    step: Step
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


class _Roles:
    """The roles of a job, each simulated once: in pieces where they repeat, unless an engine is asked for."""

    def __init__(self, job: JobGraph, times: Durations, issue: Int64, host: Host, asked: Fidelity) -> None:
        self.job, self.times, self.issue, self.host = job, times, issue, host
        self.engine = "auto" if asked.ranks is not None else asked.engine
        run = None
        # Pieces know one host, which issues.
        if self.engine == "auto" and not host.threads:
            factor = scenarios(job, times, host)
            run = run_pieces(job, times.picoseconds, issue, factor, self.joins)
        if run is not None:
            self.engine = "static"
            self.step = of_pieces(job, run, lambda: self._by_tasks().write())
            self.interval = bounds(self.step.end_ps, run.ends[1:])
        else:
            self.step = self._by_tasks()
            self.interval = interval(job, self.tasks, times, host, self.step.write())

    @cached_property
    def tasks(self) -> TaskGraph:
        threads = self.host.threads
        return expand(self.job, self.times.picoseconds, self.issue, self.joins, threads=threads)

    def joins(self, number: int, row: int) -> object:
        return meeting(self.job, number, row)

    def _by_tasks(self) -> Step:
        try:
            starts, self.engine = engines.run(self.tasks, self.engine)
        except DeadlockError as error:
            raise DeadlockError(_who_waits(self.job, self.tasks, error.tasks), error.tasks) from None
        return of_tasks(self.job, self.tasks, starts)


def _run_roles(roles: _Roles, trace_ranks: Sequence[int]) -> _Run:
    step = roles.step
    traced = of_ranks(roles.job, trace_ranks, lambda _: step.write()) if trace_ranks else None
    return _Run(step=step, engine=roles.engine, traced=traced)


def _run_ranks(
    job: JobGraph,
    roles: _Roles,
    every: EveryRank,
    engine: str,
    times: Durations,
    topology: Topology | None,
    trace_ranks: Sequence[int],
) -> _Run:
    tasks = roles.tasks
    shared = flows(job, tasks, times, topology) if topology else None
    if engine == "auto":
        engine = "events" if shared is not None and shared.contended else "columns"
    runs, most = every.draws + len(trace_ranks), None
    if engine == "events":
        check_effort(job, tasks, runs)
        most = left_over(job, tasks, runs)
    run = partial(run_every_rank, job, tasks, engine=engine, sharing=shared.sharing if shared else None)
    noisy = [replace(every, seed=every.seed + draw) for draw in range(1, every.draws)]
    steps = [int(run(one, column=0)[2].end_ps.max()) for one in noisy]
    its, starts, ends = run(every)
    step = of_tasks(job, its, starts)
    traced = None
    if trace_ranks:
        traced = of_ranks(job, trace_ranks, lambda c: write_timeline(job, *run(every, column=c)[:2]))
    path = rank_path(job, every, ends, (its, starts), lambda c: run(every, column=c)[:2], most)
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


def _spread(job: JobGraph, step: Step, *, every: bool) -> Spread:
    """How breakdowns differ: between roles, or where every rank is simulated, between those of one column."""
    roles = range(len(job.programs))
    return spread(step.breakdowns(), [1 if every else job.rank_count(number) for number in roles])


def _scaled(job: JobGraph, times: Durations, host: Host, scales: Sequence[Scale]) -> tuple[Durations, Int64]:
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


def _check_range(job: JobGraph, times: Durations, issue: Int64, host: Host) -> None:
    """Refuses what the clock, 64-bit picoseconds, cannot hold, the longest step of the interval included."""
    device = np.where(job.ops.kind == OpKind.HOST, 0.0, times.picoseconds) * (1.0 + times.spread + host.spread)
    longest = float(np.dot(runs(job), device + issue * (1.0 + times.spread + host.spread)))
    if not longest < 2**63:
        raise SimulationError(_TOO_LONG)


def _who_waits(job: JobGraph, tasks: TaskGraph, stuck: tuple[int, ...]) -> str:
    """Which programs stand still, and at which communication each of them waits for others."""
    waits = []
    for task in stuck:
        if tasks.join[task] >= 0:
            program, op = int(tasks.program[task]), int(tasks.op[task])
            name = job.programs[program].role or f"program {program}"
            waits.append(f"{name} at operation {op} ({job.strings[job.ops.name[op]]})")
    return f"deadlock: {', '.join(waits[:4]) or 'tasks'} wait for each other; {len(stuck)} streams stand still"


def _on_average(job: JobGraph, flops: int, samples: int) -> int:
    """What a rank has of FLOPs of a micro-batch, on average over all ranks."""
    return flops * samples // (max(1, job.workload.batch_size) * job.world_size)


def _micro_batches(job: JobGraph, program: int) -> int:
    return max(1, len(distinct(job.programs[program].calls[:, 4])))


def _shares(step: Step, times: Durations) -> dict[str, float]:
    busy = np.bincount(times.source, weights=step.busy, minlength=5)
    total = float(busy.sum()) or 1.0
    return {source.name.lower(): float(busy[source]) / total for source in Source}


def _collectives(job: JobGraph, step: Step, times: Durations) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    ops, count_of = job.ops, runs(job, step.last)
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
