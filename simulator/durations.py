"""How long each operation takes on a cluster: what the graph says of its device, and the model of its network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from echograph.errors import SimulationError
from echograph.ir.columns import NONE, Bools, Float32, Int64, UInt8, equal_rows
from echograph.ir.graph import Group, JobGraph, Program
from echograph.ir.types import COMMUNICATIONS, CollectiveKind, OpKind, Source
from echograph.simulator.clusters import Cluster, GroupPlacement
from echograph.simulator.collectives import CollectiveEstimate, CollectiveName, collective_time
from echograph.simulator.groups import place_in_group
from echograph.units import to_ps

_KINDS: dict[int, CollectiveName] = {
    CollectiveKind.ALL_REDUCE: "all_reduce",
    CollectiveKind.ALL_GATHER: "all_gather",
    CollectiveKind.REDUCE_SCATTER: "reduce_scatter",
    CollectiveKind.ALL_TO_ALL: "all_to_all",
    CollectiveKind.BROADCAST: "broadcast",
    CollectiveKind.REDUCE: "reduce",
    CollectiveKind.BARRIER: "barrier",
}
Estimate = Callable[[CollectiveName, float, Sequence[int]], CollectiveEstimate]
"""How long a communication takes, by kind, bytes and ranks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Durations:
    """Time of every row of the operation table.

    Attributes:
        picoseconds: int64.
        source: uint8, `types.Source` values; 0 where an operation takes no time.
        spread: float32, relative standard error.
        algorithm: for collectives that the network model timed, what it chose ("ring/LL128"), by row.
        estimates: what it said, by row; of all communications where every one was asked for.
    """

    picoseconds: Int64
    source: UInt8
    spread: Float32
    algorithm: dict[int, str]
    estimates: dict[int, CollectiveEstimate] = field(default_factory=dict)


def durations(
    job: JobGraph, cluster: Cluster, estimate: Estimate | None = None, network: NetworkModel | None = None
) -> Durations:
    """Times on a cluster: those of its device first, else imported ones, else the network's model.

    Args:
        job: the job.
        cluster: where it runs.
        estimate: another model of the network than `collective_time`, asked for every communication.
        network: the cluster's, where it keeps what it said of other jobs.

    Raises:
        SimulationError: a device operation has no duration for the cluster's device, or links are degraded, which
            `collective_time` does not know.
    """
    if cluster.degraded and estimate is None:
        raise SimulationError(
            f"cluster {cluster.name}: '{cluster.degraded[0].link}' is degraded, and the closed form knows no "
            "single links: simulate flows"
        )
    picoseconds, source, spread = job.ops.duration_on(cluster.device)
    _use_imported(job, picoseconds, source, spread)
    still = job.ops.is_view | (job.ops.kind == OpKind.HOST)
    picoseconds[still & (picoseconds == NONE)] = 0
    ask = estimate or (network or NetworkModel(cluster)).time
    communicates = np.isin(job.ops.kind, COMMUNICATIONS)
    runs = cache(lambda number: job.run_counts(number) > 0)
    rows = np.flatnonzero(communicates & ((picoseconds == NONE) | (estimate is not None)))
    # Where a message goes depends on the program that runs it.
    alone = np.where(job.ops.kind[rows] == OpKind.COLLECTIVE, NONE, rows)
    columns = [alone, *(column[rows] for column in (job.ops.variant, job.ops.group, job.ops.nbytes))]
    first, alike = equal_rows(np.stack(columns, axis=1).astype(np.int64))
    found = [
        ask(kind_of(job, row), int(job.ops.nbytes[row]), _first_ranks(job, row, runs))
        for row in rows[first].tolist()
    ]
    estimates = dict(zip(rows.tolist(), map(found.__getitem__, alike.tolist()), strict=True))
    new = picoseconds[rows] == NONE
    timed, of = rows[new], alike[new]
    picoseconds[timed] = np.array([to_ps(its.seconds) for its in found], np.int64)[of]
    source[timed] = Source.FITTED
    spread[timed] = np.array([its.spread for its in found], np.float32)[of]
    said = [f"{its.algorithm}/{its.protocol}" for its in found]
    algorithm = dict(zip(timed.tolist(), map(said.__getitem__, of.tolist()), strict=True))
    missing = np.flatnonzero(picoseconds == NONE)
    if len(missing):
        name = job.strings[job.ops.name[missing[0]]]
        raise SimulationError(
            f"{len(missing)} operations, '{name}' first, have no duration on device "
            f"'{cluster.device}': annotate the graph"
        )
    return Durations(
        picoseconds=picoseconds, source=source, spread=spread, algorithm=algorithm, estimates=estimates
    )


