"""Several jobs on one fabric: what each loses to the others on the links and the storage that they share.

Every job repeats its step while the others run; at the end of a step its ranks wait for each other, so that alone
each step takes what a lone prediction says. The slowest job counts one step, the others as many as they end by
then, so each is counted while all run. All tasks of all jobs are one run of the event engine: columns of the
widest job, of which a narrower one has only the first.

A job may read the next step's samples from storage while it computes, and write a checkpoint after some steps, for
which it stops. Storage is one more link: reads and writes of all jobs share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import ceil
from typing import Any

import numpy as np

from echograph.errors import DeadlockError, PlanError, SimulationError
from echograph.ir.columns import NONE, Float64, Int64, Ragged
from echograph.simulator.clusters import Cluster
from echograph.simulator.engine import Roles
from echograph.simulator.engine.columns import Columns
from echograph.simulator.engine.sharing import Sharing
from echograph.simulator.flows import Loading, loading, overloaded, share
from echograph.simulator.network.topology import Topology
from echograph.simulator.ranks import EveryRank, Mesh, kernel_columns
from echograph.simulator.simulate import MAX_EVENTS
from echograph.simulator.tasks import HOST, TaskGraph
from echograph.units import to_ps, to_s

MOST_STEPS = 10_000
"""Of one job, while the slowest has one."""
LONGEST_PS = 2**60
"""Of one read or write."""
MOST_LINKS = 5
"""Contended links that are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """What a job reads and writes of the storage that all jobs share.

    Attributes:
        bytes_per_s: what the storage gives all jobs together; 0 where nothing is read or written.
        read_bytes: of samples, by all ranks together in a step; the next step waits for it.
        checkpoint_bytes: by all ranks together.
        every: steps from one checkpoint to the next.
    """

    bytes_per_s: float = 0.0
    read_bytes: float = 0.0
    checkpoint_bytes: float = 0.0
    every: int = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedJob:
    """A job where it runs.

    Attributes:
        name: what it is called.
        roles: its roles, with durations of `flows.alone` for its GPUs.
        gpus: int64 [ranks], the GPU of each rank, each once over all jobs.
        storage: what it reads and writes.
    """

    name: str
    roles: Roles
    gpus: Int64
    storage: Storage = Storage()

    @cached_property
    def mesh(self) -> Mesh:
        """Its ranks as programs and columns."""
        return Mesh(self.roles.job)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContendedLink:
    """A link that several jobs load, and that may be asked for more than it bears.

    Attributes:
        name: of the first of those that are used alike.
        alike: how many are, itself included.
        nbytes: bytes that each job puts on it in a step, by the job's name.
        utilisation: share of what it could have carried meanwhile.
    """

    name: str
    alike: int
    nbytes: dict[str, float]
    utilisation: float

    def to_json(self) -> dict[str, Any]:
        """The record under `contended`."""
        return {"name": self.name, "alike": self.alike, "bytes": self.nbytes, "utilisation": self.utilisation}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShare:
    """What one of several jobs takes.

    Attributes:
        name: of the job.
        gpus: how many it has.
        step_ps: a step alone, without storage.
        alone_ps: a step alone, with what it waits for storage, picoseconds, mean over checkpoints.
        shared_ps: a step beside the others, mean over the `steps` that were counted.
        steps: that were counted.
    """

    name: str
    gpus: int
    step_ps: int
    alone_ps: float
    shared_ps: float
    steps: int

    @property
    def slowdown(self) -> float:
        """How many times as long a step takes beside the others."""
        return self.shared_ps / self.alone_ps if self.alone_ps else 1.0

    def to_json(self) -> dict[str, Any]:
        """The record under `jobs`."""
        return {
            "name": self.name,
            "gpus": self.gpus,
            "step_s": to_s(self.step_ps),
            "alone_s": self.alone_ps / 1e12,
            "shared_s": self.shared_ps / 1e12,
            "slowdown": self.slowdown,
            "steps": self.steps,
        }


