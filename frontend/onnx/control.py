"""Control flow: `If`, `Loop` and `Scan`, as long as shapes and constants alone decide which way it goes.

A graph holds one course of the step. A branch that data decide on is taken as the caller says, and that is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from echograph.errors import CaptureError
from echograph.frontend.onnx.model import Body, Node

MAX_ITERATIONS = 4096
BRANCHES = ("then", "else")
Execute = Callable[[Body, Sequence[Any]], list[Any]]
"""Runs a body on values for its inputs -> its outputs."""
Numbers = Callable[[Any], np.ndarray[Any, Any] | None]
"""A value's numbers where they are known."""
Control = Callable[[Node, Sequence[Any], Execute, Numbers], list[Any]]


def choose(node: Node, condition: np.ndarray[Any, Any] | None, branch: str) -> Body:
    """The branch of an `If` that runs.

    Args:
        node: the node.
        condition: its numbers, None where they depend on data.
        branch: which one is taken then, of `BRANCHES`; "" refuses.

    Raises:
        CaptureError: the condition depends on data and nobody chose; or the node lacks a branch.
    """
    if condition is None and not branch:
        raise CaptureError(
            "its condition depends on data: say which branch the step takes, with --branch then or --branch else"
        )
    taken = branch if condition is None else "then" if bool(condition.reshape(-1)[0]) else "else"
    body = node.bodies.get(f"{taken}_branch")
    if body is None:
        raise CaptureError(f"it has no {taken}_branch")
    return body


def loop(node: Node, operands: Sequence[Any], execute: Execute, numbers: Numbers) -> list[Any]:
    """Runs the body of a `Loop` as often as its trip count and its condition say.

    Raises:
        CaptureError: they depend on data, or are more than `MAX_ITERATIONS`.
    """
    body = _body(node)
    most, going = _trip_count(operands, numbers), _condition(operands[1] if len(operands) > 1 else None, numbers)
    carried, count = list(operands[2:]), len(operands) - 2
    scanned: list[list[Any]] = [[] for _ in body.outputs[1 + count :]]
    iteration = 0
    while going and (most is None or iteration < most):
        if iteration == MAX_ITERATIONS:
            raise CaptureError(f"it runs more than {MAX_ITERATIONS} times: export the model without the loop")
        with _disable_current_modes():
            position, go_on = torch.tensor(iteration), torch.tensor(True)
        results = execute(body, [position, go_on, *carried])
        going = _condition(results[0], numbers)
        carried = results[1 : 1 + count]
        for values, value in zip(scanned, results[1 + count :], strict=True):
            values.append(value)
        iteration += 1
    if scanned and not iteration:
        raise CaptureError("it runs no time, so that the shape of what it collects is not known")
    return carried + [torch.stack(values) for values in scanned]


def scan(node: Node, operands: Sequence[Any], execute: Execute, numbers: Numbers) -> list[Any]:
    """Runs the body of a `Scan` once for every slice of what it scans.

    Raises:
        CaptureError: there are none, or more than `MAX_ITERATIONS`.
    """
    del numbers
    body, inputs = _body(node), _integer(node, "num_scan_inputs")
    states = len(operands) - inputs
    outputs = len(body.outputs) - states
    if not 0 < inputs <= len(operands) or outputs < 0:
        raise CaptureError(f"it scans {inputs} of {len(operands)} inputs")
    axes, backward = _listed(node, "scan_input_axes", inputs), _listed(node, "scan_input_directions", inputs)
    slices = [_unbind(t, axis, back) for t, axis, back in zip(operands[states:], axes, backward, strict=True)]
    length = len(slices[0])
    if not 0 < length <= MAX_ITERATIONS:
        raise CaptureError(f"it runs {length} times: 1 to {MAX_ITERATIONS} are possible")
    carried = list(operands[:states])
    scanned: list[list[Any]] = [[] for _ in range(outputs)]
    for position in range(length):
        results = execute(body, [*carried, *(part[position] for part in slices)])
        carried = results[:states]
        for values, value in zip(scanned, results[states:], strict=True):
            values.append(value)
    places, turned = _listed(node, "scan_output_axes", outputs), _listed(node, "scan_output_directions", outputs)
    joined = zip(scanned, places, turned, strict=True)
    return carried + [torch.stack(v[::-1] if back else v, axis) for v, axis, back in joined]


def _body(node: Node) -> Body:
    if "body" not in node.bodies:
        raise CaptureError("it has no body")
    return node.bodies["body"]


def _trip_count(operands: Sequence[Any], numbers: Numbers) -> int | None:
    if not operands or operands[0] is None:
        return None
    known = numbers(operands[0])
    if known is None:
        raise CaptureError("its trip count depends on data: export the model for one length")
    return int(known.reshape(-1)[0])


def _condition(value: Any, numbers: Numbers) -> bool:
    if value is None:
        return True
    known = numbers(value)
    if known is None:
        raise CaptureError("its condition depends on data: export the model with a constant trip count")
    return bool(known.reshape(-1)[0])


def _integer(node: Node, name: str) -> int:
    return int(node.attributes.get(name, 0))


def _listed(node: Node, name: str, count: int) -> list[int]:
    return [int(value) for value in node.attributes.get(name) or [0] * count]


def _unbind(value: Tensor, axis: int, backward: int) -> list[Tensor]:
    parts = list(value.unbind(axis))
    return parts[::-1] if backward else parts


CONTROL: Mapping[str, Control] = {"Loop": loop, "Scan": scan}
"""What runs a body again and again; `If` is `choose` and one run."""
