"""What CUDA graphs were captured from: the call that each of their kernels, copies and sets repeats.

Between the begin and the end of a capture, calls launch nothing: they add a node to a graph. Where a trace has
both that and launches of the graph, each work of a launch is one of these calls, in their order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from echograph.ir.columns import Bools
from echograph.profiler.traces.events import details
from echograph.profiler.traces.relations import launches
from echograph.profiler.traces.trace import CALLS, COPIES, Trace

_BEGIN, _END, _LAUNCH = "StreamBeginCapture", "StreamEndCapture", "GraphLaunch"
_ADDS = ("LaunchKernel", "LaunchCooperative", "Memcpy", "Memset")
_COPY = ""
"""What stands for the names of copies and sets, which calls and work have each their own."""


class _Capture(NamedTuple):
    """The calls of one capture: when it ended, their rows, and the kernels that they add (None: not said)."""

    end: int
    rows: list[int]
    names: list[str | None]


class CapturedCalls(NamedTuple):
    """What work that CUDA graphs launched was captured from.

    Attributes:
        calls: by row of the work, the row of the captured call, maybe in another trace.
        guessed: how many launches fit several captures, which were taken in turns.
    """

    calls: dict[int, int]
    guessed: int

    def notes(self, rank: int) -> list[str]:
        """A line if any of it is guessed."""
        if not self.guessed:
            return []
        return [
            f"rank {rank}: {self.guessed:,} launches of CUDA graphs fit several captures with the same kernels, "
            "which are taken in turns: a guess"
        ]


def graph_launches(trace: Trace) -> dict[int, list[int]]:
    """The work of each launch of a CUDA graph in the order of its nodes, by the row of the call, by time."""
    found = launches(trace)
    of_graph = _called(trace, (_LAUNCH,))[found.calls]
    calls, works = found.calls[of_graph], found.works[of_graph]
    node = trace.argument("graph node id")[works]
    order = np.lexsort((trace.index[works], trace.start[works], node, calls, trace.start[calls]))
    launched: dict[int, list[int]] = defaultdict(list)
    for call, work in zip(calls[order].tolist(), works[order].tolist(), strict=True):
        launched[call].append(work)
    return launched


def captured_calls(trace: Trace, captured: Trace | None = None) -> CapturedCalls:
    """The captured call of each work that a CUDA graph launched, by row, as far as a trace has it.

    A launch is of the capture before it that has as many calls, and the same names of kernels where the calls say
    them (AMD's do). Where none has and all are said, calls may be left over: they add what shows as no work. Where
    several captures fit by their names, launches take them in turns if they are a multiple of them, a guess; else
    nothing tells which it is.

    Args:
        trace: has the launches.
        captured: has the captures, and is of earlier; None: the same trace.

    Raises:
        InputError: the trace's file is gone.
    """
    launched = graph_launches(trace)
    captures = _captures(captured or trace) if launched else []
    alike: dict[tuple[int, tuple[str, ...]], list[list[int]]] = defaultdict(list)
    for call, works in launched.items():
        earlier = (captured is not None or one.end <= trace.start[call] for one in captures)
        before = sum(earlier)
        alike[before, tuple(_name(trace, work) for work in works)].append(works)
    found, guessed = dict[int, int](), 0
    for (before, names), same in alike.items():
        known = captures[:before]
        same_length = [one for one in known if len(one.rows) == len(names)]
        fitting = _fitting(same_length, names) or _fitting(known, names)
        if len(fitting) == 1 or (fitting and len(same) % len(fitting) == 0 and _says(captures, fitting)):
            guessed += len(same) * (len(fitting) > 1)
            for turn, works in enumerate(same):
                found |= zip(works, fitting[turn % len(fitting)], strict=True)
    return CapturedCalls(found, guessed)


def _says(captures: Sequence[_Capture], fitting: list[list[int]]) -> bool:
    """Whether calls say the kernels that they add; else captures of equally many calls have nothing in common."""
    of = {row for rows in fitting for row in rows}
    return not any(
        name is None for one in captures for row, name in zip(one.rows, one.names, strict=True) if row in of
    )


def _called(trace: Trace, words: Sequence[str]) -> Bools:
    """Which rows are calls whose name has one of the words."""
    has = np.array([*(any(word in text for word in words) for text in trace.strings), False])
    called: Bools = trace.of_category(CALLS) & has[trace.name]
    return called


def _captures(trace: Trace) -> list[_Capture]:
    """The captures in the order in which they ended; of calls in that time, those that launched nothing."""
    begins, ends = (trace.start[_called(trace, (word,))] for word in (_BEGIN, _END))
    adds = _called(trace, _ADDS) & ~_called(trace, (_LAUNCH,))
    adds[launches(trace).calls] = False
    calls = np.flatnonzero(adds)
    calls = calls[np.lexsort((trace.index[calls], trace.start[calls]))]
    spans = [(int(begins[begins < end].max()), end) for end in np.sort(ends).tolist() if (begins < end).any()]
    within = [calls[(trace.start[calls] > begin) & (trace.start[calls] < end)] for begin, end in spans]
    said = details(trace, np.concatenate(within)) if within else []
    named, found = iter(said), list[_Capture]()
    for (_, end), rows in zip(spans, within, strict=True):
        names = [_added(trace.text(row), next(named).get("args") or {}) for row in rows.tolist()]
        found.append(_Capture(end, rows.tolist(), names))
    return found


def _added(call: str, arguments: dict[str, object]) -> str | None:
    if "Kernel" not in call:
        return _COPY
    name = arguments.get("kernel")
    return name if isinstance(name, str) else None


def _name(trace: Trace, work: int) -> str:
    return _COPY if trace.strings[trace.category[work]] in COPIES else trace.text(work)


def _fitting(captures: Sequence[_Capture], names: Sequence[str]) -> list[list[int]]:
    """The calls that a launch repeats, by each of the captures of which it may be."""
    return [rows for one in captures if (rows := _paired(one, names)) is not None]


def _paired(capture: _Capture, names: Sequence[str]) -> list[int] | None:
    """The call of each work of a launch, or None if it is no launch of the capture."""
    rows, called = capture.rows, capture.names
    if len(rows) == len(names):
        fits = all(said in (None, name) for said, name in zip(called, names, strict=True))
        return rows if fits else None
    left = iter(zip(rows, called, strict=True))
    if None in called:
        return None
    paired = [next((row for row, said in left if said == name), None) for name in names]
    return None if None in paired else [row for row in paired if row is not None]
