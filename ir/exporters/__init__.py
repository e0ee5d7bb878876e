"""Graphs and timelines in the formats of other tools."""

from __future__ import annotations

from echograph.registry import Table

EXPORTERS = Table("format", {})
"""Formats that a graph is written in: name -> `export(graph: Graph, output: Path) -> Exported`."""
