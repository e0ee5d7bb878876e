"""The invocations of a captured step, as plain data (`ir.profile`): what it takes to run them again.

The annotated graph is the record: its nodes hold every argument as it was given. Each tensor is told with its
strides, and how much else the step uses since it was used last, if that fits the device's cache: the step is
followed twice, so that parameters stand as the step before left them. So is the operator's code.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from math import log2
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from echograph.frontend.pytorch.annotate import VAL, call_nodes
from echograph.frontend.pytorch.call_nodes import (
    arguments,
    attributes_of,
    is_allocation,
    is_getitem,
    is_view,
    plain_name,
    qualified_name,
    tensor_bytes,
)
from echograph.ir.graph import StepGraph
from echograph.ir.profile import Argument, Invocation, Named, Operand, Part, Signature, signatures
from echograph.ir.types import Convolution, Gemm, MultiTensor

_Ages = dict[Node | str, int]
"""Of tensors, and of operators' code by their names: the bytes of other tensors that were used since."""
_NOT_TOLD_APART = 2**16
"""Bytes that any cache holds beside an operator's own: below, nothing lies between."""
_NAMED = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}


def invocations_of(
    graph: Graph, step: StepGraph, made: dict[Node, list[int]], cache_bytes: int
) -> list[Invocation]:
    """The distinct invocations of a step that do work, in the order in which they first run.

    Args:
        graph: fulfils the contract of `annotate`.
        step: what `lower_nodes` made of it.
        made: which operations each node became, from there.
        cache_bytes: what the device's last cache holds.
    """
    known = list(signatures(step))
    moved = (step.ops.bytes_read + step.ops.bytes_written).tolist()
    since = _since(graph, cache_bytes)
    found: dict[str, Invocation] = {}
    for node in call_nodes(graph):
        ops = [(signature, moved[op]) for op in made.get(node, ()) if (signature := known[op]) is not None]
        if not ops:
            continue
        invocation, parts = _call(node, since), _parts(ops)
        before = found.get(invocation.text)
        invocation = replace(invocation, parts=parts if before is None else _added(before.parts, parts))
        found[invocation.text] = replace(invocation, products=_multiplies(invocation))
    return list(found.values())


def _multiplies(invocation: Invocation) -> bool:
    attributes = invocation.parts[0].signature.attributes
    return attributes is not None and not isinstance(attributes, MultiTensor)


def _parts(ops: list[tuple[Signature, int]]) -> tuple[Part, ...]:
    """The operations of one invocation by signature; each bears of its time what it moves of its bytes."""
    whole = sum(moved for _, moved in ops)
    counts = Counter(ops)
    return tuple(
        Part(signature=signature, share=moved / whole if whole else 1 / len(ops), runs=count)
        for (signature, moved), count in counts.items()
    )


def _added(one: tuple[Part, ...], other: tuple[Part, ...]) -> tuple[Part, ...]:
    """The parts of two invocations that do the same work; a graph may take the second for another kind."""
    counts: Counter[Part] = Counter()
    for part in (*one, *other):
        counts[replace(part, runs=0)] += part.runs
    return tuple(replace(part, runs=count) for part, count in counts.items())


def _call(node: Node, since: dict[Node, _Ages], maker: bool = True) -> Invocation:
    numbers: dict[Node, int] = {}
    makers = _makers(node, since) if maker else {}

    def plain(value: Any) -> Argument:
        if isinstance(value, Node):
            number = numbers.setdefault(value, len(numbers))
            return _operand(value, number, since[node].get(value), makers.get(_producer(value)[0]))
        if isinstance(value, tuple | list):
            return tuple(plain(item) for item in value)
        if isinstance(value, torch.device):
            return Named(kind="device", name="")
        kind = _NAMED.get(type(value))
        return value if kind is None else Named(kind=kind, name=str(value).removeprefix("torch."))

    return Invocation(
        operator=qualified_name(node),
        overload=node.target._overloadname,  # type: ignore[union-attr]
        arguments=tuple(plain(value) for value in node.args),
        keywords=tuple((name, plain(value)) for name, value in node.kwargs.items()),
        since=since[node].get(qualified_name(node)),
        tf32=_rounding(node),
    )


