"""The flow level of the network: which links each communication of a job loads, and how much.

A collective alone takes what the closed form says of a group that has the network for itself. Its bytes spread
over that time are its load on every link of its route. What it then loses to others (sibling groups on the same
NICs, levels that are oversubscribed, links that are degraded) is not assumed, as in the closed form, but comes out
of the simulation: `flows` makes the `Sharing` that the event engine shares links by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from echograph.errors import SimulationError
from echograph.ir.columns import NONE, Float64, Int32, Int64, Ragged
from echograph.ir.graph import Group, JobGraph
from echograph.ir.types import OpKind
from echograph.simulator.clusters import Cluster
from echograph.simulator.collectives import ALGORITHMS, CollectiveEstimate, CollectiveName, collective_time
from echograph.simulator.durations import Durations, Estimate, kind_of
from echograph.simulator.engine.sharing import Sharing
from echograph.simulator.groups import place_in_group
from echograph.simulator.network.patterns import Loads, Pattern, loads
from echograph.simulator.network.topology import Topology
from echograph.simulator.ranks import Mesh
from echograph.simulator.tasks import DEVICE, TaskGraph
from echograph.units import to_s

MAX_LOADS = 100_000_000
"""Loads of all groups on all links together, some gigabytes."""
TOLERANCE = 1e-9
"""By how much sums of shares may be off."""
BUSIEST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """What a link carried in a step.

    Attributes:
        name: of the link, the first of those that are used alike.
        alike: links of its kind that are used as much, itself included.
        utilisation: share of what it could have carried.
        nbytes: what it carried, as protocol Simple would have moved it.
    """

    name: str
    alike: int
    utilisation: float
    nbytes: float

    def to_json(self) -> dict[str, Any]:
        """The record under `links`."""
        return {"name": self.name, "alike": self.alike, "utilisation": self.utilisation, "bytes": self.nbytes}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flows:
    """What the communications of a job load.

    Attributes:
        topology: the links.
        sharing: which of them tasks share; links that can never be overloaded are left out of its routes.
        carried: float64 [links], bytes that each link carries in a step.
    """

    topology: Topology
    sharing: Sharing
    carried: Float64

    @property
    def contended(self) -> bool:
        """Whether any link may be asked for more than it bears. If not, every flow has all that it asks for."""
        return bool((self.sharing.route != NONE).any())

    def busiest(self, step_ps: int) -> tuple[LinkUse, ...]:
        """The links used most in a step, and how many of their kind are used alike, the most used first."""
        used = self.carried / (self.topology.capacity * max(to_s(step_ps), 1e-12))
        order = np.argsort(-used, kind="stable")
        found: dict[tuple[str, float], list[int]] = {}
        for link in order[used[order] > 0].tolist():
            kind = self.topology.kind(link)
            key = (kind, float(f"{used[link]:.3g}"))
            if key not in found and len(found) == BUSIEST:
                break
            found.setdefault(key, []).append(link)
        return tuple(
            LinkUse(
                name=self.topology.name(alike[0]),
                alike=len(alike),
                utilisation=float(used[alike[0]]),
                nbytes=float(self.carried[alike[0]]),
            )
            for alike in found.values()
        )


def links_of(job: JobGraph, cluster: Cluster) -> Topology:
    """The links that a job's ranks can load."""
    named = [0, *(rank for p in job.programs for rank in p.ranks), *(rank for g in job.groups for rank in g.ranks)]
    return Topology(cluster=cluster, gpus=max(job.world_size, 1 + max(named)))


