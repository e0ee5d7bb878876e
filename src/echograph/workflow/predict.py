"""A graph on a system: its job, the prediction of one step, and plans near one that does not fit in memory.

A job that was traced is replayed: it runs again with its own measured durations, or with what would be if it were
changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from echograph.errors import EchoError, PlanError, UsageError
from echograph.ir.columns import distinct
from echograph.ir.graph import Graph, JobGraph, StepGraph
from echograph.ir.passes import PASSES
from echograph.ir.passes.base import Note, run
from echograph.ir.types import COMMUNICATIONS, CollectiveKind, OpKind
from echograph.models.stacks import Stack, load_stack
from echograph.options import given, option_name
from echograph.progress import Progress
from echograph.simulator.clusters import Cluster, load_cluster
from echograph.simulator.form import load_form
from echograph.simulator.goodput import goodput
from echograph.simulator.host import IssueTimes
from echograph.simulator.limits import Scale
from echograph.simulator.memory import Memory, Runtime, largest_memory
from echograph.simulator.result import Result
from echograph.units import format_bytes, to_s
from echograph.workflow import plan as plans
from echograph.workflow.plan import Plan
from echograph.workflow.scenario import Scenario
from echograph.workflow.system import IDLE_HOST_WAITS, System, runtime_of

if TYPE_CHECKING:
    from echograph.profiler.costs.estimate import KnownCosts

_OF_SEVERAL = ("degrade", "ranks", "straggler")
_PLAIN = Scenario()
UNSAID_STACK = 0.14
"""Standard error of the logarithm of a step whose plan names no stack: by how much the eleven stacks' steps differ
from it, over four plans (Llama 3.1 8B with ZeRO-3 and with tensor parallelism, 70B with pipelines, GPT-2 XL)."""


def lower(
    graph: StepGraph | JobGraph,
    plan: Plan | None = None,
    system: System | Cluster | None = None,
    note: Note | None = None,
) -> JobGraph:
    """Spreads a step over the GPUs of a system.

    Args:
        graph: a step graph; a job graph has its plan, and is taken as it is.
        plan: how it is spread; None: data-parallel on one node.
        system: where, or its cluster alone; None: the cluster that the plan names.
        note: told what could not be spread, and is computed by every rank.

    Returns:
        What every rank executes, with its groups; durations are not in it yet.

    Raises:
        UsageError: the plan's sizes do not multiply to the GPUs, a batch or a number of copies does not divide, or
            options for a job graph that has its plan already.
        PlanError: the plan does not fit the model, or the passes that it lists itself leave a step.
    """
    plan = plan or Plan()
    where = system if isinstance(system, Cluster) else (system or System(plan.cluster)).cluster
    return run(plans.apply(graph, plan, where, note), (), to=JobGraph)


def simulate(
    job: JobGraph,
    system: System | None = None,
    scenario: Scenario = _PLAIN,
    *,
    plan: Plan | None = None,
    engine: str = "auto",
    trace_ranks: Sequence[int] = (),
    memory: bool = True,
) -> Result:
    """Predicts one step of a job.

    Args:
        job: what every rank executes, of `lower`, a capture or a file; durations that it has are kept, the others
            are the system's.
        system: where it runs; None: the default cluster.
        scenario: what is asked beyond that.
        plan: the plan that made the job, for `Result.plan`, and for what the host of its stack does.
        engine: "auto", or an engine's name.
        trace_ranks: ranks whose timelines are wanted, too (`Result.traced`).
        memory: whether to work out memory, which takes about as long as the rest.

    Returns:
        Times in integer picoseconds (`step_ps`, `interval_ps`), and as seconds in `to_json`.

    Raises:
        SimulationError: an operation has no duration, the job deadlocks, or is too large or too long.
        PlanError: a group does not fit the cluster.
        UsageError: what is asked needs several devices, or another engine, or selects nothing.
    """
    from echograph.simulator import simulate as simulator

    if isinstance(job, StepGraph):
        raise UsageError("a step graph runs on no ranks yet: lower it first, as lower(step, Plan(gpus=8), system)")
    if is_traced(job):
        raise UsageError("a traced job has its own durations: replay it")
    system = system or System()
    if system.profile is not None:
        for name in _OF_SEVERAL:
            if name in given(scenario):
                raise UsageError(
                    f"{option_name(name)}: {system.cluster.name} is one measured device; give a cluster of several"
                )
    where = system.cluster.with_degraded(scenario.degraded)
    if scenario.degraded:
        from echograph.simulator.flows import links_of

        for entry in scenario.degraded:
            links_of(job, where).find(entry.where)
    said = (plan.stack if plan is not None else "") or job.workload.stack
    job, host, sms = on_system(job, said, system)
    result = simulator.simulate(
        job,
        where,
        host,
        peak_flops_per_s=system.peak_flops_per_s(job),
        engine=engine,
        ranks=scenario.every_rank(where.gpus_per_node),
        network=scenario.network or "auto",
        trace_ranks=trace_ranks,
        scales=scenario.scales,
        sms=sms,
        plan=plans.record(job, replace(plan or Plan(), stack=said), where),
        memory=memory,
        runtime=runtime_of(said, system.architecture),
        form=load_form(),
        unsaid=0.0 if said else UNSAID_STACK,
    )
    result = replace(result, job=job)
    if scenario.reliability is None:
        return result
    nodes = -(-job.world_size // where.gpus_per_node)
    return replace(result, goodput=goodput(to_s(result.step_ps), nodes, scenario.reliability))


def on_system(
    job: JobGraph, stack: str, system: System, costs: KnownCosts | None = None
) -> tuple[JobGraph, IssueTimes, dict[str, float]]:
    """A job with its durations on a system, and what runs it.

    Args:
        job: the job.
        stack: the software that trains; "" where it is not known.
        system: where.
        costs: as of `System.annotate`.

    Returns:
        The job, the host that runs the stack, and the share of the multiprocessors that its reductions take, by
        the label of their group.
    """
    of = load_stack(stack) if stack else Stack()
    job = system.annotate(plans.with_kernels(job, of, system.device), costs)
    host = system.host_of_script(job) or system.host_running(of.host)
    sms = {"tp": of.tp_comm_sms / system.sm_count} if system.sm_count else {}
    return job, replace(host, waits=True) if of.host_waits else host, sms


def predict(
    graph: StepGraph | JobGraph,
    plan: Plan | None = None,
    system: System | None = None,
    scenario: Scenario = _PLAIN,
    *,
    engine: str = "auto",
    trace_ranks: Sequence[int] = (),
    memory: bool = True,
    model_communication: bool = False,
    note: Note | None = None,
) -> tuple[Result, JobGraph]:
    """Lowers a graph and simulates the job; a job that was traced is replayed.

    Args:
        graph: a step graph, spread by the plan, or a job graph, run as it is.
        plan: how it is spread; None: data-parallel on one node.
        system: where; None: the cluster that the plan names.
        scenario: what is asked beyond that, as in `simulate`.
        engine: "auto", or an engine's name.
        trace_ranks: ranks whose timelines are wanted, too.
        memory: whether to work out memory.
        model_communication: communication takes what the cluster's model says, not what the graph holds of it.
        note: told what could not be spread, and which options have no effect.

    Returns:
        The prediction, and the job with its durations.

    Raises:
        EchoError: as `lower`, `simulate` and `replay`.
    """
    plan = plan or Plan()
    if isinstance(graph, JobGraph) and is_traced(graph):
        others = {
            "engine": engine != "auto",
            "trace_ranks": trace_ranks,
            "model_communication": model_communication,
        }
        return _replayed(graph, plan, system, scenario, [name for name, asked in others.items() if asked])
    system = system or System(plan.cluster)
    if model_communication:
        graph = _without_times_of_communication(graph)
    job = lower(graph, plan, system, note)
    if note is not None and "host_waits" in system.asked and OpKind.RECV not in job.ops.kind:
        note(IDLE_HOST_WAITS)
    result = simulate(job, system, scenario, plan=plan, engine=engine, trace_ranks=trace_ranks, memory=memory)
    assert result.job is not None
    return result, result.job


def _without_times_of_communication(graph: StepGraph | JobGraph) -> StepGraph | JobGraph:
    """The graph without what it holds of the time of communications.

    Raises:
        UsageError: it holds none.
    """
    ops = graph.ops
    if not np.isin(ops.kind[ops.duration.rows], COMMUNICATIONS).any():
        raise UsageError("--model-communication: the graph holds no time of a communication: leave it out")
    return run(graph, (PASSES["forget_communication"](),))


def _replayed(
    job: JobGraph, plan: Plan, system: System | None, scenario: Scenario, others: Sequence[str]
) -> tuple[Result, JobGraph]:
    """`replay` for those who predict a step: the step is then all that was traced.

    Args:
        job: the traced job.
        plan: whose cluster and GPUs count.
        system: where; None: as it was traced.
        scenario: what is scaled.
        others: options that were given besides.

    Raises:
        UsageError: what a traced job has already, or what needs more than its own ranks.
    """
    if asked := [name for name in plan.given if name not in ("gpus", "cluster")]:
        raise UsageError(f"a traced job has its plan already: leave {', '.join(asked)} out")
    asked = [f.name for f in fields(scenario) if f.name in given(scenario) and f.name not in ("scale", "without")]
    other = "cluster" in plan.given or plan.gpus not in (None, job.world_size)
    if system is not None:
        # The network of another cluster counts, and nothing that computes.
        asked += [name for name in system.asked if not (name == "set" and other)]
    if asked := [*asked, *others]:
        names = ", ".join(map(option_name, asked))
        raise UsageError(f"{names}: not of a traced job, whose ranks run what they ran")
    network = (system or System(plan.cluster)) if other else None
    result = replay(job, system=network, gpus=plan.gpus, scales=scenario.scales)
    assert result.job is not None
    return result, result.job


# As profiler.replay writes it: beside an operation's own, the time of the step that it ends.
STEP = "step"
FREE = "free step"
_KEPT = (
    "model", "cluster", "device", "gpus", "breakdown_s", "breakdown_of", "breakdown_mean_s", "breakdown_least_s",
    "breakdown_most_s", "breakdown_ranks", "limits_s", "durations", "collectives", "simulation",
)  # fmt: skip
TRACE = "trace"
NOT_TRACED, NOT_TRACED_WORLD, PARTLY_TRACED = "not traced", "not traced (all ranks)", "partly traced"
ONE_OF_SEVERAL = "one rank of several"


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


def is_traced(graph: Graph) -> bool:
    """Whether a graph is a job that was traced, with the host's own times and the steps in it."""
    devices = set(distinct(graph.ops.duration_device).tolist())
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


