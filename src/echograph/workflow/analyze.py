"""Analyses of what ran: of profiler traces, and of a prediction, which answer alike."""

from __future__ import annotations

import inspect
import os
import typing
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echograph.errors import DataError, EchoError, UnknownNameError, UsageError
from echograph.ir.timeline import Timeline
from echograph.progress import Progress, silent
from echograph.simulator.result import Result

if TYPE_CHECKING:
    from echograph.profiler.analyses.collective_times import Fabric
    from echograph.profiler.analyses.memory import PredictedMemory
    from echograph.profiler.analyses.table import AnswerTable
    from echograph.profiler.traces import TraceSet

_COMPARED = ("steps", "rank-times", "kernels", "communication", "call-stacks")
# Rows of each table of two runs, where no analysis is named.
_MOST = 12
OVERVIEW = ("steps", "temporal-breakdown", "kernel-types", "overlap", "idle")
"""The analyses that together say where the time goes."""


def analyze(
    what: Result | Timeline | Path | str | TraceSet,
    name: str,
    *,
    ranks: Collection[int] | None = None,
    last_step: bool = False,
    progress: Progress = silent,
    **options: Any,
) -> AnswerTable:
    """Answers a question about what ran: where the time goes, what waits, what is launched.

    Args:
        what: a prediction or its timeline; the folder of a job's profiler traces, or one of them; or traces that
            are read already.
        name: name of the analysis: "overlap", "temporal-breakdown", "kernels", ... (a wrong one lists them).
        ranks: only these; None: all that there are. A prediction has one rank of each role.
        last_step: with traces: keep the last profiler step, which is often cut off.
        progress: told how far the reading is.
        options: options of the analysis, by name.

    Returns:
        Columns of equal length, one row each rank or event; times in microseconds where a column's name says so.

    Raises:
        UnknownNameError: no such analysis, or the analysis has no such option.
        InputError: there is no trace, or it cannot be read.
        DataError: a trace is broken.
    """
    from echograph.profiler.analyses import ANALYSES

    analysis = ANALYSES[name]
    known = options_of(analysis)
    for key in options:
        if key not in known:
            raise UnknownNameError(f"option of {name}", key, known)
    if isinstance(options.get("cluster"), str):
        options["cluster"] = fabric_of(options["cluster"])
    if isinstance(options.get("predicted"), str | Path):
        options["predicted"] = predicted_memory(Path(options["predicted"]))
    found: AnswerTable = analysis(_traces(what, ranks, last_step, progress), **options)
    return found


def fabric_of(cluster: str) -> Fabric:
    """How long collectives should take on a cluster: its preset's name, or a TOML file.

    Raises:
        EchoError: no such cluster, or its file is wrong.
    """
    from echograph.simulator.clusters import load_cluster
    from echograph.simulator.collectives import KINDS, collective_time

    where = load_cluster(cluster)

    def seconds(kind: str, nbytes: int, ranks: Sequence[int]) -> float | None:
        name = "send_recv" if kind in ("send", "recv") else kind
        if name not in KINDS:
            return None
        return collective_time(name, nbytes, where.place(ranks), where).seconds

    return seconds


def predicted_memory(path: Path) -> PredictedMemory:
    """What a result of `echosim run` says of a rank's memory.

    Raises:
        InputError: the file cannot be read, or is no result.
        DataError: memory was not worked out in it.
    """
    from echograph.profiler.analyses.memory import PredictedMemory
    from echograph.workflow.compare import read_result

    memory = read_result(path)["memory"]
    if memory is None:
        raise DataError(f"{path}: says nothing of memory: its graph has no tensors")
    return PredictedMemory(memory["peak_bytes"], memory.get("reserved_bytes"))


def _traces(
    what: Result | Timeline | Path | str | TraceSet,
    ranks: Collection[int] | None,
    last_step: bool,
    progress: Progress,
) -> TraceSet:
    if isinstance(what, Result | Timeline):
        return _simulated(what.timeline if isinstance(what, Result) else what, ranks)
    if isinstance(what, str | Path):
        return read_folder(Path(what), ranks, last_step=last_step, progress=progress)
    return what


