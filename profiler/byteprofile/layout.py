"""Where a job's traces lie: folders of ByteProfile, of dPRO, and of PyTorch traces.

    ByteProfile   WORKER/<local rank>/ or WORKER/<rank>_<local rank>/, a folder a GPU
    dPRO          TRIAL/host<i>/<gpu>/
    ours          JOB/rank<i>/, or JOB/<anything>.json, a trace a rank

A GPU's folder holds the final trace `bps_trace*.json`, or `trace.json[.gz]` with `comm.json`, `comm_detail.json`
and `io.json` beside it; and `dag.gml`. Folders of workers may lie in a folder of the job, which holds what BytePS'
messages and servers were seen to do (`comm_timeline.json`, `server_timeline.json`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from echograph.errors import DataError, InputError
from echograph.ir.files import read_whole
from echograph.profiler.byteprofile.events import Events, by_number, is_kineto, joined, of_trace, read_events

MAX_TEXT_BYTES = 64 << 20
FINAL = re.compile(r"bps_trace\D*(?P<rank>\d+)?\D*?(?P<end>\d+)?\D*\.json(\.gz)?$")
_TRACES = ("trace.json.gz", "trace.json")
SOURCES = ("temp.json", "comm.json", "comm_detail.json", "io.json")
_GPU = re.compile(r"(?:(?P<outer>\d+)_|rank[-_]?|gpu[-_]?)?(?P<rank>\d+)$")
_HOST = re.compile(r"host\d+$")
_MESSAGES, _SERVERS = "comm_timeline.json", "server_timeline.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The traces of one GPU.

    Attributes:
        worker: number of the worker (the machine), from 0.
        host: what dPRO calls it ("host0"); empty elsewhere.
        rank: local rank.
        folder: where its files are; of a trace that is given alone, the trace itself.
        files: its trace, or the files that make up one; none where the final trace is still to be made.
    """

    worker: int
    host: str = ""
    rank: int
    folder: Path
    files: tuple[Path, ...]

    @property
    def dag(self) -> Path:
        """The file with its dependency graph, which may not exist."""
        return self.folder / "dag.gml"

    def events(self) -> Events:
        """Its events.

        Raises:
            InputError: a file cannot be read, or is no trace, or there is only what one is made of.
            DataError: a file is broken.
        """
        if not self.files:
            raise InputError(f"{self.folder}: has no final trace: make it with echoprof collect {self.folder}")
        return joined([events_of(file) for file in self.files])


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The traces of one worker or of several.

    Attributes:
        path: what was asked for.
        gpus: by worker and local rank.
        messages: what BytePS' messages and servers were seen to do, where there are such files.
    """

    path: Path
    gpus: tuple[Gpu, ...]
    messages: tuple[Path, ...] = ()

    @property
    def workers(self) -> int:
        """How many there are."""
        return len({gpu.worker for gpu in self.gpus})

    def prefix(self, gpu: Gpu) -> str:
        """What stands before the names of a GPU's events; nothing where it is alone, and no host has a name."""
        if gpu.host:
            return f"{gpu.host}.rank{gpu.rank}->"
        if len(self.gpus) == 1:
            return ""
        return f"wk{gpu.worker}.rank{gpu.rank}." if self.workers > 1 else f"rank{gpu.rank}."

    def title(self, gpu: Gpu) -> str:
        """A GPU's name in tables."""
        return self.prefix(gpu).removesuffix(".").removesuffix("->") or f"rank{gpu.rank}"

    def events(self) -> Events:
        """The events of all GPUs, and of messages and servers, prefixed where there are several.

        Raises:
            InputError: a file cannot be read, or is no trace.
            DataError: a file is broken.
        """
        parts = [gpu.events().prefixed(self.prefix(gpu)) for gpu in self.gpus]
        return joined([*parts, *(events_of(file) for file in self.messages)])


def events_of(path: Path) -> Events:
    """The events of one file, whichever kind of trace it is.

    Raises:
        InputError: the file cannot be read, or is no trace.
        DataError: it is broken.
    """
    if not is_kineto(path):
        return read_events(path)
    from echograph.profiler.traces import read_traces

    traces = read_traces(path, last_step=True)
    several = len(traces) > 1
    return joined([of_trace(trace, f"rank{rank}." if several else "") for rank, trace in traces.items()])


def find_job(path: Path) -> Job:
    """The GPUs whose traces lie in a folder, or a trace that is given alone.

    Raises:
        InputError: there is no such path, or no trace in it.
        DataError: two folders are of one GPU.
    """
    if path.is_file():
        return Job(path=path, gpus=(Gpu(worker=0, rank=_rank_of(path), folder=path, files=(path,)),))
    if not path.is_dir():
        raise InputError(f"{path}: no such file or folder")
    messages = tuple(path / name for name in (_MESSAGES, _SERVERS) if (path / name).is_file())
    folders = _folders(path)
    if _is_gpu(path) and not any(map(_is_gpu, folders)):
        return Job(path=path, gpus=(_gpu(path, 0, _rank_of(path)),))
    gpus = _worker(folders, 0)
    if not gpus:
        workers = [found for folder in folders if (found := _worker(_folders(folder), 0))]
        gpus = [_gpu(gpu.folder, number, gpu.rank) for number, found in enumerate(workers) for gpu in found]
    if not gpus:
        gpus = _plain_traces(path)
    if not gpus:
        raise InputError(f"{path}: no trace in it: give a trace, a GPU's folder, a worker's or a job's")
    return Job(path=path, gpus=tuple(gpus), messages=messages)


