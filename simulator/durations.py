"""How long each operation takes on a cluster: what the graph says of its device, and the model of its network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from echograph.errors import SimulationError
from echograph.ir.columns import NONE, Float32, Int8, Int64
from echograph.ir.graph import Group, JobGraph, Program
from echograph.ir.types import COMMUNICATIONS, CollectiveKind, OpKind, Source
from echograph.simulator.clusters import Cluster
from echograph.simulator.collectives import CollectiveEstimate, Kind, collective_time
from echograph.units import to_ps

_KINDS: dict[int, Kind] = {
    CollectiveKind.ALL_REDUCE: "all_reduce",
    CollectiveKind.ALL_GATHER: "all_gather",
    CollectiveKind.REDUCE_SCATTER: "reduce_scatter",
    CollectiveKind.ALL_TO_ALL: "all_to_all",
    CollectiveKind.BROADCAST: "broadcast",
    CollectiveKind.REDUCE: "reduce",
    CollectiveKind.BARRIER: "barrier",
}
Estimate = Callable[[Kind, float, Sequence[int]], CollectiveEstimate]
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
    source: Int8
    spread: Float32
    algorithm: dict[int, str]
    estimates: dict[int, CollectiveEstimate] = field(default_factory=dict)


def durations(job: JobGraph, cluster: Cluster, estimate: Estimate | None = None) -> Durations:
    """Times on a cluster: those of its device first, else imported ones, else the network's model.

    Args:
        job: the job.
        cluster: where it runs.
        estimate: another model of the network than `collective_time`, asked for every communication.

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
    algorithm: dict[int, str] = {}
    estimates: dict[int, CollectiveEstimate] = {}
    ask = estimate or (lambda kind, nbytes, ranks: collective_time(kind, nbytes, cluster.place(ranks), cluster))
    communicates = np.isin(job.ops.kind, COMMUNICATIONS)
    for row in np.flatnonzero(communicates & ((picoseconds == NONE) | (estimate is not None))).tolist():
        found = estimates[row] = ask(kind_of(job, row), int(job.ops.nbytes[row]), _first_ranks(job, row))
        if picoseconds[row] == NONE:
            picoseconds[row], source[row], spread[row] = to_ps(found.seconds), Source.FITTED, found.spread
            algorithm[row] = f"{found.algorithm}/{found.protocol}"
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


def _use_imported(job: JobGraph, picoseconds: Int64, source: Int8, spread: Float32) -> None:
    ops = job.ops
    imported = np.flatnonzero(ops.duration_source == Source.IMPORTED)
    rows = ops.duration.rows[imported]
    free = picoseconds[rows] == NONE
    rows, imported = rows[free], imported[free]
    picoseconds[rows] = ops.duration.values[imported]
    source[rows] = Source.IMPORTED
    spread[rows] = ops.duration_spread[imported]


def kind_of(job: JobGraph, row: int) -> Kind:
    """What a communication is for the network's model."""
    if job.ops.kind[row] != OpKind.COLLECTIVE:
        return "send_recv"
    return _KINDS.get(int(job.ops.variant[row]), "broadcast")


def _first_ranks(job: JobGraph, row: int) -> Sequence[int]:
    """The ranks of a communication in the first group of its kind: those whose other coordinates are 0."""
    group = job.groups[int(job.ops.group[row])]
    return group_ranks(job, group) if job.ops.kind[row] == OpKind.COLLECTIVE else _pair(job, group, row)


def _pair(job: JobGraph, group: Group, row: int) -> Sequence[int]:
    """The ranks that a send or receive links, in the first program that runs it and says its place."""
    for program in job.programs:
        runs = (program.calls[:, 1] <= row) & (row < program.calls[:, 2])
        if runs.any() and set(group.axes) <= program.coordinates.keys():
            ranks = group_ranks(job, group, dict(program.coordinates))
            here, peer = place_in_group(job, group, program), int(job.ops.peer[row])
            there = (here + peer) % len(ranks)
            if abs(peer) >= len(ranks):
                name = job.strings[job.ops.name[row]]
                raise SimulationError(f"operation {row} ({name}) names peer {peer:+} in a group of {len(ranks)}")
            return [ranks[here], ranks[there]]
    return group_ranks(job, group)