def _simulated(timeline: Timeline, ranks: Collection[int] | None) -> TraceSet:
    """The traces that a prediction would have left, of one rank of each role."""
    from echograph.profiler.traces.simulated import simulated_traces

    if timeline.graph is None:
        raise UsageError("the timeline does not know its job: take it from a prediction of echograph.simulate")
    traces = simulated_traces(timeline.graph, timeline)
    if ranks is None:
        return traces
    if unknown := sorted(set(ranks) - set(traces)):
        there = ", ".join(map(str, traces))
        raise UsageError(f"no rank {unknown[0]} in the prediction; it has one of each role: {there}")
    return traces.replaced({rank: traces[rank] for rank in sorted(ranks)})


def read_folder(
    path: Path,
    ranks: Collection[int] | None = None,
    *,
    last_step: bool = False,
    jobs: int = 1,
    cache: bool = False,
    engine: str = "local",
    progress: Progress = silent,
) -> TraceSet:
    """The profiler traces of a folder, or of one file.

    Args:
        path: the folder, or the file.
        ranks: the ranks to read; None reads all.
        last_step: keep the last profiler step.
        jobs: processes that read; 0 takes one a core.
        cache: keep what was read, so that a second look is quick.
        engine: "local", or "ray" for a task a rank on a Ray cluster.
        progress: told how far it is.

    Raises:
        UsageError: processes beside a Ray cluster, which has a task a rank.
        EchoError: as `profiler.traces.read_traces`.
    """
    from echograph.profiler.traces import TraceSet, cache_folder, read_traces
    from echograph.profiler.traces.relations import complete_steps

    if jobs < 0:
        raise UsageError(f"--jobs {jobs}: give 1 or more, or 0 for one a core")
    if jobs > 1 and engine == "ray":
        raise UsageError("--jobs: a Ray cluster has a task a rank: leave it out, or --engine ray")
    traces = read_traces(
        path,
        ranks,
        last_step=last_step,
        workers=jobs or os.cpu_count() or 1,
        engine=engine,
        cache_folder=cache_folder() if cache else None,
        progress=progress,
    )
    if last_step and all(complete_steps(trace) is trace for trace in traces.values()):
        idle = "--last-step: has no effect here: no trace marks several steps"
        return TraceSet(traces, [*traces.notes, idle])
    return traces


def answers(
    traces: TraceSet, name: str, options: Mapping[str, Any], against: TraceSet | None = None
) -> dict[str, AnswerTable]:
    """The answer of one analysis, or of those that say most, by name.

    Args:
        traces: the traces.
        name: name of the analysis; "": an overview.
        options: options of the analysis, by name.
        against: another run, beside which each answer is put; of an overview, the first rows.

    Raises:
        EchoError: as the analysis, or it has no two runs side by side.
    """
    from echograph.profiler.analyses import ANALYSES
    from echograph.profiler.analyses.against import side_by_side

    if against is None:
        asked = {name: options} if name else {each: {} for each in OVERVIEW}
        return {each: ANALYSES[each](traces, **chosen) for each, chosen in asked.items()}
    if name:
        return {name: side_by_side(name, traces, against, **options)}
    return {each: side_by_side(each, traces, against).first(_MOST, each) for each in _COMPARED}


def every_answer(
    traces: TraceSet, against: TraceSet | None = None, progress: Progress = silent
) -> dict[str, AnswerTable]:
    """What every analysis answers, or every one that has two runs side by side; for a workbook.

    An analysis that cannot be made of these traces is a table without columns, whose note says why.

    Args:
        traces: the traces.
        against: another run, beside which each answer is put.
        progress: told what is being analysed.
    """
    from echograph.profiler.analyses import ANALYSES
    from echograph.profiler.analyses.against import COMPARED
    from echograph.profiler.analyses.table import AnswerTable

    found: dict[str, AnswerTable] = {}
    for name in ANALYSES if against is None else COMPARED:
        progress(f"analysing {name}")
        try:
            found |= answers(traces, name, {}, against)
        except EchoError as error:
            found[name] = AnswerTable(columns={}, notes=(str(error),))
    return found


