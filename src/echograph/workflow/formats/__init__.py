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
        "onnx": "echograph.frontend.onnx.load:load",
        "text": "echograph.frontend.graph_files:load_text",
    },
)
"""Formats that a graph is read from: name -> `load(source: Path, *, options) -> Graph | Imported`."""

EXPORTS = Table(
    "format",
    {
        "chakra": "echograph.workflow.formats.chakra:export_chakra",
        "chrome": "echograph.workflow.formats.timed:export_chrome",
        "dot": "echograph.ir.exporters.drawing:export_dot",
        "echo": "echograph.ir.exporters.echo:export_echo",
        "gml": "echograph.ir.exporters.texts:export_gml",
        "graphml": "echograph.ir.exporters.texts:export_graphml",
        "json": "echograph.ir.exporters.texts:export_json",
        "onnx": "echograph.ir.exporters.onnx:export",
        "simai": "echograph.workflow.formats.timed:export_simai",
        "svg": "echograph.ir.exporters.drawing:export_svg",
        "text": "echograph.ir.exporters.texts:export_text",
    },
)
"""Formats that a graph is written in: name -> `export(graph: Graph, output: Path, *, options) -> Exported`."""

Options = Mapping[str, Any]
"""Of a format, by name; those that are None or False are not given."""


def import_graph(name: str, source: Path, options: Options | None = None, say: Progress = silent) -> Imported:
    """Reads what another tool wrote as a graph.

    Args:
        name: of the format, one of `IMPORTS`.
        source: the file; for formats of one file a rank, their folder.
        options: of the format.
        say: told how far it is.

    Returns:
        The graph, and what it cannot hold of the source.

    Raises:
        EchoError: as `check_import`, and what the format's reader raises.
    """
    options = options or {}
    check_import(name, options)
    loaded = _bound(IMPORTS[name], options, say)(source)
    return loaded if isinstance(loaded, Imported) else Imported(graph=loaded)


def export_graph(
    name: str, graph: Graph, output: Path, options: Options | None = None, say: Progress = silent
) -> Exported:
    """Writes a graph in another tool's format.

    Args:
        name: of the format, one of `EXPORTS`.
        graph: what is written.
        output: the file, or for formats of several files the folder.
        options: of the format.
        say: told how far it is.

    Returns:
        What was written, and what the format cannot hold.

    Raises:
        EchoError: as `check_export`, and what the format's exporter raises.
    """
    options = options or {}
    check_export(name, options)
    done: Exported = _bound(EXPORTS[name], options, say)(graph, output)
    return done


def check_import(name: str, options: Options) -> None:
    """Refuses a format that no graph is read from, and options that it does not have.

    Raises:
        UnavailableError: other commands have the format.
        UnknownNameError: none has.
        UsageError: the format does not have an option.
    """
    if name not in IMPORTS:
        refuse_format(name, IMPORTS, "imported")
    _check_options(IMPORTS, name, options)


def check_export(name: str, options: Options) -> None:
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
        name: as it was asked for.
        able: the formats that the command has.
        what: the command does with a format ("imported").

    Raises:
        UnavailableError: another command has it.
        UnknownNameError: none has.
    """
    if name in IMPORTS or name in EXPORTS:
        raise UnavailableError(f"format '{name}' cannot be {what}", sorted(able))
    raise UnknownNameError("format", name, able)


def _check_options(table: Table, name: str, options: Options) -> None:
    for option in _given(options):
        if option not in _taken(table[name]):
            takers = ", ".join(sorted(known for known in table if option in _taken(table[known])))
            raise UsageError(f"--{option.replace('_', '-')}: {name} has no such option (it is of {takers})")


def _given(options: Options) -> dict[str, Any]:
    return {option: value for option, value in options.items() if value not in (None, False)}


def _taken(function: Callable[..., Any]) -> set[str]:
    """The options of a format."""
    parameters = signature(function).parameters.values()
    return {one.name for one in parameters if one.kind is one.KEYWORD_ONLY} - {"progress"}


def _bound(function: Callable[..., Any], options: Options, say: Progress) -> Callable[..., Any]:
    told = {"progress": say} if "progress" in signature(function).parameters else {}
    return partial(function, **told, **_given(options))
