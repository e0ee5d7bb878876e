"""Double binary tree across domains, a chain inside each.

Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009; in NCCL
since 2.4. Each tree reduces half the data to its root and broadcasts it back; a domain is a leaf of one tree and
inside the other, so it sends 2S over its NICs, but only S when there are two domains:

    T = base + 2 ((m-1) a + d a_net) + x + 2 sqrt((d-1) a_net x),  x = S max(2/b, v/(e B)),  d = ceil(log2 D),
    v = 1 for D = 2, else 2

with m ranks a domain, D domains and the tree's efficiency e. Not every machine shows v = 1 for two domains,
so v is the fabric's `two_domain_volume`.

The last term is what a pipeline of chunks takes to fill: with k chunks, d - 1 levels more than the first wait for
one each, (d-1) x/k, and every chunk pays a hop, k a_net; k is that of the least sum. Measured times of 16 to 128
A100 on HDR and of 8 to 2,048 GH200 on Slingshot grow so with size and depth. Over LL128 on Slingshot a level more
takes half of x, whatever the size, as if there were but two chunks: k is at most the fabric's `ll128_chunks`.
"""

from __future__ import annotations

from math import ceil, log2

import numpy as np

from echograph.simulator.clusters.fabric import ProtocolName
from echograph.simulator.collectives import ALL_PROTOCOLS, Algorithm, Bytes, CollectiveName, Cost
from echograph.simulator.network import patterns
from echograph.simulator.network.topology import Links


def _cost(kind: CollectiveName, size: Bytes, links: Links, protocol: ProtocolName) -> Cost:
    node, net = links.node.protocols[protocol], links.network.protocols[protocol]
    chain, depth = links.ranks_per_domain - 1, ceil(log2(links.domains))
    hop = net.hop_s + links.climb_s
    latency = 2 * (chain * node.hop_s + depth * hop)
    rate = links.ring_bytes_per_s * net.efficiency * links.network.tree_efficiency
    between = links.tree_volume / rate
    inside = 2 / (links.node_bytes_per_s * node.efficiency) if chain else 0.0
    moved = size * max(between, inside)
    fill = 2 * np.sqrt((depth - 1) * hop * moved)
    most = links.network.ll128_chunks
    if most is not None and protocol == "LL128":
        fill = np.where(fill > 2 * most * hop, (depth - 1) * moved / most + most * hop, fill)
    seconds = node.base_s + net.base_s + latency + moved + fill
    return Cost(seconds, 2 * (chain + depth), size * inside, size * between)


TREE = Algorithm(
    name="tree",
    kinds=frozenset({"all_reduce"}),
    protocols=ALL_PROTOCOLS,
    applies=lambda kind, links: links.domains > 1,
    cost=_cost,
    pattern=lambda kind: patterns.tree,
)