ENOUGH = 2
MOST_TRIED = 12
FEW = 3
"""Plans that are tried where nobody asked for them: each takes about as long as the prediction."""
_ACTIVATIONS = ("activation", "input", "workspace", "communication")
_STATES = ("optimizer_state",)
_SHARDED = ("parameter", "gradient", *_STATES)


def feasible_plans(
    graph: StepGraph | JobGraph,
    plan: Plan,
    cluster: Cluster,
    memory: Memory | None,
    say: Progress,
    most: int = MOST_TRIED,
    runtime: Runtime | None = None,
) -> list[str]:
    """What to change so that a plan fits, least first: "--recompute full (61.2 GiB)"; at most two.

    One option is changed at a time, and where that is not enough, another one with everything recomputed. What
    cannot be enough, since all that it makes smaller is less than what is missing, is not tried.

    Args:
        graph: the step; for a job graph, whose plan is made, nothing can be said.
        plan: the plan that does not fit.
        cluster: the cluster that the job runs on.
        memory: what the plan needs; nothing is tried where it fits.
        say: told what goes on.
        most: plans that are tried.
        runtime: what the framework takes of memory besides tensors.
    """
    found: list[str] = []
    if isinstance(graph, JobGraph) or memory is None or memory.fits:
        return found
    say("looking for a plan that fits")
    hopeful = (changes for changes in _changes(plan, cluster) if _may_be_enough(changes, memory))
    for changes in islice(hopeful, most):
        if len(found) == ENOUGH:
            break
        try:
            job = lower(graph, replace(plan, **changes), cluster)
            needed = largest_memory(job, memory.capacity_bytes, runtime)
        except EchoError:
            continue
        if needed is not None and needed.fits:
            words = (
                option_name(name) if value is True else f"{option_name(name)} {value}"
                for name, value in changes.items()
            )
            found.append(f"{' '.join(words)} ({format_bytes(needed.device_bytes)})")
    return found


