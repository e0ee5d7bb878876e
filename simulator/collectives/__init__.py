"""How long collectives take: what an algorithm is, the choice among them, and one file a family of algorithms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echograph.errors import UnavailableError, UnknownNameError
from echograph.ir.comms.bandwidth import bus_factor
from echograph.registry import Table
from echograph.simulator.clusters import Cluster, GroupPlacement
from echograph.simulator.clusters.fabric import ProtocolName
from echograph.simulator.network.patterns import Pattern
from echograph.simulator.network.topology import Links, group_links

__all__ = [
    "ALGORITHMS",
    "ALL_PROTOCOLS",
    "KINDS",
    "Algorithm",
    "Bytes",
    "CollectiveEstimate",
    "CollectiveName",
    "Cost",
    "Seconds",
    "collective_curve",
    "collective_time",
]

CollectiveName = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv", "barrier"
]
KINDS: tuple[CollectiveName, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "send_recv",
    "barrier",
)
ALL_PROTOCOLS: tuple[ProtocolName, ...] = ("LL", "LL128", "Simple")

Bytes = float | NDArray[np.float64]
Seconds = float | NDArray[np.float64]


class Cost(NamedTuple):
    """What a size, or each of an array of sizes, costs.

    Attributes:
        seconds: execution time.
        steps: sequential steps.
        node_s: seconds of it for which the bytes keep a rank's links inside its domain busy.
        network_s: seconds of it for which they keep the NICs of the busiest domain busy.
    """

    seconds: Seconds
    steps: int
    node_s: Seconds
    network_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One way of running a collective.

    Args:
        name: as NCCL names it.
        kinds: collectives that it runs.
        protocols: protocols that it runs over.
        applies: whether the group's links offer it.
        cost: seconds from kind, size in bytes (nccl-tests' `size`), links and protocol; grows with the size.
        pattern: which domains send to which, by kind.
        by_name: whether it runs only where it is asked for by name, since NCCL does not have it.
    """

    name: str
    kinds: frozenset[CollectiveName]
    protocols: tuple[ProtocolName, ...]
    applies: Callable[[CollectiveName, Links], bool]
    cost: Callable[[CollectiveName, Bytes, Links, ProtocolName], Cost]
    pattern: Callable[[CollectiveName], Pattern]
    by_name: bool = False


_HERE = "echograph.simulator.collectives"
ALGORITHMS = Table(
    "collective algorithm",
    {
        "ring": f"{_HERE}.ring:RING",
        "tree": f"{_HERE}.tree:TREE",
        "nvls": f"{_HERE}.nvls:NVLS",
        "nvls_tree": f"{_HERE}.nvls:NVLS_TREE",
        "pat": f"{_HERE}.pat:PAT",
        "pairwise": f"{_HERE}.peer:PAIRWISE",
        "send": f"{_HERE}.peer:SEND",
        "hierarchical": f"{_HERE}.hierarchical:HIERARCHICAL",
    },
)
BARRIER_BYTES = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveEstimate:
    """How long a collective takes once its last rank has arrived.

    Args:
        seconds: execution time.
        spread: relative error to expect, from rows that the fabrics' fits did not see, or assumed.
        algorithm: chosen or given; "none" for a group of one rank.
        protocol: chosen or given; "none" for a group of one rank.
        source: fabrics that the time rests on, and whether they are fitted or assumed.
        bus_bandwidth: bytes a second as nccl-tests' busbw counts them; 0 where nothing moves.
        steps: sequential steps from rank to rank.
        node_s: seconds of it for which its bytes keep a rank's links inside its domain busy.
        network_s: seconds of it for which they keep the NICs of its busiest domain busy.
    """

    seconds: float
    spread: float
    algorithm: str
    protocol: str
    source: str
    bus_bandwidth: float
    steps: int
    node_s: float = 0.0
    network_s: float = 0.0


def collective_time(
    kind: CollectiveName,
    bytes_per_rank: float,
    placement: GroupPlacement,
    cluster: Cluster,
    *,
    algorithm: str | None = None,
    protocol: ProtocolName | None = None,
    network_bytes_per_s: float | None = None,
) -> CollectiveEstimate:
    """Time of one collective, with the algorithm and protocol that are fastest by the model, as NCCL chooses.

    Args:
        kind: one of `KINDS`.
        bytes_per_rank: nccl-tests' `size`, the whole buffer of one rank: for all_gather the gathered output,
            for reduce_scatter the full input, for all_to_all what a rank sends in all (its own part included),
            for send_recv the message. A barrier ignores it.
        placement: where the group sits, from `cluster.place`.
        cluster: the cluster.
        algorithm: a name of `ALGORITHMS` instead of the choice, or of what the cluster names for the kind, which
            is run wherever it applies.
        protocol: LL, LL128 or Simple instead of the choice.
        network_bytes_per_s: what the group's ranks of one domain have on the NICs, instead of an even share
            with the sibling groups of a plan (`network.topology.group_links`).

    Returns:
        The estimate; a group of one rank takes 0 seconds.

    Raises:
        UnknownNameError: an unknown kind, algorithm or protocol.
        UnavailableError: one that does not run this collective here.
        ValueError: a negative size.
    """
    if not 0 <= bytes_per_rank < float("inf"):
        raise ValueError(f"bytes_per_rank is a finite number >= 0, not {bytes_per_rank!r}")
    size = BARRIER_BYTES if kind == "barrier" else float(bytes_per_rank)
    links = group_links(placement, cluster, network_bytes_per_s)
    asked = algorithm or _named(kind, links, cluster)
    candidates = list(_candidates(kind, size, links, asked, protocol))
    if links.ranks == 1:
        return CollectiveEstimate(
            seconds=0.0, spread=0.0, algorithm="none", protocol="none", source="exact", bus_bandwidth=0.0, steps=0
        )
    chosen, name, cost = min(candidates, key=lambda c: float(c[2].seconds))
    seconds = float(cost.seconds)
    return CollectiveEstimate(
        seconds=seconds,
        spread=_spread(kind, links, chosen),
        algorithm=chosen.name,
        protocol=name,
        source=_source(links),
        bus_bandwidth=bus_factor(kind, links.ranks) * size / seconds if seconds else 0.0,
        steps=cost.steps,
        node_s=float(cost.node_s),
        network_s=float(cost.network_s),
    )