def simulate_together(jobs: Sequence[PlacedJob], cluster: Cluster) -> tuple[list[JobShare], list[ContendedLink]]:
    """Runs jobs side by side, and each alone at its place.

    Args:
        jobs: at least one.
        cluster: where they run.

    Returns:
        What each takes, in their order, and the links that slow them, those most used first.

    Raises:
        SimulationError: the ranks of a job cannot be told apart by its mesh, or there are too many tasks.
        PlanError: groups of one kind lie differently on the nodes.
        DeadlockError: the tasks of a job wait for each other for ever.
    """
    topology = _topology(jobs, cluster)
    parts = [_Part(job, topology) for job in jobs]
    bare, alone = [], []
    for part in parts:
        try:
            bare.append(int(_ends([part], [1], topology, storage=False)[0][-1]))
        except DeadlockError as error:
            its = _of_step(error, part)
            raise part.placed.roles.who_waits(its) from None
        every = part.placed.storage.every
        reads = part.placed.storage.bytes_per_s > 0
        alone.append(_ends([part], [every], topology)[0][-1] / every if reads else float(bare[-1]))
    counts, ends = _while_all_run(parts, alone, topology)
    found = [
        JobShare(
            name=part.placed.name,
            gpus=len(part.placed.gpus),
            step_ps=step,
            alone_ps=own,
            shared_ps=float(its[count - 1]) / count,
            steps=count,
        )
        for part, step, own, its, count in zip(parts, bare, alone, ends, counts, strict=True)
    ]
    return found, _contended(parts, found, topology)


def _of_step(error: DeadlockError, part: _Part) -> DeadlockError:
    """The error with tasks of the step alone: what waits at its end is left out."""
    return DeadlockError(str(error), tuple(task for task in error.tasks if task < len(part.placed.roles.tasks)))


def _topology(jobs: Sequence[PlacedJob], cluster: Cluster) -> Topology:
    taken = np.concatenate([job.gpus for job in jobs])
    gpus, often = np.unique(taken, return_counts=True)
    if (often > 1).any():
        raise PlanError(f"GPU {int(gpus[often > 1][0])} is given to two ranks: place jobs on GPUs of their own")
    if int(gpus[-1]) >= cluster.max_gpus:
        raise PlanError(f"cluster {cluster.name}: GPU {int(gpus[-1])} is beyond its {cluster.max_gpus:,}")
    return Topology(cluster=cluster, gpus=int(gpus[-1]) + 1)


