"""A measured trace as a test of the prediction: the model and plan that it shows, predicted, and compared with it.

The model is compiled, spread and simulated as `echosim run` does it, on the device that the trace names. What ran
in the trace's steps is then laid beside what was predicted, operator by operator. Where no model is known, the
graph that is lowered from the trace itself is the base: its kernels take what our cost models say of their shapes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from echograph.errors import PlanError, UsageError
from echograph.ir.graph import JobGraph, StepGraph
from echograph.ir.tables import text_table
from echograph.ir.timeline import Lane, Timeline
from echograph.ir.types import COMMUNICATIONS, CollectiveKind, OpKind, Phase
from echograph.models import model_entries
from echograph.profiler.analyses.step_calls import (
    COMMUNICATION,
    OPTIMIZER,
    DeviceTime,
    StepCall,
    TracedStep,
    TracedTraining,
    device_time,
    family,
    launched_elements,
    traced_steps,
    traced_training,
)
from echograph.profiler.costs import load_device
from echograph.profiler.traces.trace import Trace, TraceSet
from echograph.progress import Progress, silent
from echograph.simulator.clusters import DEFAULT_CLUSTER, cluster_names, load_cluster
from echograph.simulator.result import Result
from echograph.units import PS_PER_S, to_s
from echograph.workflow.plan import Plan
from echograph.workflow.system import System, SystemOptions

if TYPE_CHECKING:
    from echograph.frontend.pytorch.spec import ModelSizes

COMPILED, LOWERED = "compiled model", "graph lowered from the trace"
"""What a trace was compared with."""
PARTS = ("step", "compute", "communication", "hidden", "idle")
"""What a step's time is told apart into: `DeviceTime`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
    """An operator in a part of the step; times and counts are of one step on one rank.

    Attributes:
        operator: its family, as "convolution".
        phase: part of the step; "communication" of collectives, "optimizer" of all of the optimizer.
        calls: measured calls.
        predicted_calls: predicted ones.
        matched: measured calls that stand for a predicted one.
        measured_s: device time, seconds.
        matched_s: that of the matched calls.
        predicted_s: predicted time of all its calls.
    """

    operator: str
    phase: str
    calls: float
    predicted_calls: float
    matched: float
    measured_s: float
    matched_s: float
    predicted_s: float

    @property
    def difference_s(self) -> float:
        """How much longer it took than was predicted."""
        return self.measured_s - self.predicted_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceValidation:
    """A trace beside its prediction.

    Attributes:
        source: the trace.
        base: what predicted it: `COMPILED` or `LOWERED`.
        model: name of the model; "" for a graph lowered from the trace.
        plan: words of the plan that were read off the trace or given.
        device: of the profile.
        cluster: whose network and hosts are taken.
        rank: the rank that is compared.
        steps: names of the steps that are averaged.
        parts: measured and predicted seconds of a step: "step", "compute", "communication", "hidden" (of the
            communication, beside computation), "idle" of the device.
        operators: rows, those first that differ most.
        notes: what was inferred, assumed or is missing, a line each.
    """

    source: str
    base: str
    model: str
    plan: Mapping[str, Any]
    device: str
    cluster: str
    rank: int
    steps: tuple[str, ...]
    parts: Mapping[str, tuple[float, float]]
    operators: tuple[OperatorRow, ...]
    notes: tuple[str, ...]

    def matched_share(self, *, communication: bool = True) -> float:
        """Share of the measured device time that stands for a predicted operator.

        Args:
            communication: count collectives, in whose time a rank waits for others, too.
        """
        rows = [row for row in self.operators if communication or row.phase != COMMUNICATION]
        measured = sum(row.measured_s for row in rows)
        return sum(row.matched_s for row in rows) / measured if measured else 0.0

    def to_json(self) -> dict[str, Any]:
        """The record of `echosim validate --trace --json`."""
        found = asdict(self)
        found["matched_share"] = self.matched_share()
        found["matched_share_without_communication"] = self.matched_share(communication=False)
        found["parts"] = {
            name: {"measured_s": measured, "predicted_s": predicted, "difference_s": measured - predicted}
            for name, (measured, predicted) in self.parts.items()
        }
        found["operators"] = [asdict(row) | {"difference_s": row.difference_s} for row in self.operators]
        return found

    def __str__(self) -> str:
        """What was compared with what, where the step's time goes in both, and the operators that differ most."""
        return "\n".join(_lines(self))