def group_ranks(job: JobGraph, group: Group, fixed: dict[str, int] | None = None) -> range | list[int]:
    """Ranks of a group whose coordinates along other axes are `fixed` (0 where not named)."""
    if not group.axes:
        return list(group.ranks)
    whole = _along(job, group, fixed or {})
    return [whole[position] for position in group.positions] or whole


def _along(job: JobGraph, group: Group, fixed: dict[str, int]) -> range | list[int]:
    """All ranks along the axes of a group."""
    strides = _strides(job)
    start = sum(strides[axis] * value for axis, value in fixed.items() if axis not in group.axes)
    sizes = {a.name: a.size for a in job.mesh}
    if len(group.axes) == 1:
        (axis,) = group.axes
        return range(start, start + sizes[axis] * strides[axis], strides[axis])
    ranks = np.array([start], np.int64)
    for axis in group.axes:
        ranks = (ranks[:, None] + np.arange(sizes[axis]) * strides[axis]).ravel()
    return sorted(ranks.tolist())


def meeting(job: JobGraph, number: int, row: int) -> object:
    """The key under which tasks meet for a communication, or None where they meet only their own like.

    Programs of one role stand for many ranks; a group whose axes the role leaves free lies within the role. There
    a collective meets itself, and a send the receive of a neighbour, which is when the role itself receives.
    """
    ops = job.ops
    program, group_index = job.programs[number], int(ops.group[row])
    group = job.groups[group_index]
    if not any(n != number and _meet(job, group, program, p) for n, p in enumerate(job.programs)):
        return _within(job, number, row)
    # An explicit group is one set of ranks, whatever the places of its members.
    fixed = tuple(sorted((a, v) for a, v in program.coordinates.items() if group.axes and a not in group.axes))
    key: tuple[object, ...] = (group_index, fixed)
    if ops.kind[row] == OpKind.COLLECTIVE:
        return key
    here = place_in_group(job, group, program)
    there = (here + int(ops.peer[row])) % job.group_size(group)
    sender, receiver = (here, there) if ops.kind[row] == OpKind.SEND else (there, here)
    return (*key, sender, receiver, int(ops.tag[row]))


def _within(job: JobGraph, number: int, row: int) -> object:
    """The key of sends and receives between the ranks of one role, by how far they go."""
    ops, program = job.ops, job.programs[number]
    group = job.groups[int(ops.group[row])]
    if ops.kind[row] == OpKind.COLLECTIVE or not group.axes or set(group.axes) & program.coordinates.keys():
        return None
    towards = int(ops.peer[row]) if ops.kind[row] == OpKind.SEND else -int(ops.peer[row])
    return number, int(ops.group[row]), towards % job.group_size(group), int(ops.tag[row])


def _meet(job: JobGraph, group: Group, one: Program, other: Program) -> bool:
    if not group.axes:
        # Lists may be long: the other program is in few of them.
        return not _ranks(job, other).isdisjoint(group.ranks) and not _ranks(job, one).isdisjoint(group.ranks)
    pinned = [axis for axis in group.axes if axis in one.coordinates]
    same = all(other.coordinates.get(a) == v for a, v in one.coordinates.items() if a not in group.axes)
    return bool(pinned) and same


def _ranks(job: JobGraph, program: Program) -> set[int]:
    """The ranks that a program lists, or the one that its coordinates say."""
    if program.ranks or len(program.coordinates) < len(job.mesh) or not job.mesh:
        return set(program.ranks)
    strides = _strides(job)
    return {sum(strides[axis] * value for axis, value in program.coordinates.items())}


def _strides(job: JobGraph) -> dict[str, int]:
    """How far apart in rank two neighbours along an axis are."""
    return {a.name: prod(b.size for b in job.mesh[i + 1 :]) for i, a in enumerate(job.mesh)}


def place_in_group(job: JobGraph, group: Group, program: Program) -> int:
    """The place of a program among the ranks of a group, 0 along axes that it leaves free."""
    if not group.axes:
        mine = _ranks(job, program)
        return next(i for i, rank in enumerate(group.ranks) if rank in mine)
    place = 0
    for axis in job.mesh:
        if axis.name in group.axes:
            place = place * axis.size + program.coordinates.get(axis.name, 0)
    return group.positions.index(place) if group.positions else place
