"""The links of a cluster, and what they offer a group: links as numbers with a capacity and a name.

Every GPU has a link into its NVLink domain (or PCIe host), every node has ports to the network, every group of a
fabric level has links to the level above; each once out (or up) and once in (or down). A port is a NIC; where a
node has fewer NICs than GPUs, neighbouring GPUs share one, and where it has more, the NICs of a GPU are one port.
On a fabric with rails, the ports of one position meet at leaves of their own.

Capacities are those of payload in protocol Simple: the data sheet's bandwidth times the fabric's efficiency.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from operator import mul

import numpy as np

from echograph.errors import UsageError
from echograph.ir.columns import NONE, Float64, Int64
from echograph.simulator.clusters import Cluster, GroupPlacement
from echograph.simulator.clusters.fabric import NetworkFabric, NodeFabric

ENDS = (("out", "in"), ("up", "down"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """The links from the groups of one fabric level to the level above.

    Attributes:
        name: of the level; "node" where a node's ports together are oversubscribed.
        gpus: GPUs below one group.
        rails: separate switches of a group, one for the ports of each position.
        oversubscription: bandwidth of the ports below over that of these links.
        groups: groups that the job's GPUs touch.
        first: number of the first link; a switch has two, up and down, and a group its switches in a row.
    """

    name: str
    gpus: int
    rails: int
    oversubscription: float
    groups: int
    first: int

    @property
    def links(self) -> int:
        """How many links the tier has."""
        return 2 * self.groups * self.rails


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The links that the first GPUs of a cluster can load: of GPUs, then of ports, then of each tier.

    Attributes:
        cluster: the cluster.
        gpus: GPUs of the job, whole nodes of them.
    """

    cluster: Cluster
    gpus: int

    @cached_property
    def ports(self) -> int:
        """Ports of a node."""
        return min(self.cluster.network.nics_per_node, self.cluster.gpus_per_node)

    @cached_property
    def nodes(self) -> int:
        """Nodes that the job's GPUs touch."""
        return -(-self.gpus // self.cluster.gpus_per_node)

    @cached_property
    def nics(self) -> Int64:
        """int64 [ports + 1], the first NIC of each port of a node, and how many there are."""
        return np.arange(self.ports + 1) * self.cluster.network.nics_per_node // self.ports

    @cached_property
    def tiers(self) -> tuple[Tier, ...]:
        """From the node up; the last level of the fabric has nothing above it."""
        levels, node = self.cluster.network.levels, self.cluster.gpus_per_node
        over = list(accumulate((level.oversubscription for level in levels), mul))
        rails = min(self.cluster.network.rails, self.ports)
        rows = [("node", node, 1, over[0])] if over[0] > 1 else []
        rows += [
            (level.name, max(level.gpus, node), 1 if above else rails, share)
            for above, (level, share) in enumerate(zip(levels[:-1], over[1:], strict=True))
        ]
        tiers: list[Tier] = []
        first = 2 * self.nodes * (node + self.ports)
        for name, gpus, planes, share in rows:
            groups = -(-self.nodes * node // gpus)
            tiers.append(
                Tier(name=name, gpus=gpus, rails=planes, oversubscription=share, groups=groups, first=first)
            )
            first += tiers[-1].links
        return tuple(tiers)

    @cached_property
    def links(self) -> int:
        """How many links there are."""
        return self.tiers[-1].first + self.tiers[-1].links if self.tiers else self.first_port + self._port_links

    @property
    def first_port(self) -> int:
        """Number of the first link between domains."""
        return 2 * self.nodes * self.cluster.gpus_per_node

    @property
    def _port_links(self) -> int:
        return 2 * self.nodes * self.ports

    def of_gpu(self, gpu: Int64) -> Int64:
        """The links out of GPUs into their domain; the next number is the link in."""
        return 2 * gpu

    def port(self, gpu: Int64) -> Int64:
        """The ports of GPUs, numbered through all nodes."""
        node, place = np.divmod(gpu, self.cluster.gpus_per_node)
        port: Int64 = node * self.ports + place * self.ports // self.cluster.gpus_per_node
        return port

    def of_port(self, port: Int64) -> Int64:
        """The links out of ports into the network; the next number is the link in."""
        return self.first_port + 2 * port

    def above(self, tier: Tier, port: Int64) -> Int64:
        """The links of a tier up from the switches that ports hang on; the next number is the link down."""
        node, place = np.divmod(port, self.ports)
        switch = node * self.cluster.gpus_per_node // tier.gpus * tier.rails + place % tier.rails
        link: Int64 = tier.first + 2 * switch
        return link

    @cached_property
    def nic_bytes_per_s(self) -> Float64:
        """float64 [ports], data-sheet bandwidth of the ports of a node."""
        return np.diff(self.nics) * self.cluster.network.nic_bytes_per_s

    def group_bytes_per_s(self, ranks: Int64) -> float:
        """Data-sheet bandwidth of the ports of a group's ranks, in the domain of its that has most.

        Args:
            ranks: the group's GPUs.
        """
        ports, first = np.unique(self.port(ranks), return_index=True)
        domain = ranks[first] // self.cluster.domain_gpus
        of_domain = np.bincount(domain - domain.min(), weights=self.nic_bytes_per_s[ports % self.ports])
        return float(of_domain.max())

    @cached_property
    def full(self) -> Float64:
        """float64 [links], bytes/s of links in order."""
        node, efficiency = self.cluster.node_fabric, self.cluster.network.fabric.protocols.simple.efficiency
        full = np.empty(self.links)
        full[: self.first_port] = node.bytes_per_s(2) * node.protocols.simple.efficiency
        of_ports = full[self.first_port :][: self._port_links]
        of_ports[:] = np.repeat(np.tile(self.nic_bytes_per_s * efficiency, self.nodes), 2)
        for tier in self.tiers:
            rail = np.bincount(np.arange(self.ports) % tier.rails, weights=self.nic_bytes_per_s)
            share = tier.gpus / self.cluster.gpus_per_node * efficiency / tier.oversubscription
            full[tier.first :][: tier.links] = np.repeat(np.tile(rail * share, tier.groups), 2)
        return full

    @cached_property
    def capacity(self) -> Float64:
        """float64 [links], bytes/s of links as they are: those that the cluster names as degraded have less.

        Raises:
            UsageError: the cluster names a link that it does not have.
        """
        capacity = self.full.copy()
        everywhere = Topology(cluster=self.cluster, gpus=self.cluster.max_gpus)
        for entry in self.cluster.degraded:
            everywhere.find(entry.link)
            for link, share in self._called(entry.link):
                capacity[link] *= 1 - share * (1 - entry.bandwidth)
        return capacity

    def name(self, link: int) -> str:
        """What a link is called: "gpu 12 nvlink out", "node 3 nic 5 in", "leaf 2 up", "leaf 2 rail 3 down"."""
        if link < self.first_port:
            kind = "nvlink" if self.cluster.nvlink_bytes_per_s else "pcie"
            return f"gpu {link // 2} {kind} {ENDS[0][link % 2]}"
        if link < self.first_port + self._port_links:
            node, port = divmod((link - self.first_port) // 2, self.ports)
            low, high = int(self.nics[port]), int(self.nics[port + 1]) - 1
            return f"node {node} nic {low if low == high else f'{low}-{high}'} {ENDS[0][link % 2]}"
        tier = next(t for t in self.tiers if link < t.first + t.links)
        group, rail = divmod((link - tier.first) // 2, tier.rails)
        return f"{tier.name} {group} {f'rail {rail} ' if tier.rails > 1 else ''}{ENDS[1][link % 2]}"

    def kind(self, link: int) -> str:
        """What links have in common that are alike: "gpu", "nic", or the name of a tier."""
        if link < self.first_port + self._port_links:
            return "gpu" if link < self.first_port else "nic"
        return next(t for t in self.tiers if link < t.first + t.links).name

    def find(self, words: str) -> list[tuple[int, float]]:
        """The links whose name has some words, in their order, and the share of each that the words mean.

        One NIC of several that are one port is a share of its link.

        Args:
            words: "node 3", "node 3 nic 5", "node 3 nic 5 out", "leaf 2 up" (of all rails), ...

        Raises:
            UsageError: no link is called so; names the nearest.
        """
        if found := self._called(words):
            return found
        kind, number = _item(words)
        items = self._items(kind, number)
        raise UsageError(f"no link '{words[:60]}': {self._nearest(kind, items)}")

    def _called(self, words: str) -> list[tuple[int, float]]:
        merged: dict[int, float] = {}
        for name, (link, share) in self._items(*_item(words)).items():
            rest = iter(name.split())
            if all(word in rest for word in words.split()):
                merged[link] = min(1.0, merged.get(link, 0.0) + share)
        return list(merged.items())

    def _items(self, kind: str, number: int) -> dict[str, tuple[int, float]]:
        """Link and share by name, for one GPU, node or group of a tier; none where it is not there."""
        found: dict[str, tuple[int, float]] = {}
        if kind == "gpu" and 0 <= number < self.nodes * self.cluster.gpus_per_node:
            found |= {self.name(link): (link, 1.0) for link in (2 * number, 2 * number + 1)}
        if kind == "node" and 0 <= number < self.nodes:
            for port in range(self.ports):
                link = self.first_port + 2 * (number * self.ports + port)
                nics = range(int(self.nics[port]), int(self.nics[port + 1]))
                for nic, end in product(nics, (0, 1)):
                    found[f"node {number} nic {nic} {ENDS[0][end]}"] = link + end, 1 / len(nics)
                found |= {self.name(link + end): (link + end, 1.0) for end in (0, 1)}
        for tier in self.tiers:
            if kind == tier.name and 0 <= number < tier.groups:
                first = tier.first + 2 * number * tier.rails
                found |= {self.name(link): (link, 1.0) for link in range(first, first + 2 * tier.rails)}
        return found

    def _nearest(self, kind: str, items: dict[str, tuple[int, float]]) -> str:
        if items:
            names = list(dict.fromkeys(name.rpartition(" ")[0] for name in items))
            return f"there is {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
        counts = {"gpu": self.nodes * self.cluster.gpus_per_node, "node": self.nodes}
        counts |= {tier.name: tier.groups for tier in self.tiers}
        chosen = difflib.get_close_matches(kind, counts, n=1) or list(counts)
        return "there is " + ", ".join(f"{name} 0 to {counts[name] - 1}" for name in chosen)


def _item(words: str) -> tuple[str, int]:
    """What a link belongs to and its number: ("node", 3) of "node 3 nic 5"; -1 where none is said."""
    said = re.match(r"\s*(.*?)\s+(\d{1,9})(\s|$)", words)
    return (said[1], int(said[2])) if said else (words.partition(" ")[0], NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Bandwidths and latencies as one group sees them.

    Args:
        ranks: size of the group.
        domains: NVLink domains (or PCIe hosts) that it touches.
        ranks_per_domain: the most ranks in one of them.
        node: fitted costs inside a domain.
        node_bytes_per_s: through one rank inside a domain, after protocol Simple's fit.
        network: fitted costs between domains.
        network_bytes_per_s: data-sheet bandwidth that the group's ranks of one domain have together on the
            NICs, one direction, after oversubscription.
        ring_bytes_per_s: what of that the group's rings or trees use.
        climb_s: latency a network hop pays for the fabric levels that the group spans.
    """

    ranks: int
    domains: int
    ranks_per_domain: int
    node: NodeFabric
    node_bytes_per_s: float
    network: NetworkFabric
    network_bytes_per_s: float
    ring_bytes_per_s: float
    climb_s: float

    @property
    def tree_volume(self) -> float:
        """Multiples of S that a domain sends at most in a double binary tree across domains."""
        return self.network.two_domain_volume if self.domains == 2 else 2.0


def group_links(placement: GroupPlacement, cluster: Cluster, network_bytes_per_s: float | None = None) -> Links:
    """Resolves the links of a group.

    Args:
        placement: where the group sits, from `cluster.place`.
        cluster: the cluster.
        network_bytes_per_s: what the group has of the network, as in `Links`, where that is known. Without it,
            a group has the share of its nodes' NICs that its ranks have of the GPUs, less what is
            oversubscribed: the sibling groups of a parallel plan (the other data-parallel groups of the same
            nodes) communicate at the same time.
    """
    network = cluster.network
    crossed = network.crossed(placement.span)
    share = network_bytes_per_s
    if share is None:
        share = placement.ranks_per_domain * cluster.gpu_network_bytes_per_s
        for level in crossed:
            share /= level.oversubscription
    nics = network.fabric.ring_nics
    return Links(
        ranks=placement.ranks,
        domains=placement.domains,
        ranks_per_domain=placement.ranks_per_domain,
        node=cluster.node_fabric,
        node_bytes_per_s=cluster.node_fabric.bytes_per_s(placement.ranks_per_domain),
        network=network.fabric,
        network_bytes_per_s=share,
        ring_bytes_per_s=share if nics is None else min(share, nics * network.nic_bytes_per_s),
        climb_s=sum(level.hop_s for level in crossed),
    )
