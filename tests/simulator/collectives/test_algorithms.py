from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from echograph.errors import UnavailableError, UnknownNameError
from echograph.ir.comms.bandwidth import bus_factor
from echograph.simulator.clusters import Cluster, cluster_names, load_cluster
from echograph.simulator.clusters.fabric import NvlsCost, PeerCost, ProtocolCost, Protocols
from echograph.simulator.collectives import (
    ALGORITHMS,
    KINDS,
    CollectiveName,
    collective_curve,
    collective_time,
)

ALPHA, BETA = 2e-6, 100e9
NET_ALPHA, NIC = 5e-6, 25e9
SIZE = 64e6


def ideal(pat: bool = False) -> Cluster:
    """A dgx-a100 whose links have one latency and one bandwidth, and protocols that cost nothing else."""
    cluster = load_cluster("dgx-a100")
    cost = ProtocolCost(base_s=0, hop_s=ALPHA, efficiency=1)
    net = ProtocolCost(base_s=0, hop_s=NET_ALPHA, efficiency=1)
    node = replace(
        cluster.node_fabric,
        levels=((8, BETA),),
        fill=0.0,
        protocols=Protocols(ll=cost, ll128=cost, simple=cost),
        nvls=NvlsCost(base_s=0, bytes_per_s=BETA),
        peer=PeerCost(ll=cost, simple=cost, bytes_per_s=BETA, local_share=0),
    )
    fabric = replace(
        cluster.network.fabric,
        protocols=Protocols(ll=net, ll128=net, simple=net),
        tree_efficiency=1.0,
        ring_hop_share=1.0,
        two_domain_volume=1.0,
        nvls_tree=net,
        pat=pat,
        peer=net,
    )
    levels = tuple(replace(level, hop_s=0.0) for level in cluster.network.levels)
    network = replace(cluster.network, fabric=fabric, nic_bytes_per_s=NIC, levels=levels)
    return replace(cluster, node_fabric=node, network=network)


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize(("kind", "rounds"), [("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)])
def test_ring_closed_form(n: int, kind: CollectiveName, rounds: int) -> None:
    cluster = ideal()
    found = collective_time(kind, SIZE, cluster.place(range(n)), cluster, algorithm="ring")
    assert found.seconds == pytest.approx(rounds * (n - 1) * (ALPHA + SIZE / (n * BETA)), rel=1e-12)
    assert found.steps == rounds * (n - 1)


def test_ring_across_nodes_crosses_each_boundary_once_a_round() -> None:
    cluster = ideal()
    found = collective_time("all_gather", SIZE, cluster.place(range(32)), cluster, algorithm="ring")
    expected = 28 * ALPHA + 3 * NET_ALPHA + 31 / 32 * SIZE / BETA
    assert found.seconds == pytest.approx(expected, rel=1e-12)


def test_ring_of_one_rank_a_node_is_bound_by_its_nic() -> None:
    cluster = ideal()
    found = collective_time("all_reduce", SIZE, cluster.place_strided(4, 8), cluster, algorithm="ring")
    assert found.seconds == pytest.approx(6 * (NET_ALPHA + SIZE / (4 * NIC)), rel=1e-12)


def test_tree_closed_form() -> None:
    cluster = ideal()
    found = collective_time("all_reduce", SIZE, cluster.place_strided(64, 8), cluster, algorithm="tree")
    fill = 2 * (5 * NET_ALPHA * 2 * SIZE / NIC) ** 0.5
    assert found.seconds == pytest.approx(12 * NET_ALPHA + 2 * SIZE / NIC + fill, rel=1e-12)
    two = collective_time("all_reduce", SIZE, cluster.place_strided(2, 8), cluster, algorithm="tree")
    assert two.seconds == pytest.approx(2 * NET_ALPHA + SIZE / NIC, rel=1e-12)


def test_nvls_closed_form() -> None:
    cluster = ideal()
    found = collective_time("all_reduce", SIZE, cluster.place(range(8)), cluster, algorithm="nvls")
    assert found.seconds == pytest.approx(SIZE * 9 / 8 / BETA, rel=1e-12)


def test_nvls_tree_is_bound_by_the_slower_of_switch_and_nics() -> None:
    cluster = ideal()
    found = collective_time("all_reduce", SIZE, cluster.place(range(64)), cluster, algorithm="nvls_tree")
    moved = SIZE * max(9 / 8 / BETA, 2 / (8 * NIC))
    assert found.seconds == pytest.approx(6 * NET_ALPHA + moved + 2 * (2 * NET_ALPHA * moved) ** 0.5, rel=1e-12)


def test_pat_has_logarithmic_steps() -> None:
    cluster = ideal(pat=True)
    found = collective_time("all_gather", SIZE, cluster.place_strided(64, 8), cluster, algorithm="pat")
    assert found.seconds == pytest.approx(6 * NET_ALPHA + 63 / 64 * SIZE / NIC, rel=1e-12)


def test_all_to_all_closed_form() -> None:
    cluster = ideal()
    inside = collective_time("all_to_all", SIZE, cluster.place(range(8)), cluster)
    assert inside.seconds == pytest.approx(7 * ALPHA + 7 / 8 * SIZE / BETA, rel=1e-12)
    across = collective_time("all_to_all", SIZE, cluster.place(range(32)), cluster)
    assert across.seconds == pytest.approx(7 * ALPHA + 24 * NET_ALPHA + 24 / 32 * SIZE / NIC, rel=1e-12)


def test_hierarchical_closed_forms() -> None:
    cluster = ideal()
    place = cluster.place(range(32))
    for kind, rounds in (("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)):
        found = collective_time(kind, SIZE, place, cluster, algorithm="hierarchical")  # type: ignore[arg-type]
        latency = rounds * (7 * ALPHA + 3 * NET_ALPHA)
        assert found.seconds == pytest.approx(
            latency + rounds * (7 / 8 * SIZE / BETA + 3 / 4 * SIZE / (8 * NIC)), rel=1e-12
        )
    found = collective_time("all_to_all", SIZE, place, cluster, algorithm="hierarchical")
    assert found.seconds == pytest.approx(
        7 * ALPHA + 3 * NET_ALPHA + 7 / 8 * SIZE / BETA + 3 / 4 * SIZE / NIC, rel=1e-12
    )


def test_a_cluster_names_algorithms_that_run_where_they_apply() -> None:
    plain, named = load_cluster(), load_cluster("dgx-h100", {"collectives.all_to_all": "hierarchical"})
    node, nodes = plain.place(range(8)), plain.place(range(64))
    assert collective_time("all_to_all", 1e4, node, named) == collective_time("all_to_all", 1e4, node, plain)
    found = collective_time("all_to_all", 1e4, nodes, named)
    assert found.algorithm == "hierarchical"
    # Short messages: 7 + 7 peers instead of 63.
    assert found.seconds < collective_time("all_to_all", 1e4, nodes, plain).seconds
    assert found.spread == max(named.node_fabric.about.assumed_error, named.network.fabric.about.assumed_error)
    curve = collective_curve("all_to_all", np.array([1e4]), nodes, named)
    assert curve[0] == pytest.approx(found.seconds, rel=1e-12)


def test_an_algorithm_that_is_named_runs_for_two_ranks_too() -> None:
    named, apart, alone = load_cluster("dgx-h100", {"collectives.all_reduce": "tree"}), (0, 8), (0,)
    for nbytes, chosen in ((1e3, "ring"), (1e9, "tree")):
        assert collective_time("all_reduce", nbytes, named.place(apart), load_cluster()).algorithm == chosen
        assert collective_time("all_reduce", nbytes, named.place(apart), named).algorithm == "tree"
        assert collective_time("all_reduce", nbytes, named.place(alone), named).seconds == 0


@pytest.mark.parametrize(
    ("key", "value"), [("all_to_none", "ring"), ("all_to_all", "ring"), ("all_reduce", "telepathy")]
)
def test_a_cluster_that_names_what_is_not_there_is_refused(key: str, value: str) -> None:
    with pytest.raises((UnknownNameError, UnavailableError), match=f"'{key}'|'{value}'"):
        load_cluster("dgx-h100", {f"collectives.{key}": value})
    # One that is made by hand says it where it is used.
    cluster = replace(load_cluster("dgx-h100"), collectives=((key, value),))
    with pytest.raises((UnknownNameError, UnavailableError), match=f"'{key}'|'{value}'"):
        for kind in ("all_reduce", "all_to_all"):
            collective_time(kind, 1e6, cluster.place(range(64)), cluster)  # type: ignore[arg-type]


def test_send_closed_form() -> None:
    cluster = ideal()
    inside = collective_time("send_recv", SIZE, cluster.place([0, 1]), cluster)
    assert inside.seconds == pytest.approx(ALPHA + SIZE / BETA, rel=1e-12)
    across = collective_time("send_recv", SIZE, cluster.place([0, 8]), cluster)
    assert across.seconds == pytest.approx(NET_ALPHA + SIZE / NIC, rel=1e-12)


@pytest.mark.parametrize("kind", ["broadcast", "reduce"])
def test_broadcast_is_a_pipelined_chain(kind: CollectiveName) -> None:
    cluster = ideal()
    found = collective_time(kind, SIZE, cluster.place(range(8)), cluster)
    assert found.seconds == pytest.approx(7 * ALPHA + SIZE / BETA, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_takes_no_time(kind: CollectiveName) -> None:
    cluster = load_cluster()
    found = collective_time(kind, SIZE, cluster.place([5]), cluster)
    assert (found.seconds, found.steps, found.algorithm, found.spread) == (0.0, 0, "none", 0.0)


def test_barrier_ignores_the_size_and_equals_a_tiny_all_reduce() -> None:
    cluster = load_cluster()
    place = cluster.place(range(64))
    assert (
        collective_time("barrier", 0, place, cluster).seconds
        == collective_time("barrier", 1e9, place, cluster).seconds
    )
    assert (
        collective_time("barrier", 0, place, cluster).seconds
        == collective_time("all_reduce", 4, place, cluster).seconds
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_choice_is_the_fastest_that_can_be_asked_for(kind: CollectiveName) -> None:
    cluster = load_cluster()
    for place in (cluster.place(range(8)), cluster.place(range(64)), cluster.place_strided(16, 8)):
        chosen = collective_time(kind, 1e6, place, cluster)
        times = []
        for name in ALGORITHMS:
            for protocol in ("LL", "LL128", "Simple"):
                if ALGORITHMS[name].by_name:
                    continue
                try:
                    asked = collective_time(kind, 1e6, place, cluster, algorithm=name, protocol=protocol)
                except UnavailableError:
                    continue
                times.append(asked.seconds)
        assert chosen.seconds == min(times)


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    cluster = load_cluster()
    found = collective_time("all_reduce", 1e9, cluster.place(range(8)), cluster)
    assert found.bus_bandwidth == pytest.approx(1e9 / found.seconds * 2 * 7 / 8)
    assert bus_factor("all_gather", 8) == 7 / 8
    assert bus_factor("send_recv", 2) == 1


def test_source_and_spread_say_what_is_assumed() -> None:
    cluster = load_cluster("dgx-h100")
    inside = collective_time("all_reduce", 1e6, cluster.place(range(8)), cluster)
    assert inside.source == "nvlink4 (fitted)"
    assert inside.spread == cluster.node_fabric.about.held_out_error["all_reduce"]
    across = collective_time("all_reduce", 1e6, cluster.place(range(16)), cluster)
    assert across.source == "nvlink4 (fitted) + ndr400 (partly assumed)"
    assert across.spread == cluster.network.fabric.about.assumed_error


def test_names_that_do_not_exist_or_do_not_apply() -> None:
    cluster = load_cluster()
    place = cluster.place(range(8))
    with pytest.raises(UnknownNameError, match=r"unknown collective 'allreduce'.*'all_reduce'"):
        collective_time("allreduce", 1, place, cluster)  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="unknown collective algorithm 'rings': did you mean 'ring'"):
        collective_time("all_reduce", 1, place, cluster, algorithm="rings")
    with pytest.raises(UnknownNameError, match="unknown protocol"):
        collective_time("all_reduce", 1, place, cluster, protocol="LL64")  # type: ignore[arg-type]
    with pytest.raises(UnavailableError, match=r"tree does not run all_reduce of 8 ranks in 1 domain\(s\)"):
        collective_time("all_reduce", 1, place, cluster, algorithm="tree")
    with pytest.raises(UnavailableError, match=r"nvls\+LL does not run"):
        collective_time("all_reduce", 1, place, cluster, algorithm="nvls", protocol="LL")


@pytest.mark.parametrize("size", [-1.0, float("nan"), float("inf")])
def test_sizes_that_are_none(size: float) -> None:
    cluster = load_cluster()
    with pytest.raises(ValueError, match="bytes_per_rank"):
        collective_time("all_reduce", size, cluster.place(range(8)), cluster)


presets = st.sampled_from(cluster_names()).map(load_cluster)
kinds = st.sampled_from(KINDS)
sizes = st.floats(0, 1e11)


@given(
    cluster=presets,
    kind=kinds,
    small=sizes,
    more=sizes,
    nodes=st.integers(1, 64),
    every=st.sampled_from([1, 2, 4]),
)
def test_more_bytes_never_take_less(
    cluster: Cluster, kind: CollectiveName, small: float, more: float, nodes: int, every: int
) -> None:
    ranks = min(nodes * cluster.gpus_per_node, cluster.max_gpus) // every
    place = cluster.place_strided(ranks, every)
    less = collective_time(kind, small, place, cluster).seconds
    assert less <= collective_time(kind, small + more, place, cluster).seconds


@given(cluster=presets, kind=kinds, size=sizes, domains=st.integers(1, 1500), more=st.integers(1, 400))
def test_more_whole_domains_never_take_less(
    cluster: Cluster, kind: CollectiveName, size: float, domains: int, more: int
) -> None:
    largest = cluster.max_gpus // cluster.domain_gpus
    few, many = (min(count, largest) for count in (domains, domains + more))
    # Leaving the first domain halves what an all-to-all moves inside it, and a message leaves it altogether: PCIe
    # can be slower than the network (RTX PRO 6000: 37 GB/s between two GPUs of a host, 47 to another's).
    assume(kind not in ("all_to_all", "send_recv") or few > 1)
    times = [
        collective_time(kind, size, cluster.place(range(count * cluster.domain_gpus)), cluster).seconds
        for count in (few, many)
    ]
    assert times[0] <= times[1] * (1 + 1e-12)


@given(cluster=presets, kind=kinds, size=sizes, ranks=st.integers(1, 1500), more=st.integers(1, 400))
def test_more_ranks_of_one_a_domain_never_take_less(
    cluster: Cluster, kind: CollectiveName, size: float, ranks: int, more: int
) -> None:
    largest = cluster.max_gpus // cluster.domain_gpus
    times = [
        collective_time(
            kind, size, cluster.place_strided(min(count, largest), cluster.domain_gpus), cluster
        ).seconds
        for count in (ranks, ranks + more)
    ]
    assert times[0] <= times[1] * (1 + 1e-12)


@given(cluster=presets, kind=kinds, size=sizes, ranks=st.integers(1, 7))
def test_more_ranks_of_a_node_never_take_less_save_by_nvls_or_more_links(
    cluster: Cluster, kind: CollectiveName, size: float, ranks: int
) -> None:
    assume(cluster.node_fabric.bytes_per_s(ranks) >= cluster.node_fabric.bytes_per_s(ranks + 1))
    few, many = (collective_time(kind, size, cluster.place(range(count)), cluster) for count in (ranks, ranks + 1))
    assert "nvls" in (few.algorithm, many.algorithm) or few.seconds <= many.seconds * (1 + 1e-12)


@pytest.mark.parametrize("name", ["mi300x-node", "mi325x-node", "alps-gh200"])
def test_a_gpu_of_a_mesh_reaches_its_group_over_a_link_to_each(name: str) -> None:
    cluster = load_cluster(name)
    fabric = cluster.node_fabric
    pair, of_links = fabric.bytes_per_s(2), cluster.nvlink_bytes_per_s / (cluster.domain_gpus - 1)
    groups = range(2, cluster.domain_gpus + 1)
    assert [fabric.bytes_per_s(ranks) for ranks in groups] == pytest.approx([pair * (n - 1) for n in groups])
    assert max(pair, fabric.peer.bytes_per_s) < of_links


@given(cluster=presets, kind=kinds, values=st.lists(sizes, min_size=1, max_size=5), ranks=st.integers(1, 600))
def test_curve_says_what_each_size_does(
    cluster: Cluster, kind: CollectiveName, values: list[float], ranks: int
) -> None:
    place = cluster.place(range(min(ranks, cluster.max_gpus)))
    curve = collective_curve(kind, np.array(values), place, cluster)
    assert curve.tolist() == pytest.approx(
        [collective_time(kind, v, place, cluster).seconds for v in values], rel=1e-12
    )


def test_a_hundred_thousand_ranks() -> None:
    cluster = load_cluster()
    few, many = (
        collective_time("all_reduce", 1e9, cluster.place(range(n)), cluster).seconds for n in (1024, 100_000)
    )
    assert few < many < 2 * few
