"""The builder makes what it is told, and verifies it."""

from __future__ import annotations

import pytest
from conformance_graphs import GRAPHS

from echograph.errors import GraphError
from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import StepGraph, Workload
from echograph.ir.serde import decode, encode
from echograph.ir.text import to_text


def product(b: GraphBuilder) -> int:
    x = b.tensor("x", (8, 4), t.DType.BF16, t.TensorRole.INPUT)
    w = b.tensor("w", (4, 4), t.DType.BF16, t.TensorRole.PARAMETER)
    y = b.tensor("y", (8, 4), t.DType.BF16, t.TensorRole.ACTIVATION)
    return b.compute("aten.mm", inputs=(x, w), outputs=(y,), flops=256, bytes_read=96, bytes_written=64,
                     phase=t.Phase.FORWARD, module="mlp", attributes=t.Gemm(transpose_b=True))  # fmt: skip


def test_an_operation_comes_back_as_it_was_given() -> None:
    b = GraphBuilder(name="tiny", workload=Workload(model="m", batch_size=8))
    assert product(b) == 0
    graph = b.build(StepGraph)
    assert graph.ops[0] == t.Compute(
        id=0, name="aten.mm", phase=t.Phase.FORWARD, module="mlp", inputs=(0, 1), outputs=(2,), flops=256,
        bytes_read=96, bytes_written=64, attributes=t.Gemm(transpose_b=True),
    )  # fmt: skip
    assert graph.tensors[2] == t.Tensor(
        id=2, name="y", shape=(8, 4), dtype=t.DType.BF16, role=t.TensorRole.ACTIVATION
    )
    assert graph.tensors[2].nbytes == 64
    assert (graph.name, graph.workload.batch_size, graph.world_size, graph.unfolded_ops) == ("tiny", 8, 1, 1)


def test_without_a_program_the_main_block_runs_once() -> None:
    b = GraphBuilder()
    product(b)
    assert b.build(StepGraph).programs[0].calls.tolist() == [[0, 0, 1, 0, 0]]


def test_an_empty_graph_builds() -> None:
    graph = GraphBuilder().build(StepGraph)
    assert (len(graph.ops), len(graph.tensors), graph.unfolded_ops) == (0, 0, 0)


def test_tables_keep_one_entry_for_equal_things() -> None:
    b = GraphBuilder()
    assert b.stream("compute") == 0
    assert b.stream("copy") == b.stream("copy") == 1
    assert b.group("g", ranks=(0, 1)) == b.group("g", ranks=(0, 1)) == 0
    assert b.group("g", ranks=(0, 2)) == 1
    assert b.attribute(t.Gemm()) == b.attribute(t.Gemm()) == 0
    assert b.string("a") == b.string("a")


def test_add_copies_an_operation_of_any_kind_with_changes() -> None:
    graph = GRAPHS["kinds"]()
    b = GraphBuilder(streams=graph.streams)
    b.mesh = graph.mesh
    b.group("dp", axes=("dp",))
    for tensor in graph.tensors:
        b.tensor(tensor.name, tensor.shape, tensor.dtype, tensor.role)
    for op in graph.ops:
        b.add(op)
    b.add(graph.ops[10], flops=99, outputs=())
    copy = b.build(type(graph))
    assert list(copy.ops)[:-1] == list(graph.ops)
    assert copy.ops[-1].flops == 99


def test_an_argument_that_no_operation_has_is_refused() -> None:
    with pytest.raises(TypeError, match="flavour"):
        GraphBuilder().host("x", flavour=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1])
def test_a_number_beyond_64_bits_is_refused_by_operation(number: int) -> None:
    long = t.Duration(device="cpu", picoseconds=number, source=t.Source.MEASURED)
    with pytest.raises(GraphError, match="operation 'long' has a number beyond 64 bits"):
        GraphBuilder().host("long", durations=(long,))
    with pytest.raises(GraphError, match="operation 'large' has a number beyond 64 bits"):
        GraphBuilder().compute("large", flops=number)


def test_half_a_surrogate_pair_does_not_reach_a_file() -> None:
    b = GraphBuilder()
    b.host("a\ud83db")
    b.host("a\ud83db")
    graph = decode(b"".join(encode(b.build(StepGraph))))
    assert [op.name for op in graph.ops] == ["a?b", "a?b"]


def test_build_verifies() -> None:
    b = GraphBuilder()
    b.compute("aten.mm", inputs=(0,))
    with pytest.raises(GraphError, match="tensors_in_block"):
        b.build(StepGraph)


@pytest.mark.parametrize("name", GRAPHS)
def test_the_same_calls_make_the_same_graph(name: str) -> None:
    assert list(to_text(GRAPHS[name]())) == list(to_text(GRAPHS[name]()))
