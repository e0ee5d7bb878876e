"""Which kernels each PyTorch operator launches, and what lies between call, launch and kernel."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from echograph.ir.columns import Int64
from echograph.profiler.analyses.launches import launched_work
from echograph.profiler.analyses.table import AnswerTable, from_rows
from echograph.profiler.analyses.work import US
from echograph.profiler.traces.relations import call_stacks
from echograph.profiler.traces.trace import NONE, OPERATORS, Trace, TraceSet

TITLES = (
    "rank",
    "aten_op_name",
    "kernel_sequence",
    "occurrence_count",
    "avg_aten_op_launch_delay",
    "avg_runtime_delay",
)


def operator_kernels(traces: TraceSet, *, prefix: str = "aten::") -> AnswerTable:
    """The kernels that each operator launches itself, with the delays until the first of them.

    Columns: `rank`; `aten_op_name`; `kernel_sequence` the kernels by their launches, joined by " -> "; how often
    the operator ran just these; averages in microseconds, three decimals: `avg_aten_op_launch_delay` from the
    operator's start to its first launch, `avg_runtime_delay` from that launch to the start of its kernel. The most
    frequent come first. A kernel belongs to the innermost operator around its launch; copies and sets are left
    out.

    Args:
        traces: the job's.
        prefix: what the names of operators begin with.
    """
    rows = []
    for rank, trace in traces.items():
        calls, works = launched_work(trace, memory=False)
        operator = innermost(trace, prefix)[calls]
        kernels: dict[int, list[int]] = defaultdict(list)
        for pair in np.flatnonzero(operator != NONE).tolist():
            kernels[int(operator[pair])].append(pair)
        found: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
        for row, pairs in kernels.items():
            sequence = " -> ".join(trace.text(works[pair]) for pair in pairs)
            launch, work = calls[pairs[0]], works[pairs[0]]
            delays = int(trace.start[launch] - trace.start[row]), int(trace.start[work] - trace.start[launch])
            found[trace.text(row), sequence].append(delays)
        for (name, sequence), all_delays in sorted(found.items(), key=lambda item: (-len(item[1]), item[0])):
            launch_us, kernel_us = np.round(np.mean(all_delays, axis=0) / US, 3).tolist()
            rows.append((rank, name, sequence, len(all_delays), launch_us, kernel_us))
    return from_rows(TITLES, rows, traces.notes)


def innermost(trace: Trace, prefix: str) -> Int64:
    """For each host row the innermost operator of this prefix that it runs within, itself included; or -1."""
    stacks = call_stacks(trace)
    named = np.array([text.startswith(prefix) for text in trace.strings] or [False])[trace.name]
    own = np.full(len(trace), NONE, np.int64)
    operators = np.flatnonzero(named & trace.of_category(OPERATORS))
    own[operators] = operators
    found, parents = own.tolist(), stacks.parent.tolist()
    for row in stacks.order.tolist():
        if found[row] == NONE and parents[row] != NONE:
            found[row] = found[parents[row]]
    return np.array(found, np.int64)
