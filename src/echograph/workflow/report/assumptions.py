"""What a prediction rests on: which of it was measured, which fitted, which guessed, and what it leaves out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from echograph.ir.graph import JobGraph
from echograph.profiler.costs.device import DeviceProfile, Label
from echograph.simulator.clusters import Cluster, NetworkFabric, NodeFabric
from echograph.simulator.result import Result
from echograph.units import format_bytes
from echograph.workflow.plan import Plan
from echograph.workflow.replay import is_traced
from echograph.workflow.scenario import Scenario
from echograph.workflow.system import System


class Assumption(NamedTuple):
    """A part of the prediction and what it rests on.

    Attributes:
        part: of the prediction.
        basis: what it is: "measured", "fitted", "analytical", "assumed" (a guess), "left out", ...
        text: in words.
    """

    part: str
    basis: str
    text: str


def assumptions(
    result: Result, job: JobGraph, plan: Plan, system: System, notes: Sequence[str] = ()
) -> list[Assumption]:
    """What a prediction rests on, the durations first.

    Args:
        result: the prediction.
        job: what was simulated.
        plan: as it was asked for.
        system: where it ran.
        notes: what the plan could not do.
    """
    device = None if is_traced(job) else system.device
    found = [*_given(result, job), *(_fitted(result, job, device) if device else ())]
    found += _network(result, system.cluster) if device and result.collectives else ()
    found += [Assumption("plan", "as asked", note) for note in notes]
    if "ep" in {axis.name for axis in job.mesh}:
        rows = f"{plan.expert_imbalance:g} times the mean of all ranks (--expert-imbalance)"
        found.append(Assumption("experts", "assumed", f"rows of the busiest rank's experts: {rows}"))
    if is_traced(job):
        return found
    if result.ranks is None:
        alike = "ranks of one role take equal time: no jitter, no slow node (--jitter, --straggler, --degrade)"
        found.append(Assumption("ranks", "assumed", alike))
    if result.memory is not None:
        found += [
            Assumption(
                "memory", "assumed" if "assumed" in name else "as users measured", f"{name}: {format_bytes(size)}"
            )
            for name, size in result.memory.overhead_bytes.items()
        ]
    return [*found, *_ALWAYS]


_ALWAYS = (
    Assumption("overlap", "left out", "kernels and collectives that run at once do not slow each other"),
    Assumption("the step", "left out", "data loading, checkpoints, logging, and what one step leaves to the next"),
    Assumption("interval", "formula", "covers the errors of the durations above, and nothing that is left out"),
)


def asked(scenario: Scenario, system: System) -> list[str]:
    """What a scenario and a system change of a prediction, in words; none for plain ones."""
    said = [f"{scale.selector} takes {scale.factor:g} times as long" for scale in scenario.scales]
    said += [f"{key} is {value}" for key, value in system.settings.items()]
    said += [
        f"{where.replace(':', ' ') if ':' in where else f'rank {where}'} is {factor:g} times as slow"
        for where, factor in scenario.slow
    ]
    said += [f"kernels vary by {100 * scenario.jitter:g} %"] if scenario.jitter else []
    said += ["the host waits for what a stage receives"] if system.host.waits else []
    said += ["every launch waits for its kernel"] if system.host.blocking and system.profile is None else []
    return said


def _given(result: Result, job: JobGraph) -> Iterator[Assumption]:
    """Durations that the graph or a profile holds."""
    if is_traced(job):
        yield Assumption("durations", "as traced", "every operation takes what it took in the trace")
        return
    for source, text in (("measured", "of this device"), ("imported", "as the imported graph has them")):
        share = result.sources.get(source, 0.0)
        if share > 0:
            yield Assumption("durations", source, f"{100 * share:.1f} % of the busy time, {text}")


def _fitted(result: Result, job: JobGraph, device: DeviceProfile) -> Iterator[Assumption]:
    """The models of kernels and of the host."""
    precision = str(result.plan.get("precision") or job.workload.dtype.text)
    gemm = device.gemm.get("fp8" if "fp8" in precision else "bf16" if precision == "fp16" else precision)
    if result.sources.get("fitted", 0.0) + result.sources.get("analytical", 0.0) > 0:
        if gemm is not None and "matrix products" in result.limits:
            yield _labelled("matrix products", gemm.label)
        if "attention" in result.limits:
            attention = device.attention[device.default_attention]
            for name, one in (("forward", attention.forward), ("backward", attention.backward)):
                if one is not None:
                    yield _labelled(f"attention ({device.default_attention}), {name}", one.label)
        if "other kernels" in result.limits:
            yield from _other_kernels(device)
    yield Assumption("host", device.host.source, device.host.basis)


def _labelled(part: str, label: Label) -> Assumption:
    return Assumption(
        part, label.source, f"{label.basis}; error {100 * label.spread:.0f} % (one standard deviation)"
    )


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
        error = " to ".join(dict.fromkeys(f"{100 * spread:.0f} %" for spread in (low, high)))
        yield Assumption(f"other kernels: {', '.join(kinds)}", source, f"{basis}; error {error}")


def _network(result: Result, cluster: Cluster) -> Iterator[Assumption]:
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
