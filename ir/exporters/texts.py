"""The two forms of a graph that people read and that hold all of it: JSON and text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from echograph.ir.files import write_whole
from echograph.ir.formats import Exported
from echograph.ir.graph import Graph
from echograph.ir.text import to_text
from echograph.ir.text.network import to_network
from echograph.ir.text.records import to_json


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


# -- GML and GraphML ------------------------------------------------------------------------------------------
# GML and GraphML, which networkx, igraph, Gephi and yEd read: the whole graph as nodes and edges.


_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def export_gml(graph: Graph, output: Path) -> Exported:
    """Writes a graph as GML.

    Raises:
        OutputError: the path cannot be written.
        InputError: the graph is too large for a network.
        MissingExtraError: networkx is not installed.
    """
    network = to_network(graph)
    from networkx import generate_gml

    return Exported(files=1, bytes=write_whole(output, (line + "\n" for line in generate_gml(network))))


def export_graphml(graph: Graph, output: Path) -> Exported:
    """Writes a graph as GraphML; characters that XML cannot hold stand as JSON escapes them.

    Raises:
        OutputError: the path cannot be written.
        InputError: the graph is too large for a network.
        MissingExtraError: networkx is not installed.
    """
    network = to_network(graph)
    from networkx import generate_graphml, relabel_nodes

    attributes = (network.graph, *(found for _, found in network.nodes(data=True)))
    replaced = sum(_make_xml(found) for found in attributes)
    network = relabel_nodes(network, lambda name: _NOT_XML.sub(_escape, name))
    notes = (f"{replaced} texts with characters that XML cannot hold have them as \\uXXXX",) if replaced else ()
    pieces = (line + "\n" for line in generate_graphml(network))
    return Exported(files=1, bytes=write_whole(output, pieces), notes=notes)


def _make_xml(attributes: dict[str, Any]) -> int:
    """Replaces what XML cannot hold; how many attributes held such characters."""
    odd = [key for key, item in attributes.items() if isinstance(item, str) and _NOT_XML.search(item)]
    for key in odd:
        attributes[key] = _NOT_XML.sub(_escape, attributes[key])
    return len(odd)


def _escape(found: re.Match[str]) -> str:
    return f"\\u{ord(found.group()):04x}"
