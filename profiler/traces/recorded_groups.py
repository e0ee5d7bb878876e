"""The groups of collectives where the profiler does not say them, but a trace of collectives beside it does."""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path

from echograph.errors import FormatError, InputError
from echograph.ir.comms.reader import NativeSource
from echograph.profiler.traces.trace import Trace
from echograph.units import PS_PER_NS

NAME = "comms.jsonl"
# What a stamp within a call may be before or after the profiler's stamps of that call.
_NEAR_PS = 100_000_000


class RecordedGroups:
    """The calls of a rank with their groups, by the time at which they were made; none without such a trace.

    A recording has both traces in one folder, and their times are of one clock.
    """

    def __init__(self, trace: Trace) -> None:
        self.times: list[int] = []
        self.groups: list[tuple[str, tuple[int, ...], str]] = []
        path, base = Path(trace.path).with_name(NAME), trace.header.get("baseTimeNanoseconds")
        if not path.is_file() or not isinstance(base, int):
            return
        source = NativeSource(path)
        try:
            source.open()
            found = [
                (queued * PS_PER_NS - base * PS_PER_NS - trace.origin, what.group, what.channel)
                for rows in source.rows()
                for number, _, queued, *_ in rows.tolist()
                if (what := source.whats[number]) is not None
            ]
        except (InputError, FormatError):
            return
        found.sort()
        self.times = [time for time, *_ in found]
        self.groups = [(name, source.groups.get(name, ()), channel) for _, name, channel in found]

    def of(self, begin: int, end: int) -> tuple[str, tuple[int, ...], str]:
        """Name, ranks and channel of what was called between two moments; "", none and "" where unknown."""
        at = bisect_left(self.times, begin - _NEAR_PS)
        fitting = range(at, bisect_left(self.times, end + _NEAR_PS))
        nearest = min(
            fitting, key=lambda one: max(begin - self.times[one], self.times[one] - end, 0), default=None
        )
        return ("", (), "") if nearest is None else self.groups[nearest]
