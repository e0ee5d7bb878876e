"""All that a file says of single events: what the columns do not keep is read anew when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from echograph.errors import DataError
from echograph.ir.columns import Int64
from echograph.profiler.traces.events import EventStream
from echograph.profiler.traces.trace import Bool, Trace


def whole_events(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every event of a file with its position, whatever its phase, as the file has it; `args` are always a dict.

    Times that need more digits than a float has are rounded; a `Trace` has them exactly.

    Raises:
        InputError: the file cannot be read, or is broken.
    """
    index = 0
    for batch in EventStream(path, dict):
        for event in batch:
            if not isinstance(event.get("args"), dict):
                event["args"] = {}
            yield index, event
            index += 1


def details(trace: Trace, rows: Int64 | Bool) -> list[dict[str, Any]]:
    """What the trace's file says of some rows (shapes, grids, types, ...), in the order of the rows.

    Args:
        trace: a trace whose file is still where it was.
        rows: row numbers, or which rows.

    Raises:
        InputError: the file is gone or cannot be read.
        DataError: it is not the file that the trace was read from.
    """
    chosen = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
    wanted = set(trace.index[chosen].tolist())
    last = max(wanted, default=-1)
    found: dict[int, dict[str, Any]] = {}
    for index, event in whole_events(Path(trace.path)) if wanted else ():
        if index in wanted:
            found[index] = event
        if index >= last:
            break
    answer = []
    for row in chosen.tolist():
        event = found.get(int(trace.index[row]), {})
        if event.get("name") != trace.text(row):
            raise DataError(
                f"{trace.path}: changed since it was read: event {trace.index[row]} is another; read anew"
            )
        answer.append(event)
    return answer
