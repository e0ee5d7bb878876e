"""Where the devices' time goes: idle, computing, or doing something that computation does not hide."""

from __future__ import annotations

import numpy as np

from echograph.ir.intervals import coverage, union
from echograph.profiler.analyses.table import AnswerTable, from_rows
from echograph.profiler.analyses.work import US, KernelKind, device_work, kernel_kinds
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
        computes = kernel_kinds(work) == KernelKind.COMPUTATION
        whole = int(work.end.max() - work.start.min())
        busy = union(work.start, work.end).length
        compute = union(work.start[computes], work.end[computes]).length
        parts = np.array((whole - busy, compute, busy - compute))
        shares = np.round(100 * parts / whole, 2) if whole else np.zeros(3)
        rows.append((rank, *(parts / US).tolist(), whole / US, *shares.tolist()))
    return from_rows(TITLES, rows, notes)


_OVERLAP = ("rank", "comp_comm_overlap_pctg", "communication_time(us)", "overlapped_time(us)")


def communication_overlap(traces: TraceSet) -> AnswerTable:
    """The share of each rank's communication during which it also computes.

    Columns: `communication_time(us)` at least one communication kernel runs on any stream; `overlapped_time(us)`
    of it at least one computation kernel runs too; `comp_comm_overlap_pctg` the latter of the former in percent,
    two decimals, empty where nothing is communicated.
    """
    rows, notes = [], list(traces.notes)
    for rank, work in device_work(traces, notes):
        kind = kernel_kinds(work)
        sets = [
            union(work.start[kind == k], work.end[kind == k])
            for k in (KernelKind.COMPUTATION, KernelKind.COMMUNICATION)
        ]
        communication, overlapped = sets[1].length, int(coverage(sets).length[0b11])
        share = round(100 * overlapped / communication, 2) if communication else None
        rows.append((rank, share, communication / US, overlapped / US))
    return from_rows(_OVERLAP, rows, notes)


_TIMES = ("rank", "computation(us)", "overlapped(us)", "communication(us)", "memory(us)", "idle(us)", "whole(us)")
_COMPUTES = 1 << KernelKind.COMPUTATION


def rank_times(traces: TraceSet) -> AnswerTable:
    """What each rank's device time is spent on, so that ranks can be compared.

    Columns, microseconds: `rank`; `computation(us)` only computations run; `overlapped(us)` a computation runs,
    and communication or a copy beside it; `communication(us)` communication runs and no computation, so it is
    exposed; `memory(us)` only copies and sets run; `idle(us)` nothing runs. They add up to `whole(us)`, from the
    start of the first work to the end of the last.
    """
    rows, notes = [], list(traces.notes)
    shown = (KernelKind.COMPUTATION, KernelKind.COMMUNICATION, KernelKind.MEMORY)
    for rank, work in device_work(traces, notes):
        kind = kernel_kinds(work)
        length, _ = coverage([union(work.start[kind == k], work.end[kind == k]) for k in shown])
        whole = int(work.end.max() - work.start.min())
        alone, copies = int(length[_COMPUTES]), int(length[1 << KernelKind.MEMORY])
        beside = sum(int(length[mask]) for mask in range(len(length)) if mask & _COMPUTES) - alone
        busy = int(np.sum(length))
        parts = (alone, beside, busy - alone - beside - copies, copies, whole - busy, whole)
        rows.append((rank, *(part / US for part in parts)))
    return from_rows(_TIMES, rows, notes)
