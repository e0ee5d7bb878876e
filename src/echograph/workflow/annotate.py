"""A graph with the durations that a simulation would give it, or that were measured, for readers of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from echograph.ir.columns import NONE
from echograph.ir.graph import Graph, JobGraph
from echograph.ir.passes.annotate import Annotate, Coverage, join
from echograph.ir.profile import Profile, load_profile
from echograph.ir.types import COMMUNICATIONS, OpKind, Source
from echograph.simulator.clusters import Cluster
from echograph.workflow.system import System, host_name, measured_host

G = TypeVar("G", bound=Graph)


def annotate(graph: G, system: System) -> G:
    """The graph with all durations that its simulation on a system uses.

    Operations of the device have theirs under its name, all under `host_name` what the host takes to issue them
    (host work: to do them), and communications under the cluster's name. What is known already stays.

    Raises:
        PlanError: a group does not fit the cluster.
    """
    where, device = system.cluster, system.device
    graph = system.annotate(graph)
    count = len(graph.ops)
    fitted = device is not None and device.host.source == "measured"
    source = Source.FITTED if fitted else Source.ANALYTICAL if device is not None else Source.MEASURED
    of_host = Annotate(
        device=host_name(where.device),
        picoseconds=system.host.issue(graph),
        source=np.full(count, source, np.uint8),
        spread=np.full(count, system.host.spread, np.float32),
        samples=np.zeros(count, np.int64),
    )
    if isinstance(graph, JobGraph):
        graph = cast(G, _communicate(graph, where))
    return of_host(graph)


def _communicate(job: JobGraph, where: Cluster) -> JobGraph:
    """The job with what the simulator takes for everything that has no duration on the device."""
    from echograph.simulator.durations import durations

    times = durations(job, where)
    known, _, _ = job.ops.duration_on(where.device)
    communicates = np.isin(job.ops.kind, COMMUNICATIONS)
    still = job.ops.is_view | (job.ops.kind == OpKind.HOST)
    for name, rows in ((where.name, communicates), (where.device, ~communicates & ~still)):
        job = Annotate(
            device=name,
            picoseconds=np.where(rows & (known == NONE), times.picoseconds, NONE),
            source=times.source,
            spread=times.spread,
            samples=np.zeros(len(job.ops), np.int64),
        )(job)
    return job


def duration_sources(graph: Graph, system: System) -> dict[str, tuple[str, dict[str, int]]]:
    """Where the durations of an annotated graph come from.

    Returns:
        For "device", "host" and "network": the name of the durations, and how many operations have one by source
        ("measured", "fitted", "analytical", "imported").
    """
    device, network = system.cluster.device, system.cluster.name
    found: dict[str, tuple[str, dict[str, int]]] = {}
    for part, name in {"device": device, "host": host_name(device), "network": network}.items():
        _, source, _ = graph.ops.duration_on(name)
        counts = {s.name.lower(): int((source == s).sum()) for s in Source}
        found[part] = name, {kind: count for kind, count in counts.items() if count}
    return found


def annotate_measured(graph: G, profile: Path, device: str = "") -> tuple[G, dict[str, Any]]:
    """The graph with a profile's durations, under a device's name or the profile's own; and what they cover.

    Where the profile says what the host takes, that goes under `host_name` of the device.
    """
    measured = load_profile(profile)
    annotate, coverage = join(graph, measured, device)
    runs = coverage.measured + coverage.free + coverage.missing
    record = {
        "device": annotate.device,
        "operations": {
            "measured": coverage.measured,
            "free": coverage.free,
            "missing": coverage.missing,
            "communication_and_host": coverage.other,
        },
        "measured_share": coverage.measured / max(1, coverage.measured + coverage.missing),
        "free_share": coverage.free / max(1, runs),
        "missing_operators": dict(coverage.missing_operators),
        "unmatched": _unmatched(coverage),
    }
    annotated = annotate(graph)
    if measured.environment.host_op_picoseconds:
        annotated = _with_host(annotated, measured, annotate.device)
        record["host"] = host_name(annotate.device)
    return annotated, record


def _with_host(graph: G, profile: Profile, device: str) -> G:
    count = len(graph.ops)
    communicates = np.isin(graph.ops.kind, COMMUNICATIONS)
    return Annotate(
        device=host_name(device),
        # Of collectives, which go through a process group, the profile says nothing.
        picoseconds=np.where(communicates, NONE, measured_host(profile).issue(graph)),
        source=np.full(count, Source.MEASURED, np.uint8),
        spread=np.zeros(count, np.float32),
        samples=np.zeros(count, np.int64),
    )(graph)


def _unmatched(coverage: Coverage) -> list[str]:
    return [m.arguments or m.operator for m in coverage.unmatched]
