"""Copies of a trace's file in which some events say more, for viewers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any

from echograph.errors import DataError
from echograph.profiler.traces.events import EventStream
from echograph.profiler.traces.trace import Trace

_MarkedRows = Mapping[int, Mapping[str, Any]]
_PS_DIGITS = 6


def marked_copy(
    trace: Trace,
    marks: Mapping[int, Mapping[str, Any]],
    after: Callable[[_MarkedRows], Iterator[str]] = lambda _: iter(()),
) -> Iterator[bytes]:
    """The text of a trace's file with further arguments for some of its events, piece by piece.

    Times of the trace's events are exact; those of events that a trace does not keep have the digits of a float.

    Args:
        trace: a trace whose file is still where it was.
        marks: what is added to the `args` of a row's event.
        after: further events, as JSON; it is given `pid` and `tid` of the marked rows, as the file has them.

    Raises:
        InputError: the file is gone.
        DataError: it is not the file that was read.
    """
    rows = {int(trace.index[row]): row for row in marks}
    starts = dict(zip(trace.index.tolist(), trace.start.tolist(), strict=True))
    stream, header = EventStream(Path(trace.path), dict), EventStream(Path(trace.path)).head()
    yield (json.dumps(header)[:-1] + (", " if header else "") + '"traceEvents": [').encode()
    places: dict[int, dict[str, Any]] = {}
    separator = "\n"
    for index, event in enumerate(chain.from_iterable(stream)):
        marked = event
        if (row := rows.get(index)) is not None:
            if event.get("name") != trace.text(row):
                raise DataError(f"{trace.path}: changed since it was read: event {index} is another; read anew")
            places[row] = {name: event.get(name) for name in ("pid", "tid")}
            args = event.get("args")
            marked = event | {"args": (args if isinstance(args, dict) else {}) | dict(marks[row])}
        yield (separator + exact_json(marked, trace, starts.get(index))).encode()
        separator = ",\n"
    yield "".join(separator + event for event in after(places)).encode()
    rest = {key: value for key, value in stream.header.items() if key not in header}
    yield ("\n]" + (", " + json.dumps(rest)[1:] if rest else "}") + "\n").encode()


def exact_json(event: Mapping[str, Any], trace: Trace, start: int | None) -> str:
    """An event as JSON; a float has too few digits for nanoseconds since 1970.

    Args:
        event: as a file has it.
        trace: whose clock counts.
        start: picoseconds of the trace at which it starts; None for the time that it says itself.
    """
    if start is None:
        return json.dumps(event)
    rest = json.dumps({key: value for key, value in event.items() if key != "ts"})
    return f'{rest[:-1]}, "ts": {Decimal(trace.origin + start).scaleb(-_PS_DIGITS):f}}}'
