"""Clusters as data: where a group of ranks sits, what a cluster is, and how a TOML file says it.

A cluster is its GPUs, its NVLink domains, its NICs, the levels of its network, the fitted fabrics that it names
(`fabric`), and what of it is degraded. Files hold keys that carry units; the types hold SI units.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
import numpy as np

from echograph.errors import DataError, PlanError, UnknownNameError, UsageError
from echograph.ir.columns import distinct
from echograph.ir.documents import convert, parse_toml, require
from echograph.ir.files import read_whole
from echograph.simulator.clusters.fabric import (
    MAX_FILE_BYTES,
    NetworkFabric,
    NodeFabric,
    NodeLink,
    fabric_names,
    load_network_fabric,
    load_node_fabric,
)
from echograph.units import GB, GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlacement:
    """How a group spreads over a cluster; all that the time of a collective depends on.

    Args:
        ranks: size of the group.
        nodes: hosts it touches.
        ranks_per_node: the most ranks on one host.
        domains: NVLink domains it touches (on a PCIe machine, hosts).
        ranks_per_domain: the most ranks in one domain.
        span: distance from its first to its last rank plus one; says which fabric level it crosses.
    """

    ranks: int
    nodes: int
    ranks_per_node: int
    domains: int
    ranks_per_domain: int
    span: int

    def __post_init__(self) -> None:
        if min(self.ranks, self.nodes, self.ranks_per_node, self.domains, self.ranks_per_domain) < 1:
            raise PlanError(f"placement of {self.ranks} ranks: every count is at least 1")


def place(ranks: Sequence[int], gpus_per_node: int, domain_gpus: int) -> GroupPlacement:
    """Places a group on consecutive nodes.

    Args:
        ranks: global ranks of the group, each once; a `range` costs no memory and constant time.
        gpus_per_node: GPUs of one host.
        domain_gpus: GPUs of one NVLink domain.

    Raises:
        PlanError: the group is empty, names a rank twice, or a negative one.
    """
    if not len(ranks):
        raise PlanError("group: it has no rank")
    if isinstance(ranks, range):
        low, high = sorted((ranks[0], ranks[-1]))
        if low < 0:
            raise PlanError(f"group {ranks}: ranks are at least 0")
        nodes, per_node = _strided(len(ranks), abs(ranks.step), low, gpus_per_node)
        domains, per_domain = _strided(len(ranks), abs(ranks.step), low, domain_gpus)
    else:
        members = distinct(ranks)
        if len(members) != len(ranks):
            raise PlanError("group: a rank is named twice")
        low, high = int(members[0]), int(members[-1])
        if low < 0:
            raise PlanError(f"group: rank {low} is below 0")
        nodes, per_node = _listed(members, gpus_per_node)
        domains, per_domain = _listed(members, domain_gpus)
    return GroupPlacement(
        ranks=len(ranks),
        nodes=nodes,
        ranks_per_node=per_node,
        domains=domains,
        ranks_per_domain=per_domain,
        span=high - low + 1,
    )


def _strided(size: int, stride: int, start: int, box: int) -> tuple[int, int]:
    """Boxes touched by start, start + stride, ... and the most of them in one box."""
    if stride >= box:
        return size, 1
    touched = (start + (size - 1) * stride) // box - start // box + 1
    if touched <= 2 * stride:
        # Which boxes hold one more than others repeats after at most `stride` boxes, so few need counting.
        edges = np.arange(start // box, start // box + touched + 1) * box
        index = np.clip(-(-(edges - start) // stride), 0, size)
        return touched, int(np.diff(index).max(initial=1))
    return touched, min(size, -(-box // stride))


def _listed(members: np.ndarray, box: int) -> tuple[int, int]:
    counts = np.unique(members // box, return_counts=True)[1]
    return len(counts), int(counts.max())


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
        gpu_spread: standard deviation, over GPUs of one model, of the time that products take.
        processor: of its hosts, a name of the profiler's table; "" where it is not known.
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
    gpu_spread: float = 0.0
    processor: str = ""

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


PRESETS = Path(__file__).parent / "presets"
DEFAULT_CLUSTER = "dgx-h100"
SLOWEST_GBPS = 1e-3
"""Of a link: 8 Mb/s. Slower ones give steps of years."""


Gpus = Annotated[int, msgspec.Meta(ge=1, le=10**9)]
Few = Annotated[int, msgspec.Meta(ge=1, le=1024)]
_Bandwidth = Annotated[float, msgspec.Meta(ge=SLOWEST_GBPS, le=1e6)]
_Part = Annotated[float, msgspec.Meta(ge=LEAST_PART, le=1)]
Ratio = Annotated[float, msgspec.Meta(ge=1, le=64)]
_Microseconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]


GPU_SPREAD = 0.015
"""Of the times that GPUs of one model take, over their mean: 8 % from the fastest to the slowest but for outliers
(Sinha et al. 2022, Not All GPUs Are Created Equal, arXiv:2208.11035: five clusters, three of V100), which is taken
as 5.4 standard deviations, what whiskers of 1.5 quartiles span; that newer boards differ as much is assumed."""


class _Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    device: Name
    memory_GiB: Annotated[float, msgspec.Meta(ge=1e-3, le=1e6)]
    gpus: Few
    nvlink_domain: Gpus
    nvlink_GBps: Annotated[float, msgspec.Meta(ge=0, le=1e6)]
    pcie_GBps: _Bandwidth
    nvls: bool
    fabric: Name
    gpu_spread: Annotated[float, msgspec.Meta(ge=0, le=1)] = GPU_SPREAD
    processor: Name | None = None

    def __post_init__(self) -> None:
        require(self.nvlink_domain % self.gpus == 0, "nvlink_domain is a multiple of gpus")
        slowest = f"nvlink_GBps is 0 (no NVLink: PCIe joins the GPUs) or at least {SLOWEST_GBPS:g}"
        require(not self.nvlink_GBps or self.nvlink_GBps >= SLOWEST_GBPS, slowest)
        require(not self.nvls or self.nvlink_GBps > 0, "nvls needs nvlink_GBps above 0")

    def fabric_of(self, folder: Path) -> NodeFabric:
        """The fabric over this node's links, with in-switch reduction only where the node has it."""
        rate = self.nvlink_GBps or self.pcie_GBps
        link = NodeLink(kind="nvlink" if self.nvlink_GBps else "pcie", bytes_per_s=rate * GB)
        fabric = load_node_fabric(_beside(folder, self.fabric), link)
        if self.nvls and fabric.nvls is None:
            raise DataError(
                f"node.nvls = true: fabric {fabric.name} has no numbers of NVLS, so collectives cannot use it; "
                "give nvls = false, or a fabric that has them"
            )
        return fabric if self.nvls else replace(fabric, nvls=None)


