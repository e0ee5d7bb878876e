"""A plan as passes: what `echoc lower` and `echosim run` make of a step graph, in order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from echograph.errors import UsageError
from echograph.ir.graph import JobGraph, StepGraph, Workload
from echograph.ir.passes import PASSES
from echograph.ir.passes.base import Note, Pass, run
from echograph.models.stacks import Stack, load_stack
from echograph.simulator.clusters import Cluster
from echograph.workflow.plan import Plan, micro_batches, spread


def passes(plan: Plan, workload: Workload, cluster: Cluster) -> tuple[Pass, ...]:
    """What a plan makes of a step graph: the whole order, with every option.

    Those up to the first that makes a job of the step (`base.split_at_job`) depend neither on the cluster nor on
    how many data-parallel ranks there are.

    Args:
        plan: how the step is spread.
        workload: of the step.
        cluster: that it runs on.

    Raises:
        UsageError: the plan's sizes do not multiply to the GPUs, a batch or a number of copies does not divide, or
            what `plan.passes` lists is no list of passes.
    """
    if plan.passes:
        from echograph.ir.passes.spec import parse_passes

        return parse_passes(plan.passes)
    stack = load_stack(plan.stack) if plan.stack else Stack()
    plan = with_stack(plan, stack)
    _, ranks = spread(plan, cluster.gpus_per_node, cluster.max_gpus, cluster.name)
    count = micro_batches(plan, ranks, plan.micro_batch or workload.batch_size)
    replicas, dropping = ranks // plan.expert_ranks, {"capacity_factor": plan.capacity_factor}
    experts = {"imbalance": plan.expert_imbalance, "across": ("cp",) if plan.shares_experts_over_cp else ()}
    types = {"dtype": plan.precision or None, "grad_dtype": plan.grad_dtype or None}
    delayed = stack.fp8_scaling == "delayed" and plan.precision == "fp8"
    recipe: dict[str, Any] = {"kept": stack.fp8_kept, "delayed": delayed}
    recipe |= {"weights": stack.fp8_weights, "experts": stack.fp8_experts}
    order: tuple[tuple[bool, str, dict[str, Any]], ...] = (
        # The step that one rank would run alone: its batch, what it is asked for, what it computes again.
        (plan.micro_batch not in (None, workload.batch_size), "micro_batch", {"size": plan.micro_batch}),
        (True, "model_flops", dropping),
        (plan.recompute != "none", "recompute", _recompute(plan)),
        # That of one of the ranks that share it, in its types: products are scaled as each rank has them.
        (plan.tp > 1, "tensor_parallel", _tensor_parallel(plan)),
        (plan.cp > 1, "context_parallel", {"size": plan.cp, "method": plan.cp_method.replace("-", "_")}),
        (
            plan.ep > 1 or plan.capacity_factor is not None,
            "expert_parallel",
            {"size": plan.ep} | dropping | experts,
        ),
        (plan.loss == "fused", "fuse_loss", {}),
        (bool(plan.precision or plan.grad_dtype), "precision", types | recipe),
        # The kernels that its stack runs.
        (bool(stack.attention), "attention_kernel", {"kernel": _attention(stack, cluster)}),
        (bool(stack.fuse), "fuse", {"within": stack.fuse}),
        # The job of all ranks.
        (plan.pp > 1, "pipeline", _pipeline(plan, count)),
        (plan.zero < 3, "data_parallel", _data_parallel(plan, replicas, count)),
        (plan.zero == 3, "fully_shard", _fully_shard(plan, replicas, count)),
        (plan.mesh_order != Plan().mesh_order, "mesh_order", {"order": tuple(plan.mesh_order.split("-"))}),
    )
    return tuple(PASSES[name](**options) for wanted, name, options in order if wanted)


def with_stack(plan: Plan, stack: Stack) -> Plan:
    """The plan with what its stack says where the plan says nothing."""
    in_pipeline = plan.pp > 1 and stack.overlap_grad_reduce_in_pipelines is not None
    reduces = stack.overlap_grad_reduce_in_pipelines if in_pipeline else stack.overlap_grad_reduce
    said: dict[str, Any] = {
        "overlap_grad_reduce": reduces,
        "overlap_param_gather": stack.overlap_param_gather if plan.zero in (1, 2) else None,
        "recompute_early_stop": stack.recompute_early_stop,
        "loss": stack.loss if plan.tp == 1 else "",
        "grad_dtype": (plan.pp > 1 and stack.grad_dtype_in_pipelines) or stack.grad_dtype,
    }
    return replace(plan, **{name: value for name, value in said.items() if getattr(plan, name) in (None, "")})


def _attention(stack: Stack, cluster: Cluster) -> str:
    """The first of a stack's kernels that a cluster's device has a model of; the first where it has none."""
    from echograph.profiler.costs import load_device

    if not stack.attention:
        return ""
    known = load_device(cluster.device).attention
    return next((kernel for kernel in stack.attention if kernel in known), stack.attention[0])


def apply(
    graph: StepGraph | JobGraph, plan: Plan, cluster: Cluster, note: Note | None = None
) -> StepGraph | JobGraph:
    """What a plan makes of a graph: a job, or what the passes leave that it lists itself.

    Args:
        graph: a step; or a job, which is taken as it is.
        plan: how it is spread.
        cluster: that it runs on.
        note: told what could not be spread, and is computed by every rank.

    Raises:
        UsageError: as `passes`, or options for a job graph that has its plan already.
        PlanError: the plan does not fit the model.
    """
    return run(graph, _passes_of(graph, plan, cluster), verify=bool(plan.passes), note=note)


def lower(graph: StepGraph | JobGraph, plan: Plan, cluster: Cluster, note: Note | None = None) -> JobGraph:
    """`apply` where a job is needed.

    Raises:
        PlanError: also where the passes that a plan lists leave a step.
    """
    # The passes of a plan end in a builder, which verifies; a list may hold anyone's.
    return run(graph, _passes_of(graph, plan, cluster), to=JobGraph, verify=bool(plan.passes), note=note)


def _passes_of(graph: StepGraph | JobGraph, plan: Plan, cluster: Cluster) -> tuple[Pass, ...]:
    if isinstance(graph, JobGraph) and not plan.passes:
        return _as_it_is(graph, plan)
    return passes(plan, graph.workload, cluster)


def _as_it_is(graph: JobGraph, plan: Plan) -> tuple[Pass, ...]:
    asked = [name for name in plan.given if name not in ("gpus", "cluster")]
    if asked:
        raise UsageError(f"a job graph has its plan already: give {', '.join(asked)} with its step graph")
    if plan.gpus in (None, graph.world_size):
        return ()
    if graph.mesh:
        raise UsageError(
            f"--gpus {plan.gpus}: the job graph is for {graph.world_size}; give its step graph instead"
        )
    return (PASSES["resize_world"](gpus=plan.gpus),)


def _recompute(plan: Plan) -> dict[str, Any]:
    counted = plan.recompute.isdigit()
    return {
        "policy": "full" if counted else plan.recompute.replace("-", "_"),
        "every": int(plan.recompute) if counted else 1,
        "early_stop": plan.recompute_early_stop,
    }


def _tensor_parallel(plan: Plan) -> dict[str, Any]:
    patterns = None
    if plan.tp_plan:
        from echograph.ir.passes.tensor_parallel.plan import read_plan

        patterns = read_plan(Path(plan.tp_plan))
    return {"size": plan.tp, "plan": patterns, "sequence_parallel": plan.sequence_parallel}


def _pipeline(plan: Plan, count: int) -> dict[str, Any]:
    try:
        layers = tuple(int(part) for part in plan.stage_layers.split(",")) if plan.stage_layers else None
    except ValueError:
        raise UsageError(
            f"--stage-layers {plan.stage_layers[:40]}: give whole numbers with commas, as 10,12,12,10"
        ) from None
    schedule = schedule_of(plan)
    return {"stages": plan.pp, "micro_batches": count, "schedule": schedule, "chunks": plan.vpp, "layers": layers}


def schedule_of(plan: Plan) -> str:
    """The pipeline schedule of a plan; "" without a pipeline."""
    return plan.schedule or (("interleaved" if plan.vpp > 1 else "1f1b") if plan.pp > 1 else "")


def _data_parallel(plan: Plan, replicas: int, count: int) -> dict[str, Any]:
    # Micro-batches of a pipeline are in its schedule already.
    options = {"replicas": replicas, "micro_batches": 1 if plan.pp > 1 else count}
    names = ("zero", "overlap_grad_reduce", "overlap_param_gather")
    return options | {name: plan.given[name] for name in names if name in plan.given}


def _fully_shard(plan: Plan, replicas: int, count: int) -> dict[str, Any]:
    keep = plan.pp > 1 if plan.reshard_after_forward is None else not plan.reshard_after_forward
    return {
        "replicas": replicas,
        "shard": replicas // plan.hsdp_replicas,
        "micro_batches": 1 if plan.pp > 1 else count,
        "reshard_after_forward": not keep,
    }


def cluster_notes(cluster: Cluster, gpus: int) -> tuple[str, ...]:
    """What of a cluster is extrapolated for so many GPUs."""
    if gpus <= cluster.stated_gpus:
        return ()
    return (
        f"{gpus} GPUs: cluster {cluster.name} states levels for {cluster.stated_gpus}; those above are grown by "
        "its [network.growth], which is assumed",
    )


def record(job: JobGraph, plan: Plan, cluster: Cluster) -> dict[str, Any]:
    """The plan with its defaults filled in, for results; where it lists passes, those instead of its options."""
    mesh = {axis.name: axis.size for axis in job.mesh}
    data = 1
    for name, size in mesh.items():
        data *= size if name.startswith("dp") or name == "ep" else 1
    sizes = {
        "gpus": job.world_size,
        "cluster": cluster.name,
        **{axis: mesh.get(axis, 1) for axis in ("tp", "cp", "ep", "pp")},
        "dp": data,
    }
    options = {
        "vpp": plan.vpp,
        "zero": plan.zero,
        "hsdp_replicas": plan.hsdp_replicas,
        "sequence_parallel": plan.sequence_parallel,
        "schedule": schedule_of(plan),
        "recompute": plan.recompute,
        "precision": plan.precision or job.workload.dtype.text,
    }
    said = {"passes": plan.passes} if plan.passes else options
    return {**sizes, **said, "micro_batch": job.workload.batch_size, "mesh": mesh}
