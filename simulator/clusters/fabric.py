"""Fabric profiles: the few numbers that turn a collective's steps and bytes into seconds.

A node fabric describes the links inside one NVLink domain (or one PCIe host), a network fabric what joins
the domains. Each is a JSON file in `fabrics/` with its source, what of it was fitted, and the error on rows
that the fit did not see. Files hold microseconds and GB/s (1e9 bytes a second); the types hold SI units.
"""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from echograph.errors import DataError, UnknownNameError
from echograph.ir.documents import convert, parse_json, require
from echograph.ir.files import read_whole
from echograph.units import GB

FABRICS = Path(__file__).parent / "fabrics"
MAX_FILE_BYTES = 1 << 20
US = 1e-6

ProtocolName = Literal["LL", "LL128", "Simple"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolCost:
    """What one NCCL protocol costs on one kind of link.

    Args:
        base_s: paid once a collective (launch, first synchronisation), seconds.
        hop_s: paid once a step from a rank to its neighbour, seconds.
        efficiency: share of the link's bandwidth that carries the payload, in (0, 1.05]: data sheets round.
    """

    base_s: float
    hop_s: float
    efficiency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocols:
    """One cost a protocol: LL (8-byte flagged stores), LL128 (128-byte lines), Simple (whole slices)."""

    ll: ProtocolCost
    ll128: ProtocolCost
    simple: ProtocolCost

    def __getitem__(self, name: ProtocolName) -> ProtocolCost:
        return {"LL": self.ll, "LL128": self.ll128, "Simple": self.simple}[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCost:
    """Point-to-point traffic (send, recv, all-to-all), which NCCL runs as LL or Simple, never LL128.

    Args:
        ll: cost of small messages; `hop_s` is paid once a peer.
        simple: cost of large messages.
        bytes_per_s: what one rank sends at most.
        local_share: time of copying the rank's own part, relative to sending it.
    """

    ll: ProtocolCost
    simple: ProtocolCost
    bytes_per_s: float
    local_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NvlsCost:
    """Reduction inside the NVLink switch: seconds once, and bytes a second in and out of one rank."""

    base_s: float
    bytes_per_s: float


Microseconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
_Efficiency = Annotated[float, msgspec.Meta(gt=0, le=1.05)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Bandwidth = Annotated[float, msgspec.Meta(ge=1e-6, le=1e6)]
"""GB/s: from what a thousandth of the slowest link that a cluster may have leaves, to a petabyte a second."""
_Count = Annotated[int, msgspec.Meta(ge=0, le=10**9)]
_Words = Annotated[str, msgspec.Meta(min_length=1, max_length=10_000)]
_Error = Annotated[float, msgspec.Meta(gt=0, lt=1)]


_OF_RINGS = ("all_gather", "reduce_scatter", "broadcast", "reduce")
_RING_TO_ALL_REDUCE = 1.5


class Origin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a profile's numbers come from.

    Args:
        origin: fitted (from the named rows), partly assumed, or assumed.
        source: who measured, on what, with which NCCL; or what an assumption rests on.
        date: when the fit was made, year-month.
        rows: number of rows fitted.
        held_out_rows: number of rows predicted by a fit that had not seen their size (four folds by size).
        held_out_error: mean absolute relative error by collective on those rows, or on rows that no fit has seen.
        assumed_error: relative error expected of what no rows tested; a guess.
        note: weak spots, in a sentence.
    """

    origin: Literal["fitted", "partly assumed", "assumed"]
    source: _Words
    date: str
    rows: _Count = 0
    held_out_rows: _Count = 0
    held_out_error: dict[str, Annotated[float, msgspec.Meta(ge=0, le=100)]] = msgspec.field(default_factory=dict)
    assumed_error: _Error
    note: str = ""

    def error(self, kind: str) -> float:
        """Relative error to expect of a collective: measured where rows of its kind were held out, else assumed.

        What NCCL runs on the ring alone goes by the all-reduce, which is on the same ring: on seven fabrics inside
        a node, where both are measured, its error is 0.7 to 1.5 times the all-reduce's.
        """
        if kind in _OF_RINGS and kind not in self.held_out_error and "all_reduce" in self.held_out_error:
            return _RING_TO_ALL_REDUCE * self.held_out_error["all_reduce"]
        return self.held_out_error.get(kind, self.assumed_error)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLink:
    """The link that joins a GPU to the others of its domain.

    Args:
        kind: links between GPUs (NVLink, xGMI), or the host's PCIe.
        bytes_per_s: data-sheet bandwidth of one GPU in one direction.
    """

    kind: Literal["nvlink", "pcie"]
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFabric:
    """The links inside one NVLink domain or PCIe host.

    Args:
        name: the profile's name.
        link: what its bandwidths were measured on, or scaled to.
        levels: (largest group, bytes a second through one rank), by growing group: on PCIe hosts a larger
            group crosses a slower link (switch, socket, socket to socket); where each pair of GPUs has a link of
            its own (xGMI), a larger group has more of them; NVLink behind switches has one level.
        fill: steps' worth of traffic that a ring pays on top of its closed form, for copying the rank's own part
            and for filling the pipeline.
        protocols: cost of each protocol.
        nvls: in-switch reduction, or None where the switch cannot or NCCL does not choose it.
        peer: point-to-point traffic.
        about: where the numbers come from.
    """

    name: str
    link: NodeLink
    levels: tuple[tuple[int, float], ...]
    fill: float
    protocols: Protocols
    nvls: NvlsCost | None
    peer: PeerCost
    about: Origin

    def bytes_per_s(self, ranks: int) -> float:
        """Bandwidth through one rank of a group of `ranks` inside the domain, bytes a second."""
        for largest, rate in self.levels:
            if ranks <= largest:
                return rate
        return self.levels[-1][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFabric:
    """What joins the domains. Efficiencies are relative to the NICs' data-sheet bandwidth.

    Args:
        name: the profile's name.
        protocols: cost of each protocol; `base_s` comes on top of the node fabric's.
        tree_efficiency: bandwidth of tree relative to ring on the same NICs.
        ring_hop_share: a hop of ring relative to one of tree, which also reduces or fans out; NCCL's own
            tuning table has 2.7 and 5.0 microseconds for LL, 4.0 and 8.5 for LL128 (tuning.cc, hwLat).
        two_domain_volume: multiples of S that a domain sends in a tree of two domains: 1 where NCCL's two
            trees send one half each way, 2 where they do not. With more domains it is 2.
        nvls_tree: in-switch reduction joined by a tree across domains: `base_s` on top of the node's, and
            efficiency of the NICs; None where the nodes have no NVLS.
        pat: whether this NCCL has PAT for all-gather and reduce-scatter with one rank a node (2.23 and later).
        peer: point-to-point traffic between domains; `hop_s` is paid once a peer.
        about: where the numbers come from.
        ring_nics: NICs of a domain that the rings or trees of one group use at most; None: those of all its ranks.
        ll128_chunks: most chunks that a tree's pipeline over LL128 is cut into; None: as many as make it shortest.
        ring_message_s: least seconds from one message of a ring to the next over a NIC, whatever its size.
    """

    name: str
    protocols: Protocols
    tree_efficiency: float
    ring_hop_share: float
    two_domain_volume: float
    nvls_tree: ProtocolCost | None
    pat: bool
    peer: ProtocolCost
    about: Origin
    ring_nics: float | None = None
    ll128_chunks: float | None = None
    ring_message_s: float = 0.0


class _Cost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    base_us: Microseconds
    hop_us: Microseconds
    efficiency: _Efficiency

    def value(self) -> ProtocolCost:
        return ProtocolCost(base_s=self.base_us * US, hop_s=self.hop_us * US, efficiency=self.efficiency)


class _Protocols(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    LL: _Cost
    LL128: _Cost
    Simple: _Cost

    def value(self) -> Protocols:
        return Protocols(ll=self.LL.value(), ll128=self.LL128.value(), simple=self.Simple.value())


class _Level(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ranks: Annotated[int, msgspec.Meta(ge=2, le=10**6)]
    bandwidth_GBps: _Bandwidth


class _Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: Literal["nvlink", "pcie"]
    bandwidth_GBps: _Bandwidth


class _Nvls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    base_us: Microseconds
    bandwidth_GBps: _Bandwidth

    def value(self) -> NvlsCost:
        return NvlsCost(base_s=self.base_us * US, bytes_per_s=self.bandwidth_GBps * GB)


class _Peer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    LL: _Cost
    Simple: _Cost
    bandwidth_GBps: _Bandwidth
    local_share: Share

    def value(self) -> PeerCost:
        return PeerCost(
            ll=self.LL.value(),
            simple=self.Simple.value(),
            bytes_per_s=self.bandwidth_GBps * GB,
            local_share=self.local_share,
        )


class _NodeFile(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="node", tag_field="kind"
):
    about: Origin
    link: _Link
    levels: list[_Level]
    fill: Share
    protocols: _Protocols
    peer: _Peer
    nvls: _Nvls | None = None

    def __post_init__(self) -> None:
        sizes = [level.ranks for level in self.levels]
        require(bool(sizes) and sizes == sorted(set(sizes)), "levels is not empty and its ranks grow")
        rates = [level.bandwidth_GBps for level in self.levels]
        require(
            rates in (sorted(rates), sorted(rates, reverse=True)),
            "levels' bandwidth_GBps only falls with ranks, or only grows, where GPUs are joined in pairs",
        )

    def value(self, name: str) -> NodeFabric:
        nvls = self.nvls
        return NodeFabric(
            name=name,
            link=NodeLink(kind=self.link.kind, bytes_per_s=self.link.bandwidth_GBps * GB),
            levels=tuple((level.ranks, level.bandwidth_GBps * GB) for level in self.levels),
            fill=self.fill,
            protocols=self.protocols.value(),
            nvls=nvls.value() if nvls else None,
            peer=self.peer.value(),
            about=self.about,
        )


class _NetworkFile(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="network", tag_field="kind"
):
    about: Origin
    protocols: _Protocols
    tree_efficiency: Annotated[float, msgspec.Meta(gt=0, le=2)]
    ring_hop_share: Annotated[float, msgspec.Meta(gt=0, le=1)]
    two_domain_volume: Annotated[float, msgspec.Meta(ge=1, le=2)]
    peer: _Cost
    pat: bool
    nvls_tree: _Cost | None = None
    ring_nics: Annotated[float, msgspec.Meta(ge=1, le=1024)] | None = None
    ll128_chunks: Annotated[float, msgspec.Meta(ge=1, le=10**6)] | None = None
    ring_message_us: Microseconds = 0.0

    def value(self, name: str) -> NetworkFabric:
        return NetworkFabric(
            name=name,
            protocols=self.protocols.value(),
            tree_efficiency=self.tree_efficiency,
            ring_hop_share=self.ring_hop_share,
            two_domain_volume=self.two_domain_volume,
            nvls_tree=self.nvls_tree.value() if self.nvls_tree else None,
            pat=self.pat,
            peer=self.peer.value(),
            about=self.about,
            ring_nics=self.ring_nics,
            ll128_chunks=self.ll128_chunks,
            ring_message_s=self.ring_message_us * US,
        )


FILES: dict[str, type[_NodeFile] | type[_NetworkFile]] = {"node": _NodeFile, "network": _NetworkFile}
"""What a fabric's file holds, by its `kind`."""


def parse_fabric(document: Mapping[str, Any], name: str) -> NodeFabric | NetworkFabric:
    """Builds a fabric from the content of its file.

    Args:
        document: the JSON object.
        name: the profile's name; stands in errors too.

    Raises:
        DataError: a key is missing, unknown or breaks its rule.
    """
    kind = document.get("kind")
    if not isinstance(kind, str) or kind not in FILES:
        raise DataError(f"fabric {name}: kind = {reprlib.repr(kind)}: give one of {', '.join(FILES)}")
    if kind == "node" and "link" not in document:
        raise DataError(
            f"fabric {name}: link is missing: say of what link its bandwidths are, as "
            '{"kind": "nvlink", "bandwidth_GBps": 450}'
        )
    return convert(document, FILES[kind], f"fabric {name}").value(name)


def over_link(document: dict[str, Any], link: NodeLink, name: str) -> dict[str, Any]:
    """The document of a node fabric as it is over a link of other data-sheet bandwidth.

    Bandwidths change in proportion; latencies, and shares of bandwidth, stay. What was measured on another link
    is no test of that, so the errors of rows held out make way for the assumed one.

    Args:
        document: the JSON object.
        link: of the machine that it is to describe.
        name: of the fabric, for errors.

    Raises:
        DataError: the document is no node fabric, or one of another kind of link.
    """
    fabric = parse_fabric(document, name)
    if not isinstance(fabric, NodeFabric):
        raise DataError(f"fabric {name}: is a network fabric; name it under [network]")
    if fabric.link.kind != link.kind:
        rule = "nvlink_GBps is above 0" if fabric.link.kind == "nvlink" else "nvlink_GBps is 0"
        raise DataError(
            f"fabric {name}: was measured on {fabric.link.kind}, so node.{rule} beside it; "
            f"name a fabric of {link.kind} as node.fabric for other links"
        )
    if fabric.link == link:
        return document
    factor, scaled = link.bytes_per_s / fabric.link.bytes_per_s, copy.deepcopy(document)
    scaled["link"]["bandwidth_GBps"] = link.bytes_per_s / GB
    for holder in (*scaled["levels"], scaled["peer"], scaled.get("nvls")):
        if holder is not None:
            holder["bandwidth_GBps"] *= factor
    about, before = fabric.about, fabric.link.bytes_per_s / GB
    scaled["about"] |= {
        "origin": "assumed" if about.origin == "assumed" else "partly assumed",
        "source": f"{about.source}; bandwidths scaled from {before:g} to {link.bytes_per_s / GB:g} GB/s a link",
        "held_out_rows": 0,
        "held_out_error": {},
    }
    return scaled


def read_fabric_document(name_or_path: str | Path) -> dict[str, Any]:
    """The JSON object of a fabric profile.

    Args:
        name_or_path: a shipped profile's name, or the path of a file (anything that ends in `.json`).

    Raises:
        UnknownNameError: no shipped profile of that name.
        InputError: the file cannot be read, or is too large.
        DataError: it is not a JSON object.
    """
    name = str(name_or_path)
    if name.endswith(".json"):
        path = Path(name)
    elif name in fabric_names():
        path = FABRICS / f"{name}.json"
    else:
        raise UnknownNameError("fabric", name, fabric_names(), hint="or give the path of a .json file")
    what = f"fabric {path}"
    return parse_json(read_whole(path, "give the path of a fabric profile", MAX_FILE_BYTES), what)


def load_node_fabric(name_or_path: str | Path, link: NodeLink | None = None) -> NodeFabric:
    """Loads a node fabric: a shipped one by name, or a file by path.

    Args:
        name_or_path: the profile.
        link: of the machine that it is to describe, if not that which it was measured on (`over_link`).

    Raises:
        UnknownNameError: no shipped profile of that name.
        DataError: the file cannot be read, breaks a rule, is a network fabric, or of another kind of link.
    """
    document, name = read_fabric_document(name_or_path), Path(name_or_path).stem
    fabric = parse_fabric(document if link is None else over_link(document, link, name), name)
    if not isinstance(fabric, NodeFabric):
        raise DataError(f"fabric {name_or_path}: is a network fabric; name it under [network]")
    return fabric


def load_network_fabric(name_or_path: str | Path) -> NetworkFabric:
    """Loads a network fabric: a shipped one by name, or a file by path.

    Raises:
        UnknownNameError: no shipped profile of that name.
        DataError: the file cannot be read, breaks a rule, or is a node fabric.
    """
    fabric = parse_fabric(read_fabric_document(name_or_path), Path(name_or_path).stem)
    if not isinstance(fabric, NetworkFabric):
        raise DataError(f"fabric {name_or_path}: is a node fabric; name it under [node]")
    return fabric


def fabric_names() -> tuple[str, ...]:
    """Names of the shipped fabric profiles, sorted."""
    return tuple(sorted(path.stem for path in FABRICS.glob("*.json")))
