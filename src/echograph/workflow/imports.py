"""Graphs from the files of other tools: those that a frontend reads, and traces, which the profiler does."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from pathlib import Path

from echograph.errors import UsageError
from echograph.frontend import FRONTENDS
from echograph.ir.formats import Imported
from echograph.ir.graph import Graph, JobGraph
from echograph.notes import tell
from echograph.progress import Progress, silent
from echograph.registry import Table
from echograph.workflow.formats import refuse_format

TRACES = Table("format", {"kineto": "echograph.workflow.imports:load_kineto"})
"""Formats that the profiler reads: name -> `load(source: Path) -> Imported`."""

FORMATS = (*FRONTENDS, *TRACES)
"""All formats that a graph is read from."""


def check_import(name: str, *, keep_overhead: bool = False) -> None:
    """Refuses a format that no graph is read from, and an option that it does not have.

    Raises:
        UnavailableError: other commands have the format.
        UnknownNameError: none has.
        UsageError: the format holds no recording.
    """
    if name not in FORMATS:
        refuse_format(name, FORMATS, "imported")
    if keep_overhead and name not in TRACES:
        raise UsageError(f"--keep-overhead: is for kineto: {name} has no recording")


def import_graph(name: str, source: Path, *, keep_overhead: bool = False, say: Progress = silent) -> Imported:
    """Reads what another tool wrote as a graph.

    Args:
        name: of the format, one of `FORMATS`.
        source: the file; for formats of one file a rank, their folder.
        keep_overhead: of profiler traces: durations as recorded, with what recording cost.
        say: told how far it is.

    Returns:
        The graph, and what it cannot hold of the source.

    Raises:
        EchoError: as `check_import`, and what the format's reader raises.
    """
    check_import(name, keep_overhead=keep_overhead)
    load = (TRACES if name in TRACES else FRONTENDS)[name]
    counts = {"progress": say} if "progress" in signature(load).parameters else {}
    loaded = load(source, **counts, **({"keep_overhead": True} if keep_overhead else {}))
    return loaded if isinstance(loaded, Imported) else Imported(graph=loaded)


def import_(name: str, source: str | Path, *, keep_overhead: bool = False, say: Progress = silent) -> Graph:
    """Reads what another tool wrote as a graph; what a graph cannot hold of it goes to the logger `echograph`.

    Args:
        name: of the format: "chakra", "comms", "gml", "json", "kineto", "onnx" or "text".
        source: the file; for chakra and kineto the folder of the ranks.
        keep_overhead: of kineto: durations as recorded, with what recording cost.
        say: told how far it is.

    Raises:
        UnknownNameError: no such format.
        UnavailableError: a format that is only written.
        InputError: the source cannot be read.
        DataError: it breaks a rule of its format.
    """
    imported = import_graph(name, Path(source), keep_overhead=keep_overhead, say=say)
    tell(imported.notes)
    return imported.graph


def load_kineto(source: Path, *, keep_overhead: bool = False) -> Imported:
    """The job of profiler traces: a folder with one a rank, a recording, or one file.

    Durations of a recording are without what recording cost, where it was measured.

    Args:
        source: the folder, or the file.
        keep_overhead: leave them as they are.

    Raises:
        InputError: there is no trace, or it cannot be read.
        DataError: a trace is broken, or two are of one rank.
    """
    from echograph.profiler.replay import lower, observed
    from echograph.profiler.traces import read_traces

    name = source.name.partition(".")[0] if source.is_file() else source.resolve().name
    traces = read_traces(source, last_step=True)
    seen = observed(traces)
    measured = bool(seen) and all(one.overhead is not None for one in seen.values())
    if keep_overhead or not measured:
        # As recorded on all ranks or on none: they wait for each other.
        seen = {rank: replace(one, overhead=None) for rank, one in seen.items()}
    lowered = lower(traces, name, seen=seen)
    said = (
        "as recorded: --keep-overhead" if keep_overhead else "as recorded: what recording costs was not measured"
    )
    note = _compared(lowered.graph) if measured and not keep_overhead else f"durations are {said}"
    return Imported(graph=lowered.graph, notes=(*lowered.notes, note))


def _compared(job: JobGraph) -> str:
    """A step as recorded, without what recording cost, and as it was when nothing was recorded."""
    from echograph.workflow.replay import replay, step_medians, steps

    found = step_medians(steps(replay(job)))
    if found is None:
        return "durations are without what recording cost"
    recorded, without, free = (f"{seconds * 1e3:.4g} ms" for seconds in found)
    return (
        f"a step took {recorded} recorded, takes {without} without what recording cost, took {free} free (medians)"
    )
