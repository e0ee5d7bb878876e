"""The profiler's steps."""

from __future__ import annotations

import numpy as np

from echograph.profiler.analyses.table import AnswerTable, from_rows
from echograph.profiler.analyses.work import US
from echograph.profiler.traces.relations import profiler_steps, step_of_rows
from echograph.profiler.traces.trace import TraceSet


def steps(traces: TraceSet) -> AnswerTable:
    """The steps of each rank, on the host and on its devices.

    Columns: `rank`; `step` the number after "ProfilerStep#"; `ts` microseconds since the first event of the job;
    `dur` microseconds on the host; `device_span(us)` from the start of the first to the end of the last work that
    was launched in the step, empty where there is none; `launched` how many kernels, copies and sets these are.
    """
    rows, notes = [], list(traces.notes)
    for rank, trace in traces.items():
        marks = profiler_steps(trace)
        if not len(marks.number):
            notes.append(f"rank {rank}: no profiler step: the job does not call profiler.step()")
        step, device = step_of_rows(trace), trace.on_device
        for number, start, end in zip(*(column.tolist() for column in marks), strict=True):
            works = np.flatnonzero(device & (step == number))
            span = int(trace.end[works].max() - trace.start[works].min()) / US if len(works) else None
            rows.append((rank, number, start / US, (end - start) / US, span, len(works)))
    return from_rows(("rank", "step", "ts", "dur", "device_span(us)", "launched"), rows, notes)
