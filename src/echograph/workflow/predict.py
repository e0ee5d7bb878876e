"""Where rooms meet: a model to a step graph, a step graph to an annotated job, a job to a prediction."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from echograph.ir.graph import JobGraph, StepGraph
from echograph.ir.passes.base import Note
from echograph.simulator.clusters import load_cluster
from echograph.simulator.flows import links_of
from echograph.simulator.goodput import goodput
from echograph.simulator.host import Host
from echograph.units import to_ps, to_s
from echograph.workflow.lowering import apply, lower, record
from echograph.workflow.plan import Plan, PlanOptions
from echograph.workflow.replay import is_traced, replay_plan
from echograph.workflow.scenario import Scenario

if TYPE_CHECKING:
    from echograph.profiler.costs import DeviceProfile
    from echograph.simulator.result import Result


def lower_graph(graph: StepGraph | JobGraph, plan: Plan, note: Note | None = None) -> StepGraph | JobGraph:
    """What a plan makes of a graph on its cluster (`lowering.apply`)."""
    from echograph.workflow.measured import cluster_of

    return apply(graph, plan, cluster_of(plan.cluster), note)


def predict(
    graph: StepGraph | JobGraph, *, engine: str = "auto", **options: Unpack[PlanOptions]
) -> tuple[Result, JobGraph]:
    """Lowers a graph to a job on a cluster, annotates it and simulates it.

    Args:
        graph: a step graph, spread by the plan, or a job graph, run as it is.
        engine: "auto" or an engine's name.
        options: the fields of `plan.Plan`; none: one node, data-parallel.
    """
    return predict_plan(graph, Plan(**options), engine=engine)


def predict_plan(
    graph: StepGraph | JobGraph,
    plan: Plan,
    *,
    engine: str = "auto",
    scenario: Scenario | None = None,
    memory: bool = True,
    note: Note | None = None,
) -> tuple[Result, JobGraph]:
    """`predict` for a plan that is made already, with what is asked beyond it, and without memory if so asked.

    `note` is told what the plan could not spread.
    """
    from echograph.profiler.costs import load_device
    from echograph.profiler.costs.estimate import estimate
    from echograph.simulator.simulate import simulate

    scenario = scenario or Scenario()
    if isinstance(graph, JobGraph) and is_traced(graph):
        return replay_plan(graph, plan, scenario)
    if plan.cluster.endswith(".pb"):
        from echograph.workflow.measured import predict_measured

        return predict_measured(graph, plan, engine=engine, scenario=scenario, memory=memory, note=note)
    where = load_cluster(plan.cluster, scenario.settings).with_degraded(scenario.degraded)
    device = load_device(where.device)
    # A cluster may name the file of a device; durations carry the name that stands in it.
    where = replace(where, device=device.name)
    job = lower(graph, plan, where, note)
    for entry in scenario.degraded:
        links_of(job, where).find(entry.where)
    job = estimate(job, device)(job)
    host = host_of(device, waits=scenario.host_waits, blocking=scenario.launch_blocking)
    peak = _peak(job, device)
    result = simulate(
        job,
        where,
        host,
        peak_flops_per_s=peak,
        engine=engine,
        ranks=scenario.ranks(where.gpus_per_node),
        network=scenario.network,
        trace_ranks=scenario.trace_ranks,
        scales=scenario.scales,
        plan=record(job, plan, where),
        memory=memory,
    )
    if scenario.reliability is not None:
        nodes = -(-job.world_size // where.gpus_per_node)
        result = replace(result, goodput=goodput(to_s(result.step_ps), nodes, scenario.reliability))
    return result, job


def host_of(device: DeviceProfile, *, waits: bool = False, blocking: bool = False) -> Host:
    """The host that feeds a device, and what it waits for (`Host`)."""
    from echograph.workflow.annotate import host_name

    model = device.host
    communication = None if model.communication_s is None else to_ps(model.communication_s)
    return Host(
        op_ps=to_ps(model.op_s),
        launch_ps=to_ps(model.kernel_s),
        communication_ps=communication,
        spread=host_spread(),
        waits=waits,
        blocking=blocking,
        name=host_name(device.name),
    )


def host_spread() -> float:
    """Relative standard error of the host's times."""
    from echograph.profiler.costs.host import SPREAD

    return SPREAD


def _peak(job: JobGraph, device: DeviceProfile) -> float:
    """FLOP/s of the device in the step's type; 0 where it has none."""
    from echograph.profiler.costs.estimate import DTYPE_NAMES
    from echograph.profiler.costs.gemm import STAND_IN

    peaks, name = device.datasheet.peak_flops_per_s, DTYPE_NAMES.get(job.workload.dtype, "fp32")
    return peaks.get(name) or peaks.get(STAND_IN.get(name, name), 0.0)