def _folders(path: Path) -> list[Path]:
    return sorted((inner for inner in path.iterdir() if inner.is_dir()), key=lambda inner: by_number(inner.name))


def _is_gpu(folder: Path) -> bool:
    looks = _GPU.match(folder.name) or any((folder / name).is_file() for name in ("dag.gml", *SOURCES))
    return bool(looks and (_files(folder) or (folder / SOURCES[0]).is_file()))


def _worker(folders: Sequence[Path], number: int) -> list[Gpu]:
    """The GPUs among a worker's folders; of several workers, where the folders' names say so."""
    found = [(folder, _GPU.match(folder.name)) for folder in folders if _is_gpu(folder)]
    named = [(folder, name) for folder, name in found if name]
    outer = [(int(name["outer"] or 0), int(name["rank"])) for _, name in named]
    # In `<rank>_<local rank>` the rank may be the worker's, or count the GPUs of all workers.
    counted = len({rank for rank, _ in outer}) == len(outer)
    places = [(rank - local if counted else rank, local) for rank, local in outer]
    if not any(name["outer"] for _, name in named):
        places = [(number, local) for _, local in outer]
    seen: dict[tuple[int, int], Path] = {}
    for (folder, _), place in zip(named, places, strict=True):
        if place in seen:
            raise DataError(f"{seen[place]} and {folder} are both of local rank {place[1]}: leave one of them out")
        seen[place] = folder
    workers = {worker: index for index, worker in enumerate(sorted({worker for worker, _ in seen}))}
    return [_gpu(seen[worker, rank], number + workers[worker], rank) for worker, rank in sorted(seen)]


def _gpu(folder: Path, worker: int, rank: int) -> Gpu:
    host = folder.resolve().parent.name
    return Gpu(
        worker=worker, host=host if _HOST.match(host) else "", rank=rank, folder=folder, files=_files(folder)
    )


def _files(folder: Path) -> tuple[Path, ...]:
    """The final trace of a GPU's folder, that of the last steps where there are several; or what makes up one."""
    final = [(file, found) for file in folder.iterdir() if (found := FINAL.match(file.name))]
    if final:
        return (max(final, key=lambda pair: (int(pair[1]["end"] or 0), pair[0].name))[0],)
    trace = [folder / name for name in _TRACES if (folder / name).is_file()][:1]
    rest = [folder / name for name in SOURCES[1:] if trace and (folder / name).is_file()]
    return (*trace, *rest)


def _plain_traces(path: Path) -> list[Gpu]:
    from echograph.profiler.traces.events import EventStream
    from echograph.profiler.traces.folder import trace_files
    from echograph.profiler.traces.kineto import rank_in

    try:
        files = trace_files(path)
    except InputError:
        return []
    files.sort(key=lambda file: by_number(file.name))
    said = [rank_in(EventStream(file).head(), file) for file in files]
    # A trace of several ranks, or of a program without any, says none.
    ranks = [rank for rank in said if rank is not None]
    if len(set(ranks)) < len(files):
        ranks = list(range(len(files)))
    gpus = [Gpu(worker=0, rank=rank, folder=file, files=(file,)) for rank, file in zip(ranks, files, strict=True)]
    return sorted(gpus, key=lambda gpu: gpu.rank)


def _rank_of(path: Path) -> int:
    """The local rank that the name of a trace or of a GPU's folder says; 0 where none does."""
    if path.is_file() and (found := FINAL.match(path.name)) and found["rank"]:
        return int(found["rank"])
    named = _GPU.match(path.parent.name if path.is_file() else path.name)
    return int(named["rank"]) if named else 0


def gradient_names(folders: Iterable[Path]) -> tuple[str, ...]:
    """The names of gradients by their index; empty where no folder has a list.

    Lines of `gradient_name_list.txt` are names, or an index and a name; `metadata.json` may hold the list too.

    Raises:
        InputError: a file cannot be read.
        DataError: it is no such list.
    """
    for folder in folders:
        listed, described = folder / "gradient_name_list.txt", folder / "metadata.json"
        if listed.is_file():
            lines = [line.strip() for line in read_text(listed).splitlines() if line.strip()]
            indexed = [re.match(r"(\d+)\s*(?:->|[:,\s])\s*(\S.*)", line) for line in lines]
            if lines and all(indexed):
                pairs = {int(found[1]): found[2] for found in indexed if found}
                return tuple(pairs.get(index, "") for index in range(max(pairs) + 1))
            return tuple(lines)
        if described.is_file():
            try:
                said = json.loads(read_text(described))
            except ValueError as error:
                raise DataError(f"{described}: is not valid JSON ({error})") from None
            names = said.get("gradient_name_list") if isinstance(said, dict) else None
            if isinstance(names, list):
                return tuple(map(str, names))
    return ()


def read_text(path: Path) -> str:
    """A text file beside a trace.

    Raises:
        InputError: it cannot be read, or is too large.
        DataError: it is no text.
    """
    try:
        return read_whole(path, "give the folder of a worker", MAX_TEXT_BYTES).decode()
    except UnicodeDecodeError:
        raise DataError(f"{path}: is no text") from None
