"""`echosim replay`: a traced job again, with its own measured durations, and what would be if it were changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from echograph.cli.app import print_error, print_json, print_line, print_table, progress
from echograph.cli.plan import Plan
from echograph.cli.study import Study
from echograph.errors import PlanError, UsageError
from echograph.ir.graph import Graph, JobGraph
from echograph.ir.timeline import Timeline
from echograph.ir.types import COMMUNICATIONS, CollectiveKind, OpKind
from echograph.simulator.clusters import Cluster, load_cluster
from echograph.simulator.host import Host
from echograph.simulator.result import Result
from echograph.simulator.what_if import Scale, parse_scale
from echograph.units import format_bytes, format_time, to_s

# As profiler.replay writes it: beside an operation's own, the time of the step that it ends.
STEP = "step"
FREE = "free step"
TRACE = "trace"
NOT_TRACED, NOT_TRACED_WORLD = "not traced", "not traced (all ranks)"
ONE_OF_SEVERAL = "one rank of several"


KEPT = (
    "model", "cluster", "device", "gpus", "breakdown_s", "breakdown_of", "breakdown_mean_s", "breakdown_least_s",
    "breakdown_most_s", "breakdown_ranks", "limits_s", "durations", "collectives", "simulation",
)  # fmt: skip


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


def replay_command(
    job: Annotated[Path, typer.Argument(help="A job graph of echoc import kineto.")],
    gpus: Annotated[
        int | None, typer.Option(help="Other ranks of a data-parallel job; the cluster's network then counts.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Whose network carries the communication: a preset or a TOML file.")
    ] = None,
    scale: Annotated[
        list[str] | None, typer.Option(help="What if WHAT=FACTOR, as compute=0.9, host=0.5, op:aten.mm=0.5.")
    ] = None,
    without: Annotated[list[str] | None, typer.Option(help="What if this took no time, as comm.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace, for Perfetto.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the result as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a traced job again with its measured durations: step time, where it goes, error against the measured."""
    from echograph.ir import files, serde

    results = [path for path in (output, trace) if path is not None]
    if len({path.resolve() for path in (job, *results)}) <= len(results):
        raise UsageError("the job, --output and --trace are one file: give each its own")
    for path in results:
        files.check_writable(path)
    scales = [parse_scale(text) for text in (*(scale or ()), *(f"{what}=0" for what in without or ()))]
    with progress(f"reading {job}") as say:
        loaded = serde.load(job, say)
        if not is_traced(loaded):
            raise UsageError(
                f"{job}: holds no measured step: echosim run it, or give a job of echoc import kineto"
            )
        assert isinstance(loaded, JobGraph)
        say("replaying")
        result, ran = replay(loaded, cluster=cluster, gpus=gpus, scales=scales)
        timeline = result.timeline
        found = steps(ran, timeline)
    changed = bool(cluster or gpus or scale or without)
    record = _record(result, found, changed=changed)
    print_json(record) if as_json else _print(result, found, changed=changed)
    if output is not None:
        files.write_whole(output, [json.dumps(record, indent=2) + "\n"])
        print_error(f"wrote {output} (result)")
    if trace is not None:
        from echograph.ir.exporters.chrome import chrome_trace

        files.write_whole(trace, chrome_trace(ran, timeline))
        print_error(f"wrote {trace} (Chrome trace: open in ui.perfetto.dev)")


def is_traced(graph: Graph) -> bool:
    """Whether a graph is a job that was traced, with the host's own times and the steps in it."""
    devices = set(np.unique(graph.ops.duration_device).tolist())
    return isinstance(graph, JobGraph) and any(graph.strings[device] == STEP for device in devices)


def replay(
    job: JobGraph, *, cluster: str | None = None, gpus: int | None = None, scales: Sequence[Scale] = ()
) -> tuple[Result, JobGraph]:
    """Simulates a traced job with its own durations.

    Args:
        job: the job.
        cluster: whose network carries its communication; None: it takes what it took.
        gpus: how many ranks; None: its own.
        scales: what is longer or shorter than it was.

    Raises:
        UsageError: another number of ranks without a cluster, or of a job in which nothing is communicated, or
            collectives of which the trace does not say the sizes, or whose ranks were not traced.
        PlanError: another number of ranks of a job that is not purely data-parallel.
    """
    from echograph.ir.passes.mesh import one_communicator
    from echograph.simulator.simulate import simulate

    if gpus not in (None, job.world_size):
        if cluster is None:
            raise UsageError(
                f"--gpus {gpus}: what was measured is of {job.world_size} ranks: say whose network, with --cluster"
            )
        from echograph.ir.passes.mesh import ResizeWorld

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
        job = one_communicator(ResizeWorld(gpus=int(gpus or 0))(job))
    elif cluster is not None:
        from echograph.ir.passes.annotate import forget_communication

        _check_sizes(job)
        _check_traced(job, f"--cluster {cluster}", {NOT_TRACED, NOT_TRACED_WORLD})
        job = one_communicator(forget_communication(job))
    where = machine(job, cluster)
    threads = Host(op_ps=0, launch_ps=0, threads=True)
    result = simulate(job, where, threads, engine="static", scales=scales, memory=False)
    return result, job


