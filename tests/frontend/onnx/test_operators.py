"""Every operator computes what ONNX's own reference implementation computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_models as m
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from echograph.frontend.onnx.call import DTypes
from echograph.frontend.onnx.model import read
from echograph.frontend.onnx.module import OnnxModule
from echograph.frontend.onnx.operators import OPERATORS
from echograph.frontend.pytorch.capture import capture_mode

F, INT = np.float32, np.int64
RNG = np.random.default_rng(7)


def f(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.uniform(0.1, 0.9, shape).astype(F)


def i(*numbers: int) -> np.ndarray[Any, Any]:
    return np.array(numbers, INT)


def case(operator: str, *inputs: Any, outputs: int = 1, opset: int = 22, **attributes: Any) -> Any:
    shapes = ",".join("x".join(map(str, a.shape)) if a is not None else "-" for a in inputs)
    name = f"{operator}-{shapes}-{opset}-" + "-".join(f"{k}={v}" for k, v in attributes.items())
    return pytest.param(operator, inputs, outputs, opset, attributes, id=name[:90])


UNARY = (
    "Abs", "Acos", "Asin", "Atan", "Ceil", "Cos", "Cosh", "Erf", "Exp", "Floor", "Log", "Neg", "Reciprocal",
    "Relu", "Round", "Sigmoid", "Sign", "Sin", "Sinh", "Sqrt", "Tan", "Tanh", "Softplus", "Softsign", "HardSwish",
    "Mish", "Identity", "IsNaN", "IsInf", "Atanh", "Asinh", "Gelu", "LeakyRelu", "Elu", "Celu", "Selu",
    "HardSigmoid", "ThresholdedRelu",
)  # fmt: skip
BINARY = ("Add", "Sub", "Mul", "Div", "Pow", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
REDUCE = [name for name in OPERATORS if name.startswith("Reduce")]
CASES = [
    *(case(name, f(2, 3)) for name in UNARY),
    *(case(name, f(2, 3), f(3)) for name in BINARY),
    *(case(name, f(2, 3), f(1)) for name in BINARY),
    *(case(name, f(1), f(2, 3)) for name in BINARY),
    *(case(name, f(2, 3, 4), i(0, 2), keepdims=0) for name in REDUCE),
    *(case(name, f(2, 3, 4)) for name in REDUCE),
    case("ReduceMean", f(2, 3, 4), opset=13, axes=[-1]),
    case("Div", i(7, -7), i(2, 2)),
    case("Mod", i(7, -7), i(3, 3)),
    case("Mod", f(4), f(4), fmod=1),
    case("Not", f(3) > 0.5),
    case("And", f(3) > 0.5, f(3) > 0.5),
    case("Xor", f(3) > 0.5, f(3) > 0.5),
    case("BitwiseAnd", i(5, 6), i(3, 3)),
    case("BitShift", np.array([1, 2], np.uint8), np.array([2, 1], np.uint8), direction="LEFT"),
    *(case(name, f(2, 3), f(3), f(2, 1)) for name in ("Sum", "Max", "Min", "Mean")),
    case("Clip", f(4), np.array(0.3, F), np.array(0.6, F)),
    case("Clip", f(4), None, np.array(0.6, F)),
    case("Where", f(2, 3) > 0.5, f(2, 3), f(3)),
    case("Cast", f(3), to=TensorProto.INT64),
    case("CastLike", f(3), i(1)),
    case("PRelu", f(2, 3) - F(0.5), f(3)),
    case("Gelu", f(4), approximate="tanh"),
    case("Softmax", f(2, 3, 4), axis=1),
    case("LogSoftmax", f(2, 3)),
    case("ArgMax", f(2, 3), axis=1, keepdims=0),
    case("ArgMin", f(2, 3), axis=0),
    case("TopK", f(2, 5), i(2), outputs=2),
    case("CumSum", f(2, 3), i(1)[0]),
    case("Shape", f(2, 3, 4)),
    case("Shape", f(2, 3, 4), start=1, end=2),
    case("Size", f(2, 3)),
    case("ConstantOfShape", i(2, 3)),
    case("Range", i(1)[0], i(9)[0], i(3)[0]),
    case("Reshape", f(2, 3, 4), i(0, -1)),
    case("Reshape", f(2, 3), i(3, 2), allowzero=1),
    case("Flatten", f(2, 3, 4), axis=2),
    case("Flatten", f(2, 3, 4), axis=-1),
    case("Squeeze", f(1, 3, 1), i(0)),
    case("Squeeze", f(1, 3, 1)),
    case("Squeeze", f(1, 3, 1), opset=11, axes=[2]),
    case("Unsqueeze", f(3), i(0, 2)),
    case("Unsqueeze", f(3), opset=11, axes=[-1]),
    case("Transpose", f(2, 3, 4)),
    case("Transpose", f(2, 3, 4), perm=[0, 2, 1]),
    case("Transpose", f(2, 3, 4), perm=[1, 2, 0]),
    case("Concat", f(2, 3), f(2, 1), axis=-1),
    case("Split", f(2, 5), i(2, 3), outputs=2, axis=1),
    case("Split", f(2, 4), outputs=2, axis=1, num_outputs=2),
    case("Slice", f(4, 5), i(1, 0), i(3, -1), i(0, 1)),
    case("Slice", f(4, 5), i(-1), i(-9), i(1), i(-2)),
    case("Slice", f(4, 5), i(0), i(2**62), i(0), i(2)),
    case("Expand", f(3, 1), i(2, 1, 4)),
    case("Tile", f(2, 3), i(2, 1)),
    case("Pad", f(2, 3), i(0, 1, 1, 0)),
    case("Pad", f(2, 3), i(1, 1), np.array(2.0, F), i(1)),
    case("Pad", f(1, 2, 3), i(0, 0, 1, 0, 0, 2), mode="reflect"),
    case("Trilu", f(3, 4), np.array(1, INT)),
    case("Trilu", f(3, 4), upper=0),
    case("DepthToSpace", f(1, 8, 2, 3), blocksize=2),
    case("DepthToSpace", f(1, 8, 2, 3), blocksize=2, mode="CRD"),
    case("SpaceToDepth", f(1, 2, 4, 6), blocksize=2),
    case("Gather", f(4, 3), i(0, -1, 2)),
    case("Gather", f(4, 3), np.array([[0, 1], [2, 3]], INT), axis=0),
    case("Gather", f(4, 3), np.array(1, INT), axis=1),
    case("Gather", f(2, 4, 3), np.array([[0, 1]], INT), axis=1),
    case("GatherElements", f(2, 3), np.array([[0, 2], [1, 1]], INT), axis=1),
    case("GatherND", f(2, 3, 4), np.array([[0, 2], [1, 1]], INT)),
    case("ScatterElements", f(2, 3), np.array([[0, 2]], INT), f(1, 2), axis=1),
    case("ScatterND", f(4, 3), np.array([[0], [2]], INT), f(2, 3)),
    case("OneHot", i(0, 2, 1), np.array(4, INT), np.array([0, 1], F)),
    case("MatMul", f(2, 3, 4), f(4, 5)),
    case("MatMul", f(2, 3, 4), f(2, 4, 5)),
    case("Gemm", f(3, 2), f(5, 3), f(5), transA=1, transB=1, alpha=0.5, beta=2.0),
    case("Gemm", f(2, 3), f(3, 5)),
    case("Einsum", f(2, 3), f(3, 4), equation="ij,jk->ik"),
    case("Conv", f(1, 2, 7, 7), f(4, 2, 3, 3), f(4), strides=[2, 2], pads=[1, 1, 1, 1]),
    case("Conv", f(1, 4, 7), f(4, 2, 3), group=2, dilations=[2], pads=[0, 2]),
    case("Conv", f(1, 2, 6, 6), f(4, 2, 3, 3), auto_pad="SAME_UPPER", strides=[2, 2]),
    case("ConvTranspose", f(1, 3, 5, 5), f(3, 2, 3, 3), strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 1]),
    case("MaxPool", f(1, 2, 6, 6), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    case("AveragePool", f(1, 2, 6, 6), kernel_shape=[2, 2], strides=[2, 2]),
    case("GlobalAveragePool", f(1, 2, 6, 6)),
    case("GlobalMaxPool", f(1, 2, 6, 6)),
    case("BatchNormalization", f(2, 3, 4), f(3), f(3), f(3), f(3)),
    case("InstanceNormalization", f(2, 3, 4), f(3), f(3)),
    case("GroupNormalization", f(2, 4, 3), f(4), f(4), num_groups=2),
    case("LayerNormalization", f(2, 3, 4), f(4), f(4)),
    case("LayerNormalization", f(2, 3, 4), f(3, 4), f(3, 4), axis=1),
    case("RMSNormalization", f(2, 3, 4), f(4), opset=23),
    case("LpNormalization", f(2, 3), axis=1),
    case("Dropout", f(2, 3)),
    case("Attention", f(1, 2, 4, 8), f(1, 2, 4, 8), f(1, 2, 4, 8), opset=23, is_causal=1),
    case("Attention", f(1, 4, 16), f(1, 4, 8), f(1, 4, 8), opset=23, q_num_heads=4, kv_num_heads=2),
    case("SoftmaxCrossEntropyLoss", f(4, 5), i(0, 3, 2, 4)),
    case("NegativeLogLikelihoodLoss", f(4, 5), i(0, 3, 2, 4), reduction="sum"),
    *(case(name, f(4, 2, 3), f(1, gates * 5, 3), f(1, gates * 5, 5), f(1, gates * 10), outputs=2, hidden_size=5)
      for name, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1))),
    *(case(name, f(4, 2, 3), f(2, gates * 5, 3), f(2, gates * 5, 5), outputs=2, hidden_size=5,
           direction="bidirectional") for name, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1))),
    case("LSTM", f(4, 2, 3), f(1, 20, 3), f(1, 20, 5), f(1, 40), None, f(1, 2, 5), f(1, 2, 5), f(1, 15),
         outputs=3, hidden_size=5),
    case("GRU", f(4, 2, 3), f(1, 15, 3), f(1, 15, 5), f(1, 30), outputs=2, hidden_size=5, linear_before_reset=1),
    case("QuantizeLinear", f(2, 3), np.array(0.01, F), np.array(7, np.uint8)),
    case("QuantizeLinear", f(2, 3), np.array([0.01, 0.02, 0.03], F), np.array([7, 8, 9], np.int8), axis=1),
    case("DequantizeLinear", np.array([[1, 250]], np.uint8), np.array(0.01, F), np.array(7, np.uint8)),
    case("DynamicQuantizeLinear", f(2, 3), outputs=3),
    case("MatMulInteger", np.array([[1, 250]], np.uint8), np.array([[3], [4]], np.uint8), np.array(7, np.uint8)),
    case("ConvInteger", np.arange(16, dtype=np.uint8).reshape(1, 1, 4, 4), np.ones((2, 1, 2, 2), np.uint8),
         np.array(3, np.uint8), pads=[1, 1, 1, 1]),
    case("QLinearMatMul", np.array([[1, 250]], np.uint8), np.array(0.1, F), np.array(7, np.uint8),
         np.array([[3], [4]], np.uint8), np.array(0.2, F), np.array(1, np.uint8), np.array(0.3, F),
         np.array(5, np.uint8)),
    case("QLinearConv", np.arange(16, dtype=np.uint8).reshape(1, 1, 4, 4), np.array(0.1, F), np.array(7, np.uint8),
         np.full((1, 1, 2, 2), 9, np.uint8), np.array(0.2, F), np.array(1, np.uint8), np.array(0.3, F),
         np.array(5, np.uint8)),
    case("CumProd", f(2, 3), i(1)[0], opset=26), case("Shrink", f(2, 3), lambd=0.4, bias=0.1),
    case("MeanVarianceNormalization", f(2, 3, 4, 4)), case("Hardmax", f(2, 3)), case("Det", f(3, 3)),
    case("EyeLike", f(3, 4), k=1), case("ReverseSequence", f(4, 3), i(1, 2, 4)),
    case("CenterCropPad", f(4, 3), i(2, 5)), case("HannWindow", i(8)[0]),
    case("HammingWindow", i(8)[0], periodic=0),
    case("BlackmanWindow", i(8)[0]), case("DFT", f(2, 8, 1), opset=19, axis=1, onesided=1),
    case("STFT", f(1, 16, 1), i(4)[0], None, i(8)[0]), case("GridSample", f(1, 1, 4, 4), f(1, 3, 3, 2)),
    case("AffineGrid", f(2, 2, 3), i(2, 3, 4, 5)), case("Col2Im", f(1, 5, 5), i(5, 5), i(1, 5)),
    case("RotaryEmbedding", f(1, 2, 3, 8), f(1, 3, 4), f(1, 3, 4), opset=23),
    case("Resize", f(1, 1, 2, 2), None, np.array([1, 1, 2, 2], F), mode="nearest", nearest_mode="floor",
         coordinate_transformation_mode="asymmetric"),
]  # fmt: skip


def _model(operator: str, inputs: Any, outputs: int, opset: int, attributes: Mapping[str, Any]) -> Any:
    names = [f"x{n}" if value is not None else "" for n, value in enumerate(inputs)]
    given = [
        m.value(name, list(value.shape), helper.np_dtype_to_tensor_dtype(value.dtype))
        for name, value in zip(names, inputs, strict=True)
        if name
    ]
    node = helper.make_node(operator, names, [f"y{n}" for n in range(outputs)], **attributes)
    results = [helper.make_empty_tensor_value_info(f"y{n}") for n in range(outputs)]
    return m.model([node], given, results, opset=opset)


@pytest.mark.parametrize(("operator", "inputs", "outputs", "opset", "attributes"), CASES)
def test_as_the_reference(
    operator: str, inputs: Any, outputs: int, opset: int, attributes: Mapping[str, Any], tmp_path: Any
) -> None:
    proto = _model(operator, inputs, outputs, opset, attributes)
    feeds = {f"x{n}": value for n, value in enumerate(inputs) if value is not None}
    expected = ReferenceEvaluator(proto).run(None, feeds)
    read_back = read(m.save(proto, tmp_path))
    with capture_mode():
        module = OnnxModule(read_back, DTypes(main=torch.float32, step=torch.float32)).eval()
    # Real numbers go in, so real numbers come out: the tables know nothing of fake tensors.
    found = module(**{name: torch.tensor(value) for name, value in feeds.items()})
    for n, value in enumerate(expected):
        result = found[f"y{n}"]
        assert tuple(result.shape) == np.shape(value)
        np.testing.assert_allclose(result.numpy(), value, rtol=2e-5, atol=2e-6)


def test_every_standard_operator_has_a_case() -> None:
    tried = {case.values[0] for case in CASES}
    others = {  # sequences, aliases, numbers without inputs; of LRN's window the reference forgets a channel
        "LRN", "SequenceAt", "SequenceConstruct", "SplitToSequence", "ConcatFromSequence", "Constant", "Upsample",
        "Scatter", "SequenceEmpty", "SequenceInsert", "SequenceErase", "SequenceLength",
        "SimplifiedLayerNormalization",
        "RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial",
        "Swish", "Or", "BitwiseOr", "BitwiseXor", "BitwiseNot", "Acosh",
    }  # fmt: skip
    standard = {name for name in OPERATORS if "." not in name}
    assert standard - tried - others == set()


def _run(proto: Any, folder: Any, **feeds: Any) -> Mapping[str, Any]:
    made = read(m.save(proto, folder))
    with capture_mode():
        module = OnnxModule(made, DTypes(main=torch.float32, step=torch.float32)).eval()
    return {name: value.numpy() for name, value in module(**feeds).items()}


def test_softmax_before_version_13_normalises_all_dimensions_from_its_axis_on(tmp_path: Any) -> None:
    proto = _model("Softmax", (f(2, 3, 4),), 1, 11, {})
    found = _run(proto, tmp_path, x0=torch.rand(2, 3, 4))["y0"]
    np.testing.assert_allclose(found.sum((1, 2)), [1.0, 1.0], rtol=1e-6)


@pytest.mark.parametrize("size", [1, 3, 5])  # PyTorch's even windows lie one channel lower
def test_local_response_norm_by_its_definition(size: int, tmp_path: Any) -> None:
    x, alpha, beta = f(1, 6, 2, 2), 0.5, 0.75
    found = _run(_model("LRN", (x,), 1, 22, {"size": size, "alpha": alpha}), tmp_path, x0=torch.tensor(x))["y0"]
    for c in range(6):
        low, high = max(0, c - (size - 1) // 2), min(5, c + size // 2)
        total = (x[:, low : high + 1] ** 2).sum(1)
        np.testing.assert_allclose(found[:, c], x[:, c] / (1 + alpha / size * total) ** beta, rtol=1e-5)


def test_sequences(tmp_path: Any) -> None:
    nodes = [
        helper.make_node("SplitToSequence", ["x"], ["parts"], axis=0, keepdims=0),
        helper.make_node("SequenceAt", ["parts", "one"], ["second"]),
        helper.make_node("SequenceConstruct", ["second", "second"], ["pair"]),
        helper.make_node("ConcatFromSequence", ["pair"], ["y"], axis=0, new_axis=1),
    ]
    one = m.ints("one", 1)
    one.dims[:] = []
    proto = m.model(nodes, [m.value("x", [3, 4])], [m.value("y", [2, 4])], [one])
    x = torch.rand(3, 4)
    np.testing.assert_array_equal(_run(proto, tmp_path, x=x)["y"], torch.stack([x[1], x[1]]).numpy())
