"""Reads clusters from TOML, whose keys carry units, into types that hold SI units."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from echograph.errors import DataError, UnknownNameError
from echograph.simulator.clusters.degraded import DegradedLink, SlowNode
from echograph.simulator.clusters.fabric import MAX_FILE_BYTES, load_network_fabric, load_node_fabric
from echograph.simulator.clusters.types import Cluster, FabricLevel, Network
from echograph.units import GB, GIB

PRESETS = Path(__file__).parent / "presets"
DEFAULT_CLUSTER = "dgx-h100"


class _Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    device: str
    memory_GiB: float
    gpus: int
    nvlink_domain: int
    nvlink_GBps: float
    pcie_GBps: float
    nvls: bool
    fabric: str

    def __post_init__(self) -> None:
        _require(self.memory_GiB > 0, "memory_GiB is above 0")
        _require(1 <= self.gpus <= 1024, "gpus is from 1 to 1024")
        _require(self.nvlink_domain % self.gpus == 0, "nvlink_domain is a multiple of gpus")
        _require(self.nvlink_domain >= self.gpus, "nvlink_domain is at least gpus")
        _require(self.nvlink_GBps >= 0, "nvlink_GBps is at least 0")
        _require(self.pcie_GBps > 0, "pcie_GBps is above 0")
        _require(not self.nvls or self.nvlink_GBps > 0, "nvls needs nvlink_GBps above 0")


class _Level(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    gpus: int
    hop_us: float
    oversubscription: float

    def __post_init__(self) -> None:
        _require(self.gpus >= 1, "gpus is at least 1")
        _require(0 <= self.hop_us < 1e6, "hop_us is from 0 to 1e6")
        _require(1 <= self.oversubscription <= 64, "oversubscription is from 1 to 64")


class _Network(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    nics_per_node: int
    nic_GBps: float
    rails: int
    fabric: str
    level: list[_Level]

    def __post_init__(self) -> None:
        _require(self.nics_per_node >= 1, "nics_per_node is at least 1")
        _require(self.nic_GBps > 0, "nic_GBps is above 0")
        _require(self.rails >= 1, "rails is at least 1")
        sizes = [level.gpus for level in self.level]
        _require(bool(sizes) and sizes == sorted(set(sizes)), "level has an entry and its gpus grow")


class _Degraded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    link: str | None = None
    node: int | None = None
    bandwidth: float = 1.0
    compute: float = 1.0

    def __post_init__(self) -> None:
        _require((self.link is None) != (self.node is None), "degraded names a link or a node")
        _require(self.node is None or self.node >= 0, "node is at least 0")
        _require(0 < self.bandwidth <= 1 and 0 < self.compute <= 1, "bandwidth and compute are above 0, at most 1")
        _require(self.compute == 1 or self.node is not None, "compute is that of a node")
        _require(min(self.bandwidth, self.compute) < 1, "degraded has a bandwidth or a compute below 1")

    @property
    def links(self) -> str:
        return f"node {self.node}" if self.link is None else self.link


class _ClusterFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_gpus: int
    node: _Node
    network: _Network
    degraded: list[_Degraded] = msgspec.field(default_factory=list)
    collectives: dict[str, str] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(self.max_gpus >= self.node.gpus, "max_gpus is at least node.gpus")
        _require(self.max_gpus <= self.network.level[-1].gpus, "max_gpus is at most the last level's gpus")

    def value(self, name: str, folder: Path) -> Cluster:
        node, network = self.node, self.network
        return Cluster(
            name=name,
            device=node.device,
            memory_bytes=round(node.memory_GiB * GIB),
            gpus_per_node=node.gpus,
            domain_gpus=node.nvlink_domain,
            nvlink_bytes_per_s=node.nvlink_GBps * GB,
            pcie_bytes_per_s=node.pcie_GBps * GB,
            nvls=node.nvls,
            max_gpus=self.max_gpus,
            node_fabric=load_node_fabric(_beside(folder, node.fabric)),
            network=Network(
                nics_per_node=network.nics_per_node,
                nic_bytes_per_s=network.nic_GBps * GB,
                rails=network.rails,
                levels=tuple(
                    FabricLevel(
                        name=level.name,
                        gpus=level.gpus,
                        hop_s=level.hop_us * 1e-6,
                        oversubscription=level.oversubscription,
                    )
                    for level in network.level
                ),
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
        )


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(rule)


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
        DataError: the file cannot be read or breaks a rule; names file, key and rule.
    """
    text = str(name_or_path)
    if text.endswith(".toml"):
        return _read(Path(text), settings)
    if text not in cluster_names():
        raise UnknownNameError("cluster", text, cluster_names(), hint="or give the path of a .toml file")
    return _read(PRESETS / f"{text}.toml", settings)


def _set(document: dict[str, Any], settings: Mapping[str, str]) -> None:
    """Changes values of the file; levels of the network are named: network.level.spine.oversubscription."""
    places: dict[str, tuple[dict[str, Any], str]] = {"max_gpus": (document, "max_gpus")}
    for table in ("node", "network"):
        places |= {f"{table}.{key}": (document[table], key) for key in document[table] if key != "level"}
    for level in document["network"]["level"]:
        places |= {f"network.level.{level['name']}.{key}": (level, key) for key in level if key != "name"}
    named = document.setdefault("collectives", {})
    for key, text in settings.items():
        if key.startswith("collectives."):
            places[key] = (named, key.removeprefix("collectives."))
        if key not in places:
            raise UnknownNameError("cluster key", key, places)
        where, name = places[key]
        try:
            where[name] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            where[name] = text


def _read(path: Path, settings: Mapping[str, str]) -> Cluster:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise DataError(f"cluster file {path}: larger than {MAX_FILE_BYTES} bytes")
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        msgspec.convert(document, _ClusterFile)
        _set(document, settings)
        return msgspec.convert(document, _ClusterFile).value(path.stem, path.parent)
    except OSError as error:
        raise DataError(f"cluster file {path}: cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"cluster file {path}: is not TOML ({error})") from error
    except msgspec.ValidationError as error:
        raise DataError(f"cluster file {path}: {error}") from error
