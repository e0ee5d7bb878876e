"""Each collective of a job: how long it took once all ranks were there, how fast that was, and who came last."""

from __future__ import annotations

from echograph.profiler.analyses.table import AnswerTable, from_rows
from echograph.profiler.analyses.work import US
from echograph.profiler.comms.bandwidth import bus_factor
from echograph.profiler.traces.alignment import align, clocks
from echograph.profiler.traces.collectives import matched
from echograph.profiler.traces.trace import TraceSet

_TITLES = (
    "name", "group", "number", "ranks", "bytes", "start(us)", "duration(us)", "algorithm_bandwidth(GB/s)",
    "bus_bandwidth(GB/s)", "skew(us)", "last_rank", "mean_wait(us)",
)  # fmt: skip
_PS_PER_NS = 1000


def collective_times(traces: TraceSet, *, always_align: bool = False) -> AnswerTable:
    """Bandwidth and skew of every collective that was traced on several ranks.

    Clocks are aligned where they contradict one another. Columns: `name`; `group` of processes, empty where the
    trace does not say; `number`: the n-th of that name and group; `ranks` that were traced; `bytes` of a rank's
    whole buffer, as nccl-tests counts it, or nothing where the trace does not say; `start(us)` on the first rank,
    since the first event of the job; `duration(us)` from when the last rank began to when the last one ended, so
    without waiting; algorithm and bus bandwidth as nccl-tests has them, of that duration; `skew(us)` between the
    first and the last rank to begin; `last_rank`; `mean_wait(us)` of the ranks.

    Args:
        traces: the job's, two ranks at least.
        always_align: align clocks that do not contradict one another, too.

    Raises:
        InputError: a trace's file is gone.
    """
    met, notes = matched(traces)
    notes = [*traces.notes, *notes]
    if always_align or clocks(traces, met).apart_before:
        traces, _ = align(traces)
        notes = list(traces.notes)
    if not met:
        few = "needs two ranks at least" if len(traces) < 2 else "no collective was traced on several ranks"
        notes.append(f"collectives: {few}")
    rows = []
    for one in met:
        begun = {rank: int(traces[rank].start[call.row]) for rank, call in one.calls.items()}
        ended = max(int(traces[rank].end[call.row]) for rank, call in one.calls.items())
        last = max(begun, key=lambda rank: (begun[rank], -rank))
        took, wait = max(0, ended - begun[last]), [begun[last] - start for start in begun.values()]
        speed = one.nbytes / (took / _PS_PER_NS) if one.nbytes and took else None
        bus = None if speed is None else speed * bus_factor(one.kind, len(one.ranks))
        rows.append(
            (
                one.kind, one.group, one.number, ",".join(map(str, begun)), one.nbytes or None,
                min(begun.values()) / US, took / US, speed, bus, max(wait) / US, last, sum(wait) / len(wait) / US,
            )
        )  # fmt: skip
    return from_rows(_TITLES, rows, notes)
