"""ASTRA-sim's files of a cluster."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from math import prod

import pytest

from echograph.errors import PlanError
from echograph.simulator.clusters import cluster_names, load_cluster
from echograph.simulator.collectives import collective_time
from echograph.workflow.formats.timed import MEMORY, NETWORK, SYSTEM, astra_sim_files, dimensions

SIZES = (1, 2, 4, 8, 16, 24, 48, 64, 72, 256, 320, 1024, 1440, 4096)


def lists(text: str) -> dict[str, list[str]]:
    """The rows of the network file, without a YAML reader: each is `key: [ a, b ]`."""
    rows = re.findall(r"^(\w+): \[ (.*?) \]", text, re.MULTILINE)
    return {key: values.split(", ") for key, values in rows}


@pytest.mark.parametrize("name", cluster_names())
def test_the_product_of_the_dimensions_is_the_ranks(name: str) -> None:
    cluster = load_cluster(name)
    for ranks in SIZES:
        if ranks > cluster.max_gpus or ranks % min(ranks, cluster.domain_gpus):
            with pytest.raises(PlanError, match="ranks"):
                dimensions(cluster, ranks)
            continue
        files = astra_sim_files(cluster, ranks)
        network, system = lists(files[NETWORK]), json.loads(files[SYSTEM])
        assert prod(map(int, network["npus_count"])) == ranks
        count = len(network["topology"])
        assert {len(values) for values in network.values()} == {count}
        assert all(float(b) > 0 for b in network["bandwidth"])
        assert all(float(b) >= 0 for b in network["latency"])
        for kind in ("all-reduce", "all-gather", "reduce-scatter"):
            assert system[f"{kind}-implementation"] == ["ring"] * count
        assert system["all-to-all-implementation"] == ["direct1"] * count
        assert json.loads(files[MEMORY]) == {"memory-type": "NO_MEMORY_EXPANSION"}


def test_dimensions_go_from_the_domain_outwards() -> None:
    cluster = load_cluster("dgx-h100")
    found = dimensions(cluster, 4096)
    assert [(d.name, d.ranks) for d in found] == [("domain", 8), ("leaf", 32), ("spine", 4), ("core", 4)]
    # A level that does not divide the ranks joins the one above it.
    assert [(d.name, d.ranks) for d in dimensions(cluster, 320)] == [("domain", 8), ("spine", 40)]


def test_bandwidth_is_what_a_large_ring_reaches() -> None:
    """Bytes over the file's bandwidth, by a ring's closed form, against the model of the same ring."""
    cluster, size = load_cluster("dgx-h100"), 2**36
    for ranks, dimension in ((range(8), 0), (range(0, 256, 8), 1)):
        network = lists(astra_sim_files(cluster, 256)[NETWORK])
        rate = float(network["bandwidth"][dimension]) * 2**30
        closed = 2 * (len(ranks) - 1) / len(ranks) * size / rate
        ring = collective_time(
            "all_reduce", size, cluster.place(ranks), cluster, algorithm="ring", protocol="Simple"
        )
        # The model's ring adds its latencies and what it takes to fill.
        assert closed == pytest.approx(ring.seconds, rel=0.05)
        assert closed < ring.seconds


def test_a_switch_is_crossed_by_two_links() -> None:
    cluster = load_cluster("dgx-h100")
    latency = float(lists(astra_sim_files(cluster, 8)[NETWORK])["latency"][0])
    assert 2 * latency * 1e-9 == pytest.approx(cluster.node_fabric.protocols.ll.hop_s)


def test_oversubscription_divides_and_hops_add_up() -> None:
    settings = {"network.level.spine.oversubscription": "4"}
    even, over = load_cluster("dgx-h100"), load_cluster("dgx-h100", settings)
    rates = [[d.bytes_per_s for d in dimensions(c, 4096)] for c in (even, over)]
    assert [a / b for a, b in zip(*rates, strict=True)] == pytest.approx([1, 1, 4, 4])
    latencies = [d.latency_s for d in dimensions(even, 4096)][1:]
    assert [b - a for a, b in pairwise(latencies)] == pytest.approx([0.3e-6, 0.6e-6])


def test_the_roofline_is_that_of_the_device() -> None:
    files = astra_sim_files(load_cluster(), 8, peak_flops_per_s=989.4e12, memory_bytes_per_s=3.35e12)
    system = json.loads(files[SYSTEM])
    assert (system["peak-perf"], system["local-mem-bw"]) == (989.4, 3350)
    assert system["roofline-enabled"] == 0


def test_a_part_of_a_domain_is_refused_with_sizes_that_work() -> None:
    with pytest.raises(PlanError, match="use 8 or 16"):
        dimensions(load_cluster("dgx-h100"), 12)
