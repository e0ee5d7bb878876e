"""In-switch reduction (Hopper and later): NVLS inside one domain, and NVLS tree across domains.

NVLS: the NVLink switch reduces and multicasts. Every rank owns S/n: it reads the sum of its part from the switch,
which pulls that part out of all n ranks, and writes it once to all. A rank therefore sends S for everyone's reads
and S/n for its own write:

    T = base + S (1 + 1/n) / b

nccl-tests on 5 to 8 H200 follow this (1 + 1/n) within 2 %. Measured times fall a little as ranks are added.

NVLS tree (NCCL 2.18): the switch reduces inside each domain, a double binary tree joins the domains:

    T = base + 2 d a_net + x + 2 sqrt((d-1) a_net x),  x = S max((1 + 1/m)/b, v/B),  d = ceil(log2 D),
    v = 1 for D = 2, else 2

with m ranks a domain and D domains, and the last term as of a tree (`tree.py`): a domain is a leaf of one tree and
inside the other, so its NICs send S/2 up and S/2 to each of two children, and S/2 up again; with two domains only
S/2 twice. Public nccl-tests figures show both: 16 H100 are bound by the switch, 96 H100 by 2S over their NICs.
"""

from __future__ import annotations

from math import ceil, log2

import numpy as np

from echograph.simulator.clusters.fabric import ProtocolName
from echograph.simulator.collectives import Algorithm, Bytes, CollectiveName, Cost
from echograph.simulator.network import patterns
from echograph.simulator.network.topology import Links


def _in_one_domain(kind: CollectiveName, size: Bytes, links: Links, protocol: ProtocolName) -> Cost:
    nvls = links.node.nvls
    assert nvls is not None
    inside = size * (1 + 1 / links.ranks) / nvls.bytes_per_s
    return Cost(nvls.base_s + inside, 2, inside, 0.0)


NVLS = Algorithm(
    name="nvls",
    kinds=frozenset({"all_reduce"}),
    protocols=("Simple",),
    applies=lambda kind, links: links.node.nvls is not None and links.domains == 1 and links.ranks > 2,
    cost=_in_one_domain,
    pattern=lambda kind: patterns.ring,
)


def _across_domains(kind: CollectiveName, size: Bytes, links: Links, protocol: ProtocolName) -> Cost:
    nvls, net = links.node.nvls, links.network.nvls_tree
    assert nvls is not None and net is not None
    depth = ceil(log2(links.domains))
    switch = (1 + 1 / links.ranks_per_domain) / nvls.bytes_per_s
    tree = links.tree_volume / (links.ring_bytes_per_s * net.efficiency)
    hop, moved = net.hop_s + links.climb_s, size * max(switch, tree)
    latency = nvls.base_s + net.base_s + 2 * depth * hop
    fill = 2 * np.sqrt((depth - 1) * hop * moved)
    return Cost(latency + moved + fill, 2 * depth + 2, size * switch, size * tree)


def _offers_tree(kind: CollectiveName, links: Links) -> bool:
    offered = links.node.nvls is not None and links.network.nvls_tree is not None
    return offered and links.domains > 1 and links.ranks_per_domain > 2


NVLS_TREE = Algorithm(
    name="nvls_tree",
    kinds=frozenset({"all_reduce"}),
    protocols=("Simple",),
    applies=_offers_tree,
    cost=_across_domains,
    pattern=lambda kind: patterns.tree,
)
