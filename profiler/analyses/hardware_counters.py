"""Hardware counters of kernels (CUPTI's range profiler), the operators that launched them, and the roofline."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from echograph.errors import UsageError
from echograph.ir.columns import Int64
from echograph.profiler.analyses.table import AnswerTable, from_rows
from echograph.profiler.analyses.work import US
from echograph.profiler.traces.events import details
from echograph.profiler.traces.relations import call_stacks, launches
from echograph.profiler.traces.trace import CALLS, NONE, OPERATORS, Trace, TraceSet

TITLES = (
    "rank",
    "index",
    "name",
    "top_level_op",
    "bottom_level_op",
    "op_stack",
    "time(us)",
    "flops",
    "bytes",
    "flops_per_byte",
    "GFLOP/s",
    "roof_GFLOP/s",
)
_RANGE = "cuda_profiler_range"
_LAUNCH = re.compile(r"(cuda|cu)Launch(Cooperative)?Kernel")
# Executed thread instructions of double, single and half precision; a fused multiply-add is two operations.
_FLOPS = re.compile(r"smsp__sass_thread_inst_executed_op_[dfh](add|mul|fma)_pred_on(\.sum)?$")
_OPERATIONS = {"add": 1, "mul": 1, "fma": 2}
_TIME_NS = "gpu__time_duration.sum"
_BYTES = ("dram__bytes.sum",), ("dram__bytes_read.sum", "dram__bytes_write.sum")


def hardware_counters(traces: TraceSet, *, peak_gflops: float = 0.0, peak_gbps: float = 0.0) -> AnswerTable:
    """The hardware counters of each kernel, with the operators around its launch and where it is on the roofline.

    CUPTI's ranges say no correlation: where there are as many as launches, the n-th is of the n-th launch.

    Columns: `rank`; `index` of the range in the file; `name`; `top_level_op`, `bottom_level_op` the outermost and
    innermost operator around the launch, `op_stack` all of them, joined by "|", empty where ranges and launches
    differ in number; `time(us)` on the device, by its counter (`gpu__time_duration.sum`), or else of the launch's
    kernel; `flops` of the counters of executed add, multiply (1) and fused (2) instructions in double, single
    and half precision: what tensor cores do is not among them; `bytes` to and from the device's memory
    (`dram__bytes.sum`, or read and write); `flops_per_byte`; `GFLOP/s` achieved; `roof_GFLOP/s` what the device
    could at this intensity, for the peaks given. Then each counter under its own name. What the counters do not
    say is empty.

    Args:
        traces: the job's; their files are still where they were.
        peak_gflops: 1e9 operations a second of the device; 0 for none.
        peak_gbps: 1e9 bytes a second of its memory; 0 for none.

    Raises:
        UsageError: a negative peak.
        InputError: a file is gone.
    """
    if not (0 <= peak_gflops < math.inf and 0 <= peak_gbps < math.inf):
        raise UsageError("peak_gflops and peak_gbps: give what the datasheet says, or leave them out")
    rows: list[tuple[tuple[Any, ...], Mapping[str, Any]]] = []
    notes = list(traces.notes)
    for rank, trace in traces.items():
        ranges = np.flatnonzero(trace.of_category({_RANGE}))
        ranges = ranges[np.argsort(trace.start[ranges], kind="stable")]
        if not len(ranges):
            notes.append(trace.without("hardware counters", "profile with CUPTI's metrics (experimental_config)"))
            continue
        calls = _calls(trace, ranges, rank, notes)
        stacks, kernel = _operator_stacks(trace, calls), _kernel_us(trace)
        for row, call, event in zip(ranges.tolist(), calls.tolist(), details(trace, ranges), strict=True):
            counters = event.get("args") or {}
            around = stacks[call] if call != NONE else []
            ends = (around[0], around[-1], "|".join(around)) if around else ("", "", "")
            counted = {name: value for name, value in counters.items() if _is_number(value)}
            time = counted.get(_TIME_NS, 0) / 1e3 or kernel.get(call)
            known = _roofline(counted, time, peak_gflops, peak_gbps)
            rows.append(((rank, int(trace.index[row]), trace.text(row), *ends, *known), counters))
    names = list(dict.fromkeys(name for _, counters in rows for name in counters))
    found = ((*row, *(counters.get(name) for name in names)) for row, counters in rows)
    return from_rows((*TITLES, *names), found, notes)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def flops_of(counters: Mapping[str, Any]) -> float | None:
    """Floating-point operations by the counters of executed instructions; None where none of them is counted."""
    counted = [(match[1], counters[name]) for name in counters if (match := _FLOPS.match(name))]
    return sum(_OPERATIONS[kind] * value for kind, value in counted) if counted else None


def _roofline(
    counters: Mapping[str, Any], time_us: float | None, peak_gflops: float, peak_gbps: float
) -> tuple[float | None, ...]:
    flops = flops_of(counters)
    moved = next((sum(counters[n] for n in names) for names in _BYTES if set(names) <= set(counters)), None)
    intensity = flops / moved if flops is not None and moved else None
    achieved = flops / time_us / 1e3 if flops is not None and time_us else None
    roofs = [peak_gflops] if peak_gflops else []
    if peak_gbps and intensity is not None:
        roofs.append(peak_gbps * intensity)
    roof = min(roofs) if roofs and intensity is not None else None
    return time_us, flops, moved, intensity, achieved, roof


def _calls(trace: Trace, ranges: Int64, rank: int, notes: list[str]) -> Int64:
    """The launch of each range, in order; -1 where their numbers differ."""
    named = np.array([*(bool(_LAUNCH.match(text)) for text in trace.strings), False])[trace.name]
    calls = np.flatnonzero(named & trace.of_category(CALLS))
    if len(calls) != len(ranges):
        notes.append(
            f"rank {rank}: {len(ranges)} ranges of counters and {len(calls)} launches: whose they are is not known"
        )
        return np.full(len(ranges), NONE, np.int64)
    return calls[np.argsort(trace.start[calls], kind="stable")]


def _operator_stacks(trace: Trace, calls: Int64) -> dict[int, list[str]]:
    """The operators around each call, the outermost first."""
    stacks, operators = call_stacks(trace), trace.of_category(OPERATORS)
    found: dict[int, list[str]] = {}
    for call in set(calls.tolist()) - {NONE}:
        around, row = list[str](), int(stacks.parent[call])
        while row != NONE:
            if operators[row]:
                around.append(trace.text(row))
            row = int(stacks.parent[row])
        found[call] = around[::-1]
    return found


def _kernel_us(trace: Trace) -> dict[int, float]:
    calls, works = launches(trace)
    return dict(zip(calls.tolist(), (trace.duration[works] / US).tolist(), strict=True))
