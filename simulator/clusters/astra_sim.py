"""A cluster as ASTRA-sim 2 is told of one: its system, network and memory files.

Its analytical network has dimensions, the innermost first: here the NVLink domain, then the levels of the network
that a job of this size climbs to. A dimension has one bandwidth and one latency: here the highest and the lowest
that a protocol of the fabric reaches, so that large and small messages take what they should, and those in between
somewhat less. Keys and units are those of ASTRA-sim's example inputs; its network's GB/s are 2^30 bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from echograph.errors import PlanError
from echograph.simulator.clusters.fabric import Protocols
from echograph.simulator.clusters.types import Cluster
from echograph.units import GB, GIB

NETWORK, SYSTEM, MEMORY = "astra_network.yml", "astra_system.json", "astra_memory.json"

SWITCH_LINKS = 2
"""A message over a dimension of the kind Switch pays the latency of the link up and of the link down."""

PIECES = 4
"""A collective over several dimensions is cut up, so that its pieces are on different ones at a time."""

IMPLEMENTATIONS = {
    "all-reduce": "ring",
    "all-gather": "ring",
    "reduce-scatter": "ring",
    # To one peer after the other: a ring of them would pass everything on through all ranks between.
    "all-to-all": "direct1",
}
_TERA, _NS_PER_S = 1e12, 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """A dimension of ASTRA-sim's network.

    Attributes:
        name: for people.
        ranks: along it.
        bytes_per_s: of a rank, in one direction.
        latency_s: of a message.
    """

    name: str
    ranks: int
    bytes_per_s: float
    latency_s: float


def dimensions(cluster: Cluster, ranks: int) -> tuple[Dimension, ...]:
    """The network of the first ranks of a cluster, the innermost dimension first; their product is the ranks.

    Raises:
        PlanError: the ranks are more than the cluster has, or fill the last NVLink domain in part.
    """
    domain = min(cluster.domain_gpus, ranks)
    if ranks > cluster.max_gpus:
        raise PlanError(f"{ranks} ranks: cluster {cluster.name} has at most {cluster.max_gpus}")
    if ranks % domain:
        raise PlanError(
            f"{ranks} ranks fill NVLink domains of {domain} in part, which ASTRA-sim's network cannot: "
            f"use {ranks // domain * domain} or {-(-ranks // domain) * domain}, or export without --cluster"
        )
    node, network = cluster.node_fabric, cluster.network
    hop, share = _best(node.protocols)
    rate = node.bytes_per_s(domain) * share
    found, inside = [Dimension(name="domain", ranks=domain, bytes_per_s=rate, latency_s=hop)], domain
    between, share = _best(network.fabric.protocols)
    rate = cluster.gpu_network_bytes_per_s * share
    latency = max(hop, between * network.fabric.ring_hop_share)
    for level in network.crossed(ranks):
        rate, latency = rate / level.oversubscription, latency + level.hop_s
        below = min(level.gpus, ranks)
        # A level that its groups do not divide evenly is part of the one above it.
        if below == inside or below % inside or ranks % below:
            continue
        found.append(Dimension(name=level.name, ranks=below // inside, bytes_per_s=rate, latency_s=latency))
        inside = below
    return tuple(found)


def _best(protocols: Protocols) -> tuple[float, float]:
    """The lowest latency of a step and the highest share of the bandwidth."""
    every = (protocols.ll, protocols.ll128, protocols.simple)
    return min(cost.hop_s for cost in every), max(cost.efficiency for cost in every)


def astra_sim_files(
    cluster: Cluster, ranks: int, *, peak_flops_per_s: float = 0.0, memory_bytes_per_s: float = 0.0
) -> dict[str, str]:
    """The configuration of ASTRA-sim, by file name.

    Args:
        cluster: the cluster.
        ranks: of the job.
        peak_flops_per_s: of the device, for the roofline that a user may switch on; 0 where unknown.
        memory_bytes_per_s: of the device's memory, for the same.

    Raises:
        PlanError: as `dimensions`.
    """
    found = dimensions(cluster, ranks)
    system = {
        "scheduling-policy": "FIFO",
        "endpoint-delay": 1,
        "active-chunks-per-dimension": 1,
        "preferred-dataset-splits": PIECES if len(found) > 1 else 1,
        **{f"{kind}-implementation": [name] * len(found) for kind, name in IMPLEMENTATIONS.items()},
        "collective-optimization": "localBWAware",
        "local-mem-bw": memory_bytes_per_s / GB,
        "peak-perf": peak_flops_per_s / _TERA,
        "boost-mode": 0,
        "roofline-enabled": 0,
    }
    return {
        NETWORK: _network(cluster, found),
        SYSTEM: json.dumps(system, indent=2) + "\n",
        MEMORY: json.dumps({"memory-type": "NO_MEMORY_EXPANSION"}, indent=2) + "\n",
    }


def _network(cluster: Cluster, found: tuple[Dimension, ...]) -> str:
    def row(key: str, values: list[str], comment: str) -> str:
        return f"{key}: [ {', '.join(values)} ]  # {comment}\n"

    names = ", ".join(dimension.name for dimension in found)
    latencies = [d.latency_s / SWITCH_LINKS * _NS_PER_S for d in found]
    return "".join(
        (
            f"# {cluster.name}: {names}\n",
            row("topology", ["Switch"] * len(found), "innermost first"),
            row("npus_count", [str(d.ranks) for d in found], "ranks along each"),
            row("bandwidth", [f"{d.bytes_per_s / GIB:.7g}" for d in found], "2^30 bytes a second of a rank"),
            row(
                "latency",
                [f"{latency:.7g}" for latency in latencies],
                "ns of a link; a message takes two",
            ),
        )
    )
