"""Which kernels take the devices' time, by kind and by name."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np

from echograph.errors import UsageError
from echograph.ir.intervals import coverage, union
from echograph.profiler.analyses.statistics import groups, summary
from echograph.profiler.analyses.table import AnswerTable, from_rows, stacked
from echograph.profiler.analyses.work import US, KernelKind, device_work, kernel_kinds
from echograph.profiler.traces.trace import NONE, Trace, TraceSet

_KINDS = (KernelKind.COMPUTATION, KernelKind.COMMUNICATION, KernelKind.MEMORY)
_QUANTILES = (1, 5, 25, 50, 75, 95, 99)


def kernel_types(traces: TraceSet, *, memory: bool = True) -> AnswerTable:
    """How long each combination of kinds of kernel runs at once, over all ranks.

    Columns: `kernel_type` the kinds that run ("COMPUTATION overlapping COMMUNICATION"), on any streams of a rank;
    `sum` microseconds, summed over ranks; `percentage` of the time in which anything runs, one decimal. Kinds that
    meet for no time, since one ends as the other begins, have a row with 0.

    Args:
        traces: the job's.
        memory: count copies and sets.
    """
    shown = _KINDS if memory else _KINDS[:2]
    total, notes = Counter[int](), list(traces.notes)
    for _, work in device_work(traces, notes):
        kind = kernel_kinds(work)
        length, met = coverage([union(work.start[kind == k], work.end[kind == k]) for k in shown])
        for mask in np.flatnonzero(met).tolist():
            total[mask] += int(length[mask])
    busy = max(1, sum(total.values()))
    rows = []
    for mask, ps in sorted(total.items(), key=lambda item: (-item[1], item[0])):
        names = [k.name for bit, k in enumerate(shown) if mask >> bit & 1]
        rows.append((" overlapping ".join(names), ps / US, round(100 * ps / busy, 1)))
    return from_rows(("kernel_type", "sum", "percentage"), rows, notes)


def kernel_breakdown(traces: TraceSet, *, top: int = 0, memory: bool = True) -> AnswerTable:
    """What each kernel costs on each rank: total, extremes and spread of its durations.

    Columns, microseconds: `name`; `sum (us)`, `max (us)`, `min (us)`, `stddev` (of a sample), `mean (us)` over all
    its launches; `kernel_type`; `rank`; `count` of its launches. The costliest come first within a kind and a
    rank.

    Args:
        traces: the job's.
        top: name only this many kernels of each kind and rank; the rest are one row, "others", whose statistics
            are those of all their launches. 0 names all.
        memory: count copies and sets.
    """
    rows, notes = [], list(traces.notes)
    for rank, work in device_work(traces, notes):
        kind = kernel_kinds(work)
        for shown in _KINDS if memory else _KINDS[:2]:
            own = work.rows(kind == shown)
            rows += [(*row[:6], shown.name, rank, row[6]) for row in statistics_by_name(own, top)]
    titles = ("name", "sum (us)", "max (us)", "min (us)", "stddev", "mean (us)", "kernel_type", "rank", "count")
    return from_rows(titles, rows, notes)


def statistics_by_name(trace: Trace, top: int = 0) -> list[tuple[Any, ...]]:
    """Statistics of rows of equal name, microseconds: name, sum, max, min, deviation, mean, count; longest first.

    Args:
        trace: the rows.
        top: how many names are told apart; 0 for all. The others' name is "others".
    """
    name, texts = trace.name.astype(np.int64), list(trace.strings)
    found = groups(name)
    if 0 < top < len(found.keys):
        total = summary(found, trace.duration).sum
        rest = found.keys[np.argsort(-total, kind="stable")[top:]]
        name = np.where(np.isin(name, rest), len(texts), name)
        texts.append("others")
        found = groups(name)
    numbers = summary(found, trace.duration / US)
    order = np.lexsort((found.keys, -numbers.sum))
    columns = [[texts[key] for key in found.keys[order]], *(column[order].tolist() for column in numbers)]
    return list(zip(*columns, found.sizes[order].tolist(), strict=True))


def kernel_durations(traces: TraceSet) -> AnswerTable:
    """How the durations of each kernel are distributed, over all ranks together.

    Columns, microseconds: `name`, `kernel_type`, `count`, `mean (us)`, then `1% (us)` to `99% (us)`: the duration
    that this share of the launches does not exceed (linear between two). The costliest come first.
    """
    notes, durations = list(traces.notes), dict[str, list[Any]]()
    kind_of: dict[str, str] = {}
    for _, work in device_work(traces, notes):
        kind, found = kernel_kinds(work), groups(work.name)
        for key, rows in zip(found.keys, np.split(found.order, found.first[1:]), strict=True):
            durations.setdefault(work.strings[key], []).append(work.duration[rows] / US)
            kind_of[work.strings[key]] = KernelKind(int(kind[rows[0]])).name
    total = Counter({name: float(sum(part.sum() for part in parts)) for name, parts in durations.items()})
    rows_out = []
    for name, _ in total.most_common():
        values = np.concatenate(durations[name])
        quantiles = np.percentile(values, _QUANTILES).tolist()
        rows_out.append((name, kind_of[name], len(values), float(values.mean()), *quantiles))
    titles = ("name", "kernel_type", "count", "mean (us)", *(f"{q}% (us)" for q in _QUANTILES))
    return from_rows(titles, rows_out, notes)


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
            notes.append(trace.without(f"annotation on the {side}"))
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
            notes.append(trace.without("annotation on the device"))
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
