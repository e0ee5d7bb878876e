"""Two levels: what can be done inside a domain is done there, and ranks of one position meet across domains.

Reduce-scatter inside, all-reduce of the parts across, all-gather inside (Cho et al., "BlueConnect", 2019; phases
one after the other), or for all-to-all an exchange inside that puts together what goes to each domain, then one
across (Hwang et al., "Tutel", 2023, 2DH), with the costs of point-to-point traffic. With m ranks a domain, D
domains, hops a and a_net, bandwidth b of a rank inside and B of a domain's NICs:

    all-reduce      T = base + 2 (m-1) a + 2 (D-1) a_net + 2 (m-1)/m S / b + 2 (D-1)/D S / B
    half of it      (all-gather, reduce-scatter) without the 2
    all-to-all      T = base + (m-1) a + (D-1) a_net + (m-1)/m S / b + m (D-1)/D S / B

NCCL has none of these, so a cluster names them (`[collectives]`), or they are not run. Copies that put messages
together are not counted; nothing measured tests these formulas.
"""

from __future__ import annotations

from echograph.simulator.clusters.fabric import ProtocolName
from echograph.simulator.collectives import ALL_PROTOCOLS, Algorithm, Bytes, CollectiveName, Cost
from echograph.simulator.network import patterns
from echograph.simulator.network.topology import Links


def _cost(kind: CollectiveName, size: Bytes, links: Links, protocol: ProtocolName) -> Cost:
    ranks, domains = links.ranks_per_domain, links.domains
    rounds = 2 if kind == "all_reduce" else 1
    inside, across = rounds * (ranks - 1), rounds * (domains - 1)
    node, net = links.node.protocols[protocol], links.network.protocols[protocol]
    rate, nics, moved = links.node_bytes_per_s, links.network_bytes_per_s * net.efficiency, size
    if kind == "all_to_all":
        peer = links.node.peer
        node, net = peer.ll if protocol == "LL" else peer.simple, links.network.peer
        rate = peer.bytes_per_s * links.node_bytes_per_s / links.node.bytes_per_s(2)
        nics, moved = links.network_bytes_per_s * net.efficiency * node.efficiency, ranks * size
    node_s = inside / ranks * size / (rate * node.efficiency)
    network_s = across / domains * moved / nics
    latency = node.base_s + net.base_s + inside * node.hop_s + across * (net.hop_s + links.climb_s)
    return Cost(latency + node_s + network_s, inside + across, node_s, network_s)


HIERARCHICAL = Algorithm(
    name="hierarchical",
    kinds=frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}),
    protocols=ALL_PROTOCOLS,
    applies=lambda kind, links: links.domains > 1 and links.ranks_per_domain > 1,
    cost=_cost,
    pattern=lambda kind: patterns.pairs if kind == "all_to_all" else patterns.ring,
    by_name=True,
)
