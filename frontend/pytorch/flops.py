"""Floating-point operations of a recorded operator, as `torch.utils.flop_counter` counts them.

Matrix products, convolutions and attention count, a multiply-add as two; everything else is bound by memory
and counts zero. The formulas are PyTorch's own registry; `_grouped_mm`, which it lacks, is added here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from echograph.frontend.pytorch.annotate import VAL, call_nodes

Formula = Callable[..., int]


def grouped_mm_flops(
    a: Sequence[int], b: Sequence[int], offsets: Sequence[int] | None = None, *_: Any, **__: Any
) -> int:
    """FLOPs of `aten._grouped_mm`: every row of the ragged operand meets one expert's matrix.

    Args:
        a: shape [m, k] (rows grouped by `offsets`) or [experts, m, k].
        b: shape [experts, k, n]; or [k, n], where `offsets` groups the contraction or the columns.
        offsets: shape of the ends of the groups; None when both operands have an expert dimension.
    """
    experts = a[0] if len(a) == len(b) == 3 else 1
    return 2 * experts * a[-2] * a[-1] * b[-1]


@cache
def formulas() -> Mapping[Any, Formula]:
    """Operator packet -> formula that takes the operator's arguments and `out_val`."""
    from torch.utils.flop_counter import flop_registry, shape_wrapper

    wrapped: Formula = shape_wrapper(grouped_mm_flops)  # type: ignore[no-untyped-call]
    return {**flop_registry, torch.ops.aten._grouped_mm: wrapped}


def node_flops(node: Node) -> int:
    """FLOPs of one call node of an annotated graph."""
    formula = formulas().get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta[VAL])
    if args and isinstance(args[-1], torch.dtype):
        args = args[:-1]  # the result's, of which not every formula knows
    return int(formula(*args, **kwargs, out_val=node.meta[VAL]))


def graph_flops(graph: Graph) -> int:
    """FLOPs of all operations of an annotated graph."""
    return sum(node_flops(node) for node in call_nodes(graph))