class _Level(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Name
    gpus: Gpus
    hop_us: _Microseconds
    oversubscription: Ratio

    def value(self) -> FabricLevel:
        return FabricLevel(
            name=self.name, gpus=self.gpus, hop_s=self.hop_us * 1e-6, oversubscription=self.oversubscription
        )


class _Growth(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the network grows beyond its last level: more levels, each `ratio` times as large as the one below."""

    ratio: Annotated[int, msgspec.Meta(ge=2, le=10**6)]
    hop_us: _Microseconds
    oversubscription: Ratio

    def above(self, last: _Level, gpus: int) -> list[_Level]:
        """The levels above the last one until they join so many GPUs; "core-2" is the first above "core"."""
        grown: list[_Level] = []
        size = last.gpus
        while size < gpus:
            size *= self.ratio
            name = f"{last.name}-{len(grown) + 2}"
            grown.append(_Level(name=name, gpus=size, hop_us=self.hop_us, oversubscription=self.oversubscription))
        return grown


class _Network(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    nics_per_node: Few
    nic_GBps: _Bandwidth
    rails: Few
    fabric: Name
    level: Annotated[list[_Level], msgspec.Meta(min_length=1, max_length=16)]
    growth: _Growth | None = None

    def __post_init__(self) -> None:
        sizes = [level.gpus for level in self.level]
        require(sizes == sorted(set(sizes)), f"level: gpus grow from one to the next, not {sizes}")
        names = [level.name for level in self.level]
        require(len(set(names)) == len(names), f"level: each has a name of its own, not {names}")
        require(not {"gpu", "node"} & set(names), "level: name is not gpu or node, whose links have these names")
        joined = self.rails == 1 or len(sizes) > 1
        require(joined, f"rails = {self.rails} of one level meet nowhere: give a level above them, or rails = 1")


class _Degraded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    link: Name | None = None
    node: Annotated[int, msgspec.Meta(ge=0, le=10**9)] | None = None
    bandwidth: _Part = 1.0
    compute: _Part = 1.0

    def __post_init__(self) -> None:
        require((self.link is None) != (self.node is None), "degraded names a link or a node")
        require(self.compute == 1 or self.node is not None, "compute is that of a node")
        require(min(self.bandwidth, self.compute) < 1, "degraded has a bandwidth or a compute below 1")

    @property
    def links(self) -> str:
        return f"node {self.node}" if self.link is None else self.link


class ClusterFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a cluster's TOML file holds: its keys, and what each may be."""

    max_gpus: Gpus
    node: _Node
    network: _Network
    degraded: list[_Degraded] = msgspec.field(default_factory=list)
    collectives: dict[str, Name] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        last, growth = self.network.level[-1], self.network.growth
        require(self.max_gpus >= self.node.gpus, f"max_gpus is at least node.gpus, not {self.max_gpus}")
        require(
            self.max_gpus <= last.gpus or growth is not None,
            f"max_gpus = {self.max_gpus} is above the last level's gpus, {last.gpus}: give [network.growth]",
        )
        ports = min(self.network.nics_per_node, self.node.gpus)
        few = self.network.rails <= ports
        require(few, f"network.rails = {self.network.rails} is above what a node has of NICs and GPUs, {ports}")
        nodes = -(-self.max_gpus // self.node.gpus)
        for entry in self.degraded:
            known = entry.node is None or entry.node < nodes
            require(known, f"degraded: node = {entry.node} is beyond the nodes 0 to {nodes - 1}")

    def value(self, name: str, folder: Path) -> Cluster:
        """The cluster, and its fabrics from their files.

        Raises:
            DataError: a fabric is broken or of other links than the node's, or has no numbers for its nvls.
            UsageError: `collectives` names what is no collective, or an algorithm that does not run it.
        """
        from echograph.simulator.collectives import check_named

        node, network = self.node, self.network
        check_named(self.collectives)
        grown = network.growth.above(network.level[-1], self.max_gpus) if network.growth else []
        return Cluster(
            name=name,
            device=node.device,
            processor=node.processor or "",
            memory_bytes=round(node.memory_GiB * GIB),
            gpus_per_node=node.gpus,
            domain_gpus=node.nvlink_domain,
            nvlink_bytes_per_s=node.nvlink_GBps * GB,
            pcie_bytes_per_s=node.pcie_GBps * GB,
            max_gpus=self.max_gpus,
            stated_gpus=min(self.max_gpus, network.level[-1].gpus),
            node_fabric=node.fabric_of(folder),
            network=Network(
                nics_per_node=network.nics_per_node,
                nic_bytes_per_s=network.nic_GBps * GB,
                rails=network.rails,
                levels=tuple(level.value() for level in (*network.level, *grown)),
                fabric=load_network_fabric(_beside(folder, network.fabric)),
            ),
            degraded=tuple(
                DegradedLink(link=d.links, bandwidth=d.bandwidth) for d in self.degraded if d.bandwidth < 1
            ),
            slow_nodes=tuple(
                SlowNode(node=d.node, compute=d.compute)
                for d in self.degraded
                if d.node is not None and d.compute < 1
            ),
            collectives=tuple(self.collectives.items()),
            gpu_spread=node.gpu_spread,
        )


def _beside(folder: Path, fabric: str) -> str | Path:
    """A fabric's path is relative to the cluster file that names it; a shipped name stays as it is."""
    return folder / fabric if fabric.endswith(".json") else fabric


def cluster_names() -> tuple[str, ...]:
    """Names of the cluster presets, sorted."""
    return tuple(sorted(path.stem for path in PRESETS.glob("*.toml")))


def load_cluster(
    name_or_path: str | Path = DEFAULT_CLUSTER, settings: Mapping[str, str] = MappingProxyType({})
) -> Cluster:
    """Loads a cluster.

    Args:
        name_or_path: a preset's name, or the path of a TOML file (anything that ends in `.toml`).
        settings: keys of the file with other values, as text: {"network.nic_GBps": "100"}.

    Raises:
        UnknownNameError: no preset of that name, the file names a fabric that is not shipped, or has no such key.
        InputError: the file cannot be read.
        DataError: it breaks a rule; names file, key and rule.
    """
    text = str(name_or_path)
    if text.endswith(".toml"):
        return _read(Path(text), settings)
    if text not in cluster_names():
        raise UnknownNameError("cluster", text, cluster_names(), hint="or give the path of a .toml file")
    return _read(PRESETS / f"{text}.toml", settings)


def _read(path: Path, settings: Mapping[str, str]) -> Cluster:
    what = f"cluster file {path}"
    document = parse_toml(read_whole(path, "give the path of a cluster file", MAX_FILE_BYTES), what)
    convert(document, ClusterFile, what)
    if settings:
        _set(document, settings)
    try:
        return convert(document, ClusterFile, what).value(path.stem, path.parent)
    except DataError as error:
        line = str(error)
        raise DataError(line if line.startswith(what) else f"{what}: {line}") from error


def _set(document: dict[str, Any], settings: Mapping[str, str]) -> None:
    """Changes values of a document that converts.

    Levels of the network are named: network.level.spine.oversubscription.
    """
    places = _places(document)
    for key, text in settings.items():
        if key.startswith("collectives."):
            places[key] = document.setdefault("collectives", {}), key.removeprefix("collectives.")
        if key not in places:
            raise UnknownNameError("cluster key", key, places)
        where, name = places[key]
        where[name] = _value(text)
        # A path that is typed is relative to where it is typed, not to the preset.
        if name == "fabric" and text.endswith(".json"):
            where[name] = str(Path(text).absolute())
    if "network.rails" not in settings:
        _fewer_rails(document)
    if document["network"].get("growth") == {}:
        del document["network"]["growth"]


def _fewer_rails(document: dict[str, Any]) -> None:
    """Rails follow where a node is given fewer NICs or GPUs than it has rails."""
    network = document["network"]
    counts = (network["rails"], network["nics_per_node"], document["node"]["gpus"])
    if all(isinstance(count, int) and count > 0 for count in counts):
        network["rails"] = min(counts)


def _places(document: dict[str, Any]) -> dict[str, tuple[dict[str, Any], str]]:
    """Every key that can be set: the table of the document that holds it, and its name there."""
    network = document["network"]
    tables: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
        "node": (_Node, document["node"]),
        "network": (_Network, network),
        "network.growth": (_Growth, network.setdefault("growth", {})),
        **{f"network.level.{level['name']}": (_Level, level) for level in network["level"]},
    }
    places: dict[str, tuple[dict[str, Any], str]] = {"max_gpus": (document, "max_gpus")}
    for prefix, (record, table) in tables.items():
        places |= {f"{prefix}.{key}": (table, key) for key in record.__struct_fields__}
    names = {f"network.level.{level['name']}.name" for level in network["level"]}
    return {key: place for key, place in places.items() if key not in {"network.level", "network.growth", *names}}


def _value(text: str) -> Any:
    """A value as it is typed: TOML's number or boolean; anything else is text."""
    try:
        found = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return found["value"] if list(found) == ["value"] else text


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
