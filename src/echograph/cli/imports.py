"""`echoc import`: a graph from the files of another tool."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import typer

from echograph.cli.app import print_error, print_json, print_line, progress
from echograph.cli.formats import refuse_format
from echograph.cli.imports_traces import TRACES
from echograph.errors import UsageError
from echograph.frontend import FRONTENDS, Imported
from echograph.ir.graph import Graph, JobGraph
from echograph.units import format_bytes

FORMATS = (*FRONTENDS, *TRACES)


def import_command(
    format_name: Annotated[str, typer.Argument(metavar="FORMAT", help=f"{', '.join(sorted(FORMATS))}.")],
    source: Annotated[Path, typer.Argument(help="The file; for chakra and kineto the folder of the ranks.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the graph goes.")],
    keep_overhead: Annotated[
        bool, typer.Option("--keep-overhead", help="kineto: durations as recorded, with what recording cost.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Read what another tool wrote, and write it as a graph; say what a graph cannot hold of it."""
    from echograph.ir import files, serde

    if format_name not in FORMATS:
        refuse_format(format_name, FORMATS, "imported")
    load = (TRACES if format_name in TRACES else FRONTENDS)[format_name]
    if keep_overhead and format_name not in TRACES:
        raise UsageError(f"--keep-overhead: is for kineto: {format_name} has no recording")
    if source.resolve() == output.resolve():
        raise UsageError(f"--output {output}: is the source itself: give the graph a file of its own")
    files.check_writable(output)
    with progress(f"reading {source}") as say:
        counts = {"progress": say} if "progress" in signature(load).parameters else {}
        loaded = load(source, **counts, **({"keep_overhead": True} if keep_overhead else {}))
        imported = loaded if isinstance(loaded, Imported) else Imported(graph=loaded)
        say(f"writing {output}")
        size = serde.save(imported.graph, output, say)
    summary = _summary(imported.graph)
    for note in imported.notes:
        print_error(f"note: {note}")
    if as_json:
        print_json({"output": str(output), "bytes": size, **summary, "notes": list(imported.notes)})
    else:
        ranks = f" on {summary['ranks']} ranks" if summary["level"] == "job" else ""
        stored = "" if summary["operations"] == summary["ops"] else f" ({summary['ops']} stored)"
        print_line(f"{summary['name']}{ranks}: {summary['operations']} operations{stored}")
    print_error(f"wrote {output} ({format_bytes(size)})")


def _operations(graph: Graph) -> int:
    """What all ranks run together, those of a program that lists several once each."""
    runs = (program.unfolded_ops * max(1, len(program.ranks)) for program in graph.programs)
    return sum(runs)


def _summary(graph: Graph) -> dict[str, Any]:
    return {
        "name": graph.workload.model or graph.name,
        "level": "job" if isinstance(graph, JobGraph) else "step",
        "ranks": graph.world_size,
        "programs": len(graph.programs),
        "groups": len(graph.groups),
        "operations": _operations(graph),
        "ops": len(graph.ops),
    }
