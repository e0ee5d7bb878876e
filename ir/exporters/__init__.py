"""Graphs and timelines in the formats of other tools."""

from __future__ import annotations

from dataclasses import dataclass

from echograph.registry import Table

EXPORTERS = Table(
    "format",
    {
        "dot": "echograph.ir.exporters.drawing:export_dot",
        "echo": "echograph.ir.exporters.echo:export_echo",
        "gml": "echograph.ir.exporters.networks:export_gml",
        "graphml": "echograph.ir.exporters.networks:export_graphml",
        "json": "echograph.ir.exporters.texts:export_json",
        "onnx": "echograph.ir.exporters.onnx:export",
        "svg": "echograph.ir.exporters.drawing:export_svg",
        "text": "echograph.ir.exporters.texts:export_text",
    },
)
"""Formats that a graph is written in: name -> `export(graph: Graph, output: Path) -> Exported`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export wrote.

    Attributes:
        files: how many files.
        bytes: their size together.
        notes: what the format cannot hold of this graph, a line each; empty where it holds all.
    """

    files: int
    bytes: int
    notes: tuple[str, ...] = ()
