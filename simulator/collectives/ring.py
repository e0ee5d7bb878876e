"""Ring: every rank sends to its right neighbour and receives from its left.

All-reduce takes 2(n-1) steps of S/n bytes, all-gather and reduce-scatter n-1 steps (Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009), broadcast and reduce a pipelined
chain of n-1 hops:

    T = base + (steps - crossings) a + crossings a_net + (steps + fill)/n S / min(b, B)

a and b are hop latency and bandwidth inside a domain; a_net and B those between domains. A chunk crosses
from domain to domain D-1 times a round, as NCCL counts it (tuning.cc: nInterSteps). With base = fill = 0
inside one domain this is the closed form 2(n-1)(a + S/(n b)).

A NIC passes on one message a step, and no message in less than the fabric's `ring_message_s`: on Slingshot each of
2(n-1) steps takes 45 us with 2 MiB a rank as with 4, from 16 GPUs to 2,048.
"""

from __future__ import annotations

import numpy as np

from echograph.simulator.clusters.fabric import ProtocolName
from echograph.simulator.collectives import ALL_PROTOCOLS, Algorithm, Bytes, CollectiveName, Cost, Seconds
from echograph.simulator.network import patterns
from echograph.simulator.network.topology import Links


def _cost(kind: CollectiveName, size: Bytes, links: Links, protocol: ProtocolName) -> Cost:
    n, node = links.ranks, links.node.protocols[protocol]
    rounds = 2 if kind == "all_reduce" else 1
    steps = rounds * (n - 1)
    volume = size if kind in ("broadcast", "reduce") else (steps + links.node.fill) / n * size
    base, hops = node.base_s, steps * node.hop_s
    rate = links.node_bytes_per_s * node.efficiency
    inside: Seconds = volume / rate if links.ranks_per_domain > 1 else 0.0
    between: Seconds = 0.0
    if links.domains > 1:
        net = links.network.protocols[protocol]
        crossings = rounds * (links.domains - 1)
        base += net.base_s
        crossing = max(node.hop_s, net.hop_s * links.network.ring_hop_share) + links.climb_s
        hops += crossings * (crossing - node.hop_s)
        between = volume / (links.ring_bytes_per_s * net.efficiency)
        rate = min(rate, links.ring_bytes_per_s * net.efficiency)
    moved = volume / rate
    if links.domains > 1:
        moved = np.maximum(moved, steps * links.network.ring_message_s)
    return Cost(base + hops + moved, steps, inside, between)


RING = Algorithm(
    name="ring",
    kinds=frozenset({"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"}),
    protocols=ALL_PROTOCOLS,
    applies=lambda kind, links: True,
    cost=_cost,
    pattern=lambda kind: patterns.chain if kind in ("broadcast", "reduce") else patterns.ring,
)
