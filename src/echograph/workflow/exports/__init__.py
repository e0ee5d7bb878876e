"""Formats of other tools that a graph is written in; those for which rooms meet are composed here."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from echograph.errors import UsageError
from echograph.ir.exporters import EXPORTERS
from echograph.ir.formats import Exported
from echograph.ir.graph import Graph, JobGraph
from echograph.progress import Progress, silent
from echograph.registry import Table
from echograph.workflow.formats import refuse_format


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
        "chakra": "echograph.workflow.exports.chakra:export_chakra",
        "chrome": "echograph.workflow.exports.timed:export_chrome",
        "simai": "echograph.workflow.exports.timed:export_simai",
    },
)
"""Formats for which rooms meet: name -> `export(graph: Graph, output: Path, o: ExportOptions, say: Progress)`, and
what it returns is `Exported`.
"""


TAKES = {"chakra": {"cluster", "per_role", "name"}, "chrome": {"cluster"}, "simai": {"cluster"}}
"""The options that each format has; none where it is not named."""


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


def check_options(to: str, options: ExportOptions) -> None:
    """Refuses a format that no graph is written in, and options that a format does not have.

    Raises:
        UnavailableError: other commands have the format.
        UnknownNameError: none has.
        UsageError: the format does not have an option.
    """
    if to not in EXPORTERS and to not in COMPOSED:
        refuse_format(to, (*EXPORTERS, *COMPOSED), "exported")
    for option in fields(options):
        if getattr(options, option.name) not in (None, False) and option.name not in TAKES.get(to, ()):
            takers = ", ".join(sorted(known for known, taken in TAKES.items() if option.name in taken))
            raise UsageError(
                f"--{option.name.replace('_', '-')}: --to {to} has no such option (it is of {takers})"
            )


def export(
    graph: Graph,
    to: str,
    output: str | Path,
    *,
    cluster: str | None = None,
    per_role: bool = False,
    name: str | None = None,
    say: Progress = silent,
) -> Exported:
    """Writes a graph in another tool's format.

    Args:
        graph: a step graph, or for formats of ranks a job graph.
        to: the format: "chakra", "simai", "chrome", "onnx", "gml", "graphml", "json", "dot", "svg", ...
        output: the file; for chakra the folder.
        cluster: where the job runs, for formats with durations; None: the default one.
        per_role: of chakra: one file a role instead of one a rank.
        name: of chakra's files.
        say: told what goes on.

    Returns:
        What was written, and in `notes` what the format cannot hold.

    Raises:
        UnknownNameError: no such format.
        UnavailableError: a format that is only read.
        UsageError: an option that the format does not have, or a step graph where a job is needed.
        OutputError: the output cannot be written.
    """
    options = ExportOptions(cluster=cluster, per_role=per_role, name=name)
    check_options(to, options)
    if to in EXPORTERS:
        done: Exported = EXPORTERS[to](graph, Path(output))
    else:
        done = COMPOSED[to](graph, Path(output), options, say)
    return done
