"""Graphs of the zoo, as steps and as jobs, come back from JSON, GML and text with the same bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("networkx")

import networkx as nx
from families import TEN, sizes

from echograph.cli.compose import compile_entry, lower_graph
from echograph.cli.plan import Plan
from echograph.frontend.pytorch.step import StepSpec
from echograph.ir import serde
from echograph.ir.graph import Graph, StepGraph
from echograph.ir.json_form import from_json, to_json
from echograph.ir.network import from_gml, to_network
from echograph.ir.text import to_text
from echograph.ir.text_parse import from_text
from echograph.models import get_model, model_names

pytestmark = pytest.mark.torch


def encoded(graph: Graph) -> bytes:
    return b"".join(serde.encode(graph))


def check(graph: StepGraph) -> None:
    """The step, and the job of eight ranks that share gradients and optimizer."""
    job = lower_graph(graph, Plan(gpus=8, zero=2))
    for one in (graph, job):
        data = encoded(one)
        assert encoded(from_json("".join(to_json(one)))) == data
        assert encoded(from_text("".join(to_text(one, tables=True)))) == data
        assert encoded(from_gml("\n".join(nx.generate_gml(to_network(one))))) == data


@pytest.mark.parametrize("name", ["bert-base-uncased", "llama-3-8b", "mixtral-8x7b"])
def test_shallow_models(name: str, compiled: Callable[..., StepGraph]) -> None:
    check(compiled(name, 2, attention=TEN[name], **sizes(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", model_names())
def test_the_zoo(name: str) -> None:
    check(compile_entry(get_model(name), StepSpec(), batch_size=1))
