"""The collectives of a job: how long they take once all ranks are there, how fast that is, and who comes last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from echograph.ir.comms.bandwidth import bus_factor
from echograph.profiler.analyses.table import AnswerTable, from_rows
from echograph.profiler.analyses.work import US
from echograph.profiler.traces.alignment import align, clocks
from echograph.profiler.traces.collectives import (
    CollectiveCall,
    MatchedCollective,
    collectives,
    collectives_of_job,
)
from echograph.profiler.traces.kernel_names import library_of
from echograph.profiler.traces.trace import Trace, TraceSet

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
    traces, matched, notes = _on_one_clock(traces, always_align)
    rows = []
    for one in matched:
        took, waits, last = _met(traces, one)
        speed = one.nbytes / (took / _PS_PER_NS) if one.nbytes and took else None
        bus = None if speed is None else speed * bus_factor(one.kind, len(one.ranks))
        first = min(int(traces[rank].start[call.row]) for rank, call in one.calls.items())
        rows.append(
            (
                one.kind, one.group, one.number, ",".join(map(str, one.calls)), one.nbytes or None, first / US,
                took / US, speed, bus, max(waits) / US, last, sum(waits) / len(waits) / US,
            )
        )  # fmt: skip
    return from_rows(_TITLES, rows, notes)


def _on_one_clock(traces: TraceSet, always: bool) -> tuple[TraceSet, list[MatchedCollective], list[str]]:
    """The traces with clocks that do not contradict one another, their collectives, and what is missing."""
    matched, notes = collectives_of_job(traces)
    said = [*traces.notes, *notes]
    if always or clocks(traces, matched).apart_before:
        traces, _ = align(traces, (matched, notes))
        said = list(traces.notes)
    if not matched:
        few = "needs two ranks at least" if len(traces) < 2 else "no collective was traced on several ranks"
        said.append(f"collectives: {few}")
    return traces, matched, said


def _met(traces: Mapping[int, Trace], one: MatchedCollective) -> tuple[int, list[int], int]:
    """Picoseconds of a collective from the last begin to the last end, of each rank's wait, and which was last."""
    begun = {rank: int(traces[rank].start[call.row]) for rank, call in one.calls.items()}
    ended = max(begun[rank] + int(traces[rank].duration[call.row]) for rank, call in one.calls.items())
    last = max(begun, key=lambda rank: (begun[rank], -rank))
    return max(0, ended - begun[last]), [begun[last] - start for start in begun.values()], last


Fabric = Callable[[str, int, Sequence[int]], float | None]
"""Seconds of a collective by its kind, the bytes of a rank's buffer and the ranks of its group; None: unknown."""


@dataclass(slots=True)
class _Use:
    """What collectives of a kind, group and size took: picoseconds without waiting, waits, and who came last."""

    call: CollectiveCall
    took: list[int] = field(default_factory=list)
    seen: int = 0
    waits: list[int] = field(default_factory=list)
    last: Counter[int] = field(default_factory=Counter)


_USES = (
    "name", "library", "group", "group_size", "traced_ranks", "bytes", "dtype", "count", "sum(us)", "mean(us)",
    "min(us)", "max(us)", "algorithm_bandwidth(GB/s)", "bus_bandwidth(GB/s)", "mean_wait(us)", "last_rank",
    "predicted(us)", "excess(us)",
)  # fmt: skip


def communication(traces: TraceSet, *, cluster: Fabric | None = None, always_align: bool = False) -> AnswerTable:
    """What communication takes by collective, group and size, how fast that is, and how long it should take.

    Columns: `name` of the collective, or of a message (`send`, `recv`); `library` by the names of its kernels;
    `group` of processes and `group_size`, empty where the trace does not say; `traced_ranks`, on how many it was
    seen; `bytes` of a rank's whole buffer, as
    nccl-tests counts it, and `dtype`; `count`; `sum(us)`, `mean(us)`, `min(us)`, `max(us)` without waiting: from
    when the last rank began to when the last one ended, or, of what was traced on one rank alone, its kernel, in
    which it waits for the others; algorithm and bus bandwidth of the mean as nccl-tests has them; `mean_wait(us)`
    of a rank for the last one, and `last_rank`, the one that came last most often, both empty for one rank;
    `predicted(us)` by the cluster's fabric, and `excess(us)`, what all of them took beyond that. The costliest
    come first.

    Args:
        traces: the job's.
        cluster: what says how long a collective should take; on the command line, the name or file of a cluster.
        always_align: align clocks that do not contradict one another, too.

    Raises:
        InputError: a trace's file is gone.
    """
    traces, matched, notes = _on_one_clock(traces, always_align)
    uses: dict[Hashable, _Use] = {}
    for one in matched:
        use = _use(uses, traces, next(iter(one.calls.values())), one.ranks, alone=False)
        took, waits, last = _met(traces, one)
        use.took.append(took)
        use.seen += len(one.calls)
        use.waits += waits
        use.last[last] += 1
    for call in _alone(traces, matched):
        use = _use(uses, traces, call, call.ranks, alone=True)
        use.took.append(int(traces[call.rank].duration[call.row]))
        use.seen += 1
    if uses and cluster is None:
        notes.append("communication: name the cluster for our prediction (--option cluster=dgx-h100)")
    costliest = sorted(uses.values(), key=lambda use: -sum(use.took))
    return from_rows(_USES, (_use_row(traces, use, cluster) for use in costliest), notes)


def _alone(traces: TraceSet, matched: list[MatchedCollective]) -> Iterator[CollectiveCall]:
    """What was not seen on several ranks; gloo's workers have no kernels, and are left out."""
    seen = {(rank, call.row) for one in matched for rank, call in one.calls.items()}
    for rank, trace in traces.items():
        for call in collectives(trace):
            if (rank, call.row) not in seen and trace.stream[call.row] >= 0:
                yield call


def _use(
    uses: dict[Hashable, _Use], traces: TraceSet, call: CollectiveCall, ranks: Sequence[int], *, alone: bool
) -> _Use:
    library = library_of(traces[call.rank].text(call.row))
    key = (call.kind, library, call.group, tuple(ranks), call.nbytes, call.dtype, alone)
    return uses.setdefault(key, _Use(replace(call, ranks=tuple(ranks))))


def _use_row(traces: TraceSet, use: _Use, cluster: Fabric | None) -> tuple[str | float | None, ...]:
    call, times = use.call, [took / US for took in use.took]
    mean, size = sum(times) / len(times), len(call.ranks)
    speed = call.nbytes / mean / 1e3 if call.nbytes and mean else None
    bus = speed * bus_factor(call.kind, size) if speed is not None and size > 1 else None
    seconds = cluster(call.kind, call.nbytes, call.ranks) if cluster and call.nbytes and size > 1 else None
    expected = None if seconds is None else seconds * 1e6
    return (
        call.kind, library_of(traces[call.rank].text(call.row)), call.group, size or None,
        use.seen / len(use.took), call.nbytes or None,
        call.dtype, len(times), sum(times), mean, min(times), max(times), speed, bus,
        sum(use.waits) / len(use.waits) / US if use.waits else None,
        use.last.most_common(1)[0][0] if use.last else None,
        expected, None if expected is None else sum(times) - expected * len(times),
    )  # fmt: skip
