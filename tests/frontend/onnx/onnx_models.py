"""Small ONNX models made by hand, and what tests look at in a step graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from echograph.ir.graph import StepGraph
from echograph.ir.types import Compute, Convolution, Gemm
from echograph.ir.unfold import unfold

Shape = Sequence[int | str]


def value(name: str, shape: Shape | None, dtype: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, dtype, shape)


def weight(name: str, *shape: int) -> TensorProto:
    return numpy_helper.from_array(np.zeros(shape, np.float32), name)


def ints(name: str, *numbers: int) -> TensorProto:
    return numpy_helper.from_array(np.array(numbers, np.int64), name)


def model(
    nodes: Sequence[NodeProto],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    initializers: Sequence[TensorProto] = (),
    *,
    opset: int = 20,
    **fields: Any,
) -> ModelProto:
    graph = helper.make_graph(nodes, "test", inputs, outputs, initializers, **fields.pop("graph", {}))
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], **fields)
    made.ir_version = 10
    return made


def save(proto: ModelProto, folder: Path, name: str = "model.onnx") -> Path:
    path = folder / name
    path.write_bytes(proto.SerializeToString())
    return path


def layers(count: int = 3, width: int = 16, vocabulary: int = 50) -> ModelProto:
    """Token embedding, equal layers of norm, attention-like products and a bias, and a head of logits."""
    nodes = [helper.make_node("Gather", ["embed.weight", "tokens"], ["x0"], name="/embed/Gather")]
    weights = [weight("embed.weight", vocabulary, width), weight("head.weight", width, vocabulary)]
    for i in range(count):
        at, x = f"/layers.{i}", f"x{i}"
        weights += [weight(f"layers.{i}.{n}", width) for n in ("norm.weight", "norm.bias", "fc.bias")]
        weights += [weight(f"onnx::MatMul_{i}", width, width)]
        nodes += [
            helper.make_node("LayerNormalization", [x, f"layers.{i}.norm.weight", f"layers.{i}.norm.bias"],
                             [f"n{i}"], name=f"{at}/norm/LayerNormalization"),
            helper.make_node("Transpose", [f"n{i}"], [f"t{i}"], perm=[0, 2, 1], name=f"{at}/Transpose"),
            helper.make_node("MatMul", [f"n{i}", f"t{i}"], [f"s{i}"], name=f"{at}/MatMul"),
            helper.make_node("Softmax", [f"s{i}"], [f"p{i}"], name=f"{at}/Softmax"),
            helper.make_node("MatMul", [f"p{i}", f"n{i}"], [f"a{i}"], name=f"{at}/MatMul_1"),
            helper.make_node("MatMul", [f"a{i}", f"onnx::MatMul_{i}"], [f"f{i}"], name=f"{at}/fc/MatMul"),
            helper.make_node("Add", [f"f{i}", f"layers.{i}.fc.bias"], [f"b{i}"], name=f"{at}/fc/Add"),
            helper.make_node("Add", [f"b{i}", x], [f"x{i + 1}"], name=f"{at}/Add"),
        ]  # fmt: skip
    nodes.append(helper.make_node("MatMul", [f"x{count}", "head.weight"], ["logits"], name="/head/MatMul"))
    tokens = value("tokens", ["batch", "sequence"], TensorProto.INT64)
    return model(nodes, [tokens], [value("logits", ["batch", "sequence", vocabulary])], weights)


def picture(channels: int = 8) -> ModelProto:
    """Convolution, batch norm, pooling, a dense layer: its flattening is computed from shapes."""
    nodes = [
        helper.make_node("Conv", ["image", "conv.weight"], ["c"], pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("BatchNormalization", ["c", "bn.weight", "bn.bias", "bn.mean", "bn.var"], ["b"]),
        helper.make_node("Relu", ["b"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["g"]),
        helper.make_node("Shape", ["g"], ["shape"]),
        helper.make_node("Gather", ["shape", "zero"], ["batch"]),
        helper.make_node("Concat", ["batch", "rest"], ["flat"], axis=0),
        helper.make_node("Reshape", ["g", "flat"], ["f"]),
        helper.make_node("Gemm", ["f", "fc.weight", "fc.bias"], ["scores"], transB=1),
    ]  # fmt: skip
    weights = [weight("conv.weight", channels, 3, 3, 3), weight("fc.weight", 10, channels), weight("fc.bias", 10)]
    weights += [weight(f"bn.{name}", channels) for name in ("weight", "bias", "mean", "var")]
    constants = [ints("zero", 0), ints("rest", -1)]
    return model(nodes, [value("image", ["n", 3, 32, 32])], [value("scores", ["n", 10])], [*weights, *constants])


def operations(graph: StepGraph) -> Iterator[tuple[Compute, list[Any], list[Any]]]:
    """The compute operations of the unfolded graph with their tensors."""
    whole = unfold(graph)
    for row in range(len(whole.ops)):
        op = whole.ops[row]
        if isinstance(op, Compute):
            yield op, [whole.tensors[i] for i in op.inputs], [whole.tensors[i] for i in op.outputs]


def products(graph: StepGraph) -> Counter[tuple[Any, ...]]:
    """The multiset of products: (phase, batch, m, k, n) of each, and of a convolution its form and shapes."""
    found: Counter[tuple[Any, ...]] = Counter()
    for op, inputs, _ in operations(graph):
        if isinstance(op.attributes, Gemm):
            a, b = [t.shape for t in inputs if len(t.shape) >= 2][-2:]
            found[op.phase.name, prod(a[:-2]), a[-2], a[-1], b[-1]] += 1
        elif isinstance(op.attributes, Convolution):
            found[op.phase.name, op.attributes, *(t.shape for t in inputs if len(t.shape) > 2)] += 1
    return found


def flops(graph: StepGraph) -> Counter[str]:
    """FLOPs by phase."""
    found: Counter[str] = Counter()
    for op, _, _ in operations(graph):
        found[op.phase.name] += op.flops
    return found


def forward(found: Counter[tuple[Any, ...]]) -> Counter[tuple[Any, ...]]:
    """The products of the forward pass."""
    return Counter({key: count for key, count in found.items() if key[0] == "FORWARD"})
