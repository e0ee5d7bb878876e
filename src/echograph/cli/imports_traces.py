"""Profiler traces among the formats of `echoc import`: the profiler reads and lowers them, not a frontend."""

from __future__ import annotations

from pathlib import Path

from echograph.frontend import Imported
from echograph.registry import Table

TRACES = Table("format", {"kineto": "echograph.cli.imports_traces:load_kineto"})
"""Formats that the profiler reads: name -> `load(source: Path) -> Imported`."""


def load_kineto(source: Path) -> Imported:
    """The job of profiler traces: a folder with one a rank, a recording, or one file.

    Raises:
        InputError: there is no trace, or it cannot be read.
        DataError: a trace is broken, or two are of one rank.
    """
    from echograph.profiler.replay import lower
    from echograph.profiler.traces import read_traces

    name = source.name.partition(".")[0] if source.is_file() else source.resolve().name
    lowered = lower(read_traces(source, last_step=True), name)
    return Imported(graph=lowered.graph, notes=lowered.notes)
