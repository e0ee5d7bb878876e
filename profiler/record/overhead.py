"""What recording costs, by what it looks at: measured in the recorded process itself, on work of its own.

A small model takes steps before the window: free, with the tracer's hooks, and under the profiler. The
differences, divided by what was seen, are what an operator, a node of the backward pass and a module cost. No step
of the job is looked at, so that its free steps remain what the answer can be held against.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated, Any, TypeAlias

import msgspec

EVALUATES = "autograd::engine::evaluate_function: "
OPERATOR, NESTED, NODE, COLLECTIVE = "operator", "nested", "node", "collective"
FORWARD, BACKWARD, UPDATE = PARTS = ("forward", "backward", "update")
MeasuredSeconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
"""Seconds: up to eleven days, whose picoseconds are well within 64 bits."""
_COMPILED = re.compile(r"Backward\d+$")


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of processor time that recording adds to a thread, for each thing of a kind.

    Attributes:
        operator_s: an operator that Python called.
        nested_s: an operator that another operator called.
        node_s: a node of autograd's graph in the backward pass, without the operators in it.
        module_s: a module's forward pass and its output's turn in the backward pass, by hooks.
        collective_s: a call of torch.distributed; None where it could not be measured.
        issue_s: of that, what comes before the call is made.
        how: how it was measured, in a line.
    """

    operator_s: MeasuredSeconds
    nested_s: MeasuredSeconds
    node_s: MeasuredSeconds
    module_s: MeasuredSeconds
    collective_s: MeasuredSeconds | None = None
    issue_s: MeasuredSeconds = 0.0
    how: str = ""


def counted_as(name: str, around: str | None) -> str | None:
    """What an operator of a trace counts as.

    Python calls what nothing is around, and also what runs in autograd's own events, by hooks, and in functions
    that are written in Python.

    Args:
        name: of the operator.
        around: name of the operator that it ran in.

    Returns:
        `OPERATOR`, `NESTED`, `NODE`; None for the function of a node, which counts with the node.
    """
    if name.startswith(EVALUATES):
        return NODE
    if around is None:
        return OPERATOR
    if around == EVALUATES + name:
        return None
    compiled = ("::" in around and "autograd::" not in around) or _COMPILED.search(around) is not None
    return NESTED if compiled else OPERATOR


def measure_overhead(*, shapes: bool, collectives: bool) -> Overhead | None:
    """Measures what recording costs in this thread; a second or so.

    Random numbers, gradients, modules and groups of the job are left alone.

    Args:
        shapes: whether the profiler looks at shapes.
        collectives: whether calls of torch.distributed are measured too.

    Returns:
        None where another profiler is at work, or where hooks on all modules would see the measuring.
    """
    import torch
    from torch.nn.modules import module

    if torch._C._autograd._profiler_enabled() or module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return None
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        found = sampled(shapes=shapes, collectives=collectives)
    counts, free = found.counts, found.free
    hooks = sum(_added(found.hooked, free, part) for part in (FORWARD, BACKWARD))
    adds = {part: _added(found.profiled, free, part) for part in PARTS}
    operator, nested = two_kinds(adds, counts)
    inside = counts[BACKWARD][OPERATOR] * operator + counts[BACKWARD][NESTED] * nested
    observed, issue = (median(column) for column in zip(*found.observed_calls or [(0.0, 0.0)], strict=True))
    return Overhead(
        operator_s=operator,
        nested_s=nested,
        node_s=max(0.0, (adds[BACKWARD] - inside) / counts[BACKWARD][NODE]),
        module_s=max(0.0, hooks / found.modules),
        collective_s=max(0.0, observed - median(took for took, _ in found.calls)) if found.calls else None,
        issue_s=issue,
        how=f"processor time, medians of {STEPS} steps of a small model, observed less free",
    )


def _added(observed: Sequence[Mapping[str, float]], free: Sequence[Mapping[str, float]], part: str) -> float:
    """Seconds that a part takes longer than in the free step before."""
    return median(one[part] - other[part] for one, other in zip(observed, free, strict=True))


