"""Bytes that a call node moves between device memory and the device, each tensor once.

Most operators read their arguments and write their results. The exceptions are the ones that look up a few
rows of a large table, that read only the shape of an argument, or that overwrite one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.fx import Node

from echograph.frontend.pytorch.annotate import VAL
from echograph.frontend.pytorch.schema import arguments, is_fill, is_view, plain_name, written_arguments

# Arguments of which an operator reads as many bytes as it writes results: a row for each index.
_LOOKED_UP = {
    "embedding": "weight",
    "index": "self",
    "_unsafe_index": "self",
    "index_select": "self",
    "gather": "self",
    "take": "self",
    "nll_loss_forward": "self",
    "nll_loss2d_forward": "self",
}
# Arguments of which an operator needs no value: they give a shape, or are overwritten.
_NOT_READ = {
    "nll_loss_backward": ("self",),
    "nll_loss2d_backward": ("self",),
    "copy_": ("self",),
    "_foreach_copy_": ("self",),
    "native_layer_norm_backward": ("bias",),
    "bernoulli_": ("self",),
    "normal_": ("self",),
    "uniform_": ("self",),
}


def tensor_bytes(value: Tensor) -> int:
    """Bytes of memory behind a tensor's elements; an expanded dimension (stride 0) repeats the same ones."""
    count = 1
    for size, stride in zip(value.shape, value.stride(), strict=True):
        if stride != 0 or size == 0:
            count *= size
    return count * value.element_size()


def read_arguments(node: Node) -> dict[str, Any]:
    """Arguments whose values the operator reads, by name."""
    if is_fill(node):
        return {}
    skipped = _NOT_READ.get(plain_name(node), ())
    return {name: value for name, value in arguments(node).items() if name not in skipped}


def bytes_moved(node: Node) -> tuple[int, int]:
    """(bytes read, bytes written) by a call node that handles its arguments as a whole."""
    if is_view(node):
        return 0, 0
    named = arguments(node)
    written = [named[name] for name in written_arguments(node)]
    written_bytes = sum(tensor_bytes(t) for t in distinct_tensors(written))
    if not written:
        written_bytes = sum(tensor_bytes(t) for t in distinct_tensors(node.meta[VAL]))
    return _bytes_read(node, read_arguments(node), written_bytes), written_bytes


def _bytes_read(node: Node, read: Mapping[str, Any], result_bytes: int) -> int:
    looked_up = _LOOKED_UP.get(plain_name(node))
    total = sum(tensor_bytes(t) for t in distinct_tensors([v for n, v in read.items() if n != looked_up]))
    if looked_up is not None:
        total += min(result_bytes, sum(tensor_bytes(t) for t in distinct_tensors(read[looked_up])))
    return total


def distinct_tensors(value: Any) -> Iterator[Tensor]:
    """The fake tensors in a value (nodes stand for theirs), each node and each tensor once."""
    seen: set[int] = set()
    for item in _flat(value):
        tensor = item.meta[VAL] if isinstance(item, Node) else item
        if isinstance(tensor, Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _flat(item)
    else:
        yield value
