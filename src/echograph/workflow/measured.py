"""A step on the machine that a profile was measured on: one device, its own durations, and the host beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from echograph.errors import UsageError
from echograph.ir.graph import JobGraph, StepGraph
from echograph.ir.passes.annotate import join
from echograph.ir.passes.base import Note
from echograph.ir.profile import Profile, load_profile
from echograph.simulator.clusters import Cluster, load_cluster
from echograph.simulator.host import Host
from echograph.simulator.result import Result
from echograph.workflow.lowering import lower, record
from echograph.workflow.plan import Plan
from echograph.workflow.scenario import Scenario

_ALONE = {"degraded": "--degrade", "settings": "--set", "every_rank": "--ranks", "slow": "--straggler"}


def predict_measured(
    graph: StepGraph | JobGraph,
    plan: Plan,
    *,
    engine: str = "auto",
    scenario: Scenario | None = None,
    memory: bool = True,
    note: Note | None = None,
) -> tuple[Result, JobGraph]:
    """`predict_plan` where the cluster is a profile.

    Raises:
        UsageError: what is asked needs more than one device.
        SimulationError: an operation is not in the profile.
    """
    from echograph.simulator.simulate import simulate

    scenario = scenario or Scenario()
    for field, option in _ALONE.items():
        if getattr(scenario, field):
            raise UsageError(f"{option}: {plan.cluster} is one measured device; give a cluster of several")
    profile = load_profile(plan.cluster)
    where = machine(profile, Path(plan.cluster).stem)
    job = lower(graph, plan, where, note)
    annotate, _ = join(job, profile)
    result = simulate(
        annotate(job),
        where,
        host(profile),
        engine=engine,
        trace_ranks=scenario.trace_ranks,
        scales=scenario.scales,
        plan=record(job, plan, where),
        memory=memory,
    )
    return result, job


def cluster_of(name: str, settings: Mapping[str, str] = MappingProxyType({})) -> Cluster:
    """What `--cluster` names: a preset, a TOML file, or the one device of a profile.

    Args:
        name: of the cluster.
        settings: keys of its file with other values, as `load_cluster` takes them; of a profile there are none.
    """
    if name.endswith(".pb"):
        return machine(load_profile(name), Path(name).stem)
    return load_cluster(name, settings)


def machine(profile: Profile, name: str) -> Cluster:
    """A cluster of one device; what stands there of links joins nothing."""
    return replace(
        load_cluster(),
        name=name,
        device=profile.environment.device,
        memory_bytes=profile.environment.memory_bytes,
        gpus_per_node=1,
        domain_gpus=1,
        nvlink_bytes_per_s=0.0,
        max_gpus=1,
        stated_gpus=1,
    )


def host(profile: Profile) -> Host:
    """The host as it was measured. Where it computes itself it issues nothing meanwhile."""
    environment = profile.environment
    return Host(
        op_ps=environment.host_op_picoseconds,
        launch_ps=environment.host_op_picoseconds - environment.host_view_picoseconds,
        blocking=environment.threads > 0,
    )
