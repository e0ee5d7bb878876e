"""Which links groups of ranks load: the ports of their GPUs, their nodes, and the levels that they climb."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from echograph.ir.columns import Float64, Int64
from echograph.simulator.network.patterns import Hops, Pattern, chain
from echograph.simulator.network.topology import Topology


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
