"""Folding where names, aliases and dependencies are out of the ordinary. The usual is in tests/properties."""

from __future__ import annotations

import pytest
from conformance_graphs import GRAPHS

from echograph.errors import GraphError
from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import StepGraph
from echograph.ir.passes.fold import Fold
from echograph.ir.unfold import difference, unfold

A, P = t.TensorRole.ACTIVATION, t.TensorRole.PARAMETER


def tensor(b: GraphBuilder, name: str, alias_of: int | None = None, role: t.TensorRole = A) -> int:
    return b.tensor(name, (4,), t.DType.FP32, role, alias_of=alias_of)


def layers(b: GraphBuilder, x: int, count: int = 3, name: str = "layers.{k}.y", **common: object) -> int:
    for k in range(count):
        y = tensor(b, name.replace("{k}", str(k)))
        b.compute("exp", inputs=(x,), outputs=(y,), flops=1, module=f"layers.{k}", **common)
        x = y
    return x


def folds(b: GraphBuilder) -> StepGraph:
    graph = b.build(StepGraph)
    folded = Fold()(graph)
    assert difference(unfold(folded), graph) is None
    return folded


def test_two_layers_by_hand_are_what_folding_makes() -> None:
    graph = GRAPHS["two_layers"]()
    again = Fold()(unfold(graph))
    assert [len(b.instances) for b in again.blocks] == [1, 2]
    assert Fold()(again) is again
    assert difference(unfold(again), unfold(graph)) is None


def test_views_of_a_tensor_that_nothing_reads() -> None:
    b = GraphBuilder()
    base = tensor(b, "base", role=P)
    for k in range(3):
        view = tensor(b, f"layers.{k}.view", alias_of=base)
        b.compute("slice", outputs=(view,), module=f"layers.{k}")
    assert len(folds(b).blocks) == 2


def test_a_parameter_that_only_layers_share() -> None:
    b = GraphBuilder()
    shared = tensor(b, "shared", role=P)
    for k in range(2):
        b.compute("use", inputs=(shared,), module=f"layers.{k}")
    assert len(folds(b).blocks) == 2


def test_an_alias_that_nothing_touches_of_a_tensor_that_a_layer_owns() -> None:
    b = GraphBuilder()
    for k in range(2):
        w = tensor(b, f"layers.{k}.w", role=P)
        tensor(b, f"other name of {k}", alias_of=w)
        b.compute("use", inputs=(w,), module=f"layers.{k}")
    assert len(folds(b).blocks) == 2


def test_dependencies_across_layers_keep_them_apart() -> None:
    b = GraphBuilder()
    x = layers(b, tensor(b, "x", role=t.TensorRole.INPUT))
    b.compute("end", inputs=(x,), deps=(1,))
    (block,) = folds(b).blocks[1:]
    assert [i.label for i in block.instances] == ["0", "2"]


def test_a_name_with_braces_is_not_folded() -> None:
    b = GraphBuilder()
    layers(b, tensor(b, "x"), name="layers.{k}.y{}")
    assert len(folds(b).blocks) == 1


def test_layers_under_layers() -> None:
    b = GraphBuilder()
    x = tensor(b, "x", role=t.TensorRole.INPUT)
    for k, operator in enumerate("aab"):
        for j in range(2):
            y = tensor(b, f"stage.{k}.block.{j}.y")
            b.compute(operator, inputs=(x,), outputs=(y,), flops=1, module=f"stage.{k}.block.{j}")
            x = y
    folded = folds(b)
    assert [(block.name, [i.label for i in block.instances]) for block in folded.blocks[1:]] == [
        ("stage", ["0", "1"]),
        ("stage.2.block", ["0", "1"]),
    ]


def test_one_layer_is_not_a_block() -> None:
    b = GraphBuilder()
    layers(b, tensor(b, "x"), count=1)
    graph = b.build(StepGraph)
    assert Fold()(graph) is graph


@pytest.mark.parametrize("call", [(0, 0, 1, 0, 0), (0, 1, 2, 0, 0)])
def test_a_reference_to_what_does_not_run_is_named(call: tuple[int, ...]) -> None:
    b = GraphBuilder()
    b.host("first")
    b.host("second")
    b.begin_block("other")
    b.host("a")
    b.host("b", deps=(2,))
    b.instance(1)
    b.program([call, (1, 3, 4, 0, 0)])
    with pytest.raises(GraphError, match=r"operation 3 \(b\) refers to operation 2"):
        unfold(b.build(StepGraph))


def test_differences_are_seen_in_tensors_that_no_operation_touches() -> None:
    graphs = []
    for name in ("one", "another"):
        b = GraphBuilder()
        layers(b, tensor(b, "x"))
        tensor(b, name)
        graphs.append(b.build(StepGraph))
    assert difference(*graphs) == "the tensors that no operation touches differ"
