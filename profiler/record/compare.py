"""A captured job graph and a recorded job, held against each other: what collectives and operators each has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np

from echograph.errors import InputError, UsageError
from echograph.ir.comms.bandwidth import base_operation
from echograph.ir.comms.record import CallSignature, NativeSource
from echograph.ir.graph import JobGraph, Program
from echograph.ir.types import COMMUNICATIONS, CollectiveKind, OpKind, Phase
from echograph.profiler.record.folder import COMMS, TRACE, RankFolder, read_recording
from echograph.profiler.traces.kineto import read_trace
from echograph.profiler.traces.trace import OPERATORS, Trace

# Kind, phase and name of what is counted.
_OperatorKey: TypeAlias = tuple[str, str, str]

_BACKWARD = "autograd::engine::evaluate_function"
_OPTIMIZER = "Optimizer.step#"
UNKNOWN = "other"
SHARE = 0.01
"""Of a step: an operator that only the recording has, and that takes less, is not listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """One thing and how often a step of a rank has it.

    Attributes:
        rank: in the recording.
        what: "collective" or "operator".
        phase: part of the step.
        name: operation, bytes and ranks of a collective; name of an operator.
        captured: times in the graph.
        recorded: times in the recording, per step.
    """

    rank: int
    what: str
    phase: str
    name: str
    captured: int
    recorded: float

    @property
    def same(self) -> bool:
        """Whether both have it as often."""
        return self.captured == self.recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a graph and a recording have.

    Attributes:
        rows: of all ranks; collectives before operators.
        order: for each rank the first place at which their collectives differ, or -1.
    """

    rows: tuple[ComparisonRow, ...]
    order: dict[int, int]

    @property
    def same_collectives(self) -> bool:
        """Whether both have the same collectives, in the same order."""
        rows = [row for row in self.rows if row.what == "collective"]
        return all(row.same for row in rows) and set(self.order.values()) <= {-1}


def compare_recording(job: JobGraph, recording: Path) -> Comparison:
    """Counts what a step of each recorded rank has, there and in the program that the graph has for it.

    Collectives count by operation, phase, bytes as nccl-tests defines them, and number of ranks. What is
    communicated outside modules, autograd and optimizers has no phase in the recording, and is taken to have that
    of the graph's call in the same place, if that is the same otherwise. Operators are
    those of the graph that do something; in the recording one inside another that the graph has is a part of it,
    and what neither holds one of the graph's nor takes 1 % of the steps is left out. Operators that are computed
    again count as backward, where the recording sees them.

    Args:
        job: captured without ranks.
        recording: folder of `echoprof record`.

    Raises:
        InputError: there is no recording, or it holds no whole window.
        UsageError: the graph is of another number of ranks.
    """
    rows: list[ComparisonRow] = []
    order = {}
    for folder in read_recording(recording):
        rank, world = folder.metadata.rank, folder.metadata.world_size
        if job.world_size != world:
            raise UsageError(f"the graph is of {job.world_size} ranks, the recording of {world}: capture {world}")
        program = job.programs[job.program_of(rank)]
        graphs = _captured_calls(job, program)
        recorded = _told(_recorded_calls(folder), graphs)
        order[rank] = _first_difference(graphs, recorded)
        steps = folder.metadata.end_step - folder.metadata.start_step
        operators = _captured_operators(job, program)
        rows += _rows(rank, Counter(graphs), Counter(recorded), steps)
        rows += _rows(rank, operators, _recorded_operators(folder, operators), steps)
    return Comparison(rows=tuple(rows), order=order)


def _rows(
    rank: int, captured: Counter[_OperatorKey], recorded: Counter[_OperatorKey], steps: int
) -> list[ComparisonRow]:
    return [
        ComparisonRow(
            rank=rank, what=key[0], phase=key[1], name=key[2], captured=captured[key],
            recorded=recorded[key] / steps,
        )
        for key in sorted(captured | recorded)
    ]  # fmt: skip


def _first_difference(captured: Sequence[_OperatorKey], recorded: Sequence[_OperatorKey]) -> int:
    """Where the first recorded step leaves the captured one."""
    for place, call in enumerate(captured):
        if place >= len(recorded) or recorded[place] != call:
            return place
    return -1


def _captured_calls(job: JobGraph, program: Program) -> list[_OperatorKey]:
    ops, found = job.ops, []
    for op in _ops_of(program):
        kind = OpKind(int(ops.kind[op]))
        if kind not in COMMUNICATIONS:
            continue
        collective = kind is OpKind.COLLECTIVE
        name = CollectiveKind(int(ops.variant[op])).name.lower() if collective else kind.name.lower()
        ranks = job.group_size(job.groups[int(ops.group[op])])
        found.append(_call_key(name, Phase(int(ops.phase[op])).name.lower(), int(ops.nbytes[op]), ranks))
    return found


def _recorded_calls(folder: RankFolder) -> list[_OperatorKey]:
    file = folder.path / COMMS
    if not file.exists():
        return []
    source = NativeSource(file)
    source.open()
    calls: dict[tuple[str, int], tuple[int, CallSignature]] = {}
    for rows in source.rows():
        for number, sequence, queued, *_ in rows.tolist():
            what = source.signatures[number]
            assert what is not None
            # One that stands twice had not ended when it was first written.
            calls[what.channel, sequence] = queued, what
    return [
        _call_key(base_operation(what.op), what.phase or UNKNOWN, what.bytes, len(source.groups[what.group]))
        for _, what in sorted(calls.values(), key=lambda call: call[0])
    ]


def _told(recorded: Sequence[_OperatorKey], captured: Sequence[_OperatorKey]) -> list[_OperatorKey]:
    """The recorded calls; of those whose phase no hook knew, with that of the captured call in the same place."""
    told = []
    for place, call in enumerate(recorded):
        same = captured[place % len(captured)] if captured else call
        told.append(same if call[1] == UNKNOWN and same[2] == call[2] else call)
    return told


def _call_key(name: str, phase: str, nbytes: int, ranks: int) -> _OperatorKey:
    return "collective", phase, f"{name} of {nbytes:,} bytes, {ranks} ranks"


def _captured_operators(job: JobGraph, program: Program) -> Counter[_OperatorKey]:
    ops, counts = job.ops, Counter[_OperatorKey]()
    view = ops.is_view
    for op in _ops_of(program):
        if ops.kind[op] == OpKind.COMPUTE and not view[op]:
            phase = Phase(int(ops.phase[op])).name.lower()
            counts[_operator_key(job.strings[ops.name[op]], phase)] += 1
    return counts


def _ops_of(program: Program) -> list[int]:
    return [op for _, begin, end, _, _ in program.calls.tolist() for op in range(begin, end)]


def _operator_key(name: str, phase: str) -> _OperatorKey:
    name = ".".join(name.split(".")[:2])
    return "operator", {"recompute": "backward"}.get(phase, phase), name


def _recorded_operators(folder: RankFolder, captured: Counter[_OperatorKey]) -> Counter[_OperatorKey]:
    file = folder.path / TRACE
    if not file.exists():
        raise InputError(f"{folder.path}: holds no {TRACE}: the job ended before its window did")
    trace = read_trace(file)
    host = trace.of_category(OPERATORS | {"user_annotation"})
    known = {name for _, _, name in captured}
    spans = [_span(trace, row) for row in np.flatnonzero(host).tolist()]
    step_ps = sum(end - start for start, end, _, name in spans if name.startswith("ProfilerStep#"))
    walk = _Walk(known)
    for tid in {span[2] for span in spans}:
        walk.thread(sorted((s for s in spans if s[2] == tid), key=lambda span: (span[0], -span[1])))
    long = {key: walk.alone[key] for key, took in walk.times.items() if took > SHARE * step_ps}
    return walk.counts + Counter(long)


def _span(trace: Trace, row: int) -> tuple[int, int, int, str]:
    start = int(trace.start[row])
    return start, start + int(trace.duration[row]), int(trace.tid[row]), trace.text(row)


@dataclass(slots=True)
class _Walk:
    """Counts operators of threads, from the outside in.

    Attributes:
        known: operators that the graph has.
        counts: of those.
        alone: of the outermost ones that hold no known one.
        times: what these took, in picoseconds.
    """

    known: set[str]
    counts: Counter[_OperatorKey] = field(default_factory=Counter)
    alone: Counter[_OperatorKey] = field(default_factory=Counter)
    times: Counter[_OperatorKey] = field(default_factory=Counter)

    def thread(self, spans: Sequence[tuple[int, int, int, str]]) -> None:
        """Counts those of a thread: start, end, thread and name, by start, outer ones first."""
        above: list[_Open] = []
        for start, end, _, name in spans:
            while above and above[-1].end <= start:
                self._close(above.pop())
            key = _operator_key(name.replace("::", "."), _phase([outer.name for outer in above]))
            one = _Open(name=name, key=key, end=end, took=end - start)
            outer = [other for other in above if other.name.startswith("aten::")]
            if key[2] in self.known and not any(other.known for other in outer):
                self.counts[key] += 1
                one.known = True
                for other in above:
                    other.alone = False
            one.alone = name.startswith("aten::") and not outer and not one.known
            one.known |= any(other.known for other in outer)
            above.append(one)
        while above:
            self._close(above.pop())

    def _close(self, one: _Open) -> None:
        if one.alone:
            self.alone[one.key] += 1
            self.times[one.key] += one.took


@dataclass(slots=True, kw_only=True)
class _Open:
    """An operator that has not ended; `known`: it is one of the graph's or in one, `alone`: it holds none."""

    name: str
    key: _OperatorKey
    end: int
    took: int
    known: bool = False
    alone: bool = False


def _phase(outer: Sequence[str]) -> str:
    if any(name.startswith(_OPTIMIZER) for name in outer):
        return "optimizer"
    return "backward" if any(name.startswith(_BACKWARD) for name in outer) else "forward"
