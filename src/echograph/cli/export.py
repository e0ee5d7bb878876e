"""`echoc export`: a graph in the format of another tool."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from echograph.cli.app import print_error, print_json, print_line, progress
from echograph.cli.formats import refuse_format
from echograph.errors import UsageError
from echograph.ir.exporters import EXPORTERS, Exported
from echograph.ir.graph import Graph, JobGraph
from echograph.progress import Progress
from echograph.registry import Table
from echograph.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of formats that hold more than the graph; None or False where they are not given.

    Attributes:
        cluster: where the job runs: its durations, and what else the format says of it.
        per_role: one file a role of the job instead of one a rank.
        name: of the files.
    """

    cluster: str | None = None
    per_role: bool = False
    name: str | None = None


COMPOSED = Table(
    "format",
    {
        "chakra": "echograph.cli.export_chakra:export_chakra",
        "chrome": "echograph.cli.export_timed:export_chrome",
        "simai": "echograph.cli.export_timed:export_simai",
    },
)
"""Formats for which rooms meet: name -> `export(graph: Graph, output: Path, o: ExportOptions, say: Progress)`, and
what it returns is `Exported`.
"""

TAKES = {"chakra": {"cluster", "per_role", "name"}, "chrome": {"cluster"}, "simai": {"cluster"}}
"""The options that each format has; none where it is not named."""


def export_command(
    graph: Annotated[Path, typer.Argument(help="A graph file written by echoc.")],
    to: Annotated[str, typer.Option(help=f"{', '.join(sorted((*EXPORTERS, *COMPOSED)))}.")],
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

    options = ExportOptions(cluster=cluster, per_role=per_role, name=name)
    _check(to, options)
    if graph.resolve() == output.resolve():
        raise UsageError(f"--output {output}: is the graph itself: give the export a path of its own")
    with progress(f"reading {graph}") as say:
        loaded = serde.load(graph, say)
        say(f"writing {output}")
        done = _export(loaded, to, output, options, say)
    if as_json:
        print_json({"output": str(output), "format": to, **asdict(done)})
        return
    files = "1 file" if done.files == 1 else f"{done.files} files"
    print_line(f"{output}: {to}, {files}, {format_bytes(done.bytes)}")
    for note in done.notes:
        print_error(f"note: {note}")


def job_of(graph: Graph) -> JobGraph:
    """The graph as a job, for formats that say what every rank executes.

    Raises:
        UsageError: it is a step graph.
    """
    if isinstance(graph, JobGraph):
        return graph
    raise UsageError(
        f"{graph.name or 'it'} is a step graph, and the format is of jobs: spread it first, "
        "as echoc lower graph.pb --gpus 8 -o job.pb"
    )


def _check(to: str, options: ExportOptions) -> None:
    if to not in EXPORTERS and to not in COMPOSED:
        refuse_format(to, (*EXPORTERS, *COMPOSED), "exported")
    for option in fields(options):
        if getattr(options, option.name) not in (None, False) and option.name not in TAKES.get(to, ()):
            takers = ", ".join(sorted(known for known, taken in TAKES.items() if option.name in taken))
            raise UsageError(
                f"--{option.name.replace('_', '-')}: --to {to} has no such option (it is of {takers})"
            )


def _export(graph: Graph, to: str, output: Path, options: ExportOptions, say: Progress) -> Exported:
    if to in EXPORTERS:
        done: Exported = EXPORTERS[to](graph, output)
    else:
        done = COMPOSED[to](graph, output, options, say)
    return done