def alone(topology: Topology, gpus: Int64 | None = None) -> Estimate:
    """How long a communication takes that has the links of its ranks for itself, for `durations`.

    The function's estimates count `network_s` at the full rate of the ports.

    Args:
        topology: the links.
        gpus: int64 [ranks], the GPU of each rank; None: its number.
    """
    cluster = topology.cluster

    def estimate(kind: CollectiveName, nbytes: float, ranks: Sequence[int]) -> CollectiveEstimate:
        if gpus is not None:
            ranks = np.sort(gpus[np.asarray(ranks)]).tolist()
        placement, members = cluster.place(ranks), np.asarray(ranks, np.int64)
        ports = topology.group_bytes_per_s(members)
        # What its GPUs get out over PCIe may be less than the ports that they share with others.
        offered = min(ports, placement.ranks_per_domain * cluster.pcie_bytes_per_s)
        found = collective_time(kind, nbytes, placement, cluster, network_bytes_per_s=offered)
        if placement.domains == 1:
            return found
        # A group as large as all that a level joins is bound by that level even when nobody else is there.
        over = loads(topology, members[None], _pattern(found, kind)).overload(topology)
        if ports / over < offered:
            found = collective_time(
                kind, nbytes, placement, cluster, algorithm=found.algorithm, network_bytes_per_s=ports / over
            )
        over = max(over, ports / offered)
        return replace(found, network_s=found.network_s / over)

    return estimate


def flows(job: JobGraph, tasks: TaskGraph, times: Durations, topology: Topology) -> Flows:
    """What every communication of a job loads, in every column (`ranks.Mesh`) of its programs.

    Args:
        job: the job.
        tasks: its tasks.
        times: its durations, with the estimates of `alone`.
        topology: the links of its GPUs.

    Raises:
        SimulationError: ranks cannot be told apart by the mesh, or too many links are loaded.
        UsageError: the cluster names a degraded link that it does not have.
    """
    mine = loading(job, tasks, times, topology)
    return Flows(topology=topology, sharing=share([mine], topology)[0], carried=mine.carried)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loading:
    """What a job's tasks put on links, whoever else does.

    Attributes:
        rows: loads by place, of one collective or message each.
        route: int32 [tasks], the row of each task; -1 for those that load nothing.
        load: float64 [tasks], the share of the row's rates that each puts on links.
        carried: float64 [links], bytes that each link carries in a step.
        asked: float64 [links], bytes/s that each is asked for at most at one time.
        columns: of the job's programs.
    """

    rows: list[Loads]
    route: Int32
    load: Float64
    carried: Float64
    asked: Float64
    columns: int


def loading(
    job: JobGraph, tasks: TaskGraph, times: Durations, topology: Topology, gpus: Int64 | None = None
) -> Loading:
    """As of `flows`, before it is known which links are shared.

    Args:
        job: the job.
        tasks: its tasks.
        times: its durations, with the estimates of `alone`.
        topology: the links of its GPUs.
        gpus: int64 [ranks], the GPU of each rank; None: its number.
    """
    routes = _Routes(job, tasks, times, topology, gpus)
    carried = np.zeros(topology.links)
    route = np.full(len(tasks), NONE, np.int32)
    load = np.zeros(len(tasks))
    for row, part, mine in routes.find():
        route[mine], load[mine] = row, part
        table = routes.rows[row]
        amount = float(tasks.duration[mine].sum()) / 1e12 * part
        carried += np.bincount(table.link, table.rate * amount, topology.links)
    return Loading(
        rows=routes.rows,
        route=route,
        load=load,
        carried=carried,
        asked=_asked(routes.rows, tasks, route, load, topology),
        columns=routes.mesh.columns,
    )


def overloaded(jobs: Sequence[Loading], topology: Topology) -> npt.NDArray[np.bool_]:
    """Bool [links]: those that jobs which run at a time may together ask for more than they bear."""
    asked = np.sum([job.asked for job in jobs], axis=0)
    return _through_ports(asked, topology) > topology.capacity * (1 + TOLERANCE)


def share(jobs: Sequence[Loading], topology: Topology) -> list[Sharing]:
    """How the tasks of each of some jobs that run at a time share links."""
    saturated = overloaded(jobs, topology)
    return [_sharing(job, saturated, topology) for job in jobs]


