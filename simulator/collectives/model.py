"""What a collective algorithm is: a cost in seconds for a kind, a size, a group's links and a protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echograph.simulator.clusters.fabric import ProtocolName
from echograph.simulator.network.patterns import Pattern
from echograph.simulator.network.topology import Links

CollectiveName = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv", "barrier"
]
KINDS: tuple[CollectiveName, ...] = (
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
    """What a size, or each of an array of sizes, costs.

    Attributes:
        seconds: execution time.
        steps: sequential steps.
        node_s: seconds of it for which the bytes keep a rank's links inside its domain busy.
        network_s: seconds of it for which they keep the NICs of the busiest domain busy.
    """

    seconds: Seconds
    steps: int
    node_s: Seconds
    network_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One way of running a collective.

    Args:
        name: as NCCL names it.
        kinds: collectives that it runs.
        protocols: protocols that it runs over.
        applies: whether the group's links offer it.
        cost: seconds from kind, size in bytes (nccl-tests' `size`), links and protocol; grows with the size.
        pattern: which domains send to which, by kind.
        by_name: whether it runs only where it is asked for by name, since NCCL does not have it.
    """

    name: str
    kinds: frozenset[CollectiveName]
    protocols: tuple[ProtocolName, ...]
    applies: Callable[[CollectiveName, Links], bool]
    cost: Callable[[CollectiveName, Bytes, Links, ProtocolName], Cost]
    pattern: Callable[[CollectiveName], Pattern]
    by_name: bool = False


def bus_factor(kind: CollectiveName, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests defines it (PERFORMANCE.md of NVIDIA/nccl-tests)."""
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0
