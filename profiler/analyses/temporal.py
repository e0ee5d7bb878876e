"""Where the devices' time goes: idle, computing, or doing something that computation does not hide."""

from __future__ import annotations

import numpy as np

from echograph.ir.intervals import union
from echograph.profiler.analyses.table import AnswerTable, from_rows
from echograph.profiler.analyses.work import US, KernelKind, device_work, kinds
from echograph.profiler.traces.trace import TraceSet

TITLES = (
    "rank",
    "idle_time(us)",
    "compute_time(us)",
    "non_compute_time(us)",
    "kernel_time(us)",
    "idle_time_pctg",
    "compute_time_pctg",
    "non_compute_time_pctg",
)


def temporal_breakdown(traces: TraceSet) -> AnswerTable:
    """How much of each rank's device time is idle, computation, and neither.

    Columns: `kernel_time(us)` from the start of the first kernel, copy or set to the end of the last, on any
    stream; `idle_time(us)` of it nothing ran; `compute_time(us)` at least one computation ran;
    `non_compute_time(us)` only communication, copies or sets ran. The three add up to the first. Shares in
    percent, two decimals.

    Waits that profilers show on a stream ("Event Sync") are not counted as work.
    """
    rows, notes = [], list(traces.notes)
    for rank, work in device_work(traces, notes):
        computes = kinds(work) == KernelKind.COMPUTATION
        whole = int(work.end.max() - work.start.min())
        busy = union(work.start, work.end).length
        compute = union(work.start[computes], work.end[computes]).length
        parts = np.array((whole - busy, compute, busy - compute))
        shares = np.round(100 * parts / whole, 2) if whole else np.zeros(3)
        rows.append((rank, *(parts / US).tolist(), whole / US, *shares.tolist()))
    return from_rows(TITLES, rows, notes)
