"""What changed between two traces: which operators and kernels came, went, or run more often or longer."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from echograph.errors import UsageError
from echograph.ir.columns import Bools
from echograph.profiler.analyses.table import AnswerTable, from_rows
from echograph.profiler.analyses.work import US
from echograph.profiler.traces.relations import of_device_queue, profiler_steps, step_of_rows
from echograph.profiler.traces.trace import NONE, Trace, TraceSet

TITLES = (
    "name",
    "control_counts",
    "control_total_duration",
    "test_counts",
    "test_total_duration",
    "diff_counts",
    "diff_duration",
    "counts_change_categories",
    "change",
)
CHANGES = ("added", "deleted", "increased", "decreased", "unchanged")
_STEP = re.compile(r"ProfilerStep#\d+$")
_BRACKETS = {"<": ">", "(": ")"}


class _Spent(NamedTuple):
    """How often something ran, and for how long in all."""

    times: int
    picoseconds: int


def trace_diff(
    traces: TraceSet,
    *,
    test: TraceSet | None = None,
    control_rank: int = NONE,
    test_rank: int = NONE,
    control_step: int = NONE,
    test_step: int = NONE,
    device: str = "all",
    short_names: bool = False,
    change: str = "",
    sort: str = "duration",
    top: int = 0,
) -> AnswerTable:
    """What one step of one rank runs (the control) against another step, rank or job (the test).

    Columns: `name`; how often it ran and how many microseconds in all, in the control and in the test;
    `diff_counts` and `diff_duration` test less control; `counts_change_categories` the sign of `diff_counts`;
    `change` by counts: added, deleted, increased, decreased or unchanged. Work on a device is of the step that
    launched it. The marks of steps are one name, whatever their number. The largest difference comes first.

    Args:
        traces: the control's job.
        test: the test's job; without it, the control's own.
        control_rank: rank of the control; -1 takes the first.
        test_rank: rank of the test; -1 takes the first.
        control_step: the number after "ProfilerStep#"; -1 takes the first, or the whole trace where no step is
            marked.
        test_step: step of the test, in the same way.
        device: "all", "cpu" what ran on the host, or "gpu" what ran, or waited, on devices.
        short_names: without return types, template arguments and parameters: what then has one name is added up.
        change: only rows of this change.
        sort: by "duration" or by "counts".
        top: only so many rows; 0 keeps all.

    Raises:
        UsageError: control and test are the same; a rank or step that is not there; an unknown word.
    """
    _check_options(device, sort, change, top)
    notes = [*traces.notes, *(test.notes if test is not None else ())]
    sides = []
    for label, job, rank, step in (
        ("control", traces, control_rank, control_step),
        ("test", traces if test is None else test, test_rank, test_step),
    ):
        trace = _of_rank(job, rank, label)
        sides.append((trace, _of_step(trace, step, label, notes)))
    (control, control_rows), (other, other_rows) = sides
    if control is other and np.array_equal(control_rows, other_rows):
        raise UsageError(
            "trace-diff: control and test are the same: name test=TRACES, or another test_rank or test_step"
        )
    name_of = short_name if short_names else unnumbered
    before, after = (_totals(t, rows & _on(t, device), name_of) for t, rows in sides)
    rows = [_row(name, before.get(name), after.get(name)) for name in before.keys() | after.keys()]
    by = TITLES.index("diff_duration" if sort == "duration" else "diff_counts")
    kept = sorted((r for r in rows if not change or r[-1] == change), key=lambda r: (-abs(r[by]), r[0]))
    return from_rows(TITLES, kept[: top or None], dict.fromkeys(notes))


def short_name(name: str) -> str:
    """A kernel's or operator's name without return type, template arguments and parameters."""
    plain = unnumbered(name).replace("(anonymous namespace)::", "")
    kept: list[str] = []
    closing: list[str] = []
    for before, character in pairwise(f" {plain}"):
        if closing and character == closing[-1]:
            closing.pop()
        # After a blank it is a remark ("Memset (Device)") or a comparison.
        elif character in _BRACKETS and (closing or before != " "):
            closing.append(_BRACKETS[character])
        elif not closing:
            kept.append(character)
    return plain if closing else "".join(kept).removeprefix("void ")


def unnumbered(name: str) -> str:
    """A name under which the marks of all profiler steps are one."""
    return "ProfilerStep" if _STEP.match(name) else name


def _check_options(device: str, sort: str, change: str, top: int) -> None:
    words = (("device", device, ("all", "cpu", "gpu")), ("sort", sort, ("duration", "counts")))
    for option, given, known in (*words, ("change", change or CHANGES[0], CHANGES)):
        if given not in known:
            raise UsageError(f"{option}: '{given}' is none of {', '.join(known)}")
    if top < 0:
        raise UsageError(f"top: {top} is below 0; 0 keeps all rows")


def _of_rank(job: TraceSet, rank: int, label: str) -> Trace:
    chosen = min(job) if rank == NONE else rank
    if chosen not in job:
        raise UsageError(f"{label}_rank: no trace of rank {rank}; there is {', '.join(map(str, job))}")
    return job[chosen]


def _of_step(trace: Trace, step: int, label: str, notes: list[str]) -> Bools:
    """Which rows are of a step; notes get a line where none is marked and all rows are."""
    known = list(dict.fromkeys(profiler_steps(trace).number.tolist()))
    if step != NONE and step not in known:
        raise UsageError(
            f"{label}_step: no step {step} in {trace.path}; there is {', '.join(map(str, known)) or 'none'}"
        )
    if not known:
        notes.append(f"{trace.path}: no profiler step: the whole trace is compared")
        return np.ones(len(trace), np.bool_)
    chosen: Bools = step_of_rows(trace) == (known[0] if step == NONE else step)
    return chosen


def _on(trace: Trace, device: str) -> Bools:
    """Which rows are of a side; annotations that profilers repeat on the device are of none."""
    queued: Bools = of_device_queue(trace) | trace.on_device
    host = ~queued & ~trace.of_category({"gpu_user_annotation"})
    return {"all": queued | host, "cpu": host, "gpu": queued}[device]


def _totals(trace: Trace, rows: Bools, name_of: Callable[[str], str]) -> dict[str, _Spent]:
    codes = trace.name[rows]
    size = len(trace.strings)
    counts = np.bincount(codes, minlength=size)
    durations = np.zeros(size, np.int64)
    np.add.at(durations, codes, trace.duration[rows])
    found: dict[str, _Spent] = {}
    for code in np.flatnonzero(counts).tolist():
        name = name_of(trace.strings[code])
        known = found.get(name, _Spent(0, 0))
        found[name] = _Spent(known.times + int(counts[code]), known.picoseconds + int(durations[code]))
    return found


def _row(name: str, before: _Spent | None, after: _Spent | None) -> tuple[Any, ...]:
    control, test = before or _Spent(0, 0), after or _Spent(0, 0)
    more = test.times - control.times
    if before is None:
        change = "added"
    elif after is None:
        change = "deleted"
    else:
        change = "increased" if more > 0 else "decreased" if more < 0 else "unchanged"
    return (
        name,
        control.times,
        control.picoseconds / US,
        test.times,
        test.picoseconds / US,
        more,
        (test.picoseconds - control.picoseconds) / US,
        "+" if more > 0 else "-" if more < 0 else "=",
        change,
    )
