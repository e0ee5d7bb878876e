"""4,096 ranks that share the uplinks of their leaves, for the event engine: 16,384 resources.

Every rank has a host, and streams for kernels, for collectives in its node of eight, and for those across nodes.
A layer is three kernels, a collective in the node, which the next layer waits for, and one across nodes, which
nobody waits for but the next of its kind. Those go around a ring over one NIC a rank, to a leaf for each rail and
16 nodes, whose uplink carries half of what its NICs can send.
"""

from __future__ import annotations

import numpy as np

from echograph.ir.columns import NONE, Int64, Ragged
from echograph.simulator.engine.columns import Columns
from echograph.simulator.engine.sharing import Sharing
from echograph.simulator.tasks import DEVICE, HOST, TaskGraph

RANKS, NODE, LEAF = 4096, 8, 16
STREAMS = KERNELS, IN_NODE, ACROSS = 1, 2, 3
LAYER = (KERNELS, KERNELS, KERNELS, IN_NODE, ACROSS)
US = 1_000_000
LAUNCH_PS = 3 * US
WORK_PS = {KERNELS: 30 * US, IN_NODE: 15 * US, ACROSS: 60 * US}
NIC_BYTES_PER_S = 50e9
USED = 0.9
"""Of its NIC, by a rank in a collective across nodes that nothing slows."""
OVERSUBSCRIPTION = 2.0


def tasks(layers: int) -> TaskGraph:
    """What each rank does."""
    stream = np.tile(np.array(LAYER, np.int32), layers)
    count = 2 * len(stream)
    resource, lane = np.zeros(count, np.int32), np.tile(np.array([HOST, DEVICE], np.uint8), len(stream))
    resource[1::2] = stream
    duration = np.full(count, LAUNCH_PS)
    duration[1::2] = [WORK_PS[s] for s in stream.tolist()]
    deps: list[list[int]] = []
    for task in range(count):
        place = task // 2 % len(LAYER)
        # The first kernel waits for the collective of the layer before, collectives for the last kernel.
        after = {0: [task - 4] if task > 4 else [], 3: [task - 2], 4: [task - 4]}.get(place, [])
        deps.append([*after, task - 1] if task % 2 else [])
    zeros = np.zeros(count, np.int32)
    return TaskGraph(
        resource=resource, duration=duration,
        deps=Ragged(np.cumsum([0, *map(len, deps)]), np.array([d for some in deps for d in some], np.int32)),
        rendezvous=zeros + NONE, program=zeros, lane=lane, op=zeros.astype(np.int64), instance=zeros,
        micro_batch=zeros, resources=1 + len(STREAMS),
    )  # fmt: skip


def ranks(work: TaskGraph, group: int, stride: int, jitter: float) -> Columns:
    """The ranks: `group` nodes that are `stride` apart have a ring for each of their eight ranks."""
    rank = np.arange(RANKS)
    node = rank // NODE
    first = node // (group * stride) * (group * stride) + node % stride
    places = np.array([rank - rank % NODE, first * NODE + rank % NODE], np.int32)
    row = np.array([NONE, NONE, 0, 1], np.int32)
    return Columns(
        kind=np.zeros(len(work), np.int32),
        factor=np.ones((1, RANKS)),
        place=row[work.resource],
        places=places,
        jitter=jitter,
        seed=1,
    )


def uplinks(work: TaskGraph, columns: Columns) -> Sharing:
    """The links: of each rank one out and one in, then of each leaf one up and one down."""
    leaves = RANKS // LEAF
    place = columns.places[1]
    rank = np.argsort(place, kind="stable")
    first = np.flatnonzero(np.diff(place[rank], prepend=NONE))
    following = np.append(rank[1:], 0)
    following[np.append(first[1:], RANKS) - 1] = rank[first]
    here, there = (r // (NODE * LEAF) * NODE + r % NODE for r in (rank, following))
    crosses = here != there
    above = 2 * RANKS
    hops = [
        (place[rank], rank),
        (place[rank], RANKS + following),
        (place[rank][crosses], above + here[crosses]),
        (place[rank][crosses], above + leaves + there[crosses]),
    ]
    key, weight = np.unique(np.concatenate([p * (above + 2 * leaves) + k for p, k in hops]), return_counts=True)
    return _sharing(work, key // (above + 2 * leaves), key % (above + 2 * leaves), weight)


def _sharing(work: TaskGraph, place: Int64, link: Int64, weight: Int64) -> Sharing:
    across = work.resource == ACROSS
    lengths = np.bincount(place, minlength=RANKS)
    nics = np.full(2 * RANKS, NIC_BYTES_PER_S)
    leaf = np.full(2 * RANKS // LEAF, LEAF * NIC_BYTES_PER_S / OVERSUBSCRIPTION)
    return Sharing(
        capacity=np.concatenate([nics, leaf]),
        load=np.where(across, USED * NIC_BYTES_PER_S, 0.0),
        route=np.where(across, 0, NONE).astype(np.int32),
        routes=np.where(lengths, np.arange(RANKS), NONE).astype(np.int32)[None],
        links=Ragged(np.append(0, np.cumsum(lengths)), link.astype(np.int32)),
        weight=weight.astype(np.float64),
    )
