from __future__ import annotations

from dataclasses import replace

import pytest

from echograph.simulator.clusters import Cluster, load_cluster
from echograph.simulator.network import group_links


@pytest.fixture
def cluster() -> Cluster:
    return load_cluster("dgx-h100")


def test_a_group_has_its_share_of_the_nics(cluster: Cluster) -> None:
    assert group_links(cluster.place(range(64)), cluster).network_bytes_per_s == pytest.approx(400e9)
    assert group_links(cluster.place_strided(8, 8), cluster).network_bytes_per_s == pytest.approx(50e9)
    assert group_links(cluster.place_strided(16, 4), cluster).network_bytes_per_s == pytest.approx(100e9)


def test_fewer_nics_than_gpus_are_shared() -> None:
    cluster = load_cluster("aws-p4de")
    assert group_links(cluster.place_strided(8, 8), cluster).network_bytes_per_s == pytest.approx(6.25e9)


def test_only_traffic_that_climbs_pays(cluster: Cluster) -> None:
    near, far = (group_links(cluster.place(range(n)), cluster) for n in (256, 100_000))
    assert near.climb_s == 0
    assert far.climb_s == pytest.approx(0.9e-6)


def test_oversubscription_divides_what_climbs() -> None:
    cluster = load_cluster("ethernet-100g")
    leaf, spine = (group_links(cluster.place(range(n)), cluster).network_bytes_per_s for n in (128, 256))
    assert spine == pytest.approx(leaf / 2)


def test_a_pcie_host_slows_with_the_level(cluster: Cluster) -> None:
    pcie = load_cluster("ethernet-100g")
    rates = [group_links(pcie.place(range(n)), pcie).node_bytes_per_s for n in (2, 4, 8)]
    assert rates == sorted(rates, reverse=True) and len(set(rates)) == 3
    nvlink = [group_links(cluster.place(range(n)), cluster).node_bytes_per_s for n in (2, 4, 8)]
    assert len(set(nvlink)) == 1


def test_tree_of_two_domains_sends_once(cluster: Cluster) -> None:
    two, four = (group_links(cluster.place(range(n)), cluster) for n in (16, 32))
    assert (two.tree_volume, four.tree_volume) == (1, 2)
    paired = replace(cluster.network.fabric, two_domain_volume=2.0)
    other = replace(cluster, network=replace(cluster.network, fabric=paired))
    assert group_links(other.place(range(16)), other).tree_volume == 2
