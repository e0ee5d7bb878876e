"""Functions of the domain `echograph`: operators that ONNX has no node for, defined by nodes of ONNX's own.

A reader of ONNX may inline them; `echoc import onnx` takes the call for the operator that it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from echograph.ir.exporters.onnx_operators import GROUPED_MM

if TYPE_CHECKING:
    from onnx import FunctionProto, OperatorSetIdProto

    Function = Callable[[str, OperatorSetIdProto], FunctionProto]

_WORK = ["flops", "bytes_read", "bytes_written"]


def _grouped_mm(domain: str, opset: OperatorSetIdProto) -> FunctionProto:
    """Rows [m, k], grouped by where each group ends, times a matrix [k, n] a group: one product a group."""
    from onnx import TensorProto, helper

    node = helper.make_node
    axis = helper.make_tensor("axis", TensorProto.INT64, [1], [0])
    body = helper.make_graph(
        [
            node("Gather", ["ends", "group"], ["at"], axis=0),
            node("Cast", ["at"], ["wide"], to=TensorProto.INT64),
            node("Unsqueeze", ["wide", "first"], ["end"]),
            node("Slice", ["rows", "begin", "end", "first"], ["own"]),
            node("Gather", ["matrices", "group"], ["matrix"], axis=0),
            node("MatMul", ["own", "matrix"], ["product"]),
            node("Concat", ["before", "product"], ["after"], axis=0),
            node("Identity", ["going"], ["goes_on"]),
        ],
        "group",
        [
            helper.make_tensor_value_info("group", TensorProto.INT64, []),
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            helper.make_empty_tensor_value_info("begin"),
            helper.make_empty_tensor_value_info("before"),
        ],
        [helper.make_empty_tensor_value_info(name) for name in ("goes_on", "end", "after")],
    )
    nodes = [
        node("Constant", [], ["first"], value=axis),
        node("Shape", ["matrices"], ["count"], start=0, end=1),
        node("Shape", ["matrices"], ["columns"], start=2, end=3),
        node("Squeeze", ["count", "first"], ["groups"]),
        node("Concat", ["first", "columns"], ["none"], axis=0),
        node("ConstantOfShape", ["none"], ["empty"]),
        node("CastLike", ["empty", "rows"], ["start"]),
        node("Loop", ["groups", "", "first", "start"], ["last", "products"], body=body),
    ]
    attributes = [*_WORK, "transpose_a", "transpose_b"]
    return helper.make_function(
        domain, GROUPED_MM, ["rows", "matrices", "ends"], ["products"], nodes, [opset], attributes
    )


FUNCTIONS: Mapping[str, Function] = {GROUPED_MM: _grouped_mm}
"""Name -> what makes the function of a domain in an opset."""
