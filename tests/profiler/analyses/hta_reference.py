"""What HTA answered on the published traces, and its clock."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from echograph.profiler.analyses.table import AnswerTable
from echograph.profiler.traces import TraceSet, read_traces

US = 1_000_000
PUBLISHED = (
    "a100-nccl-args",
    "critical-path-alexnet",
    "critical-path-simple-add",
    "dlrm-v100-8-ranks",
    "mi300x-resnet",
    "v100-ddp-216k-events",
    "v100-float-timestamps",
)


@cache
def traces(data: Path, name: str) -> TraceSet:
    """The traces of one set, as HTA reads them: without the last step, times in whole microseconds."""
    return TraceSet({rank: whole_microseconds(trace) for rank, trace in exact(data, name).items()})


@cache
def exact(data: Path, name: str) -> TraceSet:
    """The traces of one set with every digit that the file has."""
    return read_traces(data / "traces" / name)


def whole_microseconds(trace: Any) -> Any:
    """HTA's clock on traces with decimals: floats of microseconds, starts rounded up and ends down.

    Some durations become -1 us. That is HTA's defect; its clock stands here, and not in the project, so that all
    that follows from it can be told from what an analysis does.
    """
    if trace.tick == US:
        return trace
    start = np.array([t / US for t in (trace.origin + trace.start.astype(object)).tolist()])
    duration = trace.duration / US
    first, last = np.ceil(start), np.floor(start + duration)
    origin = int(trace.origin // US)
    changed = {"start": (first - origin).astype(np.int64) * US, "duration": (last - first).astype(np.int64) * US}
    return dataclasses.replace(trace, origin=origin * US, **changed)


def answer(data: Path, name: str, file: str) -> list[dict[str, Any]] | None:
    """HTA's answer from one file, rows by column; None where it had none."""
    for path in (data / "hta_reference" / name / file, data / "hta_reference" / name / f"{file}.gz"):
        if path.exists():
            raw = path.read_bytes()
            text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
            return [{k: _value(v) for k, v in row.items()} for row in csv.DictReader(io.StringIO(text))]
    return None


def numbers(data: Path, name: str, file: str, keys: int) -> list[dict[str, Any]]:
    """A table of statistics, which HTA writes with three lines of titles; `keys` columns name the group."""
    lines = (data / "hta_reference" / name / file).read_text().splitlines()
    titles = lines[2].split(",")[:keys] + lines[1].split(",")[keys:]
    return [dict(zip(titles, map(_value, row), strict=True)) for row in csv.reader(lines[3:])]


def _value(text: str) -> Any:
    try:
        number = float(text)
    except ValueError:
        return text or None
    return None if math.isnan(number) else number


def close(ours: Any, theirs: Any, within: float = 0.0) -> bool:
    """Equal text, or numbers within 0.1 % or `within`."""
    if isinstance(ours, str) or isinstance(theirs, str) or ours is None or theirs is None:
        return bool(ours == theirs)
    return math.isclose(ours, theirs, rel_tol=1e-3, abs_tol=max(within, 1e-9))


def compare(
    ours: AnswerTable, theirs: list[dict[str, Any]], keys: tuple[str, ...], within: float = 0.0
) -> list[str]:
    """Differences of two tables, rows matched by `keys`: a row more or less, unequal counts, numbers not close."""
    mine = {tuple(row[k] for k in keys): row for row in ours.records()}
    other = {tuple(row[k] for k in keys): row for row in theirs}
    if len(mine) != len(ours) or len(other) != len(theirs):
        return [f"{keys} do not tell rows apart"]
    found = [f"{key} is only ours" for key in mine.keys() - other.keys()]
    found += [f"{key} is only HTA's" for key in other.keys() - mine.keys()]
    for key in mine.keys() & other.keys():
        for column, value in ((c, v) for c, v in other[key].items() if c):
            same = mine[key][column] == value if "count" in column else close(mine[key][column], value, within)
            if not same:
                found.append(f"{key} {column}: {mine[key][column]} is not HTA's {value}")
    return sorted(found)
