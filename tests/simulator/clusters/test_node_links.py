"""A fabric over links of another bandwidth, NVLS where a node has it, and the way to the NICs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echograph.errors import DataError
from echograph.simulator.clusters import PRESETS, Cluster, load_cluster
from echograph.simulator.clusters.fabric import read_fabric_document
from echograph.simulator.collectives import CollectiveName, collective_time
from echograph.simulator.network.topology import Topology


def seconds(cluster: Cluster, kind: CollectiveName = "all_gather", ranks: int = 8, size: float = 2**30) -> float:
    return collective_time(kind, size, cluster.place(range(ranks)), cluster).seconds


@pytest.mark.parametrize("rate", ["1", "45", "225", "4500"])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all", "send_recv"])
def test_bytes_take_as_much_longer_as_the_link_is_slower(rate: str, kind: CollectiveName) -> None:
    usual, other = load_cluster("dgx-h100"), load_cluster("dgx-h100", {"node.nvlink_GBps": rate})
    # Latencies are told from bytes by two sizes.
    per_byte = [(seconds(c, kind, 2, 2**37) - seconds(c, kind, 2, 2**36)) / 2**36 for c in (usual, other)]
    assert per_byte[1] / per_byte[0] == pytest.approx(450 / float(rate), rel=1e-6)
    assert seconds(other, kind, 2, 8) == pytest.approx(seconds(usual, kind, 2, 8), rel=0.1)


def test_the_same_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text((PRESETS / "dgx-h100.toml").read_text().replace("nvlink_GBps = 450", "nvlink_GBps = 45"))
    assert load_cluster(path).node_fabric == load_cluster("dgx-h100", {"node.nvlink_GBps": "45"}).node_fabric


def test_pcie_joins_the_gpus_where_there_is_no_nvlink() -> None:
    usual, half = load_cluster("ethernet-100g"), load_cluster("ethernet-100g", {"node.pcie_GBps": "16"})
    assert seconds(half, size=2**34) == pytest.approx(2 * seconds(usual, size=2**34), rel=1e-3)


def test_a_fabric_over_its_own_link_is_as_it_was_measured() -> None:
    about = load_cluster("dgx-h100").node_fabric.about
    assert (about.origin, about.error("all_reduce")) == ("fitted", about.held_out_error["all_reduce"])


def test_what_was_not_measured_does_not_claim_to_be() -> None:
    about = load_cluster("dgx-h100", {"node.nvlink_GBps": "225"}).node_fabric.about
    assert (about.origin, about.error("all_reduce")) == ("partly assumed", about.assumed_error)
    assert about.source.endswith("bandwidths scaled from 450 to 225 GB/s a link")


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("dgx-a100", {"node.nvlink_GBps": "0"}, "nvlink3: was measured on nvlink.*fabric of pcie"),
        ("dgx-h100", {"node.nvlink_GBps": "0"}, "nvls needs nvlink_GBps above 0"),
        ("ethernet-100g", {"node.nvlink_GBps": "300"}, "pcie5: was measured on pcie.*fabric of nvlink"),
        ("dgx-a100", {"node.nvls": "true"}, r"node\.nvls = true: fabric nvlink3 has no numbers of NVLS"),
        ("dgx-b200", {"node.nvls": "true"}, r"node\.nvls = true: fabric nvlink5 has no numbers of NVLS"),
        ("aws-p5", {"network.rails": "8"}, "rails = 8 of one level meet nowhere"),
        ("ethernet-100g", {"network.rails": "2"}, "rails = 2 is above what a node has of NICs and GPUs, 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(name: str, settings: dict[str, str], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load_cluster(name, settings)
    assert f"{name}.toml" in str(caught.value)


def test_other_links_with_their_own_fabric() -> None:
    settings = {"node.nvlink_GBps": "0", "node.nvls": "false", "node.fabric": "pcie5"}
    pcie = load_cluster("dgx-h100", settings)
    assert pcie.node_fabric.about.origin == "fitted"
    assert seconds(pcie) > 10 * seconds(load_cluster("dgx-h100"))


def test_a_fabric_says_of_what_link_its_bandwidths_are(tmp_path: Path) -> None:
    document = read_fabric_document("nvlink4")
    del document["link"]
    (tmp_path / "old.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match="link is missing: say of what link its bandwidths are"):
        load_cluster("dgx-h100", {"node.fabric": str(tmp_path / "old.json")})


def test_nvls_can_be_switched_off() -> None:
    on, off = load_cluster("dgx-h100"), load_cluster("dgx-h100", {"node.nvls": "false"})
    chosen = [collective_time("all_reduce", 2**30, c.place(range(8)), c).algorithm for c in (on, off)]
    assert chosen == ["nvls", "ring"]


def test_fewer_nics_bring_fewer_rails() -> None:
    assert load_cluster("dgx-h100", {"network.nics_per_node": "4"}).network.rails == 4
    with pytest.raises(DataError, match="rails = 8 is above"):
        load_cluster("dgx-h100", {"network.nics_per_node": "4", "network.rails": "8"})


@pytest.mark.parametrize("network", ["closed-form", "flows"])
def test_a_gpu_gets_no_more_of_the_nics_than_its_pcie_carries(network: str) -> None:
    from echograph.simulator.flows import alone

    def across(cluster: Cluster) -> float:
        ranks = range(0, 512, 8)
        if network == "closed-form":
            return collective_time("all_reduce", 2**32, cluster.place(ranks), cluster).seconds
        return alone(Topology(cluster=cluster, gpus=512))("all_reduce", 2**32, ranks).seconds

    usual = load_cluster("dgx-h100")
    wider, narrower = (load_cluster("dgx-h100", {"node.pcie_GBps": rate}) for rate in ("128", "25"))
    assert across(wider) == across(usual)
    assert across(narrower) == pytest.approx(2 * across(usual), rel=0.01)


def test_ethernet_takes_a_pair_of_its_gpus_as_measured() -> None:
    """Of eight L40S on PCIe 4.0, two have the bandwidth of their link: within 7 % of what the preset takes."""
    preset, host = (load_cluster("ethernet-100g", {"node.fabric": name}) for name in ("pcie5", "pcie4"))
    assert preset == load_cluster("ethernet-100g")
    rates = [c.node_fabric.bytes_per_s(2) for c in (preset, host)]
    assert rates[0] == pytest.approx(rates[1], rel=0.07)
    # Where all eight talk, that host is no model of the others.
    assert preset.node_fabric.bytes_per_s(8) > 0.3 * preset.pcie_bytes_per_s
    assert host.node_fabric.bytes_per_s(8) < 0.05 * host.pcie_bytes_per_s
