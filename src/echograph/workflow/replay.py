"""A traced job run again with its own durations, or with others, and what was measured beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from echograph.errors import PlanError, UsageError
from echograph.ir.columns import distinct
from echograph.ir.graph import Graph, JobGraph
from echograph.ir.passes.base import run
from echograph.ir.tables import text_table
from echograph.ir.traced import (
    FREE,
    NOT_TRACED,
    NOT_TRACED_WORLD,
    ONE_OF_SEVERAL,
    PARTLY_TRACED,
    STEP,
    TRACE,
    is_traced,
)
from echograph.ir.types import COMMUNICATIONS, CollectiveKind, OpKind
from echograph.simulator.clusters import load_cluster
from echograph.simulator.host import IssueTimes
from echograph.simulator.limits import Scale
from echograph.simulator.result import Result
from echograph.units import format_time, to_s
from echograph.workflow.system import System

_KEPT = (
    "model", "cluster", "device", "gpus", "breakdown_s", "breakdown_of", "breakdown_mean_s", "breakdown_least_s",
    "breakdown_most_s", "breakdown_ranks", "limits_s", "durations", "collectives", "simulation",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A step of a rank, or all of its trace.

    Attributes:
        role: the rank.
        name: "ProfilerStep#N"; "trace" for the whole trace.
        measured_s: measured time, seconds.
        replayed_s: simulated time, seconds.
        error: relative error of the simulated time.
        free_s: a step of the rank in which nothing was recorded, the median; None where that is not known.
        free_error: relative error of the simulated time against `free_s`.
    """

    role: str
    name: str
    measured_s: float
    replayed_s: float
    error: float
    free_s: float | None = None
    free_error: float | None = None


def replay(
    job: JobGraph, *, system: System | None = None, gpus: int | None = None, scales: Sequence[Scale] = ()
) -> Result:
    """Simulates a traced job with its own durations.

    Args:
        job: the job.
        system: whose network carries its communication; None: it takes what it took.
        gpus: how many ranks; None: its own.
        scales: what is longer or shorter than it was.

    Returns:
        The prediction of all that was traced; its `job` is what ran.

    Raises:
        UsageError: another number of ranks without a cluster, or of a job in which nothing is communicated, or
            collectives of which the trace does not say the sizes, or whose ranks were not traced.
        PlanError: another number of ranks of a job that is not purely data-parallel.
    """
    from echograph.ir.passes.mesh import OneCommunicator, ResizeWorld
    from echograph.simulator import simulate as simulator

    if gpus not in (None, job.world_size):
        if system is None:
            raise UsageError(
                f"--gpus {gpus}: what was measured is of {job.world_size} ranks: say whose network, with --cluster"
            )
        _check_sizes(job)
        _check_traced(job, f"--gpus {gpus}", {NOT_TRACED, PARTLY_TRACED})
        if _of_groups(job, {ONE_OF_SEVERAL}).any():
            raise PlanError(
                f"--gpus {gpus}: the job has collectives of one rank of several, so it is not only data-parallel"
            )
        if not np.isin(job.ops.kind, COMMUNICATIONS).any():
            raise UsageError(
                f"--gpus {gpus}: the trace has no collective, so it does not say what {gpus} ranks would "
                "exchange: trace a job that communicates"
            )
        job = run(job, (ResizeWorld(gpus=int(gpus or 0)), OneCommunicator()), to=JobGraph)
    elif system is not None:
        from echograph.ir.passes.annotate import ForgetCommunication

        _check_sizes(job)
        _check_traced(job, f"--cluster {system.cluster.name}", {NOT_TRACED, NOT_TRACED_WORLD, PARTLY_TRACED})
        job = run(job, (ForgetCommunication(), OneCommunicator()), to=JobGraph)
    on = _machine(job, system)
    result = simulator.simulate(job, on.cluster, on.host, engine="static", scales=scales, memory=False)
    return replace(result, job=job)


