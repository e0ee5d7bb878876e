"""ONNX operators in terms of PyTorch's: one function each, or a whole family, in one visible table."""

from __future__ import annotations

from collections.abc import Mapping

from echograph.frontend.onnx.call import Operator
from echograph.frontend.onnx.operators import contrib, elementwise, index, network, product, reduction, shape

OPERATORS: Mapping[str, Operator] = {
    **elementwise.OPERATORS,
    **reduction.OPERATORS,
    **shape.OPERATORS,
    **index.OPERATORS,
    **product.OPERATORS,
    **network.OPERATORS,
    **contrib.OPERATORS,
}
"""Operator type, after its domain and a dot where that is not ONNX's own -> what it runs."""
