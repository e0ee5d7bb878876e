"""Links have names that find them, capacities that add up, and less where they are degraded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from echograph.errors import DataError, UsageError
from echograph.simulator.clusters import (
    PRESETS,
    Cluster,
    DegradedLink,
    SlowNode,
    cluster_names,
    load_cluster,
    parse_degraded,
)
from echograph.simulator.network.topology import Topology


def topology(name: str, gpus: int) -> Topology:
    return Topology(cluster=load_cluster(name), gpus=gpus)


@pytest.mark.parametrize("name", cluster_names())
def test_every_link_has_a_name_of_its_own_that_finds_it(name: str) -> None:
    links = topology(name, 300)
    names = [links.name(link) for link in range(links.links)]
    assert len(set(names)) == len(names)
    for link, called in enumerate(names):
        assert links.find(called) == [(link, 1.0)]


def test_what_links_are_called() -> None:
    links = topology("dgx-h100", 512)
    found = {words: [links.name(link) for link, _ in links.find(words)] for words in ("gpu 12", "node 3 nic 5")}
    assert found["gpu 12"] == ["gpu 12 nvlink out", "gpu 12 nvlink in"]
    assert found["node 3 nic 5"] == ["node 3 nic 5 out", "node 3 nic 5 in"]
    assert [links.name(link) for link, _ in links.find("leaf 1 rail 3")] == [
        "leaf 1 rail 3 up", "leaf 1 rail 3 down",
    ]  # fmt: skip
    assert [links.name(link) for link, _ in links.find("leaf 1 up")] == [f"leaf 1 rail {r} up" for r in range(8)]
    assert [links.name(link) for link, _ in links.find("node 3 in")] == [f"node 3 nic {n} in" for n in range(8)]
    assert len(links.find("leaf 1")) == 16
    assert len(links.find("node 3")) == 16
    assert topology("ethernet-100g", 256).find("gpu 0 pcie out") == [(0, 1.0)]


@pytest.mark.parametrize("name", cluster_names())
def test_ports_carry_what_the_nics_of_a_node_do(name: str) -> None:
    cluster = load_cluster(name)
    links = Topology(cluster=cluster, gpus=2 * cluster.gpus_per_node)
    network = cluster.network
    per_node = network.nics_per_node * network.nic_bytes_per_s * network.fabric.protocols.simple.efficiency
    ports = range(links.ports)
    outs = [links.full[links.of_port(np.array(port))] for port in ports]
    assert sum(outs) == pytest.approx(per_node)
    served = [int(links.port(np.array(gpu))) for gpu in range(cluster.gpus_per_node)]
    assert sorted(set(served)) == list(ports)
    assert served == sorted(served)


def test_what_climbs_has_the_bandwidth_below_over_the_oversubscription() -> None:
    links = topology("ethernet-100g", 512)
    leaf = links.tiers[0]
    assert (leaf.name, leaf.groups, leaf.oversubscription) == ("leaf", 4, 2)
    assert links.full[leaf.first] == pytest.approx(16 * 12.5e9 * 0.8 / 2)
    railed = topology("dgx-h100", 2048)
    leaf, spine = railed.tiers[:2]
    assert (leaf.groups, leaf.rails, spine.groups, spine.rails) == (8, 8, 2, 1)
    assert railed.full[leaf.first] == pytest.approx(32 * 50e9 * 0.95)
    assert railed.full[spine.first] == pytest.approx(1024 * 50e9 * 0.95)


def test_a_level_that_nodes_overload_is_a_link_of_each_node() -> None:
    cluster = load_cluster("ethernet-100g", {"network.level.leaf.oversubscription": "2"})
    links = Topology(cluster=cluster, gpus=256)
    node, leaf = links.tiers[:2]
    assert links.name(node.first) == "node 0 up"
    assert links.full[node.first] == pytest.approx(12.5e9 * 0.8 / 2)
    assert links.full[leaf.first] == pytest.approx(16 * 12.5e9 * 0.8 / 4)


def test_rails_meet_apart() -> None:
    links = topology("dgx-h100", 512)
    leaf = links.tiers[0]
    ups = links.above(leaf, links.port(np.arange(512)))
    by_place = ups.reshape(2, 32, 8)
    assert len(np.unique(ups)) == 16
    assert (by_place == by_place[:, :1]).all()


def degraded(cluster: Cluster, **links: float) -> Cluster:
    return replace(
        cluster,
        degraded=tuple(DegradedLink(link=k.replace("_", " "), bandwidth=v) for k, v in links.items()),
    )


def test_a_degraded_link_has_less_and_no_other() -> None:
    links = Topology(cluster=degraded(load_cluster("dgx-h100"), node_3_nic_5=0.5), gpus=64)
    changed = np.flatnonzero(links.capacity != links.full)
    assert [links.name(link) for link in changed.tolist()] == ["node 3 nic 5 out", "node 3 nic 5 in"]
    assert (links.capacity[changed] / links.full[changed]).tolist() == [0.5, 0.5]


def test_one_nic_of_several_is_a_share_of_its_port() -> None:
    links = Topology(cluster=degraded(load_cluster("aws-p5"), node_1_nic_5_out=0.5), gpus=16)
    (changed,) = np.flatnonzero(links.capacity != links.full).tolist()
    assert links.name(changed) == "node 1 nic 4-7 out"
    assert links.capacity[changed] / links.full[changed] == pytest.approx(1 - 0.5 / 4)
    whole = Topology(cluster=degraded(load_cluster("aws-p5"), node_1=0.5), gpus=16)
    assert set((whole.capacity / whole.full).round(12).tolist()) == {1.0, 0.5}


def test_what_the_job_does_not_touch_changes_nothing_but_must_be_there() -> None:
    far = Topology(cluster=degraded(load_cluster("dgx-h100"), node_900_nic_1=0.5), gpus=16)
    assert (far.capacity == far.full).all()
    with pytest.raises(UsageError, match="no link 'node 999999 nic 1': there is node 0 to 131071"):
        _ = Topology(cluster=degraded(load_cluster("dgx-h100"), node_999999_nic_1=0.5), gpus=16).capacity


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        ("node 3 nic 9", "there is node 3 nic 0, node 3 nic 1"),
        ("node 64", "there is node 0 to 63"),
        ("nodes 3", "there is node 0 to 63"),
        ("leav 1", "there is leaf 0 to 1"),
        ("leaf 1 rail 8", "there is leaf 1 rail 0"),
        ("wire", "there is gpu 0 to 511, node 0 to 63, leaf 0 to 1, spine 0 to 0"),
        ("", "there is gpu 0 to 511"),
        ("node 3 out in", "there is node 3 nic 0"),
        ("3 node", "there is"),
        ("node 3 nic 5 sideways", "there is node 3 nic 0"),
        ("node 99999999999", "there is node 0 to 63"),
    ],
)
def test_a_link_that_is_not_there_names_the_nearest(words: str, nearest: str) -> None:
    with pytest.raises(UsageError) as caught:
        topology("dgx-h100", 512).find(words)
    assert nearest in str(caught.value)
    assert "\n" not in str(caught.value)


def with_entries(folder: Path, entries: str) -> Path:
    path = folder / "mine.toml"
    path.write_text((PRESETS / "dgx-h100.toml").read_text() + entries)
    return path


def test_a_cluster_file_says_what_is_degraded(tmp_path: Path) -> None:
    entries = """
