"""A plan as passes: what `echoc lower` and `echosim run` make of a step graph, in order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from echograph.errors import UsageError
from echograph.ir.graph import JobGraph, StepGraph, Workload
from echograph.ir.passes.model import count_model_flops
from echograph.simulator.clusters import Cluster
from echograph.workflow.plan import Plan, micro_batches, spread


def lower(graph: StepGraph | JobGraph, plan: Plan, cluster: Cluster) -> JobGraph:
    """The job that a graph is on a cluster; a job graph is taken as it is.

    Raises:
        UsageError: the plan's sizes do not multiply to the GPUs, a batch or a number of copies does not divide, or
            options for a job graph that has its plan already.
        PlanError: the plan does not fit the model.
    """
    if isinstance(graph, JobGraph):
        return _as_it_is(graph, plan)
    spread(plan, cluster.gpus_per_node, cluster.max_gpus, cluster.name)
    return replicate(share(prepare(graph, plan), plan), plan, cluster)


def replicate(graph: StepGraph, plan: Plan, cluster: Cluster) -> JobGraph:
    """The job of all ranks, from the step that `share` made."""
    _, ranks = spread(plan, cluster.gpus_per_node, cluster.max_gpus, cluster.name)
    count = micro_batches(plan, ranks, graph.workload.batch_size)
    job = _replicate(graph, plan, ranks // plan.expert_ranks, count)
    if plan.mesh_order != Plan().mesh_order:
        from echograph.ir.passes.mesh import MeshOrder

        job = MeshOrder(order=tuple(plan.mesh_order.split("-")))(job)
    return job


def _as_it_is(graph: JobGraph, plan: Plan) -> JobGraph:
    asked = [name for name in plan.given if name not in ("gpus", "cluster")]
    if asked:
        raise UsageError(f"a job graph has its plan already: give {', '.join(asked)} with its step graph")
    if plan.gpus in (None, graph.world_size):
        return graph
    if graph.mesh:
        raise UsageError(
            f"--gpus {plan.gpus}: the job graph is for {graph.world_size}; give its step graph instead"
        )
    from echograph.ir.passes.mesh import ResizeWorld

    return ResizeWorld(gpus=plan.gpus)(graph)


def prepare(graph: StepGraph, plan: Plan) -> StepGraph:
    """The step that one rank would run alone: its batch, and what it computes again."""
    if plan.micro_batch not in (None, graph.workload.batch_size):
        from echograph.ir.passes.micro_batch import MicroBatch

        graph = MicroBatch(size=plan.micro_batch)(graph)
    graph = replace(graph, workload=_model_of(graph, plan))
    if plan.recompute != "none":
        from echograph.ir.passes.recompute import Recompute

        every = int(plan.recompute) if plan.recompute.isdigit() else 1
        policy: Any = "full" if plan.recompute.isdigit() else plan.recompute.replace("-", "_")
        graph = Recompute(policy=policy, every=every, early_stop=plan.recompute_early_stop)(graph)
    return graph


def _model_of(graph: StepGraph, plan: Plan) -> Workload:
    """The workload with the FLOPs of the model, without those of rows that the experts drop."""
    if plan.capacity_factor is not None and plan.capacity_factor < 1:
        from echograph.ir.passes.expert_parallel import ExpertParallel

        graph = ExpertParallel(size=1, capacity_factor=plan.capacity_factor)(graph)
    return count_model_flops(graph).workload


def share(graph: StepGraph, plan: Plan) -> StepGraph:
    """The step of one of the ranks that share it, in its types: products are scaled as each rank has them."""
    if plan.tp > 1:
        graph = tensor_parallel(plan)(graph)
    if plan.cp > 1:
        from echograph.ir.passes.context_parallel import ContextParallel

        method: Any = plan.cp_method.replace("-", "_")
        graph = ContextParallel(size=plan.cp, method=method)(graph)
    if plan.ep > 1 or plan.capacity_factor is not None:
        from echograph.ir.passes.expert_parallel import ExpertParallel

        graph = ExpertParallel(
            size=plan.ep,
            capacity_factor=plan.capacity_factor,
            imbalance=plan.expert_imbalance,
            across=("cp",) if plan.shares_experts_over_cp else (),
        )(graph)
    if plan.loss == "fused":
        from echograph.ir.passes.fuse import FuseLoss

        graph = FuseLoss()(graph)
    if plan.precision or plan.grad_dtype:
        from echograph.ir.passes.precision import Precision

        graph = Precision(dtype=plan.precision or None, grad_dtype=plan.grad_dtype or None)(graph)
    return graph


def tensor_parallel(plan: Plan) -> Any:
    """The tensor-parallel pass of a plan."""
    from echograph.ir.passes.tensor_parallel import TensorParallel

    patterns = None
    if plan.tp_plan:
        from echograph.ir.passes.tensor_parallel.plan import read_plan

        patterns = read_plan(Path(plan.tp_plan))
    return TensorParallel(size=plan.tp, plan=patterns, sequence_parallel=plan.sequence_parallel)


def notes(graph: StepGraph | JobGraph, plan: Plan) -> tuple[str, ...]:
    """What the plan could not spread, and is computed by every rank."""
    if plan.tp == 1 or isinstance(graph, JobGraph):
        return ()
    lines = tensor_parallel(plan).report(graph)
    # Gathering the sequence before a product is what sequence parallelism does, not something it failed to.
    return tuple(line for line in lines if not (plan.sequence_parallel and ": gathers " in line))


def cluster_notes(cluster: Cluster, gpus: int) -> tuple[str, ...]:
    """What of a cluster is extrapolated for so many GPUs."""
    if gpus <= cluster.stated_gpus:
        return ()
    return (
        f"{gpus} GPUs: cluster {cluster.name} states levels for {cluster.stated_gpus}; those above are grown by "
        "its [network.growth], which is assumed",
    )


def _replicate(graph: StepGraph, plan: Plan, replicas: int, count: int) -> JobGraph:
    staged: StepGraph | JobGraph = graph
    if plan.pp > 1:
        staged, count = _pipeline(graph, plan, count), 1
    if plan.zero < 3:
        from echograph.ir.passes.data_parallel import DataParallel

        options = {
            name: getattr(plan, name)
            for name in ("zero", "overlap_grad_reduce", "overlap_param_gather")
            if name in plan.given
        }
        return DataParallel(replicas=replicas, micro_batches=count, **options)(staged)
    from echograph.ir.passes.fully_shard import FullyShard

    keep = plan.pp > 1 if plan.reshard_after_forward is None else not plan.reshard_after_forward
    return FullyShard(
        replicas=replicas,
        shard=replicas // plan.hsdp_replicas,
        micro_batches=count,
        reshard_after_forward=not keep,
    )(staged)


def _pipeline(graph: StepGraph, plan: Plan, count: int) -> JobGraph:
    from echograph.ir.passes.pipeline import Pipeline

    schedule = plan.schedule or ("interleaved" if plan.vpp > 1 else "1f1b")
    return Pipeline(
        stages=plan.pp, micro_batches=count, schedule=schedule, chunks=plan.vpp, layers=_layers(plan.stage_layers)
    )(graph)


def _layers(text: str) -> tuple[int, ...] | None:
    if not text:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--stage-layers {text[:40]}: give whole numbers with commas, as 10,12,12,10") from None


def record(job: JobGraph, plan: Plan, cluster: Cluster) -> dict[str, Any]:
    """The plan with its defaults filled in, for results."""
    mesh = {axis.name: axis.size for axis in job.mesh}
    data = 1
    for name, size in mesh.items():
        data *= size if name.startswith("dp") or name == "ep" else 1
    return {
        "gpus": job.world_size,
        "cluster": cluster.name,
        **{axis: mesh.get(axis, 1) for axis in ("tp", "cp", "ep", "pp")},
        "dp": data,
        "vpp": plan.vpp,
        "zero": plan.zero,
        "hsdp_replicas": plan.hsdp_replicas,
        "sequence_parallel": plan.sequence_parallel,
        "schedule": plan.schedule or (("interleaved" if plan.vpp > 1 else "1f1b") if plan.pp > 1 else ""),
        "recompute": plan.recompute,
        "precision": plan.precision or job.workload.dtype.text,
        "micro_batch": job.workload.batch_size,
        "mesh": mesh,
    }
