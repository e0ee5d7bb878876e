"""What of a cluster is worse than its like: links with less bandwidth, nodes that compute slower."""

from __future__ import annotations

import re
from dataclasses import dataclass

from echograph.errors import UsageError

LEAST_PART = 1e-6
"""Of a link's bandwidth or a node's speed that may be left: with less, a step takes years."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DegradedLink:
    """A link that carries less.

    Args:
        link: its name, or words of it that several have: "node 3 nic 5", "leaf 2 up", "node 3".
        bandwidth: share of its bandwidth that is left, `LEAST_PART` to 1.
    """

    link: str
    bandwidth: float

    @property
    def where(self) -> str:
        """Words for what is degraded."""
        return self.link


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowNode:
    """A node that computes slower.

    Args:
        node: its number.
        compute: its speed over that of the others, `LEAST_PART` to 1.
    """

    node: int
    compute: float

    @property
    def where(self) -> str:
        """Words for what is degraded."""
        return f"node {self.node}"


def parse_degraded(text: str) -> DegradedLink | SlowNode:
    """What is degraded, as the command line spells it: "node 3 nic 5=0.5", "node 3 compute=0.9".

    Raises:
        UsageError: it is no name and factor.
    """
    what, _, value = text.rpartition("=")
    what = " ".join(what.split())
    try:
        factor = float(value)
    except ValueError:
        factor = 0.0
    if not what or not LEAST_PART <= factor <= 1:
        raise UsageError(
            f"--degrade '{text[:60]}': give LINK=FACTOR with a factor from {LEAST_PART:g} to 1, "
            "as 'node 3 nic 5=0.5'"
        )
    if slow := re.fullmatch(r"node (\d{1,9}) compute", what):
        return SlowNode(node=int(slow[1]), compute=factor)
    return DegradedLink(link=what, bandwidth=factor)
