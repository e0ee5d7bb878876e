"""A heap of ends, with four children a node.

An item is the line that leads an activity, or, below zero, the inverse (`~`) of a flow. The end of a flow changes
while it lasts, so each notes where it stands: an earlier end is moved, a later one put in when the former is due.
The first place may be vacant: most ends are followed by the beginning of the next task, which then takes it. Ends
at the same time come in no particular order (nothing depends on it), but in the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

# What `count` counts, here and for the flows: places of one array.
SIZE, VACANT, DUE, FLOWS, FREE, NODES, FREE_NODE, CHANGED, ROUND, LONGEST, NOW, COUNTS = range(12)

OPTIONS: Any = {"nogil": True, "error_model": "numpy", "_nrt": False}
"""Without numba's runtime: nothing is allocated, and references to arrays, else half of the time, not counted."""
Part = TypeVar("Part", bound=Callable[..., Any])


def part(function: Part) -> Part:
    """Compiles a part of `events_loop.run`, with which it is kept on disk."""
    return cast(Part, numba.njit(**OPTIONS)(function))


@part
def push(heap: Any, flows: Any, count: Any, time: Any, item: Any) -> None:
    """Adds an end."""
    if count[VACANT]:
        count[VACANT] = 0
        _sink(heap, flows, count[SIZE], 0, time, item)
        return
    count[SIZE] += 1
    _rise(heap, flows, count[SIZE] - 1, time, item)


@part
def settle(heap: Any, flows: Any, count: Any) -> None:
    """Fills the first place, if it is vacant."""
    if count[VACANT]:
        count[VACANT] = 0
        count[SIZE] -= 1
        last = heap[count[SIZE]]
        if count[SIZE]:
            _sink(heap, flows, count[SIZE], 0, last.time, last.item)


@part
def advance(heap: Any, flows: Any, flow: Any, time: Any) -> None:
    """Moves the end of a flow to an earlier time. The first place may not be vacant."""
    _rise(heap, flows, flows[flow].at, time, ~flow)


@part
def _rise(heap: Any, flows: Any, place: Any, time: Any, item: Any) -> None:
    while place > 0:
        above = (place - 1) >> 2
        if heap[above].time <= time:
            break
        _put(heap, flows, place, heap[above].time, heap[above].item)
        place = above
    _put(heap, flows, place, time, item)


@part
def _sink(heap: Any, flows: Any, size: Any, place: Any, time: Any, item: Any) -> None:
    while True:
        first = 4 * place + 1
        if first >= size:
            break
        least, soonest = first, heap[first].time
        for child in range(first + 1, min(first + 4, size)):
            if heap[child].time < soonest:
                least, soonest = child, heap[child].time
        if soonest >= time:
            break
        _put(heap, flows, place, soonest, heap[least].item)
        place = least
    _put(heap, flows, place, time, item)


@part
def _put(heap: Any, flows: Any, place: Any, time: Any, item: Any) -> None:
    heap[place].time, heap[place].item = time, item
    if item < 0:
        flows[~item].at = place
