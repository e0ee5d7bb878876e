"""The critical path of a job: through the threads, streams and collectives of all its ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from echograph.errors import UsageError
from echograph.profiler.analyses.table import AnswerTable, from_rows
from echograph.profiler.analyses.work import US, KernelKind, kind_of_name
from echograph.profiler.replay.job import JobWorkItems, MatchedWork, job_work_items
from echograph.profiler.replay.rank import GAP, LAUNCH, START, WorkItem, WorkKind
from echograph.profiler.traces.trace import NONE, TraceSet

_TITLES = ("rank", "line", "name", "bound_by", "start(us)", "duration(us)", "waited_for")
_BOUND = {GAP: "host_gap", LAUNCH: "launch", START: "not_traced"}


class _Part(NamedTuple):
    """A work item on the path, and the time of it that is on the path."""

    rank: int
    item: WorkItem
    begin: int
    end: int
    waited: int


def cross_rank_critical_path(traces: TraceSet, *, step: int = NONE) -> AnswerTable:
    """The chain of work, over all ranks, that ended last: had any of it been shorter, the job had been.

    It is followed back from the end: from each item of work to the one that ended last of those that it had to
    wait for, and from a collective to the rank that began it last. The ranks' clocks are aligned first where
    they contradict one another.

    Columns, in order of time: `rank`; `line`, a thread or a stream; `name` of the operator; `bound_by`: `compute`,
    `communication`, `memory`, `host`, `host_gap` between operators, `launch` from when work could have begun to
    when it did, `not_traced` before a rank's first event; `start(us)` since the first event of the job;
    `duration(us)` on the path; `waited_for`: of a collective that another rank began last, that rank, where the
    path goes on; or empty.

    Args:
        traces: the job's.
        step: the number of a profiler step; -1 for all that was traced.

    Raises:
        UsageError: no rank has that step.
        InputError: a trace's file is gone.
    """
    job = job_work_items(traces)
    rows = []
    for part in _path(job, step):
        bound = _bound_by(part.item)
        spent = (part.begin / US, (part.end - part.begin) / US)
        waited = f"rank {part.waited}" if part.waited != NONE else ""
        rows.append((part.rank, part.item.line, part.item.name, bound, *spent, waited))
    return from_rows(_TITLES, rows, job.notes)


def cross_rank_critical_path_summary(traces: TraceSet, *, step: int = NONE) -> AnswerTable:
    """What the critical path of the job is spent on, rank by rank.

    Columns: `rank`; `bound_by`, as for the path; `duration(us)` on it; `percentage` of its length.

    Args:
        traces: the job's.
        step: the number of a profiler step; -1 for all that was traced.

    Raises:
        UsageError: no rank has that step.
        InputError: a trace's file is gone.
    """
    job = job_work_items(traces)
    spent: dict[tuple[int, str], int] = defaultdict(int)
    for part in _path(job, step):
        spent[part.rank, _bound_by(part.item)] += part.end - part.begin
    whole = max(1, sum(spent.values()))
    order = sorted(spent.items(), key=lambda item: -item[1])
    rows = [(rank, bound, time / US, 100 * time / whole) for (rank, bound), time in order if time]
    return from_rows(("rank", "bound_by", "duration(us)", "percentage"), rows, job.notes)


def _path(job: JobWorkItems, step: int) -> list[_Part]:
    """The path, first part first; each begins when the one before it ends."""
    rank_of = {id(item): rank for rank, order in job.of_rank.items() for item in order}
    together = {id(item): one for one in job.collectives for item in one.work_items.values()}
    before = _before(job)
    begin, item = _window(job, step)
    found: list[_Part] = []
    now = item.end
    while item is not None and now > begin:
        rank, waited = rank_of[id(item)], NONE
        start, one = item.start, together.get(id(item))
        if one is not None and one.begun < item.end:
            start = max(start, one.begun)
            waited = one.last if one.last != rank else NONE
        # Where work items overlap by what clocks differ, time is counted once.
        start = max(begin, min(start, now))
        if now > start:
            found.append(_Part(rank, item, start, now, waited))
        now = start
        item = _cause(item, one, before)  # type: ignore[assignment]
    return found[::-1]


def _before(job: JobWorkItems) -> dict[int, WorkItem]:
    """For each work item the one before it on its line."""
    found: dict[int, WorkItem] = {}
    for order in job.of_rank.values():
        last: dict[str, WorkItem] = {}
        for item in order:
            if item.line in last:
                found[id(item)] = last[item.line]
            last[item.line] = item
    return found


def _cause(item: WorkItem, one: MatchedWork | None, before: Mapping[int, WorkItem]) -> WorkItem | None:
    """What ended last of that which a work item, or its collective's last rank, waited for."""
    if one is not None:
        item = one.work_items[one.last]
    previous = before.get(id(item))
    causes = [*item.after, *([previous] if previous is not None else [])]
    return max(causes, key=lambda other: other.end, default=None)


def _window(job: JobWorkItems, step: int) -> tuple[int, WorkItem]:
    """When the path begins, and the work item that it ends with."""
    work_items = [item for order in job.of_rank.values() for item in order]
    if step == NONE:
        first = min(item.end for item in work_items if item.name == START)
        return first, max(work_items, key=lambda item: item.end)
    marks = [item for item in work_items if item.name == f"ProfilerStep#{step}"]
    ends = [item for item in marks if item.step != NONE]
    if not ends:
        numbers = {item.name.partition("#")[2] for item in work_items if item.name.startswith("ProfilerStep#")}
        known = ", ".join(sorted(numbers, key=int)) or "none"
        raise UsageError(f"step {step}: no rank has it; the traces have {known}")
    return min(item.start for item in marks), max(ends, key=lambda item: item.end)


def _bound_by(item: WorkItem) -> str:
    match item.work:
        case WorkKind.HOST:
            return _BOUND.get(item.name, "host")
        case WorkKind.COLLECTIVE | WorkKind.MESSAGE:
            return "communication"
        case WorkKind.COPY:
            return "memory"
        case WorkKind.COMPUTE:
            memory = kind_of_name(item.name) == KernelKind.MEMORY
            return "memory" if memory else "communication" if item.call is not None else "compute"
