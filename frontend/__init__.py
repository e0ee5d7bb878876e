"""Frontends: each turns what it reads into a graph, or a trace into a timeline."""

from __future__ import annotations

from dataclasses import dataclass

from echograph.ir.graph import Graph
from echograph.registry import Table

FRONTENDS = Table(
    "format",
    {
        "chakra": "echograph.frontend.chakra:load",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A graph, and what of its source a graph cannot hold.

    Attributes:
        graph: a step graph or a job graph.
        notes: what was left out or taken for something, a line each.
    """

    graph: Graph
    notes: tuple[str, ...] = ()
