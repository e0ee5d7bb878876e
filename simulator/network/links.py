"""The links that one group's collectives use: what a placement on a cluster offers them."""

from __future__ import annotations

from dataclasses import dataclass

from echograph.simulator.clusters.fabric import NetworkFabric, NodeFabric
from echograph.simulator.clusters.placement import Placement
from echograph.simulator.clusters.types import Cluster


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
        climb_s: latency a network hop pays for the fabric levels that the group spans.
    """

    ranks: int
    domains: int
    ranks_per_domain: int
    node: NodeFabric
    node_bytes_per_s: float
    network: NetworkFabric
    network_bytes_per_s: float
    climb_s: float

    @property
    def tree_volume(self) -> float:
        """Multiples of S that a domain sends at most in a double binary tree across domains."""
        return self.network.two_domain_volume if self.domains == 2 else 2.0


def group_links(placement: Placement, cluster: Cluster, network_bytes_per_s: float | None = None) -> Links:
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
    return Links(
        ranks=placement.ranks,
        domains=placement.domains,
        ranks_per_domain=placement.ranks_per_domain,
        node=cluster.node_fabric,
        node_bytes_per_s=cluster.node_fabric.bytes_per_s(placement.ranks_per_domain),
        network=network.fabric,
        network_bytes_per_s=share,
        climb_s=sum(level.hop_s for level in crossed),
    )
