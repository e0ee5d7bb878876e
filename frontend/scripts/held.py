"""Memory that a script still holds where nothing reads it any more.

A tensor lives as long as somebody has a name for it. In `outputs = model(batch)`, `outputs.loss.backward()` the
logits live through the whole backward pass, which does not read them: autograd has kept what it needs. They are
often the largest tensors that there are, where memory is at its peak. So a backward pass is followed by a
*release*: it reads what the micro-batch made and the script still holds, and takes no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from echograph.frontend.pytorch.annotate import VAL
from echograph.frontend.pytorch.call_nodes import is_getitem, is_in_place, is_view

# PyTorch's allocator gives what is smaller a place in blocks that many share (kSmallSize).
_SMALL = 1 << 20


def release(*held: Any) -> None:
    """Stands in a graph for the end of what a script holds: nothing runs, here or on the GPU."""


def memory_roots(graph: Graph, apart: str) -> dict[Node, Node]:
    """Of each node, the one that made the memory that it lies in.

    Args:
        graph: in program order.
        apart: annotation of calls whose results lie in memory of their own, whatever they are given.
    """
    root: dict[Node, Node] = {}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        same = bool(inputs) and (is_view(node) or is_in_place(node)) and apart not in node.meta
        picked = is_getitem(node) and is_view(inputs[0])
        root[node] = root[inputs[0]] if same or picked else node
    return root


def write_releases(
    graph: Graph,
    held: Iterable[tuple[Node, Sequence[Node]]],
    roots: Mapping[Node, Node],
    annotations: Sequence[str],
) -> None:
    """Adds a release behind each backward pass after which a script holds memory that nothing reads any more.

    Args:
        graph: a recorded step.
        held: the last node of each backward pass, with the nodes that made what is held there.
        roots: `memory_roots`.
        annotations: those of the last node that a release has, too.
    """
    place = {node: at for at, node in enumerate(graph.nodes)}
    used: dict[Node, int] = {}
    for node, at in place.items():
        for each in (node, *node.all_input_nodes):
            used[roots[each]] = at
    for last, made in held:
        kept = [node for node in made if used[roots[node]] < place[last] and _nbytes(node) >= _SMALL]
        if kept:
            with graph.inserting_after(last):
                node = graph.call_function(release, tuple(kept))
            node.meta |= {VAL: None} | {key: last.meta[key] for key in annotations if key in last.meta}


def _nbytes(node: Node) -> int:
    value = node.meta[VAL]
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0