def two_kinds(adds: Mapping[str, float], counts: Mapping[str, Mapping[str, int]]) -> tuple[float, float]:
    """What an operator and a nested one cost: of a forward pass most are called by Python, of an update few.

    Args:
        adds: seconds that observing adds to each part.
        counts: operators of each kind in each part.

    Returns:
        The two that explain both parts. A call from Python costs no less than one from compiled code, and neither
        less than 0: where the parts say otherwise, noise does, and what is possible explains their sum.
    """
    (a, b), (c, d) = ([counts[part][kind] for kind in (OPERATOR, NESTED)] for part in (FORWARD, UPDATE))
    forward, update = max(0.0, adds[FORWARD]), max(0.0, adds[UPDATE])
    determinant = a * d - b * c
    operator, nested = (forward * d - update * b) / determinant, (update * a - forward * c) / determinant
    if nested < 0:
        return (forward + update) / (a + c), 0.0
    if operator < nested:
        operator = nested = (forward + update) / (a + b + c + d)
    return operator, nested


STEPS, WARMUP = 25, 3
ROUNDS, CALLS = 3, 100
BLOCKS, WIDTH, HEADS, TOKENS = 2, 64, 4, 32
_MARK = "echograph: "
_Thunk: TypeAlias = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Seconds of the parts of steps and of calls, with nothing on, with hooks on modules, under the profiler.

    Attributes:
        free: of steps, by part.
        hooked: of a step right after each.
        profiled: of a step right after that.
        calls: of calls, and until they were issued, with nothing on; none where there is no group to make them in.
        observed_calls: as `calls`, under the profiler with a listener.
        counts: operators of each kind in each part of a step.
        modules: how many run in a step.
    """

    free: list[dict[str, float]] = field(default_factory=list)
    hooked: list[dict[str, float]] = field(default_factory=list)
    profiled: list[dict[str, float]] = field(default_factory=list)
    calls: list[tuple[float, float]] = field(default_factory=list)
    observed_calls: list[tuple[float, float]] = field(default_factory=list)
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    modules: int


def sampled(*, shapes: bool, collectives: bool) -> Sampled:
    """Takes the steps, and makes the calls in a group of this rank alone.

    Args:
        shapes: whether the profiler looks at shapes.
        collectives: whether calls are made: not without gloo, nor where a tracer listens, which would count them.
    """
    sample, call = _Sample(), _call_alone() if collectives else None
    found = Sampled(modules=sample.modules)
    with _profiler(shapes) as profile:
        for take in range(STEPS + WARMUP):
            # In turn, since the machine may do other things meanwhile.
            with _unseen():
                free = sample.second_step()
                with _hooks(sample.blocks):
                    hooked = sample.second_step()
            profiled = sample.second_step()
            if take >= WARMUP:
                found.free.append(free)
                found.hooked.append(hooked)
                found.profiled.append(profiled)
        sample.step(_mark)
        _mark("")
        for _ in range(ROUNDS):
            if call is None:
                break
            with _unseen():
                found.calls.extend(_calls(call, _Listener()))
            with _listener() as listener:
                found.observed_calls.extend(_calls(call, listener))
    found.counts.update(_counted(profile))
    return found


class _Sample:
    """The model, and what a step of it does."""

    def __init__(self) -> None:
        from torch import float32, nn, ones

        plain: dict[str, Any] = {"device": "cpu", "dtype": float32}

        def block() -> list[Any]:
            first, second = (nn.LayerNorm(WIDTH, **plain) for _ in range(2))
            mix, out = nn.Linear(WIDTH, 3 * WIDTH, **plain), nn.Linear(WIDTH, WIDTH, **plain)
            up, down = nn.Linear(WIDTH, 4 * WIDTH, **plain), nn.Linear(4 * WIDTH, WIDTH, **plain)
            return [first, mix, out, second, up, nn.GELU(), down]

        self.blocks: Any = nn.ModuleList(nn.ModuleList(block()) for _ in range(BLOCKS))
        self.modules = sum(len(list(block.children())) for block in self.blocks)
        self.parameters: Any = list(self.blocks.parameters())
        self.moments = [parameter.detach().clone() for parameter in self.parameters]
        self.input = ones(2, TOKENS, WIDTH, **plain)

    def forward(self) -> Any:
        x: Any = self.input
        for first, mix, out, second, up, bend, down in self.blocks:
            parts = mix(first(x)).split(WIDTH, dim=-1)
            query, key, value = (part.view(2, TOKENS, HEADS, -1).transpose(1, 2) for part in parts)
            weights = (query @ key.transpose(-2, -1) * HEADS**-0.5).softmax(dim=-1)
            x = x + out((weights @ value).transpose(1, 2).reshape(2, TOKENS, WIDTH))
            x = x + down(bend(up(second(x))))
        return x.square().mean()

    def update(self) -> None:
        import torch

        with torch.no_grad():
            gradients: Any = [parameter.grad for parameter in self.parameters]
            torch._foreach_lerp_(self.moments, gradients, 0.1)
            roots: Any = torch._foreach_sqrt(torch._foreach_mul(gradients, gradients))
            torch._foreach_add_(roots, 1e-8)
            torch._foreach_addcdiv_(self.parameters, self.moments, roots, value=-1e-6)
            for parameter in self.parameters:
                parameter.grad = None

    def second_step(self) -> dict[str, float]:
        """Seconds of the parts of a step behind one like it: behind one of another kind, memory lies otherwise."""
        self.step()
        return self.step()

    def step(self, begins: Callable[[str], object] = lambda part: None) -> dict[str, float]:
        """Seconds that each part took; `begins` is told of each before its time begins."""
        took, loss = {}, None
        for part in PARTS:
            begins(part)
            start = time.thread_time_ns()
            if part == FORWARD:
                loss = self.forward()
            elif part == BACKWARD:
                loss.backward()  # type: ignore[union-attr]
            else:
                self.update()
            took[part] = (time.thread_time_ns() - start) / 1e9
        return took


def _mark(part: str) -> None:
    from torch.profiler import record_function

    with record_function(_MARK + part):
        pass


@contextmanager
def _profiler(shapes: bool) -> Iterator[Any]:
    # Without the steps of `profile`, which others may count.
    from torch import profiler

    kind: Any = profiler._KinetoProfile  # type: ignore[attr-defined]
    profile = kind(activities=[profiler.ProfilerActivity.CPU], record_shapes=shapes)
    profile.start()
    try:
        yield profile
    finally:
        profile.stop()


@contextmanager
def _unseen() -> Iterator[None]:
    """Operators tell the profiler nothing, as if there were none: to start one takes longer than the steps."""
    import torch

    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)


@contextmanager
def _hooks(model: Any) -> Iterator[None]:
    from echograph.profiler.comms.call import Phases

    phases = Phases()
    phases.entered = []
    phases.watch(model)
    try:
        yield
    finally:
        phases.detach()


def _counted(profile: Any) -> dict[str, Counter[str]]:
    """Operators behind the marks of the parts."""
    counts: dict[str, Counter[str]] = {"": Counter(), **{part: Counter() for part in PARTS}}
    events = profile.profiler.kineto_results.events()
    part, above = "", list[tuple[int, str]]()
    for event in sorted(events, key=lambda event: (event.start_ns(), -event.duration_ns())):
        name: str = event.name()
        if name.startswith(_MARK):
            part = name.removeprefix(_MARK)
            continue
        while above and above[-1][0] <= event.start_ns():
            above.pop()
        kind = counted_as(name, above[-1][1] if above else None)
        if kind is not None:
            counts[part][kind] += 1
        above.append((event.start_ns() + event.duration_ns(), name))
    return counts


class _Listener:
    """Listens to calls as the tracer does; `heard` is the time of the thread when a call was about to be made."""

    def __init__(self) -> None:
        self.heard = 0

    def issued(self, call: Any) -> None:
        """Told by the capture."""
        self.heard = time.thread_time_ns()

    def refused(self, call: Any) -> None:
        """Told by the capture."""

    ended = refused


@contextmanager
def _listener() -> Iterator[_Listener]:
    from echograph.profiler.comms.tracer import shared_capture

    listener, capture = _Listener(), shared_capture()
    capture.add(listener)
    try:
        yield listener
    finally:
        capture.remove(listener)


def _call_alone() -> _Thunk | None:
    """A call in a group that has this rank alone, which no other rank and no one else knows."""
    import torch.distributed

    from echograph.profiler.comms.tracer import shared_capture

    distributed: Any = torch.distributed
    if not distributed.is_gloo_available() or shared_capture().listening:
        return None
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(interface="lo")]
    group: Any = distributed.ProcessGroup(distributed.HashStore(), 0, 1)
    backend = gloo(distributed.HashStore(), 0, 1, options)
    group._register_backend(torch.device("cpu"), distributed.ProcessGroup.BackendType.GLOO, backend)
    tensor = torch.ones(4, device="cpu")
    return lambda: group.allreduce(tensor).wait()


def _calls(call: _Thunk, listener: _Listener) -> list[tuple[float, float]]:
    """Seconds of calls, and of those until they were issued, where the listener hears them."""
    took = []
    for _ in range(CALLS):
        start = time.thread_time_ns()
        call()
        end = time.thread_time_ns()
        took.append(((end - start) / 1e9, max(0, listener.heard - start) / 1e9))
    return took[CALLS // 10 :]