[[degraded]]
link = "node 3 nic 5"
bandwidth = 0.5

[[degraded]]
node = 2
bandwidth = 0.25
compute = 0.9
"""
    cluster = load_cluster(with_entries(tmp_path, entries))
    assert cluster.degraded == (
        DegradedLink(link="node 3 nic 5", bandwidth=0.5), DegradedLink(link="node 2", bandwidth=0.25),
    )  # fmt: skip
    assert cluster.slow_nodes == (SlowNode(node=2, compute=0.9),)


@pytest.mark.parametrize(
    ("entry", "rule"),
    [
        ("bandwidth = 0.5", "names a link or a node"),
        ('link = "leaf 0"\nnode = 1\nbandwidth = 0.5', "names a link or a node"),
        ("node = 1", "a bandwidth or a compute below 1"),
        ("node = -1\ncompute = 0.5", "node = -1: give a whole number from 0"),
        ('link = "leaf 0"\ncompute = 0.5', "compute is that of a node"),
        ("node = 1\nbandwidth = 0", "bandwidth = 0: give a number from 1e-06 to 1"),
        ("node = 1\nbandwidth = 1.5", "bandwidth = 1.5: give a number from 1e-06 to 1"),
        ("node = 1\nspeed = 0.5", "speed"),
    ],
)
def test_a_broken_entry_is_one_line(tmp_path: Path, entry: str, rule: str) -> None:
    with pytest.raises(DataError, match=rule) as caught:
        load_cluster(with_entries(tmp_path, f"\n[[degraded]]\n{entry}\n"))
    assert "\n" not in str(caught.value)


def test_what_the_command_line_says_is_degraded() -> None:
    assert parse_degraded(" node 3  nic 5 =0.5") == DegradedLink(link="node 3 nic 5", bandwidth=0.5)
    assert parse_degraded("node 3 compute=0.9") == SlowNode(node=3, compute=0.9)
    for wrong in ("node 3", "=0.5", "node 3=0", "node 3=1.5", "node 3=nan", "node 3=half"):
        with pytest.raises(UsageError, match="give LINK=FACTOR"):
            parse_degraded(wrong)