def _machine(job: JobGraph, system: System | None) -> System:
    """The system with the job's own device; without one, where nothing is asked of the network."""
    name = job.strings[_own_device(job)]
    if system is None:
        size = job.world_size
        where = replace(load_cluster(), name="as traced", device=name, max_gpus=size, stated_gpus=size)
    else:
        where = replace(system.cluster, device=name)
    return System.timed(where, IssueTimes(op_ps=0, launch_ps=0, threads=True))


def steps(result: Result) -> list[StepTime]:
    """The steps of all programs of a replay, as they were measured and as they are simulated."""
    job, timeline = result.job, result.timeline
    assert job is not None
    ops, found = job.ops, []
    measured, free = _durations(job, STEP), _durations(job, FREE)
    names = {int(ops.name[row]) for row in measured}
    marks = np.flatnonzero((ops.kind == OpKind.HOST) & np.isin(ops.name, list(names)))
    rows = np.flatnonzero(np.isin(timeline.op, marks) & (timeline.lane == 0))
    began: dict[tuple[int, int], int] = {}
    for row in rows[np.lexsort((timeline.op[rows], timeline.program[rows]))].tolist():
        op, program = int(timeline.op[row]), int(timeline.program[row])
        time, key = int(timeline.start[row]), (program, int(ops.name[op]))
        if op not in measured:
            began[key] = time
        elif key in began:
            took, was, nothing = time - began[key], measured[op], free.get(op)
            found.append(
                StepTime(
                    role=timeline.programs[program],
                    name=job.strings[key[1]],
                    measured_s=to_s(was),
                    replayed_s=to_s(took),
                    error=took / was - 1 if was else 0.0,
                    free_s=to_s(nothing) if nothing else None,
                    free_error=took / nothing - 1 if nothing else None,
                )
            )
    return found


def step_medians(found: Sequence[StepTime]) -> tuple[float, float, float] | None:
    """Seconds of a step as it was measured, as it is simulated, and free; None where no free step is known."""
    known = [(s.measured_s, s.replayed_s, s.free_s) for s in found if s.free_s is not None]
    if not known:
        return None
    measured, replayed, free = (float(np.median(column)) for column in zip(*known, strict=True))
    return measured, replayed, free


def _durations(job: JobGraph, device: str) -> dict[int, int]:
    """Picoseconds that stand under a name, by operation."""
    codes = [index for index, text in enumerate(job.strings) if text == device]
    said = np.flatnonzero(np.isin(job.ops.duration_device, codes))
    durations = job.ops.duration
    return dict(zip(durations.rows[said].tolist(), durations.values[said].tolist(), strict=True))


def _own_device(job: JobGraph) -> int:
    used = [code for code in distinct(job.ops.duration_device).tolist() if job.strings[code] not in (STEP, FREE)]
    if len(used) != 1:
        raise UsageError(f"the job has durations of {len(used)} devices: a traced job has those of one")
    return int(used[0])


def _check_sizes(job: JobGraph) -> None:
    """Refuses to time collectives of which it is not known how much they move."""
    ops = job.ops
    rows = np.isin(ops.kind, COMMUNICATIONS) & (ops.nbytes == 0) & (ops.variant != CollectiveKind.BARRIER)
    if rows.any():
        first = job.strings[ops.name[int(np.argmax(rows))]]
        raise UsageError(
            f"{int(rows.sum())} collectives, '{first}' first, have no size in the trace: they were "
            "launched before it began, or it records none (record_shapes=True does); or leave --cluster out"
        )


def _check_traced(job: JobGraph, option: str, names: set[str]) -> None:
    """Refuses to time collectives of which it is not known how many ranks take part."""
    ops, rows = job.ops, _of_groups(job, names)
    if rows.any():
        at = int(np.argmax(rows))
        everyone = job.groups[int(ops.group[at])].name == NOT_TRACED_WORLD
        raise UsageError(
            f"{option}: {int(rows.sum())} collectives, '{job.strings[ops.name[at]]}' first, are of ranks that "
            "were not traced, so what a network takes for them is not known: import the traces of all ranks"
            + (", or say with --gpus how many ranks the job has" if everyone else "")
        )


