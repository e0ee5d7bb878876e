"""What the devices of one rank ran in its steps, operator by operator, in words that a prediction has too.

A profiler names the operator that launched (`aten::cudnn_batch_norm`), a graph the one that was dispatched
(`aten.native_batch_norm`), and a framework's own copies are `aten::mul` in one and `ddp.copy_to_bucket` in the
other. `family` gives both one word; a family is a line of the table.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from echograph.ir.columns import Bools, Int64
from echograph.ir.intervals import union
from echograph.ir.types import Phase
from echograph.profiler.analyses.shapes import described_calls, device_calls
from echograph.profiler.analyses.work import KernelKind, kernel_kinds
from echograph.profiler.traces.collectives import collective_of_kernel, collectives
from echograph.profiler.traces.events import details
from echograph.profiler.traces.operands import TORCH_DTYPES
from echograph.profiler.traces.origins import Origins, origins
from echograph.profiler.traces.relations import profiler_steps, step_of_rows
from echograph.profiler.traces.trace import NONE, OPERATORS, Trace

COMMUNICATION, OPTIMIZER = "communication", "optimizer"
"""Stand for the phase of what is communicated, and for all operators of the optimizer: who updates many tensors at
once is free in how many kernels it does that."""

# Of what an operator ran within, and of its own name; the first that matches counts.
_WITHIN = (
    ("ddp.copy_to_bucket", r"torch::distributed::reducer::(mul_out|copy_)"),
    ("ddp.copy_from_bucket", r"torch\.distributed\.ddp\.reducer::copy_bucket_to_grad"),
)
_FAMILIES = (
    ("batch_norm_backward", r"(cudnn|miopen|native)_batch_norm_backward"),
    ("batch_norm", r"(cudnn|miopen|native)_batch_norm"),
    ("convolution", r"(cudnn|miopen|mkldnn)?_?convolution"),
    ("relu", r"relu|clamp_min"),
    ("attention_backward", r"_scaled_dot_product_\w*attention_backward|flash_attn_backward"),
    ("attention", r"_scaled_dot_product_\w*attention|flash_attn_forward"),
    ("copy", r"copy|clone|contiguous|_to_copy"),
    ("fill", r"fill|zero|zeros|ones|ones_like|zeros_like|full|full_like"),
)
DDP = "ddp."
_within = [(word, re.compile(pattern)) for word, pattern in _WITHIN]
_families = [(word, re.compile(pattern)) for word, pattern in _FAMILIES]


def family(operator: str) -> str:
    """The word of an operator, whoever names it; in place or not is the same: `aten::clamp_min_` is "relu"."""
    if operator.startswith(DDP):
        return operator
    name = operator.rpartition("::")[2] if "::" in operator else operator.removeprefix("aten.")
    name = name.rstrip("_") or name
    return next((word for word, pattern in _families if pattern.fullmatch(name)), name)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCall:
    """One call of an operator, or one collective, that kept a device busy.

    Attributes:
        operator: family of the operator (`family`), or kind of the collective.
        phase: "forward", "backward", "recompute"; `OPTIMIZER`, `COMMUNICATION`.
        size: elements of the largest tensor that it reads; of a collective bytes of a rank's buffer; 0: not known.
        duration: picoseconds during which any of its work ran.
        start: picoseconds, of its first work.
        number: row of its first work in the trace; of the operation in a graph.
    """

    operator: str
    phase: str
    size: int
    duration: int
    start: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTime:
    """Where a step's time goes on a rank's device; picoseconds.

    Attributes:
        step: the step.
        compute: something computes, copies or sets.
        communication: something communicates.
        hidden: both.
    """

    step: int
    compute: int
    communication: int
    hidden: int

    @property
    def idle(self) -> int:
        """Nothing runs."""
        return self.step - self.compute - self.communication + self.hidden


def device_time(step: int, start: Int64, end: Int64, communicates: Bools) -> DeviceTime:
    """Where the time goes of the work that a step launched, wherever it ends."""
    compute, communication = (union(start[rows], end[rows]).length for rows in (~communicates, communicates))
    busy = union(start, end).length
    return DeviceTime(
        step=step, compute=compute, communication=communication, hidden=compute + communication - busy
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A step of a rank.

    Attributes:
        name: "ProfilerStep#4"; "trace" of a whole trace without steps.
        calls: what ran, in the order of launches.
        time: where its time went.
    """

    name: str
    calls: tuple[StepCall, ...]
    time: DeviceTime


