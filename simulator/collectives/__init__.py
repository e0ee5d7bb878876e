"""How long collectives take: one file an algorithm, and the choice among them."""

from __future__ import annotations

from echograph.simulator.collectives.model import KINDS, Algorithm, CollectiveName, Cost, bus_factor
from echograph.simulator.collectives.select import (
    ALGORITHMS,
    CollectiveEstimate,
    collective_curve,
    collective_time,
)

__all__ = [
    "ALGORITHMS",
    "KINDS",
    "Algorithm",
    "CollectiveEstimate",
    "Cost",
    "CollectiveName",
    "bus_factor",
    "collective_curve",
    "collective_time",
]