class _Routes:
    """The rows of `Sharing.routes` as they are found: each a `Loads` whose groups are places."""

    def __init__(
        self, job: JobGraph, tasks: TaskGraph, times: Durations, topology: Topology, gpus: Int64 | None = None
    ) -> None:
        self.job, self.tasks, self.times, self.topology, self.gpus = job, tasks, times, topology, gpus
        self.mesh = Mesh(job)
        self.ranks = self.mesh.ranks()
        self.place, self.places = self.mesh.places(tasks)
        self.rows: list[Loads] = []
        self._numbers: dict[object, int] = {}
        self._groups: dict[object, Loads] = {}

    def find(self) -> Iterator[tuple[int, float, Int64]]:
        """(row, share of the row's rates that the tasks put on its links, tasks) of all that load links."""
        tasks, ops = self.tasks, self.job.ops
        sender = np.isin(ops.kind, (OpKind.COLLECTIVE, OpKind.SEND))
        speaks = np.flatnonzero((tasks.lane == DEVICE) & sender[tasks.op] & (tasks.duration > 0))
        # Of those that meet, the first speaks for all.
        rendezvous = tasks.rendezvous[speaks]
        _, first = np.unique(
            np.where(rendezvous == NONE, -1 - np.arange(len(rendezvous)), rendezvous), return_index=True
        )
        speaks = speaks[np.sort(first)]
        code = tasks.program[speaks].astype(np.int64) * len(ops) + tasks.op[speaks]
        order = np.argsort(code, kind="stable")
        bounds = np.flatnonzero(np.diff(code[order], prepend=NONE))
        for mine in np.split(speaks[order], bounds[1:]) if len(order) else []:
            program, row = int(tasks.program[mine[0]]), int(tasks.op[mine[0]])
            node, network = self._shares(row)
            if most := max(node, network):
                number = self._row(program, row, int(self.place[mine[0]]), node / most, network / most)
                if len(self.rows[number].link):
                    yield number, most, mine

    def _shares(self, row: int) -> tuple[float, float]:
        """Shares of its time for which an operation keeps the links inside and between domains busy."""
        found = self.times.estimates[row]
        seconds = found.seconds if row in self.times.algorithm else to_s(int(self.times.picoseconds[row]))
        if not seconds:
            return 0.0, 0.0
        return min(1.0, found.node_s / seconds), min(1.0, found.network_s / seconds)

    def _row(self, program: int, row: int, place: int, node: float, network: float) -> int:
        """The number of a row of routes. Shares are cut off, so that a collective alone overloads nothing."""
        node, network = (np.floor(share * 1e9) / 1e9 for share in (node, network))
        group = self._loads(program, row, place)
        key = (id(group), node, network)
        if key not in self._numbers:
            rate = group.rate * np.where(group.network, network, node)
            keep = rate > 0
            self._numbers[key] = len(self.rows)
            self.rows.append(Loads(group.group[keep], group.link[keep], rate[keep], group.network[keep]))
            if sum(len(r.link) for r in self.rows) > MAX_LOADS:
                raise SimulationError(
                    f"the job's groups load links more than {MAX_LOADS:,} times: simulate fewer GPUs, or choose "
                    "--network closed-form"
                )
        return self._numbers[key]

    def _loads(self, program: int, row: int, place: int) -> Loads:
        """What the groups load that run an operation, at every place where columns of a program meet for it."""
        ops, group = self.job.ops, self.job.groups[int(self.job.ops.group[row])]
        sends = ops.kind[row] == OpKind.SEND
        pattern = _pattern(self.times.estimates[row], kind_of(self.job, row))
        key = (program, int(ops.group[row]), int(ops.peer[row]) if sends else None, pattern, place)
        if key not in self._groups:
            columns = np.unique(self.places[place]) if place >= 0 else np.arange(self.mesh.columns)
            members = self._members(group, program, columns, int(ops.peer[row]) if sends else None)
            found = loads(self.topology, members, pattern)
            self._groups[key] = found._replace(group=columns[found.group])
        return self._groups[key]

    def _members(self, group: Group, program: int, columns: Int64, peer: int | None) -> Int64:
        """int64 [columns, ranks]: the GPUs of each column's group, or of its rank and the one that it sends to."""
        job = self.job
        if not group.axes:
            here = np.full(len(columns), place_in_group(job, group, job.programs[program]))
            members = np.tile(np.array(group.ranks, np.int64), (len(columns), 1))
        else:
            ranks, offsets = self.ranks[program, columns], np.asarray(job.group_ranks(group))
            here = _coordinates(job, group, ranks)
            members = (ranks - offsets[here])[:, None] + offsets
        if peer is not None:
            ends = np.stack([here, (here + peer) % members.shape[1]], axis=1)
            members = np.take_along_axis(members, ends, axis=1)
        placed = members if self.gpus is None else self.gpus[members]
        return placed if peer is not None else np.sort(placed, axis=1)


