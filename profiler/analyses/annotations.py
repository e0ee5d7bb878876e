"""What the user's annotations (`record_function`, the profiler's own) cover."""

from __future__ import annotations

import re

import numpy as np

from echograph.errors import UsageError
from echograph.profiler.analyses.kernels import statistics_by_name
from echograph.profiler.analyses.table import AnswerTable, from_rows, stacked
from echograph.profiler.analyses.work import US
from echograph.profiler.traces.trace import NONE, Trace, TraceSet

_CATEGORIES = {"device": "gpu_user_annotation", "host": "user_annotation"}


def annotation_breakdown(
    traces: TraceSet, *, side: str = "device", pattern: str = "", top: int = 0
) -> AnswerTable:
    """What each annotation costs on each rank: total, extremes and spread of its durations.

    Columns, microseconds: `name`; `sum (us)`, `max (us)`, `min (us)`, `stddev` (of a sample), `mean (us)`; `rank`;
    `count`. The costliest come first within a rank.

    Args:
        traces: the job's.
        side: "device" for the spans of the work that was launched under the annotation, "host" for its own.
        pattern: a regular expression; only annotations whose name it matches anywhere.
        top: name only this many on each rank; the rest are one row, "others". 0 names all.

    Raises:
        UsageError: no such side, or an invalid expression.
    """
    if side not in _CATEGORIES:
        raise UsageError(f"annotations: side is 'device' or 'host', not '{side}'")
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"annotations: '{pattern}' is no regular expression ({error})") from None
    rows, notes = [], list(traces.notes)
    for rank, trace in traces.items():
        matching = np.array([bool(wanted.search(text)) for text in trace.strings] or [False])[trace.name]
        chosen = trace.of_category({_CATEGORIES[side]}) & matching
        if not chosen.any():
            notes.append(f"rank {rank}: no annotation on the {side}")
        rows += [(*row[:6], rank, row[6]) for row in statistics_by_name(trace.rows(chosen), top)]
    titles = ("name", "sum (us)", "max (us)", "min (us)", "stddev", "mean (us)", "rank", "count")
    return from_rows(titles, rows, notes)


def annotated_kernels(traces: TraceSet) -> AnswerTable:
    """Each kernel, copy and set with the innermost annotation that its launch was made under.

    Columns: `rank`; `index` of the event in the file; `name`; `ts` and `dur` microseconds; `stream`;
    `user_annotation`, empty where no annotation on the device covers any of it. Of several, the shortest counts.
    Ranks without annotations on the device are left out.
    """
    parts, notes = [], list(traces.notes)
    for rank, trace in traces.items():
        annotation = shortest_annotation(trace)
        if (annotation == NONE).all():
            notes.append(f"rank {rank}: no annotation on the device")
            continue
        rows = np.flatnonzero(trace.on_device)
        covered = annotation[rows].tolist()
        parts.append(
            {
                "rank": np.full(len(rows), rank),
                "index": trace.index[rows],
                "name": [trace.text(row) for row in rows.tolist()],
                "ts": trace.start[rows] / US,
                "dur": trace.duration[rows] / US,
                "stream": trace.stream[rows],
                "user_annotation": ["" if row == NONE else trace.text(row) for row in covered],
            }
        )
    return stacked(parts, ("rank", "index", "name", "ts", "dur", "stream", "user_annotation"), notes)


def shortest_annotation(trace: Trace) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """For each row on a device the shortest annotation on its stream's track that it overlaps, or -1."""
    annotation = np.full(len(trace), NONE, np.int64)
    marks = np.flatnonzero(trace.of_category({"gpu_user_annotation"}))
    device = np.flatnonzero(trace.on_device)
    for mark in marks[np.argsort(-trace.duration[marks], kind="stable")].tolist():
        same = (trace.pid[device] == trace.pid[mark]) & (trace.tid[device] == trace.tid[mark])
        begin, end = trace.start[mark], trace.start[mark] + trace.duration[mark]
        rows = device[same]
        annotation[rows[(trace.start[rows] < end) & (trace.end[rows] > begin)]] = mark
    return annotation