_SHOWN = 24


def _lines(found: TraceValidation) -> Iterator[str]:
    words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in found.plan.items())
    steps = found.steps[0] if len(found.steps) == 1 else f"{found.steps[0]} to {found.steps[-1]}"
    yield f"{found.source}, rank {found.rank}, {steps}"
    yield f"  base          {found.base}{f': {found.model}' if found.model else ''} {words}".rstrip()
    yield f"  on            {found.device}, network and hosts of {found.cluster}"
    yield (
        f"  matched       {found.matched_share():.1%} of the measured device time "
        f"({found.matched_share(communication=False):.1%} outside communication)"
    )
    rows = [
        (name, f"{measured * 1e3:.3f}", f"{predicted * 1e3:.3f}", f"{(measured - predicted) * 1e3:+.3f}")
        for name, (measured, predicted) in found.parts.items()
    ]
    yield text_table(("part of a step", "measured ms", "predicted ms", "difference ms"), rows)
    yield text_table(
        ("operator", "phase", "calls", "predicted", "matched", "measured ms", "predicted ms", "difference ms"),
        [
            (
                row.operator[:48], row.phase, f"{row.calls:g}", f"{row.predicted_calls:g}", f"{row.matched:g}",
                f"{row.measured_s * 1e3:.3f}", f"{row.predicted_s * 1e3:.3f}", f"{row.difference_s * 1e3:+.3f}",
            )
            for row in found.operators[:_SHOWN]
        ],
    )  # fmt: skip
    if len(rest := found.operators[_SHOWN:]):
        yield f"and {len(rest)} more, which differ by {sum(abs(r.difference_s) for r in rest) * 1e3:.3f} ms in all"
    yield from (f"note: {note}" for note in found.notes)


# -- matching --------------------------------------------------------------------------------------------------

_CallKey = tuple[str, str, int]


def compare_operators(
    measured: Sequence[Sequence[StepCall]], predicted: Sequence[StepCall]
) -> tuple[OperatorRow, ...]:
    """The operators of some measured steps beside those of a predicted one, those first that differ most.

    The n-th call of an operator in a phase stands for the n-th predicted one; where both sides say how large their
    tensors are, of those that are equally large. All of the optimizer stands for all of it.

    Args:
        measured: the calls of each step.
        predicted: the calls of one.
    """
    sized = any(call.size for calls in measured for call in calls if call.phase != COMMUNICATION)
    ours = Counter(_key(call, sized) for call in predicted)
    sums: dict[tuple[str, str], _Sums] = defaultdict(_Sums)
    for call in predicted:
        row = sums[call.operator, call.phase]
        row.predicted_calls, row.predicted = row.predicted_calls + 1, row.predicted + call.duration
    for calls in measured:
        left = ours.copy()
        for call in calls:
            row, key = sums[call.operator, call.phase], _key(call, sized)
            row.calls, row.measured = row.calls + 1, row.measured + call.duration
            if left[key] > 0:
                row.matched_calls, row.matched = row.matched_calls + 1, row.matched + call.duration
                left[key] -= call.phase != OPTIMIZER
    steps = max(1, len(measured))
    rows = [
        OperatorRow(
            operator=operator,
            phase=phase,
            calls=row.calls / steps,
            predicted_calls=row.predicted_calls,
            matched=row.matched_calls / steps,
            measured_s=row.measured / steps / PS_PER_S,
            matched_s=row.matched / steps / PS_PER_S,
            predicted_s=row.predicted / PS_PER_S,
        )
        for (operator, phase), row in sums.items()
    ]
    return tuple(sorted(rows, key=lambda row: -abs(row.difference_s)))


@dataclass(slots=True)
class _Sums:
    """Of an operator in a phase: calls and picoseconds, over all measured steps and of one predicted step."""

    calls: int = 0
    matched_calls: int = 0
    predicted_calls: int = 0
    measured: int = 0
    matched: int = 0
    predicted: int = 0


def _key(call: StepCall, sized: bool) -> _CallKey:
    """What calls have in common that may stand for each other."""
    counts = sized and call.phase not in (COMMUNICATION, OPTIMIZER) and not call.operator.startswith("ddp.")
    return call.operator, call.phase, call.size if counts else 0


