"""The traces of a job: a folder with one file a rank, or files that hold several; read here or on Ray."""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from echograph.errors import DataError, EchoError, InputError, MissingExtraError, UnknownNameError, UsageError
from echograph.profiler.traces import cache
from echograph.profiler.traces.events import EventStream
from echograph.profiler.traces.formats import format_of, head_of, read_any, what_else
from echograph.profiler.traces.kineto import rank_in
from echograph.profiler.traces.memory_snapshot import WHAT as SNAPSHOT
from echograph.profiler.traces.relations import complete_steps
from echograph.profiler.traces.trace import Trace, TraceSet
from echograph.progress import Progress, silent


def read_on_ray(files: Sequence[Path]) -> Iterator[Trace]:
    """The traces of some files, in their order, each read by a task of its own.

    The cluster is the one of `RAY_ADDRESS`, or this machine where there is none. Its workers need echograph and
    the files under the same paths; what comes back are the columns, a small part of a file.

    Args:
        files: one trace each.

    Raises:
        MissingExtraError: Ray is not installed.
        InputError: a file cannot be read, or is broken.
    """
    try:
        import ray
    except ImportError:
        raise MissingExtraError("Ray", "ray", "reading with the engine ray") from None
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    task = ray.remote(_attempt)
    for result in [task.remote(file.resolve()) for file in files]:
        found = ray.get(result)
        if isinstance(found, EchoError):
            raise found
        yield found


def _attempt(file: Path) -> Trace | EchoError:
    """The trace, or why there is none: an error that a task raises comes back with its traceback as its text."""
    try:
        return read_any(file)
    except EchoError as error:
        return error


ENGINES = ("local", "ray")
_ENDINGS = (".json", ".gz", ".sqlite", ".xplane.pb", ".pickle", ".pkl")
# Below this, in bytes on disk, starting processes costs more than they save.
_PARALLEL_BYTES = 4 << 20


def read_traces(
    path: Path | str,
    ranks: Collection[int] | None = None,
    *,
    last_step: bool = False,
    align: bool = False,
    workers: int = 1,
    engine: str = "local",
    cache_folder: Path | None = None,
    progress: Progress = silent,
) -> TraceSet:
    """The traces in a folder, or of one file.

    Args:
        path: the folder, or the file.
        ranks: the ranks to read; None reads all.
        last_step: keep what runs in the last profiler step and after it; its work is often cut off by the end of
            the profile, so it is left out unless asked for.
        align: put all ranks on one clock, that of the first, found from their collectives (`alignment`).
        workers: processes that read; beyond 1, the caller's main module must be importable.
        engine: "local", or "ray" for a task a file on a Ray cluster.
        cache_folder: where columns of traces that were read before are kept; None keeps nothing.
        progress: told how far the reading is.

    Raises:
        InputError: the folder or a file cannot be read, or there is no trace.
        DataError: a file is broken, or two are of one rank.
        UsageError: a rank that has no trace, or an unknown engine.
        MissingExtraError: the engine is Ray, and it is not installed.
    """
    if engine not in ENGINES:
        raise UnknownNameError("engine", engine, ENGINES)
    files, notes = profiles(trace_files(Path(path)))
    if ranks is not None and len(files) > 1:
        files = _of_ranks(files, ranks)
    found: dict[Path, Trace] = {}
    keys = {file: cache.content_key(file) for file in files} if cache_folder is not None else {}
    for file, key in keys.items():
        if cache_folder is not None and (known := cache.load_cached(cache_folder, key, file)) is not None:
            found[file] = known
    missing = [file for file in files if file not in found]
    for file, trace in zip(missing, _read(missing, workers, engine, progress), strict=True):
        found[file] = trace
        if cache_folder is not None:
            cache.store(cache_folder, keys[file], trace)
    traces = _by_rank(trace for file in files for trace in trace_of_each_rank(found[file]))
    chosen = sorted(traces) if ranks is None else ranks
    if unknown := sorted(set(chosen) - set(traces)):
        raise UsageError(f"{path}: no trace of rank {unknown[0]}; there is {_shown(traces)}")
    kept = {rank: traces[rank] for rank in chosen}
    steps = kept if last_step else {rank: complete_steps(trace) for rank, trace in kept.items()}
    found_set = TraceSet(steps, [*notes, *_doubts(steps)])
    if align:
        from echograph.profiler.traces.alignment import align as on_one_clock

        found_set, _ = on_one_clock(found_set)
    return found_set


def _doubts(traces: Mapping[int, Trace]) -> Iterator[str]:
    """A line for each thing that cannot be of one job as it ran."""
    sizes: dict[int, list[int]] = defaultdict(list)
    for rank, trace in traces.items():
        sizes[trace.world_size].append(rank)
        if twice := _twice(trace):
            yield (
                f"rank {rank}: {twice:,} kernels, copies or sets stand twice, at one time on one stream: they "
                "count twice; was a trace merged with itself?"
            )
    said = {size: ranks for size, ranks in sizes.items() if size > 1}
    if len(said) > 1:
        of = "; ".join(f"{size} on rank {_shown(ranks)}" for size, ranks in sorted(said.items()))
        yield f"ranks say that they are of jobs of different sizes ({of}): are these files of one job?"


