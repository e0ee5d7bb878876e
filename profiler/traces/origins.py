"""Where the work on a device comes from: the operator, modules and lines of Python that led to its launch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from echograph.ir.types import Phase
from echograph.profiler.traces.captures import captured_calls
from echograph.profiler.traces.operands import WHOLE
from echograph.profiler.traces.relations import Stacks, call_stacks
from echograph.profiler.traces.trace import NONE, OPERATORS, Trace

_PYTHON = frozenset({"python_function"})
_MODULE = "nn.Module: "
_BACKWARD, _OPTIMIZER = "autograd::engine::evaluate_function", "Optimizer."
_LOADER = "enumerate(DataLoader)"
# Frames that are of no use to whoever looks for the line of a model: the framework's own, and what has no file.
_FRAME = re.compile(r"(?P<file>[^<(][^(]*\.py)\((?P<line>\d+)\): (?P<function>.+)")
_FRAMEWORK = re.compile(r"(.*/)?(torch|torchvision|triton|threading|contextlib|functools|runpy|importlib)(/|\.py)")
_GENERATED = re.compile(r"(.*/)?torchinductor_[^/]*/")
"""Where `torch.compile` puts the code that it makes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Origins:
    """Of each row of a trace, what it ran within; work on a device has what launched it.

    Attributes:
        operator: row of the operator that describes it, or -1: the innermost one, or the outermost that says all
            of a product, convolution, attention or normalisation (`aten::convolution`, not what it calls).
        phase: part of the step; a forward operator that runs within a backward one is recomputed.
        module: path of `nn.Module`s, the outermost first ("GPT_0.Block_3.Linear_7"): of what differentiates, that
            of the forward operator; "" where the trace says none.
        frame: row of the innermost Python function that is not the framework's, or -1.
        loads: whether it ran within the loading of data (`enumerate(DataLoader)`).
        replay: row of the launch of a CUDA graph that work is of, whose other columns are those of the call that
            was captured, or -1.
        stacks: the call stacks of the trace.
        notes: what of it is a guess, a line each.
    """

    operator: list[int]
    phase: list[Phase]
    module: list[str]
    frame: list[int]
    loads: list[bool]
    replay: list[int]
    stacks: Stacks
    notes: list[str]

    def frames(self, trace: Trace, row: int) -> Iterator[str]:
        """The Python functions around a row, the innermost first: "model.py:42 forward"."""
        frame = self.frame[row]
        while frame != NONE:
            yield frame_text(trace.text(frame))
            above = int(self.stacks.parent[frame])
            frame = self.frame[above] if above != NONE else NONE

    def source(self, trace: Trace, row: int) -> str:
        """The innermost line around a row; of compiled code the one that calls it, and the generated one."""
        frames = self.frames(trace, row)
        generated, line = "", next(frames, "")
        while _GENERATED.match(line):
            generated, line = generated or line, next(frames, "")
        return " via ".join(filter(None, (line, generated)))


def frame_text(name: str) -> str:
    """A Python function as profilers name it, "dir/model.py(42): forward", as "dir/model.py:42 forward"."""
    found = _FRAME.match(name)
    return f"{found['file']}:{found['line']} {found['function']}" if found else name


def origins(trace: Trace, stacks: Stacks | None = None) -> Origins:
    """What each row of a trace ran within.

    Args:
        trace: one rank's.
        stacks: its call stacks, if they are known.
    """
    stacks = stacks or call_stacks(trace)
    names, parents = trace.name.tolist(), stacks.parent.tolist()
    replay = [NONE] * len(trace)
    captured = captured_calls(trace)
    for work, call in captured.calls.items():
        replay[work], parents[work] = parents[work], call
    operators, python = trace.of_category(OPERATORS).tolist(), trace.of_category(_PYTHON).tolist()
    sequence, thread = trace.argument("Sequence number").tolist(), trace.argument("Fwd thread id").tolist()
    starts = [_phase_of(text) for text in trace.strings]
    whole = [bool(WHOLE.fullmatch(text)) for text in trace.strings]
    own = [bool(_FRAME.match(text) and not _FRAMEWORK.match(text)) for text in trace.strings]
    count = len(trace)
    operator, described, frame = [NONE] * count, [False] * count, [NONE] * count
    phase, module = [Phase.FORWARD] * count, [""] * count
    differentiates, loads = [NONE] * count, [False] * count
    loader = [text.startswith(_LOADER) for text in trace.strings]
    launched = np.flatnonzero(trace.on_device & (stacks.parent != NONE)).tolist()
    for row in (*stacks.order.tolist(), *launched):
        parent, name = parents[row], names[row]
        if parent != NONE:
            operator[row], described[row], frame[row] = operator[parent], described[parent], frame[parent]
            phase[row], module[row] = phase[parent], module[parent]
            differentiates[row] = differentiates[parent]
        loads[row] = loader[name] or (parent != NONE and loads[parent])
        if operators[row]:
            if not described[row]:
                operator[row], described[row] = row, whole[name]
            if (phase_here := starts[name]) is not None:
                phase[row], differentiates[row] = phase_here, sequence[row]
            elif phase[row] is Phase.BACKWARD and sequence[row] != NONE and thread[row] == 0:
                # Autograd records no sequence numbers while it differentiates: this is a forward pass run again.
                phase[row], differentiates[row] = Phase.RECOMPUTE, NONE
        elif python[row]:
            frame[row] = row if own[name] else frame[row]
            if trace.strings[name].startswith(_MODULE):
                said = trace.strings[name].removeprefix(_MODULE)
                module[row] = f"{module[row]}.{said}" if module[row] else said
        elif starts[name] is not None:
            phase[row] = starts[name] or phase[row]
    found = Origins(
        operator=operator, phase=phase, module=module, frame=frame, loads=loads, replay=replay, stacks=stacks,
        notes=captured.notes(trace.rank),
    )  # fmt: skip
    _of_forward(trace, found, sequence, thread, differentiates)
    return found


def _phase_of(text: str) -> Phase | None:
    if text.startswith(_BACKWARD):
        return Phase.BACKWARD
    return Phase.OPTIMIZER if text.startswith(_OPTIMIZER) else None


def _of_forward(
    trace: Trace, found: Origins, sequence: Sequence[int], thread: Sequence[int], differentiates: Sequence[int]
) -> None:
    """Gives what differentiates the module and the frame of what it differentiates.

    Numbers count the operations of one forward thread; where several threads gave one number, whose is meant is
    not known, and nothing is said.
    """
    forward: dict[int, int] = {}
    several = set[int]()
    tid = trace.tid
    numbered = np.flatnonzero((np.asarray(sequence) != NONE) & (np.asarray(thread) <= 0))
    for row in numbered[np.argsort(trace.start[numbered], kind="stable")].tolist():
        number = sequence[row]
        if found.phase[row] is Phase.FORWARD:
            if number in forward and tid[forward[number]] != tid[row]:
                several.add(number)
            forward[number] = row
    for row in np.flatnonzero(np.asarray(differentiates) != NONE).tolist():
        number = differentiates[row]
        of = NONE if number in several else forward.get(number, NONE)
        if of != NONE and found.phase[row] is Phase.BACKWARD and not found.module[row]:
            found.module[row], found.frame[row] = found.module[of], found.frame[of]
