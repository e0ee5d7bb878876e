"""What an operator's schema says of a call node: its arguments by name, what it writes, what it only renames."""

from __future__ import annotations

import operator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.fx import Node

_ALLOCATIONS = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
)
_FILLS = frozenset(
    {"zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "fill", "fill_", "scalar_tensor",
     "new_zeros", "new_ones", "new_full", "arange", "zero", "zero_", "lift_fresh_copy"}
)  # fmt: skip
_MULTI_TENSOR = ("_foreach_", "_fused_adam", "_fused_sgd_", "_amp_foreach_")


class _Operator(NamedTuple):
    """What a schema says, read from PyTorch once: each look at it makes new objects there.

    Attributes:
        name: with its namespace ("aten::add_").
        plain_name: without its namespace.
        by_position: names of the arguments that may be given by position.
        defaults: default of each argument, None for one without, in the order of the schema.
        written: names of the arguments that it writes in place.
        is_view: whether all its results alias an argument, and it writes none.
        is_in_place: whether it writes an argument.
    """

    name: str
    plain_name: str
    by_position: tuple[str, ...]
    defaults: dict[str, Any]
    written: tuple[str, ...]
    is_view: bool
    is_in_place: bool
    required: frozenset[str]


@cache
def _operator(target: Any) -> _Operator | None:
    schema: torch.FunctionSchema | None = getattr(target, "_schema", None)
    if schema is None:
        return None
    aliases = [result.alias_info for result in schema.returns]
    renames = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
    name = str(schema.name)
    return _Operator(
        name=name,
        plain_name=name.partition("::")[2],
        by_position=tuple(a.name for a in schema.arguments if not a.kwarg_only),
        defaults={a.name: a.default_value for a in schema.arguments},
        written=tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write),
        is_view=renames or name.endswith("::_unsafe_view"),
        is_in_place=bool(schema.is_mutable),
        required=frozenset(a.name for a in schema.arguments if not a.has_default_value()),
    )


def _called(node: Node) -> _Operator:
    found = _operator(node.target)
    if found is None:
        raise TypeError(f"node '{node.name}' calls no operator")
    return found


def plain_name(node: Node) -> str:
    """Operator name without namespace and overload ("add_"); "" for `getitem`."""
    found = _operator(node.target)
    return "" if found is None else found.plain_name


def qualified_name(node: Node) -> str:
    """Operator name with its namespace and without its overload ("aten.add_")."""
    return _called(node).name.replace("::", ".")


def arguments(node: Node) -> dict[str, Any]:
    """Arguments of a call node by their names in the schema, defaults filled in."""
    found = _called(node)
    return {**found.defaults, **dict(zip(found.by_position, node.args, strict=False)), **node.kwargs}


def given_arguments(node: Node) -> dict[str, Any]:
    """Arguments of a call node that differ from their defaults, by their names in the schema."""
    found = _called(node)
    given = {**dict(zip(found.by_position, node.args, strict=False)), **node.kwargs}
    return {n: v for n, v in given.items() if n in found.required or not _same(v, found.defaults.get(n))}


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and not isinstance(value, Node) and bool(value == default)


def written_arguments(node: Node) -> tuple[str, ...]:
    """Names of the arguments that the operator writes in place."""
    found = _called(node)
    # The fused optimizers write the gradients only when they also unscale them.
    if found.plain_name.startswith("_fused_") and node.kwargs.get("grad_scale") is None:
        return tuple(name for name in found.written if name != "grads")
    return found.written


def is_view(node: Node) -> bool:
    """Whether a call node only renames memory: all its results alias an argument, and it writes none."""
    found = _operator(node.target)
    return found is not None and found.is_view


def is_in_place(node: Node) -> bool:
    """Whether a call node writes to one of its arguments."""
    found = _operator(node.target)
    return found is not None and found.is_in_place


def is_allocation(node: Node) -> bool:
    """Whether a call node only reserves memory."""
    return plain_name(node) in _ALLOCATIONS


def is_fill(node: Node) -> bool:
    """Whether a call node makes numbers from nothing: it reads no tensor's values."""
    return plain_name(node) in _FILLS


def is_multi_tensor(node: Node) -> bool:
    """Whether one launch of the operator handles lists of tensors, element by element."""
    return plain_name(node).startswith(_MULTI_TENSOR)


def is_getitem(node: Node) -> bool:
    """Whether a call node picks one result of an operator with several."""
    return node.target is operator.getitem
