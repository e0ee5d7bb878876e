"""`echoc import`: a graph from the files of another tool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from echograph.cli.app import print_error, print_json, print_line, progress
from echograph.cli.output import Json, check_outputs
from echograph.units import format_bytes
from echograph.workflow.formats import IMPORTS, check_import, import_graph
from echograph.workflow.summary import outline


def import_command(
    format_name: Annotated[str, typer.Argument(metavar="FORMAT", help=f"{', '.join(sorted(IMPORTS))}.")],
    source: Annotated[Path, typer.Argument(help="The file; for chakra and kineto the folder of the ranks.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the graph goes.")],
    keep_overhead: Annotated[
        bool, typer.Option("--keep-overhead", help="kineto: durations as recorded, with what recording cost.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Read what another tool wrote, and write it as a graph; say what a graph cannot hold of it."""
    from echograph.ir import serde

    check_import(format_name, {"keep_overhead": keep_overhead})
    check_outputs({"the source": source}, {"--output": output})
    with progress(f"reading {source}") as say:
        imported = import_graph(format_name, source, keep_overhead=keep_overhead, say=say)
        say(f"writing {output}")
        size = serde.save(imported.graph, output, say)
    summary = outline(imported.graph)
    for note in imported.notes:
        print_error(f"note: {note}")
    if as_json:
        print_json({"output": str(output), "bytes": size, **summary, "notes": list(imported.notes)})
    else:
        ranks = f" on {summary['ranks']} ranks" if summary["level"] == "job" else ""
        stored = "" if summary["operations"] == summary["ops"] else f" ({summary['ops']} stored)"
        print_line(f"{summary['name']}{ranks}: {summary['operations']} operations{stored}")
    print_error(f"wrote {output} ({format_bytes(size)})")
