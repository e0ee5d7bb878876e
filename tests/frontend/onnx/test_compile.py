"""ONNX models as step graphs: products and FLOPs in closed form, losses, types, layers, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx_models as m
import pytest
from onnx import TensorProto, helper

from echograph.errors import CaptureError, EchoError, UsageError
from echograph.frontend.onnx import load
from echograph.frontend.onnx.call import step_type
from echograph.frontend.onnx.compile import Compiled, compile_onnx
from echograph.frontend.onnx.model import read
from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir.types import DType, Phase, TensorRole

B, S, W, V = 4, 8, 16, 50


def compiled(
    proto: Any, folder: Path, dims: dict[str, int], *, train: bool = False, loss: str = "auto", **spec: Any
) -> Compiled:
    model = read(m.save(proto, folder), dims)
    return compile_onnx(model, StepSpec(**{"dtype": step_type(model), **spec}), train=train, loss=loss)


def layers(folder: Path, **options: Any) -> Compiled:
    return compiled(m.layers(3), folder, {"batch": B, "sequence": S}, **options)


def test_forward_products_and_flops(tmp_path: Path) -> None:
    graph, loss, _ = layers(tmp_path)
    assert loss == ""
    assert m.products(graph) == {
        ("FORWARD", B, S, W, S): 3, ("FORWARD", B, S, S, W): 3, ("FORWARD", 1, B * S, W, W): 3,
        ("FORWARD", 1, B * S, W, V): 1,
    }  # fmt: skip
    assert m.flops(graph) == {"FORWARD": 2 * B * S * (3 * (W * S + S * W + W * W) + W * V)}
    assert graph.workload.parameters == V * W + W * V + 3 * (3 * W + W * W)
    assert (graph.workload.batch_size, graph.workload.sequence_length, graph.workload.optimizer) == (B, S, "")


def test_each_product_has_two_gradients(tmp_path: Path) -> None:
    graph, loss, _ = layers(tmp_path, train=True)
    assert loss == "cross-entropy of 'logits'"
    # dA of [m, k] x [k, n] is [m, n] x [n, k], dB is [k, m] x [m, n].
    expected: Counter[Any] = Counter()
    for (_, batch, rows, inner, columns), count in m.forward(m.products(graph)).items():
        expected["BACKWARD", batch, rows, columns, inner] += count
        expected["BACKWARD", batch, inner, rows, columns] += count
    found = Counter({key: n for key, n in m.products(graph).items() if key[0] == "BACKWARD"})
    # torch takes the gradient of a weight transposed or not: [k, m] x [m, n] or [n, m] x [m, k].
    assert _untransposed(found) == _untransposed(expected)
    assert m.flops(graph)["BACKWARD"] == 2 * m.flops(graph)["FORWARD"]


def _untransposed(found: Counter[Any]) -> Counter[Any]:
    made: Counter[Any] = Counter()
    for (_, batch, rows, inner, columns), count in found.items():
        made[batch, inner, *sorted((rows, columns))] += count
    return made


def test_layers_fold(tmp_path: Path) -> None:
    for train in (False, True):
        blocks = layers(tmp_path, train=train).graph.blocks
        assert [(b.name, len(b.instances)) for b in blocks] == [("main", 1), ("layers", 3)]


def test_gradients_and_optimizer_of_every_weight(tmp_path: Path) -> None:
    graph, *_ = layers(tmp_path, train=True, dtype="bf16", optimizer="adamw", clip_grad_norm=1.0)
    updates = [o for o, _, _ in m.operations(graph) if o.name == "aten._fused_adamw_"]
    assert len(updates) == 2 + 3 * 4
    roles = Counter(int(role) for role in graph.tensors.role)
    assert roles[TensorRole.OPTIMIZER_STATE] and roles[TensorRole.GRADIENT]
    assert graph.workload.master_weights and graph.workload.dtype == DType.BF16


def test_a_picture_model_flattens_by_its_shape(tmp_path: Path) -> None:
    graph, loss, _ = compiled(m.picture(), tmp_path, {"n": 2}, train=True)
    assert loss == "cross-entropy of 'scores'"
    positions, channels = 16 * 16, 8
    convolution = 2 * 2 * positions * channels * 3 * 9
    dense = 2 * 2 * channels * 10
    # The picture needs no gradient, so the first convolution has only its weight's.
    assert m.flops(graph) == {"FORWARD": convolution + dense, "BACKWARD": convolution + 2 * dense, "OPTIMIZER": 0}
    assert not any(o.name.startswith("aten.arange") for o, _, _ in m.operations(graph))


def test_statistics_of_a_batch_norm_are_buffers_and_follow_the_batch_in_training(tmp_path: Path) -> None:
    graph, *_ = compiled(m.picture(), tmp_path, {"n": 2}, train=True)
    buffers = {t.name for _, inputs, _ in m.operations(graph) for t in inputs if t.role == TensorRole.BUFFER}
    assert {"bn.mean", "bn.var"} <= buffers
    names = Counter(o.name for o, _, _ in m.operations(graph))
    assert names["aten.native_batch_norm_backward"] == 1


def test_a_value_used_twice_sums_its_gradients(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Tanh", ["h"], ["a"]),
        helper.make_node("Sigmoid", ["h"], ["b"]), helper.make_node("Mul", ["a", "b"], ["y"]),
    ]  # fmt: skip
    proto = m.model(nodes, [m.value("x", [2, 3])], [m.value("y", [2, 4])], [m.weight("w", 3, 4)])
    graph, loss, _ = compiled(proto, tmp_path, {}, train=True)
    assert loss == "sum of the outputs"
    backward = [o.name for o, _, _ in m.operations(graph) if o.phase == Phase.BACKWARD]
    assert backward.count("aten.add") == 1


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        ("auto", "cross-entropy of 'logits'"),
        ("sum", "sum of the outputs"),
        ("cross-entropy", "cross-entropy of 'logits'"),
    ],
)
def test_losses(loss: str, says: str, tmp_path: Path) -> None:
    assert layers(tmp_path, train=True, loss=loss).loss == says


def test_losses_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--loss output: 'logits' is not a scalar"):
        layers(tmp_path, train=True, loss="output")
    with pytest.raises(UsageError, match="unknown loss 'sun': did you mean 'sum'"):
        layers(tmp_path, train=True, loss="sun")


def test_a_scalar_output_is_the_loss(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("SoftmaxCrossEntropyLoss", ["h", "t"], ["loss"]),
    ]
    proto = m.model(
        nodes,
        [m.value("x", [2, 3]), m.value("t", [2], TensorProto.INT64)],
        [m.value("loss", [])],
        [m.weight("w", 3, 4)],
    )
    assert compiled(proto, tmp_path, {}, train=True).loss == "output 'loss'"


def test_the_step_type_stands_for_the_files_main_type_casts_included(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Cast", ["h"], ["d"], to=TensorProto.DOUBLE),
        helper.make_node("Cast", ["d"], ["s"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["s", "k"], ["y"]),
    ]  # fmt: skip
    scale = helper.make_tensor("k", TensorProto.FLOAT, [1], [0.5])
    proto = m.model(nodes, [m.value("x", [2, 3])], [m.value("y", [2, 4])], [m.weight("w", 3, 4), scale])
    graph, *_ = compiled(proto, tmp_path, {}, dtype="bf16")
    types = [outputs[0].dtype for _, _, outputs in m.operations(graph)]
    assert types == [DType.BF16, DType.FP64, DType.BF16, DType.BF16]


def test_unknown_operators_are_named_by_node(tmp_path: Path) -> None:
    nodes = [helper.make_node("Foo", ["x"], [f"y{i}"], name=f"n{i}", domain="com.acme") for i in range(5)]
    nodes.append(helper.make_node("NonZero", ["x"], ["z"], name="nz"))
    proto = m.model(nodes, [m.value("x", [3])], [m.value("y0", [3])])
    with pytest.raises(CaptureError, match=r"'n0' \(com.acme.Foo\), 'n1' .*, 'n2' .*, \.\.\. \(6 in all\)"):
        compiled(proto, tmp_path, {})


def test_what_a_node_does_not_take_names_the_node(tmp_path: Path) -> None:
    proto = m.model(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="fc")], [m.value("x", [2, 5])], [m.value("y", [2, 4])],
        [m.weight("w", 3, 4)],
    )  # fmt: skip
    with pytest.raises(CaptureError, match=r"node 'fc' \(MatMul\) does not take \[2, 5\], \[3, 4\]"):
        compiled(proto, tmp_path, {})


def test_a_shape_that_depends_on_data(tmp_path: Path) -> None:
    proto = m.model(
        [helper.make_node("Reshape", ["x", "s"], ["y"], name="r")],
        [m.value("x", [6]), m.value("s", [2], TensorProto.INT64)], [m.value("y", [2, 3])],
    )  # fmt: skip
    with pytest.raises(CaptureError, match="its input 's' must be a constant or follow from shapes"):
        compiled(proto, tmp_path, {})


@pytest.mark.parametrize("extent", [2**31, 2**40, 2**62])
def test_absurd_sizes(extent: int, tmp_path: Path) -> None:
    for train in (False, True):
        with pytest.raises(EchoError):
            layers_of = compiled(m.layers(1), tmp_path, {"batch": extent, "sequence": extent}, train=train)
            pytest.fail(f"{layers_of.graph.name} is of no machine")


def test_small_constants_that_broadcast_to_a_huge_one_take_no_memory(tmp_path: Path) -> None:
    n = 2**14
    numbers = np.zeros(n, np.int64)
    shapes = ([n, 1, 1], [1, n, 1], [1, 1, n])
    constants = [helper.make_tensor(f"c{i}", TensorProto.INT64, shape, numbers) for i, shape in enumerate(shapes)]
    nodes = [
        helper.make_node("Add", ["c0", "c1"], ["a"]), helper.make_node("Add", ["a", "c2"], ["y"]),
    ]  # fmt: skip
    proto = m.model(nodes, [], [m.value("y", [n, n, n], TensorProto.INT64)], constants)
    graph, *_ = compiled(proto, tmp_path, {})  # 32 TiB if it were computed
    assert [outputs[0].shape for _, _, outputs in m.operations(graph)] == [(n, n, 1), (n, n, n)]


def test_import_is_the_forward_pass(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    proto = m.model(nodes, [m.value("x", [2, 3])], [m.value("y", [2, 4])], [m.weight("w", 3, 4)])
    imported = load(m.save(proto, tmp_path))
    assert m.flops(imported.graph) == {"FORWARD": 2 * 2 * 3 * 4}  # type: ignore[arg-type]
    assert "--train" in imported.notes[0]