def analysis_page(
    traces: TraceSet,
    folder: str,
    name: str,
    options: Mapping[str, Any],
    against: tuple[str, TraceSet] | None = None,
    progress: Progress = silent,
) -> str:
    """One analysis of traces with its plot as an HTML page, or the whole picture.

    Args:
        traces: the traces.
        folder: what they are called on the page.
        name: name of the analysis; "": the whole picture.
        options: options of the analysis, by name.
        against: another run and what it is called, beside which the page puts the traces.
        progress: told how far it is.
    """
    from echograph.profiler.analyses import ANALYSES
    from echograph.profiler.page.comparison import comparison
    from echograph.profiler.page.report import page_of, report

    if against is not None:
        other, compared = against
        names, chosen = ([name], {name: options}) if name else (None, {})
        return comparison(traces, compared, f"{folder} against {other}", names, chosen, progress)
    if name:
        return page_of(name, ANALYSES[name](traces, **options), f"{name} of {folder}")
    return report(traces, f"Traces of {folder}", progress)


def write_copy(traces: TraceSet, name: str, output: Path, options: Mapping[str, Any]) -> None:
    """Writes the trace with the answer of an analysis in it, compressed where the file ends in ".gz"."""
    from echograph.ir.files import write_whole
    from echograph.profiler.analyses import COPIES

    for trace in traces.values():
        if not trace.has_file:
            raise UsageError(f"{trace.path}: {trace.header.get('format')}: only PyTorch's JSON has a copy")
    parts: Iterable[bytes] = COPIES[name](traces, **options)
    write_whole(output, _gzipped(parts) if output.suffix == ".gz" else parts)


def _gzipped(parts: Iterable[bytes]) -> Iterator[bytes]:
    # What zlib takes for a gzip header, which then has no time in it: the same trace gives the same bytes.
    compress = zlib.compressobj(wbits=31)
    for part in parts:
        yield compress.compress(part)
    yield compress.flush()


def options_of(analysis: Callable[..., Any]) -> list[str]:
    """The names of an analysis's options."""
    parameters = inspect.signature(analysis).parameters
    return [key for key, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]


def parse_options(name: str, given: Iterable[str], read: Callable[[Path], TraceSet]) -> dict[str, Any]:
    """Options of an analysis from text, as the types that its signature has.

    Args:
        name: name of the analysis.
        given: KEY=VALUE, each.
        read: what makes traces of a path, for options that are traces.

    Raises:
        UnknownNameError: the analysis has no such option.
        UsageError: a text is no KEY=VALUE, or a value not of the option's type.
    """
    import msgspec

    from echograph.profiler.analyses import ANALYSES
    from echograph.profiler.analyses.collective_times import Fabric
    from echograph.profiler.analyses.memory import PredictedMemory
    from echograph.profiler.traces import TraceSet

    analysis = ANALYSES[name]
    known, types = options_of(analysis), typing.get_type_hints(analysis)
    options: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--option '{text}': write KEY=VALUE; {name} has {', '.join(known) or 'no options'}")
        if key not in known:
            raise UnknownNameError(f"option of {name}", key, known)
        if types[key] == TraceSet | None:
            options[key] = read(Path(value))
            continue
        if types[key] == PredictedMemory | None:
            options[key] = predicted_memory(Path(value))
            continue
        if types[key] == Fabric | None:
            options[key] = fabric_of(value)
            continue
        try:
            options[key] = msgspec.convert(value, types[key], strict=False)
        except msgspec.ValidationError:
            raise UsageError(f"--option {key}: '{value}' is not of type {types[key].__name__}") from None
    return options
