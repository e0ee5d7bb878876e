"""What an operator of PyTorch launches on a device beside the kernel that it stands for.

A graph has a row an operator. Some launch several kernels, each of which the host issues: what they ask for is
written before its use where deterministic algorithms are on, additions by index are sorted first where they have
an order, what is returned changed is copied first. All of it as PyTorch's own sources say (aten/src/ATen/native:
TensorFactories.cpp, TensorAdvancedIndexing.cpp, ReduceOps.cpp; of cuda/ TensorFactories.cu, Indexing.cu,
Dropout.cu, TensorTopK.cu, Nonzero.cu).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from echograph.frontend.pytorch.annotate import VAL
from echograph.frontend.pytorch.call_nodes import (
    arguments,
    is_allocation,
    is_getitem,
    is_in_place,
    is_view,
    plain_name,
    tensor_bytes,
)
from echograph.frontend.scripts.recorder import COPY, REGION
from echograph.ir.passes.fuse import FUSED
from echograph.ir.types import CopyDirection


class Launch(NamedTuple):
    """A kernel by the operator that it is like, and the bytes that it reads and writes."""

    operator: str
    bytes_read: int
    bytes_written: int


_ASKING = frozenset(
    {
        # copies, of which others are made
        "clone", "_to_copy", "masked_fill", "index_put", "index_fill",
        # numbers from nothing
        "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like",
        "new_full", "arange",
        # kernels that ask for their results themselves
        "native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward",
        "native_dropout", "native_dropout_backward", "index_select", "embedding", "embedding_dense_backward",
        "nonzero_static", "where", "logical_not", "repeat", "flip", "roll", "constant_pad_nd", "bernoulli",
    }
)  # fmt: skip
"""Operators whose results `torch.empty`, or a tensor that grows, makes. What their products, sums and most
elementwise kernels make, PyTorch makes past it."""
_NORMS = ("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward")
"""Those of Transformer Engine ask for a workspace as well, of a byte where they need none
(common/normalization/common.cpp: getWorkspaceShape; pytorch/csrc/extensions/normalization.cpp)."""
_COPIED_FIRST = ("masked_fill", "index_put", "index_add", "index_fill", "scatter", "scatter_add")
_INDEX_BYTES = 8
_SORTED_AT_ONCE = 2048
"""Keys that one thread block sorts in one kernel; assumed, of pairs of eight bytes."""
_BITS_A_PASS = 8


def beside(node: Node, in_order: bool, fills: bool) -> Iterator[Launch]:
    """What a call launches beside its kernel, in no order.

    Args:
        node: a call that computes, and no communication.
        in_order: whether deterministic algorithms are on.
        fills: whether memory is written before its use, as it is then unless told otherwise
            (`torch.utils.deterministic.fill_uninitialized_memory`).
    """
    if node.op != "call_function" or is_getitem(node) or is_view(node):
        return
    region = node.meta.get(REGION)
    if region is not None and region.maker != FUSED:
        return  # what is compiled asks past `torch.empty`
    if region is None and plain_name(node):
        yield from _kernels(node, in_order, fills)
    if fills and _asks(node):  # each result by a kernel of its own
        yield from (Launch("aten.fill_", 0, size) for size in _results(node) if size)
        if region is not None and plain_name(node) in _NORMS:
            yield Launch("aten.fill_", 0, 1)


def _asks(node: Node) -> bool:
    """Whether PyTorch's `torch.empty` makes the results, as it does all that Transformer Engine makes.

    That is in its pytorch/csrc/quantizer.cpp (create_tensor). Of a kernel of its, what leaves the region.
    """
    if is_in_place(node) or node.meta.get(COPY) is CopyDirection.DEVICE_TO_HOST:
        return False
    if node.meta.get(REGION) is not None and _leaves(node):
        return True
    name = plain_name(node)
    return is_allocation(node) or name in _ASKING or name.startswith("_scaled_dot_product")


def _leaves(node: Node) -> bool:
    """Whether something outside of a node's region uses it."""
    for user in node.users:
        if user.meta.get(REGION) is not node.meta[REGION]:
            return True
        if (is_view(user) or is_getitem(user)) and _leaves(user):
            return True
    return False


def _results(node: Node) -> list[int]:
    """Bytes of each result that is on the device."""
    values = node.meta[VAL] if isinstance(node.meta[VAL], tuple) else (node.meta[VAL],)
    return [v.numel() * v.element_size() for v in values if isinstance(v, Tensor)]


