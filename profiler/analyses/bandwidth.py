"""How fast copies and sets move bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from echograph.ir.columns import Int64
from echograph.profiler.analyses.statistics import DESCRIPTION, _Floats, describe
from echograph.profiler.analyses.table import AnswerTable, from_rows, stacked
from echograph.profiler.analyses.work import US, KernelKind, device_work, kinds
from echograph.profiler.traces.trace import Trace, TraceSet

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
    moving = np.flatnonzero((kinds(work) == KernelKind.MEMORY) & ~np.isnan(gbps))
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


def memory_bandwidth(traces: TraceSet) -> AnswerTable:
    """The bandwidth of copies and sets, whenever it changes.

    Columns: `rank`; `ts` microseconds since the first event of the job; `pid` the device; `name` the sort of
    transfer; `memory_bw_gbps` in 1e9 bytes a second, as the profiler says it for each transfer, summed over those
    of that sort that run at once on the device. Transfers without a bandwidth are left out.
    """
    parts, notes = [], list(traces.notes)
    for rank, work in device_work(traces, notes):
        for sort, rate in rates(work):
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
        for sort, rate in rates(work)
    ]
    return from_rows(("rank", "device", "name", *DESCRIPTION), rows, notes)
