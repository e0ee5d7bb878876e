"""A job of profiler traces, as they were recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from echograph.ir.formats import Imported
from echograph.ir.graph import JobGraph


def load(source: Path, *, keep_overhead: bool = False) -> Imported:
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
