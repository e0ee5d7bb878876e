"""The graph that a trace itself lowers to, with kernels that take what our cost models say of their shapes.

It is the base of a comparison where no model is known: which operators run, on which streams and after what is the
trace's own; how long they take is predicted, and collectives as well where the network is known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from echograph.errors import EchoError, UsageError
from echograph.ir.types import COMMUNICATIONS, OpKind
from echograph.profiler.analyses.shapes import costed_calls
from echograph.profiler.analyses.step_calls import COMMUNICATION, DeviceTime, StepCall, TracedStep, device_time
from echograph.profiler.replay import lower as lower_traces
from echograph.profiler.traces.trace import TraceSet
from echograph.progress import Progress
from echograph.simulator.result import Result
from echograph.units import to_ps, to_s
from echograph.workflow.replay import replay, shown_steps
from echograph.workflow.replay import steps as replayed_steps
from echograph.workflow.system import System
from echograph.workflow.validation.traced import (
    LOWERED,
    PARTS,
    OperatorRow,
    TraceValidation,
)


def validate_lowered(
    traces: TraceSet,
    steps: list[TracedStep],
    system: System,
    source: str,
    notes: Sequence[str],
    progress: Progress,
) -> TraceValidation:
    """A trace beside a replay of it in which kernels and collectives take what is predicted.

    Args:
        traces: the job's.
        steps: those of its lowest rank.
        system: its device and its network.
        source: what the trace is called.
        notes: what was said before.
        progress: told what goes on.

    Raises:
        UsageError: the trace has no shapes, so no kernel can be predicted.
    """
    rank = min(traces)
    assert system.device is not None
    progress("pricing the kernels")
    priced = {number: _priced(traces, number, system) for number in traces}
    if not priced[rank].calls:
        raise UsageError(
            f"{traces[rank].path}: shows neither which model ran nor the shapes of its operators: give --model "
            "(and --plan words as --gpus, --zero), or record with record_shapes=True"
        )
    progress("replaying")
    was = replay(lower_traces(traces, source).graph)
    job = lower_traces(traces, source, instead={number: one.works for number, one in priced.items()}).graph
    said = [*notes, "no model is known: operators, streams and the host's times are the trace's own"]
    try:
        result, networked = replay(job, system=system), True
    except EchoError as why:
        result, networked = replay(job), False
        said.append(f"collectives take what they took: {why}")
    return TraceValidation(
        source=source,
        base=LOWERED,
        model="",
        plan={},
        device=system.cluster.device,
        cluster=system.cluster.name,
        rank=rank,
        steps=tuple(step.name for step in steps),
        parts=_parts(was, result, rank, len(steps)),
        operators=_rows(steps, priced[rank].calls, _collectives(result, rank) if networked else None),
        notes=tuple(said),
    )


@dataclass(slots=True)
class _Priced:
    """Predicted picoseconds of a rank's work by row, and of its calls by their first row."""

    works: dict[int, int] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)


def _priced(traces: TraceSet, rank: int, system: System) -> _Priced:
    """What a rank's kernels should take; those of one call share it as they shared what it took."""
    trace = traces[rank]
    assert system.device is not None
    found = _Priced()
    for call, use in costed_calls(trace, system.device):
        cost = use.predicted()
        took = trace.duration[call.works]
        if cost is not None and (whole := int(took.sum())):
            found.calls[call.works[0]] = predicted = to_ps(float(cost.seconds))
            scaled = np.rint(took * (predicted / whole)).astype(np.int64)
            found.works |= dict(zip(call.works, scaled.tolist(), strict=True))
    return found


def _parts(was: Result, result: Result, rank: int, steps: int) -> dict[str, tuple[float, float]]:
    """Where a step's time goes, replayed as measured and as predicted: all of the trace over its steps."""
    before, after = (_device_time(one, rank, steps) for one in (was, result))
    return {name: (to_s(getattr(before, name)), to_s(getattr(after, name))) for name in PARTS}


def _device_time(result: Result, rank: int, steps: int) -> DeviceTime:
    """Where a step's time goes in the replay, on average."""
    job, timeline = result.job, result.timeline
    assert job is not None
    kind = job.ops.kind[timeline.op]
    device = np.isin(kind, (OpKind.COMPUTE, OpKind.COPY, *COMMUNICATIONS))
    program = job.program_of(rank)
    rows = np.flatnonzero(device & (timeline.program == program) & (timeline.duration > 0))
    shown = shown_steps(replayed_steps(result))
    took = [step.replayed_s for step in shown if step.role == job.programs[program].role]
    whole = device_time(
        to_ps(sum(took)), timeline.start[rows], timeline.end[rows], np.isin(kind[rows], COMMUNICATIONS)
    )
    return DeviceTime(
        step=whole.step // steps, compute=whole.compute // steps, communication=whole.communication // steps,
        hidden=whole.hidden // steps,
    )  # fmt: skip


def _collectives(result: Result, rank: int) -> Mapping[str, int]:
    """Predicted picoseconds of a rank's collectives in the whole replay, by kind."""
    job, timeline = result.job, result.timeline
    assert job is not None
    communicates = np.isin(job.ops.kind[timeline.op], COMMUNICATIONS)
    rows = np.flatnonzero(communicates & (timeline.program == job.program_of(rank)))
    found: dict[str, int] = defaultdict(int)
    for row in rows.tolist():
        found[job.strings[job.ops.name[timeline.op[row]]]] += int(timeline.duration[row])
    return found


def _rows(
    steps: Sequence[TracedStep], priced: Mapping[int, int], collectives: Mapping[str, int] | None
) -> tuple[OperatorRow, ...]:
    of: dict[tuple[str, str], list[StepCall]] = defaultdict(list)
    for step in steps:
        for call in step.calls:
            of[call.operator, call.phase].append(call)
    rows = [_row(key, calls, priced, collectives, len(steps)) for key, calls in of.items()]
    return tuple(sorted(rows, key=lambda row: -abs(row.difference_s)))


def _row(
    key: tuple[str, str], calls: Sequence[StepCall], priced: Mapping[int, int],
    collectives: Mapping[str, int] | None, steps: int,
) -> OperatorRow:  # fmt: skip
    """What has no prediction is counted as it was measured, and matches nothing."""
    operator, phase = key
    known = [call for call in calls if call.number in priced]
    predicted = sum(priced[call.number] for call in known)
    predicted += sum(call.duration for call in calls if call.number not in priced)
    if phase == COMMUNICATION and collectives is not None:
        known, predicted = list(calls), collectives.get(operator, 0)
    return OperatorRow(
        operator=operator,
        phase=phase,
        calls=len(calls) / steps,
        predicted_calls=len(known) / steps,
        matched=len(known) / steps,
        measured_s=to_s(sum(call.duration for call in calls) // steps),
        matched_s=to_s(sum(call.duration for call in known) // steps),
        predicted_s=to_s(predicted // steps),
    )
