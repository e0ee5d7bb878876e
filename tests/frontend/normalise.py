"""The compute operations of an annotated graph, in the words that all producers share.

Two captures of one step agree on these as a multiset; `compute_operations` lists them. What the rules drop
or rename is exactly where a compiler's functional graph and an eager recording differ and a device does the
same work:

- views and allocations do nothing on a device, `getitem` picks a result: dropped;
- an operation whose result nothing reads, and that changes nothing in place, is dead code, which a compiler
  drops: dropped;
- an in-place operator (`add_`, `_foreach_mul_`) is named as the functional one, which a compiler makes of it;
- an update of a buffer that nothing reads in this step (a count of batches) is among a compiled graph's
  results instead: dropped;
- a write to a part of a tensor (`y[..., :n] = x`) is a copy, and in a functional graph a `slice_scatter` after
  it: the scatter is dropped;
- `_unsafe_view` is a view, `clone` and `_to_copy` are both a copy: named `copy`;
- a scalar overload is the same kernel as the tensor one: overloads are left out;
- numbers are made in many ways (`zeros`, `full`, `scalar_tensor`, `ones_like`), and compilers fold them:
  results of fills are dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from echograph.frontend.pytorch.annotate import BUFFER, GRADIENT_OF, PHASE, ROLE, VAL
from echograph.frontend.pytorch.call_nodes import (
    is_allocation,
    is_fill,
    is_getitem,
    is_in_place,
    is_view,
    plain_name,
)

_TensorShapes = tuple[tuple[str, tuple[int, ...]], ...]

# A functional graph writes a changed view back into its base; the in-place operation has done that already.
_WRITE_BACKS = frozenset({"slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter"})
_RENAMED = {
    "clone": "copy",
    "_to_copy": "copy",
    "_unsafe_index": "index",
}


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ComputeOperation:
    """What identifies a compute operation across producers.

    Attributes:
        phase: part of the step.
        operator: normalised base name, without namespace and overload ("mm").
        inputs: type and shape of each tensor read.
        outputs: type and shape of each tensor made.
    """

    phase: str
    operator: str
    inputs: _TensorShapes
    outputs: _TensorShapes


def compute_operations(graph: Graph) -> Counter[ComputeOperation]:
    """The multiset of compute operations of an annotated graph."""
    dead = dead_nodes(graph)
    return Counter(
        ComputeOperation(
            phase=node.meta[PHASE],
            operator=base_name(node),
            inputs=tuple(_signature([n.meta[VAL] for n in node.all_input_nodes])),
            outputs=tuple(_signature(node.meta[VAL])),
        )
        for node in graph.nodes
        if node.op == "call_function" and node not in dead and is_compute(node)
    )


def is_compute(node: Node) -> bool:
    """Whether a call node does work that every producer shows."""
    dropped = is_getitem(node) or is_view(node) or is_allocation(node) or is_fill(node)
    return not (dropped or plain_name(node) in _WRITE_BACKS)


def base_name(node: Node) -> str:
    """Operator name without namespace, overload and in-place mark, renamed where producers differ."""
    name = plain_name(node)
    name = name.removesuffix("_") if is_in_place(node) else name
    return _RENAMED.get(name, name)


def dead_nodes(graph: Graph) -> set[Node]:
    """Call nodes whose results reach no gradient, no in-place operation and no output."""
    live: set[Node] = set()
    for node in reversed(graph.nodes):
        kept = node.op != "call_function" or GRADIENT_OF in node.meta or _changes_step(node)
        if kept or any(user in live for user in node.users):
            live.add(node)
    return {node for node in graph.nodes if node not in live}


def _changes_step(node: Node) -> bool:
    if not is_in_place(node):
        return False
    changed = node.args[0] if node.args else None
    return not (isinstance(changed, Node) and changed.meta.get(ROLE) == BUFFER)


def _signature(value: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    if isinstance(value, Tensor):
        yield str(value.dtype).removeprefix("torch."), tuple(value.shape)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _signature(item)
