"""`echoc export`: a graph in the format of another tool."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from echograph.cli.app import print_error, print_json, print_line, progress
from echograph.errors import UsageError
from echograph.units import format_bytes
from echograph.workflow.formats import EXPORTS, check_export, export


def export_command(
    graph: Annotated[Path, typer.Argument(help="A graph file written by echoc.")],
    to: Annotated[str, typer.Option(help=f"{', '.join(sorted(EXPORTS))}.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file; for chakra the folder.")],
    cluster: Annotated[
        str | None,
        typer.Option(help="Where the job runs (chakra, chrome, simai) [default: dgx-h100]", show_default=False),
    ] = None,
    per_role: Annotated[
        bool, typer.Option("--per-role", help="One file a role instead of one a rank (chakra).")
    ] = False,
    name: Annotated[str | None, typer.Option(help="Name of the files (chakra).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a graph in another tool's format, and say what the format cannot hold."""
    from echograph.ir import serde

    check_export(to, {"cluster": cluster, "per_role": per_role, "name": name})
    if graph.resolve() == output.resolve():
        raise UsageError(f"--output {output}: is the graph itself: give the export a path of its own")
    with progress(f"reading {graph}") as say:
        loaded = serde.load(graph, say)
        say(f"writing {output}")
        done = export(loaded, to, output, cluster=cluster, per_role=per_role, name=name, say=say)
    if as_json:
        print_json({"output": str(output), "format": to, **asdict(done)})
        return
    files = "1 file" if done.files == 1 else f"{done.files} files"
    print_line(f"{output}: {to}, {files}, {format_bytes(done.bytes)}")
    for note in done.notes:
        print_error(f"note: {note}")
