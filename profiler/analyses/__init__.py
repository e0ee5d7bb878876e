"""Analyses of traces: the traces of a job in, one table out.

An analysis is a function of a `TraceSet` and keyword options; its docstring says what it answers, what each column
means and in which unit. A new one is a file and a line in `ANALYSES`. What several need is beside them: `table`
(the result), `work` (what ran on the devices), `statistics`, and `ir.intervals` (union and overlap of times).
"""

from __future__ import annotations

from collections.abc import Callable

from echograph.profiler.analyses.table import AnswerTable
from echograph.registry import Table

Analysis = Callable[..., AnswerTable]

_HERE = "echograph.profiler.analyses"
ANALYSES = Table(
    "analysis",
    {
        "temporal-breakdown": f"{_HERE}.temporal:temporal_breakdown",
        "rank-times": f"{_HERE}.temporal:rank_times",
        "kernel-types": f"{_HERE}.kernels:kernel_types",
        "kernels": f"{_HERE}.kernels:kernel_breakdown",
        "kernel-durations": f"{_HERE}.kernels:kernel_durations",
        "overlap": f"{_HERE}.temporal:communication_overlap",
        "idle": f"{_HERE}.idle:idle_breakdown",
        "idle-intervals": f"{_HERE}.idle:idle_intervals",
        "launches": f"{_HERE}.launches:launch_statistics",
        "launch-summary": f"{_HERE}.launches:launch_summary",
        "queue-length": f"{_HERE}.counters:queue_length",
        "queue-length-summary": f"{_HERE}.counters:queue_length_summary",
        "queue-full": f"{_HERE}.counters:time_on_full_queue",
        "memory-bandwidth": f"{_HERE}.counters:memory_bandwidth",
        "memory-bandwidth-summary": f"{_HERE}.counters:memory_bandwidth_summary",
        "kernel-sequences": f"{_HERE}.sequences:kernel_sequences",
        "annotations": f"{_HERE}.kernels:annotation_breakdown",
        "annotated-kernels": f"{_HERE}.kernels:annotated_kernels",
        "stragglers": f"{_HERE}.stragglers:stragglers",
        "steps": f"{_HERE}.steps:steps",
        "phases": f"{_HERE}.phases:phases",
        "operators": f"{_HERE}.sequences:operator_kernels",
        "critical-path": f"{_HERE}.critical_path:critical_path",
        "critical-path-summary": f"{_HERE}.critical_path:critical_path_summary",
        "call-stacks": f"{_HERE}.call_times:call_times",
        "counters": f"{_HERE}.counters:counters",
        "memory-timeline": f"{_HERE}.memory:memory_timeline",
        "memory-peaks": f"{_HERE}.memory:memory_peaks",
        "memory-holders": f"{_HERE}.memory:memory_holders",
        "memory-categories": f"{_HERE}.memory:memory_categories",
        "execution-trace": f"{_HERE}.execution_trace:execution_trace",
        "hardware-counters": f"{_HERE}.hardware_counters:hardware_counters",
        "trace-diff": f"{_HERE}.diff:trace_diff",
        "cross-rank-critical-path": f"{_HERE}.cross_rank:cross_rank_critical_path",
        "cross-rank-critical-path-summary": f"{_HERE}.cross_rank:cross_rank_critical_path_summary",
        "collectives": f"{_HERE}.collective_times:collective_times",
        "communication": f"{_HERE}.collective_times:communication",
        "kernel-origins": f"{_HERE}.shapes:kernel_origins",
        "shapes": f"{_HERE}.shapes:shapes",
        "prediction-errors": f"{_HERE}.shapes:prediction_errors",
        "slow-kernels": f"{_HERE}.shapes:slow_kernels",
    },
)
# Analyses that a copy of the trace can show: a function of a `TraceSet` and the same options gives its text.
COPIES = Table(
    "copy of a trace",
    {
        "counters": f"{_HERE}.counters:trace_with_counters",
        "critical-path": f"{_HERE}.critical_path:trace_with_path",
        "kernel-sequences": f"{_HERE}.sequences:trace_with_sequences",
    },
)
