"""Folding changes nothing but the size, and only what repeats exactly is folded."""

from __future__ import annotations

from dataclasses import replace

from graphs import Model, build, copy_with, models
from hypothesis import given
from hypothesis import strategies as st

from echograph.ir import types as t
from echograph.ir.graph import StepGraph
from echograph.ir.passes.fold import Fold
from echograph.ir.unfold import difference, unfold
from echograph.ir.verify import verify

layered = models(min_layers=2, odd=False)


def in_layers(graph: StepGraph, model: Model) -> list[int]:
    return [op.id for op in graph.ops if op.module.startswith(f"{model.prefix}.")]


@given(models())
def test_unfolding_a_folded_graph_gives_it_back(model: Model) -> None:
    graph = build(model)
    folded = Fold()(graph)
    verify(folded)
    assert difference(unfold(folded), graph) is None
    assert folded.unfolded_ops == len(graph.ops)
    assert Fold()(folded) is folded


@given(layered)
def test_layers_that_repeat_stand_once(model: Model) -> None:
    graph = build(model)
    folded = Fold()(graph)
    (block,) = folded.blocks[1:]
    assert [i.label for i in block.instances] == [str(k) for k in range(model.layers)]
    repeated = len(in_layers(graph, model)) // model.layers
    assert len(block.ops) == repeated
    assert len(folded.ops) == len(graph.ops) - (model.layers - 1) * repeated
    assert len(folded.tensors) < len(graph.tensors) + sum(folded.tensors.port)


MUTATIONS = {
    "operator": lambda op: {"operator": "other"},
    "phase": lambda op: {"phase": t.Phase.RECOMPUTE},
    "module": lambda op: {"module": f"{op.module}.x"},
    "flops": lambda op: {"flops": op.flops + 1},
    "bytes_read": lambda op: {"bytes_read": op.bytes_read + 1},
    "bytes_written": lambda op: {"bytes_written": op.bytes_written + 1},
    "attributes": lambda op: {"attributes": t.MultiTensor(parts=9)},
    "inputs": lambda op: {"inputs": (*op.inputs, op.inputs[0])},
    "durations": lambda op: {
        "durations": (*op.durations, t.Duration(device="b200", picoseconds=1, source=t.Source.MEASURED))
    },
}


@given(layered, st.sampled_from(sorted(MUTATIONS)), st.data())
def test_a_layer_with_one_operation_changed_is_left_out(model: Model, what: str, data: st.DataObject) -> None:
    graph = build(model)
    row = data.draw(st.sampled_from(in_layers(graph, model)))
    label = graph.ops[row].module.removeprefix(f"{model.prefix}.").split(".")[0]
    changed = copy_with(graph, {row: MUTATIONS[what](graph.ops[row])})
    folded = Fold()(changed)
    assert difference(unfold(folded), changed) is None
    assert difference(unfold(folded), graph) is not None
    whole_layers = [b for b in folded.blocks if b.name == model.prefix]
    assert label not in [i.label for b in whole_layers for i in b.instances]
    if model.layers > 2:
        assert sum(len(b.instances) for b in whole_layers) == model.layers - 1


@given(layered, st.sampled_from(["role", "dtype", "shape", "name"]), st.data())
def test_a_layer_with_one_tensor_changed_is_left_out(model: Model, what: str, data: st.DataObject) -> None:
    graph = build(replace(model, kinds=(*model.kinds, "linear")))
    made = [i for row in in_layers(graph, model) for i in graph.ops[row].outputs]
    tensor = data.draw(st.sampled_from(made))
    change = {"role": t.TensorRole.BUFFER, "dtype": t.DType.FP64, "shape": (2, 16), "name": "another"}
    changed = copy_with(graph, {}, {tensor: {what: change[what]}})
    folded = Fold()(changed)
    assert difference(unfold(folded), changed) is None
    assert difference(changed, graph) is not None
    op = graph.ops[int(graph.maker[tensor])]
    label = op.module.removeprefix(f"{model.prefix}.").split(".")[0]
    assert label not in [i.label for b in folded.blocks if b.name == model.prefix for i in b.instances]
