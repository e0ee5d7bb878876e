"""A cluster without latencies, all of whose links are as fast, and on which rings run everything."""

from __future__ import annotations

import json
from pathlib import Path

from echograph.simulator.clusters import Cluster, load_cluster

GBPS = 100

CLUSTER = """
max_gpus = 4096

[node]
device = "h100-sxm"
memory_GiB = 80
gpus = 8
nvlink_domain = 4096
nvlink_GBps = 100
pcie_GBps = 100
nvls = false
fabric = "even-node.json"

[network]
nics_per_node = 8
nic_GBps = 100
rails = 1
fabric = "even-network.json"

[[network.level]]
name = "leaf"
gpus = 4096
hop_us = 0
oversubscription = 1

[collectives]
all_reduce = "ring"
all_gather = "ring"
reduce_scatter = "ring"
"""


def even_cluster(folder: Path) -> Cluster:
    """Writes the cluster's files into a folder and loads it."""
    free = {"base_us": 0, "hop_us": 0, "efficiency": 1}
    about = {"origin": "assumed", "source": "closed form", "date": "2026-11", "assumed_error": 0.1}
    protocols = {"LL": free, "LL128": free, "Simple": free}
    node = {
        "kind": "node", "about": about, "link": {"kind": "nvlink", "bandwidth_GBps": GBPS}, "fill": 0,
        "levels": [{"ranks": 4096, "bandwidth_GBps": GBPS}],
        "protocols": protocols,
        "peer": {"LL": free, "Simple": free, "bandwidth_GBps": GBPS, "local_share": 0},
    }  # fmt: skip
    network = {
        "kind": "network", "about": about, "protocols": protocols, "tree_efficiency": 1, "ring_hop_share": 0.5,
        "two_domain_volume": 1, "pat": False, "peer": free,
    }  # fmt: skip
    (folder / "even-node.json").write_text(json.dumps(node))
    (folder / "even-network.json").write_text(json.dumps(network))
    (folder / "even.toml").write_text(CLUSTER)
    return load_cluster(folder / "even.toml")