class _Part:
    """A job's share of the run: one step's tasks, how its ranks differ, and what they load."""

    def __init__(self, placed: PlacedJob, topology: Topology) -> None:
        roles, cluster = placed.roles, topology.cluster
        self.placed, self.tasks = placed, roles.tasks
        _check_alike(placed, cluster)
        slow = {entry.node: 1 / entry.compute for entry in cluster.slow_nodes}
        nodes = (placed.gpus // cluster.gpus_per_node).tolist()
        every = EveryRank(slow={rank: slow[node] for rank, node in enumerate(nodes) if node in slow})
        self.columns = kernel_columns(placed.mesh, self.tasks, every)
        self.loading: Loading = loading(roles.job, self.tasks, roles.times, topology, placed.gpus)


def _check_alike(placed: PlacedJob, cluster: Cluster) -> None:
    """Refuses groups of one kind that lie differently on nodes: one duration stands for all of them."""
    job, mesh = placed.roles.job, placed.mesh
    ranks = mesh.ranks().ravel()
    for group in job.groups:
        if not group.axes:
            continue
        offsets = np.asarray(job.group_ranks(group))
        first = np.unique(ranks - _offset(job, group.axes, ranks))
        where = {
            (place.domains, place.ranks_per_domain)
            for place in (cluster.place(np.sort(placed.gpus[base + offsets]).tolist()) for base in first.tolist())
        }
        if len(where) > 1:
            raise PlanError(
                f"{placed.name}: its {group.label} groups lie differently on the nodes "
                f"({', '.join(f'{d} x {r}' for d, r in sorted(where))} ranks): give it GPUs that spread them alike"
            )


def _offset(job: Any, axes: Sequence[str], ranks: Int64) -> Int64:
    """How far each rank lies behind the one of its group whose coordinates along the axes are 0."""
    behind, stride = np.zeros(len(ranks), np.int64), job.world_size
    for axis in job.mesh:
        stride //= axis.size
        if axis.name in axes:
            behind += ranks // stride % axis.size * stride
    return behind


def _while_all_run(parts: list[_Part], alone: list[float], topology: Topology) -> tuple[list[int], list[Int64]]:
    """How many steps of each job are counted, and when each of its steps ends, while no job has ended yet."""
    longest = max(a * p.placed.storage.every for a, p in zip(alone, parts, strict=True))
    repeats = [_whole(ceil(longest / max(a, 1.0)), p) for a, p in zip(alone, parts, strict=True)]
    while True:
        ends = _ends(parts, repeats, topology)
        window = max(int(e[p.placed.storage.every - 1]) for e, p in zip(ends, parts, strict=True))
        short = [i for i, e in enumerate(ends) if e[-1] < window]
        if not short:
            break
        for i in short:
            mean = ends[i][-1] / repeats[i]
            repeats[i] = _whole(repeats[i] + ceil((window - ends[i][-1]) / max(mean, 1.0)), parts[i])
    counts = [
        max(1, int((e <= window).sum()) // p.placed.storage.every) * p.placed.storage.every
        for e, p in zip(ends, parts, strict=True)
    ]
    return counts, ends


def _whole(steps: int, part: _Part) -> int:
    """Steps that end with a checkpoint."""
    every = part.placed.storage.every
    return max(1, ceil(steps / every)) * every


def _ends(parts: list[_Part], repeats: list[int], topology: Topology, *, storage: bool = True) -> list[Int64]:
    """int64 [steps] of each job, picoseconds, when its steps end that run side by side."""
    # Loaded where it is needed: the compiler comes with it.
    from echograph.simulator.engine import events

    width = max(len(part.columns) for part in parts)
    events_of_all = sum(_size(part) * len(part.columns) * n for part, n in zip(parts, repeats, strict=True))
    if events_of_all > MAX_EVENTS or max(repeats) > MOST_STEPS:
        raise SimulationError(
            f"the jobs' steps have more than {MAX_EVENTS:,} tasks, or one job {MOST_STEPS:,} steps while another "
            "has one: give smaller jobs, or some whose steps are more alike"
        )
    runs = [_repeated(part, count, storage) for part, count in zip(parts, repeats, strict=True)]
    shared = share([part.loading for part in parts], topology)
    sharing = _side_by_side([_with_storage(s, r) for s, r in zip(shared, runs, strict=True)], width)
    tasks = _one_after_the_other([run.tasks for run in runs])
    columns = _widened([run.columns for run in runs], width)
    present = [np.arange(width) < len(part.columns) for part in parts]
    absent = np.concatenate(
        [np.tile(~here, (run.tasks.resources, 1)) for here, run in zip(present, runs, strict=True)]
    )
    start = events.run_columns(tasks, columns, sharing, record=0, absent=absent).start
    first = accumulate((len(run.tasks) for run in runs), initial=0)
    return [start[at + run.barriers] for at, run in zip(first, runs, strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Run:
    """The tasks of some steps of a job, one after the other.

    Attributes:
        tasks: the steps, each followed by what it reads and writes, and by the meeting of all ranks.
        columns: as of the step, for them.
        barriers: int64 [steps], the first task of each meeting.
        repeats: how many steps.
        reads: tasks that load storage, of all steps.
        bytes_per_s: of the storage.
    """

    tasks: TaskGraph
    columns: Columns
    barriers: Int64
    repeats: int
    reads: Int64
    bytes_per_s: float


def _repeated(part: _Part, count: int, storage: bool) -> _Run:
    """Some steps; every rank of the job waits for all others at the end of each, and for the storage."""
    step, columns, io = part.tasks, part.columns, part.placed.storage if storage else Storage()
    programs = len(part.placed.roles.job.programs)
    read_ps, write_ps = (
        to_ps(n / io.bytes_per_s) if io.bytes_per_s else 0 for n in (io.read_bytes, io.checkpoint_bytes)
    )
    if max(read_ps, write_ps) > LONGEST_PS:
        raise SimulationError(
            f"{part.placed.name}: what a step reads or writes takes the storage more than "
            f"{to_s(LONGEST_PS) / 86_400:.0f} days: give --storage-gbps more"
        )
    size, lanes = _size(part), step.resources // programs
    its = np.arange(programs, dtype=np.int32)
    reader, writer, host = step.resources + its, step.resources + programs + its, its * lanes
    last = _last_of_resources(step)
    reads, writes, waits = (len(step) + k * programs + its for k in range(3))
    deps: list[list[int]] = [[] for _ in range(programs)]
    deps += [last[p * lanes : (p + 1) * lanes] for p in range(programs)]
    deps = [[task for task in of if task != NONE] for of in deps]
    deps += [[*deps[programs + p], int(reads[p]), int(writes[p])] for p in range(programs)]
    deps += [[int(reads[p])] for p in range(programs)]
    meetings = int(step.rendezvous.max(initial=NONE)) + 1
    extra = np.repeat(np.array([meetings, meetings + 1, meetings + 2, meetings + 2], np.int32), programs)
    one = TaskGraph(
        resource=np.concatenate([step.resource, reader, writer, host, reader]).astype(np.int32),
        duration=np.concatenate([step.duration, np.repeat([read_ps, write_ps, 0, 0], programs)]).astype(np.int64),
        deps=_followed(step.deps, deps),
        rendezvous=np.concatenate([step.rendezvous, extra]).astype(np.int32),
        program=np.concatenate([step.program, np.tile(its, 4)]).astype(np.int32),
        lane=np.concatenate([step.lane, np.full(4 * programs, HOST, np.uint8)]),
        op=np.concatenate([step.op, np.zeros(4 * programs, np.int64)]),
        instance=np.concatenate([step.instance, np.zeros(4 * programs, np.int32)]),
        micro_batch=np.concatenate([step.micro_batch, np.zeros(4 * programs, np.int32)]),
        resources=step.resources + 2 * programs,
    )
    tasks = _one_after_the_other([one] * count, resources=one.resources)
    written = np.tile(writes, (count, 1)) + size * np.arange(count)[:, None]
    idle = np.arange(count) % io.every != io.every - 1
    tasks.duration[written[idle].ravel()] = 0
    everywhere = len(columns.places)
    place = np.concatenate([columns.place, np.full(4 * programs, everywhere, np.int32)]).astype(np.int32)
    kind = np.concatenate([columns.kind, np.zeros(4 * programs, np.int32)]).astype(np.int32)
    read = np.concatenate([reads, writes])
    return _Run(
        tasks=tasks,
        columns=replace(
            columns,
            kind=np.tile(kind, count),
            place=np.tile(place, count),
            places=np.vstack([columns.places, np.zeros((1, len(columns)), np.int32)]).astype(np.int32),
        ),
        barriers=int(waits[0]) + size * np.arange(count),
        repeats=count,
        reads=(read[None] + size * np.arange(count if io.bytes_per_s else 0)[:, None]).ravel(),
        bytes_per_s=io.bytes_per_s,
    )


def _size(part: _Part) -> int:
    """Tasks of a step, and behind it of each program: it reads, writes, and waits on its host and its reader."""
    return len(part.tasks) + 4 * len(part.placed.roles.job.programs)


def _last_of_resources(step: TaskGraph) -> list[int]:
    """The last task of each resource; -1 of those that have none."""
    last = np.full(step.resources, NONE, np.int64)
    last[step.resource] = np.arange(len(step))
    return last.tolist()


def _followed(deps: Ragged, more: list[list[int]]) -> Ragged:
    lengths = np.concatenate([deps.lengths, [len(of) for of in more]])
    values = np.concatenate([deps.values, np.array([task for of in more for task in of], np.int32)])
    return Ragged(np.concatenate([[0], np.cumsum(lengths)]), values.astype(np.int32))


def _one_after_the_other(graphs: Sequence[TaskGraph], resources: int | None = None) -> TaskGraph:
    """Graphs as one.

    Args:
        graphs: the graphs.
        resources: how many there are, where all have the same; None: each has its own.
    """
    tasks = [0, *accumulate(len(g) for g in graphs)]
    meetings = [0, *accumulate(int(g.rendezvous.max(initial=NONE)) + 1 for g in graphs)]
    own = [0] * (len(graphs) + 1) if resources is not None else [0, *accumulate(g.resources for g in graphs)]
    edges = [0, *accumulate(len(g.deps.values) for g in graphs)]

    def joined(field: str) -> np.ndarray:
        return np.concatenate([getattr(g, field) for g in graphs])

    met = [np.where(g.rendezvous == NONE, NONE, g.rendezvous + m) for g, m in zip(graphs, meetings, strict=False)]
    offsets = [g.deps.offsets[:-1] + e for g, e in zip(graphs, edges, strict=False)]
    return TaskGraph(
        resource=np.concatenate([g.resource + r for g, r in zip(graphs, own, strict=False)]).astype(np.int32),
        duration=joined("duration"),
        deps=Ragged(
            np.concatenate([*offsets, [edges[-1]]]),
            np.concatenate([g.deps.values + t for g, t in zip(graphs, tasks, strict=False)]).astype(np.int32),
        ),
        rendezvous=np.concatenate(met).astype(np.int32),
        program=joined("program"),
        lane=joined("lane"),
        op=joined("op"),
        instance=joined("instance"),
        micro_batch=joined("micro_batch"),
        resources=resources if resources is not None else own[-1],
    )


def _widened(jobs: Sequence[Columns], width: int) -> Columns:
    """Columns of all jobs side by side; those that a narrow job lacks meet nobody."""
    kinds = [0, *accumulate(len(c.factor) for c in jobs)]
    rows = [0, *accumulate(len(c.places) for c in jobs)]
    factor, places = np.ones((kinds[-1], width)), np.tile(np.arange(width, dtype=np.int32), (rows[-1], 1))
    for its, kind, row in zip(jobs, kinds, rows, strict=False):
        factor[kind : kind + len(its.factor), : len(its)] = its.factor
        places[row : row + len(its.places), : len(its)] = its.places
    place = [np.where(c.place == NONE, NONE, c.place + row) for c, row in zip(jobs, rows, strict=False)]
    return Columns(
        kind=np.concatenate([c.kind + kind for c, kind in zip(jobs, kinds, strict=False)]).astype(np.int32),
        factor=factor,
        place=np.concatenate(place).astype(np.int32),
        places=places,
    )


def _with_storage(step: Sharing, run: _Run) -> Sharing:
    """The sharing of all steps of a run; what it reads and writes loads one more link, the last."""
    extra = len(run.tasks) // run.repeats - len(step.load)
    load = np.tile(np.concatenate([step.load, np.zeros(extra)]), run.repeats)
    route = np.tile(np.concatenate([step.route, np.full(extra, NONE, np.int32)]), run.repeats)
    load[run.reads], route[run.reads] = run.bytes_per_s, len(step.routes)
    # All ranks meet for it, so it is one flow at the first place.
    row = np.zeros((1, step.routes.shape[1]), np.int32)
    row[0, 0] = len(step.links.offsets) - 1
    return Sharing(
        capacity=np.append(step.capacity, run.bytes_per_s or 1.0),
        load=load,
        route=route.astype(np.int32),
        routes=np.vstack([step.routes, row]).astype(np.int32),
        links=Ragged(
            np.append(step.links.offsets, step.links.offsets[-1] + 1),
            np.append(step.links.values, len(step.capacity)),
        ),
        weight=np.append(step.weight, 1.0),
    )


def _side_by_side(jobs: Sequence[Sharing], width: int) -> Sharing:
    """The sharing of all jobs."""
    rows = [0, *accumulate(len(s.routes) for s in jobs)]
    links = [0, *accumulate(len(s.links.offsets) - 1 for s in jobs)]
    hops = [0, *accumulate(len(s.links.values) for s in jobs)]
    routes = np.zeros((rows[-1], width), np.int32)
    for its, row, link in zip(jobs, rows, links, strict=False):
        routes[row : row + len(its.routes), : its.routes.shape[1]] = np.where(
            its.routes == NONE, NONE, its.routes + link
        )
    offsets = [s.links.offsets[:-1] + hop for s, hop in zip(jobs, hops, strict=False)]
    route = [np.where(s.route == NONE, NONE, s.route + row) for s, row in zip(jobs, rows, strict=False)]
    # Storage is the last link; where a job has none, another may.
    capacity: Float64 = np.max([s.capacity for s in jobs], axis=0)
    return Sharing(
        capacity=capacity,
        load=np.concatenate([s.load for s in jobs]),
        route=np.concatenate(route).astype(np.int32),
        routes=routes,
        links=Ragged(
            np.concatenate([*offsets, [hops[-1]]]), np.concatenate([s.links.values for s in jobs]).astype(np.int64)
        ),
        weight=np.concatenate([s.weight for s in jobs]),
    )


def _contended(parts: list[_Part], found: list[JobShare], topology: Topology) -> list[ContendedLink]:
    """Links that can be asked for too much, and that more than one job loads; storage is one."""
    carried = np.array([part.loading.carried for part in parts])
    rate = np.sum([c / max(job.shared_ps / 1e12, 1e-12) for c, job in zip(carried, found, strict=True)], axis=0)
    both = overloaded([part.loading for part in parts], topology) & ((carried > 0).sum(axis=0) > 1)
    used = np.where(both, rate / topology.capacity, 0.0)
    alike: dict[tuple[str, str], list[int]] = {}
    for link in np.argsort(-used, kind="stable")[: int(both.sum())].tolist():
        alike.setdefault((topology.kind(link), f"{used[link]:.3g}"), []).append(link)
    told = [
        ContendedLink(
            name=topology.name(links[0]),
            alike=len(links),
            nbytes={job.name: float(carried[i, links[0]]) for i, job in enumerate(found)},
            utilisation=float(used[links[0]]),
        )
        for links in list(alike.values())[:MOST_LINKS]
    ]
    its = [part.placed.storage for part in parts]
    moved = {
        job.name: io.read_bytes + io.checkpoint_bytes / io.every
        for job, io in zip(found, its, strict=True)
        if io.bytes_per_s
    }
    if len(moved) > 1:
        rate_of_all = sum(moved[job.name] / job.shared_ps * 1e12 for job in found if job.name in moved)
        of_storage = rate_of_all / max(io.bytes_per_s for io in its)
        told.append(ContendedLink(name="storage", alike=1, nbytes=moved, utilisation=of_storage))
    return told
