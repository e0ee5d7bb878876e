"""Which values of an ONNX file are weights, and of which the numbers matter, told by the nodes that read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

_PRODUCTS = {
    "Conv": (1, 2), "ConvTranspose": (1, 2), "Gemm": (0, 1, 2), "MatMul": (0, 1), "Gather": (0,), "PRelu": (1,),
    "BatchNormalization": (1, 2), "LayerNormalization": (1, 2), "InstanceNormalization": (1, 2),
    "GroupNormalization": (1, 2), "RMSNormalization": (1,), "LSTM": (1, 2, 3), "GRU": (1, 2, 3),
    "RNN": (1, 2, 3), "FusedConv": (1, 2), "FusedMatMul": (0, 1), "FusedGemm": (0, 1, 2), "Attention": (1, 2),
}  # fmt: skip
_QUANTISED = {
    "DequantizeLinear": (0,), "QLinearConv": (3, 8), "QLinearMatMul": (3,), "MatMulInteger": (1,),
    "ConvInteger": (1,), "QGemm": (3, 6), "DynamicQuantizeMatMul": (1,), "MatMulIntegerToFloat": (1,),
    "MatMulNBits": (1,), "DynamicQuantizeLSTM": (1, 2),
}  # fmt: skip
_SCALES = {
    "DequantizeLinear": (1,), "QuantizeLinear": (1,), "QLinearConv": (1, 4, 6), "QLinearMatMul": (1, 4, 6),
    "QGemm": (1, 4, 7), "DynamicQuantizeMatMul": (2,), "MatMulIntegerToFloat": (2, 3), "MatMulNBits": (2,),
    "DynamicQuantizeLSTM": (8, 10), "BatchNormalization": (3, 4),
}  # fmt: skip
_NUMBERS = {"Resize": (1, 2), "Upsample": (1,)}


class Readers:
    """What the nodes of a graph, and of the graphs within it, read as what.

    Attributes:
        weights: values read where a layer has its weights.
        quantised: values read where a layer has integers for its weights.
        fixed: running statistics, and scales of integers: what is not trained.
        numbers: values that decide on a shape, and what those are computed from.
    """

    def __init__(self, graph: GraphProto) -> None:
        nodes = list(walk(graph))
        self.weights = _read(nodes, _PRODUCTS)
        self.quantised = _read(nodes, _QUANTISED)
        self.fixed = _read(nodes, _SCALES)
        self.numbers = _behind(_read(nodes, _NUMBERS), nodes)


def walk(graph: GraphProto) -> Iterator[NodeProto]:
    """The nodes of a graph and of the graphs that they hold; on a stack, since files may nest at will."""
    stack = [graph]
    while stack:
        for node in stack.pop().node:
            yield node
            stack.extend(a.g for a in node.attribute if a.HasField("g"))


def _read(nodes: Iterable[NodeProto], positions: dict[str, tuple[int, ...]]) -> set[str]:
    return {
        node.input[at]
        for node in nodes
        for at in positions.get(node.op_type, ())
        if at < len(node.input) and node.input[at]
    }


def _behind(names: set[str], nodes: list[NodeProto]) -> set[str]:
    """The values and all that they are computed from."""
    makers = {output: node for node in nodes for output in node.output}
    found: set[str] = set()
    open_names = list(names)
    while open_names:
        name = open_names.pop()
        if name not in found:
            found.add(name)
            open_names += makers[name].input if name in makers else ()
    return found