def _kernels(node: Node, in_order: bool, fills: bool) -> Iterator[Launch]:
    name, named = plain_name(node), arguments(node)
    given = _value(named.get("self"))
    if name in _COPIED_FIRST and given is not None:
        yield Launch("aten.copy_", tensor_bytes(given), tensor_bytes(given))
    match name.removesuffix("_"):
        case "count_nonzero" if given is not None and given.dtype != torch.bool:
            # Truth values are written by one kernel, and added up by a second one.
            yield Launch("aten.sum", given.numel(), given.numel())
        case "topk":
            yield Launch("aten.sort", *[sum(_results(node))] * 2)  # of those found
        case "nonzero_static" if given is not None:
            # How many each block of a kernel finds, where each begins, and the indices themselves.
            yield Launch("aten.sum", given.numel(), _INDEX_BYTES)
            yield Launch("aten.cumsum", _INDEX_BYTES, _INDEX_BYTES)
        case "index_add" if in_order and given is not None:
            added = _value(named["source"])
            yield Launch("aten.mul", *[tensor_bytes(added)] * 2)  # by `alpha`
            yield from _sorted([_value(named["index"])], given, named["dim"], fills, checked=True)
        case "scatter" if in_order and given is not None and isinstance(_value(named.get("src")), Tensor):
            yield from _scattered(_value(named["index"]), given, fills)
        case "index_put" | "_index_put_impl" if given is not None:
            indices = [_value(index) for index in named["indices"]]
            masked = any(index is not None and index.dtype == torch.bool for index in indices)
            if not masked and (in_order or named.get("accumulate")):
                yield from _sorted(indices, given, 0, fills, checked=not named.get("accumulate"))


def _sorted(indices: list[Tensor | None], given: Tensor, dim: int, fills: bool, checked: bool) -> Iterator[Launch]:
    """Indices are made numbers of rows, and sorted with where they stood; then one kernel adds row by row.

    Args:
        indices: one a dimension, or none.
        given: what is added to.
        dim: the dimension of the first of them.
        fills: whether memory is written before its use.
        checked: whether it is seen to that indices are in range, which gradients' are.
    """
    known = [index for index in indices if index is not None]
    count = max((index.numel() for index in known), default=0)
    size = _INDEX_BYTES * count
    for position in range(len(known)):
        if checked:
            yield Launch("aten.aminmax", size, 2 * _INDEX_BYTES)
            yield from [Launch("aten.lt", _INDEX_BYTES, 1), Launch("aten._assert_async", 1, 0)] * 2
        yield from (Launch("aten.remainder", size, size), Launch("aten.mul", size, size))
        if position:
            yield Launch("aten.add_", 2 * size, size)
    yield from (Launch("aten.div_", size, size), Launch("aten.arange", 0, size))
    if fills:
        yield from [Launch("aten.fill_", 0, size)] * 3
    rows = prod(given.shape[dim : dim + len(indices)])
    passes = -(-max(rows - 1, 1).bit_length() // _BITS_A_PASS)
    # Digits of all keys are counted and added up once; then one kernel a digit moves them.
    kernels = 1 if count <= _SORTED_AT_ONCE else 2 + passes
    yield from [Launch("aten.sort", 2 * size, 2 * size)] * kernels


def _scattered(index: Tensor, given: Tensor, fills: bool) -> Iterator[Launch]:
    """A place of each element is made of its index and its other coordinates; then it is put there in order.

    Args:
        index: as many as elements.
        given: what they are put into.
        fills: whether memory is written before its use.
    """
    size, dims = _INDEX_BYTES * index.numel(), given.dim()
    if dims > 1:
        if fills:
            yield Launch("aten.fill_", 0, dims * size)
        yield from [Launch("aten.arange", 0, _INDEX_BYTES), Launch("aten.copy_", _INDEX_BYTES, size)] * (dims - 1)
        yield Launch("aten.copy_", size, size)
        yield from (Launch("aten.mul", dims * size, dims * size), Launch("aten.sum", dims * size, size))
    yield from _sorted([index.flatten()], given.flatten(), 0, fills, checked=True)


def _value(given: Any) -> Any:
    return given.meta[VAL] if isinstance(given, Node) else given
