"""Which kernels an operator runs, one after the other, and how often."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from echograph.errors import UsageError
from echograph.ir.columns import Int64
from echograph.profiler.analyses.launches import launched_work
from echograph.profiler.analyses.marked_copy import marked_copy
from echograph.profiler.analyses.table import AnswerTable, from_rows
from echograph.profiler.analyses.work import US
from echograph.profiler.traces.relations import Stacks, call_stacks, launches
from echograph.profiler.traces.trace import NONE, OPERATORS, Trace, TraceSet

TITLES = ("pattern", "count", "GPU kernel duration (us)", "CPU op duration (us)", "rank")


def kernel_sequences(traces: TraceSet, *, operator: str = "", min_length: int = 3) -> AnswerTable:
    """The sequences of kernels that an operator launches, the most frequent first.

    Columns: `pattern` the operator and its kernels, copies and sets by their start, joined by "|"; `count` of
    calls that ran just these; `GPU kernel duration (us)` and `CPU op duration (us)` summed over these calls;
    `rank`. A call within another call of such an operator is part of that one.

    Args:
        traces: the job's.
        operator: part of the operator's name, for instance "aten::linear".
        min_length: leave out calls with fewer kernels.

    Raises:
        UsageError: no operator is named, or none has this name.
    """
    if not operator:
        raise UsageError("kernel-sequences: name the operator, for instance --option operator=aten::linear")
    rows = []
    for rank, trace in traces.items():
        counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        for row, works, pattern in _calls(trace, call_stacks(trace), operator, min_length):
            spent = (1, int(trace.duration[works].sum()), int(trace.duration[row]))
            counts[pattern] = [a + b for a, b in zip(counts[pattern], spent, strict=True)]
        found = sorted(counts.items(), key=lambda item: (-item[1][0], -item[1][1], item[0]))
        rows += [(pattern, count, gpu / US, cpu / US, rank) for pattern, (count, gpu, cpu) in found]
    if not rows and not any(operator in text for trace in traces.values() for text in trace.strings):
        raise UsageError(f"kernel-sequences: no event's name contains '{operator}'; try --option operator=aten::")
    return from_rows(TITLES, rows, traces.notes)


def trace_with_sequences(traces: TraceSet, *, operator: str = "", min_length: int = 3) -> Iterator[bytes]:
    """A copy of one rank's file in which `args.Patterns` says to which sequence an event belongs, and its count.

    Marked are the calls of the operator, what ran within them on the host, and what that launched.

    Args:
        traces: one rank's.
        operator: as for `kernel_sequences`.
        min_length: as for `kernel_sequences`.

    Raises:
        UsageError: several ranks, or as for `kernel_sequences`.
        InputError: the file is gone or cannot be read.
    """
    if len(traces) > 1:
        raise UsageError(
            f"kernel-sequences: a copy is of one rank's trace, and there are {len(traces)}: add --ranks 0"
        )
    counts = {
        row["pattern"]: row["count"]
        for row in kernel_sequences(traces, operator=operator, min_length=min_length).records()
    }
    (trace,) = traces.values()
    stacks, marks = call_stacks(trace), dict[int, dict[str, Any]]()
    for row, works, pattern in _calls(trace, stacks, operator, min_length):
        for marked in (*stacks.within(row).tolist(), *works.tolist()):
            marks[marked] = {"Patterns": {pattern: counts[pattern]}}
    return marked_copy(trace, marks)


def _calls(trace: Trace, stacks: Stacks, operator: str, min_length: int) -> Iterator[tuple[int, Int64, str]]:
    """The outermost calls of an operator: row, what they launched, and the pattern of that."""
    named = np.array([operator in text for text in trace.strings] or [False])[trace.name]
    for row, works in works_within(trace, stacks, outermost(stacks, np.flatnonzero(named))):
        if len(works) >= min_length:
            yield row, works, "|".join((trace.text(row), *(trace.text(work) for work in works)))


def outermost(stacks: Stacks, rows: Int64) -> Int64:
    """Those of some host rows that are not within another of them, in the order of the stacks."""
    places = np.sort(stacks.place[rows[stacks.place[rows] >= 0]])
    kept, past = [], 0
    for place in places.tolist():
        if place >= past:
            kept.append(place)
            past = int(stacks.past[place])
    return stacks.order[np.array(kept, np.int64)]


def works_within(trace: Trace, stacks: Stacks, rows: Int64) -> list[tuple[int, Int64]]:
    """For each host row the work on devices that was launched within it, by its start."""
    calls, works = launches(trace)
    worked = trace.on_device[works]
    order = np.argsort(stacks.place[calls[worked]], kind="stable")
    places, works = stacks.place[calls[worked]][order], works[worked][order]
    found = []
    for row in rows.tolist():
        place = stacks.place[row]
        first, last = np.searchsorted(places, (place, stacks.past[place]))
        own = works[first:last]
        found.append((row, own[np.argsort(trace.start[own], kind="stable")]))
    return found


_OPERATORS = (
    "rank",
    "aten_op_name",
    "kernel_sequence",
    "occurrence_count",
    "avg_aten_op_launch_delay",
    "avg_runtime_delay",
)


def operator_kernels(traces: TraceSet) -> AnswerTable:
    """The kernels that each operator launches itself, with the delays until the first of them.

    Columns: `rank`; `aten_op_name`; `kernel_sequence` the kernels by their launches, joined by " -> "; how often
    the operator ran just these; averages in microseconds, three decimals: `avg_aten_op_launch_delay` from the
    operator's start to its first launch, `avg_runtime_delay` from that launch to the start of its kernel. The most
    frequent come first. A kernel belongs to the innermost operator around its launch; copies and sets are left
    out.

    Args:
        traces: the job's.
    """
    rows, notes = [], list(traces.notes)
    for rank, trace in traces.items():
        calls, works = launched_work(trace, memory=False)
        operator = innermost(trace, "aten")[calls]
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
        if not found:
            notes.append(f"rank {rank}: no operator that begins with 'aten' launched a kernel")
    return from_rows(_OPERATORS, rows, notes)


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
