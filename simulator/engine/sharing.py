"""What work shares: which task loads which links, and how much."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echograph.errors import SimulationError
from echograph.ir.columns import Float64, Int32, Ragged


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sharing:
    """Links, and the routes of tasks over them.

    What meets (`columns.Columns.place`, `TaskGraph.rendezvous`) is one flow. It loads the links of the place
    where it meets; of several tasks that meet, the lowest in number that has a route speaks for all.

    Attributes:
        capacity: float64 [links], bytes/s.
        load: float64 [tasks], bytes/s that a flow puts on each link of its route when nothing slows it; 0 for
            tasks that share nothing.
        route: int32 [tasks], the row of `routes` for each task; -1 where it shares nothing.
        routes: int32 [rows, columns], the row of `links` for each place, from 0 to columns - 1, or -1 where that
            place loads none; a column that meets nobody is a place of its own.
        links: numbers of links; what a row names twice, it loads twice.
        weight: float64, parallel to `links.values`, over 0: multiples of `load` on that link.

    Raises:
        SimulationError: lengths that do not belong together, a link without capacity, a load below 0.
    """

    capacity: Float64
    load: Float64
    route: Int32
    routes: Int32
    links: Ragged
    weight: Float64

    def __post_init__(self) -> None:
        if len(self.load) != len(self.route) or len(self.weight) != len(self.links.values):
            raise SimulationError(
                f"{len(self.load)} loads of {len(self.route)} routed tasks and {len(self.weight)} weights on "
                f"{len(self.links.values)} links: give one each"
            )
        if not (np.isfinite(self.capacity).all() and (self.capacity > 0).all()):
            raise SimulationError("a link without capacity: give each a finite number of bytes/s over 0")
        if not (np.isfinite(self.weight).all() and (self.weight > 0).all()):
            raise SimulationError("a link that a route does not load: give each a finite weight over 0")
        if not (np.isfinite(self.load).all() and (self.load >= 0).all()):
            raise SimulationError("a load that is no amount: give finite numbers of bytes/s from 0")
