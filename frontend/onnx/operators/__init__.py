"""ONNX operators in terms of PyTorch's: one function each, or a whole family, in one visible table."""

from __future__ import annotations

from collections.abc import Mapping

from echograph.frontend.onnx.call import Operator
from echograph.frontend.onnx.operators import (
    elementwise,
    network,
    quantised,
    shape,
    signal,
)

OPERATORS: Mapping[str, Operator] = {
    **elementwise.OPERATORS,
    **shape.OPERATORS,
    **network.OPERATORS,
    **quantised.OPERATORS,
    **signal.OPERATORS,
}
"""Operator type, after its domain and a dot where that is not ONNX's own -> what it runs."""
_OF_DATA, _OF_TEXT = "makes a shape from values", "works on text or pictures in a file"
UNKNOWN: Mapping[str, str] = {
    **dict.fromkeys(("Compress", "NonMaxSuppression", "NonZero", "Unique"), _OF_DATA),
    **dict.fromkeys(
        ("ImageDecoder", "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer"),
        _OF_TEXT,
    ),
}
"""Operators of ONNX that no step graph can hold, and why."""
