"""Why streams stand still between two kernels."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from echograph.errors import UsageError
from echograph.ir.columns import Int64
from echograph.profiler.analyses.statistics import DESCRIPTION, describe
from echograph.profiler.analyses.table import AnswerTable, from_rows
from echograph.profiler.analyses.work import US
from echograph.profiler.traces.relations import launch_of_rows
from echograph.profiler.traces.trace import NONE, Trace, TraceSet


class Cause(IntEnum):
    """What a stream waited for."""

    host_wait = 0
    kernel_wait = 1
    other = 2


class Gaps(NamedTuple):
    """What lies before each kernel, copy or set of a stream.

    Attributes:
        length: picoseconds since everything before it on the stream had ended; 0 for the first.
        cause: a `Cause`.
    """

    length: Int64
    cause: npt.NDArray[np.int8]


def idle_breakdown(traces: TraceSet, *, kernel_delay_us: float = 30.0) -> AnswerTable:
    """How long each stream was idle between two of its kernels, and for which cause.

    Columns: `rank`; `device` and its `stream`; `idle_category`; `idle_time` microseconds;
    `idle_time_ratio` share of the stream's idle time, two decimals. The categories:

    - `host_wait`: the next kernel was launched only after the one before it had ended; the host is late.
    - `kernel_wait`: it was launched before, and the gap is shorter than `kernel_delay_us`: what a device needs
      between two kernels.
    - `other`: it was launched before, but the stream waited longer, for instance for another stream.

    Args:
        traces: the job's.
        kernel_delay_us: the longest gap that still counts as the device's own, microseconds.

    Raises:
        UsageError: a negative delay.
    """
    rows, notes = [], list(traces.notes)
    for rank, device, stream, gaps in _streams(traces, kernel_delay_us, notes):
        total = int(gaps.length.sum())
        for cause in _found(gaps):
            idle = int(gaps.length[gaps.cause == cause].sum())
            rows.append((rank, device, stream, cause.name, idle / US, round(idle / total, 2) if total else None))
    return from_rows(("rank", "device", "stream", "idle_category", "idle_time", "idle_time_ratio"), rows, notes)


def idle_intervals(traces: TraceSet, *, kernel_delay_us: float = 30.0) -> AnswerTable:
    """How the gaps between kernels are distributed, for each stream and cause.

    Columns: `idle_category` (see the idle breakdown), `rank`, `device`, `stream`, `count`, then mean, deviation
    (of a sample), least, quartiles and largest of the gaps in microseconds, two decimals. A stream's first
    kernel has no gap before it.

    Args:
        traces: the job's.
        kernel_delay_us: as for the idle breakdown.

    Raises:
        UsageError: a negative delay.
    """
    rows, notes = [], list(traces.notes)
    for rank, device, stream, gaps in _streams(traces, kernel_delay_us, notes):
        for cause in _found(gaps):
            own = gaps.length[1:][gaps.cause[1:] == cause] / US
            rows.append((cause.name, rank, device, stream, *(round(value, 2) for value in describe(own))))
    return from_rows(("idle_category", "rank", "device", "stream", *DESCRIPTION), rows, notes)


def _streams(traces: TraceSet, delay_us: float, notes: list[str]) -> Iterator[tuple[int, int | str, int, Gaps]]:
    if not delay_us >= 0:
        raise UsageError(f"kernel_delay_us: {delay_us:g} is negative; try 30")
    for rank, trace in traces.items():
        device, launch = trace.on_device, launch_of_rows(trace)
        if not device.any():
            notes.append(f"rank {rank}: nothing ran on a device while it was profiled")
        place, streams = trace.streams()
        for at in dict.fromkeys(place[device].tolist()):
            rows = np.flatnonzero(device & (place == at))
            rows = rows[np.argsort(trace.start[rows], kind="stable")]
            gaps = _gaps(trace, rows, launch[rows], delay_us)
            yield rank, trace.process(streams[at].device), streams[at].number, gaps


def _gaps(trace: Trace, rows: Int64, launch: Int64, delay_us: float) -> Gaps:
    ended = np.maximum.accumulate(trace.end[rows])[:-1]
    length = np.maximum(trace.start[rows[1:]] - ended, 0)
    late = (launch[1:] != NONE) & (trace.start[launch[1:]] > ended)
    short = length < delay_us * US
    cause = np.where(late, Cause.host_wait, np.where(short, Cause.kernel_wait, Cause.other)).astype(np.int8)
    return Gaps(np.concatenate(([0], length)), np.concatenate(([np.int8(Cause.other)], cause)))


def _found(gaps: Gaps) -> list[Cause]:
    return [cause for cause in Cause if (gaps.cause == cause).any()]
