"""How much launched work waits on each stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from echograph.errors import UsageError
from echograph.ir.columns import Int64
from echograph.profiler.analyses.launches import launched_work
from echograph.profiler.analyses.statistics import DESCRIPTION, describe
from echograph.profiler.analyses.table import AnswerTable, from_rows, stacked
from echograph.profiler.analyses.work import US
from echograph.profiler.traces.trace import DeviceStream, Trace, TraceSet

TITLES = ("rank", "index", "ts", "pid", "tid", "stream", "queue_length")


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
    return stacked(parts, TITLES, traces.notes)


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
    rows = []
    for rank, trace in traces.items():
        for stream, queue in sorted(queues(trace), key=lambda item: item[0]):
            full = int(np.diff(queue.time)[queue.length[:-1] >= max_queue_length].sum())
            if full:
                device = trace.process(stream.device)
                rows.append((rank, device, stream.number, full / US, full / int(np.ptp(trace.start))))
    titles = ("rank", "device", "stream", "duration_at_max_queue_length", "relative_duration_at_max_queue_length")
    return from_rows(titles, rows, traces.notes)


_NONE = np.zeros(0, np.int64)