def collective_curve(
    kind: CollectiveName, sizes: NDArray[np.float64], placement: GroupPlacement, cluster: Cluster
) -> NDArray[np.float64]:
    """Seconds for each of an array of sizes; what `collective_time` says of each.

    Args:
        kind: one of `KINDS`.
        sizes: bytes, float64, shape (sizes,).
        placement: where the group sits.
        cluster: the cluster.

    Raises:
        UnknownNameError: an unknown kind.
    """
    links = group_links(placement, cluster)
    asked = np.full_like(sizes, BARRIER_BYTES) if kind == "barrier" else sizes
    candidates = _candidates(kind, asked, links, _named(kind, links, cluster), None)
    if links.ranks == 1:
        return np.zeros_like(sizes)
    least: NDArray[np.float64] = np.minimum.reduce([np.asarray(cost.seconds) for _, _, cost in candidates])
    return least


def _candidates(
    kind: CollectiveName, size: Bytes, links: Links, algorithm: str | None, protocol: ProtocolName | None
) -> Iterator[tuple[Algorithm, ProtocolName, Cost]]:
    if kind not in KINDS:
        raise UnknownNameError("collective", kind, KINDS)
    if protocol is not None and protocol not in ALL_PROTOCOLS:
        raise UnknownNameError("protocol", protocol, ALL_PROTOCOLS)
    runs: CollectiveName = "all_reduce" if kind == "barrier" else kind
    table: list[Algorithm] = [ALGORITHMS[name] for name in ([algorithm] if algorithm else ALGORITHMS)]
    table = [a for a in table if algorithm or not a.by_name]
    offered = [a for a in table if runs in a.kinds and (links.ranks == 1 or a.applies(runs, links))]
    pairs = [(a, p) for a in offered for p in a.protocols if protocol in (None, p)]
    if not pairs:
        usual: list[Algorithm] = [ALGORITHMS[name] for name in ALGORITHMS]
        able = [a for a in usual if runs in a.kinds and (links.ranks == 1 or a.applies(runs, links))]
        asked = "+".join(word for word in (algorithm, protocol) if word)
        raise UnavailableError(
            f"{asked} does not run {kind} of {links.ranks} ranks in {links.domains} domain(s)",
            sorted(f"{a.name}+{p}" for a in able for p in a.protocols),
        )
    if links.ranks > 1:
        yield from ((a, p, a.cost(runs, size, links, p)) for a, p in pairs)


def check_named(named: Mapping[str, str]) -> None:
    """Checks what a cluster says of its library's algorithms.

    Args:
        named: algorithm by kind of collective.

    Raises:
        UnknownNameError: no such collective or algorithm.
        UnavailableError: the algorithm does not run this kind of collective.
    """
    for kind, name in named.items():
        if kind not in KINDS:
            raise UnknownNameError("collective", kind, KINDS)
        if kind not in ALGORITHMS[name].kinds:
            runs = sorted(n for n in ALGORITHMS if kind in ALGORITHMS[n].kinds)
            raise UnavailableError(f"algorithm '{name}' does not run {kind}", runs)


def _named(kind: CollectiveName, links: Links, cluster: Cluster) -> str | None:
    """The algorithm that a cluster names for a kind, where it applies."""
    named = dict(cluster.collectives)
    check_named(named)
    if kind not in named:
        return None
    algorithm: Algorithm = ALGORITHMS[named[kind]]
    return algorithm.name if links.ranks > 1 and algorithm.applies(kind, links) else None


def _spread(kind: CollectiveName, links: Links, chosen: Algorithm) -> float:
    if chosen.by_name:
        return max(links.node.about.assumed_error, links.network.about.assumed_error)
    tested = "all_reduce" if kind == "barrier" else kind
    node, about = links.node, links.node.about
    if kind == "send_recv" and links.domains > 1:
        return links.network.about.error(kind)  # the way between domains takes all of its time
    # Of more ranks than a fabric's levels name, nothing was measured.
    inside = about.error(tested) if links.ranks_per_domain <= node.levels[-1][0] else about.assumed_error
    return inside if links.domains == 1 else max(links.network.about.error(tested), inside)


def _source(links: Links) -> str:
    node, network = links.node, links.network
    text = f"{node.name} ({node.about.origin})"
    return text if links.domains == 1 else f"{text} + {network.name} ({network.about.origin})"
