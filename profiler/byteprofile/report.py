"""How long each operation takes: over all repetitions, against another run, by category, and kernel by kernel."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from echograph.errors import DataError, MissingExtraError, OutputError, UsageError
from echograph.ir.columns import Int64
from echograph.ir.files import check_writable, write_whole
from echograph.profiler.analyses.statistics import groups
from echograph.profiler.analyses.table import AnswerTable, from_rows
from echograph.profiler.byteprofile.reader import (
    COMPUTATION,
    UPDATES,
    EventLabel,
    Events,
    Job,
    find_job,
    is_kineto,
)
from echograph.units import PS_PER_MS, PS_PER_US

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


def statistics(events: Events) -> Statistics:
    """What each operation took.

    Raises:
        DataError: there is no event.
    """
    if not len(events):
        raise DataError("the trace has no events with a duration: nothing to count")
    found = groups(events.label)
    rows = sorted(np.split(found.order, found.first[1:]), key=lambda its: int(its[0]))
    took = [events.duration[its] for its in rows]
    return Statistics(
        labels=tuple(events.labels[events.label[its[0]]] for its in rows),
        counts=np.array(list(map(len, took))),
        total=np.array([its.sum() for its in took]),
        shortest=np.array([its.min() for its in took]),
        longest=np.array([its.max() for its in took]),
        variance=np.array([np.var(its) for its in took]) / PS_PER_MS**2,
        notes=events.notes,
    )


def statistics_of(path: Path) -> Statistics:
    """What each operation took in a trace, or in the traces of a folder.

    Raises:
        InputError: a trace cannot be read.
        DataError: a trace is broken, or has no event.
    """
    return statistics(find_job(path).events())


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


def compared_operations(
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
            counted = statistics(first.events().relabelled(lambda label: label._replace(key="")))
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
_MOST_US = 1e12


def mapping_of(operators: Path, kernels: Path | None = None, offset_us: float = 0.0) -> AnswerTable:
    """The kernels of operators: by time from two traces, by launches from a PyTorch trace alone.

    Args:
        operators: their trace.
        kernels: that of the kernels; None where both are in one.
        offset_us: microseconds that are added to the kernels' times.

    Raises:
        UsageError: a trace of kernels is missing, or an offset is given without one, or is none.
        InputError: a trace cannot be read.
        DataError: a trace is broken, or has no operator, or no kernel.
    """
    if not abs(offset_us) <= _MOST_US:
        raise UsageError(f"--offset-us {offset_us:g}: give at most 1e12")
    if kernels is not None:
        found = (find_job(path).events() for path in (operators, kernels))
        return mapping(*found, offset=round(offset_us * PS_PER_US))
    if offset_us:
        raise UsageError("--offset-us: is for a trace of kernels: give one after that of the operators")
    if operators.is_file() and not is_kineto(operators):
        raise UsageError(f"{operators}: has operators alone: give the trace of their kernels after it")
    from echograph.profiler.analyses.sequences import operator_kernels
    from echograph.profiler.traces import read_traces

    return operator_kernels(read_traces(operators))


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
    wanted = operators.only(lambda label: label.category in COMPUTATION | UPDATES)
    device = kernels.only(lambda label: label.category in _KERNELS)
    work = device if len(device) else kernels.only(lambda label: label.category not in COMPUTATION | UPDATES)
    for what, found in (("operators (FW., BW., STEP)", wanted), ("kernels", work)):
        if not len(found):
            raise DataError(f"nothing to map: the trace has no {what}: give one of operators, then one of kernels")
    ran, shift = wanted.in_order(), work.origin - wanted.origin + offset
    counted: dict[tuple[EventLabel, EventLabel], list[int]] = defaultdict(list)
    outside = 0
    for (start, end, kernel), owner in zip(work.in_order(), _owners(ran, work, shift), strict=True):
        if owner is None:
            outside += 1
        else:
            counted[owner, kernel].append(end - start)
    runs = Counter(label for _, _, label in ran)
    place = {label: at for at, label in enumerate(wanted.labels)}
    rows = [
        (operator.name, kernel.name, len(times), sum(times) / PS_PER_MS, len(times) / runs[operator])
        for (operator, kernel), times in sorted(counted.items(), key=lambda item: place[item[0][0]])
    ]
    notes = [f"{outside} of {len(work)} kernels ran outside all operators"] * bool(outside)
    titles = ("operator", "kernel", "count", "total_ms", "per_operator")
    return from_rows(titles, rows, (*operators.notes, *kernels.notes, *notes))


def _owners(ran: Sequence[tuple[int, int, EventLabel]], work: Events, shift: int) -> Iterator[EventLabel | None]:
    """The operator that each kernel ran within, by the kernels' starts; None outside all of them.

    Args:
        ran: operators, by their starts.
        work: kernels.
        shift: picoseconds that are added to the kernels' times.
    """
    begins = [begin for begin, _, _ in ran]
    # Until when any operator up to each lasts: further back than where this is over, none overlaps.
    lasting = list(accumulate((end for _, end, _ in ran), max))
    for start, end, _ in work.in_order():
        start, end = start + shift, end + shift
        most, owner = -1, None
        at = bisect_right(begins, end) - 1
        while at >= 0 and lasting[at] >= start:
            shared = min(end, ran[at][1]) - max(start, begins[at])
            if shared > most:
                most, owner = shared, ran[at][2]
            at -= 1
        yield owner if most * _HALF >= end - start else None


FORMATS = ("png", "svg", "pdf")


def check_plot(path: Path | None) -> None:
    """Fails before any work where a chart is asked for that cannot be drawn.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OutputError: the file's ending is none of `FORMATS`, or it cannot be written.
    """
    if path is None:
        return
    if path.suffix.removeprefix(".").lower() not in FORMATS:
        raise OutputError(f"cannot write {path}: the ending is the format: give one of .{', .'.join(FORMATS)}")
    if find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", "report", "a chart (--plot)")
    check_writable(path)


def draw_settings(settings: Sequence[Setting], output: Path | None) -> None:
    """Draws the average of every operation (x, a colour a category) in every setting (y).

    Args:
        settings: one a row of bars.
        output: the picture; None where none is asked for.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OutputError: the file cannot be written.
    """
    check_plot(output)
    if output is None:
        return
    import matplotlib
    from matplotlib.figure import Figure

    places: dict[tuple[str, str], int] = {}
    keys = {(category, name) for one in settings for category, names in one.averages.items() for name in names}
    for key in sorted(keys):
        places[key] = len(places)
    categories = sorted({category for category, _ in keys})
    figure = Figure(figsize=(10, 7), layout="constrained")
    axes = figure.add_subplot(projection="3d")
    for row, one in enumerate(settings):
        for number, category in enumerate(categories):
            averages = one.averages.get(category, {})
            x = [places[category, name] for name in averages]
            first = all(category not in other.averages for other in settings[:row])
            label = category if averages and first else None
            axes.bar(x, list(averages.values()), zs=row, zdir="y", color=f"C{number % 10}", alpha=0.8, label=label)
    axes.set_xlabel("operation")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_zlabel("average, ms")
    several = len({one.worker for one in settings}) > 1
    names = [f"{Path(one.name).name} wk{one.worker}" if several else Path(one.name).name for one in settings]
    axes.set_yticks(range(len(settings)), names)
    figure.legend(loc="upper left")
    content = io.BytesIO()
    kind = output.suffix.removeprefix(".").lower()
    # No dates and no random identifiers: the same settings give the same bytes.
    undated = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    with matplotlib.rc_context({"svg.hashsalt": "echograph"}):
        figure.savefig(content, format=kind, metadata=undated)
    write_whole(output, [content.getvalue()])
