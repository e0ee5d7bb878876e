"""Traces of ByteProfile and dPRO: where they lie, what their names say, and the columns of their events.

    ByteProfile   WORKER/<local rank>/ or WORKER/<rank>_<local rank>/, a folder a GPU
    dPRO          TRIAL/host<i>/<gpu>/
    ours          JOB/rank<i>/, or JOB/<anything>.json, a trace a rank

A GPU's folder holds the final trace `bps_trace*.json`, or `trace.json[.gz]` with `comm.json`, `comm_detail.json`
and `io.json` beside it; and `dag.gml`. Folders of workers may lie in a folder of the job, which holds what BytePS'
messages and servers were seen to do (`comm_timeline.json`, `server_timeline.json`).

A name is `Comm.w.PUSH` to ByteProfile and `host0.rank1->Comm.1+2.SEND~>0_1_6_0` to dPRO: a `EventLabel` is either,
taken apart. `complete_events` reads a file one event at a time, `columns_of` as columns.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from echograph.errors import DataError, InputError
from echograph.ir.columns import Int32, Int64
from echograph.ir.files import read_whole
from echograph.profiler.traces.events import EventStream, OpenEvents
from echograph.units import PS_PER_US

if TYPE_CHECKING:
    from echograph.profiler.traces import Trace


COMMUNICATION = "Comm"
COMPUTATION = frozenset({"FW", "BW"})
UPDATES = frozenset({"STEP", "UPDATE"})
# A communication with a parameter server, in the order in which its parts run; BytePS calls them queue types. PUSH
# and PULL are what a worker sees of the parts between them.
QUEUE_TYPES = (
    "COORDINATE_REDUCE",
    "REDUCE",
    "COPYD2H",
    "PCIE_REDUCE",
    "COORDINATE_PUSH",
    "PUSH",
    "PULL",
    "COPYH2D",
    "COORDINATE_BROADCAST",
    "BROADCAST",
)
SERVER = ("COPY_FIRST", "SUM", "COPY_MERGED")
MESSAGES = ("PUSH_REQ", "PUSH_RES", "PULL_REQ", "PULL_RES")
# An all-reduce of Horovod on NCCL; the first two are waiting.
WAITING = frozenset({"Sync", "QUEUE"})
ALLREDUCE = "NCCL_ALLREDUCE"
NCCL = ("Sync", "QUEUE", "MEMCPY_IN_FUSION_BUFFER", ALLREDUCE, "MEMCPY_OUT_FUSION_BUFFER")
# The thread of a communication as a whole; its parts' are partitions.
TOTAL = "total"
# Messages inside an NCCL_ALLREDUCE.
TRANSFERS = frozenset({"SEND", "RECV"})
_PUSHED, _PULLED = QUEUE_TYPES.index("PUSH"), QUEUE_TYPES.index("PULL") + 1
_IN_ORDER = (
    *QUEUE_TYPES[:_PUSHED],
    *("PUSH", "PUSH_REQ", "PUSH_RES", *SERVER, "PULL", "PULL_REQ", "PULL_RES"),
    *QUEUE_TYPES[_PULLED:],
    *NCCL,
)
PLACE = {part: place for place, part in enumerate(_IN_ORDER)}
PARTS = frozenset(PLACE) | TRANSFERS

_PREFIX = re.compile(r"(?:(?:wk\d+\.)?rank\d+\.|[\w.\- ]+->)(?=\S)")
_CATEGORY = re.compile(r"(FW|BW|Comm|OUTPUT|STEP|UPDATE|I/O|push|pull)(?:[._\-\d]|$)")


class EventLabel(NamedTuple):
    """An event's name, taken apart; events with the same label are repetitions of one thing.

    Attributes:
        prefix: whose it is, as it stands before the name ("rank0.", "host0.rank1->"); empty where nothing says.
        category: FW, BW, Comm, STEP, UPDATE, I/O, OUTPUT, push, pull; of other events, their category in the file.
        operation: "BW.conv0", "Comm.w"; of other events, their name.
        part: of a communication: which of `PARTS`; empty for all of it.
        key: of a part: the partition, or the loop, channel, chunk and slice.
        mark: what stands before the key.
    """

    prefix: str
    category: str
    operation: str
    part: str = ""
    key: str = ""
    mark: str = "."

    @property
    def name(self) -> str:
        """The label as tables show it: `rank0.Comm.w.PUSH.9`."""
        part = f".{self.part}" if self.part else ""
        return f"{self.prefix}{self.operation}{part}{self.mark if self.key else ''}{self.key}"


def parse(name: str, category: str, key: str) -> EventLabel:
    """Takes an event's name apart.

    Args:
        name: as in the file.
        category: the event's `cat`.
        key: the event's thread, which of a communication's part is its partition.
    """
    found = _PREFIX.match(name)
    prefix = found.group() if found else ""
    operation, mark, suffix = name[len(prefix) :].partition("~>")
    known = category_of(operation)
    if known != COMMUNICATION:
        return EventLabel(prefix, known or category or operation.split(".")[0], operation, "", suffix, mark or ".")
    whole, _, part = operation.rpartition(".")
    if part not in PARTS or whole in ("", COMMUNICATION) or key == TOTAL:
        return EventLabel(prefix, known, operation, "", suffix, mark or ".")
    # Only of BytePS' queues is the thread a partition.
    queued = part in QUEUE_TYPES and not suffix
    return EventLabel(prefix, known, whole, part, key if queued else suffix, mark or ".")


def category_of(name: str) -> str:
    """FW, BW, Comm, STEP, ... of an operation or a node of a dependency graph; empty for any other name."""
    found = _CATEGORY.match(name)
    return found.group(1) if found else ""


def by_number(text: str) -> tuple[tuple[int, int | str], ...]:
    """A key that sorts numbers in names as numbers: 9 before 10."""
    pieces = re.split(r"(\d+)", text)
    return tuple((0, int(piece)) if piece.isdigit() else (1, piece) for piece in pieces if piece)


# Picoseconds that a column holds: 106 days.
_LONGEST = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Events:
    """Complete events, one row each, in the order of the file; columns have the same length.

    Attributes:
        labels: what the events are of.
        label: index into `labels`.
        start: picoseconds since `origin`.
        duration: picoseconds, >= 0.
        origin: picoseconds of the file's clock at which `start` is 0.
        notes: what is missing, one line each.
    """

    labels: tuple[EventLabel, ...]
    label: Int32
    start: Int64
    duration: Int64
    origin: int = 0
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.start)

    @property
    def end(self) -> Int64:
        """Picoseconds since `origin` at which each event ends."""
        return self.start + self.duration

    def relabelled(self, change: Callable[[EventLabel], EventLabel]) -> Events:
        """The events with each label changed; labels that become equal are one."""
        new: dict[EventLabel, int] = {}
        codes = np.array([new.setdefault(change(label), len(new)) for label in self.labels] or [0], np.int32)
        return dataclasses.replace(self, labels=tuple(new), label=codes[self.label])

    def prefixed(self, prefix: str) -> Events:
        """The events with a prefix, where they have none."""
        return self.relabelled(lambda label: label if label.prefix else label._replace(prefix=prefix))

    def only(self, true: Callable[[EventLabel], bool]) -> Events:
        """The events whose label is such."""
        rows = np.array([true(label) for label in self.labels] or [False])[self.label]
        return dataclasses.replace(
            self, label=self.label[rows], start=self.start[rows], duration=self.duration[rows]
        )

    def in_order(self) -> list[tuple[int, int, EventLabel]]:
        """Start, end and label of each event, by their starts."""
        order = np.argsort(self.start, kind="stable")
        rows = zip(*(column[order].tolist() for column in (self.start, self.end, self.label)), strict=True)
        return [(start, end, self.labels[code]) for start, end, code in rows]


def us_to_ps(microseconds: float) -> int:
    """Picoseconds of a time in a trace; whole microseconds are exact, however large."""
    whole = int(microseconds)
    return whole * PS_PER_US + round((microseconds - whole) * PS_PER_US)


def in_us(picoseconds: int) -> float:
    """Microseconds of a time as traces write it: without decimals where it has none."""
    return picoseconds // PS_PER_US if picoseconds % PS_PER_US == 0 else picoseconds / PS_PER_US


def joined(parts: Sequence[Events]) -> Events:
    """Events of several files, one after the other, from the first one's origin.

    Where clocks are more than 106 days apart, times of the files cannot be compared: a note says so.
    """
    origin = parts[0].origin if parts else 0
    notes = [note for part in parts for note in part.notes]
    starts = [np.zeros(0, np.int64)]
    for part in parts:
        shift = part.origin - origin
        if abs(shift) + int(np.abs(part.start).max(initial=0)) > _LONGEST:
            notes.append("the files' clocks are more than 106 days apart: their times are not compared")
            shift = 0
        starts.append(part.start + shift)
    codes: dict[EventLabel, int] = {}
    labels = [np.zeros(0, np.int32)]
    for part in parts:
        renumber = np.array([codes.setdefault(label, len(codes)) for label in part.labels] or [0], np.int32)
        labels.append(renumber[part.label])
    return Events(
        labels=tuple(codes),
        label=np.concatenate(labels),
        start=np.concatenate(starts),
        duration=np.concatenate([np.zeros(0, np.int64), *(part.duration for part in parts)]),
        origin=origin,
        notes=tuple(dict.fromkeys(notes)),
    )


def of_trace(trace: Trace, prefix: str = "") -> Events:
    """The events of a PyTorch trace or of a simulated timeline, under the names that they have."""
    width = len(trace.strings) + 1
    pairs, label = np.unique(trace.category.astype(np.int64) * width + trace.name, return_inverse=True)
    labels = tuple(
        EventLabel(prefix, trace.strings[pair // width], trace.strings[pair % width]) for pair in pairs.tolist()
    )
    return Events(
        labels=labels,
        label=label.astype(np.int32),
        start=trace.start,
        duration=trace.duration,
        origin=trace.origin,
        notes=trace.notes,
    )


ChromeEvent = dict[str, Any]
# What torch.profiler, and our own exporter, say before the events.
_KINETO = frozenset({"schemaVersion", "deviceProperties", "distributedInfo", "processRanks", "traceName"})
# 30,000 years: what is beyond is garbage.
_MOST_US = 1e18
# dPRO's timelines name the process, and the event only by its part.
_HOROVOD = re.compile(r"horovod\w*\.(.+)")
_LINK = re.compile(r"(worker|server)_(\d+)\s*->\s*(worker|server)_(\d+)$")
# Of a message inside an all-reduce of NCCL.
_PLACE = ("loopId", "channelId", "chunkId", "sliceId")
_SERVER = re.compile(r"server_\d+$")


def is_kineto(path: Path) -> bool:
    """Whether a trace is PyTorch's or a simulated timeline, by what stands before its events.

    Raises:
        InputError: the file cannot be read, or is no trace.
    """
    return not _KINETO.isdisjoint(EventStream(path).head())


def complete_events(path: Path, notes: list[str]) -> Iterator[ChromeEvent]:
    """The complete events of a file; pairs of begin and end are made one where they end.

    An end is that of the last begin of its process, thread and name (where it has one) that is still open.

    Args:
        path: a Chrome trace, gzipped or not.
        notes: what is left out is added here, one line each.

    Raises:
        InputError: the file cannot be read.
        DataError: it is no trace, or broken.
    """
    stream = EventStream(path, dict)
    processes: dict[str, str] = {}
    begun = OpenEvents()
    without_time = 0
    for event in (event for batch in stream for event in batch):
        phase = event.get("ph")
        if phase == "M" and event.get("name") == "process_name":
            processes[str(event.get("pid"))] = str(_arguments(event).get("name", ""))
        if phase not in ("X", "B", "b", "E", "e"):
            continue
        if event.get("ts") is None or (phase == "X" and event.get("dur") is None):
            without_time += 1
            continue
        _check(path, event)
        place, name = (event.get("pid"), event.get("tid")), event.get("name")
        if phase in ("B", "b"):
            begun.begin(*place, event, name)
            continue
        if phase != "X":
            begin = begun.end(*place, name)
            if begin is None:
                continue
            both = {"ph": "X", "dur": event["ts"] - begin["ts"], "args": _arguments(begin) | _arguments(event)}
            event = begin | both
            _check(path, event)
        process = processes.get(str(event.get("pid")), "")
        yield named(event, process)
    notes += stream.notes
    notes += begun.notes(path)
    notes += [f"{path}: {without_time} events have no time: they are left out"] * bool(without_time)


def _check(path: Path, event: ChromeEvent) -> None:
    ts, dur = event["ts"], event.get("dur", 0)
    numbers = isinstance(ts, int | float) and isinstance(dur, int | float)
    if not numbers or not abs(ts) < _MOST_US or not 0 <= dur < _MOST_US:
        name = str(event.get("name"))[:60]
        raise DataError(f"{path}: event '{name}': ts {_shown(ts)} and dur {_shown(dur)} are no times in us")


def _shown(time: Any) -> str:
    return repr(time)[:40]


def _arguments(event: ChromeEvent) -> dict[str, Any]:
    arguments = event.get("args")
    return arguments if isinstance(arguments, dict) else {}


def named(event: ChromeEvent, process: str) -> ChromeEvent:
    """An event of dPRO's timelines by the name that it has elsewhere: `host->Comm.tensor.PART~>partition`.

    Horovod names the process after the tensor and the event after the part; of BytePS' messages the process is
    "worker_0 -> server_1", of its servers "server_0", and the event "tensor~PART2.PUSH".
    """
    name = str(event.get("name", ""))
    arguments = _arguments(event)
    if "loopId" in arguments and "~>" not in name:
        return event | {"name": f"{name}~>{'_'.join(str(arguments.get(place, '')) for place in _PLACE)}"}
    if not process:
        return event
    if process == "Sync":
        return event | {"name": f"{COMMUNICATION}.{name}.Sync", "cat": COMMUNICATION}
    if (found := _HOROVOD.match(process)) and name in PARTS:
        return event | {"name": f"{COMMUNICATION}.{found[1]}.{name}", "cat": COMMUNICATION}
    link = _LINK.match(process)
    if link is None and not _SERVER.match(process):
        return event
    tensor, _, part = name.rpartition(".")
    tensor, _, partition = tensor.partition("~")
    whose = process
    if link is not None:
        whose = f"worker_{link[2] if link[1] == 'worker' else link[4]}"
        # A request to push carries the gradient to the server, a response to pull the sum back.
        part = f"{part}_{'REQ' if link[1] == 'worker' else 'RES'}"
    named_ = f"{COMMUNICATION}.{tensor.removeprefix(COMMUNICATION + '.')}.{part}"
    return event | {"name": f"{whose}->{named_}~>{partition}".removesuffix("~>"), "cat": COMMUNICATION}


def label_of(event: ChromeEvent) -> EventLabel:
    """What an event is of."""
    return parse(str(event.get("name", "")), str(event.get("cat") or ""), str(event.get("tid", "")))


def columns_of(path: Path, found: Iterable[ChromeEvent], notes: list[str]) -> Events:
    """Events as columns.

    Args:
        path: the file that they come from.
        found: complete events.
        notes: of the columns; what is added while they are read counts.

    Raises:
        DataError: an event is too far from the first.
    """
    codes: dict[EventLabel, int] = {}
    known: dict[tuple[str, str, str], int] = {}
    rows: list[tuple[int, int, int]] = []
    origin: int | None = None
    for event in found:
        said = str(event.get("name", "")), str(event.get("cat")), str(event.get("tid", ""))
        if said not in known:
            known[said] = codes.setdefault(label_of(event), len(codes))
        origin = int(event["ts"]) if origin is None else origin
        start, duration = us_to_ps(event["ts"] - origin), us_to_ps(event["dur"])
        if abs(start) + duration > _LONGEST:
            raise DataError(f"{path}: event '{said[0][:60]}' is more than 106 days from the first")
        rows.append((known[said], start, duration))
    label, begin, took = np.array(rows, np.int64).reshape(-1, 3).T.copy()
    return Events(
        labels=tuple(codes),
        label=label.astype(np.int32),
        start=begin,
        duration=took,
        origin=(origin or 0) * PS_PER_US,
        notes=tuple(notes),
    )


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
        notes: list[str] = []
        return columns_of(path, complete_events(path, notes), notes)
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
