"""What ports are bound to, on columns, is what `Graph` says of each of them alone."""

from __future__ import annotations

import numpy as np
import pytest
from conformance_graphs import GRAPHS
from graphs import build, models
from hypothesis import given, settings
from pipelines import tied_step

from echograph.errors import GraphError
from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder
from echograph.ir.columns import NONE
from echograph.ir.graph import Graph, StepGraph
from echograph.ir.passes.fold import Fold
from echograph.ir.passes.pipeline import Pipeline


def agrees(graph: Graph) -> int:
    """Compares every tensor of every instance; returns how many ports there are."""
    places = [
        (number, instance, row)
        for number, block in enumerate(graph.blocks)
        for instance in range(len(block.instances))
        for row in block.tensors
    ]
    columns = np.array(places, np.int64).reshape(-1, 3).T
    assert list(zip(*graph.ports.value(*columns), strict=True)) == [graph.value(*place) for place in places]
    ids = np.array([graph.tensor_id(*place) for place in places], np.int64)
    located = list(zip(*graph.ports.locate(ids), strict=True))
    assert located == [graph.locate_tensor(identity) for identity in ids.tolist()]
    slots = [place for place in places if graph.tensors.port[place[2]]]
    assert list(zip(*graph.ports.instances, graph.ports.rows, strict=True)) == slots
    assert graph.ports.bound.tolist() == [graph.tensor_id(*slot) for slot in slots]
    assert (graph.ports.last(graph.root) != NONE).all()
    return len(slots)


@pytest.mark.parametrize("name", GRAPHS)
def test_conformance_graphs(name: str) -> None:
    agrees(GRAPHS[name]())


@settings(deadline=None, max_examples=30)
@given(model=models(min_layers=2))
def test_folded_models(model: object) -> None:
    agrees(Fold()(build(model)))


def test_a_pipeline_binds_through_several_blocks() -> None:
    assert agrees(Pipeline(stages=3, micro_batches=4)(tied_step(6, skip=True))) > 20


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8])
def test_chains_end_and_circles_do_not(length: int) -> None:
    def bound(last: int) -> Graph:
        b = GraphBuilder()
        b.tensor("end", (4,), t.DType.FP32, t.TensorRole.ACTIVATION)
        ids = range(1, length + 1)
        for number in range(length):
            block = b.begin_block(f"link {number}")
            port = b.tensor("", (4,), t.DType.FP32, t.TensorRole.ACTIVATION, port=True)
            b.tensor("view", (4,), t.DType.FP32, t.TensorRole.ACTIVATION, alias_of=port)
            b.instance(block, bindings=(last if number == length - 1 else ids[number + 1],))
        return b.build(StepGraph)

    chain = bound(0)
    assert agrees(chain) == length
    assert chain.ports.last(chain.root).tolist() == [length - 1] * length
    with pytest.raises(GraphError, match=r"instance 0 of block 1 binds a port to itself \[instances_bound\]"):
        bound(1)
