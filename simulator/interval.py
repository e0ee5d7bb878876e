"""How sure a step time is: what the errors of its durations do to it.

Each *family* of durations (one fit: matrix products, attention, ...) is made longer, and then shorter, by its own
standard error, and the step simulated again: errors inside a family move together, families apart. The longer
steps make the upper half of the interval, the shorter ones the lower: a host that is slower than thought may bind
the step, one that is faster changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import sqrt

import numpy as np

from echograph.ir.columns import Int64
from echograph.ir.graph import JobGraph
from echograph.ir.timeline import Timeline
from echograph.ir.types import Attention, Convolution, Gemm
from echograph.simulator import engine as engines
from echograph.simulator.durations import COMMUNICATIONS, Durations
from echograph.simulator.engine.static import COMPILE_FROM
from echograph.simulator.host import Host
from echograph.simulator.tasks import DEVICE, HOST, TaskGraph

NINETY_PERCENT = 1.645
"""Half-width of the central 90 % of a normal distribution, in standard deviations."""

MAX_TASKS = {"compiled": 100_000_000, "static": 2_000_000}
MAX_TASKS_OF_OTHERS = 300_000
"""Tasks of all further simulations together, about a second's; beyond, the critical path stands for them."""


def interval(
    job: JobGraph, tasks: TaskGraph, times: Durations, host: Host, engine: str, timeline: Timeline
) -> tuple[int, int]:
    """The central 90 % of the step time, picoseconds.

    Args:
        job: the job.
        tasks: its tasks.
        times: durations of its operations with their relative standard errors.
        host: the host, with its error.
        engine: the engine to run again.
        timeline: what ran when, for the durations as they are.
    """
    step = timeline.makespan
    families = list(_families(job, tasks, times, host))
    compiled = engine == "static" and len(tasks) >= COMPILE_FROM
    affordable = MAX_TASKS.get("compiled" if compiled else engine, MAX_TASKS_OF_OTHERS)
    if 2 * len(families) * len(tasks) > affordable:
        path = timeline.critical_path()
        moves = [float((tasks.duration[path] * error[path]).sum()) for error in families]
        longer = shorter = sum(move**2 for move in moves)
    else:
        longer = sum(max(0.0, _step(tasks, error, engine) - step) ** 2 for error in families)
        shorter = sum(max(0.0, step - _step(tasks, -error, engine)) ** 2 for error in families)
    return max(0, step - round(NINETY_PERCENT * sqrt(shorter))), step + round(NINETY_PERCENT * sqrt(longer))


def _step(tasks: TaskGraph, error: np.ndarray, engine: str) -> float:
    duration = np.rint(tasks.duration * np.maximum(0.0, 1.0 + error)).astype(np.int64)
    starts, _ = engines.run(replace(tasks, duration=duration), engine)
    return float((starts.start + duration).max(initial=0))


def _families(job: JobGraph, tasks: TaskGraph, times: Durations, host: Host) -> Iterator[np.ndarray]:
    """For each family, the relative error of every task: its own, or 0 for the tasks of others."""
    family, device = _family_of(job), tasks.lane == DEVICE
    spread = times.spread[tasks.op]
    for which in np.unique(family[(times.spread > 0) & (times.picoseconds > 0)]).tolist():
        yield np.where(device & (family == which)[tasks.op], spread, 0.0)
    if host.spread and host.op_ps:
        yield np.where(tasks.lane == HOST, host.spread, 0.0)


def _family_of(job: JobGraph) -> Int64:
    """Matrix products, attention, convolutions, other kernels, and the communications of each group."""
    ops = job.ops
    kinds = (Gemm, Attention, Convolution)
    of_attribute = [next((i for i, k in enumerate(kinds) if isinstance(a, k)), 3) for a in ops.attribute_values]
    family = np.array([*of_attribute, 3])[ops.attributes].astype(np.int64)
    communicates = np.isin(ops.kind, COMMUNICATIONS)
    family[communicates] = 4 + ops.group[communicates]
    return family
