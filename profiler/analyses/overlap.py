"""How much of the communication runs beside computation."""

from __future__ import annotations

from echograph.ir.intervals import coverage, union
from echograph.profiler.analyses.table import AnswerTable, from_rows
from echograph.profiler.analyses.work import US, KernelKind, device_work, kinds
from echograph.profiler.traces.trace import TraceSet

TITLES = ("rank", "comp_comm_overlap_pctg", "communication_time(us)", "overlapped_time(us)")


def communication_overlap(traces: TraceSet) -> AnswerTable:
    """The share of each rank's communication during which it also computes.

    Columns: `communication_time(us)` at least one communication kernel runs on any stream; `overlapped_time(us)`
    of it at least one computation kernel runs too; `comp_comm_overlap_pctg` the latter of the former in percent,
    two decimals, empty where nothing is communicated.
    """
    rows, notes = [], list(traces.notes)
    for rank, work in device_work(traces, notes):
        kind = kinds(work)
        sets = [
            union(work.start[kind == k], work.end[kind == k])
            for k in (KernelKind.COMPUTATION, KernelKind.COMMUNICATION)
        ]
        communication, overlapped = sets[1].length, int(coverage(sets).length[0b11])
        share = round(100 * overlapped / communication, 2) if communication else None
        rows.append((rank, share, communication / US, overlapped / US))
    return from_rows(TITLES, rows, notes)