def traced_steps(trace: Trace) -> list[TracedStep]:
    """The steps of a rank; the whole trace is one where no step is marked.

    Raises:
        InputError: the trace's file is gone.
    """
    found = origins(trace)
    of_row, marks = step_of_rows(trace), profiler_steps(trace)
    numbers = marks.number.tolist()
    if not numbers:
        of_row, numbers = np.zeros(len(trace), np.int64), [0]
    calls = [*_computations(trace, found), *_transfers(trace, found)]
    works, kind = np.flatnonzero(trace.on_device), kernel_kinds(trace)
    chosen = {number: works[of_row[works] == number] for number in numbers}
    chosen = {number: rows for number, rows in chosen.items() if len(rows)}
    lengths = _lengths(trace, chosen, dict(zip(marks.number.tolist(), marks.end.tolist(), strict=True)))
    steps = []
    for number, rows in chosen.items():
        communicates = (kind == KernelKind.COMMUNICATION)[rows]
        steps.append(
            TracedStep(
                name=f"ProfilerStep#{number}" if len(marks.number) else "trace",
                calls=tuple(call for call in calls if of_row[call.number] == number),
                time=device_time(lengths[number], trace.start[rows], trace.end[rows], communicates),
            )
        )
    return steps


def _lengths(trace: Trace, works: dict[int, Int64], ends: dict[int, int]) -> dict[int, int]:
    """How long each step took: from its first work to that of the next one, since the host runs ahead.

    The last one ends with its last work, or where the host ends it.
    """
    numbers = list(works)
    if not numbers:
        return {}
    begins = [int(trace.start[rows].min()) for rows in works.values()]
    last = max(int(trace.end[rows].max()) for rows in works.values())
    ended = max(last, ends.get(numbers[-1], last))
    return {n: end - begin for n, begin, end in zip(numbers, begins, [*begins[1:], ended], strict=True)}


def _computations(trace: Trace, found: Origins) -> Iterator[StepCall]:
    """Calls of operators, in the order of launches."""
    calls = device_calls(trace, found)
    described = described_calls(trace, found, sorted({call.row for call in calls if call.row != NONE}))
    calls.sort(key=lambda call: int(trace.start[call.row if call.row != NONE else call.works[0]]))
    for call in calls:
        phase = found.phase[call.works[0]]
        start = trace.start[call.works]
        begin, end = union(start, start + trace.duration[call.works])
        shaped = described.get(call.row)
        sizes = [prod(one.shape) for one in shaped.tensors] if shaped is not None else []
        word = OPTIMIZER if phase is Phase.OPTIMIZER else _word(trace, found, call.row, call.works[0])
        yield StepCall(
            operator=word,
            # Buckets are copied back by a callback, which profilers show outside of the backward pass.
            phase="backward" if word.startswith(DDP) else phase.name.lower(),
            size=0 if phase is Phase.OPTIMIZER else max(sizes, default=0),
            duration=int((end - begin).sum()),
            start=int(begin.min()),
            number=call.works[0],
        )


def _word(trace: Trace, found: Origins, row: int, work: int) -> str:
    """The family of an operator, or of what it is a part of; work that no operator launched has its own name."""
    if row == NONE:
        return trace.text(work)
    above = row
    while above != NONE:
        name = trace.text(above)
        if (word := next((w for w, pattern in _within if pattern.match(name)), None)) is not None:
            return word
        above = int(found.stacks.parent[above])
    return family(trace.text(row))