def _of_groups(job: JobGraph, names: set[str]) -> npt.NDArray[np.bool_]:
    """Which operations communicate in a group of one of the names; what follows a colon is of one group."""
    groups = [index for index, group in enumerate(job.groups) if group.name.partition(":")[0] in names]
    return np.isin(job.ops.kind, COMMUNICATIONS) & np.isin(job.ops.group, groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedJob:
    """A replay beside what was measured.

    Attributes:
        result: the replay; its times are of all that was traced.
        steps: what was measured: the profiler's steps, or all of the trace where it marks none.
        changed: whether it is no longer the step that was traced.
    """

    result: Result
    steps: tuple[StepTime, ...]
    changed: bool

    def to_json(self) -> dict[str, Any]:
        """The record of `echosim replay --json`."""
        shown = shown_steps(self.steps)
        free, record = step_medians(self.steps), self.result.to_json()
        return {
            "measured_step_s": float(np.mean([step.measured_s for step in shown])),
            "replayed_step_s": float(np.mean([step.replayed_s for step in shown])),
            "largest_error": None if self.changed else max((abs(step.error) for step in self.steps), default=0.0),
            "free_step_s": None if free is None else free[2],
            "steps": [asdict(step) for step in self.steps],
            "trace_s": to_s(self.result.step_ps),
            **{name: record[name] for name in _KEPT},
        }

    def __str__(self) -> str:
        """The step beside the measured one, where its time goes, and the steps where there are several."""
        result, shown, record = self.result, shown_steps(self.steps), self.to_json()
        what = "step" if shown[0].name != TRACE else "trace"
        replayed, measured = (round(record[f"{word}_step_s"] * 1e12) for word in ("replayed", "measured"))
        ratio = replayed / measured - 1 if measured else 0.0
        said = "measured, as it was" if self.changed else "measured"
        lines = [
            f"{result.model} on {result.gpus} ranks ({result.device})",
            f"  {what:<14}{format_time(replayed)}   ({said}: {format_time(measured)}, {ratio:+.2%})",
        ]
        if free := step_medians(self.steps):
            ratio = free[1] / free[2] - 1
            lines.append(
                f"  not recorded  {free[2] * 1e3:.4g} ms   (median of the free steps; replayed: {ratio:+.2%})"
            )
        parts = record["breakdown_s"]
        flat = {"compute": parts["compute"], "host": parts["host"], "wait": parts["wait"] + parts["bubble"]}
        flat |= {f"{axis} communication": value for axis, value in parts["exposed_communication"].items()}
        times = ", ".join(f"{name} {format_time(round(value * 1e12))}" for name, value in flat.items() if value)
        whose = f"rank {result.ends_last.rank}"
        lines.append(f"  where it goes {times} (all of the trace, {whose}, which ends last)")
        limits = ", ".join(f"{name} {value / record['trace_s']:.0%}" for name, value in record["limits_s"].items())
        lines += [f"  limited by    {limits} (of the critical path)", *result.collective_lines(algorithms=False)]
        if len(shown) > 1:
            rows = [
                (s.role, s.name, *(f"{t * 1e3:.4g}" for t in (s.measured_s, s.replayed_s)), f"{s.error:+.2%}")
                for s in shown
            ]
            lines.append(text_table(("rank", "step", "measured ms", "replayed ms", "difference"), rows))
        return "\n".join(lines)


def replayed_job(
    job: Graph, *, system: System | None = None, gpus: int | None = None, scales: Sequence[Scale] = ()
) -> ReplayedJob:
    """`replay`, beside what was measured.

    Raises:
        UsageError: the job was not traced, or as `replay`.
        PlanError: as `replay`.
    """
    if not isinstance(job, JobGraph) or not is_traced(job):
        raise UsageError(
            f"{job.name}: holds no measured step: echosim run it, or give a job of echoc import kineto"
        )
    result = replay(job, system=system, gpus=gpus, scales=scales)
    changed = system is not None or gpus is not None or bool(scales)
    return ReplayedJob(result=result, steps=tuple(steps(result)), changed=changed)


def shown_steps(found: Sequence[StepTime]) -> list[StepTime]:
    """The steps; all of the trace where there are none."""
    return [step for step in found if step.name != TRACE] or list(found)
