"""What the cluster's links offer to groups of ranks."""

from __future__ import annotations

from echograph.simulator.network.topology import Links, group_links

__all__ = ["Links", "group_links"]
