"""What an operator's schema says of a call node: its arguments by name, what it writes, what it only renames."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

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


def plain_name(node: Node) -> str:
    """Operator name without namespace and overload ("add_"); "" for `getitem`."""
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name).partition("::")[2]


def qualified_name(node: Node) -> str:
    """Operator name with its namespace and without its overload ("aten.add_")."""
    schema: torch.FunctionSchema = node.target._schema  # type: ignore[union-attr]
    return str(schema.name).replace("::", ".")


def arguments(node: Node) -> dict[str, Any]:
    """Arguments of a call node by their names in the schema, defaults filled in."""
    schema: torch.FunctionSchema = node.target._schema  # type: ignore[union-attr]
    values: dict[str, Any] = {}
    for i, argument in enumerate(schema.arguments):
        if i < len(node.args) and not argument.kwarg_only:
            values[argument.name] = node.args[i]
        else:
            values[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return values


def written_arguments(node: Node) -> Iterator[str]:
    """Names of the arguments that the operator writes in place."""
    schema: torch.FunctionSchema = node.target._schema  # type: ignore[union-attr]
    # The fused optimizers write the gradients only when they also unscale them.
    keeps_gradients = plain_name(node).startswith("_fused_") and node.kwargs.get("grad_scale") is None
    for argument in schema.arguments:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and not (argument.name == "grads" and keeps_gradients):
            yield argument.name


def is_view(node: Node) -> bool:
    """Whether a call node only renames memory: all its results alias an argument, and it writes none."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    if plain_name(node) == "_unsafe_view":
        return True
    aliases = [r.alias_info for r in schema.returns]
    return bool(aliases) and all(a is not None and not a.is_write for a in aliases)


def is_in_place(node: Node) -> bool:
    """Whether a call node writes to one of its arguments."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


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
