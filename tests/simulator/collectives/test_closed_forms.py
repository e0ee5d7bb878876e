"""Every algorithm's closed form with constants that are all different, over group sizes, message sizes, protocols.

The form of each is written out here from its description, term by term: seconds, steps, and the seconds for which
the links inside a domain and the NICs are busy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil, log2, sqrt
from typing import NamedTuple

import numpy as np
import pytest

from echograph.ir.comms.bandwidth import bus_factor
from echograph.simulator.clusters import load_cluster
from echograph.simulator.clusters.fabric import NvlsCost, PeerCost, ProtocolCost, ProtocolName, Protocols
from echograph.simulator.collectives import ALGORITHMS, Algorithm, CollectiveName, Cost
from echograph.simulator.network import patterns
from echograph.simulator.network.topology import Links

NODE = {name: ProtocolCost(base_s=b, hop_s=h, efficiency=e) for name, b, h, e in
        (("LL", 3e-6, 1.1e-6, 0.23), ("LL128", 5e-6, 1.3e-6, 0.71), ("Simple", 7e-6, 1.9e-6, 0.97))}  # fmt: skip
NET = {name: ProtocolCost(base_s=b, hop_s=h, efficiency=e) for name, b, h, e in
       (("LL", 2e-6, 2.3e-6, 0.31), ("LL128", 2.5e-6, 2.9e-6, 0.61), ("Simple", 4e-6, 9.7e-6, 0.83))}  # fmt: skip
PEER = {"LL": ProtocolCost(base_s=1.5e-6, hop_s=0.3e-6, efficiency=0.37),
        "Simple": ProtocolCost(base_s=6e-6, hop_s=0.7e-6, efficiency=0.89)}  # fmt: skip
NET_PEER = ProtocolCost(base_s=8e-6, hop_s=1.7e-6, efficiency=0.53)
NVLS_TREE = ProtocolCost(base_s=11e-6, hop_s=3.1e-6, efficiency=0.67)
NVLS_BASE, NVLS_RATE = 9e-6, 310e9
PEER_RATE, LOCAL, FILL = 90e9, 0.4, 0.3
TREE_EFFICIENCY, RING_HOP, TWO_DOMAINS, CLIMB = 0.79, 0.43, 1.3, 0.5e-6
PAIR_RATE, GROUP_RATE = 130e9, 110e9
"""Through one rank: of a group of two, and of a larger one."""
NIC = 17e9

SIZES = (0.0, 4.0, 12_345.0, 64e6)
PLACES = [(1, 2), (1, 3), (1, 5), (1, 8), (1, 16), (2, 1), (3, 1), (5, 1), (8, 1), (16, 1), (2, 2), (3, 2), (2, 3),
          (2, 8), (3, 5), (5, 8), (8, 3), (16, 16)]  # fmt: skip


def links(domains: int, ranks_per_domain: int, nics: float = NIC) -> Links:
    """A group of whole domains on links of which no two numbers are the same."""
    cluster = load_cluster("dgx-h100")
    node = replace(
        cluster.node_fabric, levels=((2, PAIR_RATE), (16, GROUP_RATE)), fill=FILL,
        protocols=Protocols(ll=NODE["LL"], ll128=NODE["LL128"], simple=NODE["Simple"]),
        nvls=NvlsCost(base_s=NVLS_BASE, bytes_per_s=NVLS_RATE),
        peer=PeerCost(ll=PEER["LL"], simple=PEER["Simple"], bytes_per_s=PEER_RATE, local_share=LOCAL),
    )  # fmt: skip
    network = replace(
        cluster.network.fabric, tree_efficiency=TREE_EFFICIENCY, ring_hop_share=RING_HOP,
        protocols=Protocols(ll=NET["LL"], ll128=NET["LL128"], simple=NET["Simple"]),
        two_domain_volume=TWO_DOMAINS, nvls_tree=NVLS_TREE, pat=True, peer=NET_PEER,
    )  # fmt: skip
    return Links(
        ranks=domains * ranks_per_domain, domains=domains, ranks_per_domain=ranks_per_domain,
        node=node, node_bytes_per_s=node.bytes_per_s(ranks_per_domain),
        network=network, network_bytes_per_s=ranks_per_domain * nics, ring_bytes_per_s=ranks_per_domain * nics,
        climb_s=CLIMB,
    )  # fmt: skip


class Form(NamedTuple):
    """What an algorithm takes: seconds that do not depend on the size, steps, and bytes' share of links and NICs.

    Attributes:
        latency: seconds of a message of no bytes.
        steps: from rank to rank, one after the other.
        inside: seconds a byte inside a domain.
        across: seconds a byte on the NICs.
        joined: whether the two follow one another instead of going on together.
        bound: seconds a byte that the whole takes at least.
        hops: seconds of hops; twice the root of them times the bytes' seconds fills a pipeline of chunks.
    """

    latency: float
    steps: int
    inside: float
    across: float
    joined: bool = False
    bound: float = 0.0
    hops: float = 0.0


def ring(kind: CollectiveName, at: Links, protocol: ProtocolName) -> Form:
    n, m, d = at.ranks, at.ranks_per_domain, at.domains
    rounds = 2 if kind == "all_reduce" else 1
    share = 1.0 if kind in ("broadcast", "reduce") else (rounds * (n - 1) + FILL) / n
    steps, a = rounds * (n - 1), NODE[protocol]
    latency = a.base_s + steps * a.hop_s
    if d > 1:
        crossings, far = rounds * (d - 1), NET[protocol]
        latency += far.base_s + crossings * (max(a.hop_s, RING_HOP * far.hop_s) + CLIMB - a.hop_s)
    inside = share / (at.node_bytes_per_s * a.efficiency) if m > 1 else 0.0
    across = share / (at.network_bytes_per_s * NET[protocol].efficiency) if d > 1 else 0.0
    # Nothing is inside a domain of one rank, but its own links still bound what it sends.
    return Form(latency, steps, inside, across, bound=share / (at.node_bytes_per_s * a.efficiency))


def tree(kind: CollectiveName, at: Links, protocol: ProtocolName) -> Form:
    m, d, a, far = at.ranks_per_domain, at.domains, NODE[protocol], NET[protocol]
    depth = ceil(log2(d))
    latency = a.base_s + far.base_s + 2 * (m - 1) * a.hop_s + 2 * depth * (far.hop_s + CLIMB)
    volume = TWO_DOMAINS if d == 2 else 2.0
    across = volume / (at.network_bytes_per_s * far.efficiency * TREE_EFFICIENCY)
    inside = 2 / (at.node_bytes_per_s * a.efficiency) if m > 1 else 0.0
    return Form(latency, 2 * (m - 1) + 2 * depth, inside, across, hops=(depth - 1) * (far.hop_s + CLIMB))


def nvls(kind: CollectiveName, at: Links, protocol: ProtocolName) -> Form:
    return Form(NVLS_BASE, 2, (at.ranks + 1) / at.ranks / NVLS_RATE, 0.0)


def nvls_tree(kind: CollectiveName, at: Links, protocol: ProtocolName) -> Form:
    m, d = at.ranks_per_domain, at.domains
    depth, volume = ceil(log2(d)), TWO_DOMAINS if d == 2 else 2.0
    latency = NVLS_BASE + NVLS_TREE.base_s + 2 * depth * (NVLS_TREE.hop_s + CLIMB)
    across = volume / (at.network_bytes_per_s * NVLS_TREE.efficiency)
    hops = (depth - 1) * (NVLS_TREE.hop_s + CLIMB)
    return Form(latency, 2 + 2 * depth, (m + 1) / m / NVLS_RATE, across, hops=hops)


def pat(kind: CollectiveName, at: Links, protocol: ProtocolName) -> Form:
    n, a, far = at.ranks, NODE[protocol], NET[protocol]
    steps = ceil(log2(n))
    latency = a.base_s + far.base_s + steps * (far.hop_s + CLIMB)
    return Form(latency, steps, 0.0, (n - 1 + FILL) / n / (at.network_bytes_per_s * far.efficiency))


def pairwise(kind: CollectiveName, at: Links, protocol: ProtocolName) -> Form:
    n, m, a = at.ranks, at.ranks_per_domain, PEER[protocol]
    rate = PEER_RATE * (at.node_bytes_per_s / PAIR_RATE)
    latency, across = a.base_s + (m - 1) * a.hop_s, 0.0
    if at.domains > 1:
        latency += NET_PEER.base_s + (n - m) * NET_PEER.hop_s + CLIMB
        across = m * (n - m) / n / (at.network_bytes_per_s * NET_PEER.efficiency * a.efficiency)
    return Form(latency, n - 1, (m - 1 + LOCAL) / n / (rate * a.efficiency), across)


def send(kind: CollectiveName, at: Links, protocol: ProtocolName) -> Form:
    a = PEER[protocol]
    if at.domains == 1:
        return Form(a.base_s + a.hop_s, 1, 1 / (PEER_RATE * a.efficiency), 0.0)
    latency = a.base_s + NET_PEER.base_s + NET_PEER.hop_s + CLIMB
    return Form(
        latency, 1, 0.0, 1 / (at.network_bytes_per_s / at.ranks_per_domain * NET_PEER.efficiency * a.efficiency)
    )


def hierarchical(kind: CollectiveName, at: Links, protocol: ProtocolName) -> Form:
    m, d, rounds = at.ranks_per_domain, at.domains, 2 if kind == "all_reduce" else 1
    steps = rounds * (m - 1) + rounds * (d - 1)
    a, far, rate, nics = NODE[protocol], NET[protocol], at.node_bytes_per_s, at.network_bytes_per_s
    if kind == "all_to_all":
        a, far = PEER["LL" if protocol == "LL" else "Simple"], NET_PEER
        rate = PEER_RATE * (at.node_bytes_per_s / PAIR_RATE)
        nics *= a.efficiency / m
    latency = a.base_s + far.base_s + rounds * ((m - 1) * a.hop_s + (d - 1) * (far.hop_s + CLIMB))
    inside, across = rounds * (m - 1) / m / (rate * a.efficiency), rounds * (d - 1) / d / (nics * far.efficiency)
    return Form(latency, steps, inside, across, joined=True)


FORMS: dict[str, Callable[[CollectiveName, Links, ProtocolName], Form]] = {
    "ring": ring, "tree": tree, "nvls": nvls, "nvls_tree": nvls_tree, "pat": pat, "pairwise": pairwise,
    "send": send, "hierarchical": hierarchical,
}  # fmt: skip


def runs(name: str, domains: int, m: int) -> bool:
    """Where an algorithm applies when the fabric offers all of them."""
    several = domains > 1
    return {
        "tree": several, "nvls": not several and m >= 3, "nvls_tree": several and m >= 3,
        "pat": several and m == 1, "hierarchical": several and m >= 2,
    }.get(name, True)  # fmt: skip


def check(found: Cost, form: Form, size: float, name: str) -> None:
    inside, across = size * form.inside, size * form.across
    moved = inside + across if form.joined else max(inside, across, size * form.bound)
    filled = 2 * sqrt(form.hops * moved)
    assert found.seconds == pytest.approx(form.latency + moved + filled, rel=1e-12, abs=0), name
    assert (found.steps, found.node_s) == (form.steps, pytest.approx(inside, rel=1e-12, abs=0)), name
    assert found.network_s == pytest.approx(across, rel=1e-12, abs=0), name


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("nics", [NIC, 100 * NIC], ids=["slow NICs", "fast NICs"])
def test_what_an_algorithm_takes_is_its_closed_form(name: str, nics: float) -> None:
    algorithm: Algorithm = ALGORITHMS[name]
    for domains, m in PLACES:
        at = links(domains, m, nics)
        for kind in algorithm.kinds:
            assert algorithm.applies(kind, at) == runs(name, domains, m), (name, domains, m)
            if not algorithm.applies(kind, at):
                continue
            for protocol in algorithm.protocols:
                form = FORMS[name](kind, at, protocol)
                for size in SIZES:
                    what = f"{name} {kind} {protocol} {size} on {domains} x {m}"
                    check(algorithm.cost(kind, size, at, protocol), form, size, what)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "broadcast"])
def test_a_message_of_a_ring_takes_its_least_time_over_a_nic(kind: CollectiveName) -> None:
    for domains, m in [(1, 8), (2, 1), (3, 5), (16, 16)]:
        at = links(domains, m)
        network = replace(at.network, ring_message_s=45e-6)
        for size in SIZES:
            free = ALGORITHMS["ring"].cost(kind, size, at, "Simple")
            form = ring(kind, at, "Simple")
            moved = size * max(form.inside, form.across, form.bound)
            slow = ALGORITHMS["ring"].cost(kind, size, replace(at, network=network), "Simple")
            least = 45e-6 * form.steps if domains > 1 else 0.0
            assert slow.seconds == pytest.approx(form.latency + max(moved, least), rel=1e-12, abs=0)
            assert slow[1:] == free[1:]


@pytest.mark.parametrize("most", [1, 2, 7.5])
def test_a_tree_over_ll128_has_no_more_chunks_than_the_fabric_says(most: float) -> None:
    for domains, m in [(2, 1), (3, 5), (5, 8), (64, 4)]:
        at = links(domains, m)
        capped = replace(at, network=replace(at.network, ll128_chunks=most))
        for protocol in ("LL", "LL128", "Simple"):
            form = tree("all_reduce", at, protocol)
            for size in SIZES:
                moved = size * max(form.inside, form.across)
                hop = NET[protocol].hop_s + CLIMB
                best = sqrt(form.hops * moved) / hop
                few = min(most, best) if protocol == "LL128" else best
                filled = form.hops / hop * moved / few + few * hop if few else 0.0
                found = ALGORITHMS["tree"].cost("all_reduce", size, capped, protocol)
                assert found.seconds == pytest.approx(form.latency + moved + filled, rel=1e-12, abs=0)


@pytest.mark.parametrize("name", FORMS)
def test_an_array_of_sizes_costs_what_each_does(name: str) -> None:
    algorithm: Algorithm = ALGORITHMS[name]
    at = next(at for at in (links(3, 5), links(1, 5), links(5, 1)) if algorithm.applies("all_reduce", at))
    for kind in algorithm.kinds:
        together = algorithm.cost(kind, np.array(SIZES), at, "Simple")
        alone = [float(algorithm.cost(kind, size, at, "Simple").seconds) for size in SIZES]
        assert np.asarray(together.seconds).tolist() == alone


def test_what_a_fabric_does_not_offer_does_not_run() -> None:
    for at in (links(1, 8), links(2, 8), links(8, 1)):
        bare = replace(at, node=replace(at.node, nvls=None), network=replace(at.network, pat=False))
        assert not any(ALGORITHMS[name].applies("all_reduce", bare) for name in ("nvls", "nvls_tree", "pat"))
        apart = replace(at, network=replace(at.network, nvls_tree=None))
        assert not ALGORITHMS["nvls_tree"].applies("all_reduce", apart)


def test_which_domains_send_to_which() -> None:
    expected: dict[tuple[str, CollectiveName], patterns.Pattern] = {
        ("ring", "all_reduce"): patterns.ring, ("ring", "all_gather"): patterns.ring,
        ("ring", "broadcast"): patterns.chain, ("ring", "reduce"): patterns.chain,
        ("tree", "all_reduce"): patterns.tree, ("nvls_tree", "all_reduce"): patterns.tree,
        ("pat", "all_gather"): patterns.doubling, ("pairwise", "all_to_all"): patterns.pairs,
        ("send", "send_recv"): patterns.chain, ("hierarchical", "all_to_all"): patterns.pairs,
        ("hierarchical", "all_reduce"): patterns.ring,
    }  # fmt: skip
    for (name, kind), pattern in expected.items():
        assert ALGORITHMS[name].pattern(kind) is pattern, (name, kind)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 16])
def test_bytes_on_the_bus_a_byte_of_the_size(ranks: int) -> None:
    parts = (ranks - 1) / ranks
    assert bus_factor("all_reduce", ranks) == pytest.approx(2 * parts)
    assert [bus_factor(k, ranks) for k in ("all_gather", "reduce_scatter", "all_to_all")] == [parts] * 3
    assert [bus_factor(k, ranks) for k in ("broadcast", "reduce", "send_recv")] == [1.0] * 3
