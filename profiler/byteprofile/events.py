"""Events of ByteProfile's and dPRO's traces: what their names say, columns that hold them, files they come from.

A name is `Comm.w.PUSH` to ByteProfile and `host0.rank1->Comm.1+2.SEND~>0_1_6_0` to dPRO: a `EventLabel` is either,
taken apart. `complete_events` reads a file one event at a time, `columns_of` as columns.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from echograph.errors import DataError
from echograph.ir.columns import Int32, Int64
from echograph.profiler.traces.events import EventStream
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

    def where(self, true: Callable[[EventLabel], bool]) -> Int64:
        """Rows whose label is such."""
        return np.flatnonzero(np.array([true(label) for label in self.labels] or [False])[self.label])

    def rows(self, rows: Int64) -> Events:
        """Some of the events, in the order given."""
        return dataclasses.replace(
            self, label=self.label[rows], start=self.start[rows], duration=self.duration[rows]
        )


class Growing:
    """Grows `Events`, one by one.

    Args:
        path: the file they come from, for errors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._codes: dict[EventLabel, int] = {}
        self._rows: list[tuple[int, int, int]] = []
        self._origin: int | None = None

    def add(self, label: EventLabel, start_us: float, duration_us: float) -> None:
        """Appends an event.

        Raises:
            DataError: it is too far from the first.
        """
        if self._origin is None:
            self._origin = int(start_us)
        times = to_ps(start_us - self._origin), to_ps(duration_us)
        if abs(times[0]) + times[1] > _LONGEST:
            raise DataError(f"{self.path}: event '{label.name[:60]}' is more than 106 days from the first")
        self._rows.append((self._codes.setdefault(label, len(self._codes)), *times))

    def events(self, notes: Sequence[str] = ()) -> Events:
        """What was added."""
        columns = np.array(self._rows, np.int64).reshape(-1, 3).T
        return Events(
            labels=tuple(self._codes),
            label=columns[0].astype(np.int32),
            start=columns[1].copy(),
            duration=columns[2].copy(),
            origin=(self._origin or 0) * PS_PER_US,
            notes=tuple(notes),
        )


def to_ps(microseconds: float) -> int:
    """Picoseconds of a time in a trace; whole microseconds are exact, however large."""
    whole = int(microseconds)
    return whole * PS_PER_US + round((microseconds - whole) * PS_PER_US)


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
    columns = []
    for part in parts:
        renumber = np.array([codes.setdefault(label, len(codes)) for label in part.labels] or [0], np.int32)
        columns.append(renumber[part.label])
    return Events(
        labels=tuple(codes),
        label=np.concatenate([np.zeros(0, np.int32), *columns]),
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
    processes: dict[Any, str] = {}
    pairs = _Pairs()
    without_time = 0
    for event in (event for batch in stream for event in batch):
        phase = event.get("ph")
        if phase == "M" and event.get("name") == "process_name":
            processes[_plain(event.get("pid"))] = str(_arguments(event).get("name", ""))
        if phase not in ("X", "B", "b", "E", "e"):
            continue
        if event.get("ts") is None or (phase == "X" and event.get("dur") is None):
            without_time += 1
            continue
        _check(path, event)
        if phase != "X":
            complete = pairs.add(event)
            if complete is None:
                continue
            event = complete
            _check(path, event)
        process = processes.get(_plain(event.get("pid")), "") if processes else ""
        yield named(event, process)
    notes += stream.notes
    notes += [f"{path}: {pairs.open} events begin and do not end: they are left out"] * bool(pairs.open)
    notes += [f"{path}: {pairs.unmatched} events end and did not begin: they are left out"] * bool(pairs.unmatched)
    notes += [f"{path}: {without_time} events have no time: they are left out"] * bool(without_time)


class _Pairs:
    """Begins and ends as complete events.

    Attributes:
        unmatched: ends without a begin, so far.
    """

    def __init__(self) -> None:
        self.unmatched = 0
        self._begun: dict[tuple[Any, Any], list[ChromeEvent]] = defaultdict(list)

    @property
    def open(self) -> int:
        """Begins without an end, so far."""
        return sum(map(len, self._begun.values()))

    def add(self, event: ChromeEvent) -> ChromeEvent | None:
        """The complete event that ends with this one, if one does."""
        begun = self._begun[_plain(event.get("pid")), _plain(event.get("tid"))]
        if event["ph"] in ("B", "b"):
            begun.append(event)
            return None
        name = event.get("name")
        for place in range(len(begun) - 1, -1, -1):
            if name in (None, "", begun[place].get("name")):
                begin = begun.pop(place)
                arguments = _arguments(begin) | _arguments(event)
                return begin | {"ph": "X", "dur": event["ts"] - begin["ts"], "args": arguments}
        self.unmatched += 1
        return None


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


def _plain(place: Any) -> Any:
    """A process or thread as a dictionary can hold it."""
    return place if isinstance(place, str | int) else str(place)


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


def read_events(path: Path) -> Events:
    """The events of one trace file.

    Raises:
        InputError: the file cannot be read.
        DataError: it is no trace, or broken.
    """
    notes: list[str] = []
    return columns_of(path, complete_events(path, notes), notes)


def columns_of(path: Path, found: Iterable[ChromeEvent], notes: list[str]) -> Events:
    """Events as columns."""
    growing = Growing(path)
    known: dict[tuple[str, str, str], EventLabel] = {}
    for event in found:
        said = str(event.get("name", "")), str(event.get("cat")), str(event.get("tid", ""))
        label = known.get(said)
        if label is None:
            label = known[said] = label_of(event)
        growing.add(label, event["ts"], event["dur"])
    return growing.events(notes)
