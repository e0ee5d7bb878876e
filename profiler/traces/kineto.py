"""A Kineto or Chrome trace file to columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import compress
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from echograph.ir.columns import Int64
from echograph.profiler.traces.events import (
    GROUPS,
    NOTHING,
    TEXTS,
    Arguments,
    Begin,
    End,
    Event,
    EventStream,
    ExactEvent,
    Group,
)
from echograph.profiler.traces.pairs import Pairs
from echograph.profiler.traces.trace import DEVICE, NONE, Bool, Trace, Values
from echograph.progress import Progress, silent

_PS_PER_US = 1_000_000
# The profiler's own spans are no work of the job.
_LEFT_OUT = ("", "Trace")
# A float of microseconds keeps whole nanoseconds below the first bound (100 days), picoseconds below the second.
_EXACT_NS_US, _EXACT_PS_US = 2.0**43, 2.0**30
_RANK_IN_NAME = re.compile(r"(?:rank|worker)[-_ ]?(\d+)", re.IGNORECASE)


class _TooLarge(Exception):
    """Times have more digits than floats hold."""


def read_trace(path: Path, say: Progress = silent) -> Trace:
    """One rank's trace.

    Rows are the complete events ("ph": "X" with a duration), and those of which begin and end stand apart, that
    have a category, without the profiler's own ("Trace").

    Args:
        path: a Kineto or Chrome trace, JSON, gzipped or not.
        say: told how far the reading is.

    Raises:
        InputError: the file cannot be read.
        DataError: it is no trace, or broken otherwise than by being cut off.
    """
    try:
        return _read(path, Event, say)
    except _TooLarge:
        return _read(path, ExactEvent, say)


def rank_in(header: dict[str, Any]) -> int | None:
    """The rank that a file says it is of."""
    job = header.get("distributedInfo")
    rank = job.get("rank") if isinstance(job, dict) else None
    return rank if isinstance(rank, int) else None


def _read(path: Path, event: type[Event], say: Progress) -> Trace:
    stream = EventStream(path, event)
    columns = _Columns(event)
    for batch in stream:
        columns.add(batch)
        say(f"reading events of {path.name}", columns.events)
    job = stream.header.get("distributedInfo")
    size = job.get("world_size") if isinstance(job, dict) else None
    rank = rank_in(stream.header)
    if rank is None:
        named = _RANK_IN_NAME.search(path.name)
        rank = int(named[1]) if named else 0
    notes = list(stream.notes)
    if columns.pairs.open:
        notes.append(f"{path}: {columns.pairs.open} events begin and do not end: they are left out")
    if columns.pairs.unmatched:
        notes.append(f"{path}: {columns.pairs.unmatched} events end and did not begin: they are left out")
    return columns.trace(
        path=str(path),
        rank=rank,
        world_size=size if isinstance(size, int) else 0,
        header=stream.header,
        notes=tuple(notes),
    )


class _Codes(dict[str, int]):
    """Numbers texts in the order in which they are asked for."""

    def __missing__(self, text: str) -> int:
        self[text] = code = len(self)
        return code


class _Columns:
    """Grows columns from batches of events."""

    def __init__(self, event: type[Event]) -> None:
        self.events = 0
        self.pairs = Pairs()
        self._event = event
        self._rows = 0
        self._codes = _Codes()
        self._parts: dict[str, list[npt.NDArray[Any]]] = {}
        self._arguments: dict[str, list[Values]] = {}
        self._origin: int | None = None

    def add(self, batch: Sequence[Any]) -> None:
        """Appends the complete events of a batch, and those that end in it."""
        events = [event for event in batch if type(event) is self._event]
        index = [place for place, event in enumerate(batch) if type(event) is self._event]
        if len(events) < len(batch) and not {Begin, End}.isdisjoint(map(type, batch)):
            for at, begin, duration, args in self.pairs.closed(enumerate(batch, start=self.events)):
                index.append(at - self.events)
                events.append(self._complete(begin, float(duration), args))
        keep = [event.dur is not None and event.cat not in _LEFT_OUT for event in events]
        if not all(keep):
            events, index = list(compress(events, keep)), list(compress(index, keep))
        if events:
            self._add(events, np.array(index, np.int64) + self.events)
        self.events += len(batch)

    def _complete(self, begin: Begin, duration: float, args: Arguments) -> Event:
        exact = self._event is ExactEvent
        ts: Any = begin.ts if exact else int(begin.ts) if begin.ts == int(begin.ts) else float(begin.ts)
        return self._event(begin.cat, begin.name, ts, duration, begin.pid, begin.tid, args)

    def _add(self, events: list[Any], index: Int64) -> None:
        codes = self._codes
        arguments = [NOTHING if e.args is None else e.args for e in events]
        columns: dict[str, npt.NDArray[Any]] = {
            "start": self._times([e.ts for e in events]),
            "duration": _durations([e.dur for e in events]),
            "name": np.array([codes[e.name] for e in events], np.int32),
            "category": np.array([codes[e.cat] for e in events], np.int32),
            "pid": self._places([e.pid for e in events]),
            "tid": self._places([e.tid for e in events]),
            "stream": _numbers([a.stream for a in arguments], np.int32),
            "correlation": _numbers([a.correlation for a in arguments], np.int64),
            "external_id": _numbers([a.external_id for a in arguments], np.int64),
            "index": index,
        }
        for name, column in columns.items():
            self._parts.setdefault(name, []).append(column)
        category = columns["category"]
        present = set(np.unique(category).tolist())
        for group in GROUPS:
            of = {codes[text] for text in group.of if text in codes} & present
            if of:
                self._add_arguments(group, arguments, np.isin(category, list(of)))
        self._rows += len(events)

    def _add_arguments(self, group: Group, arguments: list[Arguments], of: Bool) -> None:
        said = list(map(attrgetter(next(iter(group.names))), arguments))
        if said.count(None) == len(said):
            return
        rows = [row for row, value in enumerate(said) if value is not None and of[row]]
        for field, name in group.names.items():
            values = [getattr(arguments[row], field) for row in rows]
            places = [row for row, value in zip(rows, values, strict=True) if value is not None]
            found = [self._codes[v] if isinstance(v, str) else v for v in values if v is not None]
            if found:
                column = np.array(found, np.int32 if name in TEXTS else np.float64)
                where = np.array(places, np.int64) + self._rows
                self._arguments.setdefault(name, []).append(Values(where, column))

    def _times(self, microseconds: list[Any]) -> Int64:
        times = np.array(microseconds)
        first = int(times[0])
        if times.dtype == np.int64:
            times_ps = (times - first) * _PS_PER_US
        elif times.dtype == np.float64:
            largest = float(np.abs(times).max())
            if largest >= _EXACT_NS_US:
                raise _TooLarge
            whole = np.floor(times)
            per_tick = 1 if largest < _EXACT_PS_US else 1000
            ticks = np.rint((times - whole) * (_PS_PER_US // per_tick)).astype(np.int64) * per_tick
            times_ps = (whole.astype(np.int64) - first) * _PS_PER_US + ticks
        else:
            times_ps = np.array([int((time - first) * _PS_PER_US) for time in microseconds], np.int64)
        if self._origin is None:
            self._origin = first
        shifted: Int64 = times_ps + (first - self._origin) * _PS_PER_US
        return shifted

    def _places(self, places: list[Any]) -> Int64:
        try:
            return np.array(places, np.int64)
        except (TypeError, ValueError, OverflowError):
            codes = self._codes
            return np.array(
                [p if isinstance(p, int) and 0 <= p < 2**63 else -2 - codes[str(p)] for p in places],
                np.int64,
            )

    def trace(self, **facts: Any) -> Trace:
        """The columns so far as a trace."""
        empty = {name: np.zeros(0, np.int32) for name in ("name", "category", "stream")}
        empty |= {
            n: np.zeros(0, np.int64)
            for n in ("start", "duration", "pid", "tid", "correlation", "external_id", "index")
        }
        columns = {name: np.concatenate(self._parts.pop(name, [none])) for name, none in empty.items()}
        # JSON can spell halves of characters, which no terminal or file takes.
        strings = tuple(text.encode("utf-8", "replace").decode() for text in self._codes)
        arguments = {name: _joined(parts, text=name in TEXTS) for name, parts in self._arguments.items()}
        _restore_order(columns, arguments)
        if len(columns["start"]):
            first = int(columns["start"].min())
            columns["start"] -= first
        else:
            first = 0
        # Where work on a device names no stream, its thread is the stream.
        device = np.array([text in DEVICE for text in strings] or [False])[columns["category"]]
        unnamed = device & (columns["stream"] == NONE) & (columns["tid"] >= 0) & (columns["tid"] < 2**31)
        columns["stream"] = np.where(unnamed, columns["tid"], columns["stream"]).astype(np.int32)
        origin = (self._origin or 0) * _PS_PER_US + first
        rest: dict[str, Any] = {**columns, **facts}
        return Trace(origin=origin, strings=strings, arguments=arguments, **rest)


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


def _durations(microseconds: list[float]) -> Int64:
    times = np.array(microseconds, np.float64)
    per_tick = 1 if times.max() < _EXACT_PS_US else 1000
    ticks: Int64 = np.rint(times * (_PS_PER_US // per_tick)).astype(np.int64) * per_tick
    return np.maximum(ticks, 0)


def _numbers(values: list[int | None], dtype: type[np.signedinteger[Any]]) -> npt.NDArray[Any]:
    try:
        return np.array(values, dtype)
    except (TypeError, OverflowError):
        wide = np.iinfo(dtype)
        return np.array([v if v is not None and wide.min <= v <= wide.max else NONE for v in values], dtype)


def _joined(parts: list[Values], *, text: bool) -> Values:
    rows = np.concatenate([part.rows for part in parts])
    values = np.concatenate([part.values for part in parts])
    if not text and np.array_equal(values, np.rint(values)):
        values = values.astype(np.int64)
    return Values(rows, values)
