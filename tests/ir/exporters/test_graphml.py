"""GraphML holds the network that GML holds, as networkx reads it back."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conformance_graphs import GRAPHS

from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import StepGraph
from echograph.ir.text.network import to_network
from echograph.workflow.formats import EXPORTS

nx = pytest.importorskip("networkx")


@pytest.mark.parametrize("name", GRAPHS)
def test_networkx_reads_the_same_nodes_edges_and_attributes(name: str, tmp_path: Path) -> None:
    graph = GRAPHS[name]()
    done = EXPORTS["graphml"](graph, tmp_path / "graph.graphml")
    assert (done.files, done.bytes, done.notes) == (1, (tmp_path / "graph.graphml").stat().st_size, ())
    read, network = nx.read_graphml(tmp_path / "graph.graphml", force_multigraph=True), to_network(graph)
    assert dict(read.nodes(data=True)) == dict(network.nodes(data=True))
    assert sorted(map(str, read.edges(data=True))) == sorted(map(str, network.edges(data=True)))
    assert json.loads(read.graph["blocks"])[0]["name"] == graph.blocks[0].name


def test_characters_that_xml_cannot_hold_are_replaced_and_said(tmp_path: Path) -> None:
    builder = GraphBuilder(name="bell \x07")
    builder.tensor("\x00x\ufffe", (), t.DType.FP32, t.TensorRole.INPUT)
    done = EXPORTS["graphml"](builder.build(StepGraph), tmp_path / "graph.graphml")
    ElementTree.parse(tmp_path / "graph.graphml")
    assert "\\u0000x\\ufffe" in (tmp_path / "graph.graphml").read_text(encoding="utf-8")
    assert len(done.notes) == 1
    assert "that XML cannot hold" in done.notes[0]
