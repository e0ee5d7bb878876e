"""How long each operation takes: over all repetitions, against another run, by category, and kernel by kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from echograph.errors import DataError
from echograph.ir.columns import NONE, Int64
from echograph.profiler.analyses.table import AnswerTable, from_rows
from echograph.profiler.byteprofile.events import COMPUTATION, UPDATES, EventLabel, Events
from echograph.profiler.byteprofile.layout import Job
from echograph.units import PS_PER_MS

Float = npt.NDArray[np.float64]


class Statistics(NamedTuple):
    """What the repetitions of each operation took; arrays have a value for each label, in the order of the file.

    Attributes:
        labels: the operations.
        counts: how often each ran.
        total: picoseconds of all repetitions.
        shortest: picoseconds.
        longest: picoseconds.
        variance: of the population, square milliseconds.
        notes: what is missing, one line each.
    """

    labels: tuple[EventLabel, ...]
    counts: Int64
    total: Int64
    shortest: Int64
    longest: Int64
    variance: Float
    notes: tuple[str, ...]

    @property
    def average_ms(self) -> Float:
        """Milliseconds of one repetition."""
        average: Float = self.total / self.counts / PS_PER_MS
        return average

    def average_ps(self) -> dict[EventLabel, int]:
        """Picoseconds of one repetition, rounded, of each operation."""
        return {
            label: round(int(total) / int(count))
            for label, total, count in zip(self.labels, self.total, self.counts, strict=True)
        }


def statistics(events: Events, *, partitions: bool = True) -> Statistics:
    """What each operation took.

    Args:
        events: any.
        partitions: keep partitions of a communication's part apart.

    Raises:
        DataError: there is no event.
    """
    if not partitions:
        events = events.relabelled(lambda label: label._replace(key=""))
    if not len(events):
        raise DataError("the trace has no events with a duration: nothing to count")
    used, first, codes = np.unique(events.label, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rows = np.argsort(codes, kind="stable")
    duration = events.duration[rows]
    starts = np.searchsorted(codes[rows], np.arange(len(used)))
    count = np.diff(np.append(starts, len(rows)))
    total = np.add.reduceat(duration, starts)
    average = total / count
    squares = np.add.reduceat(((duration - np.repeat(average, count)) / PS_PER_MS) ** 2, starts)
    return Statistics(
        labels=tuple(events.labels[code] for code in used[order]),
        counts=count[order],
        total=total[order],
        shortest=np.minimum.reduceat(duration, starts)[order],
        longest=np.maximum.reduceat(duration, starts)[order],
        variance=(squares / count)[order],
        notes=events.notes,
    )


TITLES = ("name", "count", "total_ms", "min_ms", "max_ms", "avg_ms", "variance_ms2")


def statistics_table(found: Statistics, *, sort: bool = False, head: int | None = None) -> AnswerTable:
    """One row a name: `count`, and in milliseconds `total_ms`, `min_ms`, `max_ms`, `avg_ms`, `variance_ms2`.

    Args:
        found: the statistics.
        sort: the largest average first, rather than in the order of the file.
        head: only so many rows.
    """
    average = found.average_ms
    order = np.argsort(-average, kind="stable") if sort else np.arange(len(average))
    order = order[:head]
    columns: tuple[Any, ...] = (
        [found.labels[row].name for row in order],
        found.counts[order],
        *(values[order] / PS_PER_MS for values in (found.total, found.shortest, found.longest)),
        average[order],
        found.variance[order],
    )
    return AnswerTable(columns=dict(zip(TITLES, columns, strict=True)), notes=found.notes)


def category_table(found: Statistics) -> AnswerTable:
    """One row a category: the `operation` whose average is the largest, and that average, `avg_ms`."""
    largest: dict[str, tuple[float, str]] = {}
    for label, average in zip(found.labels, found.average_ms.tolist(), strict=True):
        if label.category not in largest or average > largest[label.category][0]:
            largest[label.category] = average, label.name
    return from_rows(("category", "operation", "avg_ms"), [(c, name, ms) for c, (ms, name) in largest.items()])


def comparison(
    first: Statistics, second: Statistics, *, sort: bool = False, head: int | None = None
) -> AnswerTable:
    """What both runs did: `avg1_ms`, `avg2_ms`, `difference_ms` = avg2 - avg1, `relative` = that over avg1.

    Names that only one has are left out, and counted in a note. Where avg1 is 0, `relative` is empty.

    Args:
        first: a run.
        second: another.
        sort: the largest relative difference first, rather than in the order of the first run.
        head: only so many rows.

    Raises:
        DataError: they have no name in common.
    """
    averages = [dict(zip((x.name for x in s.labels), s.average_ms.tolist(), strict=True)) for s in (first, second)]
    shared = [name for name in averages[0] if name in averages[1]]
    if not shared:
        raise DataError(
            f"nothing to compare: no name is in both: the first has '{next(iter(averages[0]))}', the second "
            f"'{next(iter(averages[1]))}'; compare a folder with a folder, or a file with a file"
        )
    rows = []
    for name in shared:
        one, two = averages[0][name], averages[1][name]
        rows.append((name, one, two, two - one, (two - one) / one if one else None))
    if sort:
        rows.sort(key=lambda row: (row[4] is None, -(row[4] or 0.0)))
    alone = [len(average) - len(shared) for average in averages]
    notes = [f"{alone[0]} names are only in the first and {alone[1]} only in the second"] * any(alone)
    titles = ("name", "avg1_ms", "avg2_ms", "difference_ms", "relative")
    return from_rows(titles, rows[:head], (*dict.fromkeys((*first.notes, *second.notes)), *notes))


class Setting(NamedTuple):
    """What a first GPU of one setting did, partitions together.

    Attributes:
        name: of the setting.
        worker: number of the worker.
        averages: milliseconds of each operation, by category.
    """

    name: str
    worker: int
    averages: Mapping[str, Mapping[str, float]]


def settings_of(jobs: Iterable[Job]) -> list[Setting]:
    """The first GPU of each worker of each job, partitions together.

    Raises:
        InputError: a trace cannot be read.
        DataError: a trace is broken.
    """
    found = []
    for job in jobs:
        for worker in sorted({gpu.worker for gpu in job.gpus}):
            first = min((gpu for gpu in job.gpus if gpu.worker == worker), key=lambda gpu: gpu.rank)
            counted = statistics(first.events(), partitions=False)
            averages: dict[str, dict[str, float]] = {}
            for label, average in zip(counted.labels, counted.average_ms.tolist(), strict=True):
                averages.setdefault(label.category, {})[label._replace(prefix="").name] = average
            found.append(Setting(str(job.path), worker, averages))
    return found


def settings_table(settings: Sequence[Setting]) -> AnswerTable:
    """One row a setting, worker and category: how many `operations`, and the mean of their averages, `mean_ms`."""
    rows = [
        (one.name, one.worker, category, len(averages), sum(averages.values()) / len(averages))
        for one in settings
        for category, averages in sorted(one.averages.items())
    ]
    return from_rows(("setting", "worker", "category", "operations", "mean_ms"), rows)


_KERNELS = frozenset({"kernel", "Kernel", "gpu_memcpy", "gpu_memset", "Memcpy", "Memset"})
_HALF = 2


def mapping(operators: Events, kernels: Events, *, offset: int = 0) -> AnswerTable:
    """The kernels that ran while an operator did, at least half of their time.

    One row an operator and kernel: `operator`, `kernel`, `count`, `total_ms` and `per_operator`, how many of them
    one run of the operator has on average. A kernel within several operators is that of the one that it overlaps
    longest; of equals, that of the one that starts last.

    Args:
        operators: events of FW., BW. and STEP or UPDATE; others are left out.
        kernels: events; where some have a category of device work, only these.
        offset: picoseconds that are added to the kernels' times.

    Raises:
        DataError: there is no operator, or no kernel.
    """
    wanted = operators.rows(operators.where(lambda label: label.category in COMPUTATION | UPDATES))
    device = kernels.where(lambda label: label.category in _KERNELS)
    work = kernels.rows(device) if len(device) else kernels.rows(kernels.where(_is_no_operator))
    for what, found in (("operators (FW., BW., STEP)", wanted), ("kernels", work)):
        if not len(found):
            raise DataError(f"nothing to map: the trace has no {what}: give one of operators, then one of kernels")
    owner = _owners(wanted, work.start + (work.origin - wanted.origin) + offset, work.duration)
    counted: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row in np.flatnonzero(owner >= 0).tolist():
        counted[int(wanted.label[owner[row]]), int(work.label[row])].append(int(work.duration[row]))
    runs = np.bincount(wanted.label)
    codes, first = np.unique(wanted.label, return_index=True)
    place = dict(zip(codes.tolist(), first.tolist(), strict=True))
    rows = [
        (
            wanted.labels[operator].name,
            work.labels[kernel].name,
            len(times),
            sum(times) / PS_PER_MS,
            len(times) / int(runs[operator]),
        )
        for (operator, kernel), times in sorted(counted.items(), key=lambda item: place[item[0][0]])
    ]
    outside = int((owner < 0).sum())
    notes = [f"{outside} of {len(work)} kernels ran outside all operators"] * bool(outside)
    titles = ("operator", "kernel", "count", "total_ms", "per_operator")
    return from_rows(titles, rows, (*operators.notes, *kernels.notes, *notes))


def _owners(operators: Events, start: Int64, duration: Int64) -> Int64:
    """The row of the operator that each kernel ran within, or -1.

    Args:
        operators: events.
        start: of the kernels, picoseconds of the operators' clock.
        duration: of the kernels.
    """
    order = np.argsort(operators.start, kind="stable")
    begins, ends = operators.start[order], operators.end[order]
    # Until when any operator up to each lasts: further back than where this is over, none overlaps.
    lasting = np.maximum.accumulate(ends)
    found = np.full(len(start), NONE, np.int64)
    last = np.searchsorted(begins, start + duration, "right") - 1
    for row, (begin, lasts, at) in enumerate(zip(start.tolist(), duration.tolist(), last.tolist(), strict=True)):
        most, place = -1, NONE
        while at >= 0 and lasting[at] >= begin:
            shared = min(begin + lasts, int(ends[at])) - max(begin, int(begins[at]))
            if shared > most:
                most, place = shared, at
            at -= 1
        if place != NONE and most * _HALF >= lasts:
            found[row] = order[place]
    return found


def _is_no_operator(label: EventLabel) -> bool:
    return label.category not in COMPUTATION | UPDATES
