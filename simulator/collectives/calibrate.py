"""Turns a fabric's numbers into a flat vector and back, so that a fit can move them.

The fit itself lives in the profiler, which knows nothing of algorithms: it calls `Calibration.predict`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from echograph.errors import DataError
from echograph.simulator.clusters import Cluster, GroupPlacement
from echograph.simulator.clusters.fabric import NodeFabric, parse_fabric
from echograph.simulator.collectives import CollectiveName, collective_curve

# Not to be fitted: the link measured on, a factor of a bandwidth that is itself fitted, or a ratio that usual rows
# do not separate.
HELD = {
    "node": ("link", "protocols.Simple.efficiency", "peer.Simple.efficiency"),
    "network": ("tree_efficiency", "ring_hop_share", "two_domain_volume", "ll128_chunks"),
}
# Largest value by the last part of a parameter's name, as the files' own rules have it.
LIMITS = {"efficiency": 1.05, "tree_efficiency": 1.0, "local_share": 1.0, "fill": 1.0}


class MeasuredCollective(Protocol):
    """What a calibration reads of a measured row."""

    @property
    def kind(self) -> CollectiveName:
        """The collective."""

    @property
    def ranks(self) -> int:
        """Size of the group."""

    @property
    def nodes(self) -> int:
        """Hosts it ran on."""

    @property
    def size_bytes(self) -> float:
        """Bytes, as nccl-tests counts `size`."""


@dataclass(frozen=True, slots=True, eq=False)
class _Curve:
    kind: CollectiveName
    placement: GroupPlacement
    index: NDArray[np.int64]
    sizes: NDArray[np.float64]


class Calibration:
    """Predicts measured rows from the numbers of one fabric of a cluster.

    Args:
        cluster: the cluster measured on; its other fabric stays as it is.
        name: name of the fabric that the fit makes.
        document: content of a fabric file to start from; its positive numbers outside `about` are parameters.
        rows: measured collectives.
        fixed: dotted names, or their beginnings, of parameters to leave alone besides those `HELD`.

    Raises:
        DataError: the document is no fabric, or a row does not fit the cluster.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        document: Mapping[str, Any],
        rows: Sequence[MeasuredCollective],
        fixed: Sequence[str] = (),
    ) -> None:
        self._cluster = cluster
        self._name = name
        self._document = copy.deepcopy(dict(document))
        self._rows = len(rows)
        self._curves = _curves(rows, cluster)
        skip = ("about", *HELD.get(str(self._document.get("kind")), ()), *fixed)
        self._paths = [
            path for path in _numbers(self._document) if not path.startswith(skip) and not path.endswith(".ranks")
        ]

    def start(self) -> dict[str, float]:
        """The parameters as the document has them: dotted name -> value in the file's units."""
        return {path: float(_at(self._document, path)) for path in self._paths}

    def document(self, values: Mapping[str, float]) -> dict[str, Any]:
        """The fabric file with these parameters."""
        made = copy.deepcopy(self._document)
        for path, value in values.items():
            *parents, last = path.split(".")
            holder = _at(made, ".".join(parents)) if parents else made
            holder[_key(holder, last)] = value
        return made

    def cluster(self, values: Mapping[str, float]) -> Cluster:
        """The cluster with a fabric of these parameters."""
        fabric = parse_fabric(self.document(values), self._name)
        if isinstance(fabric, NodeFabric):
            return replace(self._cluster, node_fabric=fabric)
        return replace(self._cluster, network=replace(self._cluster.network, fabric=fabric))

    def predict(self, values: Mapping[str, float]) -> NDArray[np.float64]:
        """Seconds of each row, in the rows' order."""
        cluster = self.cluster(values)
        seconds = np.empty(self._rows)
        for curve in self._curves:
            seconds[curve.index] = collective_curve(curve.kind, curve.sizes, curve.placement, cluster)
        return seconds


def place_measured(ranks: int, nodes: int, cluster: Cluster) -> GroupPlacement:
    """Placement of a measurement that used `ranks` GPUs spread evenly over `nodes` hosts.

    Raises:
        DataError: the hosts cannot hold them.
    """
    stride = max(1, cluster.gpus_per_node * nodes // ranks)
    placement = cluster.place_strided(ranks, stride if nodes > 1 else 1)
    if placement.nodes != nodes:
        raise DataError(f"{ranks} ranks on {nodes} nodes: {cluster.name} has {cluster.gpus_per_node} GPUs a node")
    return placement


def _curves(rows: Sequence[MeasuredCollective], cluster: Cluster) -> list[_Curve]:
    groups: dict[tuple[CollectiveName, int, int], list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault((row.kind, row.ranks, row.nodes), []).append(i)
    return [
        _Curve(
            kind,
            place_measured(ranks, nodes, cluster),
            np.array(index),
            np.array([rows[i].size_bytes for i in index], dtype=np.float64),
        )
        for (kind, ranks, nodes), index in groups.items()
    ]


def _numbers(node: Any, prefix: str = "") -> list[str]:
    """Dotted names of the positive numbers in a document: a zero means absent and stays zero."""
    if isinstance(node, Mapping):
        return [name for key, child in node.items() for name in _numbers(child, f"{prefix}{key}.")]
    if isinstance(node, list):
        return [name for i, child in enumerate(node) for name in _numbers(child, f"{prefix}{i}.")]
    is_number = isinstance(node, int | float) and not isinstance(node, bool)
    return [prefix[:-1]] if is_number and node > 0 else []


def _at(document: Any, path: str) -> Any:
    for part in path.split("."):
        document = document[_key(document, part)]
    return document


def _key(holder: Any, part: str) -> Any:
    return int(part) if isinstance(holder, list) else part
