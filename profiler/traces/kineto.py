"""A Kineto or Chrome trace file to columns."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import compress
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from echograph.errors import DataError
from echograph.ir.columns import Bools, Int64
from echograph.profiler.traces.events import (
    GROUPS,
    NOTHING,
    TEXTS,
    ArgumentGroup,
    BeginEvent,
    EndEvent,
    EventArguments,
    EventStream,
    ExactEvent,
    MetadataEvent,
    OpenEvents,
    TraceEvent,
    whole_characters,
)
from echograph.profiler.traces.merged import MergedRanks, merged_ranks
from echograph.profiler.traces.trace import DEVICE, LONGEST_US, NONE, TEXT, Trace, Values
from echograph.progress import Progress, silent
from echograph.units import PS_PER_US

CATEGORIES = {
    "Operator": "cpu_op",
    "User": "gpu_user_annotation",
    "gpu_user_Annotation": "gpu_user_annotation",
    "Runtime": "cuda_runtime",
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
}
"""Older names of categories, and those of today: PyTorch 1.8 capitalised all, 1.9 to 1.11 what ran on devices."""

ANNOTATIONS = re.compile(r"ProfilerStep#|Optimizer\.(step|zero_grad)#|enumerate\(DataLoader\)#")
"""How names of annotations begin that PyTorch itself makes: until 1.11 they had the category of operators."""

STREAM = re.compile(r"stream (\d{1,18})( user| annotations)?$")
"""A thread that is a stream of a device, as PyTorch 1.8 to 1.10 wrote it."""


def category(name: str) -> str:
    """The name of today of a category."""
    return CATEGORIES.get(name, name)


def _between(begin: Decimal | None, end: Decimal | None) -> Decimal:
    if begin is None or end is None or not (begin.is_finite() and end.is_finite()):
        return Decimal("NaN")
    return end - begin


def _merged_arguments(first: EventArguments | None, last: EventArguments | None) -> EventArguments:
    first, last = first or NOTHING, last or NOTHING
    fields = EventArguments.__struct_fields__
    said = {name: getattr(last, name) for name in fields if getattr(last, name) != getattr(NOTHING, name)}
    return msgspec.structs.replace(first, **said)


# The profiler's own spans are no work of the job.
_LEFT_OUT = ("", "Trace")
# A float of microseconds keeps whole nanoseconds below the first bound (100 days), picoseconds below the second.
_EXACT_NS_US, _EXACT_PS_US = 2.0**43, 2.0**30
_PROCESS_NAMES = ("process_name", "process_labels")
_RANK_IN_NAME = re.compile(r"(?:rank|worker)[-_ ]?(\d{1,9})(?!\d)", re.IGNORECASE)
_MAX_RANK = 10**9
# Whole microseconds beyond this are no time, whatever the epoch; differences of two stay within 64 bits.
_LATEST_US = 2**61
_NUMBER = re.compile(r"(0[xX][0-9a-fA-F]{1,16}|\d{1,18})$")
_PLACE = re.compile(r"(-?\d{1,18})$")
# CUPTI's number of no stream.
_NO_STREAM = 2**32 - 1
# Streams that have no number get one beyond all numbers that streams have, but for addresses.
_UNNUMBERED = 2**32


class _TooLarge(Exception):
    """Times have more digits than floats hold."""


def read_trace(path: Path, progress: Progress = silent) -> Trace:
    """One rank's trace.

    Rows are the complete events ("ph": "X" with a duration), and those of which begin and end stand apart, that
    have a category, without the profiler's own ("Trace"). Events without a time, with one that is no number, or
    with a negative duration are left out, and so are those more than 25 days from most others; notes say how many.
    Categories have the names of today, whatever the version that wrote them.

    Args:
        path: a Kineto or Chrome trace, JSON, gzipped or not.
        progress: told how far the reading is.

    Raises:
        InputError: the file cannot be read.
        DataError: it is no trace, or broken otherwise than by being cut off.
    """
    try:
        return _read(path, TraceEvent, progress)
    except _TooLarge:
        return _read(path, ExactEvent, progress)


def rank_in(header: dict[str, Any], path: Path) -> int | None:
    """The rank that a file says it is of; None where it does not say.

    Raises:
        DataError: it says what is no rank.
    """
    job = header.get("distributedInfo")
    rank = job.get("rank") if isinstance(job, dict) else None
    if rank is not None and not (type(rank) is int and 0 <= rank < _MAX_RANK):
        raise DataError(f"{path}: distributedInfo: rank {str(rank)[:40]!r} is no number of a rank")
    return rank


def rank_of_name(path: Path) -> int:
    """The rank in the name of a file ("rank3", "worker_3"), or 0."""
    named = _RANK_IN_NAME.search(path.name)
    return int(named[1]) if named else 0


def _read(path: Path, event: type[TraceEvent], progress: Progress) -> Trace:
    stream = EventStream(path, event)
    columns = _Columns(event)
    for batch in stream:
        columns.add(batch)
        progress(f"reading events of {path.name}", columns.events)
    job = stream.header.get("distributedInfo")
    size = job.get("world_size") if isinstance(job, dict) else None
    rank = rank_in(stream.header, path)
    if rank is None:
        rank = rank_of_name(path)
    header = dict(stream.header)
    notes = [*stream.notes, *columns.open.notes(path)]
    if "processRanks" not in header and (merged := columns.merged):
        header["processRanks"] = merged.ranks
        notes.append(f"{path}: {merged}")
    return columns.trace(
        path=str(path),
        rank=rank,
        world_size=size if type(size) is int and 0 <= size < _MAX_RANK else 0,
        header=header,
        notes=notes,
    )


class _LeftOut:
    """How many events are left out for a reason, and which comes first."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, int]] = {}

    def add(self, why: str, events: Int64) -> None:
        """Counts events, by their positions in the file."""
        if len(events):
            known, first = self._found.get(why, (0, int(events[0])))
            self._found[why] = known + len(events), min(first, int(events.min()))

    def notes(self, path: str) -> list[str]:
        """A line for each reason."""
        return [
            f"{path}: {count} events left out: {why} (event {first} first)"
            for why, (count, first) in self._found.items()
        ]


