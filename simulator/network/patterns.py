"""Which domains of a group send to which: a pattern gives the hops of one collective, with the share of each.

Domains are numbered in the order of the group's ranks. Weights are relative: `loads` scales them so that the
NICs of the busiest domain carry what the algorithm's formula says. `loads` says which links that are: the ports of
GPUs, their nodes, and the levels that they climb.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from echograph.ir.columns import Float64, Int64
from echograph.simulator.network.topology import Topology


class Hops(NamedTuple):
    """Who sends to whom.

    Attributes:
        source: int64 [hops], domain.
        target: int64 [hops], domain.
        weight: float64 [hops], bytes over each hop, relative to each other.
    """

    source: Int64
    target: Int64
    weight: Float64


Pattern = Callable[[int], Hops]


def ring(domains: int) -> Hops:
    """Each to the next, the last to the first."""
    here = np.arange(domains)
    return Hops(here, (here + 1) % domains, np.ones(domains))


def chain(domains: int) -> Hops:
    """Each to the next: a broadcast, or one message."""
    here = np.arange(domains - 1)
    return Hops(here, here + 1, np.ones(domains - 1))


def tree(domains: int) -> Hops:
    """Both binary trees, up and down.

    In-order numbering (Sanders, Speck and Träff 2009): the parent has the lowest set bit cleared and the next one
    set, or only cleared where that is beyond the last. The second tree is the first one mirrored, or shifted by
    one where the number is odd.
    """
    child = np.arange(1, domains)
    bit = child & -child
    above = (child - bit) | (2 * bit)
    parent = np.where(above < domains, above, child - bit)
    ends = np.stack([child, parent])
    other = (ends + 1) % domains if domains % 2 else domains - 1 - ends
    source, target = np.concatenate([ends, ends[::-1], other, other[::-1]], axis=1)
    return Hops(source, target, np.ones(len(source)))


def doubling(domains: int) -> Hops:
    """Each to those 1, 2, 4, ... further, the farthest first, as PAT does (arXiv 2506.20252).

    What goes t domains far arrives over a hop as long as the lowest set bit of t.
    """
    far = 1 << np.arange((domains - 1).bit_length())
    blocks = [len(range(hop, domains, 2 * hop)) for hop in far.tolist()]
    source = np.tile(np.arange(domains), len(far))
    target = (source + np.repeat(far, domains)) % domains
    return Hops(source, target, np.repeat(np.array(blocks, np.float64), domains))


def pairs(domains: int) -> Hops:
    """Each to every other."""
    source, target = np.divmod(np.arange(domains * domains), domains)
    apart = source != target
    return Hops(source[apart], target[apart], np.ones(int(apart.sum())))


class Loads(NamedTuple):
    """Loads of groups that are alike, ordered by group; a group has a link once.

    Attributes:
        group: int64 [loads], number of the group.
        link: int64 [loads].
        rate: float64 [loads], bytes/s that the group puts on the link while its links inside domains, or its
            ports of the busiest domain, work as fast as they can.
        network: bool [loads], whether the link lies between domains.
    """

    group: Int64
    link: Int64
    rate: Float64
    network: npt.NDArray[np.bool_]

    def overload(self, topology: Topology) -> float:
        """How much faster than a link its load is at most; 1 where every link bears its own."""
        over = (self.rate / topology.full[self.link])[self.network]
        return max(1.0, float(over.max(initial=0.0)))


def loads(topology: Topology, members: Int64, pattern: Pattern) -> Loads:
    """What groups load.

    Args:
        topology: the links.
        members: int64 [groups, ranks], GPUs of each group, those of a domain next to each other.
        pattern: which domains send to which.
    """
    domain = members // topology.cluster.domain_gpus
    starts = np.ones(members.shape, np.bool_)
    starts[:, 1:] = domain[:, 1:] != domain[:, :-1]
    place = np.cumsum(starts, axis=1) - 1
    parts = [_inside(topology, members, starts, ends=pattern is chain)]
    for domains in np.unique(place[:, -1] + 1).tolist():
        if domains > 1:
            groups = np.flatnonzero(place[:, -1] + 1 == domains)
            parts += _between(topology, members[groups], place[groups], groups, pattern(domains))
    group, link, rate = (np.concatenate(part) for part in zip(*parts, strict=True))
    key, where = np.unique(group * topology.links + link, return_inverse=True)
    group, link = np.divmod(key, topology.links)
    total: Float64 = np.bincount(where, weights=rate, minlength=len(key)).astype(np.float64)
    return Loads(group, link, total, link >= topology.first_port)


_Part = tuple[Int64, Int64, Float64]


def _inside(topology: Topology, members: Int64, starts: npt.NDArray[np.bool_], *, ends: bool) -> _Part:
    """Links of GPUs that share a domain with others of their group; the ends of a chain only send, or receive."""
    alone = starts.copy()
    alone[:, :-1] &= starts[:, 1:]
    sends, receives = ~alone, ~alone
    if ends:
        sends[:, -1] = receives[:, 0] = False
    (to, gpu), (back, other) = np.nonzero(sends), np.nonzero(receives)
    link = np.concatenate([topology.of_gpu(members[to, gpu]), topology.of_gpu(members[back, other]) + 1])
    return np.concatenate([to, back]), link, topology.full[link]


def _between(topology: Topology, members: Int64, place: Int64, groups: Int64, hops: Hops) -> list[_Part]:
    """Links of ports, and of the tiers above them, for groups of one number of domains."""
    source, target, weight = hops
    count = int(place[0, -1]) + 1
    sent, received = (np.bincount(ends, weights=weight, minlength=count) for ends in (source, target))
    most = max(float(sent.max()), float(received.max()))
    ports = topology.port(members)
    first = np.ones(ports.shape, np.bool_)
    first[:, 1:] = ports[:, 1:] != ports[:, :-1]
    row, column = np.nonzero(first)
    port, at = ports[row, column], place[row, column]
    rate = topology.full[topology.of_port(port)] / most
    parts = [
        (groups[row], topology.of_port(port) + end, rate * share[at]) for end, share in enumerate((sent, received))
    ]
    leading = np.zeros((len(members), count), np.int64)
    leading[row[::-1], at[::-1]] = port[::-1]
    for tier in topology.tiers:
        switch = topology.above(tier, leading)
        climbs = switch[:, source] != switch[:, target]
        if climbs.any():
            for end, ends in enumerate((source, target)):
                cell = np.arange(len(members))[:, None] * count + ends
                crossing = np.bincount(cell.ravel(), (climbs * weight).ravel(), len(members) * count)
                parts.append((groups[row], topology.above(tier, port) + end, rate * crossing[row * count + at]))
    return [(group[value > 0], link[value > 0], value[value > 0]) for group, link, value in parts]
