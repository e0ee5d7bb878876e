"""Which domains of a group send to which: a pattern gives the hops of one collective, with the share of each.

Domains are numbered in the order of the group's ranks. Weights are relative: `routes` scales them so that the
NICs of the busiest domain carry what the algorithm's formula says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from echograph.ir.columns import Float64, Int64


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