class _Codes(dict[str, int]):
    """Numbers texts in the order in which they are asked for."""

    def __missing__(self, text: str) -> int:
        self[text] = code = len(self)
        return code


class _Categories(dict[str, int]):
    """Codes of categories, by the names of today."""

    def __init__(self, codes: _Codes) -> None:
        super().__init__()
        self._codes = codes

    def __missing__(self, text: str) -> int:
        self[text] = code = self._codes[category(text)]
        return code


class _Columns:
    """Grows columns from batches of events."""

    def __init__(self, event: type[TraceEvent]) -> None:
        self.events = 0
        self.open = OpenEvents()
        self._event = event
        self._rows = 0
        self._codes = _Codes()
        self._categories = _Categories(self._codes)
        self._parts: dict[str, list[npt.NDArray[Any]]] = {}
        self._arguments: dict[str, list[Values]] = {}
        self._left_out = _LeftOut()
        self._places_of = dict[Any, int]()
        self._called = dict[str, list[str]]()

    def add(self, batch: Sequence[Any]) -> None:
        """Appends the complete events of a batch, and those that end in it."""
        events = [event for event in batch if type(event) is self._event]
        index = [place for place, event in enumerate(batch) if type(event) is self._event]
        others = set(map(type, batch)) if len(events) < len(batch) else set()
        if not others.isdisjoint({BeginEvent, EndEvent}):
            for at, event in self._paired(batch):
                index.append(at - self.events)
                events.append(event)
        if MetadataEvent in others:
            for event in batch:
                if type(event) is MetadataEvent and event.name in _PROCESS_NAMES:
                    self._called.setdefault(str(event.pid), []).append(str(event.args))
        keep = [event.dur is not None and event.cat not in _LEFT_OUT for event in events]
        if not all(keep):
            events, index = list(compress(events, keep)), list(compress(index, keep))
        if events:
            self._add(*self._timed(events, np.array(index, np.int64) + self.events))
        self.events += len(batch)

    @property
    def merged(self) -> MergedRanks | None:
        """The ranks whose traces a tool put into one file, where it is one."""
        texts = {*self._called, *map(str, self._places_of)}
        return merged_ranks({pid: [pid, *self._called.get(pid, ())] for pid in texts})

    def _timed(self, events: list[Any], index: Int64) -> tuple[list[Any], Int64]:
        """The events that have a time and a duration."""
        start, duration = _floats([e.ts for e in events]), _floats([e.dur for e in events])
        at, took = np.abs(start) < _LATEST_US, (duration >= 0) & (duration < LONGEST_US)
        kept = at & took
        if kept.all():
            return events, index
        self._left_out.add("when they began is missing or no time", index[~at])
        self._left_out.add("their duration is negative or no time", index[at & ~took])
        return list(compress(events, kept.tolist())), index[kept]

    def _paired(self, batch: Sequence[Any]) -> Iterator[tuple[int, TraceEvent]]:
        """What ends in a batch, with the position of its begin in the file; of arguments the end's count more."""
        for index, event in enumerate(batch, start=self.events):
            if type(event) is BeginEvent:
                self.open.begin(event.pid, event.tid, (index, event))
            elif type(event) is EndEvent and (found := self.open.end(event.pid, event.tid)) is not None:
                at, begin = found
                duration, args = _between(begin.ts, event.ts), _merged_arguments(begin.args, event.args)
                ts = begin.ts
                if self._event is not ExactEvent and ts is not None and ts.is_finite():
                    ts = int(ts) if ts == int(ts) else float(ts)
                yield at, self._event(begin.cat, begin.name, ts, float(duration), begin.pid, begin.tid, args)

    def _add(self, events: list[Any], index: Int64) -> None:
        if not events:
            return
        codes, categories = self._codes, self._categories
        arguments = [NOTHING if e.args is None else e.args for e in events]
        whole, part = _times([e.ts for e in events])
        columns: dict[str, npt.NDArray[Any]] = {
            "whole": whole,
            "start": part,
            "duration": _durations([e.dur for e in events]),
            "name": np.array([codes[e.name] for e in events], np.int32),
            "category": np.array([categories[e.cat] for e in events], np.int32),
            "pid": self._places([e.pid for e in events]),
            "tid": self._places([e.tid for e in events]),
            "stream": _streams([a.stream for a in arguments]),
            "correlation": _numbers([a.correlation for a in arguments]),
            "external_id": _numbers(
                [a.external_id if a.old_external_id is None else a.old_external_id for a in arguments]
            ),
            "index": index,
        }
        for name, column in columns.items():
            self._parts.setdefault(name, []).append(column)
        present = set(np.unique(columns["category"]).tolist())
        for group in GROUPS:
            of = {codes[text] for text in group.of if text in codes} & present
            if of:
                self._add_arguments(group, arguments, np.isin(columns["category"], list(of)))
        self._rows += len(events)

    def _add_arguments(self, group: ArgumentGroup, arguments: list[EventArguments], of: Bools) -> None:
        said = list(map(attrgetter(next(iter(group.names))), arguments))
        if said.count(None) == len(said):
            return
        rows = [row for row, value in enumerate(said) if value is not None and of[row]]
        for field, name in group.names.items():
            values = [getattr(arguments[row], field) for row in rows]
            if name in TEXTS:
                said = [value is not None for value in values]
                column: npt.NDArray[Any] = np.array([self._codes[v] for v in values if v is not None], np.int32)
            else:
                numbers = _floats(values)
                said = np.isfinite(numbers).tolist()
                column = numbers[said]
            if len(column):
                where = np.array(list(compress(rows, said)), np.int64) + self._rows
                self._arguments.setdefault(name, []).append(Values(where, column))

    def _places(self, places: list[Any]) -> Int64:
        """Processes or threads: the same number for the same one, whatever else is in the batch."""
        column = np.array(places)
        if column.dtype == np.int64 and column.min() > TEXT:
            return column
        known = self._places_of
        for place in set(places) - known.keys():
            known[place] = self._place(place)
        return np.array([known[place] for place in places], np.int64)

    def _place(self, place: Any) -> int:
        text = str(place)
        number = _PLACE.match(text) or STREAM.match(text)
        return int(number[1]) if number else TEXT - self._codes[text]

    def trace(self, *, path: str, notes: Sequence[str], **facts: Any) -> Trace:
        """The columns so far as a trace.

        Args:
            path: the file that they came from.
            notes: what is missing from it; what is left out here is added.
            facts: what else the trace holds.
        """
        empty = dict.fromkeys(("name", "category"), np.zeros(0, np.int32))
        long = ("whole", "start", "duration", "pid", "tid", "stream", "correlation", "external_id", "index")
        empty |= dict.fromkeys(long, np.zeros(0, np.int64))
        columns = {name: np.concatenate(self._parts.pop(name, [none])) for name, none in empty.items()}
        annotation = self._codes["user_annotation"]
        strings = tuple(map(whole_characters, self._codes))
        arguments = {name: _joined(parts, text=name in TEXTS) for name, parts in self._arguments.items()}
        _restore_order(columns, arguments)
        near = _near(columns["whole"])
        self._left_out.add("they began more than 25 days before or after most others", columns["index"][~near])
        origin = _from_first(columns, near)
        _name_streams(columns, np.array([text in DEVICE for text in strings])[columns["category"]])
        operators = np.array([text == "cpu_op" for text in strings])[columns["category"]]
        marks = np.array([bool(ANNOTATIONS.match(text)) for text in strings])[columns["name"]]
        columns["category"][operators & marks] = annotation
        said = (*notes, *self._left_out.notes(path))
        rest: dict[str, Any] = {**columns, **facts}
        found = Trace(path=path, origin=origin, strings=strings, arguments=arguments, notes=said, **rest)
        return found if near.all() else found.rows(near)


