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
from echograph.profiler.analyses.bandwidth import rates
from echograph.profiler.analyses.queue import queues
from echograph.profiler.analyses.table import AnswerTable, stacked
from echograph.profiler.analyses.work import US
from echograph.profiler.traces.events import EventStream
from echograph.profiler.traces.trace import Trace, TraceSet

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
