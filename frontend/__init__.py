"""Frontends: each turns what it reads into a graph, or a trace into a timeline."""

from __future__ import annotations

from echograph.registry import Table

FRONTENDS = Table("format", {})
"""Formats of other tools that are read: name -> `load(source: Path) -> Graph`."""
