"""Trace files of ByteProfile and dPRO, one event at a time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from echograph.errors import DataError
from echograph.profiler.byteprofile.events import Events, Growing
from echograph.profiler.byteprofile.names import COMMUNICATION, PARTS, Label, parse
from echograph.profiler.traces.events import EventStream

Event = dict[str, Any]
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


def complete_events(path: Path, notes: list[str]) -> Iterator[Event]:
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
        self._begun: dict[tuple[Any, Any], list[Event]] = defaultdict(list)

    @property
    def open(self) -> int:
        """Begins without an end, so far."""
        return sum(map(len, self._begun.values()))

    def add(self, event: Event) -> Event | None:
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


def _check(path: Path, event: Event) -> None:
    ts, dur = event["ts"], event.get("dur", 0)
    numbers = isinstance(ts, int | float) and isinstance(dur, int | float)
    if not numbers or not abs(ts) < _MOST_US or not 0 <= dur < _MOST_US:
        name = str(event.get("name"))[:60]
        raise DataError(f"{path}: event '{name}': ts {_shown(ts)} and dur {_shown(dur)} are no times in us")


def _shown(time: Any) -> str:
    return repr(time)[:40]


def _arguments(event: Event) -> dict[str, Any]:
    arguments = event.get("args")
    return arguments if isinstance(arguments, dict) else {}


def _plain(place: Any) -> Any:
    """A process or thread as a dictionary can hold it."""
    return place if isinstance(place, str | int) else str(place)


def named(event: Event, process: str) -> Event:
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


def label_of(event: Event) -> Label:
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


def columns_of(path: Path, found: Iterable[Event], notes: list[str]) -> Events:
    """Events as columns."""
    growing = Growing(path)
    known: dict[tuple[str, str, str], Label] = {}
    for event in found:
        said = str(event.get("name", "")), str(event.get("cat")), str(event.get("tid", ""))
        label = known.get(said)
        if label is None:
            label = known[said] = label_of(event)
        growing.add(label, event["ts"], event["dur"])
    return growing.events(notes)
