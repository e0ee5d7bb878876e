"""NVLS: the NVLink switch reduces and multicasts (Hopper and later, one domain).

Every rank owns S/n: it reads the sum of its part from the switch, which pulls that part out of all n ranks,
and writes it once to all. A rank therefore sends S for everyone's reads and S/n for its own write:

    T = base + S (1 + 1/n) / b

nccl-tests on 5 to 8 H200 follow this (1 + 1/n) within 2 %. Measured times fall a little as ranks are added.
"""

from __future__ import annotations

from echograph.simulator.clusters.fabric import ProtocolName
from echograph.simulator.collectives.model import Algorithm, Bytes, CollectiveName, Cost
from echograph.simulator.network import patterns
from echograph.simulator.network.topology import Links


def _cost(kind: CollectiveName, size: Bytes, links: Links, protocol: ProtocolName) -> Cost:
    nvls = links.node.nvls
    assert nvls is not None
    inside = size * (1 + 1 / links.ranks) / nvls.bytes_per_s
    return Cost(nvls.base_s + inside, 2, inside, 0.0)


NVLS = Algorithm(
    name="nvls",
    kinds=frozenset({"all_reduce"}),
    protocols=("Simple",),
    applies=lambda kind, links: links.node.nvls is not None and links.domains == 1 and links.ranks > 2,
    cost=_cost,
    pattern=lambda kind: patterns.ring,
)
