"""What each part of a step takes: data loading, forward, backward, recomputation, optimizer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from echograph.ir.columns import Bools, Int64
from echograph.ir.intervals import union
from echograph.ir.types import Phase
from echograph.profiler.analyses.table import AnswerTable, from_rows
from echograph.profiler.analyses.work import US, KernelKind, kernel_kinds
from echograph.profiler.traces.origins import origins
from echograph.profiler.traces.relations import step_of_rows
from echograph.profiler.traces.trace import NONE, OPERATORS, Trace, TraceSet

LOADING = "data loading"
_TITLES = ("rank", "step", "phase", "host_time(us)", "device_time(us)", "communication_time(us)", "kernels")


def phases(traces: TraceSet) -> AnswerTable:
    """What each part of a step takes, on the host and on the devices.

    Columns: `rank`; `step`, empty for what is in none; `phase`: `data loading` within `enumerate(DataLoader)`,
    `optimizer` within `Optimizer.step` and the like, `backward` within autograd's functions, `recompute` for
    forward operators that run in these, `forward` for all else; `host_time(us)` during which an operator or
    annotation of the phase runs on any thread; `device_time(us)` during which work runs that they launched,
    communication left out; `communication_time(us)` the same of communication; `kernels`, copies and sets of both.
    """
    rows, notes = [], list(traces.notes)
    for rank, trace in traces.items():
        found = origins(trace)
        phase = np.array(found.phase, np.int64)
        loads, step = np.array(found.loads, np.bool_), step_of_rows(trace)
        host = trace.of_category(OPERATORS) | (
            trace.of_category({"user_annotation"}) & _marks(trace, phase, loads)
        )
        device = trace.on_device
        communicates = device & (kernel_kinds(trace) == KernelKind.COMMUNICATION)
        for number in np.unique(step[host | device]).tolist():
            for name, of in _parts(phase, loads):
                here = of & (step == number)
                works = int((here & device).sum())
                spent = [_length(trace, here & one) for one in (host, device & ~communicates, communicates)]
                if works or any(spent):
                    rows.append((rank, number if number != NONE else None, name, *spent, works))
    if not rows:
        notes.append("phases: no operator was traced")
    return from_rows(_TITLES, rows, notes)


def _parts(phase: Int64, loads: Bools) -> Iterator[tuple[str, Bools]]:
    yield LOADING, loads
    for one in Phase:
        yield one.name.lower(), (phase == one) & ~loads


def _marks(trace: Trace, phase: Int64, loads: Bools) -> Bools:
    """Annotations that stand for a phase, not those around several."""
    marks: Bools = loads | (phase == Phase.OPTIMIZER)
    return marks & ~trace.on_device


def _length(trace: Trace, rows: Bools) -> float:
    begin, end = union(trace.start[rows], trace.end[rows])
    return float((end - begin).sum()) / US
