"""What recording cost a rank, moment by moment, so that its durations can be had without."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import median

from echograph.profiler.record.folder import METADATA, Hooks, read_hooks, read_metadata
from echograph.profiler.record.overhead import COLLECTIVE, Overhead, counted_as
from echograph.profiler.traces.relations import Stacks
from echograph.profiler.traces.trace import NONE, OPERATORS, Trace, TraceSet
from echograph.units import PS_PER_NS, to_ps

_CALL = "c10d::"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a recording says of how a rank was observed.

    Attributes:
        overhead: what recording costs; None where it was not measured.
        hooks: when hooks ran.
        free_ps: a step in which nothing was observed, the median; 0 without any.
    """

    overhead: Overhead | None
    hooks: Hooks = field(default_factory=Hooks)
    free_ps: int = 0


class Costs:
    """What recording cost a thread, by the moment at which it was spent.

    Args:
        moments: picoseconds of the trace, and picoseconds that it cost.
    """

    def __init__(self, moments: list[tuple[int, int]]) -> None:
        moments.sort()
        self._times = [time for time, _ in moments]
        self._until = list(accumulate((cost for _, cost in moments), initial=0))

    def between(self, begin: int, end: int) -> int:
        """Of the moments from `begin` on, before `end`."""
        return self._until[bisect_left(self._times, end)] - self._until[bisect_left(self._times, begin)]


def observed(traces: TraceSet) -> dict[int, Observed]:
    """What is known of the ranks whose traces lie in a recording's folders.

    Raises:
        InputError: a file of the recording cannot be read.
    """
    found = {}
    for rank, trace in traces.items():
        folder = Path(trace.path).parent
        if (folder / METADATA).is_file():
            about = read_metadata(folder)
            free = about.seconds("free")
            found[rank] = Observed(
                overhead=about.overhead, hooks=read_hooks(folder), free_ps=to_ps(median(free)) if free else 0
            )
    return found


def costs(trace: Trace, stacks: Stacks, thread: Callable[[int], int], seen: Observed | None) -> dict[int, Costs]:
    """What recording cost each thread; nothing where it is not known.

    Args:
        trace: the rank's.
        stacks: what ran within what.
        thread: the number of a row's thread.
        seen: how the rank was observed.
    """
    if seen is None or seen.overhead is None:
        return {}
    moments: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row, kind in _kinds(trace, stacks):
        moments[thread(row)].append((int(trace.start[row]), _cost(seen.overhead, kind)))
    base, module = trace.header.get("baseTimeNanoseconds"), to_ps(seen.overhead.module_s)
    if isinstance(base, int):
        origin = base * PS_PER_NS + trace.origin
        moments[0] += [(time_ns * PS_PER_NS - origin, module) for time_ns in seen.hooks.entered_ns]
    return {number: Costs(found) for number, found in moments.items()}


def _cost(overhead: Overhead, kind: str) -> int:
    seconds = getattr(overhead, f"{kind}_s")
    return to_ps(overhead.operator_s if seconds is None else seconds)


def _kinds(trace: Trace, stacks: Stacks) -> Iterator[tuple[int, str]]:
    """The operators that cost something, and of which kind they are."""
    operators, parents = trace.of_category(OPERATORS).tolist(), stacks.parent.tolist()
    around: dict[int, int] = {}
    for row in stacks.order.tolist():
        parent = parents[row]
        around[row] = outer = parent if parent == NONE or operators[parent] else around[parent]
        if operators[row]:
            name = trace.text(row)
            kind = counted_as(name, None if outer == NONE else trace.text(outer))
            if kind is not None:
                yield row, COLLECTIVE if name.startswith(_CALL) else kind
