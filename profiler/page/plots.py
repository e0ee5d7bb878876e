"""Which chart shows which table: one line an analysis; what has none is drawn by its first number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from echograph.profiler.analyses.memory import CATEGORIES
from echograph.profiler.analyses.table import AnswerTable
from echograph.profiler.page import charts
from echograph.profiler.page.frame import with_unit

# Of a table with more rows than people compare, the largest are drawn.
MOST = 24
_SERIES, _OTHER = 6, 7


class Plot(Protocol):
    """Draws a table."""

    def draw(self, table: AnswerTable, most: int = MOST) -> str:
        """The table as a chart, HTML; at most so many bars or lines.

        Args:
            table: of the columns that the plot names.
            most: of its rows.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A bar for each label, summed over the rows that share it.

    Attributes:
        label: columns that name a bar.
        value: column of its length; or `parts` are columns that add up to it.
        by: column by whose values a bar is divided.
        parts: colours of the parts of a bar, in their order, by column or by the values of `by`.
        unit: of the values.
        largest: the largest bars first; else in the order of the table.
    """

    label: Sequence[str]
    value: str = ""
    by: str = ""
    parts: Mapping[str, int] = field(default_factory=dict)
    unit: str = "us"
    largest: bool = False

    def draw(self, table: AnswerTable, most: int = MOST) -> str:
        """The table as bars."""
        sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for row in table.records():
            own = sums[_label(row, self.label)]
            for column in [self.value] if self.value else self.parts:
                own[str(row[self.by]) if self.by else column] += row[column] or 0.0
        order = list(sums)
        if self.largest:
            order.sort(key=lambda label: -sum(map(abs, sums[label].values())))
        drawn = {name for own in sums.values() for name, value in own.items() if value}
        colours = {name: colour for name, colour in self.parts.items() if name in drawn}
        colours |= dict.fromkeys(sorted(drawn - set(colours)), _OTHER if self.parts else 0)
        rows = [(label, [sums[label].get(name, 0.0) for name in colours]) for label in order[:most]]
        shown = [name.removesuffix("(us)").rstrip().replace("_", " ") for name in colours]
        rest = _rest(len(order), most, "bars", self.largest)
        return charts.bars(rows, shown, self.unit, list(colours.values())) + rest


@dataclass(frozen=True, kw_only=True)
class Lines:
    """A line for each group of rows; in a table by time.

    Attributes:
        x: column of the time, microseconds.
        y: column of the value.
        by: columns that tell lines apart.
        unit: of the value.
    """

    x: str
    y: str
    by: Sequence[str]
    unit: str = ""

    def draw(self, table: AnswerTable, most: int = MOST) -> str:
        """The table as lines."""
        x, y = (np.asarray(table.columns[name], np.float64) for name in (self.x, self.y))
        groups: dict[str, list[int]] = defaultdict(list)
        for at, row in enumerate(zip(*(table.columns[name] for name in self.by), strict=True)):
            groups[_label(dict(zip(self.by, row, strict=True)), self.by)].append(at)
        highest = sorted(groups, key=lambda name: -float(y[groups[name]].max()))
        kept = [name for name in groups if name in highest[: min(most, _SERIES)]]
        series = {name: (x[groups[name]], y[groups[name]]) for name in kept}
        return charts.lines(series, "us", self.unit) + _rest(len(groups), _SERIES, "lines", True)


@dataclass(frozen=True, kw_only=True)
class ColumnLines:
    """A line for each of several columns.

    Attributes:
        x: column of the time, microseconds.
        ys: columns of the values.
        unit: of the values.
    """

    x: str
    ys: Sequence[str]
    unit: str = ""

    def draw(self, table: AnswerTable, most: int = MOST) -> str:
        """The table as lines; those that are 0 throughout are left out."""
        x, *ys = (np.asarray(table.columns[name], np.float64) for name in (self.x, *self.ys))
        return charts.lines({n: (x, y) for n, y in zip(self.ys, ys, strict=True) if y.any()}, "us", self.unit)


@dataclass(frozen=True, kw_only=True)
class Points:
    """A mark for each row that has both numbers, both above 0.

    Attributes:
        label: column that names it.
        x: column of the place.
        y: column of the value.
        units: of both.
        roof: column of the most that the value could be.
    """

    label: str
    x: str
    y: str
    units: tuple[str, str]
    roof: str

    def draw(self, table: AnswerTable, most: int = MOST) -> str:
        """The table as points."""
        rows = [(r[self.label], r[self.x], r[self.y]) for r in table.records() if r[self.x] and r[self.y]]
        roofs = [(r[self.x], r[self.roof]) for r in table.records() if r[self.x] and r[self.y] and r[self.roof]]
        return charts.points(rows, *self.units, roofs)


_MOST_RANKS = 128
# Of the mean of the ranks' time, the difference between ranks that takes all colour.
_LEAST_SHARE = 0.02


@dataclass(frozen=True, kw_only=True)
class RankHeat:
    """A row for each rank, with the more colour the more of a kind of time it has among the ranks.

    Attributes:
        columns: of the kinds of time, microseconds.
        whole: column that they add up to.
    """

    columns: Sequence[str]
    whole: str

    def draw(self, table: AnswerTable, most: int = MOST) -> str:
        """The table as a heat map; of many ranks the first."""
        records = table.records()
        shown = records[:_MOST_RANKS]
        if not shown:
            return ""
        rows = [(f"rank {row['rank']}", [self._cell(row, name) for name in self.columns]) for row in shown]
        least = _LEAST_SHARE * sum(row[self.whole] for row in shown) / len(shown)
        titles = [name.removesuffix("(us)") for name in self.columns]
        said = "The more colour, the more than other ranks. "
        said += "Click two ranks to compare them." if len(shown) > 1 else ""
        rest = _rest(len(records), _MOST_RANKS, "ranks", False)
        return f'<p class="note">{said}</p>{charts.compared_heat(titles, rows, "", least)}{rest}'

    def _cell(self, row: Mapping[str, Any], name: str) -> tuple[float, str]:
        share = f" ({row[name] / row[self.whole]:.0%})" if name != self.whole and row[self.whole] else ""
        return row[name], f"{with_unit(row[name], 'us')}{share}"


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """How often the values of a column occur."""

    value: str
    unit: str = "us"

    def draw(self, table: AnswerTable, most: int = MOST) -> str:
        """The table as a histogram."""
        values = [np.nan if value is None else value for value in table.columns[self.value]]
        return charts.histogram(np.asarray(values, np.float64), self.unit)


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """Where the values of each row lie.

    Attributes:
        label: columns that name a row.
        values: five columns: least, quartiles, largest.
        unit: of the values.
    """

    label: Sequence[str]
    values: Sequence[str] = ("min", "25%", "50%", "75%", "max")
    unit: str = "us"

    def draw(self, table: AnswerTable, most: int = MOST) -> str:
        """The table as ranges."""
        rows = [
            (_label(row, self.label), [row[name] for name in self.values])
            for row in table.records()
            if all(row[name] is not None for name in self.values)
        ]
        return charts.ranges(rows[:most], self.unit) + _rest(len(rows), most, "rows", False)


_CAUSES = {"host_wait": 1, "kernel_wait": 0, "other": 8}
_BOUNDS = {
    "gpu_compute_bound": 0,
    "gpu_communication_bound": 1,
    "gpu_memory_bound": 2,
    "cpu_bound": 3,
    "data_loading": 4,
    "gpu_kernel_launch_overhead": 5,
    "gpu_kernel_kernel_overhead": 6,
}
_ACROSS = {
    "compute": 0,
    "communication": 1,
    "memory": 2,
    "host": 3,
    "launch": 5,
    "host_gap": 8,
    "not_traced": 7,
}
KINDS = {"COMPUTATION": 0, "COMMUNICATION": 1, "MEMORY": 2}
_QUANTILES = ("1% (us)", "25% (us)", "50% (us)", "75% (us)", "99% (us)")

PLOTS: Mapping[str, Plot] = {
    "temporal-breakdown": Bars(
        label=["rank"],
        parts={"compute_time(us)": 0, "non_compute_time(us)": 1, "idle_time(us)": 8},
    ),
    "rank-times": RankHeat(
        columns=("computation(us)", "overlapped(us)", "communication(us)", "memory(us)", "idle(us)", "whole(us)"),
        whole="whole(us)",
    ),
    "kernel-types": Bars(label=["kernel_type"], value="sum"),
    "kernels": Bars(label=["name"], value="sum (us)", by="kernel_type", parts=KINDS, largest=True),
    "kernel-durations": Ranges(label=["name"], values=_QUANTILES),
    "overlap": Bars(label=["rank"], value="comp_comm_overlap_pctg", unit="%"),
    "idle": Bars(label=["rank", "device", "stream"], value="idle_time", by="idle_category", parts=_CAUSES),
    "idle-intervals": Ranges(label=["rank", "device", "stream", "idle_category"]),
    "launches": Histogram(value="launch_delay"),
    "launch-summary": Bars(label=["rank", "call"], value="launches", unit="", largest=True),
    "queue-length": Lines(x="ts", y="queue_length", by=["rank", "pid", "stream"]),
    "queue-length-summary": Ranges(label=["rank", "device", "stream"], unit=""),
    "queue-full": Bars(label=["rank", "device", "stream"], value="duration_at_max_queue_length"),
    "memory-bandwidth": Lines(x="ts", y="memory_bw_gbps", by=["rank", "pid", "name"], unit="GB/s"),
    "memory-bandwidth-summary": Ranges(label=["rank", "device", "name"], unit="GB/s"),
    "kernel-sequences": Bars(label=["pattern"], value="GPU kernel duration (us)", largest=True),
    "annotations": Bars(label=["name"], value="sum (us)", largest=True),
    "annotated-kernels": Bars(label=["user_annotation"], value="dur", largest=True),
    "stragglers": Bars(label=["rank"], value="mean_delay(us)"),
    "steps": Bars(label=["rank", "step"], value="dur"),
    "phases": Bars(label=["rank", "step", "phase"], value="device_time(us)"),
    "operators": Bars(label=["aten_op_name"], value="occurrence_count", unit="times", largest=True),
    "critical-path": Bars(label=["s_name"], value="duration", by="bound_by", parts=_BOUNDS, largest=True),
    "critical-path-summary": Bars(label=["rank"], value="duration", by="bound_by", parts=_BOUNDS),
    "call-stacks": Bars(label=["name"], value="self_time(us)", largest=True),
    "counters": Lines(x="ts", y="value", by=["rank", "counter"]),
    "memory-timeline": Lines(x="ts", y="allocated_bytes", by=["rank", "device"], unit="bytes"),
    "memory-peaks": Bars(label=["rank", "device", "quantity"], value="measured_bytes", unit="bytes"),
    "memory-holders": Bars(label=["place"], value="bytes", unit="bytes", largest=True),
    "memory-categories": ColumnLines(x="ts", ys=CATEGORIES, unit="bytes"),
    "execution-trace": Bars(label=["et_node_name"], value="dur", largest=True),
    "hardware-counters": Points(
        label="name",
        x="flops_per_byte",
        y="GFLOP/s",
        units=("operations a byte", "GFLOP/s"),
        roof="roof_GFLOP/s",
    ),
    "communication": Bars(label=["name", "group", "bytes"], value="sum(us)", largest=True),
    "kernel-origins": Bars(label=["operator"], value="dur", largest=True),
    "shapes": Points(
        label="operator",
        x="flops_per_byte",
        y="TFLOP/s",
        units=("operations a byte", "TFLOP/s"),
        roof="roof_TFLOP/s",
    ),
    "prediction-errors": Bars(
        label=["kind", "phase"], parts={"measured_there (us)": 1, "predicted (us)": 0}, largest=True
    ),
    "slow-kernels": Bars(label=["operator", "shapes"], value="sure_excess (us)", largest=True),
    "collectives": Bars(label=["name", "group", "number"], parts={"duration(us)": 1, "skew(us)": 8}, largest=True),
    "cross-rank-critical-path": Bars(
        label=["name"], value="duration(us)", by="bound_by", parts=_ACROSS, largest=True
    ),
    "cross-rank-critical-path-summary": Bars(label=["rank"], value="duration(us)", by="bound_by", parts=_ACROSS),
    "trace-diff": Bars(label=["name"], value="diff_duration", largest=True),
}


def draw(name: str, table: AnswerTable, most: int = MOST) -> str:
    """The chart of an analysis' table, HTML; nothing where the table is empty or has no numbers.

    Args:
        name: of the analysis.
        table: its answer.
        most: how many of its rows are drawn, where each has a mark of its own.
    """
    plot = PLOTS.get(name) or _by_first_number(table)
    return plot.draw(table, most) if plot is not None and len(table) else ""


def _by_first_number(table: AnswerTable) -> Plot | None:
    """Bars of the first column of numbers that is no name, under the columns before it."""
    records = table.records()[:1]
    if not records:
        return None
    for column, value in list(records[0].items())[1:]:
        if isinstance(value, float):
            texts = [name for name, text in records[0].items() if isinstance(text, str)]
            return Bars(label=texts[:1] or list(records[0])[:1], value=column, unit="", largest=True)
    return None


def _label(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    """One text as it is; of several columns, or a number, with what it is."""
    if len(columns) == 1 and isinstance(row[columns[0]], str):
        return row[columns[0]] or "(no name)"
    return ", ".join(str(row[name]) if isinstance(row[name], str) else f"{name} {row[name]}" for name in columns)


def _rest(found: int, most: int, what: str, largest: bool) -> str:
    if found <= most:
        return ""
    return f'<p class="note">The {"largest" if largest else "first"} {most} of {found:,} {what}.</p>'
