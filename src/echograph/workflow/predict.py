"""A graph on a system: its job, and the prediction of one step of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from echograph.errors import UsageError
from echograph.ir.graph import JobGraph, StepGraph
from echograph.ir.passes.base import Note
from echograph.models.stacks import load_stack
from echograph.options import given, option_name
from echograph.simulator.flows import links_of
from echograph.simulator.goodput import goodput
from echograph.units import to_s
from echograph.workflow import lowering
from echograph.workflow.plan import Plan
from echograph.workflow.replay import is_traced, replay
from echograph.workflow.scenario import Scenario
from echograph.workflow.system import System

if TYPE_CHECKING:
    from echograph.simulator.result import Result

_OF_SEVERAL = ("degrade", "ranks", "straggler")
_PLAIN = Scenario()


def lower(
    graph: StepGraph | JobGraph, plan: Plan | None = None, system: System | None = None, note: Note | None = None
) -> JobGraph:
    """Spreads a step over the GPUs of a system.

    Args:
        graph: a step graph; a job graph has its plan, and is taken as it is.
        plan: how it is spread; None: data-parallel on one node.
        system: where; None: the cluster that the plan names.
        note: told what could not be spread, and is computed by every rank.

    Returns:
        What every rank executes, with its groups; durations are not in it yet.

    Raises:
        UsageError: the plan's sizes do not multiply to the GPUs, a batch or a number of copies does not divide, or
            options for a job graph that has its plan already.
        PlanError: the plan does not fit the model.
    """
    plan = plan or Plan()
    return lowering.lower(graph, plan, (system or System(plan.cluster)).cluster, note)


def simulate(
    job: JobGraph,
    system: System | None = None,
    scenario: Scenario = _PLAIN,
    *,
    plan: Plan | None = None,
    engine: str = "auto",
    trace_ranks: Sequence[int] = (),
    memory: bool = True,
) -> Result:
    """Predicts one step of a job.

    Args:
        job: what every rank executes, of `lower`, a capture or a file; durations that it has are kept, the others
            are the system's.
        system: where it runs; None: the default cluster.
        scenario: what is asked beyond that.
        plan: of the job, for `Result.plan`, and for what the host of its stack does.
        engine: "auto", or an engine's name.
        trace_ranks: ranks whose timelines are wanted, too (`Result.traced`).
        memory: whether to work out memory, which takes about as long as the rest.

    Returns:
        Times in integer picoseconds (`step_ps`, `interval_ps`), and as seconds in `to_json`.

    Raises:
        SimulationError: an operation has no duration, the job deadlocks, or is too large or too long.
        PlanError: a group does not fit the cluster.
        UsageError: what is asked needs several devices, or another engine, or selects nothing.
    """
    from echograph.simulator import simulate as simulator

    if isinstance(job, StepGraph):
        raise UsageError("a step graph runs on no ranks yet: lower it first, as lower(step, Plan(gpus=8), system)")
    if is_traced(job):
        raise UsageError("a traced job has its own durations: replay it")
    system = system or System()
    if system.profile is not None:
        for name in _OF_SEVERAL:
            if name in given(scenario):
                raise UsageError(
                    f"{option_name(name)}: {system.cluster.name} is one measured device; give a cluster of several"
                )
        if system.settings:
            raise UsageError(f"--set: {system.cluster.name} is one measured device; give a cluster of several")
    where = system.cluster.with_degraded(scenario.degraded)
    for entry in scenario.degraded:
        links_of(job, where).find(entry.where)
    job = system.annotate(job)
    waits = plan is not None and plan.stack != "" and load_stack(plan.stack).host_waits
    result = simulator.simulate(
        job,
        where,
        replace(system.host, waits=True) if waits else system.host,
        peak_flops_per_s=system.peak_flops_per_s(job),
        engine=engine,
        ranks=scenario.every_rank(where.gpus_per_node),
        network=scenario.network or "auto",
        trace_ranks=trace_ranks,
        scales=scenario.scales,
        plan=lowering.record(job, plan or Plan(), where),
        memory=memory,
    )
    result = replace(result, job=job)
    if scenario.reliability is None:
        return result
    nodes = -(-job.world_size // where.gpus_per_node)
    return replace(result, goodput=goodput(to_s(result.step_ps), nodes, scenario.reliability))


def predict(
    graph: StepGraph | JobGraph,
    plan: Plan | None = None,
    system: System | None = None,
    scenario: Scenario = _PLAIN,
    *,
    engine: str = "auto",
    trace_ranks: Sequence[int] = (),
    memory: bool = True,
    note: Note | None = None,
) -> tuple[Result, JobGraph]:
    """Lowers a graph and simulates the job; a job that was traced is replayed.

    Args:
        graph: a step graph, spread by the plan, or a job graph, run as it is.
        plan: how it is spread; None: data-parallel on one node.
        system: where; None: the cluster that the plan names.
        scenario: as `simulate` takes it, as what follows.
        engine: "auto", or an engine's name.
        trace_ranks: ranks whose timelines are wanted, too.
        memory: whether to work out memory.
        note: told what could not be spread.

    Returns:
        The prediction, and the job with its durations.

    Raises:
        EchoError: as `lower`, `simulate` and `replay`.
    """
    plan = plan or Plan()
    if isinstance(graph, JobGraph) and is_traced(graph):
        return _replayed(graph, plan, system, scenario)
    system = system or System(plan.cluster)
    job = lowering.lower(graph, plan, system.cluster, note)
    result = simulate(job, system, scenario, plan=plan, engine=engine, trace_ranks=trace_ranks, memory=memory)
    assert result.job is not None
    return result, result.job


def _replayed(job: JobGraph, plan: Plan, system: System | None, scenario: Scenario) -> tuple[Result, JobGraph]:
    """`replay` for those who predict a step: the step is then all that was traced.

    Raises:
        UsageError: what a traced job has already, or what needs more than its own ranks.
    """
    if asked := [name for name in plan.given if name not in ("gpus", "cluster")]:
        raise UsageError(f"a traced job has its plan already: leave {', '.join(asked)} out")
    asked = [f.name for f in fields(scenario) if f.name in given(scenario) and f.name not in ("scale", "without")]
    other = "cluster" in plan.given or plan.gpus not in (None, job.world_size)
    if system is not None:
        asked += ["set"] if system.settings and not other else []
        asked += [name for name in ("waits", "blocking") if getattr(system.host, name)]
    if asked:
        raise UsageError(f"{', '.join(asked)}: not of a traced job, whose ranks run what they ran")
    network = (system or System(plan.cluster)) if other else None
    result = replay(job, system=network, gpus=plan.gpus, scales=scenario.scales)
    assert result.job is not None
    return result, result.job
