"""What the cluster's links offer to groups of ranks, and how flows share them."""

from __future__ import annotations

from echograph.simulator.network.links import Links, group_links
from echograph.simulator.network.sharing import fair_rates

__all__ = ["Links", "fair_rates", "group_links"]