def matched_calls(
    measured: Sequence[StepCall], predicted: Sequence[StepCall]
) -> Iterator[tuple[StepCall, StepCall]]:
    """Calls that surely stand for each other: the n-th of as many, without those of the optimizer and collectives.

    Args:
        measured: the calls of a step.
        predicted: those of its prediction.
    """
    sized = any(call.size for call in measured if call.phase != COMMUNICATION)
    ours: dict[_CallKey, list[StepCall]] = defaultdict(list)
    theirs: dict[_CallKey, list[StepCall]] = defaultdict(list)
    for calls, of in ((measured, theirs), (predicted, ours)):
        for call in calls:
            if call.phase not in (COMMUNICATION, OPTIMIZER):
                of[_key(call, sized)].append(call)
    for key, calls in theirs.items():
        if len(calls) == len(ours[key]):
            yield from zip(calls, ours[key], strict=True)


def predicted_calls(job: JobGraph, timeline: Timeline, program: int) -> list[StepCall]:
    """What a program runs on its device, in the order in which it begins; views and waits take no time.

    Args:
        job: the job.
        timeline: of its simulation.
        program: number of the program.
    """
    rows = np.flatnonzero((timeline.program == program) & (timeline.lane == Lane.DEVICE) & (timeline.duration > 0))
    rows = rows[np.argsort(timeline.start[rows], kind="stable")]
    known: dict[int, tuple[str, str, int]] = {}
    found = []
    for row in rows.tolist():
        op = int(timeline.op[row])
        if op not in known:
            known[op] = _described(job, op)
        operator, phase, size = known[op]
        found.append(
            StepCall(
                operator=operator, phase=phase, size=size, duration=int(timeline.duration[row]),
                start=int(timeline.start[row]), number=op,
            )
        )  # fmt: skip
    return found


def _described(job: JobGraph, op: int) -> tuple[str, str, int]:
    ops = job.ops
    kind, phase = OpKind(int(ops.kind[op])), Phase(int(ops.phase[op]))
    if kind in COMMUNICATIONS:
        word = (
            CollectiveKind(int(ops.variant[op])).name.lower() if kind is OpKind.COLLECTIVE else kind.name.lower()
        )
        return word, COMMUNICATION, int(ops.nbytes[op])
    name = job.strings[ops.name[op]]
    if phase is Phase.OPTIMIZER:
        return OPTIMIZER, OPTIMIZER, 0
    inputs = [job.tensors[i].numel for i in ops.inputs.row(op)]
    return family(name), phase.name.lower(), max(inputs, default=0)


