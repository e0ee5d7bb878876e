"""Bytes that a call node moves between device memory and the device, each tensor once.

Most operators read their arguments and write their results. The exceptions are the ones that look up a few
rows of a large table, that read only the shape of an argument, or that overwrite one.
"""

from __future__ import annotations

from collections.abc import Iterator
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
# Operators that write a part of `self`: the argument that says how much, and whether they always add to it.
_WRITTEN_IN_PART = {
    "index_put_": ("values", False),
    "_index_put_impl_": ("values", False),
    "scatter_": ("src", False),
    "scatter_add_": ("src", True),
    "index_add_": ("source", True),
    "index_copy_": ("source", False),
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
    if "out" in written_arguments(node):
        skipped = (*skipped, "out")  # where the result goes: `torch.mm(a, b, out=c)`
    return {name: value for name, value in arguments(node).items() if name not in skipped}


def bytes_moved(node: Node) -> tuple[int, int]:
    """(bytes read, bytes written) by a call node that handles its arguments as a whole."""
    if is_view(node):
        return 0, 0
    if plain_name(node) in _WRITTEN_IN_PART:
        return _partial_write(node)
    named = arguments(node)
    written = _total([named[name] for name in written_arguments(node)]) or _total(node.meta[VAL])
    read = read_arguments(node)
    looked_up = read.pop(_LOOKED_UP.get(plain_name(node), ""), None)
    return _total(list(read.values())) + min(written, _total(looked_up)), written


def _partial_write(node: Node) -> tuple[int, int]:
    amount, adds = _WRITTEN_IN_PART[plain_name(node)]
    named = arguments(node)
    written = _total(named.get(amount))
    others = _total([value for name, value in named.items() if name != "self"])
    return others + (written if adds or named.get("accumulate") else 0), written


def _total(value: Any) -> int:
    return sum(tensor_bytes(t) for t in distinct_tensors(value))


def distinct_tensors(value: Any) -> Iterator[Tensor]:
    """The fake tensors in a value; each node stands for its own, once."""
    seen: set[Node] = set()
    for item in _flat(value):
        if isinstance(item, Node):
            if item in seen:
                continue
            seen.add(item)
            item = item.meta[VAL]
        if isinstance(item, Tensor):
            yield item


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _flat(item)
    else:
        yield value
