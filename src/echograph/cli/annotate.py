"""`echoc annotate`: a graph with the durations that `echosim run` would give it, for readers of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from echograph.cli.app import print_error, print_json, print_line, progress
from echograph.ir.graph import Graph
from echograph.ir.types import Source
from echograph.simulator.clusters import DEFAULT_CLUSTER
from echograph.units import format_bytes
from echograph.workflow.annotate import annotate, annotate_measured
from echograph.workflow.system import System, host_name


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
    system = System(cluster or DEFAULT_CLUSTER) if cluster is not None or profile is None else None
    with progress(f"reading {graph}") as say:
        loaded = serde.load(graph, say)
        say("annotating")
        measured: dict[str, Any] = {}
        if profile is not None:
            device = "" if system is None else system.cluster.device
            loaded, measured = annotate_measured(loaded, profile, device)
        annotated = loaded if system is None else annotate(loaded, system)
        say(f"writing {output}")
        size = serde.save(annotated, output, say)
    if measured and not as_json:
        print_coverage(measured)
    names: dict[str, str] = {}
    if system is not None:
        device, network = system.cluster.device, system.cluster.name
        names = {"device": device, "host": host_name(device), "network": network}
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


def _sources(graph: Graph, name: str) -> dict[str, int]:
    """How many operations have a duration under a name, by where it comes from."""
    _, source, _ = graph.ops.duration_on(name)
    return {s.name.lower(): int((source == s).sum()) for s in Source if (source == s).any()}


_NAMED = 5


def print_coverage(record: dict[str, Any]) -> None:
    """One line on what is measured, and one each on what is missing and on what fits nothing."""
    counts = record["operations"]
    print_line(
        f"{record['device']}: {record['measured_share']:.1%} of the device operations that run are measured "
        f"({counts['measured']}), {counts['missing']} are missing, {counts['free']} views are free"
    )
    if "host" in record:
        print_line(f"{record['host']}: what the host takes to issue each, as measured")
    if record["missing_operators"]:
        most = [f"{count} x {name}" for name, count in list(record["missing_operators"].items())[:_NAMED]]
        print_error(f"missing: {', '.join(most)}{_more(record['missing_operators'])}")
    if record["unmatched"]:
        count, named = len(record["unmatched"]), [text[:80] for text in record["unmatched"][:_NAMED]]
        print_error(f"{count} measurements fit no operation: {', '.join(named)}{_more(record['unmatched'])}")


def _more(items: Any) -> str:
    return f", and {len(items) - _NAMED} more" if len(items) > _NAMED else ""
