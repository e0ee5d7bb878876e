"""Loads of groups against messages counted one by one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cache

import numpy as np
import pytest

from echograph.simulator.clusters import cluster_names, load_cluster
from echograph.simulator.network import patterns
from echograph.simulator.network.patterns import Loads, loads
from echograph.simulator.network.topology import Topology


def by_name(links: Topology, found: Loads, group: int = 0) -> dict[str, float]:
    mine = found.group == group
    return {
        links.name(link): rate
        for link, rate in zip(found.link[mine].tolist(), found.rate[mine].tolist(), strict=True)
    }


def counted(links: Topology, messages: Iterable[tuple[int, int, float]]) -> dict[str, float]:
    """Bytes on each link between domains, for messages (from, to, bytes)."""
    cluster, found = links.cluster, defaultdict[int, float](float)

    @cache
    def way_up(gpu: int) -> tuple[int, ...]:
        port = links.port(np.array(gpu))
        return (int(links.of_port(port)), *(int(links.above(tier, port)) for tier in links.tiers))

    for source, target, size in messages:
        if source // cluster.domain_gpus == target // cluster.domain_gpus:
            continue
        for number, (up, down) in enumerate(zip(way_up(source), way_up(target), strict=True)):
            if number == 0 or up != down:
                found[up] += size
                found[down + 1] += size
    return {links.name(link): size for link, size in found.items()}


def same_shape(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found.keys() == expected.keys()
    ratio = {name: found[name] / expected[name] for name in found}
    assert max(ratio.values()) == pytest.approx(min(ratio.values()), rel=1e-9)


@pytest.mark.parametrize("cluster", ["ethernet-100g", "dgx-h100", "jean-zay-a100"])
@pytest.mark.parametrize("stride", [1, 4, 8])
def test_all_to_all_is_every_pair(cluster: str, stride: int) -> None:
    links = Topology(cluster=load_cluster(cluster), gpus=320)
    ranks = np.arange(0, 320, stride)
    found = by_name(links, loads(links, ranks[None], patterns.pairs))

    # A domain deals what it sends out evenly over its rails.
    def rail(gpu: int, to: int) -> int:
        return to - to % 8 + gpu % 8

    pairs = ((int(a), rail(int(a), int(b)), 1.0) for a in ranks for b in ranks)
    expected = counted(links, pairs)
    same_shape({k: v for k, v in found.items() if not k.startswith("gpu")}, expected)


def test_a_ring_crosses_each_boundary_once() -> None:
    links = Topology(cluster=load_cluster("ethernet-100g"), gpus=512)
    found = by_name(links, loads(links, np.arange(512)[None], patterns.ring))
    nodes = 64
    messages = [(8 * node, 8 * ((node + 1) % nodes), 1.0) for node in range(nodes)]
    same_shape({k: v for k, v in found.items() if not k.startswith("gpu")}, counted(links, messages))
    assert sum(name.startswith("gpu") for name in found) == 2 * 512


def test_a_message_has_one_way() -> None:
    links = Topology(cluster=load_cluster("dgx-h100"), gpus=2048)
    inside, near, far = np.array([[3, 5], [3, 83], [3, 2043]])[:, None]
    assert list(by_name(links, loads(links, inside, patterns.chain))) == ["gpu 3 nvlink out", "gpu 5 nvlink in"]
    assert list(by_name(links, loads(links, near, patterns.chain))) == ["node 0 nic 3 out", "node 10 nic 3 in"]
    assert list(by_name(links, loads(links, far, patterns.chain))) == [
        "node 0 nic 3 out", "node 255 nic 3 in", "leaf 0 rail 3 up", "leaf 7 rail 3 down", "spine 0 up",
        "spine 1 down",
    ]  # fmt: skip


def test_a_message_that_changes_rails_climbs() -> None:
    links = Topology(cluster=load_cluster("dgx-h100"), gpus=64)
    found = by_name(links, loads(links, np.array([[3, 12]]), patterns.chain))
    assert list(found) == ["node 0 nic 3 out", "node 1 nic 4 in", "leaf 0 rail 3 up", "leaf 0 rail 4 down"]


def test_sibling_groups_of_aligned_ranks_load_distinct_rails() -> None:
    links = Topology(cluster=load_cluster("dgx-h100"), gpus=512)
    siblings = np.arange(512).reshape(64, 8).T
    found = loads(links, siblings, patterns.ring)
    loaded = [set(by_name(links, found, group)) for group in range(8)]
    for one in range(8):
        assert f"leaf 0 rail {one} up" in loaded[one]
        assert all(loaded[one].isdisjoint(loaded[other]) for other in range(one))


@pytest.mark.parametrize("domains", [2, 3, 4, 7, 8, 16, 33])
def test_both_trees_span_all_and_each_inner_node_of_one_is_a_leaf_of_the_other(domains: int) -> None:
    hops = patterns.tree(domains)
    edges = np.stack([hops.source, hops.target], axis=1)
    assert len(edges) == 4 * (domains - 1)
    sends = np.bincount(hops.source, minlength=domains)
    receives = np.bincount(hops.target, minlength=domains)
    assert (sends == receives).all()
    # Two trees of at most two children: three neighbours in one and one in the other.
    assert sends.max() <= 4 if domains % 2 == 0 else sends.max() <= 5
    reached, before = {0}, set()
    while reached != before:
        before = set(reached)
        reached |= {b for a, b in edges[: domains - 1].tolist() if a in reached}
        reached |= {a for a, b in edges[: domains - 1].tolist() if b in reached}
    assert reached == set(range(domains))


@pytest.mark.parametrize("domains", [2, 3, 5, 8, 13])
def test_doubling_brings_every_block_to_everyone_once(domains: int) -> None:
    hops = patterns.doubling(domains)
    received = np.bincount(hops.target, weights=hops.weight, minlength=domains)
    assert received.tolist() == [domains - 1] * domains


@pytest.mark.parametrize("name", cluster_names())
@pytest.mark.parametrize(
    "pattern", [patterns.ring, patterns.tree, patterns.doubling, patterns.pairs, patterns.chain]
)
def test_what_climbs_has_come_through_ports_below(name: str, pattern: patterns.Pattern) -> None:
    cluster = load_cluster(name)
    links = Topology(cluster=cluster, gpus=min(cluster.max_gpus, 2304))
    ranks = np.arange(0, min(cluster.max_gpus, 2304) // 8 * 8, 4)
    found = loads(links, ranks[None], pattern)
    rate = np.zeros(links.links)
    rate[found.link] = found.rate
    ports = np.arange(links.nodes * links.ports)
    for tier in links.tiers:
        for end in (0, 1):
            below = np.bincount(links.above(tier, ports) + end, rate[links.of_port(ports) + end], links.links)
            above = np.unique(links.above(tier, ports) + end)
            assert (rate[above] <= below[above] * (1 + 1e-12)).all()
    first_tier = links.tiers[0].first if links.tiers else links.links
    assert (rate <= links.full * (1 + 1e-12))[:first_tier].all()
