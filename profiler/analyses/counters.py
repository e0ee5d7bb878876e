"""Queue lengths and memory bandwidths as counters, and a copy of a trace that shows them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from echograph.errors import UsageError
from echograph.ir.columns import Int64
from echograph.profiler.analyses.launches import launched_work
from echograph.profiler.analyses.statistics import DESCRIPTION, _Floats, describe
from echograph.profiler.analyses.table import AnswerTable, from_rows, stacked
from echograph.profiler.analyses.work import US, KernelKind, device_work, kernel_kinds
from echograph.profiler.traces.events import EventStream
from echograph.profiler.traces.trace import DeviceStream, Trace, TraceSet

_QUEUE = ("rank", "index", "ts", "pid", "tid", "stream", "queue_length")


class Queue(NamedTuple):
    """The changes of a stream's queue, by time.

    Attributes:
        works: row of the work that is launched, or starts.
        rows: row of the event that changes the queue: the launching call, or the work itself.
        time: picoseconds.
        length: what is launched and has not started, after the change.
    """

    works: Int64
    rows: Int64
    time: Int64
    length: Int64


def queues(trace: Trace) -> Iterator[tuple[DeviceStream, Queue]]:
    """The queue of each stream: longer by one when a call launches something, shorter when that starts.

    A CUDA graph counts as many as it has kernels. Of what happens in one moment, launches come first.
    """
    calls, works = launched_work(trace)
    place, streams = trace.streams()
    for at in dict.fromkeys(place[works].tolist()):
        own = place[works] == at
        rows = np.concatenate((calls[own], works[own]))
        change = np.repeat((1, -1), int(own.sum()))
        order = np.argsort(trace.start[rows], kind="stable")
        both = np.concatenate((works[own], works[own]))[order]
        yield streams[at], Queue(both, rows[order], trace.start[rows][order], np.cumsum(change[order]))


def queue_length(traces: TraceSet) -> AnswerTable:
    """How many kernels, copies and sets wait on each stream, whenever that changes.

    Columns: `rank`; `index` of the event that changes it, in the file; `ts` microseconds since the first event of
    the job; `pid` (device), `tid` and `stream` of the work; `queue_length` after the change. By time, rank by
    rank.
    """
    parts = []
    for rank, trace in traces.items():
        found = [queue for _, queue in queues(trace)]
        works, rows, time, length = (
            (np.concatenate(c) for c in zip(*found, strict=True)) if found else (_NONE,) * 4
        )
        order = np.argsort(time, kind="stable")
        works = works[order]
        parts.append(
            {
                "rank": np.full(len(works), rank),
                "index": trace.index[rows[order]],
                "ts": time[order] / US,
                "pid": trace.pid[works],
                "tid": trace.tid[works],
                "stream": trace.stream[works],
                "queue_length": length[order],
            }
        )
    return stacked(parts, _QUEUE, traces.notes)


def queue_length_summary(traces: TraceSet) -> AnswerTable:
    """How long each stream's queue is over all its changes.

    Columns: `rank`, `device`, `stream`, `count` of changes, then mean, deviation (of a sample), least,
    quartiles and largest length. Each change counts once, however long the length lasted.
    """
    rows = [
        (rank, trace.process(stream.device), stream.number, *describe(queue.length))
        for rank, trace in traces.items()
        for stream, queue in sorted(queues(trace), key=lambda item: item[0])
    ]
    return from_rows(("rank", "device", "stream", *DESCRIPTION), rows, traces.notes)


def time_on_full_queue(traces: TraceSet, *, max_queue_length: int = 1024) -> AnswerTable:
    """How long each stream's queue was full, so that the host's next launch had to wait.

    Columns: `rank`; `device`; `stream`; `duration_at_max_queue_length` microseconds at which at least
    `max_queue_length` waited; `relative_duration_at_max_queue_length`, of the time from the first to the last
    start of an event of that rank. Streams whose queue was never full are left out.

    Args:
        traces: the job's.
        max_queue_length: what a queue holds; 1024 on NVIDIA devices.

    Raises:
        UsageError: a length below 1.
    """
    if max_queue_length < 1:
        raise UsageError(f"max_queue_length: {max_queue_length} is below 1; a device's queue holds 1024")
    rows, notes = [], list(traces.notes)
    for rank, trace in traces.items():
        for stream, queue in sorted(queues(trace), key=lambda item: item[0]):
            full = int(np.diff(queue.time)[queue.length[:-1] >= max_queue_length].sum())
            if full:
                device = trace.process(stream.device)
                rows.append((rank, device, stream.number, full / US, full / int(np.ptp(trace.start))))
    titles = ("rank", "device", "stream", "duration_at_max_queue_length", "relative_duration_at_max_queue_length")
    if not rows:
        notes.append(f"no stream's queue ever held {max_queue_length}")
    return from_rows(titles, rows, notes)


_NONE = np.zeros(0, np.int64)


BANDWIDTH = "memory bandwidth (GB/s)"


class BandwidthSteps(NamedTuple):
    """The bandwidth of all transfers of one sort that run at once, whenever it changes.

    Attributes:
        rows: the transfer that starts or ends.
        time: picoseconds.
        gbps: 1e9 bytes a second from then on.
    """

    rows: Int64
    time: Int64
    gbps: _Floats


def rates(work: Trace) -> Iterator[tuple[str, BandwidthSteps]]:
    """The bandwidth of each sort of transfer ("Memcpy HtoD", "Memset") of each device of one rank.

    A transfer that took less than a tick of the clock counts as one tick long.

    Args:
        work: rows on devices.
    """
    gbps = work.argument(BANDWIDTH, np.nan)
    moving = np.flatnonzero((kernel_kinds(work) == KernelKind.MEMORY) & ~np.isnan(gbps))
    sorts = np.array([sort_of_transfer(text) for text in work.strings], object)
    of_row = sorts[work.name[moving]]
    for sort, device in sorted(set(zip(of_row.tolist(), work.pid[moving].tolist(), strict=True))):
        rows = moving[(of_row == sort) & (work.pid[moving] == device)]
        end = np.where(work.duration[rows] == 0, work.start[rows] + work.tick, work.end[rows])
        # Of what happens in one moment, ends come first: a transfer that follows another does not add to it.
        time = np.concatenate((end, work.start[rows]))
        change = np.concatenate((-gbps[rows], gbps[rows]))
        order = np.argsort(time, kind="stable")
        running = np.cumsum(np.repeat((-1, 1), len(rows))[order])
        # What rounding leaves of a sum is no bandwidth.
        rate = np.where(running > 0, np.cumsum(change[order]), 0.0)
        yield sort, BandwidthSteps(np.tile(rows, 2)[order], time[order], rate)


def sort_of_transfer(name: str) -> str:
    """What a copy or set is called without its endpoints."""
    return name.partition(" (")[0]


def _noted(work: Trace, notes: list[str]) -> list[tuple[str, BandwidthSteps]]:
    """The rates of a rank; a note where it has none."""
    found = list(rates(work))
    if not found:
        notes.append(f"rank {work.rank}: no copy or set whose bandwidth is known")
    return found


def memory_bandwidth(traces: TraceSet) -> AnswerTable:
    """The bandwidth of copies and sets, whenever it changes.

    Columns: `rank`; `ts` microseconds since the first event of the job; `pid` the device; `name` the sort of
    transfer; `memory_bw_gbps` in 1e9 bytes a second, as the profiler says it for each transfer, summed over those
    of that sort that run at once on the device. Transfers without a bandwidth are left out.
    """
    parts, notes = [], list(traces.notes)
    for rank, work in device_work(traces, notes):
        for sort, rate in _noted(work, notes):
            parts.append(
                {
                    "rank": np.full(len(rate.time), rank),
                    "ts": rate.time / US,
                    "pid": work.pid[rate.rows],
                    "name": [sort] * len(rate.time),
                    "memory_bw_gbps": rate.gbps,
                }
            )
    return stacked(parts, ("rank", "ts", "pid", "name", "memory_bw_gbps"), notes)


def memory_bandwidth_summary(traces: TraceSet) -> AnswerTable:
    """Statistics of the bandwidth of each sort of transfer while there is any.

    Columns: `rank`, `device`, `name`, `count` of changes after which something is moving, then mean, deviation
    (of a sample), least, quartiles and largest in 1e9 bytes a second. Each change counts once, however long the
    rate lasted.
    """
    notes = list(traces.notes)
    rows = [
        (rank, work.process(int(work.pid[rate.rows[0]])), sort, *describe(rate.gbps[rate.gbps > 0]))
        for rank, work in device_work(traces, notes)
        for sort, rate in _noted(work, notes)
    ]
    return from_rows(("rank", "device", "name", *DESCRIPTION), rows, notes)


TITLES = ("rank", "ts", "pid", "counter", "value")
_PS_DIGITS = 6


class Counter(NamedTuple):
    """A number that changes with time.

    Attributes:
        name: what it counts, and of what.
        pid: device, as `Trace.pid`.
        time: picoseconds, ascending.
        value: from each time on.
    """

    name: str
    pid: int
    time: Int64
    value: npt.NDArray[np.int64] | npt.NDArray[np.float64]


def counters_of(trace: Trace, which: str = "all") -> Iterator[Counter]:
    """The counters of one rank: the queue of each stream, the bandwidth of each sort of transfer.

    Args:
        trace: one rank's.
        which: "queue-length", "memory-bandwidth", or "all".

    Raises:
        UsageError: another word.
    """
    if which not in ("all", "queue-length", "memory-bandwidth"):
        raise UsageError(f"which: '{which}' is none of all, queue-length, memory-bandwidth")
    if which != "memory-bandwidth":
        for stream, queue in sorted(queues(trace), key=lambda item: item[0]):
            yield Counter(f"queue length, stream {stream.number}", stream.device, queue.time, queue.length)
    if which != "queue-length":
        work = trace.rows(np.flatnonzero(trace.on_device))
        for sort, rate in rates(work):
            yield Counter(f"{sort} (GB/s)", int(work.pid[rate.rows[0]]), rate.time, rate.gbps)


def counters(traces: TraceSet, *, which: str = "all") -> AnswerTable:
    """How long queues are and how fast memory is moved, as counters that a copy of the trace can show.

    Columns: `rank`; `ts` microseconds since the first event of the job; `pid` the device; `counter` what is
    counted; `value` from then on: how many launched kernels, copies and sets of a stream have not started, or
    1e9 bytes a second of one sort of transfer.

    Args:
        traces: the job's.
        which: "queue-length", "memory-bandwidth", or "all".

    Raises:
        UsageError: another word.
    """
    parts = []
    for rank, trace in traces.items():
        for name, pid, time, value in counters_of(trace, which):
            size = len(time)
            parts.append(
                {
                    "rank": np.full(size, rank),
                    "ts": time / US,
                    "pid": np.full(size, pid),
                    "counter": [name] * size,
                    "value": value.tolist(),
                }
            )
    return stacked(parts, TITLES, traces.notes)


def trace_with_counters(traces: TraceSet, *, which: str = "all") -> Iterator[bytes]:
    """The trace file of one rank, byte for byte, with its counters put before its first event.

    Args:
        traces: one rank's.
        which: as for `counters`.

    Raises:
        UsageError: several ranks, or another word.
        InputError: the file is gone or cannot be read.
    """
    if len(traces) > 1:
        raise UsageError(f"counters: a copy is of one rank's trace, and there are {len(traces)}: add --ranks 0")
    (trace,) = traces.values()
    return EventStream(Path(trace.path)).with_events(_events(trace, which))


def _events(trace: Trace, which: str) -> Iterator[bytes]:
    for name, pid, time, value in counters_of(trace, which):
        head = json.dumps({"ph": "C", "name": name, "pid": trace.process(pid)})[:-1]
        for at, number in zip(time.tolist(), value.tolist(), strict=True):
            # As text from whole picoseconds: a float has too few digits for nanoseconds since 1970.
            ts = f"{Decimal(trace.origin + at).scaleb(-_PS_DIGITS):f}"
            yield f'{head}, "ts": {ts}, "args": {{"value": {number}}}}}'.encode()
