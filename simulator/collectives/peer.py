"""Point-to-point traffic: pairwise all-to-all, and send with its receive.

All-to-all: each rank sends S/n to every other and copies its own S/n. NCCL runs peers a few at a time on separate
channels, so bytes meet at the slower of NVLink and NICs, and each peer adds a small cost:

    T = base + (m-1) a + (n-m) a_net + max((m-1 + local)/n S / b, m (n-m)/n S / B)

with m ranks a domain. Send/recv moves S over one link: T = base + a + S/b. NCCL uses LL for small messages
and Simple for large ones.
"""

from __future__ import annotations

from echograph.simulator.clusters.fabric import ProtocolName
from echograph.simulator.collectives import Algorithm, Bytes, CollectiveName, Cost
from echograph.simulator.network import patterns
from echograph.simulator.network.topology import Links


def _pairwise(kind: CollectiveName, size: Bytes, links: Links, protocol: ProtocolName) -> Cost:
    peer, n, m = links.node.peer, links.ranks, links.ranks_per_domain
    node = peer.ll if protocol == "LL" else peer.simple
    latency = node.base_s + (m - 1) * node.hop_s
    # A PCIe host slows as more of its GPUs talk: the level of a ring holds for peers too.
    rate = peer.bytes_per_s * links.node_bytes_per_s / links.node.bytes_per_s(2)
    inside, between = (m - 1 + peer.local_share) / n / (rate * node.efficiency), 0.0
    if links.domains > 1:
        net = links.network.peer
        latency += net.base_s + (n - m) * net.hop_s + links.climb_s
        scale = net.efficiency * node.efficiency
        between = m * (n - m) / n / (links.network_bytes_per_s * scale)
    return Cost(latency + size * max(inside, between), n - 1, size * inside, size * between)


def _send(kind: CollectiveName, size: Bytes, links: Links, protocol: ProtocolName) -> Cost:
    peer = links.node.peer
    node = peer.ll if protocol == "LL" else peer.simple
    if links.domains == 1:
        inside = size / (peer.bytes_per_s * node.efficiency)
        return Cost(node.base_s + node.hop_s + inside, 1, inside, 0.0)
    net = links.network.peer
    rate = links.network_bytes_per_s / links.ranks_per_domain * net.efficiency * node.efficiency
    between = size / rate
    return Cost(node.base_s + net.base_s + net.hop_s + links.climb_s + between, 1, 0.0, between)


PAIRWISE = Algorithm(
    name="pairwise",
    kinds=frozenset({"all_to_all"}),
    protocols=("LL", "Simple"),
    applies=lambda kind, links: True,
    cost=_pairwise,
    pattern=lambda kind: patterns.pairs,
)
SEND = Algorithm(
    name="send",
    kinds=frozenset({"send_recv"}),
    protocols=("LL", "Simple"),
    applies=lambda kind, links: True,
    cost=_send,
    pattern=lambda kind: patterns.chain,
)
