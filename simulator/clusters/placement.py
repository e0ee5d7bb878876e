"""Where the ranks of a group sit: how many nodes and NVLink domains, and how many ranks in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from echograph.errors import PlanError
from echograph.ir.columns import distinct


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlacement:
    """How a group spreads over a cluster; all that the time of a collective depends on.

    Args:
        ranks: size of the group.
        nodes: hosts it touches.
        ranks_per_node: the most ranks on one host.
        domains: NVLink domains it touches (on a PCIe machine, hosts).
        ranks_per_domain: the most ranks in one domain.
        span: distance from its first to its last rank plus one; says which fabric level it crosses.
    """

    ranks: int
    nodes: int
    ranks_per_node: int
    domains: int
    ranks_per_domain: int
    span: int

    def __post_init__(self) -> None:
        if min(self.ranks, self.nodes, self.ranks_per_node, self.domains, self.ranks_per_domain) < 1:
            raise PlanError(f"placement of {self.ranks} ranks: every count is at least 1")


def place(ranks: Sequence[int], gpus_per_node: int, domain_gpus: int) -> GroupPlacement:
    """Places a group on consecutive nodes.

    Args:
        ranks: global ranks of the group, each once; a `range` costs no memory and constant time.
        gpus_per_node: GPUs of one host.
        domain_gpus: GPUs of one NVLink domain.

    Raises:
        PlanError: the group is empty, names a rank twice, or a negative one.
    """
    if not len(ranks):
        raise PlanError("group: it has no rank")
    if isinstance(ranks, range):
        low, high = sorted((ranks[0], ranks[-1]))
        if low < 0:
            raise PlanError(f"group {ranks}: ranks are at least 0")
        nodes, per_node = _strided(len(ranks), abs(ranks.step), low, gpus_per_node)
        domains, per_domain = _strided(len(ranks), abs(ranks.step), low, domain_gpus)
    else:
        members = distinct(ranks)
        if len(members) != len(ranks):
            raise PlanError("group: a rank is named twice")
        low, high = int(members[0]), int(members[-1])
        if low < 0:
            raise PlanError(f"group: rank {low} is below 0")
        nodes, per_node = _listed(members, gpus_per_node)
        domains, per_domain = _listed(members, domain_gpus)
    return GroupPlacement(
        ranks=len(ranks),
        nodes=nodes,
        ranks_per_node=per_node,
        domains=domains,
        ranks_per_domain=per_domain,
        span=high - low + 1,
    )


def _strided(size: int, stride: int, start: int, box: int) -> tuple[int, int]:
    """Boxes touched by start, start + stride, ... and the most of them in one box."""
    if stride >= box:
        return size, 1
    touched = (start + (size - 1) * stride) // box - start // box + 1
    if touched <= 2 * stride:
        # Which boxes hold one more than others repeats after at most `stride` boxes, so few need counting.
        edges = np.arange(start // box, start // box + touched + 1) * box
        index = np.clip(-(-(edges - start) // stride), 0, size)
        return touched, int(np.diff(index).max(initial=1))
    return touched, min(size, -(-box // stride))


def _listed(members: np.ndarray, box: int) -> tuple[int, int]:
    counts = np.unique(members // box, return_counts=True)[1]
    return len(counts), int(counts.max())
