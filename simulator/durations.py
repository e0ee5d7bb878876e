"""How long each operation takes on a cluster: what the graph says of its device, and the model of its network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from echograph.errors import SimulationError
from echograph.ir.columns import NONE, Float32, Int64, UInt8
from echograph.ir.graph import Group, JobGraph
from echograph.ir.types import COMMUNICATIONS, Attention, CollectiveKind, Convolution, Gemm, OpKind, Source
from echograph.simulator.clusters import Cluster
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
    _wait_for_the_slowest(job, cluster, picoseconds, source)
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


def slowest_of(gpus: int, spread: float) -> float:
    """How much longer the slowest of so many boards takes than a typical one.

    Boards of one model differ in the clock that their power allows: their speeds are taken as normal, and the
    slowest as it is expected to be (Blom 1958, Statistical Estimates and Transformed Beta-Variables, section 6.9).

    Args:
        gpus: boards of the job, all of which a step waits for.
        spread: standard deviation of the time that one takes, over the mean.

    Returns:
        A factor of at least 1, and 1 of a single board.
    """
    return 1.0 + spread * NormalDist().inv_cdf((gpus - 0.375) / (gpus + 0.25))


def _wait_for_the_slowest(job: JobGraph, cluster: Cluster, picoseconds: Int64, source: UInt8) -> None:
    """Kernels of tensor cores, whose pace the clock sets, take as long as on the slowest board of the job.

    Modelled durations are of a typical board; measured ones are what they are.
    """
    kinds = [isinstance(value, Gemm | Attention | Convolution) for value in job.ops.attribute_values]
    paced = np.append(np.array(kinds, bool), False)[job.ops.attributes]  # none is -1, the last
    paced &= np.isin(source, (Source.FITTED, Source.ANALYTICAL)) & (picoseconds != NONE)
    factor = slowest_of(job.world_size, cluster.gpu_spread)
    picoseconds[paced] = np.rint(picoseconds[paced] * factor).astype(np.int64)


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
    if job.ops.kind[row] != OpKind.COLLECTIVE:
        return "send_recv"
    return _KINDS.get(int(job.ops.variant[row]), "broadcast")


def _first_ranks(job: JobGraph, row: int) -> Sequence[int]:
    """The ranks of a communication in the first group of its kind: those whose other coordinates are 0."""
    group = job.groups[int(job.ops.group[row])]
    return job.group_ranks(group) if job.ops.kind[row] == OpKind.COLLECTIVE else _pair(job, group, row)


def _pair(job: JobGraph, group: Group, row: int) -> Sequence[int]:
    """The ranks that a send or receive links, in the first program that runs it and says its place."""
    for program in job.programs:
        runs = (program.calls[:, 1] <= row) & (row < program.calls[:, 2])
        if runs.any() and set(group.axes) <= program.coordinates.keys():
            ranks = job.group_ranks(group, program.coordinates)
            here, peer = place_in_group(job, group, program), int(job.ops.peer[row])
            there = (here + peer) % len(ranks)
            if abs(peer) >= len(ranks):
                name = job.strings[job.ops.name[row]]
                raise SimulationError(f"operation {row} ({name}) names peer {peer:+} in a group of {len(ranks)}")
            return [ranks[here], ranks[there]]
    return job.group_ranks(group)
