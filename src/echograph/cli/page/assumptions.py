"""What a prediction rests on: which of it was measured, which fitted, which guessed, and what it leaves out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from echograph.cli.plan import Plan
from echograph.cli.replay import is_traced
from echograph.cli.study import Study
from echograph.ir.graph import JobGraph
from echograph.profiler.costs import load_device
from echograph.profiler.costs.device import DeviceProfile, Label
from echograph.simulator.clusters import NetworkFabric, NodeFabric, load_cluster
from echograph.simulator.result import Result

LEFT_OUT = "left out"


class Assumption(NamedTuple):
    """A part of the prediction and what it rests on.

    Attributes:
        part: of the prediction.
        basis: "measured", "fitted", "analytical", "assumed", "as traced", "simulated", "formula" or "left out".
        text: in words.
    """

    part: str
    basis: str
    text: str


def assumptions(
    result: Result, job: JobGraph, plan: Plan, study: Study, notes: Sequence[str] = ()
) -> list[Assumption]:
    """What a prediction rests on, the durations first.

    Args:
        result: the prediction.
        job: what was simulated.
        plan: as it was asked for.
        study: what was asked beyond it.
        notes: what the plan could not do.
    """
    found = list(_durations(result, job, plan))
    if result.collectives and not is_traced(job) and not plan.cluster.endswith(".pb"):
        found += _network(result, plan, study)
    found += [Assumption("plan", "as given", note) for note in notes]
    if "ep" in {axis.name for axis in job.mesh}:
        rows = (
            "as many rows as the mean"
            if plan.expert_imbalance == 1
            else f"{plan.expert_imbalance:g} times the mean"
        )
        found.append(
            Assumption("experts", "assumed", f"the busiest rank's experts get {rows} (--expert-imbalance)")
        )
    if result.ranks is None:
        alike = "equal ranks take equal time: no jitter, no slow node (--jitter, --straggler, --degrade)"
        found.append(Assumption("ranks", "assumed", alike))
    if result.memory is not None:
        found += [
            Assumption("memory", "assumed" if "assumed" in name else "measured elsewhere", name)
            for name in result.memory.overhead_bytes
        ]
    found.append(
        Assumption("overlap", LEFT_OUT, "kernels and collectives that run at once do not slow each other")
    )
    more = "data loading, checkpoints, logging, and what one step leaves to the next"
    found.append(Assumption("the step", LEFT_OUT, more))
    held = "covers the errors of the durations above, and nothing that is left out"
    found.append(Assumption("interval", "formula", held))
    return found


def _durations(result: Result, job: JobGraph, plan: Plan) -> Iterator[Assumption]:
    if is_traced(job):
        yield Assumption("durations", "as traced", "every operation takes what it took in the trace")
        return
    if plan.cluster.endswith(".pb"):
        yield Assumption("durations", "measured", f"every operation takes what {plan.cluster} holds of it")
        return
    device = load_device(plan_device(plan, result))
    family = set(result.limits)
    precision = job.workload.dtype.text if result.plan.get("precision") in ("", None) else result.plan["precision"]
    gemm = device.gemm.get("fp8" if "fp8" in precision else "bf16" if precision == "fp16" else precision)
    if gemm is not None:
        yield _labelled("matrix products", gemm.label)
    attention = device.attention[device.default_attention]
    if "attention" in family:
        yield _labelled(f"attention ({device.default_attention})", attention.forward.label)
        if attention.backward is not None:
            yield _labelled(f"attention ({device.default_attention}), backward", attention.backward.label)
    yield from _other_kernels(device)
    yield Assumption("host", device.host.source, device.host.basis)


def plan_device(plan: Plan, result: Result) -> str:
    """The device to load: a cluster may name the file of one."""
    return load_cluster(plan.cluster).device or result.device


def _labelled(part: str, label: Label) -> Assumption:
    return Assumption(part, label.source, f"{label.basis}; error {label.spread:.0%} (one standard deviation)")


def _other_kernels(device: DeviceProfile) -> Iterator[Assumption]:
    """The kinds of memory-bound kernels, those of one basis together."""
    by_basis: dict[tuple[str, str], list[str]] = {}
    spreads: dict[tuple[str, str], list[float]] = {}
    for kind, model in device.memory.items():
        key = (model.label.source, model.label.basis)
        by_basis.setdefault(key, []).append(kind)
        spreads.setdefault(key, []).append(model.label.spread)
    for (source, basis), kinds in by_basis.items():
        low, high = min(spreads[source, basis]), max(spreads[source, basis])
        error = f"{low:.0%}" if round(low, 2) == round(high, 2) else f"{low:.0%} to {high:.0%}"
        yield Assumption(f"other kernels: {', '.join(kinds)}", source, f"{basis}; error {error}")


def _network(result: Result, plan: Plan, study: Study) -> Iterator[Assumption]:
    cluster = load_cluster(plan.cluster, study.settings)
    domains: list[tuple[str, NodeFabric | NetworkFabric]] = [
        ("links within an NVLink domain", cluster.node_fabric)
    ]
    if result.gpus > cluster.domain_gpus:
        domains.append(("network between them", cluster.network.fabric))
    for part, fabric in domains:
        note = f" {fabric.about.note}" if fabric.about.note else ""
        yield Assumption(part, fabric.about.origin, f"{fabric.name}: {fabric.about.source}.{note}")
    shared = (
        "collectives share links as flows"
        if result.network == "flows"
        else "each collective takes its closed form; groups that communicate at once share the NICs evenly"
    )
    yield Assumption("network", "simulated" if result.network == "flows" else "formula", shared)
