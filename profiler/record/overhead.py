"""What recording costs, by what it looks at: measured in the recorded process itself, on work of its own.

A small model takes steps before the window: free, with the tracer's hooks, and under the profiler. The
differences, divided by what was seen, are what an operator, a node of the backward pass and a module cost. No step
of the job is looked at, so that its free steps remain what the answer can be held against.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Annotated

import msgspec

EVALUATES = "autograd::engine::evaluate_function: "
OPERATOR, NESTED, NODE, COLLECTIVE = "operator", "nested", "node", "collective"
FORWARD, BACKWARD, UPDATE = PARTS = ("forward", "backward", "update")
Measured = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
"""Seconds: up to eleven days, whose picoseconds are well within 64 bits."""
_COMPILED = re.compile(r"Backward\d+$")


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of processor time that recording adds to a thread, for each thing of a kind.

    Attributes:
        operator_s: an operator that Python called.
        nested_s: an operator that another operator called.
        node_s: a node of autograd's graph in the backward pass, without the operators in it.
        module_s: a module's forward pass and its output's turn in the backward pass, by hooks.
        collective_s: a call of torch.distributed; None where it could not be measured.
        issue_s: of that, what comes before the call is made.
        how: how it was measured, in a line.
    """

    operator_s: Measured
    nested_s: Measured
    node_s: Measured
    module_s: Measured
    collective_s: Measured | None = None
    issue_s: Measured = 0.0
    how: str = ""


def kind_of(name: str, around: str | None) -> str | None:
    """What an operator of a trace counts as.

    Python calls what nothing is around, and also what runs in autograd's own events, by hooks, and in functions
    that are written in Python.

    Args:
        name: of the operator.
        around: name of the operator that it ran in.

    Returns:
        `OPERATOR`, `NESTED`, `NODE`; None for the function of a node, which counts with the node.
    """
    if name.startswith(EVALUATES):
        return NODE
    if around is None:
        return OPERATOR
    if around == EVALUATES + name:
        return None
    compiled = ("::" in around and "autograd::" not in around) or _COMPILED.search(around) is not None
    return NESTED if compiled else OPERATOR


def measure_overhead(*, shapes: bool, collectives: bool) -> Overhead | None:
    """Measures what recording costs in this thread; a second or so.

    Random numbers, gradients, modules and groups of the job are left alone.

    Args:
        shapes: whether the profiler looks at shapes.
        collectives: whether calls of torch.distributed are measured too.

    Returns:
        None where another profiler is at work, or where hooks on all modules would see the measuring.
    """
    import torch
    from torch.nn.modules import module

    from echograph.profiler.record.sample import STEPS, sampled

    if torch._C._autograd._profiler_enabled() or module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return None
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        found = sampled(shapes=shapes, collectives=collectives)
    counts, free = found.counts, found.free
    hooks = sum(_added(found.hooked, free, part) for part in (FORWARD, BACKWARD))
    adds = {part: _added(found.profiled, free, part) for part in PARTS}
    operator, nested = two_kinds(adds, counts)
    inside = counts[BACKWARD][OPERATOR] * operator + counts[BACKWARD][NESTED] * nested
    observed, issue = (median(column) for column in zip(*found.observed_calls or [(0.0, 0.0)], strict=True))
    return Overhead(
        operator_s=operator,
        nested_s=nested,
        node_s=max(0.0, (adds[BACKWARD] - inside) / counts[BACKWARD][NODE]),
        module_s=max(0.0, hooks / found.modules),
        collective_s=max(0.0, observed - median(took for took, _ in found.calls)) if found.calls else None,
        issue_s=issue,
        how=f"processor time, medians of {STEPS} steps of a small model, observed less free",
    )


def _added(observed: Sequence[Mapping[str, float]], free: Sequence[Mapping[str, float]], part: str) -> float:
    """Seconds that a part takes longer than in the free step before."""
    return median(one[part] - other[part] for one, other in zip(observed, free, strict=True))


def two_kinds(adds: Mapping[str, float], counts: Mapping[str, Mapping[str, int]]) -> tuple[float, float]:
    """What an operator and a nested one cost: of a forward pass most are called by Python, of an update few.

    Args:
        adds: seconds that observing adds to each part.
        counts: operators of each kind in each part.

    Returns:
        The two that explain both parts. A call from Python costs no less than one from compiled code, and neither
        less than 0: where the parts say otherwise, noise does, and what is possible explains their sum.
    """
    (a, b), (c, d) = ([counts[part][kind] for kind in (OPERATOR, NESTED)] for part in (FORWARD, UPDATE))
    forward, update = max(0.0, adds[FORWARD]), max(0.0, adds[UPDATE])
    determinant = a * d - b * c
    operator, nested = (forward * d - update * b) / determinant, (update * a - forward * c) / determinant
    if nested < 0:
        return (forward + update) / (a + c), 0.0
    if operator < nested:
        operator = nested = (forward + update) / (a + b + c + d)
    return operator, nested