def _near(whole: Int64) -> Bools:
    """Which times are not so far from most others that one of them is wrong."""
    if not len(whole) or int(whole.max()) - int(whole.min()) < LONGEST_US:
        return np.ones(len(whole), np.bool_)
    middle = np.partition(whole, len(whole) // 2)[len(whole) // 2]
    near: Bools = np.abs(whole - middle) < LONGEST_US // 2
    return near


def _from_first(columns: dict[str, npt.NDArray[Any]], near: Bools) -> int:
    """Counts times from the first event; its picoseconds."""
    whole, part = columns.pop("whole"), columns["start"]
    first = int(whole[near].min(initial=_LATEST_US)) if near.any() else 0
    start = np.where(near, whole - first, 0) * PS_PER_US + part
    earliest = int(start[near].min()) if near.any() else 0
    columns["start"] = start - earliest
    return first * PS_PER_US + earliest


def _name_streams(columns: dict[str, npt.NDArray[Any]], device: Bools) -> None:
    """Where work on a device names no stream, its thread is the stream."""
    unnamed, tid = device & (columns["stream"] == NONE), columns["tid"]
    if unnamed.any():
        number = _UNNUMBERED + np.unique(tid, return_inverse=True)[1].ravel()
        columns["stream"] = np.where(unnamed, np.where(tid >= 0, tid, number), columns["stream"])


def _restore_order(columns: dict[str, npt.NDArray[Any]], arguments: dict[str, Values]) -> None:
    """Puts rows in the order of the file: an event whose end stands apart was added when it ended."""
    index = columns["index"]
    if (index[1:] > index[:-1]).all():
        return
    order = np.argsort(index)
    place = np.argsort(order)
    for name, column in columns.items():
        columns[name] = column[order]
    for name, (rows, values) in arguments.items():
        by_row = np.argsort(place[rows])
        arguments[name] = Values(place[rows][by_row], values[by_row])


def _times(microseconds: list[Any]) -> tuple[Int64, Int64]:
    """Whole microseconds, and the picoseconds beyond them."""
    times = np.array(microseconds)
    if times.dtype == np.int64:
        return times, np.zeros(len(times), np.int64)
    if times.dtype != np.float64:
        floors = [math.floor(time) for time in microseconds]
        parts = [int((time - whole) * PS_PER_US) for time, whole in zip(microseconds, floors, strict=True)]
        return np.array(floors, np.int64), np.array(parts, np.int64)
    largest = float(np.abs(times).max())
    if largest >= _EXACT_NS_US:
        raise _TooLarge
    whole = np.floor(times)
    per_tick = 1 if largest < _EXACT_PS_US else 1000
    ticks = np.rint((times - whole) * (PS_PER_US // per_tick)).astype(np.int64) * per_tick
    return whole.astype(np.int64), ticks


def _durations(microseconds: list[float]) -> Int64:
    times = np.array(microseconds, np.float64)
    per_tick = 1 if times.max() < _EXACT_PS_US else 1000
    ticks: Int64 = np.rint(times * (PS_PER_US // per_tick)).astype(np.int64) * per_tick
    return ticks


def _floats(values: list[Any]) -> npt.NDArray[np.float64]:
    """Numbers as floats; NaN for what is none, infinite for what is too large."""
    try:
        return np.array(values, np.float64)
    except (TypeError, ValueError, OverflowError):
        return np.array([_float(value) for value in values])


def _float(value: Any) -> float:
    try:
        return math.nan if value is None else float(value)
    except ValueError:
        return math.nan
    except OverflowError:
        return math.inf


def _numbers(values: list[int | None]) -> Int64:
    try:
        return np.array(values, np.int64)
    except (TypeError, OverflowError):
        return np.array([v if v is not None and -(2**63) <= v < 2**63 else NONE for v in values], np.int64)


def _streams(said: list[int | str | None]) -> Int64:
    """Numbers of streams, which some profilers write as text, or as an address."""
    try:
        numbers = np.array(said, np.int64)
    except (TypeError, ValueError, OverflowError):
        numbers = _numbers(
            [value if value is None or type(value) is int else _stream(str(value)) for value in said]
        )
    return np.where((numbers < 0) | (numbers == _NO_STREAM), NONE, numbers)


def _stream(text: str) -> int:
    if number := _NUMBER.match(text):
        return int(number[0], 16 if number[0].lower().startswith("0x") else 10)
    return int(stream[1]) if (stream := STREAM.match(text)) else NONE


def _joined(parts: list[Values], *, text: bool) -> Values:
    rows = np.concatenate([part.rows for part in parts])
    values = np.concatenate([part.values for part in parts])
    if not text and np.array_equal(values, np.rint(values)) and np.all(np.abs(values) < 2.0**63):
        values = values.astype(np.int64)
    return Values(rows, values)
