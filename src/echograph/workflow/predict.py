"""A graph on a system: its job, and the prediction of one step; a job that was traced is replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from echograph.errors import UsageError
from echograph.ir.graph import JobGraph, StepGraph
from echograph.ir.passes import PASSES
from echograph.ir.passes.base import Note, run
from echograph.ir.traced import is_traced
from echograph.ir.types import COMMUNICATIONS, OpKind
from echograph.models.stacks import Stack, load_stack
from echograph.options import given, option_name
from echograph.simulator.clusters import Cluster
from echograph.simulator.form import load_form
from echograph.simulator.goodput import goodput
from echograph.simulator.host import IssueTimes
from echograph.simulator.result import Result
from echograph.units import to_s
from echograph.workflow import plan as plans
from echograph.workflow.plan import Plan
from echograph.workflow.replay import replay
from echograph.workflow.scenario import Scenario
from echograph.workflow.system import IDLE_HOST_WAITS, System, runtime_of

if TYPE_CHECKING:
    from echograph.profiler.costs.estimate import KnownCosts
    from echograph.simulator.durations import NetworkModel
    from echograph.simulator.memory import Memory

_OF_SEVERAL = ("degrade", "ranks", "straggler")
_PLAIN = Scenario()
UNSAID_STACK = 0.19
"""Standard error of the logarithm of a step whose plan names no stack: by how much the stacks' steps differ from
it, over four plans (Llama 3.1 8B with ZeRO-3 and with tensor parallelism, 70B with pipelines, GPT-2 XL), as
tests/workflow/test_stacks_with_plans.py works out."""


def lower(
    graph: StepGraph | JobGraph,
    plan: Plan | None = None,
    system: System | Cluster | None = None,
    note: Note | None = None,
) -> JobGraph:
    """Spreads a step over the GPUs of a system.

    Args:
        graph: a step graph; a job graph has its plan, and is taken as it is.
        plan: how it is spread; None: data-parallel on one node.
        system: where, or its cluster alone; None: the cluster that the plan names.
        note: told what could not be spread, and is computed by every rank.

    Returns:
        What every rank executes, with its groups; durations are not in it yet.

    Raises:
        UsageError: the plan's sizes do not multiply to the GPUs, a batch or a number of copies does not divide, or
            options for a job graph that has its plan already.
        PlanError: the plan does not fit the model, or the passes that it lists itself leave a step.
    """
    plan = plan or Plan()
    where = system if isinstance(system, Cluster) else (system or System(plan.cluster)).cluster
    return run(plans.apply(graph, plan, where, note), (), to=JobGraph)


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
        plan: the plan that made the job, for `Result.plan`, and for what the host of its stack does.
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
    where = system.cluster.with_degraded(scenario.degraded)
    if scenario.degraded:
        from echograph.simulator.flows import links_of

        for entry in scenario.degraded:
            links_of(job, where).find(entry.where)
    said = (plan.stack if plan is not None else "") or job.workload.stack
    job, host, sms = on_system(job, said, system)
    result = simulator.simulate(
        job,
        where,
        host,
        peak_flops_per_s=system.peak_flops_per_s(job),
        engine=engine,
        ranks=scenario.every_rank(where.gpus_per_node),
        network=scenario.network or "auto",
        trace_ranks=trace_ranks,
        scales=scenario.scales,
        sms=sms,
        plan=plans.record(job, replace(plan or Plan(), stack=said), where),
        memory=memory,
        runtime=runtime_of(said, system.architecture),
        form=load_form(),
        unsaid=0.0 if said else UNSAID_STACK,
    )
    result = replace(result, job=job)
    if scenario.reliability is None:
        return result
    nodes = -(-job.world_size // where.gpus_per_node)
    return replace(result, goodput=goodput(to_s(result.step_ps), nodes, scenario.reliability))


def on_system(
    job: JobGraph,
    stack: str,
    system: System,
    costs: KnownCosts | None = None,
    network: NetworkModel | None = None,
) -> tuple[JobGraph, IssueTimes, dict[str, float]]:
    """A job with its durations on a system, and what runs it.

    Args:
        job: the job.
        stack: the software that trains; "" where it is not known.
        system: where.
        costs: as of `System.annotate`.
        network: as of `System.annotate`.

    Returns:
        The job, the host that runs the stack, and the share of the multiprocessors that its reductions take, by
        the label of their group.
    """
    of = load_stack(stack) if stack else Stack()
    job = system.annotate(plans.with_kernels(job, of, system.device), costs, network)
    sms = {"tp": of.tp_comm_sms / system.sm_count} if system.sm_count else {}
    return job, _host_of(job, of, system), sms


def _host_of(job: JobGraph, of: Stack, system: System) -> IssueTimes:
    """The host that runs a stack."""
    host = system.host_of_script(job) or system.host_running(of.host)
    return replace(host, waits=True) if of.host_waits else host


def memory_of(
    job: JobGraph,
    system: System,
    plan: Plan,
    *,
    most_bytes: float = inf,
) -> Memory | None:
    """The memory that `simulate` tells of a job, without its time and without what the peak is made of.

    Args:
        job: as of `simulate`.
        system: where it runs.
        plan: the plan that made the job.
        most_bytes: as of `largest_memory`.

    Returns:
        None for a job that has no tensors.
    """
    from echograph.simulator.memory import largest_memory

    said = plan.stack or job.workload.stack
    of = load_stack(said) if said else Stack()
    # What lives when is said by the order of operations, not by how long they take.
    job = plans.with_kernels(job, of, system.device)
    job, runtime = _host_of(job, of, system).runs(job), runtime_of(said, system.architecture)
    return largest_memory(job, system.cluster.memory_bytes, runtime, most_bytes, parts=False)


def predict(
    graph: StepGraph | JobGraph,
    plan: Plan | None = None,
    system: System | None = None,
    scenario: Scenario = _PLAIN,
    *,
    engine: str = "auto",
    trace_ranks: Sequence[int] = (),
    memory: bool = True,
    model_communication: bool = False,
    note: Note | None = None,
) -> tuple[Result, JobGraph]:
    """Lowers a graph and simulates the job; a job that was traced is replayed.

    Args:
        graph: a step graph, spread by the plan, or a job graph, run as it is.
        plan: how it is spread; None: data-parallel on one node.
        system: where; None: the cluster that the plan names.
        scenario: what is asked beyond that, as in `simulate`.
        engine: "auto", or an engine's name.
        trace_ranks: ranks whose timelines are wanted, too.
        memory: whether to work out memory.
        model_communication: communication takes what the cluster's model says, not what the graph holds of it.
        note: told what could not be spread, and which options have no effect.

    Returns:
        The prediction, and the job with its durations.

    Raises:
        EchoError: as `lower`, `simulate` and `replay`.
    """
    plan = plan or Plan()
    if isinstance(graph, JobGraph) and is_traced(graph):
        others = {
            "engine": engine != "auto",
            "trace_ranks": trace_ranks,
            "model_communication": model_communication,
        }
        return _replayed(graph, plan, system, scenario, [name for name, asked in others.items() if asked])
    system = system or System(plan.cluster)
    if model_communication:
        graph = _without_times_of_communication(graph)
    job = lower(graph, plan, system, note)
    if note is not None and "host_waits" in system.asked and OpKind.RECV not in job.ops.kind:
        note(IDLE_HOST_WAITS)
    result = simulate(job, system, scenario, plan=plan, engine=engine, trace_ranks=trace_ranks, memory=memory)
    assert result.job is not None
    return result, result.job


def _without_times_of_communication(graph: StepGraph | JobGraph) -> StepGraph | JobGraph:
    """The graph without what it holds of the time of communications.

    Raises:
        UsageError: it holds none.
    """
    ops = graph.ops
    if not np.isin(ops.kind[ops.duration.rows], COMMUNICATIONS).any():
        raise UsageError("--model-communication: the graph holds no time of a communication: leave it out")
    return run(graph, (PASSES["forget_communication"](),))


def _replayed(
    job: JobGraph, plan: Plan, system: System | None, scenario: Scenario, others: Sequence[str]
) -> tuple[Result, JobGraph]:
    """`replay` for those who predict a step: the step is then all that was traced.

    Args:
        job: the traced job.
        plan: whose cluster and GPUs count.
        system: where; None: as it was traced.
        scenario: what is scaled.
        others: options that were given besides.

    Raises:
        UsageError: what a traced job has already, or what needs more than its own ranks.
    """
    if asked := [name for name in plan.given if name not in ("gpus", "cluster")]:
        raise UsageError(f"a traced job has its plan already: leave {', '.join(asked)} out")
    asked = [f.name for f in fields(scenario) if f.name in given(scenario) and f.name not in ("scale", "without")]
    other = "cluster" in plan.given or plan.gpus not in (None, job.world_size)
    if system is not None:
        # The network of another cluster counts, and nothing that computes.
        asked += [name for name in system.asked if not (name == "set" and other)]
    if asked := [*asked, *others]:
        names = ", ".join(map(option_name, asked))
        raise UsageError(f"{names}: not of a traced job, whose ranks run what they ran")
    network = (system or System(plan.cluster)) if other else None
    result = replay(job, system=network, gpus=plan.gpus, scales=scenario.scales)
    assert result.job is not None
    return result, result.job
