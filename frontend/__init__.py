"""Frontends: each turns what it reads into a graph, or a trace into a timeline."""

from __future__ import annotations

from echograph.registry import Table

FRONTENDS = Table(
    "format",
    {
        "chakra": "echograph.ir.chakra.importer:load",
        "comms": "echograph.frontend.comms:load",
        "gml": "echograph.frontend.graph_files:load_gml",
        "json": "echograph.frontend.graph_files:load_json",
        "onnx": "echograph.frontend.onnx:load",
        "text": "echograph.frontend.graph_files:load_text",
    },
)
"""Formats of other tools that are read: name -> `load(source: Path) -> Graph | Imported`.

Those that read many files also take `progress: Progress`.
"""
