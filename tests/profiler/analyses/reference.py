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

from echograph.profiler.analyses.table import Table
from echograph.profiler.traces import TraceSet, read_traces

US = 1_000_000
SETS = (
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

    Some durations become -1 us. That is HTA's defect; its clock stands here, and not in the project, so that all that
    follows from it can be told from what an analysis does.
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


def _value(text: str) -> Any:
    try:
        number = float(text)
    except ValueError:
        return text or None
    return None if math.isnan(number) else number


def close(ours: Any, theirs: Any, within: float = 0.0) -> bool:
    """Equal text, or numbers within 0.1 %, or `within`, or rounding."""
    if isinstance(ours, str) or isinstance(theirs, str) or ours is None or theirs is None:
        return bool(ours == theirs)
    return math.isclose(ours, theirs, rel_tol=1e-3, abs_tol=max(within, 1e-9))


def compare(ours: Table, theirs: list[dict[str, Any]], keys: tuple[str, ...], within: float = 0.0) -> list[str]:
    """Differences between two tables, rows matched by `keys`; columns that HTA has, and no row more or less."""
    mine = {tuple(row[k] for k in keys): row for row in ours.records()}
    other = {tuple(row[k] for k in keys): row for row in theirs}
    found = [f"only ours: {key}" for key in mine.keys() - other.keys()]
    found += [f"only HTA's: {key}" for key in other.keys() - mine.keys()]
    for key in mine.keys() & other.keys():
        for column, value in other[key].items():
            if column and not close(mine[key][column], value, within):
                found.append(f"{key} {column}: {mine[key][column]} is not HTA's {value}")
    return sorted(found)