def _transfers(trace: Trace, found: Origins) -> Iterator[StepCall]:
    for call in collectives(trace, found.stacks):
        if trace.stream[call.row] >= 0:
            yield StepCall(
                operator=call.kind or trace.text(call.row), phase=COMMUNICATION, size=call.nbytes,
                duration=int(trace.duration[call.row]), start=int(trace.start[call.row]), number=call.row,
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedTraining:
    """What a rank's trace says of how it trains; what it does not say is "" or 0.

    Attributes:
        ranks: of the job.
        gradients: elements that all ranks add up in a step, as data parallelism does.
        dtype: of these elements: "fp32", ...
        optimizer: the name of its class in lower case: "sgd".
        recomputes: whether forward operators run in the backward pass.
        others: collectives beside the sums and broadcasts of data parallelism, by kind.
    """

    ranks: int
    gradients: int
    dtype: str
    optimizer: str
    recomputes: bool
    others: tuple[str, ...]


_LEAST_GRADIENTS = 1024
"""Elements of a sum from which on it is of gradients: losses and norms are summed, too."""
_OPTIMIZER_STEP = re.compile(r"Optimizer\.step#(\w+)\.step")
_OF_DATA_PARALLELISM = {"all_reduce", "broadcast", "barrier", ""}


def traced_training(trace: Trace, steps: list[TracedStep]) -> TracedTraining:
    """What a trace says of how a rank trains.

    Args:
        trace: the rank's.
        steps: its steps.
    """
    said = [match[1].lower() for text in trace.strings if (match := _OPTIMIZER_STEP.match(text))]
    gradients, dtype = _summed(trace)
    kinds_run = {call.operator for step in steps for call in step.calls if call.phase == COMMUNICATION}
    return TracedTraining(
        ranks=trace.world_size,
        gradients=gradients,
        dtype=dtype,
        optimizer=said[0] if said else "",
        recomputes=any(call.phase == "recompute" for step in steps for call in step.calls),
        others=tuple(sorted(kinds_run - _OF_DATA_PARALLELISM)),
    )


def _summed(trace: Trace) -> tuple[int, str]:
    """Elements and type of what is all-reduced in a step, by calls of the host: a lone rank launches nothing."""
    name, count, types = (trace.argument(key) for key in ("Collective name", "In msg nelems", "dtype"))
    rows = np.flatnonzero(trace.of_category(OPERATORS) & (name != NONE) & (count >= _LEAST_GRADIENTS))
    rows = rows[[collective_of_kernel(trace.strings[int(code)]) == "all_reduce" for code in name[rows].tolist()]]
    if not len(rows):
        return 0, ""
    steps = profiler_steps(trace)
    # A call belongs to the step in which it began, on whichever thread.
    of = np.searchsorted(steps.start, trace.start[rows], "right") if len(steps.start) else np.zeros(len(rows))
    sums = Counter[int]()
    for step, elements in zip(of.tolist(), count[rows].tolist(), strict=True):
        sums[int(step)] += int(elements)
    dtype = TORCH_DTYPES.get(trace.strings[int(types[rows[0]])].lower())
    return Counter(sums.values()).most_common(1)[0][0], dtype.text if dtype is not None else ""


_VECTORIZED = re.compile(r".*\bvectorized_elementwise_kernel<(\d+),")
_OF_A_THREAD = 4
"""Elements that a thread of PyTorch's elementwise kernels takes, in all versions until 2.6, and at least."""


def launched_elements(trace: Trace, calls: Iterable[StepCall]) -> dict[StepCall, int]:
    """How many elements calls of PyTorch's elementwise kernels were launched for, at most: by grid and block.

    For traces without shapes; calls of other kernels are not in it.

    Raises:
        InputError: the trace's file is gone.
    """
    at = {call.number: call for call in calls if _VECTORIZED.match(trace.text(call.number))}
    rows = sorted(at)
    found = {}
    for row, event in zip(rows, details(trace, np.array(rows, np.int64)) if rows else (), strict=True):
        said = event.get("args") or {}
        extents = [_extent(said.get(key)) for key in ("grid", "block")]
        if all(extents):
            found[at[row]] = prod(extents) * _OF_A_THREAD
    return found


def _extent(said: object) -> int:
    """Blocks of a grid, or threads of a block; 0 where the trace does not say."""
    extents = [one for one in said if type(one) is int and one > 0] if isinstance(said, list) else []
    return prod(extents) if isinstance(said, list) and extents and len(extents) == len(said) else 0
