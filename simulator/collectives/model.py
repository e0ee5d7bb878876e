"""What a collective algorithm is: a cost in seconds for a kind, a size, a group's links and a protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echograph.simulator.clusters.fabric import ProtocolName
from echograph.simulator.network.links import Links

Kind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv", "barrier"
]
KINDS: tuple[Kind, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "send_recv",
    "barrier",
)
ALL_PROTOCOLS: tuple[ProtocolName, ...] = ("LL", "LL128", "Simple")

Bytes = float | NDArray[np.float64]
Seconds = float | NDArray[np.float64]


class Cost(NamedTuple):
    """Seconds for a size or for each of an array of sizes, and the number of sequential steps."""

    seconds: Seconds
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One way of running a collective.

    Args:
        name: as NCCL names it.
        kinds: collectives that it runs.
        protocols: protocols that it runs over.
        applies: whether the group's links offer it.
        cost: seconds from kind, size in bytes (nccl-tests' `size`), links and protocol; grows with the size.
    """

    name: str
    kinds: frozenset[Kind]
    protocols: tuple[ProtocolName, ...]
    applies: Callable[[Kind, Links], bool]
    cost: Callable[[Kind, Bytes, Links, ProtocolName], Cost]


def bus_factor(kind: Kind, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests defines it (PERFORMANCE.md of NVIDIA/nccl-tests)."""
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0
