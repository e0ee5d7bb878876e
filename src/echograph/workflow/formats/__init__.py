"""Formats of other tools: one table of those that a graph is read from, one of those that it is written in.

A line of a table is a function. What it takes by keyword are the options of its format; `progress`, where it has
one, is told how far it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn

from echograph.errors import UnavailableError, UnknownNameError, UsageError
from echograph.ir.formats import Exported, Imported
from echograph.ir.graph import Graph
from echograph.notes import tell
from echograph.progress import Progress, silent
from echograph.registry import Table

IMPORTS = Table(
    "format",
    {
        "chakra": "echograph.ir.chakra.importer:load",
        "comms": "echograph.frontend.comms:load",
        "gml": "echograph.frontend.graph_files:load_gml",
        "json": "echograph.frontend.graph_files:load_json",
        "kineto": "echograph.workflow.formats.kineto:load",
        "onnx": "echograph.frontend.onnx:load",
        "text": "echograph.frontend.graph_files:load_text",
    },
)
"""Formats that a graph is read from: name -> `load(source: Path, *, options) -> Graph | Imported`."""

EXPORTS = Table(
    "format",
    {
        "chakra": "echograph.workflow.formats.timed:export_chakra",
        "chrome": "echograph.workflow.formats.timed:export_chrome",
        "dot": "echograph.ir.exporters.drawing:export_dot",
        "echo": "echograph.ir.exporters.echo:export_echo",
        "gml": "echograph.ir.text.network:export_gml",
        "graphml": "echograph.ir.text.network:export_graphml",
        "json": "echograph.ir.text.records:export_json",
        "onnx": "echograph.ir.exporters.onnx:export",
        "simai": "echograph.workflow.formats.timed:export_simai",
        "svg": "echograph.ir.exporters.drawing:export_svg",
        "text": "echograph.ir.text:export_text",
    },
)
"""Formats that a graph is written in: name -> `export(graph: Graph, output: Path, *, options) -> Exported`."""

FormatOptions = Mapping[str, Any]
"""Of a format, by name; those that are None or False are not given."""


def import_(name: str, source: str | Path, *, keep_overhead: bool = False, progress: Progress = silent) -> Graph:
    """Reads what another tool wrote as a graph; what a graph cannot hold goes to the logger `echograph`.

    Args:
        name: name of the format: "chakra", "comms", "gml", "json", "kineto", "onnx" or "text".
        source: the file; for chakra and kineto the folder of the ranks.
        keep_overhead: with kineto: durations as recorded, with what recording cost.
        progress: told how far it is.

    Raises:
        UnknownNameError: no such format.
        UnavailableError: a format that is only written.
        InputError: the source cannot be read.
        DataError: it breaks a rule of its format.
    """
    imported = import_graph(name, Path(source), keep_overhead=keep_overhead, progress=progress)
    tell(imported.notes)
    return imported.graph


def import_graph(name: str, source: Path, *, keep_overhead: bool = False, progress: Progress = silent) -> Imported:
    """`import_`, with what a graph cannot hold of the source beside it.

    Raises:
        EchoError: as `check_import`, and what the format's reader raises.
    """
    options = {"keep_overhead": keep_overhead}
    check_import(name, options)
    loaded = _bound(IMPORTS[name], options, progress)(source)
    return loaded if isinstance(loaded, Imported) else Imported(graph=loaded)


def export(
    graph: Graph,
    to: str,
    output: str | Path,
    *,
    cluster: str | None = None,
    per_role: bool = False,
    name: str | None = None,
    progress: Progress = silent,
) -> Exported:
    """Writes a graph in another tool's format.

    Args:
        graph: a step graph, or for formats of ranks a job graph.
        to: the format: "chakra", "simai", "chrome", "onnx", "gml", "graphml", "json", "dot", "svg", ...
        output: the file; for chakra the folder.
        cluster: where the job runs, for formats with durations; None: the default one.
        per_role: with chakra: one file a role instead of one a rank.
        name: with chakra: name of the files.
        progress: told what goes on.

    Returns:
        What was written, and in `notes` what the format cannot hold.

    Raises:
        UnknownNameError: no such format.
        UnavailableError: a format that is only read.
        UsageError: an option that the format does not have, or a step graph where a job is needed.
        OutputError: the output cannot be written.
    """
    options = {"cluster": cluster, "per_role": per_role, "name": name}
    check_export(to, options)
    done: Exported = _bound(EXPORTS[to], options, progress)(graph, Path(output))
    return done


def check_import(name: str, options: FormatOptions) -> None:
    """Refuses a format that no graph is read from, and options that it does not have.

    Raises:
        UnavailableError: other commands have the format.
        UnknownNameError: none has.
        UsageError: the format does not have an option.
    """
    if name not in IMPORTS:
        refuse_format(name, IMPORTS, "imported")
    _check_options(IMPORTS, name, options)


def check_export(name: str, options: FormatOptions) -> None:
    """Refuses a format that no graph is written in, and options that it does not have.

    Raises:
        UnavailableError: other commands have the format.
        UnknownNameError: none has.
        UsageError: the format does not have an option.
    """
    if name not in EXPORTS:
        refuse_format(name, EXPORTS, "exported")
    _check_options(EXPORTS, name, options)


def refuse_format(name: str, able: Collection[str], what: str) -> NoReturn:
    """Refuses a format: one that other commands have is not called unknown.

    Args:
        name: the format that the user named.
        able: the formats that the command has.
        what: the command does with a format ("imported").

    Raises:
        UnavailableError: another command has it.
        UnknownNameError: none has.
    """
    if name in IMPORTS or name in EXPORTS:
        raise UnavailableError(f"format '{name}' cannot be {what}", sorted(able))
    raise UnknownNameError("format", name, able)


def _check_options(table: Table, name: str, options: FormatOptions) -> None:
    for option in _given(options):
        if option not in _taken(table[name]):
            takers = ", ".join(sorted(known for known in table if option in _taken(table[known])))
            raise UsageError(f"--{option.replace('_', '-')}: {name} has no such option (it is of {takers})")


def _given(options: FormatOptions) -> dict[str, Any]:
    return {option: value for option, value in options.items() if value not in (None, False)}


def _taken(function: Callable[..., Any]) -> set[str]:
    """The options of a format."""
    parameters = signature(function).parameters.values()
    return {one.name for one in parameters if one.kind is one.KEYWORD_ONLY} - {"progress"}


def _bound(function: Callable[..., Any], options: FormatOptions, progress: Progress) -> Callable[..., Any]:
    told = {"progress": progress} if "progress" in signature(function).parameters else {}
    return partial(function, **told, **_given(options))
