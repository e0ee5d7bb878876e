"""`echosim replay`: a traced job again, with its own measured durations, and what would be if it were changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from echograph.errors import PlanError, UsageError
from echograph.ir.graph import Graph, JobGraph
from echograph.ir.types import COMMUNICATIONS, CollectiveKind, OpKind
from echograph.simulator.clusters import load_cluster
from echograph.simulator.host import IssueTimes
from echograph.simulator.limits import Scale
from echograph.simulator.result import Result
from echograph.units import to_s
from echograph.workflow.system import System

# As profiler.replay writes it: beside an operation's own, the time of the step that it ends.
STEP = "step"
FREE = "free step"
_KEPT = (
    "model", "cluster", "device", "gpus", "breakdown_s", "breakdown_of", "breakdown_mean_s", "breakdown_least_s",
    "breakdown_most_s", "breakdown_ranks", "limits_s", "durations", "collectives", "simulation",
)  # fmt: skip
TRACE = "trace"
NOT_TRACED, NOT_TRACED_WORLD = "not traced", "not traced (all ranks)"
ONE_OF_SEVERAL = "one rank of several"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A step of a rank, or all of its trace.

    Attributes:
        role: the rank.
        name: "ProfilerStep#N"; "trace" for all of it.
        measured_s: as it was.
        replayed_s: as the simulation has it.
        error: relative.
        free_s: a step of the rank in which nothing was recorded, the median; None where that is not known.
        free_error: of the simulation against that.
    """

    role: str
    name: str
    measured_s: float
    replayed_s: float
    error: float
    free_s: float | None = None
    free_error: float | None = None


def is_traced(graph: Graph) -> bool:
    """Whether a graph is a job that was traced, with the host's own times and the steps in it."""
    devices = set(np.unique(graph.ops.duration_device).tolist())
    return isinstance(graph, JobGraph) and any(graph.strings[device] == STEP for device in devices)


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
    from echograph.ir.passes.base import run
    from echograph.ir.passes.mesh import OneCommunicator, ResizeWorld
    from echograph.simulator.simulate import simulate

    if gpus not in (None, job.world_size):
        if system is None:
            raise UsageError(
                f"--gpus {gpus}: what was measured is of {job.world_size} ranks: say whose network, with --cluster"
            )
        _check_sizes(job)
        _check_traced(job, f"--gpus {gpus}", {NOT_TRACED})
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
        _check_traced(job, f"--cluster {system.cluster.name}", {NOT_TRACED, NOT_TRACED_WORLD})
        job = run(job, (ForgetCommunication(), OneCommunicator()), to=JobGraph)
    on = _machine(job, system)
    result = simulate(job, on.cluster, on.host, engine="static", scales=scales, memory=False)
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
    used = [code for code in np.unique(job.ops.duration_device).tolist() if job.strings[code] not in (STEP, FREE)]
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
            f"{int(rows.sum())} collectives, '{first}' first, have no size in the trace: record with shapes "
            "(record_shapes=True), or leave --cluster out"
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
    """Which operations communicate in a group of one of the names."""
    groups = [index for index, group in enumerate(job.groups) if group.name in names]
    return np.isin(job.ops.kind, COMMUNICATIONS) & np.isin(job.ops.group, groups)


def shown_steps(found: Sequence[StepTime]) -> list[StepTime]:
    """The steps; all of the trace where there are none."""
    return [step for step in found if step.name != TRACE] or list(found)


def replay_record(result: Result, found: Sequence[StepTime], *, changed: bool) -> dict[str, Any]:
    """What `echosim replay --json` says; `changed` where it is no longer the step that was traced."""
    shown = shown_steps(found)
    of_step = {
        "measured_step_s": float(np.mean([s.measured_s for s in shown])),
        "replayed_step_s": float(np.mean([s.replayed_s for s in shown])),
        "largest_error": None if changed else max((abs(s.error) for s in found), default=0.0),
        "free_step_s": free[2] if (free := step_medians(found)) else None,
        "steps": [asdict(step) for step in found],
    }
    record = result.to_json()
    return {**of_step, "trace_s": to_s(result.step_ps), **{name: record[name] for name in _KEPT}}
