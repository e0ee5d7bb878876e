"""Events of which a file has the begin and the end apart: each begin with its end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec

from echograph.profiler.traces.events import NOTHING, Arguments, Begin, End


class Pair(NamedTuple):
    """A begin with its end.

    Attributes:
        at: position of the begin among the file's events.
        begin: what it says.
        duration: microseconds, exact; NaN where one of the two does not say when it was.
        args: of both; where they differ, the end's.
    """

    at: int
    begin: Begin
    duration: Decimal
    args: Arguments


class Pairs:
    """Matches ends with begins: an end is that of the last begin of its process and thread that is still open.

    Attributes:
        unmatched: ends that had no begin, so far.
    """

    def __init__(self) -> None:
        self.unmatched = 0
        self._open: dict[tuple[str, str], list[tuple[int, Begin]]] = defaultdict(list)

    @property
    def open(self) -> int:
        """Begins that have no end, so far."""
        return sum(map(len, self._open.values()))

    def closed(self, events: Iterable[tuple[int, Any]]) -> Iterator[Pair]:
        """The pairs that end among further events of a file, by their ends.

        Args:
            events: events with their positions; those that are no begin and no end are passed over.
        """
        for index, event in events:
            if type(event) is Begin:
                self._open[str(event.pid), str(event.tid)].append((index, event))
            elif type(event) is End:
                if around := self._open[str(event.pid), str(event.tid)]:
                    at, begin = around.pop()
                    yield Pair(at, begin, _between(begin.ts, event.ts), _joined(begin.args, event.args))
                else:
                    self.unmatched += 1


def _between(begin: Decimal | None, end: Decimal | None) -> Decimal:
    if begin is None or end is None or not (begin.is_finite() and end.is_finite()):
        return Decimal("NaN")
    return end - begin


def _joined(first: Arguments | None, last: Arguments | None) -> Arguments:
    first, last = first or NOTHING, last or NOTHING
    fields = Arguments.__struct_fields__
    said = {name: getattr(last, name) for name in fields if getattr(last, name) != getattr(NOTHING, name)}
    return msgspec.structs.replace(first, **said)