def _twice(trace: Trace) -> int:
    """How much work of one name begins and ends with another on its stream, launched by the same call."""
    rows = np.flatnonzero(trace.on_device & (trace.duration > 0))
    columns = (trace.correlation, trace.name, trace.duration, trace.start, trace.stream, trace.pid)
    keys = np.stack([column[rows].astype(np.int64) for column in columns])
    keys = keys[:, np.lexsort(keys)]
    return int((keys[:, 1:] == keys[:, :-1]).all(axis=0).sum())


def trace_files(path: Path) -> list[Path]:
    """The files of a folder that may be traces, or the file itself.

    Raises:
        InputError: there is none.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InputError(f"{path}: no such file or folder")
    files = sorted(file for file in path.iterdir() if file.name.endswith(_ENDINGS) and file.is_file())
    # A recording has a folder for each rank.
    files = files or sorted(path.glob("*/trace.json")) + sorted(path.glob("*/trace.json.gz"))
    if not files:
        raise InputError(
            f"{path}: no trace in it: expected *.json or *.json.gz, one a rank (or {', '.join(_ENDINGS[2:])})"
        )
    return files


def profiles(files: list[Path]) -> tuple[list[Path], list[str]]:
    """The files that are no execution trace, memory timeline or memory snapshot, which lie beside profiles.

    Args:
        files: of a folder; one alone is taken for a profile.

    Returns:
        The files, and a line for each that is left out.

    Raises:
        InputError: a file cannot be read, or none is left.
    """
    if len(files) < 2:
        return files, []
    kept, notes, snapshots = [], [], []
    for file in files:
        head = head_of(file)
        other, beside = format_of(head), what_else(head)
        if other is not None and other.name == SNAPSHOT:
            snapshots.append(file)
        elif beside is None:
            kept.append(file)
        else:
            notes.append(f"{file}: {beside}")
    if not kept and snapshots:
        return snapshots, notes
    notes += [f"{file}: {SNAPSHOT}, no profile: name it alone" for file in snapshots]
    if not kept:
        raise InputError(f"{files[0].parent}: no trace in it, but {notes[0].partition(': ')[2].partition(',')[0]}")
    return kept, notes


def trace_of_each_rank(trace: Trace) -> Iterator[Trace]:
    """The traces in a file: several where it says which of its processes are ranks (`processRanks`).

    Raises:
        DataError: it does not say so in numbers.
    """
    ranks = trace.header.get("processRanks")
    if ranks is None:
        yield trace
        return
    if not isinstance(ranks, dict) or not all(type(rank) is int and rank >= 0 for rank in ranks.values()):
        raise DataError(f'{trace.path}: processRanks: give the rank of each process, as {{"0": 8}}')
    processes = np.unique(trace.pid).tolist()
    of_process = {pid: ranks.get(str(trace.process(pid))) for pid in processes}
    for rank in dict.fromkeys(ranks.values()):
        own = [pid for pid, of in of_process.items() if of == rank]
        yield dataclasses.replace(trace.rows(np.isin(trace.pid, own)), rank=rank)


def _read(files: list[Path], workers: int, engine: str, progress: Progress) -> Iterator[Trace]:
    if engine == "ray":
        yield from read_on_ray(files)
        return
    if workers < 2 or len(files) < 2 or sum(file.stat().st_size for file in files) < _PARALLEL_BYTES:
        for done, file in enumerate(files, start=1):
            yield read_any(file, progress if len(files) == 1 else silent)
            progress("reading traces", done, len(files))
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(files)), mp_context=context) as pool:
        for done, trace in enumerate(pool.map(read_any, files), start=1):
            progress("reading traces", done, len(files))
            yield trace


def _by_rank(traces: Iterable[Trace]) -> dict[int, Trace]:
    found: dict[int, Trace] = {}
    for trace in traces:
        if (other := found.get(trace.rank)) is not None:
            raise DataError(f"{other.path} and {trace.path} are both of rank {trace.rank}: leave one of them out")
        found[trace.rank] = trace
    return found


def _of_ranks(files: list[Path], ranks: Collection[int]) -> list[Path]:
    """Files of these ranks, and those whose rank is known only when they are read."""
    found = {file: _rank_of(file) for file in files}
    known = {rank for rank in found.values() if rank is not None}
    if None not in found.values() and (unknown := sorted(set(ranks) - known)):
        raise UsageError(f"{files[0].parent}: no trace of rank {unknown[0]}; there are {_shown(known)}")
    return [file for file, rank in found.items() if rank is None or rank in ranks]


def _rank_of(file: Path) -> int | None:
    """The rank that a file says it is of; None where that is known only when it is read."""
    if format_of(head_of(file)) is not None:
        return None
    return rank_in(EventStream(file).head(), file)


def _shown(ranks: Iterable[int]) -> str:
    known = sorted(ranks)
    return ", ".join(map(str, known[:12])) + (f", ... ({len(known)} in all)" if len(known) > 12 else "")
