"""Graphs and timelines in the formats of other tools."""

from __future__ import annotations

from echograph.registry import Table

EXPORTERS = Table(
    "format",
    {
        "dot": "echograph.ir.exporters.drawing:export_dot",
        "echo": "echograph.ir.exporters.echo:export_echo",
        "gml": "echograph.ir.exporters.texts:export_gml",
        "graphml": "echograph.ir.exporters.texts:export_graphml",
        "json": "echograph.ir.exporters.texts:export_json",
        "onnx": "echograph.ir.exporters.onnx:export",
        "svg": "echograph.ir.exporters.drawing:export_svg",
        "text": "echograph.ir.exporters.texts:export_text",
    },
)
"""Formats that a graph is written in: name -> `export(graph: Graph, output: Path) -> Exported`."""
