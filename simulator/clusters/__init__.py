"""Clusters as data: presets, the fitted fabrics they name, and where a group of ranks sits on them."""

from __future__ import annotations

from echograph.simulator.clusters.fabric import (
    NetworkFabric,
    NodeFabric,
    fabric_names,
    load_network_fabric,
    load_node_fabric,
)
from echograph.simulator.clusters.load import DEFAULT_CLUSTER, cluster_names, load_cluster
from echograph.simulator.clusters.placement import GroupPlacement
from echograph.simulator.clusters.types import (
    Cluster,
    DegradedLink,
    FabricLevel,
    Network,
    SlowNode,
    parse_degraded,
)

__all__ = [
    "DEFAULT_CLUSTER",
    "Cluster",
    "DegradedLink",
    "FabricLevel",
    "Network",
    "NetworkFabric",
    "NodeFabric",
    "GroupPlacement",
    "SlowNode",
    "cluster_names",
    "fabric_names",
    "load_cluster",
    "load_network_fabric",
    "load_node_fabric",
    "parse_degraded",
]
