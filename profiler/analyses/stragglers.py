"""Which ranks come last to a collective, again and again."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np

from echograph.errors import UsageError
from echograph.profiler.analyses.table import AnswerTable, from_rows
from echograph.profiler.analyses.work import US, KernelKind, kernel_kinds
from echograph.profiler.traces.relations import profiler_steps, step_of_rows
from echograph.profiler.traces.trace import Trace, TraceSet

# Collectives shorter than this share of a step tell nothing about who waits.
_LEAST_SHARE = 0.01


class _Key(NamedTuple):
    """What is the same kernel on all ranks; the device is the n-th of its rank."""

    device: int
    stream: int
    kernel: str


class _Collective(NamedTuple):
    """The last run of one communication kernel in one step of one rank."""

    start: int
    duration: int


def stragglers(traces: TraceSet, *, candidates: int = 2) -> AnswerTable:
    """The ranks that others wait for most often.

    In each step a rank that comes late to a collective starts it last and is through with it first. Among the
    communication kernels (by device, stream and name, the last of each step, at least 1 % of a mean step long)
    the one is taken whose durations differ most between ranks, in the mean of steps; in each step, the ranks
    that start it last are counted.

    Columns: `rank`; `count` of steps in which it was among the `candidates` latest; `mean_delay(us)` how much
    later it started than the first rank, in the mean of all steps; `kernel`; `stream`; `steps` compared. Times are
    compared as the ranks' clocks have them: on clocks that are not aligned, the counts mean nothing.

    Args:
        traces: the job's, at least two ranks.
        candidates: how many ranks are suspected, in each step and in the answer.

    Raises:
        UsageError: fewer than one candidate.
    """
    if candidates < 1:
        raise UsageError(f"stragglers: {candidates} candidates; ask for at least one")
    titles = ("rank", "count", "mean_delay(us)", "kernel", "stream", "steps")
    notes = list(traces.notes)
    spans = [
        end - start for trace in traces.values() for _, start, end in zip(*profiler_steps(trace), strict=True)
    ]
    if len(traces) < 2 or not spans:
        notes.append(
            "stragglers: needs two ranks at least" if len(traces) < 2 else "stragglers: no profiler steps"
        )
        return from_rows(titles, [], notes)
    least = _LEAST_SHARE * float(np.mean(spans))
    found: dict[_Key, dict[int, dict[int, _Collective]]] = defaultdict(lambda: defaultdict(dict))
    for rank, trace in traces.items():
        for key, step, run in _collectives(trace, least):
            found[key][step][rank] = run
    shared = {key: steps for key, steps in found.items() if any(len(ranks) > 1 for ranks in steps.values())}
    if not shared:
        notes.append("stragglers: no collective of at least 1 % of a step runs on two ranks")
        return from_rows(titles, [], notes)
    chosen = max(shared, key=lambda key: _spread(shared[key]))
    late, delays = Counter[int](), defaultdict[int, list[int]](list)
    for ranks in shared[chosen].values():
        first = min(run.start for run in ranks.values())
        for place, rank in enumerate(sorted(ranks, key=lambda rank: (-ranks[rank].start, rank))):
            late[rank] += place < candidates
            delays[rank].append(ranks[rank].start - first)
    order = sorted(late, key=lambda rank: (-late[rank], -float(np.mean(delays[rank])), rank))[:candidates]
    steps = len(shared[chosen])
    rows = [
        (rank, late[rank], float(np.mean(delays[rank])) / US, chosen.kernel, chosen.stream, steps)
        for rank in order
    ]
    return from_rows(titles, rows, notes)


def _collectives(trace: Trace, least: float) -> list[tuple[_Key, int, _Collective]]:
    devices = {pid: at for at, pid in enumerate(np.unique(trace.pid[trace.on_device]).tolist())}
    step = step_of_rows(trace)
    chosen = (
        trace.on_device
        & (kernel_kinds(trace) == KernelKind.COMMUNICATION)
        & (step >= 0)
        & (trace.duration >= least)
    )
    rows = np.flatnonzero(chosen)
    rows = rows[np.argsort(trace.start[rows], kind="stable")]
    return [
        (
            _Key(devices[int(trace.pid[row])], int(trace.stream[row]), trace.text(row)),
            int(step[row]),
            _Collective(int(trace.start[row]), int(trace.duration[row])),
        )
        for row in rows.tolist()
    ]


def _spread(steps: dict[int, dict[int, _Collective]]) -> float:
    spreads = [
        np.std([run.duration for run in ranks.values()], ddof=1) for ranks in steps.values() if len(ranks) > 1
    ]
    return float(np.mean(spreads))