# -- what a trace shows ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class TraceSetup:
    """What a trace shows of a training step, and what was given.

    Attributes:
        model: its name; "" where it is not known.
        plan: how the step is spread.
        spec: fields of `StepSpec` that are known.
        notes: what was inferred or assumed, a line each.
    """

    model: str
    plan: Plan
    spec: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def validate_trace(
    traces: TraceSet,
    *,
    model: str = "",
    plan: Plan | None = None,
    sizes: ModelSizes | None = None,
    spec: Mapping[str, Any] = MappingProxyType({}),
    system_options: SystemOptions | None = None,
    source: str = "",
    progress: Progress = silent,
) -> TraceValidation:
    """Predicts the step that a trace shows, and lays both side by side.

    Args:
        traces: the job's; the lowest rank is compared.
        model: a name of the zoo, a configuration, or `file.py:function`; "": the model whose parameters are as
            many as what the ranks add up in a step.
        plan: what the trace does not show of how the step is spread, or shows wrong.
        sizes: of the model; None: samples as the trace's shapes or grids tell.
        spec: fields of `StepSpec` that are given.
        system_options: another device than the trace names, and the like.
        source: what the trace is called.
        progress: told what goes on.

    Raises:
        UsageError: the trace shows neither a model nor shapes; nothing ran on a device.
        EchoError: as `compile`, `lower` and `simulate`.
    """
    found = predict_trace(
        traces, model=model, plan=plan, sizes=sizes, spec=spec, system_options=system_options, progress=progress
    )
    source = source or Path(traces[found.rank].path).name
    if found.job is None or found.result is None:
        from echograph.workflow.validation.lowered import validate_lowered

        return validate_lowered(traces, found.steps, found.system, source, found.setup.notes, progress)
    calls, time = _of_rank(found.result, found.job, found.rank)
    plan = found.setup.plan
    return TraceValidation(
        source=source,
        base=COMPILED,
        model=found.setup.model,
        plan={name: value for name, value in plan.given.items() if name != "cluster"} | found.setup.spec,
        device=found.system.cluster.device,
        cluster=found.system.cluster.name,
        rank=found.rank,
        steps=tuple(step.name for step in found.steps),
        parts=beside(found.steps, time),
        operators=compare_operators([step.calls for step in found.steps], calls),
        notes=tuple(found.setup.notes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedTrace:
    """The step that a trace shows, and its prediction.

    Attributes:
        rank: the rank whose steps these are.
        steps: as they were measured.
        setup: what was read off the trace.
        system: where it ran.
        job: what every rank executes; None where no model is known.
        result: the prediction of a step; None with the job.
    """

    rank: int
    steps: list[TracedStep]
    setup: TraceSetup
    system: System
    job: JobGraph | None = None
    result: Result | None = None


def predict_trace(
    traces: TraceSet,
    *,
    model: str = "",
    plan: Plan | None = None,
    sizes: ModelSizes | None = None,
    spec: Mapping[str, Any] = MappingProxyType({}),
    system_options: SystemOptions | None = None,
    progress: Progress = silent,
) -> PredictedTrace:
    """The step of the lowest rank of a trace, and what is predicted for it.

    Arguments and errors are those of `validate_trace`.
    """
    from echograph.workflow.predict import lower, simulate

    rank = min(traces)
    trace = traces[rank]
    progress("reading the steps")
    steps = traced_steps(trace)
    if not any(step.calls for step in steps):
        raise UsageError(f"{trace.path}: nothing ran on a device in its steps: there is nothing to compare")
    setup = _setup(traced_training(trace, steps), model, plan or Plan(), dict(spec))
    system = _system(trace, setup, system_options or SystemOptions())
    if not setup.model:
        return PredictedTrace(rank=rank, steps=steps, setup=setup, system=system)
    graph = _compiled(setup, sizes, progress)
    setup.plan = _with_samples(graph, trace, steps, setup, sizes)
    if not any(call.size for call in steps[0].calls if call.phase != COMMUNICATION):
        setup.notes.append("the trace has no shapes: calls are matched by operator, phase and order alone")
    progress("simulating")
    job = lower(graph, setup.plan, system)
    if rank >= job.world_size:
        raise PlanError(f"the trace is of rank {rank}, and the plan has {job.world_size} ranks: give --gpus")
    result = simulate(job, system, plan=setup.plan, memory=False)
    return PredictedTrace(rank=rank, steps=steps, setup=setup, system=system, job=result.job or job, result=result)


def _of_rank(result: Result, job: JobGraph, rank: int) -> tuple[list[StepCall], DeviceTime]:
    timeline, program = result.timeline, job.program_of(rank)
    calls = predicted_calls(job, timeline, program)
    start = np.array([call.start for call in calls], np.int64)
    end = start + np.array([call.duration for call in calls], np.int64)
    communicates = np.array([call.phase == COMMUNICATION for call in calls], np.bool_)
    return calls, device_time(result.step_ps, start, end, communicates)


def beside(steps: Sequence[TracedStep], predicted: DeviceTime) -> dict[str, tuple[float, float]]:
    """Where a step's time goes, measured (the mean of the steps) and predicted; seconds."""
    return {
        name: (
            float(np.mean([getattr(step.time, name) for step in steps])) / 1e12,
            to_s(getattr(predicted, name)),
        )
        for name in PARTS
    }


def _setup(shows: TracedTraining, model: str, plan: Plan, spec: dict[str, Any]) -> TraceSetup:
    """What the trace shows of the model and the plan; what is given counts more."""
    found = TraceSetup(model, plan, spec)
    if not model and shows.gradients:
        named = [entry.name for entry in model_entries() if entry.parameters == shows.gradients]
        if len(named) == 1:
            found.model = named[0]
            found.notes.append(
                f"model: {named[0]}, whose {shows.gradients:,} parameters are as many as the ranks add up"
            )
    given = plan.given
    if "gpus" not in given and shows.ranks:
        found.plan = replace(found.plan, gpus=shows.ranks)
    if not found.model:
        return found
    if "recompute" not in given and shows.recomputes:
        found.plan = replace(found.plan, recompute="full")
        found.notes.append("recompute: full, since forward operators run in the backward pass")
    if "dtype" not in spec and shows.dtype in ("fp32", "bf16", "fp16"):
        found.spec["dtype"] = shows.dtype
        if shows.dtype != "fp32":
            found.spec.setdefault("master_weights", False)
        found.notes.append(f"dtype: {shows.dtype}, that of the gradients")
    if "optimizer" not in spec and shows.optimizer in ("sgd", "adam", "adamw"):
        found.spec["optimizer"] = shows.optimizer
    if shows.others and not set(given) - {"gpus", "cluster"}:
        raise UsageError(
            f"the trace has {', '.join(shows.others)} beside the sums of data parallelism: say how the step is "
            "spread, as --zero 3 or --tp 8"
        )
    return found


def _system(trace: Trace, found: TraceSetup, options: SystemOptions) -> System:
    """The trace's device, in the cluster that is given or the first one that has it."""
    from echograph.profiler.analyses.shapes import profile_of

    said: list[str] = []
    profile = None if options.device else profile_of(trace, said)
    if profile is None and not options.device:
        raise UsageError(f"{trace.path}: names no device with a profile: give --device, see echosim devices")
    name = profile.name if profile else load_device(options.device).name
    cluster = found.plan.given.get("cluster")
    if cluster is None:
        having = [one for one in cluster_names() if load_cluster(one).device == name]
        cluster = having[0] if having else DEFAULT_CLUSTER
        found.notes.append(f"network and hosts: assumed to be those of {cluster}: give --cluster")
        found.plan = replace(found.plan, cluster=cluster)
    return replace(options, device=options.device or name).system(cluster)


def _compiled(found: TraceSetup, sizes: ModelSizes | None, progress: Progress) -> StepGraph:
    from echograph.frontend.pytorch.spec import StepSpec
    from echograph.workflow.compile import compile as compile_model

    of_model = {} if sizes is None else asdict(sizes)
    return compile_model(found.model, StepSpec(**found.spec), progress=progress, **of_model)


def _with_samples(
    graph: StepGraph, trace: Trace, steps: list[TracedStep], found: TraceSetup, sizes: ModelSizes | None
) -> Plan:
    """The plan with the samples of a micro-batch, as the trace's tensors are as much larger than the graph's."""
    if "micro_batch" in found.plan.given or (sizes is not None and sizes.batch_size is not None):
        return found.plan
    was = graph.workload.batch_size
    ours = _sizes_of_graph(graph)
    forward = [call for call in steps[0].calls if call.phase == "forward"]
    theirs, how = {call: call.size for call in forward if call.size}, "shapes"
    if not theirs:
        theirs, how = launched_elements(trace, forward), "grids of elementwise kernels, 4 elements a thread"
    votes = Counter[int]()
    for word, mine in ours.items():
        measured = [size for call, size in theirs.items() if call.operator == word]
        if len(measured) == len(mine):
            votes.update(round(was * size / own) for size, own in zip(measured, mine, strict=True) if own)
    best = votes.most_common(1)
    if not best or best[0][0] < 1 or best[0][1] * 2 <= sum(votes.values()):
        raise UsageError(f"{trace.path}: does not show how many samples a micro-batch has: give --micro-batch")
    found.notes.append(f"micro-batch: {best[0][0]} samples, by the {how}")
    return replace(found.plan, micro_batch=best[0][0])


_PER_SAMPLE = ("relu", "gelu", "silu", "batch_norm", "native_layer_norm", "native_dropout", "_softmax")
"""Families whose tensors grow with the samples alone."""


def _sizes_of_graph(graph: StepGraph) -> dict[str, list[int]]:
    """Elements that operators of the forward pass read, in order, of families that grow with the samples."""
    from echograph.ir.unfold import unfold

    flat = unfold(graph)
    found: dict[str, list[int]] = defaultdict(list)
    for row in np.flatnonzero(flat.ops.phase == Phase.FORWARD).tolist():
        word = family(flat.strings[flat.ops.name[row]])
        if word in _PER_SAMPLE:
            found[word].append(max((flat.tensors[i].numel for i in flat.ops.inputs.row(row)), default=0))
    return found
