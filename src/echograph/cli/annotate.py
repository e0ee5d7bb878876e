"""`echoc annotate`: a graph with the durations that `echosim run` would give it, for readers of the file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import numpy as np
import typer

from echograph.cli.annotate_profile import annotate_measured, host_name, print_coverage
from echograph.cli.app import print_error, print_json, print_line, progress
from echograph.ir.columns import NONE
from echograph.ir.graph import Graph, JobGraph
from echograph.ir.passes.annotate import Annotate
from echograph.ir.types import COMMUNICATIONS, OpKind, Source
from echograph.simulator.clusters import DEFAULT_CLUSTER, Cluster, load_cluster
from echograph.units import format_bytes

G = TypeVar("G", bound=Graph)


def annotate_command(
    graph: Annotated[Path, typer.Argument(help="A graph file written by echoc.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where it goes; may be the graph itself.")],
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Where it runs: a preset (see echosim clusters) or a TOML file "
            f"[default: {DEFAULT_CLUSTER}; with --profile none]",
            show_default=False,
        ),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Measured durations (of echoprof ops), which come before the cluster's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write the durations of a cluster into a graph: its device's, its host's, and of a job its network's."""
    from echograph.ir import files, serde

    files.check_writable(output)
    with progress(f"reading {graph}") as say:
        loaded = serde.load(graph, say)
        say("annotating")
        measured: dict[str, Any] = {}
        if profile is not None:
            device = "" if cluster is None else _device_name(cluster)
            loaded, measured = annotate_measured(loaded, profile, device)
        annotated, where = loaded, None
        if cluster is not None or profile is None:
            annotated, where = annotate(loaded, cluster or DEFAULT_CLUSTER)
        say(f"writing {output}")
        size = serde.save(annotated, output, say)
    if measured and not as_json:
        print_coverage(measured)
    names = {} if where is None else {
        "device": where.device, "host": host_name(where.device), "network": where.name
    }  # fmt: skip
    counts = {part: _sources(annotated, name) for part, name in names.items()}
    if as_json:
        parts = {part: {"name": name, **counts[part]} for part, name in names.items()}
        record = {"output": str(output), "bytes": size, "operations": len(annotated.ops), "durations": parts}
        print_json(record | ({"profile": measured} if measured else {}))
    else:
        for part, name in names.items():
            shares = ", ".join(f"{count} {source}" for source, count in counts[part].items() if count)
            print_line(f"{name:<20} {shares or 'no operation'}")
    print_error(f"wrote {output} ({format_bytes(size)})")


def _device_name(cluster: str) -> str:
    from echograph.profiler.costs import load_device

    return load_device(load_cluster(cluster).device).name


def annotate(graph: G, cluster: str) -> tuple[G, Cluster]:
    """The graph with all durations that a simulation of it on a cluster uses, and the cluster.

    Operations of the device have theirs under its name, all under `host_name` what the host takes to issue them
    (host work: to do them), and communications under the cluster's name. What is known already stays.

    Raises:
        PlanError: a group does not fit the cluster.
    """
    from echograph.cli.compose import host_of, host_spread
    from echograph.profiler.costs import load_device
    from echograph.profiler.costs.estimate import estimate

    where = load_cluster(cluster)
    device = load_device(where.device)
    where = replace(where, device=device.name)
    graph = estimate(graph, device)(graph)
    issue = host_of(device).issue(graph)
    count = len(graph.ops)
    source = Source.FITTED if device.host.source == "measured" else Source.ANALYTICAL
    of_host = Annotate(
        device=host_name(device.name),
        picoseconds=issue,
        source=np.full(count, source, np.uint8),
        spread=np.full(count, host_spread(), np.float32),
        samples=np.zeros(count, np.int64),
    )
    if isinstance(graph, JobGraph):
        graph = cast(G, _communicate(graph, where))
    return of_host(graph), where


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


def _sources(graph: Graph, name: str) -> dict[str, int]:
    """How many operations have a duration under a name, by where it comes from."""
    _, source, _ = graph.ops.duration_on(name)
    return {s.name.lower(): int((source == s).sum()) for s in Source if (source == s).any()}