def _may_be_enough(changes: dict[str, Any], memory: Memory) -> bool:
    """Whether what changes make smaller is more than what is missing."""
    smaller: set[str] = set()
    for name, value in changes.items():
        if name in ("tp", "pp"):
            return True
        if name == "zero":
            smaller |= {*(_SHARDED if value == 3 else _STATES)}
        else:
            smaller |= {*_ACTIVATIONS}
    # What the allocator holds beyond the tensors may become less by any change.
    missing = memory.peak_bytes + sum(memory.overhead_bytes.values()) - memory.capacity_bytes
    return sum(size for role, size in memory.by_role.items() if role in smaller) > missing


def _changes(plan: Plan, cluster: Cluster) -> Iterator[dict[str, Any]]:
    singles = list(_singles(plan, cluster))
    yield from singles
    if plan.recompute != "full":
        yield from ({"recompute": "full", **change} for change in singles if "recompute" not in change)


def _singles(plan: Plan, cluster: Cluster) -> Iterator[dict[str, Any]]:
    if plan.recompute in ("none", "selective"):
        yield {"recompute": "full"}
    if plan.tp > 1 and not plan.sequence_parallel:
        yield {"sequence_parallel": True}
    if plan.zero == 0:
        yield {"zero": 1}
    if plan.zero < 3:
        yield {"zero": 3}
    if plan.micro_batch is not None and plan.micro_batch % 2 == 0:
        yield {"micro_batch": plan.micro_batch // 2}
    for name, most in (("tp", cluster.domain_gpus), ("pp", cluster.max_gpus)):
        for size in (2, 4, 8, 16):
            if getattr(plan, name) < size <= most and plan.dp is None:
                yield {name: size}
                break


def refuse_if_it_does_not_fit(result: Result, near: Sequence[str] = ()) -> None:
    """For those who want a plan beyond the device's memory to fail.

    Args:
        result: the prediction.
        near: what to change so that it fits.

    Raises:
        PlanError: the peak is above the capacity.
    """
    if result.memory is not None and not result.memory.fits:
        raise PlanError(f"the plan needs {shortage(result, near)}")


def shortage(result: Result, near: Sequence[str]) -> str:
    """What memory a plan needs of what there is, for what, and what to change so that it fits."""
    memory = result.memory
    assert memory is not None
    return (
        f"{format_bytes(memory.device_bytes)} of the {format_bytes(memory.capacity_bytes)} of "
        f"{result.device} ({'; '.join(memory.lines(3))}): "
        + (f"it fits with {' or '.join(near)}" if near else "share it over more --tp, --pp or --zero 3 ranks")
    )
