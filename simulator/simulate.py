"""A job on a cluster, from the graph to the result: the path of every prediction, in order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from echograph.errors import DeadlockError, SimulationError
from echograph.ir.columns import Int64
from echograph.ir.graph import JobGraph
from echograph.ir.passes.data_parallel_axes import MICRO_BATCH_AXES
from echograph.ir.timeline import Timeline
from echograph.ir.types import COMMUNICATIONS, OpKind, Phase, Source
from echograph.simulator import engine as engines
from echograph.simulator.breakdown import breakdown
from echograph.simulator.clusters import Cluster
from echograph.simulator.durations import Durations, durations, meeting
from echograph.simulator.engine.schedule import Starts
from echograph.simulator.fidelity import Fidelity, check_effort, fidelity
from echograph.simulator.flows import Flows, LinkUse, alone, flows, links_of
from echograph.simulator.host import Host
from echograph.simulator.interval import interval
from echograph.simulator.limits import limits
from echograph.simulator.memory import largest_memory
from echograph.simulator.rank_timelines import of_ranks
from echograph.simulator.ranks import EveryRank, RankTimes, run_every_rank
from echograph.simulator.result import Result
from echograph.simulator.tasks import DEVICE, TaskGraph, expand
from echograph.simulator.what_if import Scale, factors
from echograph.units import to_s


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
    tasks = expand(job, times.picoseconds, issue, lambda number, row: meeting(job, number, row))
    _check_range(tasks, times, host)
    roles = ran = _run_roles(job, tasks, asked, trace_ranks)
    if asked.ranks is not None:
        ran = _run_ranks(job, tasks, asked, flows(job, tasks, times, topology) if topology else None, trace_ranks)
    timeline = ran.timeline
    last = int(timeline.program[np.argmax(timeline.end)]) if len(timeline) else 0
    step = timeline.makespan
    longer = step - roles.timeline.makespan
    low, high = (max(0, bound + longer) for bound in interval(job, tasks, times, host, roles.timeline))
    replicas = prod(axis.size for axis in job.mesh if axis.name in MICRO_BATCH_AXES)
    samples = job.workload.batch_size * replicas * _micro_batches(job, last)
    return Result(
        model=job.workload.model or job.name,
        cluster=cluster.name,
        device=cluster.device,
        gpus=job.world_size,
        plan={**(plan or {}), "global_batch": samples},
        step_ps=step,
        interval_ps=(low, high),
        samples=samples,
        tokens=samples * job.workload.sequence_length,
        model_flops=sum(_model_flops(job, n) for n in range(len(job.programs))) // max(1, len(job.programs)),
        peak_flops_per_s=peak_flops_per_s,
        breakdown=breakdown(job, timeline, last),
        limits=limits(job, timeline),
        memory=largest_memory(job, cluster.memory_bytes) if memory else None,
        sources=_shares(job, ran.tasks, times),
        collectives=_collectives(job, ran.tasks, times, last),
        engine=ran.engine,
        network=asked.network,
        degraded=asked.degraded,
        links=ran.links,
        ranks=ran.ranks,
        draws_ps=ran.draws_ps,
        simulated_ranks=len(job.programs) * ran.columns,
        tasks=len(tasks) * ran.columns,
        wall_s=time.perf_counter() - began,
        timeline=timeline,
        traced=ran.traced,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Run:
    """What an engine made of a job: of its roles, or of the column that ends last."""

    tasks: TaskGraph
    timeline: Timeline
    engine: str
    columns: int = 1
    ranks: RankTimes | None = None
    draws_ps: tuple[int, ...] = ()
    links: tuple[LinkUse, ...] = ()
    traced: Timeline | None = None


def _run_roles(job: JobGraph, tasks: TaskGraph, asked: Fidelity, trace_ranks: Sequence[int]) -> _Run:
    try:
        starts, engine = engines.run(tasks, "auto" if asked.ranks is not None else asked.engine)
    except DeadlockError as error:
        raise DeadlockError(_who_waits(job, tasks, error.tasks), error.tasks) from None
    timeline = _timeline(job, tasks, starts)
    traced = of_ranks(job, trace_ranks, lambda _: timeline) if trace_ranks and asked.ranks is None else None
    return _Run(tasks=tasks, timeline=timeline, engine=engine, traced=traced)


def _run_ranks(
    job: JobGraph, tasks: TaskGraph, asked: Fidelity, shared: Flows | None, trace_ranks: Sequence[int]
) -> _Run:
    every = asked.ranks
    assert every is not None
    engine = asked.engine
    if engine == "auto":
        engine = "events" if shared is not None and shared.contended else "columns"
    if engine == "events":
        check_effort(job, tasks, every.draws + len(trace_ranks))
    run = partial(run_every_rank, job, tasks, engine=engine, sharing=shared.sharing if shared else None)
    noisy = [replace(every, seed=every.seed + draw) for draw in range(1, every.draws)]
    steps = [int(run(one, column=0)[2].end_ps.max()) for one in noisy]
    its, starts, times = run(every)
    timeline = _timeline(job, its, starts)
    traced = (
        of_ranks(job, trace_ranks, lambda c: _timeline(job, *run(every, column=c)[:2])) if trace_ranks else None
    )
    return _Run(
        tasks=its,
        timeline=timeline,
        engine=engine,
        columns=job.world_size // len(job.programs),
        ranks=times,
        draws_ps=(timeline.makespan, *steps) if steps else (),
        links=shared.busiest(timeline.makespan) if shared else (),
        traced=traced,
    )


def _scaled(job: JobGraph, times: Durations, host: Host, scales: Sequence[Scale]) -> tuple[Durations, Int64]:
    factor, of_host = factors(job, scales)
    changed = np.rint(times.picoseconds * factor).astype(np.int64) if scales else times.picoseconds
    work, issue = host.times(job, changed)
    return replace(times, picoseconds=work), np.rint(issue * of_host).astype(np.int64)


def _check_range(tasks: TaskGraph, times: Durations, host: Host) -> None:
    """Refuses what the clock, 64-bit picoseconds, cannot hold, the longest step of the interval included."""
    most = 1.0 + float(times.spread.max(initial=0.0)) + host.spread
    longest = most * float(tasks.duration.sum(dtype=np.float64))
    if not longest < 2**63:  # at most; exactly, where that is too much
        longest = float(np.dot(tasks.duration.astype(np.float64), 1.0 + times.spread[tasks.op] + host.spread))
    if not longest < 2**63:
        raise SimulationError(
            f"the step would take more than {to_s(2**63) / 86_400:.0f} days: check its durations"
        )


def _who_waits(job: JobGraph, tasks: TaskGraph, stuck: tuple[int, ...]) -> str:
    """Which programs stand still, and at which communication each of them waits for others."""
    waits = []
    for task in stuck:
        if tasks.join[task] >= 0:
            program, op = int(tasks.program[task]), int(tasks.op[task])
            name = job.programs[program].role or f"program {program}"
            waits.append(f"{name} at operation {op} ({job.strings[job.ops.name[op]]})")
    return f"deadlock: {', '.join(waits[:4]) or 'tasks'} wait for each other; {len(stuck)} streams stand still"


def _timeline(job: JobGraph, tasks: TaskGraph, starts: Starts) -> Timeline:
    return Timeline(
        program=tasks.program,
        lane=tasks.lane,
        stream=job.ops.stream[tasks.op],
        op=tasks.op,
        instance=tasks.instance,
        micro_batch=tasks.micro_batch,
        start=starts.start,
        duration=tasks.duration,
        cause=starts.cause,
        programs=tuple(p.role or f"rank {i}" for i, p in enumerate(job.programs)),
        streams=job.streams,
    )


def _model_flops(job: JobGraph, program: int) -> int:
    counted = np.isin(job.ops.phase, (Phase.FORWARD, Phase.BACKWARD)) & (job.ops.kind == OpKind.COMPUTE)
    before = np.concatenate([[0], np.cumsum(np.where(counted, job.ops.flops, 0))])
    calls = job.programs[program].calls
    return int((before[calls[:, 2]] - before[calls[:, 1]]).sum())


def _micro_batches(job: JobGraph, program: int) -> int:
    return max(1, len(np.unique(job.programs[program].calls[:, 4])))


def _shares(job: JobGraph, tasks: TaskGraph, times: Durations) -> dict[str, float]:
    busy = np.bincount(times.source[tasks.op], weights=np.where(tasks.lane == 1, tasks.duration, 0), minlength=5)
    total = float(busy.sum()) or 1.0
    return {source.name.lower(): float(busy[source]) / total for source in Source}


def _collectives(job: JobGraph, tasks: TaskGraph, times: Durations, program: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    ops = job.ops
    runs = np.zeros(len(ops) + 1, np.int64)
    np.add.at(runs, job.programs[program].calls[:, 1], 1)
    np.add.at(runs, job.programs[program].calls[:, 2], -1)
    runs = np.cumsum(runs)[:-1]
    communicates = np.isin(ops.kind, COMMUNICATIONS)
    mine = (tasks.program == program) & (tasks.lane == DEVICE) & communicates[tasks.op]
    busy = np.bincount(tasks.op[mine], weights=tasks.duration[mine], minlength=len(ops))
    for row in np.flatnonzero(communicates & (runs > 0)).tolist():
        group, count = job.groups[int(ops.group[row])], int(runs[row])
        label = "+".join(group.axes) or group.name
        entry = found.setdefault(label, {"calls": 0, "bytes_per_rank": 0, "busy_s": 0.0, "algorithms": []})
        entry["calls"] += count
        entry["bytes_per_rank"] += count * int(ops.nbytes[row])
        entry["busy_s"] += float(busy[row]) / 1e12
        choice = times.algorithm.get(row)
        if choice and choice not in entry["algorithms"]:
            entry["algorithms"].append(choice)
    return found
