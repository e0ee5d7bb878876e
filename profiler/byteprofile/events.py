"""Events as columns, whatever file they come from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from echograph.errors import DataError
from echograph.ir.columns import Int32, Int64
from echograph.profiler.byteprofile.names import Label
from echograph.units import PS_PER_US

if TYPE_CHECKING:
    from echograph.profiler.traces import Trace

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

    labels: tuple[Label, ...]
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

    def relabelled(self, change: Callable[[Label], Label]) -> Events:
        """The events with each label changed; labels that become equal are one."""
        new: dict[Label, int] = {}
        codes = np.array([new.setdefault(change(label), len(new)) for label in self.labels] or [0], np.int32)
        return dataclasses.replace(self, labels=tuple(new), label=codes[self.label])

    def prefixed(self, prefix: str) -> Events:
        """The events with a prefix, where they have none."""
        return self.relabelled(lambda label: label if label.prefix else label._replace(prefix=prefix))

    def where(self, true: Callable[[Label], bool]) -> Int64:
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
        self._codes: dict[Label, int] = {}
        self._rows: list[tuple[int, int, int]] = []
        self._origin: int | None = None

    def add(self, label: Label, start_us: float, duration_us: float) -> None:
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
    codes: dict[Label, int] = {}
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
        Label(prefix, trace.strings[pair // width], trace.strings[pair % width]) for pair in pairs.tolist()
    )
    return Events(
        labels=labels,
        label=label.astype(np.int32),
        start=trace.start,
        duration=trace.duration,
        origin=trace.origin,
        notes=trace.notes,
    )