def _coordinates(job: JobGraph, group: Group, ranks: Int64) -> Int64:
    """The places of ranks in their groups."""
    here, stride = np.zeros(len(ranks), np.int64), job.world_size
    for axis in job.mesh:
        stride //= axis.size
        if axis.name in group.axes:
            here = here * axis.size + ranks // stride % axis.size
    return np.searchsorted(group.positions, here) if group.positions else here


def _pattern(found: CollectiveEstimate, kind: CollectiveName) -> Pattern:
    pattern: Pattern = ALGORITHMS[found.algorithm].pattern("all_reduce" if kind == "barrier" else kind)
    return pattern


def _sharing(job: Loading, saturated: npt.NDArray[np.bool_], topology: Topology) -> Sharing:
    """Routes over the links that can be overloaded."""
    rows, route, tasks = job.rows, job.route, len(job.route)
    routes = np.zeros((max(1, len(rows)), job.columns), np.int32)
    # Row 0 of the links is empty: the route of those that share nothing at their place.
    lengths, links, weights = [np.zeros(1, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0)]
    used, unit = np.zeros(len(rows), np.bool_), np.ones(len(rows))
    for number, row in enumerate(rows):
        keep = saturated[row.link]
        if keep.any():
            used[number], unit[number] = True, row.rate[keep].max()
            places, counts = np.unique(row.group[keep], return_counts=True)
            routes[number, places] = sum(map(len, lengths)) + np.arange(len(places))
            lengths.append(counts)
            links.append(row.link[keep])
            weights.append(row.rate[keep] / unit[number])
    shares = np.flatnonzero(route != NONE)
    shares = shares[used[route[shares]]]
    its_route, its_load = np.full(tasks, NONE, np.int32), np.zeros(tasks)
    its_route[shares] = route[shares]
    its_load[shares] = job.load[shares] * unit[route[shares]]
    return Sharing(
        capacity=topology.capacity,
        load=its_load,
        route=its_route,
        routes=routes,
        links=Ragged(np.concatenate([[0], np.cumsum(np.concatenate(lengths))]), np.concatenate(links)),
        weight=np.concatenate(weights),
    )


def _asked(rows: list[Loads], tasks: TaskGraph, route: Int32, load: Float64, topology: Topology) -> Float64:
    """float64 [links]: what they can be asked for at most at one time.

    At a place a stream runs one task at a time.
    """
    most = np.zeros(topology.links)
    routed = np.flatnonzero(route != NONE)
    shares = np.zeros((tasks.resources, len(rows)))
    np.maximum.at(shares, (tasks.resource[routed], route[routed]), load[routed])
    for resource in np.flatnonzero(shares.any(axis=1)).tolist():
        its = np.flatnonzero(shares[resource]).tolist()
        key = np.concatenate([rows[row].group * topology.links + rows[row].link for row in its])
        rate = np.concatenate([rows[row].rate * shares[resource, row] for row in its])
        order = np.argsort(key, kind="stable")
        first = np.flatnonzero(np.diff(key[order], prepend=NONE))
        most += np.bincount(key[order[first]] % topology.links, np.maximum.reduceat(rate[order], first), len(most))
    return most


def _through_ports(asked: Float64, topology: Topology) -> Float64:
    """What links are asked for at most, as what climbs has come through ports."""
    most = asked.copy()
    ports = np.arange(topology.nodes * topology.ports)
    for tier in topology.tiers:
        for end in (0, 1):
            below = topology.capacity[topology.of_port(ports) + end]
            link = topology.above(tier, ports) + end
            through = np.bincount(link, below, len(most))
            most[link] = np.minimum(most[link], through[link])
    return most
