"""The two forms of a graph that people read and that hold all of it: JSON and text."""

from __future__ import annotations

from pathlib import Path

from echograph.ir.files import write_whole
from echograph.ir.formats import Exported
from echograph.ir.graph import Graph
from echograph.ir.text import to_text
from echograph.ir.text.json_form import to_json


def export_json(graph: Graph, output: Path) -> Exported:
    """Writes a graph as JSON.

    Raises:
        OutputError: the path cannot be written.
    """
    return Exported(files=1, bytes=write_whole(output, to_json(graph)))


def export_text(graph: Graph, output: Path) -> Exported:
    """Writes a graph as text, its tables' order included.

    Raises:
        OutputError: the path cannot be written.
    """
    return Exported(files=1, bytes=write_whole(output, to_text(graph, tables=True)))
