"""A cluster: its GPUs, its NVLink domains, its NICs, the levels of its network, and what of it is degraded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from echograph.errors import PlanError, UsageError
from echograph.simulator.clusters.fabric import NetworkFabric, NodeFabric
from echograph.simulator.clusters.placement import GroupPlacement, place


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricLevel:
    """One level of the network, from the leaf up.

    Args:
        name: what the level is ("leaf", "spine").
        gpus: GPUs below one switch group of this level.
        hop_s: latency that traffic pays which has to climb to this level, on top of the fabric's, seconds.
        oversubscription: bandwidth below over bandwidth above for traffic that climbs to this level; 1 is full.
    """

    name: str
    gpus: int
    hop_s: float
    oversubscription: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The NICs of a node and what joins them.

    Args:
        nics_per_node: NICs that carry collectives.
        nic_bytes_per_s: data-sheet bandwidth of one NIC in one direction.
        rails: separate leaf planes, one for each GPU position; 1 where all NICs share a leaf.
        levels: from the leaf up; a group that spans more than the last level is refused.
        fabric: fitted latencies and efficiencies.
    """

    nics_per_node: int
    nic_bytes_per_s: float
    rails: int
    levels: tuple[FabricLevel, ...]
    fabric: NetworkFabric

    def crossed(self, span: int) -> tuple[FabricLevel, ...]:
        """Levels that a group has to climb whose first and last rank lie `span` GPUs apart."""
        count = next((i for i, level in enumerate(self.levels) if span <= level.gpus), len(self.levels) - 1)
        return self.levels[: count + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A homogeneous cluster, but for what is degraded.

    Args:
        name: preset or file name.
        device: GPU, a name of the device profiles.
        memory_bytes: memory of one GPU.
        gpus_per_node: GPUs of one host.
        domain_gpus: GPUs of one NVLink domain; on a PCIe machine, those of the host.
        nvlink_bytes_per_s: data-sheet NVLink bandwidth of one GPU in one direction, 0 without NVLink.
        pcie_bytes_per_s: data-sheet PCIe bandwidth of one GPU in one direction; its way to the NICs as well.
        max_gpus: largest size that the network's levels can join.
        stated_gpus: of these, what the levels that the file itself states join; those above are grown by its rule.
        node_fabric: fitted links inside a domain, over links of this bandwidth, with `nvls` only where the NVLink
            switch reduces.
        network: what joins the domains.
        degraded: links with less bandwidth than their like.
        slow_nodes: nodes whose GPUs compute slower than the others.
        collectives: (kind, algorithm) that its library runs where it applies; of other kinds NCCL's choice.
    """

    name: str
    device: str
    memory_bytes: int
    gpus_per_node: int
    domain_gpus: int
    nvlink_bytes_per_s: float
    pcie_bytes_per_s: float
    max_gpus: int
    stated_gpus: int
    node_fabric: NodeFabric
    network: Network
    degraded: tuple[DegradedLink, ...] = ()
    slow_nodes: tuple[SlowNode, ...] = ()
    collectives: tuple[tuple[str, str], ...] = ()

    @property
    def gpu_network_bytes_per_s(self) -> float:
        """Data-sheet bandwidth of a GPU into the network: an even share of its node's NICs, over its PCIe."""
        network = self.network
        return min(network.nics_per_node * network.nic_bytes_per_s / self.gpus_per_node, self.pcie_bytes_per_s)

    def with_degraded(self, worse: Sequence[DegradedLink | SlowNode]) -> Cluster:
        """The cluster with more of it degraded."""
        return replace(
            self,
            degraded=(*self.degraded, *(entry for entry in worse if isinstance(entry, DegradedLink))),
            slow_nodes=(*self.slow_nodes, *(entry for entry in worse if isinstance(entry, SlowNode))),
        )

    def place(self, ranks: Sequence[int]) -> GroupPlacement:
        """How a group spreads over the cluster.

        Args:
            ranks: global ranks, each once. A `range` takes constant time: `place(range(0, 4096, 8))`.

        Raises:
            PlanError: an empty group, a rank twice, or a rank beyond the cluster.
        """
        placement = place(ranks, self.gpus_per_node, self.domain_gpus)
        largest = max(ranks[0], ranks[-1]) if isinstance(ranks, range) else int(max(ranks))
        if largest >= self.max_gpus:
            raise PlanError(f"cluster {self.name}: rank {largest} is beyond its {self.max_gpus} GPUs (max_gpus)")
        return placement

    def place_strided(self, size: int, stride: int = 1) -> GroupPlacement:
        """How the group 0, stride, 2 stride, ... of `size` ranks spreads over the cluster.

        Raises:
            PlanError: size or stride below 1, or the group does not fit the cluster.
        """
        if size < 1 or stride < 1:
            raise PlanError(f"group of size {size} and stride {stride}: both are at least 1")
        return self.place(range(0, size * stride, stride))


LEAST_PART = 1e-6
"""Of a link's bandwidth or a node's speed that may be left: with less, a step takes years."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DegradedLink:
    """A link that carries less.

    Args:
        link: its name, or words of it that several have: "node 3 nic 5", "leaf 2 up", "node 3".
        bandwidth: share of its bandwidth that is left, `LEAST_PART` to 1.
    """

    link: str
    bandwidth: float

    @property
    def where(self) -> str:
        """Words for what is degraded."""
        return self.link


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowNode:
    """A node that computes slower.

    Args:
        node: its number.
        compute: its speed over that of the others, `LEAST_PART` to 1.
    """

    node: int
    compute: float

    @property
    def where(self) -> str:
        """Words for what is degraded."""
        return f"node {self.node}"


def parse_degraded(text: str) -> DegradedLink | SlowNode:
    """What is degraded, as the command line spells it: "node 3 nic 5=0.5", "node 3 compute=0.9".

    Raises:
        UsageError: it is no name and factor.
    """
    what, _, value = text.rpartition("=")
    what = " ".join(what.split())
    try:
        factor = float(value)
    except ValueError:
        factor = 0.0
    if not what or not LEAST_PART <= factor <= 1:
        raise UsageError(
            f"--degrade '{text[:60]}': give LINK=FACTOR with a factor from {LEAST_PART:g} to 1, "
            "as 'node 3 nic 5=0.5'"
        )
    if slow := re.fullmatch(r"node (\d{1,9}) compute", what):
        return SlowNode(node=int(slow[1]), compute=factor)
    return DegradedLink(link=what, bandwidth=factor)