def _rounding(node: Node) -> bool | None:
    match attributes_of(node):
        case Gemm(tf32=True):
            return True
        case Convolution(ieee=True):
            return False
    return None


def _operand(node: Node, number: int, since: int | None, maker: Invocation | None) -> Operand:
    value: Tensor = node.meta[VAL]
    return Operand(
        number=number,
        dtype=str(value.dtype).removeprefix("torch."),
        shape=tuple(value.shape),
        strides=tuple(value.stride()),
        since=since,
        maker=None if maker is None else (maker, _producer(node)[1]),
    )


def _makers(node: Node, since: dict[Node, _Ages]) -> dict[Node, Invocation]:
    """Invocations whose results no other values can stand for: those of which one is a random state."""
    makers = dict.fromkeys(_producer(n)[0] for n in node.all_input_nodes if _is_random_state(n))
    return {maker: _call(maker, since, maker=False) for maker in makers}


def _is_random_state(node: Node) -> bool:
    """Whole numbers that a random operator returns beside its result. Kernels differ in where they keep them."""
    tags = getattr(_producer(node)[0].target, "tags", ())
    dtype = node.meta[VAL].dtype
    return torch.Tag.nondeterministic_seeded in tags and not dtype.is_floating_point and dtype != torch.bool


def _producer(node: Node) -> tuple[Node, int]:
    """The call node that made a value, and which result it is."""
    if is_getitem(node):
        source, index = node.args
        return source, index  # type: ignore[return-value]
    return node, 0


def _since(graph: Graph, cache_bytes: int) -> dict[Node, _Ages]:
    """For every call node, how long ago its inputs and its operator's code were used, of those in the cache."""
    roots = {node: _root(node) for node in graph.nodes}
    used: OrderedDict[Node | str, int] = OrderedDict()
    found: dict[Node, _Ages] = {}
    for _ in range(2):
        for node in call_nodes(graph):
            code = qualified_name(node)
            asked: dict[Node | str, Node | str] = {code: code, **{n: roots[n] for n in node.all_input_nodes}}
            ages = _ages(used, set(asked.values()), cache_bytes)
            found[node] = {key: ages[known] for key, known in asked.items() if known in ages}
            if is_view(node) or is_allocation(node):
                continue
            for value in (*node.all_input_nodes, *_results(node)):
                size = max(used.pop(roots[value], 0), tensor_bytes(value.meta[VAL]))
                used[roots[value]] = size
            used.pop(code, None)
            used[code] = 0
    return found


def _ages(used: OrderedDict[Node | str, int], asked: set[Node | str], cache_bytes: int) -> _Ages:
    """Bytes of what was used since each of those asked for, to a power of two; not of what is not in the cache."""
    ages: _Ages = {}
    total = 0
    for key in reversed(used):
        if key in asked:
            # Its own bytes are there if those that came since leave room for them.
            if total + used[key] <= cache_bytes:
                ages[key] = 1 << round(log2(total)) if total >= _NOT_TOLD_APART else 0
            if len(ages) == len(asked):
                break
        total += used[key]
        if total > cache_bytes:
            break
    return ages


def _results(node: Node) -> Iterator[Node]:
    if isinstance(node.meta[VAL], Tensor):
        yield node
    for user in node.users:
        if is_getitem(user) and isinstance(user.meta[VAL], Tensor):
            yield user


def _root(node: Node) -> Node:
    """The node whose memory a value is, through views and writes in place."""
    while node.op == "call_function" and not is_allocation(node):
        if is_getitem(node):
            source, _ = node.args
            if not is_view(source):  # type: ignore[arg-type]
                break
            node = source  # type: ignore[assignment]
        elif is_view(node) or plain_name(node).endswith("_"):
            inputs = [v for v in arguments(node).values() if isinstance(v, Node)]
            if not inputs:
                break
            node = inputs[0]
        else:
            break
    return node
