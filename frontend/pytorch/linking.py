"""Finds the forward operation of what autograd's sequence numbers do not tell."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import groupby

import torch
from torch.fx import Graph, Node

from echograph.frontend.pytorch.annotate import (
    BACKWARD,
    FORWARD,
    FORWARD_NODE,
    GRADIENT_OF,
    MODULE,
    PHASE,
    RECOMPUTE,
    VAL,
    call_nodes,
)

_ADD = torch.ops.aten.add.Tensor
_PART = torch.ops.aten.as_strided.default
# What one result of an operator does not share with the operator.
_OWN = (VAL, GRADIENT_OF)


def link_recomputed(graph: Graph) -> None:
    """Links recomputed operations to the forward ones that they repeat, and gives them their module path.

    A checkpoint repeats a region of the forward pass in its order (and may stop early), so each run of
    recomputed operations equals a stretch of the forward pass: the last one that starts no later than the
    operation whose backward asked for it, which the recorder left as the link. A run that equals none stays
    unlinked. Views of memory that was there before are none of its operations: they stand where a part of it is
    first used.
    """
    forward = [n for n in call_nodes(graph) if n.meta[PHASE] == FORWARD and n.target is not _PART]
    targets: list[object] = [n.target for n in forward]
    position = {n.name: i for i, n in enumerate(forward)}
    recomputed: dict[str, str | None] = {}
    for is_run, nodes in groupby(call_nodes(graph), key=lambda n: n.meta[PHASE] == RECOMPUTE):
        if is_run:
            links = [(node, node.meta.pop(FORWARD_NODE, "")) for node in nodes]
            run = [(node, link) for node, link in links if node.target is not _PART]
            asked_by = position.get(run[0][1] if run else "", len(forward) - 1)
            start = _last_stretch(targets, [node.target for node, _ in run], asked_by)
            recomputed |= {node.name: None for node, _ in links}
            for i, (node, _) in enumerate(run):
                if start is not None:
                    source = forward[start + i]
                    node.meta |= {FORWARD_NODE: source.name, MODULE: source.meta[MODULE]}
                    recomputed[node.name] = source.name
    for node in graph.nodes:
        # Under a re-entrant checkpoint, autograd differentiates the recomputed operation.
        if node.meta.get(FORWARD_NODE) in recomputed and (link := node.meta.pop(FORWARD_NODE)):
            node.meta |= {FORWARD_NODE: recomputed[link]} if recomputed[link] else {}


def _last_stretch(targets: Sequence[object], run: Sequence[object], last: int) -> int | None:
    """Largest start <= last where `targets` holds `run`, or None."""
    for start in range(min(last, len(targets) - len(run)), -1, -1) if run else ():
        if targets[start] is run[0] and targets[start : start + len(run)] == run:
            return start
    return None


def link_sums(graph: Graph) -> None:
    """Links sums of gradients, and what runs between autograd nodes (the gradient of the loss itself).

    Autograd adds up the gradients of a tensor that several operations read as they arrive, so the sum runs
    under the number of whichever came last. It differentiates the operation that made the tensor: the one whose
    backward reads the sum. It runs in the module of the gradient that came last, so that a layer sums the
    gradients of its own input and all layers are alike.
    """
    forward = {n.name: n for n in graph.nodes if n.meta.get(PHASE) == FORWARD}
    backward = [n for n in call_nodes(graph) if n.meta[PHASE] == BACKWARD]
    for node in reversed(backward):
        if FORWARD_NODE not in node.meta or _is_sum(node):
            _link(node, _first_link(list(node.users)), forward)
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in backward:
        if FORWARD_NODE not in node.meta:
            _link(node, _first_link(node.all_input_nodes), forward)
        elif _is_sum(node):
            last = max(node.all_input_nodes, key=position.__getitem__)
            node.meta[MODULE] = last.meta[MODULE]
    for node in graph.nodes:
        if node.target is operator.getitem:
            node.meta = {**node.all_input_nodes[0].meta, **{k: node.meta[k] for k in _OWN if k in node.meta}}


def _is_sum(node: Node) -> bool:
    if node.target is not _ADD or len(node.all_input_nodes) != 2:
        return False
    left, right = node.all_input_nodes
    if not left.meta.get(PHASE) == right.meta.get(PHASE) == BACKWARD:
        return False
    same_operation = left.target is right.target is operator.getitem and left.args[0] is right.args[0]
    return same_operation or left.meta.get(FORWARD_NODE) != right.meta.get(FORWARD_NODE)


def _first_link(nodes: list[Node]) -> str | None:
    links = (n.meta.get(FORWARD_NODE) for n in nodes if n.meta.get(PHASE) == BACKWARD)
    return next((link for link in links if link is not None), None)


def _link(node: Node, name: str | None, forward: dict[str, Node]) -> None:
    if name is not None:
        node.meta[FORWARD_NODE] = name
        node.meta[MODULE] = forward[name].meta[MODULE]
