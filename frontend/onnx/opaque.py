"""Operators of the domain `echograph`: what a step graph held and ONNX has no word for.

The exporter (`ir.exporters.onnx`) writes such a node under the operator's name with the shapes of its results.
Read again, it is an operator of that name which makes tensors of those shapes; the product of experts, which
counts FLOPs, is PyTorch's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from echograph.errors import CaptureError, InputError
from echograph.frontend.onnx.call import Call, Operator
from echograph.frontend.onnx.dtypes import DTypes
from echograph.frontend.onnx.model import Node, OnnxModel

DOMAIN = "echograph."
_NAMESPACE = "echograph"
_SCHEMA = "(Tensor?[] operands, int[] ranks, int[] extents, ScalarType[] dtypes) -> Tensor[]"
_libraries: list[Any] = []


def opaque(node: Node, model: OnnxModel, dtypes: DTypes) -> Operator:
    """What a node of echograph's domain runs.

    Raises:
        InputError: the file does not state the shape of a result.
    """
    name = node.operator.removeprefix(DOMAIN)
    if name in _EXACT:
        return _EXACT[name]
    declared = [model.types.get(output) for output in node.outputs]
    results = [value for value in declared if value is not None]
    if len(results) < len(declared) or not results:
        raise InputError(f"{model.source}: node '{node.name}' ({node.operator}): its results have no shapes")
    ranks = [len(value.shape) for value in results]
    extents = [extent for value in results for extent in value.shape]
    types = [dtypes.of(value.dtype, model.source) for value in results]

    def run(call: Call) -> Any:
        if call.training:
            raise CaptureError(
                "nothing is known of its derivative: train from the graph that it was exported from"
            )
        if all(operand is None for operand in call.operands):  # numbers from nothing, whatever fills them in
            return tuple(torch.zeros(value.shape, dtype=t) for value, t in zip(results, types, strict=True))
        return tuple(_operator(name)(list(call.operands), ranks, extents, types))

    return run


@cache
def _operator(name: str) -> Callable[..., Any]:
    """An operator in PyTorch's table, so that it is recorded under its name."""
    plain = re.sub(r"\W", "_", name.removeprefix("aten.")) or "operator"
    library: Any = torch.library.Library(_NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(plain + _SCHEMA)
    library.impl(plain, _empty, "CPU")
    library.impl(plain, partial(_empty, device="meta"), "Meta")
    _libraries.append(library)  # an operator lives as long as its library
    made: Callable[..., Any] = getattr(getattr(torch.ops, _NAMESPACE), plain).default
    return made


def _empty(
    operands: list[Any], ranks: list[int], extents: list[int], dtypes: list[torch.dtype], device: str = "cpu"
) -> list[torch.Tensor]:
    results, at = [], 0
    for rank, dtype in zip(ranks, dtypes, strict=True):
        results.append(torch.empty(extents[at : at + rank], dtype=dtype, device=device))
        at += rank
    return results


def _grouped_mm(call: Call) -> Any:
    return torch._grouped_mm(call[0], call[1], call.get(2))


_EXACT: dict[str, Operator] = {"aten._grouped_mm": _grouped_mm}
