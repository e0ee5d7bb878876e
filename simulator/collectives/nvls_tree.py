"""NVLS tree: the switch reduces inside each domain, a double binary tree joins the domains (NCCL 2.18).

    T = base + 2 ceil(log2 D) a_net + S max((1 + 1/m)/b, v/B),  v = 1 for D = 2, else 2

with m ranks a domain and D domains: a domain is a leaf of one tree and inside the other, so its NICs send S/2
up and S/2 to each of two children, and S/2 up again; with two domains only S/2 twice. Public nccl-tests
figures show both: 16 H100 are bound by the switch, 96 H100 by 2S over their NICs.
"""

from __future__ import annotations

from math import ceil, log2

from echograph.simulator.clusters.fabric import ProtocolName
from echograph.simulator.collectives.model import Algorithm, Bytes, CollectiveName, Cost
from echograph.simulator.network import patterns
from echograph.simulator.network.topology import Links


def _cost(kind: CollectiveName, size: Bytes, links: Links, protocol: ProtocolName) -> Cost:
    nvls, net = links.node.nvls, links.network.nvls_tree
    assert nvls is not None and net is not None
    depth = ceil(log2(links.domains))
    switch = (1 + 1 / links.ranks_per_domain) / nvls.bytes_per_s
    tree = links.tree_volume / (links.network_bytes_per_s * net.efficiency)
    latency = nvls.base_s + net.base_s + 2 * depth * (net.hop_s + links.climb_s)
    return Cost(latency + size * max(switch, tree), 2 * depth + 2, size * switch, size * tree)


def _applies(kind: CollectiveName, links: Links) -> bool:
    offered = links.node.nvls is not None and links.network.nvls_tree is not None
    return offered and links.domains > 1 and links.ranks_per_domain > 2


NVLS_TREE = Algorithm(
    name="nvls_tree",
    kinds=frozenset({"all_reduce"}),
    protocols=("Simple",),
    applies=_applies,
    cost=_cost,
    pattern=lambda kind: patterns.tree,
)
