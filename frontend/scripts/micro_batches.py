"""Whose micro-batch each operation of a step is, where nobody said it: told from what each backward pass is of.

A new micro-batch begins with a forward pass that follows a backward pass, unless forward passes wait for their
backward passes, as in the schedules of pipelines: there a stage runs two forward passes in a row. A backward pass
is of the forward operations that it differentiates; passes that differentiate the same ones (of two losses, or of
inputs and weights apart) are of one micro-batch. What is of no backward pass goes with what it reads, else with
what follows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch.fx import Graph, Node

from echograph.frontend.pytorch.annotate import FORWARD_NODE, OPTIMIZER, PARAMETER, PHASE, ROLE
from echograph.frontend.pytorch.call_nodes import is_allocation

BACKWARD_PASS = "backward_pass"
"""Of operations: the number of the backward pass of the step that they run in."""


def micro_batches(graph: Graph, aside: Collection[int] = ()) -> dict[Node, int]:
    """The micro-batch of each operation of a step but the optimizer's, counted in the order of forward passes.

    Args:
        graph: of a step, with the forward operation of each backward one and `BACKWARD_PASS`.
        aside: passes that make no gradients of parameters: those of no other's operations are no micro-batch.
    """
    calls = [n for n in graph.nodes if n.op == "call_function" and n.meta[PHASE] != OPTIMIZER]
    passes = _passes_of(calls, _of_weights(graph))
    same = _merged(passes)
    order: dict[int, int] = {}
    learning = {root for number, root in same.items() if number not in aside}
    for node in calls:
        for number in sorted(number for number in passes.get(node, ()) if same[number] in learning):
            order.setdefault(same[number], len(order))
    found: dict[Node, int] = {}
    for node in calls:
        own = [node.meta[BACKWARD_PASS]] if BACKWARD_PASS in node.meta else sorted(passes.get(node, ()))[:1]
        known = [order[same[number]] for number in own if same.get(number) in order]
        known = known or [found[given] for given in node.all_input_nodes if given in found]
        if known:
            found[node] = max(known)
    latest = len(order) - 1  # of what follows all passes
    for node in reversed(calls):
        latest = found.setdefault(node, latest)
    return found


def _of_weights(graph: Graph) -> set[Node]:
    """What is made of parameters alone: a cast of a weight serves all micro-batches."""
    found: set[Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        parameter = node.op == "placeholder" and node.meta.get(ROLE) == PARAMETER
        if parameter or (node.op == "call_function" and inputs and all(given in found for given in inputs)):
            found.add(node)
    return found


def _passes_of(calls: list[Node], weights: set[Node]) -> dict[Node, set[int]]:
    """The backward passes that differentiate each forward operation."""
    named = {node.name: node for node in calls}
    found: dict[Node, set[int]] = {}
    for node in calls:
        forward = named.get(node.meta.get(FORWARD_NODE, ""))
        if BACKWARD_PASS not in node.meta or forward is None or is_allocation(forward):
            continue
        if BACKWARD_PASS not in forward.meta and forward not in weights:
            found.setdefault(forward, set()).add(node.meta[BACKWARD_PASS])
    return found


def _merged(passes: Mapping[Node, set[int]]) -> dict[int, int]:
    """Of each backward pass, the first one that differentiates some of the same operations."""
    first: dict[int, int] = {}

    def root(number: int) -> int:
        while first.setdefault(number, number) != number:
            number = first[number]
        return number

    for numbers in passes.values():
        lowest, *others = sorted(map(root, numbers))
        for other in others:
            first[other] = lowest
    return {number: root(number) for number in first}
