"""Two runs side by side: the answers of one analysis joined by what they are of, what costs most first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from echograph.errors import UnavailableError
from echograph.profiler.analyses import ANALYSES
from echograph.profiler.analyses.diff import unnumbered
from echograph.profiler.analyses.table import AnswerTable, from_rows
from echograph.profiler.traces.relations import profiler_steps, step_of_rows
from echograph.profiler.traces.trace import NONE, TraceSet

# Of the devices' time, what may run outside the steps before a note says so.
_OUTSIDE = 0.05
# What differs by less, relative to the larger, is called the same.
_SAME = 0.01


@dataclass(frozen=True, slots=True)
class ComparedColumns:
    """Which columns of an analysis are compared.

    Attributes:
        keys: columns that say what a row is of; rows that agree in them are added up.
        times: columns of microseconds, by what they are called side by side; those of a row add up.
        count: column of how often that ran; empty where there is none.
        options: of the analysis, where they are not its own.
        ranks: column of how many ranks a row is of, each of which took these times; empty where it is one.
    """

    keys: tuple[str, ...]
    times: Mapping[str, str]
    count: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    ranks: str = ""


_KINDS_OF_TIME = ("computation", "overlapped", "communication", "memory", "idle")
COMPARED: Mapping[str, ComparedColumns] = {
    "steps": ComparedColumns((), {"step": "dur"}),
    "rank-times": ComparedColumns((), {kind: f"{kind}(us)" for kind in _KINDS_OF_TIME}),
    "kernel-types": ComparedColumns(("kernel_type",), {"": "sum"}),
    "kernels": ComparedColumns(("name", "kernel_type"), {"": "sum (us)"}, "count"),
    "shapes": ComparedColumns(("operator", "phase", "shapes", "dtypes"), {"": "sum (us)"}, "calls"),
    "communication": ComparedColumns(
        ("name", "library", "group_size", "bytes"), {"": "sum(us)"}, "count", ranks="traced_ranks"
    ),
    "idle": ComparedColumns(("idle_category",), {"": "idle_time"}),
    "critical-path-summary": ComparedColumns(("bound_by",), {"": "duration"}),
    "call-stacks": ComparedColumns(("name",), {"": "self_time(us)"}, "count"),
    "launch-summary": ComparedColumns(("call",), {"": "cpu_time(us)"}, "launches"),
    "annotations": ComparedColumns(("name",), {"": "sum (us)"}, "count", {"side": "host"}),
}
"""The analyses whose answers can be put side by side, in the order in which a reader wants them."""

TIMES = ("time(us)", "against(us)", "difference(us)", "ratio", "change")
_COUNTS = ("count", "against_count")


@dataclass(frozen=True, slots=True)
class _Total:
    """Microseconds and how often, over all ranks and steps."""

    time: float = 0.0
    count: float = 0.0


def side_by_side(name: str, run: TraceSet, against: TraceSet, **options: Any) -> AnswerTable:
    """The answers of one analysis to two runs, joined by what they are of.

    Times and counts are means: of a step and rank where both runs mark their steps, else of a rank's whole trace,
    which a note says. Columns: those that say what a row is of; `part` where the analysis has several times of
    one row; `count` and `against_count` where it counts; `time(us)` of the run, `against(us)` of the other,
    `difference(us)` of the run less the other: above 0 the run takes longer; `ratio` of the run to the other,
    empty where the other has none; `change`: "longer" or "shorter" (by more than 1 %), "same", "new" where the
    other does not have it, "gone" where the run does not. What differs most comes first.

    Args:
        name: an analysis of `COMPARED`.
        run: the traces that are looked at.
        against: the traces that they are compared with.
        options: of the analysis, the same for both.

    Raises:
        UnknownNameError: no such analysis.
        UnavailableError: its answers cannot be joined.
        EchoError: as the analysis.
    """
    analysis, columns = ANALYSES[name], COMPARED.get(name)
    if columns is None:
        raise UnavailableError(f"{name} has no two runs side by side", COMPARED)
    chosen = {**columns.options, **options}
    answers = [analysis(traces, **chosen) for traces in (run, against)]
    shares, notes = _shares(run, against)
    sides = [_totals(answer, columns, share) for answer, share in zip(answers, shares, strict=True)]
    new, old = sides
    rows = [_row(key, new.get(key), old.get(key), columns) for key in new | old]
    several = len(columns.times) > 1
    titles = (*columns.keys, *(["part"] if several else []), *(_COUNTS if columns.count else ()), *TIMES)
    at = titles.index("difference(us)")
    rows.sort(key=lambda row: (-abs(row[at]), *map(str, row[: len(columns.keys) + several])))
    labelled = zip(("run", "against"), answers, strict=True)
    said = [f"{label}: {note}" for label, answer in labelled for note in answer.notes]
    return from_rows(titles, rows, dict.fromkeys([*notes, *said]))


def _shares(run: TraceSet, against: TraceSet) -> tuple[list[float], list[str]]:
    """By what the totals of both are divided, and what a reader must know of that."""
    sides = {"run": run, "against": against}
    steps = {label: sum(len(profiler_steps(trace).number) for trace in of.values()) for label, of in sides.items()}
    ranks = {label: len(of) for label, of in sides.items()}
    if not all(steps.values()):
        without = " and ".join(label for label, count in steps.items() if not count)
        note = f"no profiler steps are marked in {without}: times are a rank's, of the whole trace"
        return [float(count) for count in ranks.values()], [note]
    counted = (f"{label} has {steps[label]} over {ranks[label]} ranks" for label in sides)
    notes = [f"times are means of a step and rank: {', '.join(counted)}"]
    for label, of in sides.items():
        outside, whole = _outside(of)
        if outside > _OUTSIDE * whole:
            notes.append(
                f"{label}: {outside / whole:.0%} of the devices' work is outside all steps, and counts, too"
            )
    return [float(count) for count in steps.values()], notes


def _outside(traces: TraceSet) -> tuple[int, int]:
    """Picoseconds of device work that no step launched, and of all."""
    outside = whole = 0
    for trace in traces.values():
        work = trace.on_device
        whole += int(trace.duration[work].sum())
        outside += int(trace.duration[work & (step_of_rows(trace) == NONE)].sum())
    return outside, whole


def _totals(answer: AnswerTable, columns: ComparedColumns, share: float) -> dict[tuple[Any, ...], _Total]:
    """What each key takes, and how often it ran, a share of the total."""
    found: dict[tuple[Any, ...], _Total] = {}
    several = len(columns.times) > 1
    for row in answer.records():
        own = tuple(unnumbered(row[key]) if isinstance(row[key], str) else row[key] for key in columns.keys)
        each = (row[columns.ranks] if columns.ranks else 1) / share
        count = (row[columns.count] or 0) * each if columns.count else 0.0
        for part, column in columns.times.items():
            key = (*own, part) if several else own
            known = found.get(key, _Total())
            found[key] = _Total(known.time + (row[column] or 0.0) * each, known.count + count)
    return found


def _row(
    key: tuple[Any, ...], run: _Total | None, against: _Total | None, columns: ComparedColumns
) -> tuple[Any, ...]:
    new, old = run or _Total(), against or _Total()
    counts = tuple(_whole(side.count) for side in (new, old)) if columns.count else ()
    ratio = new.time / old.time if old.time else math.nan
    if run is None or against is None:
        change = "gone" if run is None else "new"
    elif abs(new.time - old.time) <= _SAME * max(new.time, old.time):
        change = "same"
    else:
        change = "longer" if new.time > old.time else "shorter"
    return (*key, *counts, new.time, old.time, new.time - old.time, ratio, change)


def _whole(count: float) -> float | int:
    """A mean count as a whole number where it is one."""
    near = round(count)
    return near if np.isclose(count, near, rtol=0, atol=1e-9) else count
