"""PAT (parallel aggregated trees): all-gather and reduce-scatter in logarithmic steps, one rank a domain.

NCCL 2.23 and later choose it for groups with one GPU a node, where a ring would pay n-1 network hops (Jeaugey,
"PAT: a new algorithm for all-gather and reduce-scatter operations at scale", arXiv 2506.20252):

    T = base + ceil(log2 n) a_net + (n-1)/n S / B
"""

from __future__ import annotations

from math import ceil, log2

from echograph.simulator.clusters.fabric import ProtocolName
from echograph.simulator.collectives import Algorithm, Bytes, CollectiveName, Cost
from echograph.simulator.network import patterns
from echograph.simulator.network.topology import Links


def _cost(kind: CollectiveName, size: Bytes, links: Links, protocol: ProtocolName) -> Cost:
    node, net = links.node.protocols[protocol], links.network.protocols[protocol]
    steps = ceil(log2(links.ranks))
    volume = (links.ranks - 1 + links.node.fill) / links.ranks * size
    latency = node.base_s + net.base_s + steps * (net.hop_s + links.climb_s)
    between = volume / (links.network_bytes_per_s * net.efficiency)
    return Cost(latency + between, steps, 0.0, between)


def _applies(kind: CollectiveName, links: Links) -> bool:
    return links.network.pat and links.domains > 1 and links.ranks_per_domain == 1


PAT = Algorithm(
    name="pat",
    kinds=frozenset({"all_gather", "reduce_scatter"}),
    protocols=("Simple",),
    applies=_applies,
    cost=_cost,
    pattern=lambda kind: patterns.doubling,
)
