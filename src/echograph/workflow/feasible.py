"""Plans near one that does not fit in memory, and what is said of the one that does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from echograph.errors import EchoError, PlanError
from echograph.ir.graph import JobGraph, StepGraph
from echograph.options import option_name
from echograph.progress import Progress
from echograph.simulator.clusters import Cluster
from echograph.simulator.memory import Memory, Runtime, largest_memory
from echograph.simulator.result import Result
from echograph.units import format_bytes
from echograph.workflow.plan import Plan
from echograph.workflow.predict import lower

ENOUGH = 2
MOST_TRIED = 12
FEW = 3
"""Plans that are tried where nobody asked for them: each takes about as long as the prediction."""
_ACTIVATIONS = ("activation", "input", "workspace", "communication")
_STATES = ("optimizer_state",)
_SHARDED = ("parameter", "gradient", *_STATES)


def feasible_plans(
    graph: StepGraph | JobGraph,
    plan: Plan,
    cluster: Cluster,
    memory: Memory | None,
    progress: Progress,
    most: int = MOST_TRIED,
    runtime: Runtime | None = None,
) -> list[str]:
    """What to change so that a plan fits, least first: "--recompute full (61.2 GiB)"; at most two.

    One option is changed at a time, and where that is not enough, another one with everything recomputed. What
    cannot be enough, since all that it makes smaller is less than what is missing, is not tried.

    Args:
        graph: the step; for a job graph, whose plan is made, nothing can be said.
        plan: the plan that does not fit.
        cluster: the cluster that the job runs on.
        memory: what the plan needs; nothing is tried where it fits.
        progress: told what goes on.
        most: plans that are tried.
        runtime: what the framework takes of memory besides tensors.
    """
    found: list[str] = []
    if isinstance(graph, JobGraph) or memory is None or memory.fits:
        return found
    progress("looking for a plan that fits")
    hopeful = (changes for changes in _changes(plan, cluster) if _may_be_enough(changes, memory))
    for changes in islice(hopeful, most):
        if len(found) == ENOUGH:
            break
        try:
            job = lower(graph, replace(plan, **changes), cluster)
            needed = largest_memory(job, memory.capacity_bytes, runtime)
        except EchoError:
            continue
        if needed is not None and needed.fits:
            words = (
                option_name(name) if value is True else f"{option_name(name)} {value}"
                for name, value in changes.items()
            )
            found.append(f"{' '.join(words)} ({format_bytes(needed.device_bytes)})")
    return found


def _may_be_enough(changes: dict[str, Any], memory: Memory) -> bool:
    """Whether what changes make smaller is more than what is missing."""
    smaller: set[str] = set()
    for name, value in changes.items():
        if name in ("tp", "pp"):
            return True
        if name == "zero":
            smaller |= {*(_SHARDED if value == 3 else _STATES)}
        else:
            smaller |= {*_ACTIVATIONS}
    # What the allocator holds beyond the tensors may become less by any change.
    missing = memory.peak_bytes + sum(memory.overhead_bytes.values()) - memory.capacity_bytes
    return sum(size for role, size in memory.by_role.items() if role in smaller) > missing


def _changes(plan: Plan, cluster: Cluster) -> Iterator[dict[str, Any]]:
    singles = list(_singles(plan, cluster))
    yield from singles
    if plan.recompute != "full":
        yield from ({"recompute": "full", **change} for change in singles if "recompute" not in change)


def _singles(plan: Plan, cluster: Cluster) -> Iterator[dict[str, Any]]:
    if plan.recompute in ("none", "selective"):
        yield {"recompute": "full"}
    if plan.tp > 1 and not plan.sequence_parallel:
        yield {"sequence_parallel": True}
    if plan.zero == 0:
        yield {"zero": 1}
    if plan.zero < 3:
        yield {"zero": 3}
    if plan.micro_batch is not None and plan.micro_batch % 2 == 0:
        yield {"micro_batch": plan.micro_batch // 2}
    for name, most in (("tp", cluster.domain_gpus), ("pp", cluster.max_gpus)):
        for size in (2, 4, 8, 16):
            if getattr(plan, name) < size <= most and plan.dp is None:
                yield {name: size}
                break


def refuse_if_it_does_not_fit(result: Result, near: Sequence[str] = ()) -> None:
    """For those who want a plan beyond the device's memory to fail.

    Args:
        result: the prediction.
        near: what to change so that it fits.

    Raises:
        PlanError: the peak is above the capacity.
    """
    if result.memory is not None and not result.memory.fits:
        raise PlanError(f"the plan needs {shortage(result, near)}")


def shortage(result: Result, near: Sequence[str]) -> str:
    """What memory a plan needs of what there is, for what, and what to change so that it fits."""
    memory = result.memory
    assert memory is not None
    return (
        f"{format_bytes(memory.device_bytes)} of the {format_bytes(memory.capacity_bytes)} of "
        f"{result.device} ({'; '.join(memory.lines(3))}): "
        + (f"it fits with {' or '.join(near)}" if near else "share it over more --tp, --pp or --zero 3 ranks")
    )
