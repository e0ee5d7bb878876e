"""How long each operation takes on a cluster: what the graph says of its device, and the model of its network."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from echograph.errors import SimulationError
from echograph.ir.columns import NONE, Float32, Int8, Int64
from echograph.ir.graph import Group, JobGraph, Program
from echograph.ir.types import CollectiveKind, OpKind, Source
from echograph.simulator.clusters import Cluster, Placement
from echograph.simulator.collectives import Kind, collective_time
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
COMMUNICATIONS = (OpKind.COLLECTIVE, OpKind.SEND, OpKind.RECV)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Durations:
    """Time of every row of the operation table.

    Attributes:
        picoseconds: int64.
        source: uint8, `types.Source` values; 0 where an operation takes no time.
        spread: float32, relative standard error.
        algorithm: for collectives that the network model timed, what it chose ("ring/LL128"), by row.
    """

    picoseconds: Int64
    source: Int8
    spread: Float32
    algorithm: dict[int, str]


def durations(job: JobGraph, cluster: Cluster) -> Durations:
    """Times on a cluster: those of its device first, else imported ones, else the network's model.

    Raises:
        SimulationError: a device operation has no duration for the cluster's device.
    """
    picoseconds, source, spread = job.ops.duration_on(cluster.device)
    _use_imported(job, picoseconds, source, spread)
    still = job.ops.is_view | (job.ops.kind == OpKind.HOST)
    picoseconds[still & (picoseconds == NONE)] = 0
    algorithm: dict[int, str] = {}
    communicates = np.isin(job.ops.kind, COMMUNICATIONS)
    for row in np.flatnonzero(communicates & (picoseconds == NONE)).tolist():
        seconds, its_spread, choice = _communication(job, cluster, row)
        picoseconds[row], source[row], spread[row] = to_ps(seconds), Source.FITTED, its_spread
        algorithm[row] = choice
    missing = np.flatnonzero(picoseconds == NONE)
    if len(missing):
        name = job.strings[job.ops.name[missing[0]]]
        raise SimulationError(
            f"{len(missing)} operations, '{name}' first, have no duration on device "
            f"'{cluster.device}': annotate the graph"
        )
    return Durations(picoseconds=picoseconds, source=source, spread=spread, algorithm=algorithm)


def _use_imported(job: JobGraph, picoseconds: Int64, source: Int8, spread: Float32) -> None:
    ops = job.ops
    imported = np.flatnonzero(ops.duration_source == Source.IMPORTED)
    rows = ops.duration.rows[imported]
    free = picoseconds[rows] == NONE
    rows, imported = rows[free], imported[free]
    picoseconds[rows] = ops.duration.values[imported]
    source[rows] = Source.IMPORTED
    spread[rows] = ops.duration_spread[imported]


def _communication(job: JobGraph, cluster: Cluster, row: int) -> tuple[float, float, str]:
    ops = job.ops
    group = job.groups[int(ops.group[row])]
    placement = place_group(job, cluster, group)
    kind: Kind = "send_recv"
    if ops.kind[row] == OpKind.COLLECTIVE:
        kind = _KINDS.get(int(ops.variant[row]), "broadcast")
    estimate = collective_time(kind, int(ops.nbytes[row]), placement, cluster)
    return estimate.seconds, estimate.spread, f"{estimate.algorithm}/{estimate.protocol}"


def place_group(job: JobGraph, cluster: Cluster, group: Group) -> Placement:
    """Where the first group of its kind sits: the ranks whose other coordinates are 0."""
    return cluster.place(group_ranks(job, group))


def group_ranks(job: JobGraph, group: Group, fixed: dict[str, int] | None = None) -> range | list[int]:
    """Ranks of a group whose coordinates along other axes are `fixed` (0 where not named)."""
    if not group.axes:
        return list(group.ranks)
    strides = {a.name: prod(b.size for b in job.mesh[i + 1 :]) for i, a in enumerate(job.mesh)}
    start = sum(strides[axis] * value for axis, value in (fixed or {}).items() if axis not in group.axes)
    sizes = {a.name: a.size for a in job.mesh}
    if len(group.axes) == 1:
        (axis,) = group.axes
        return range(start, start + sizes[axis] * strides[axis], strides[axis])
    ranks = np.array([start], np.int64)
    for axis in group.axes:
        ranks = (ranks[:, None] + np.arange(sizes[axis]) * strides[axis]).ravel()
    return sorted(ranks.tolist())


def meeting(job: JobGraph, number: int, row: int) -> object:
    """The key under which programs meet for a communication, or None where all members run one program.

    Programs of one role stand for many ranks; a group whose axes the role leaves free lies within the role.
    """
    ops = job.ops
    program, group_index = job.programs[number], int(ops.group[row])
    group = job.groups[group_index]
    others = [p for n, p in enumerate(job.programs) if n != number and _meet(group, program, p)]
    if not others:
        return None
    fixed = tuple(sorted((a, v) for a, v in program.coordinates.items() if a not in group.axes))
    key: tuple[object, ...] = (group_index, fixed)
    if ops.kind[row] == OpKind.COLLECTIVE:
        return key
    here = _place_in_group(group, program)
    there = here + int(ops.peer[row])
    sender, receiver = (here, there) if ops.kind[row] == OpKind.SEND else (there, here)
    return (*key, sender, receiver, int(ops.tag[row]))


def _meet(group: Group, one: Program, other: Program) -> bool:
    if not group.axes:
        return bool(set(group.ranks) & set(one.ranks)) and bool(set(group.ranks) & set(other.ranks))
    pinned = [axis for axis in group.axes if axis in one.coordinates]
    same = all(other.coordinates.get(a) == v for a, v in one.coordinates.items() if a not in group.axes)
    return bool(pinned) and same


def _place_in_group(group: Group, program: Program) -> int:
    if group.axes:
        return sum(program.coordinates.get(axis, 0) for axis in group.axes)
    return next(i for i, rank in enumerate(group.ranks) if rank in program.ranks)
