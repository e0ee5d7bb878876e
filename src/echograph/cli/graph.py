"""`echoprof graph`: the execution graph as a picture, or as a file for other graph programs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from echograph.cli.app import print_error, print_json, print_line, progress
from echograph.cli.output import Json, check_outputs
from echograph.errors import UsageError
from echograph.units import format_bytes
from echograph.workflow.formats import export

FORMATS = ("dot", "gml", "graphml", "json", "svg")


def graph_command(
    graph: Annotated[Path, typer.Argument(help="A graph file written by echoc.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The picture or file; its ending says which format.")
    ] = Path("graph.svg"),
    as_json: Json = False,
) -> None:
    """Draw a graph, or write it as GML or JSON: the format is the ending of --output."""
    from echograph.ir import serde

    to = output.suffix.removeprefix(".").lower()
    if to not in FORMATS:
        raise UsageError(f"--output {output.name}: the ending is the format: give one of .{', .'.join(FORMATS)}")
    check_outputs({"the graph": graph}, {"--output": output})
    with progress(f"reading {graph}") as say:
        loaded = serde.load(graph, say)
        say(f"drawing {output}")
        done = export(loaded, to, output)
    if as_json:
        print_json({"output": str(output), "format": to, **asdict(done)})
        return
    print_line(f"{output}: {to}, {format_bytes(done.bytes)}")
    for note in done.notes:
        print_error(f"note: {note}")
