"""Tensor and operation ids, aliases, and where the value of a tensor comes from."""

from __future__ import annotations

import pytest
from conformance_graphs import GRAPHS

from echograph.errors import GraphError
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import JobGraph


@pytest.mark.parametrize("name", GRAPHS)
def test_ids_are_dense_and_point_back(name: str) -> None:
    graph = GRAPHS[name]()
    tensors, ops = [], []
    for number, block in enumerate(graph.blocks):
        for instance in range(len(block.instances)):
            own = [i for i in block.tensors if not graph.tensors.port[i]]
            tensors += [(number, instance, index) for index in own]
            ops += [(number, instance, index) for index in block.ops]
    assert [graph.tensor_id(*place) for place in tensors] == list(range(len(tensors)))
    assert [graph.locate_tensor(i) for i in range(len(tensors))] == tensors
    assert [graph.op_id(*place) for place in ops] == list(range(len(ops)))
    assert [graph.locate_op(i) for i in range(len(ops))] == ops
    with pytest.raises(IndexError):
        graph.locate_tensor(len(tensors))
    with pytest.raises(IndexError):
        graph.locate_op(len(ops))


def test_a_port_has_the_id_of_what_its_instance_binds() -> None:
    graph = GRAPHS["two_layers"]()
    assert graph.tensor_id(1, 0, 4) == 0
    assert graph.tensor_id(1, 1, 4) == 4 == graph.tensor_id(1, 0, 6)


def test_the_source_of_a_value_is_found_through_ports_and_views() -> None:
    graph = GRAPHS["aliases"]()
    assert graph.source(0, 0, 0) is None
    assert graph.source(1, 0, 7) == (0, 0, 3)
    assert graph.source(1, 2, 7) == (1, 1, 6)
    assert graph.source(0, 0, 6) == (0, 0, 4)
    assert graph.source(0, 0, 5) == (1, 2, 6)
    assert graph.value(0, 0, 5) == (1, 2, 8)
    assert graph.value(0, 0, 0) == (0, 0, 0)


def test_roots_own_the_memory_and_origins_the_value() -> None:
    graph = GRAPHS["aliases"]()
    assert graph.root.tolist() == [0, 0, 0, 3, 3, 5, 5, 7, 7]
    assert graph.origin.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]


def test_world_size_is_the_mesh_or_the_listed_ranks() -> None:
    assert GRAPHS["job"]().world_size == 8
    assert GRAPHS["ranks"]().world_size == 2
    assert GRAPHS["two_layers"]().world_size == 1


def test_a_rank_has_one_program_and_its_role_a_name() -> None:
    builder = GraphBuilder(name="imported")
    for rank in (4, 9):
        builder.program([], ranks=(rank,))
    listed = builder.build(JobGraph)
    assert [listed.role_name(number) for number in range(2)] == ["rank 4", "rank 9"]
    assert listed.program_of(9) == 1
    for rank in (0, -1):
        with pytest.raises(GraphError, match=f"no program for rank {rank}"):
            listed.program_of(rank)
    staged = GRAPHS["job"]()
    owners = [staged.program_of(rank) for rank in range(staged.world_size)]
    assert [owners.count(number) for number in range(len(staged.programs))] == [
        staged.rank_count(number) for number in range(len(staged.programs))
    ]
    with pytest.raises(GraphError):
        staged.program_of(staged.world_size)