def replay_plan(job: JobGraph, plan: Plan, study: Study) -> tuple[Result, JobGraph]:
    """`replay` for `echosim run`: the step is then all that was traced.

    Raises:
        UsageError: what a traced job has already, or what needs more than its own ranks.
    """
    if asked := [name for name in plan.given if name not in ("gpus", "cluster")]:
        raise UsageError(f"a traced job has its plan already: leave {', '.join(asked)} out")
    default = Study()
    others = [f.name for f in fields(study) if f.name != "scales"]
    if asked := [name for name in others if getattr(study, name) != getattr(default, name)]:
        raise UsageError(f"{', '.join(asked)}: not of a traced job, whose ranks run what they ran")
    other = "cluster" in plan.given or plan.gpus not in (None, job.world_size)
    named = plan.cluster if other else None
    return replay(job, cluster=named, gpus=plan.gpus, scales=study.scales)


def machine(job: JobGraph, cluster: str | None) -> Cluster:
    """The cluster with the job's own device; without one, where nothing is asked of the network."""
    name = job.strings[_own_device(job)]
    if cluster is not None:
        return replace(load_cluster(cluster), device=name)
    size = job.world_size
    return replace(load_cluster(), name="as traced", device=name, max_gpus=size, stated_gpus=size)


def steps(job: JobGraph, timeline: Timeline) -> list[StepTime]:
    """The steps of all programs, as they were measured and as they are simulated."""
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


def _shown(found: Sequence[StepTime]) -> list[StepTime]:
    """The steps; all of the trace where there are none."""
    return [step for step in found if step.name != TRACE] or list(found)


def _record(result: Result, found: Sequence[StepTime], *, changed: bool) -> dict[str, Any]:
    shown = _shown(found)
    of_step = {
        "measured_step_s": float(np.mean([s.measured_s for s in shown])),
        "replayed_step_s": float(np.mean([s.replayed_s for s in shown])),
        "largest_error": None if changed else max((abs(s.error) for s in found), default=0.0),
        "free_step_s": free[2] if (free := step_medians(found)) else None,
        "steps": [asdict(step) for step in found],
    }
    record = result.to_json()
    return {**of_step, "trace_s": to_s(result.step_ps), **{name: record[name] for name in KEPT}}


def _print(result: Result, found: Sequence[StepTime], *, changed: bool) -> None:
    shown, record = _shown(found), _record(result, found, changed=changed)
    what = "step" if shown[0].name != TRACE else "trace"
    print_line(f"{result.model} on {result.gpus} ranks ({result.device})")
    replayed, measured = (round(record[f"{word}_step_s"] * 1e12) for word in ("replayed", "measured"))
    ratio = replayed / measured - 1 if measured else 0.0
    said = "measured, other" if changed else "measured"
    print_line(f"  {what:<14}{format_time(replayed)}   ({said}: {format_time(measured)}, {ratio:+.2%})")
    if free := step_medians(found):
        ratio = free[1] / free[2] - 1
        print_line(f"  not recorded  {free[2] * 1e3:.4g} ms   (median of the free steps; replayed: {ratio:+.2%})")
    parts = record["breakdown_s"]
    flat = {"compute": parts["compute"], "host": parts["host"], "wait": parts["wait"] + parts["bubble"]}
    flat |= {f"{axis} communication": value for axis, value in parts["exposed_communication"].items()}
    times = ", ".join(f"{name} {format_time(round(value * 1e12))}" for name, value in flat.items() if value)
    whose = f"rank {result.ends_last.rank}"
    print_line(f"  where it goes {times} (all of the trace, {whose}, which ends last)")
    limits = ", ".join(f"{name} {value / record['trace_s']:.0%}" for name, value in record["limits_s"].items())
    print_line(f"  limited by    {limits} (of the critical path)")
    for axis, entry in result.collectives.items():
        print_line(
            f"  collectives   {axis}: {entry['calls']} calls, {format_bytes(entry['bytes_per_rank'])} per rank, "
            f"{entry['busy_s'] * 1e3:.4g} ms busy"
        )
    if len(shown) > 1:
        rows = [
            (s.role, s.name, *(f"{t * 1e3:.4g}" for t in (s.measured_s, s.replayed_s)), f"{s.error:+.2%}")
            for s in shown
        ]
        print_table(("rank", "step", "measured ms", "replayed ms", "difference"), rows)
