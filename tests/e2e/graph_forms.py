"""A graph and a job of it come back from JSON, GML and text with the same bytes."""

from __future__ import annotations

import networkx as nx

from echograph.ir import serde
from echograph.ir.graph import Graph, StepGraph
from echograph.ir.text import to_text
from echograph.ir.text.network import from_gml, to_network
from echograph.ir.text.parser import from_text
from echograph.ir.text.records import from_json, to_json
from echograph.workflow.plan import Plan
from echograph.workflow.predict import lower


def encoded(graph: Graph) -> bytes:
    return b"".join(serde.encode(graph))


def check_forms(graph: StepGraph) -> None:
    """The step, and the job of eight ranks that share gradients and optimizer."""
    for one in (graph, lower(graph, Plan(gpus=8, zero=2))):
        data = encoded(one)
        assert encoded(from_json("".join(to_json(one)))) == data
        assert encoded(from_text("".join(to_text(one, tables=True)))) == data
        assert encoded(from_gml("\n".join(nx.generate_gml(to_network(one))))) == data
