"""Control flow that shapes and constants decide is followed; what data decide is chosen, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_models as m
import pytest
from onnx import TensorProto, helper, numpy_helper

from echograph.errors import CaptureError, InputError
from echograph.frontend.onnx.call import step_type
from echograph.frontend.onnx.compile import Compiled, compile_onnx
from echograph.frontend.onnx.model import read
from echograph.frontend.pytorch.spec import StepSpec

node = helper.make_node


def compiled(proto: Any, folder: Path, dims: dict[str, int] | None = None, **options: Any) -> Compiled:
    model = read(m.save(proto, folder), dims)
    return compile_onnx(model, StepSpec(dtype=step_type(model)), **options)


def body(nodes: list[Any], inputs: list[Any], outputs: list[str], weights: list[Any] | None = None) -> Any:
    results = [helper.make_empty_tensor_value_info(name) for name in outputs]
    return helper.make_graph(nodes, "body", inputs, results, weights or [])


def product(weight: str, width: int) -> Any:
    """A branch: the product with a weight of its own, called the same in both."""
    made = numpy_helper.from_array(np.zeros((3, width), np.float32), "w")
    return body(
        [node("MatMul", ["x", "w"], ["r"], name=weight), node("ReduceSum", ["r"], ["s"])], [], ["s"], [made]
    )


def branching(condition: list[Any], inputs: list[Any]) -> Any:
    nodes = [
        *condition,
        node("If", ["c"], ["y"], name="which", then_branch=product("a", 5), else_branch=product("b", 7)),
    ]
    return m.model(nodes, [m.value("x", ["n", 3]), *inputs], [m.value("y", None)])


def test_a_branch_that_a_shape_decides_on(tmp_path: Path) -> None:
    limit = m.ints("two", 2)
    condition = [node("Shape", ["x"], ["shape"], end=1), node("Less", ["shape", "two"], ["c"])]
    proto = branching(condition, [])
    proto.graph.initializer.append(limit)
    for n, width in ((1, 5), (4, 7)):
        graph, _, notes = compiled(proto, tmp_path, {"n": n})
        assert m.flops(graph) == {"FORWARD": 2 * n * 3 * width}
        assert graph.workload.parameters == 3 * width  # those of the branch that is taken, and no other's
        assert notes == ()


def test_a_branch_that_data_decide_on(tmp_path: Path) -> None:
    proto = branching([], [m.value("c", [], TensorProto.BOOL)])
    with pytest.raises(CaptureError, match=r"node 'which' \(If\): its condition depends on data: .*--branch then"):
        compiled(proto, tmp_path, {"n": 2})
    for branch, width in (("then", 5), ("else", 7)):
        graph, _, notes = compiled(proto, tmp_path, {"n": 2}, branch=branch)
        assert m.flops(graph) == {"FORWARD": 2 * 2 * 3 * width}
        assert notes == (f"If 'which': its condition depends on data; took '{branch}'",)
        trained = compiled(proto, tmp_path, {"n": 2}, branch=branch, train=True).graph
        assert trained.workload.parameters == 3 * width


def looping(trips: Any, going: str = "going") -> Any:
    inputs = [m.value("i", [], TensorProto.INT64), m.value("going", [], TensorProto.BOOL), m.value("h", None)]
    nodes = [
        node("MatMul", ["h", "w"], ["next"], name="step"), node("Identity", [going], ["goes_on"]),
        node("Identity", ["next"], ["shown"]),
    ]  # fmt: skip
    inner = body(nodes, inputs, ["goes_on", "next", "shown"])
    loop = node("Loop", ["trips", "", "x"], ["last", "all"], name="loop", body=inner)
    return m.model(
        [loop],
        [m.value("x", [2, 4]), *trips],
        [m.value("last", None), m.value("all", None)],
        [m.weight("w", 4, 4)],
    )


def test_a_loop_runs_as_often_as_a_constant_says(tmp_path: Path) -> None:
    proto = looping([])
    proto.graph.initializer.append(numpy_helper.from_array(np.array(5, np.int64), "trips"))
    graph, *_ = compiled(proto, tmp_path)
    assert m.flops(graph) == {"FORWARD": 5 * 2 * 2 * 4 * 4}
    assert graph.workload.parameters == 16
    assert (5, 2, 4) in {out[0].shape for _, _, out in m.operations(graph)}


def test_a_loop_that_data_bound(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"node 'loop' \(Loop\): its trip count depends on data"):
        compiled(looping([m.value("trips", [], TensorProto.INT64)]), tmp_path)


def test_a_scan_runs_once_a_slice(tmp_path: Path) -> None:
    inner = body(
        [
            node("MatMul", ["h", "w"], ["p"]), node("Add", ["p", "part"], ["next"]),
            node("Relu", ["next"], ["shown"]),
        ],
        [m.value("h", [2, 4]), m.value("part", [2, 4])], ["next", "shown"],
    )  # fmt: skip
    scan = node("Scan", ["x", "xs"], ["last", "all"], num_scan_inputs=1, body=inner)
    proto = m.model(
        [scan], [m.value("x", [2, 4]), m.value("xs", [6, 2, 4])], [m.value("last", None), m.value("all", None)],
        [m.weight("w", 4, 4)],
    )  # fmt: skip
    graph, *_ = compiled(proto, tmp_path)
    assert m.flops(graph) == {"FORWARD": 6 * 2 * 2 * 4 * 4}


def test_graphs_nested_without_end(tmp_path: Path) -> None:
    leaf = inner = body([node("Relu", ["x"], ["r0"])], [], ["r0"])
    for depth in range(20):
        name = f"r{depth + 1}"
        inner = body([node("If", ["c"], [name], then_branch=inner, else_branch=leaf)], [], [name])
    proto = m.model(
        [node("If", ["c"], ["y"], then_branch=inner, else_branch=leaf)], [m.value("x", [3])], [m.value("y", None)]
    )
    proto.graph.input.append(m.value("c", [], TensorProto.BOOL))
    with pytest.raises(InputError, match="nested more than"):
        read(m.save(proto, tmp_path))


def test_a_node_that_no_branch_can_run_is_named(tmp_path: Path) -> None:
    odd = body([node("NonZero", ["x"], ["s"], name="odd")], [], ["s"])
    proto = m.model(
        [node("If", ["c"], ["y"], then_branch=odd, else_branch=product("b", 5))],
        [m.value("x", [2, 3])],
        [m.value("y", None)],
    )
    proto.graph.initializer.append(numpy_helper.from_array(np.array(True), "c"))
    with pytest.raises(CaptureError, match=r"node 'odd' \(NonZero\): it is not known"):
        compiled(proto, tmp_path)
    proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.array(False), "c"))
    assert m.flops(compiled(proto, tmp_path).graph) == {"FORWARD": 2 * 2 * 3 * 5}


def test_weights_of_integers_count_as_parameters(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(np.ones((3, 5), np.int8), "w")
    zeros = [numpy_helper.from_array(np.array(0, np.int8), name) for name in ("za", "zb")]
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["q", "scale", "z"]),
        node("MatMulInteger", ["q", "w", "z", "zb"], ["p"]), node("Cast", ["p"], ["f"], to=1),
        node("Mul", ["f", "scale"], ["y"]),
    ]  # fmt: skip
    proto = m.model(nodes, [m.value("x", [2, 3])], [m.value("y", [2, 5])], [weight, *zeros])
    graph, _, notes = compiled(proto, tmp_path)
    assert m.flops(graph) == {"FORWARD": 2 * 2 * 3 * 5}
    assert graph.workload.parameters == 15
    assert "1 weights are integers (15 elements" in notes[0]


def test_a_resize_by_scales_that_are_an_initializer(tmp_path: Path) -> None:
    scales = numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "scales")
    nodes = [node("Resize", ["x", "", "scales"], ["r"], mode="nearest"), node("Conv", ["r", "w"], ["y"])]
    proto = m.model(nodes, [m.value("x", [1, 3, 4, 4])], [m.value("y", None)], [scales, m.weight("w", 2, 3, 1, 1)])
    graph, *_ = compiled(proto, tmp_path)
    assert m.flops(graph) == {"FORWARD": 2 * 8 * 8 * 3 * 2}
    assert graph.workload.parameters == 6
