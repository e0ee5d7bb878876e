"""What it costs the host to launch, and how long work waits after its launch."""

from __future__ import annotations

import numpy as np

from echograph.profiler.analyses.table import AnswerTable, from_rows, stacked
from echograph.profiler.analyses.work import US
from echograph.profiler.traces.relations import Launches, launches
from echograph.profiler.traces.trace import KERNELS, Trace, TraceSet

TITLES = ("rank", "correlation", "cpu_duration", "gpu_duration", "launch_delay", "call", "name")


def launched_work(trace: Trace, *, memory: bool = True) -> Launches:
    """The pairs of launches whose work is a kernel, a copy or a set, in order of the calls.

    Args:
        trace: one rank's.
        memory: copies and sets too.
    """
    calls, works = launches(trace)
    kept = trace.on_device[works]
    if not memory:
        kept &= trace.of_category(KERNELS)[works]
    order = np.argsort(trace.start[calls[kept]], kind="stable")
    return Launches(calls[kept][order], works[kept][order])


def launch_statistics(traces: TraceSet, *, memory: bool = True) -> AnswerTable:
    """Each launch: how long the call took the host, the work the device, and what lay between.

    Columns, microseconds: `rank`; `correlation`, the number that call and work share; `cpu_duration` of the call;
    `gpu_duration` of the work; `launch_delay` from the end of the call to the start of the work, 0 where the work
    starts before the call returns; `call` (`cudaLaunchKernel`, `hipLaunchKernel`, `cuLaunchKernelEx`, ...); `name`
    of the work. Every call that launched work is in it; that of a CUDA graph once for each of its kernels.

    Args:
        traces: the job's.
        memory: copies and sets too.
    """
    parts = []
    for rank, trace in traces.items():
        calls, works = launched_work(trace, memory=memory)
        delay = np.maximum(trace.start[works] - trace.end[calls], 0)
        parts.append(
            {
                "rank": np.full(len(calls), rank),
                "correlation": trace.correlation[calls],
                "cpu_duration": trace.duration[calls] / US,
                "gpu_duration": trace.duration[works] / US,
                "launch_delay": delay / US,
                "call": [trace.text(row) for row in calls],
                "name": [trace.text(row) for row in works],
            }
        )
    return stacked(parts, TITLES, traces.notes)


def launch_summary(
    traces: TraceSet,
    *,
    runtime_cutoff_us: float = 50.0,
    launch_delay_cutoff_us: float = 100.0,
    memory: bool = True,
) -> AnswerTable:
    """How many launches of each rank cost more than they should.

    Columns: `rank`; `call`; `launches`; `short_kernels`, launches whose work is shorter than its call, which
    itself is within the cutoff: the host cannot keep the device busy with them; `runtime_outliers`, calls longer
    than the cutoff; `launch_delay_outliers`, work that starts later than the cutoff after its call; `cpu_time(us)`
    of all calls, that of a CUDA graph once.

    Args:
        traces: the job's.
        runtime_cutoff_us: the longest call that is not an outlier, microseconds.
        launch_delay_cutoff_us: the longest delay that is not an outlier, microseconds.
        memory: copies and sets too.
    """
    rows = []
    for rank, trace in traces.items():
        calls, works = launched_work(trace, memory=memory)
        cpu, gpu = trace.duration[calls] / US, trace.duration[works] / US
        delay = (trace.start[works] - trace.end[calls]) / US
        for code in np.unique(trace.name[calls]):
            own = trace.name[calls] == code
            short = own & (gpu < cpu) & (cpu <= runtime_cutoff_us)
            slow, late = own & (cpu > runtime_cutoff_us), own & (delay > launch_delay_cutoff_us)
            spent = int(trace.duration[np.unique(calls[own])].sum()) / US
            counts = (int(which.sum()) for which in (own, short, slow, late))
            rows.append((rank, trace.strings[code], *counts, spent))
    titles = ("launches", "short_kernels", "runtime_outliers", "launch_delay_outliers", "cpu_time(us)")
    return from_rows(("rank", "call", *titles), rows, traces.notes)