class NetworkModel:
    """The model of a cluster's network, which keeps what it has said: plans ask for many collectives again.

    Args:
        cluster: the cluster.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._placed: dict[range | tuple[int, ...], GroupPlacement] = {}
        self._known: dict[tuple[CollectiveName, float, GroupPlacement], CollectiveEstimate] = {}

    def time(self, kind: CollectiveName, nbytes: float, ranks: Sequence[int]) -> CollectiveEstimate:
        """What `collective_time` says."""
        where = ranks if isinstance(ranks, range) else tuple(ranks)
        if where not in self._placed:
            self._placed[where] = self.cluster.place(ranks)
        key = kind, nbytes, self._placed[where]
        if key not in self._known:
            self._known[key] = collective_time(kind, nbytes, key[2], self.cluster)
        return self._known[key]


def message_ps(job: JobGraph, network: NetworkModel, row: int, program: Program) -> int:
    """Picoseconds that the network's model says of a send or a receive at a place of the mesh.

    Args:
        job: the job.
        network: of where it runs.
        row: the operation.
        program: of the rank that runs it; what it says of its place counts.

    Raises:
        SimulationError: the operation names a peer that the group does not have.
    """
    group = job.groups[int(job.ops.group[row])]
    ranks = _ends(job, group, row, program)
    return to_ps(network.time(kind_of(job, row), int(job.ops.nbytes[row]), ranks).seconds)


def _use_imported(job: JobGraph, picoseconds: Int64, source: UInt8, spread: Float32) -> None:
    ops = job.ops
    imported = np.flatnonzero(ops.duration_source == Source.IMPORTED)
    rows = ops.duration.rows[imported]
    free = picoseconds[rows] == NONE
    rows, imported = rows[free], imported[free]
    picoseconds[rows] = ops.duration.values[imported]
    source[rows] = Source.IMPORTED
    spread[rows] = ops.duration_spread[imported]


def kind_of(job: JobGraph, row: int) -> CollectiveName:
    """What a communication is for the network's model."""
    if job.ops.kinds[row] != OpKind.COLLECTIVE:
        return "send_recv"
    return _KINDS.get(int(job.ops.variant[row]), "broadcast")


def _first_ranks(job: JobGraph, row: int, runs: Callable[[int], Bools]) -> Sequence[int]:
    """The ranks of a communication in the first group of its kind: those whose other coordinates are 0.

    Args:
        job: the job.
        row: the communication.
        runs: says of a program by its number which rows it runs.
    """
    group = job.groups[int(job.ops.group[row])]
    return job.group_ranks(group) if job.ops.kinds[row] == OpKind.COLLECTIVE else _pair(job, group, row, runs)


def _pair(job: JobGraph, group: Group, row: int, runs: Callable[[int], Bools]) -> Sequence[int]:
    """The ranks that a send or receive links, in the first program that runs it and says its place."""
    for number, program in enumerate(job.programs):
        if set(group.axes) <= program.coordinates.keys() and runs(number)[row]:
            return _ends(job, group, row, program)
    return job.group_ranks(group)


def _ends(job: JobGraph, group: Group, row: int, program: Program) -> Sequence[int]:
    """The ranks that a send or receive links, of which one is the program."""
    ranks = job.group_ranks(group, program.coordinates)
    here, peer = place_in_group(job, group, program), int(job.ops.peer[row])
    if abs(peer) >= len(ranks):
        name = job.strings[job.ops.name[row]]
        raise SimulationError(f"operation {row} ({name}) names peer {peer:+} in a group of {len(ranks)}")
    return [ranks[here], ranks[(here + peer) % len(ranks)]]
