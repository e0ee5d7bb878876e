"""The contract of an annotated graph: what a capture writes on the nodes, and what lowering relies on.

Both producers (`recorder`, `aot`) emit one `torch.fx.Graph` with these entries in `node.meta`:

    placeholder     VAL     the fake tensor
                    ROLE    one of `ROLES`
                    FQN     its dotted name (`encoder.0.weight`, `encoder.0.weight.exp_avg`, `input_ids`)
    call_function   VAL     the fake tensor, a tuple of fake tensors and numbers, or None (nothing returned)
                    PHASE   one of `PHASES`
                    MODULE  dotted path of the module that ran it, "" for the root (the loss, the optimizer)
    product, convolution  TF32  whether PyTorch lets it round operands of fp32 to TF32
    backward        FORWARD_NODE  name of the forward node it differentiates, on at least
                                  `FORWARD_NODE_COVERAGE` of the backward nodes, and of the recomputed
    one per parameter  GRADIENT_OF  name of the parameter, on the node that makes its final gradient

Call nodes are ATen overloads, plus `operator.getitem` for one result of an operator with several.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from echograph.errors import CaptureError

if TYPE_CHECKING:
    from torch.fx import Graph, Node

VAL = "val"
PHASE = "phase"
MODULE = "module"
FORWARD_NODE = "forward_node"
GRADIENT_OF = "gradient_of"
ROLE = "role"
FQN = "fqn"
NUMBER = "number"
TF32 = "tf32"

FORWARD = "forward"
BACKWARD = "backward"
RECOMPUTE = "recompute"
OPTIMIZER = "optimizer"
PHASES = (FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER)

PARAMETER = "parameter"
BUFFER = "buffer"
INPUT = "input"
OPTIMIZER_STATE = "optimizer_state"
GRADIENT = "gradient"
ROLES = (PARAMETER, BUFFER, INPUT, OPTIMIZER_STATE, GRADIENT)

FORWARD_NODE_COVERAGE = 0.99


def call_nodes(graph: Graph) -> Iterator[Node]:
    """The operations of a graph, in program order, without `getitem`."""
    return (n for n in graph.nodes if n.op == "call_function" and n.target is not operator.getitem)


def forward_node_coverage(graph: Graph) -> float:
    """Share of the backward operations that name the forward operation they differentiate."""
    backward = [n for n in call_nodes(graph) if n.meta[PHASE] == BACKWARD]
    return sum(FORWARD_NODE in n.meta for n in backward) / len(backward) if backward else 1.0


def check_annotations(graph: Graph) -> None:
    """Verifies the contract above.

    Raises:
        CaptureError: the first node that breaks it, and how.
    """
    seen: dict[str, Node] = {}
    for node in graph.nodes:
        seen[node.name] = node
        if node.op == "placeholder":
            _check_placeholder(node)
        elif node.op == "call_function":
            _check_call(node, seen)
        elif node.op != "output":
            raise _broken(node, f"is a '{node.op}', which an annotated graph does not hold")
    coverage = forward_node_coverage(graph)
    if coverage < FORWARD_NODE_COVERAGE:
        raise CaptureError(
            f"{coverage:.1%} of the backward operations name their forward operation, "
            f"at least {FORWARD_NODE_COVERAGE:.0%} must: report the model that does this"
        )


def _check_placeholder(node: Node) -> None:
    import torch

    if not isinstance(node.meta.get(VAL), torch.Tensor):
        raise _broken(node, "has no tensor in meta['val']")
    if node.meta.get(ROLE) not in ROLES:
        raise _broken(node, f"has the role {node.meta.get(ROLE)!r}, not one of {', '.join(ROLES)}")
    if not node.meta.get(FQN):
        raise _broken(node, "has no name in meta['fqn']")


def _check_call(node: Node, seen: dict[str, Node]) -> None:
    from torch._ops import OpOverload

    if VAL not in node.meta:
        raise _broken(node, "has no meta['val']")
    if not _is_value(node.meta[VAL]):
        raise _broken(node, f"has a {type(node.meta[VAL]).__name__} in meta['val']")
    if node.meta.get(PHASE) not in PHASES:
        raise _broken(node, f"has the phase {node.meta.get(PHASE)!r}, not one of {', '.join(PHASES)}")
    if not isinstance(node.meta.get(MODULE), str):
        raise _broken(node, "has no module path")
    if node.target is not operator.getitem and not isinstance(node.target, OpOverload):
        raise _broken(node, f"calls {node.target!r}, which is no ATen operator")
    forward = node.meta.get(FORWARD_NODE)
    if forward is not None:
        if forward not in seen:
            raise _broken(node, f"names the forward node '{forward}', which does not come before it")
        if seen[forward].meta[PHASE] != FORWARD:
            raise _broken(node, f"names '{forward}', which is not a forward node")


def _is_value(value: Any) -> bool:
    import torch

    if isinstance(value, tuple | list):
        return all(_is_value(v) for v in value)
    return value is None or isinstance(value, torch.Tensor | int | float | bool)


def _broken(node: Node, what: str) -> CaptureError:
    return CaptureError(f"annotated graph: node '{node.name}' {what}")
