"""Host time by call stack: what each operator takes itself, and with all that it calls."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from echograph.errors import UsageError
from echograph.ir.columns import Int64
from echograph.profiler.analyses.table import AnswerTable, from_rows
from echograph.profiler.analyses.work import US
from echograph.profiler.traces.relations import Stacks, call_stacks, launches
from echograph.profiler.traces.trace import NONE, Trace, TraceSet

TITLES = (
    "rank",
    "depth",
    "name",
    "count",
    "host_time(us)",
    "self_time(us)",
    "num_kernels",
    "kernel_dur_sum",
)


def call_times(traces: TraceSet, *, name: str = "", max_depth: int = -1) -> AnswerTable:
    """The host time of operators, annotations and calls to the runtime, by how deep in the stack they run.

    Columns: `rank`; `depth` how many events it is within, 0 at the bottom of a thread's stack; `name`; `count`;
    `host_time(us)` from start to end, summed; `self_time(us)` of that what no event directly within it covers;
    `num_kernels` how many kernels, copies and sets were launched within it, `kernel_dur_sum` microseconds that
    these ran. By depth, the longest first. Self times add up to the
    host times at depth 0, except that calls which overlap on one thread count each.

    Args:
        traces: the job's.
        name: only what has this in its name.
        max_depth: leave out what is deeper; -1 keeps all.

    Raises:
        UsageError: a depth below -1, or no host event has this name.
    """
    if max_depth < -1:
        raise UsageError(f"max_depth: {max_depth} is below -1; -1 keeps all depths")
    found = []
    for rank, trace in traces.items():
        stacks = call_stacks(trace)
        rows = stacks.order
        own = _alone(trace, stacks)
        kernels, kernel_time = _launched_within(trace, stacks)
        sums: dict[tuple[int, str], list[int]] = defaultdict(lambda: [0] * 5)
        columns = (stacks.depth[rows], trace.name[rows], trace.duration[rows], kernels, kernel_time)
        lists = (column.tolist() for column in columns)
        for alone, depth, code, host, number, busy in zip(own, *lists, strict=True):
            text = trace.strings[code]
            if name in text and (max_depth == NONE or depth <= max_depth):
                total = sums[depth, text]
                for place, more in enumerate((1, host, alone, number, busy)):
                    total[place] += more
        found += [
            (rank, depth, text, count, host / US, alone / US, number, busy / US)
            for (depth, text), (count, host, alone, number, busy) in sorted(
                sums.items(), key=lambda item: (item[0][0], -item[1][1], item[0][1])
            )
        ]
    if name and not found:
        raise UsageError(f"call-stacks: no event on the host has '{name}' in its name; try --option name=aten::")
    return from_rows(TITLES, found, traces.notes)


def _alone(trace: Trace, stacks: Stacks) -> list[int]:
    """Picoseconds of each host row that nothing directly within it covers; in the order of the stacks."""
    start, end, parents = trace.start.tolist(), trace.end.tolist(), stacks.parent.tolist()
    alone, covered = trace.duration.tolist(), trace.start.tolist()
    rows = stacks.order.tolist()
    for row in rows:
        if (parent := parents[row]) != NONE:
            # Some profilers write calls of one thread that overlap; what both cover is covered once.
            alone[parent] -= max(0, end[row] - max(start[row], covered[parent]))
            covered[parent] = max(covered[parent], end[row])
    return [alone[row] for row in rows]


def _launched_within(trace: Trace, stacks: Stacks) -> tuple[Int64, Int64]:
    """How much work was launched within each host row, and for how long it ran; in the order of the stacks."""
    calls, works = launches(trace)
    # Waits that profilers put on a device's tracks are no work; a launch outside all stacks has no place.
    kept = trace.on_device[works] & (stacks.place[calls] != NONE)
    place, works = stacks.place[calls[kept]], works[kept]
    sums = []
    for weight in (np.ones(len(works), np.int64), trace.duration[works]):
        launched = np.zeros(len(stacks.order) + 1, np.int64)
        np.add.at(launched, place + 1, weight)
        running = np.cumsum(launched)
        sums.append(running[stacks.past] - running[:-1])
    return sums[0], sums[1]
