"""What the host does for each operator of a step, counted: a script's own Python, and its calls of PyTorch.

A capture runs the script's real code and hands each operator to the recorder, so what runs between two operators
is the host's work for the second of them. A clock would show mostly the capture: each way into it takes several
times what a call of PyTorch does. So nothing is timed. Instructions of the interpreter are counted, those of the
script, its framework and PyTorch's Python, and not the capture's own; and calls into PyTorch, by kind. What one of
a kind takes is measured elsewhere, without a capture (`python -m benchmarks.host_units`).

Counts do not depend on the machine, nor on how busy it is, and equal layers have equal ones.
"""

from __future__ import annotations

import operator
import os
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any, Protocol, TypeVar, cast

import msgspec
import torch
from msgspec.structs import astuple
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.fx import Node
from torch.nn.modules import module as modules

from echograph.frontend.pytorch.annotate import BACKWARD, FORWARD_NODE, MODULE, OPTIMIZER, PHASE
from echograph.frontend.pytorch.call_nodes import is_allocation, is_view
from echograph.frontend.scripts.recorder import COMMUNICATION, MICRO_BATCH, SILENT_NAMESPACES, ScriptRecorder
from echograph.frontend.scripts.streams import AFTER, CapturedStream, nobody_waits

WORK = "host_work"
"""Of call nodes: the `HostWork` before them."""

_HERE = Path(__file__).parent
_FRONTEND = _HERE.parent
# What stands in for a framework's own code runs as that would; all else of the frontends is the capture's.
_STANDING_IN = tuple(
    str(_FRONTEND / "megatron" / name)
    for name in ("attention.py", "packing.py", "transformer_engine.py", "apex.py")
)
_ENGINE = ("echograph.frontend.megatron.transformer_engine", "echograph.frontend.megatron.attention")
# Variables of Transformer Engine by which Megatron-LM says which attention runs.
_KERNELS = ("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN")
_TORCH = Path(torch.__file__).parent
_OWN = (
    str(_FRONTEND.parent),
    # What is done because a capture looks on: of fake tensors others are kept by weak references.
    weakref.__file__,
    *(
        str(_TORCH / name)
        for name in (
            "fx",  # what a capture is written as
            "overrides.py",
            "_subclasses",
            "_library",
            "_ops.py",
            "utils/_device.py",
            "utils/_python_dispatch.py",
        )
    ),
)


# What anyone calls: the capture's, too, where the capture calls it.
_STANDARD = sysconfig.get_path("stdlib")
_GENERATED = "<string>"  # a dataclass's or a named tuple's functions, wherever that stands
# Where Python traces, all that runs takes two to three times as long, so the capture's own code is not traced.
# Since 3.12 to begin and to end it rewrites the code of all functions, each time.
_SWITCHES = sys.version_info < (3, 12)
_HELPERS = tuple(str(_TORCH / "utils" / name) for name in ("_pytree.py", "weak.py"))


class HostWork(msgspec.Struct, frozen=True):
    """What the host does before an operator, since the one before it.

    Attributes:
        instructions: of the interpreter.
        modules: calls of modules.
        light: operators that launch nothing: views, allocations, other handles of a tensor.
        gradients: operators that autograd takes note of.
        nodes: of autograd that a backward pass comes to.
        functions: of those, the ones that are written in Python, which calls from C++ and back begin and end.
        compiled: calls of what a framework has compiled; what is in them is not counted.
        compiled_backward: their backward passes.
        batches: that worker processes of a loader hand over.
        handed_over: tensors of these batches, whose memory is opened here.
        hashed: bytes of weights as fp32, which are cast and hashed (SHA-1).
        stood_in: calls of layers that stand in for others, as "Linear.forward"; what is in them is not counted.
    """

    instructions: int = 0
    modules: int = 0
    light: int = 0
    gradients: int = 0
    nodes: int = 0
    functions: int = 0
    compiled: int = 0
    compiled_backward: int = 0
    batches: int = 0
    handed_over: int = 0
    hashed: int = 0
    stood_in: tuple[str, ...] = ()

    def __add__(self, other: HostWork) -> HostWork:
        """Both, one after the other."""
        return HostWork(*map(operator.add, astuple(self), astuple(other)))


class HostPrice(Protocol):
    """What work takes on one processor."""

    @property
    def name(self) -> str:
        """The name under which a graph has it."""

    @property
    def stands_in(self) -> frozenset[str]:
        """Layers whose calls are known as a whole, by the names of those that stand in for them."""

    def seconds(self, work: HostWork) -> float:
        """Seconds, without the operators that compute."""


class WorkCounter:
    """Counts while the script runs and is asked for (`begin`, `end`).

    Entries into the capture nest: `enter` as often as `leave`; between them nothing is counted.

    Attributes:
        current: the one that counts now.
        reads: is told which tensor of the device the script reads a value of.
        muted: above zero where what runs is counted as a whole.
        region: number of the call of something compiled that runs; 0: none.
        batch: number of the batch of messages that is put together; 0: none.
        function: number of the call of a library's function that runs, which is known as a whole, and its names.
        stands_in: layers and functions whose calls are known as a whole.
    """

    current: WorkCounter | None = None

    def __init__(self, reads: Callable[[torch.Tensor], None] = lambda _: None) -> None:
        self.reads = reads
        self.muted = 0
        self.region = self.batch = 0
        self.function: tuple[int | str, ...] | None = None
        self.stands_in: frozenset[str] = frozenset()
        self._regions = self._batches = self._functions = 0
        self._instructions = self._modules = 0
        self._depth = 0
        self._switches = 0
        self._of_hooks = 0
        self._own: dict[str, bool] = {}
        self._helper: dict[str, bool] = {}

    @property
    def entered_once(self) -> bool:
        """Whether the script itself called, and not what answers a call of it."""
        return self._depth == 1

    def enter(self) -> None:
        """The capture is entered."""
        self._depth += 1
        if self._depth == 1 and get_ident() == self._switches:
            sys.settrace(None)

    def leave(self) -> None:
        """The capture is left, or calls the script's own code."""
        self._depth -= 1
        if self._depth == 0 and get_ident() == self._switches:
            sys.settrace(self._called)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What runs is not the script's."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def begin(self) -> None:
        """Counts from here."""
        self._of_hooks = self._hooks()
        self.take()
        WorkCounter.current = self
        self._switches = get_ident() if _SWITCHES else 0
        sys.settrace(self._called)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if not self._is_own(frame.f_code.co_filename):
                self._watch(frame)
            frame = frame.f_back

    def end(self) -> None:
        """Counts no more."""
        self._switches = 0
        sys.settrace(None)
        WorkCounter.current = None

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """What runs is one call of what a framework has compiled."""
        if self.region:
            yield
            return
        self._regions += 1
        self.region, self.muted = self._regions, self.muted + 1
        try:
            yield
        finally:
            self.region, self.muted = 0, self.muted - 1

    @contextmanager
    def standing_in(self, *names: str) -> Iterator[None]:
        """What runs is one call of a library's function, if that is known as a whole.

        Args:
            names: by which it is known: once for each time that it does what they say.
        """
        if self.function or not names or not self.stands_in.issuperset(names):
            yield
            return
        self._functions += 1
        self.function, self.muted = (self._functions, *names), self.muted + 1
        try:
            yield
        finally:
            self.function, self.muted = None, self.muted - 1

    @contextmanager
    def together(self) -> Iterator[None]:
        """Messages of what runs go out as one."""
        self._batches += 1
        before, self.batch = self.batch, self._batches
        try:
            yield
        finally:
            self.batch = before

    def module(self) -> None:
        """A module was called, by way of the capture's hooks."""
        if self._depth == 1 and not self.muted:
            self._modules += 1

    def take(self) -> tuple[int, int]:
        """Instructions, and calls of modules, since it was asked last."""
        found = max(0, self._instructions - self._modules * self._of_hooks), self._modules
        self._instructions = self._modules = 0
        return found

    def _called(self, frame: FrameType, event: str, _: Any) -> Any:
        if self._depth:
            return None
        # A code's hash is made anew of all that it holds, each time; the name of its file has one.
        file = frame.f_code.co_filename
        if self._is_own(file) or (self._is_helper(file) and self._helps_own(frame.f_back)):
            return None
        return self._watch(frame)

    def _helps_own(self, caller: FrameType | None) -> bool:
        """Whether who calls a helper is the capture's own code, or a helper that was called by it."""
        if caller is None:
            return False
        file = caller.f_code.co_filename
        return self._is_own(file) or (caller.f_trace is None and self._is_helper(file))

    def _watch(self, frame: FrameType) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines, frame.f_trace = True, False, self._counted
        return self._counted

    def _counted(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode" and not (self._depth or self.muted):
            self._instructions += 1
        return self._counted

    def _is_own(self, file: str) -> bool:
        known = self._own.get(file)
        if known is None:
            known = self._own[file] = file.startswith(_OWN) and not file.startswith(_STANDING_IN)
        return known

    def _is_helper(self, file: str) -> bool:
        known = self._helper.get(file)
        if known is None:
            of_standard = file.startswith(_STANDARD) and "site-packages" not in file
            known = of_standard or file == _GENERATED or file.startswith(_HELPERS)
            self._helper[file] = known
        return known

    def _hooks(self) -> int:
        """Instructions that a module's call takes more for having hooks of the capture."""
        module = _Nothing()
        found = []
        for kept in (True, False):
            with _hooks_of_captures(kept):
                self._depth, depth = 0, self._depth
                self._instructions = 0
                sys.settrace(self._called)
                module(None)
                sys.settrace(None)
                self._depth = depth
                found.append(self._instructions)
        return found[0] - found[1]


class _Nothing(nn.Module):
    def forward(self, given: None) -> None:
        """Returns."""


@contextmanager
def _hooks_of_captures(kept: bool) -> Iterator[None]:
    """In the context, modules are called with the hooks of a capture, or without."""
    hooks = (modules._global_forward_pre_hooks, modules._global_forward_hooks)
    before = [dict(each) for each in hooks]
    try:
        if not kept:
            for each in hooks:
                each.clear()
        yield
    finally:
        for each, known in zip(hooks, before, strict=True):
            each.clear()
            each.update(known)


def _attending(module: Any, anew: bool) -> tuple[str, ...]:
    """What calls of attention are known by: how they attend, and what some do besides.

    Args:
        module: that attends: in one kernel, in several, or in a step for each of a ring's ranks.
        anew: whether it attends otherwise than the call before, so that what runs is chosen for it.
    """
    ring = module.ranks_around
    several = all(os.environ.get(choice) == "0" for choice in _KERNELS)
    kind = "DotProductAttention " + ("ring" if ring > 1 else "unfused" if several else "fused")
    steps = ["DotProductAttention step of a ring"] * (ring if ring > 1 else 0)
    padded = ring == 1 and module.attends[1].startswith("padding")
    also = {
        "DotProductAttention chosen anew": anew,
        f"{kind}, padding": padded,
        "DotProductAttention forks": module.forks,
    }
    return (kind, *steps, *(name for name, does in also.items() if does))


def _divided(module: Any) -> str:
    """What the name of a product has behind it that ranks of tensor parallelism divide."""
    if getattr(module, "tp_size", 1) == 1 or not module.parallel_mode:
        return ""
    return f" by {module.parallel_mode}s" + (", sequences" if module.sequence_parallel else "")


F = TypeVar("F", bound=Callable[..., Any])


def _counted_as(function: F, counting: Callable[[WorkCounter], AbstractContextManager[None]]) -> F:
    """A function that runs as it is written, in what a counter makes of its calls."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        counter = WorkCounter.current
        with nullcontext() if counter is None else counting(counter):
            return function(*args, **kwargs)

    return cast(F, run)


def compiled(function: Any) -> Any:
    """What stands for a function that a framework has compiled: it runs as written, and counts as one call."""
    return _counted_as(function, WorkCounter.compiled)


def known_as(name: str) -> Callable[[F], F]:
    """Makes what stands for a library's function: it counts as one call of that, by the name it is known by."""
    return lambda function: _counted_as(function, lambda counter: counter.standing_in(name))


def batched(function: Any) -> Any:
    """`torch.distributed.batch_isend_irecv`, whose messages NCCL is given together: one launch, of all of them."""
    return _counted_as(function, WorkCounter.together)


def wait_for_value(tensor: Any) -> None:
    """What a node stands for at which the host waits until a value is there."""
    del tensor


def wait_for_work() -> None:
    """What a node stands for at which the host waits until work has ended that was issued: `AFTER`, None: all."""


_OF_HOOK = "of_hook"
"""Of call nodes: ran in a hook of a parameter's gradient."""

COMPILED_CALL = "compiled_call"
"""Of call nodes in a call of something compiled: its number."""

_FUNCTION = "function_call"
"""Of call nodes in a call of a function that is known as a whole: its number and names."""

_BATCH = "batch_of_messages"
"""Of call nodes of messages that go out together: the number of their batch."""

_WITHIN = "within_a_function"
"""Of call nodes: the backward pass of a function written in Python made the operator before it, too."""


class CountingRecorder(ScriptRecorder):  # type: ignore[no-untyped-call]
    """Records a step, and counts what the host does for each operator of it (`WORK`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counter: WorkCounter = WorkCounter(self.reads)
        self._before = HostWork()
        self._reached: Any = None
        self._made: Node | None = None
        self._stand_ins: dict[str, tuple[str, ...]] = {}
        self._attended: Any = None

    def _standing_in(self, module: Any, args: Any) -> tuple[str, ...]:
        """Names under which a call of a layer is known that stands in for another one; () for all others."""
        for kind in type(module).__mro__:
            if kind.__module__ not in _ENGINE:
                continue
            names: tuple[str, ...] = (f"{kind.__name__}{_divided(module)}",)
            if kind.__name__ == "DotProductAttention":
                if getattr(module, "packs", False):
                    return ()  # what it does about another one is counted, and the other one is known as a whole
                shapes = [tensor.shape for tensor in _tensors(args)]
                before, self._attended = self._attended, (module.attends, shapes)
                names = _attending(module, anew=before != self._attended)
            if self.counter.stands_in.issuperset(names):
                return names
        return ()

    def reads(self, tensor: torch.Tensor) -> None:
        """The script reads a value of the device: the host waits until what makes it has ended."""
        if not self._recording or self._paused or not self.counter.entered_once:
            return
        node = self.node_of(tensor)
        if node.op == "call_function":
            meta = self._phase_and_module(node) | self.of_micro_batch()
            self.add_call(wait_for_value, (node,), {}, None, meta)

    def handed_over(self, tensors: int) -> None:
        """Worker processes of a loader have handed over a batch: a thread takes it, and has the lock meanwhile."""
        if self._recording and not self._paused:
            self._before += HostWork(batches=1, handed_over=tensors)

    def hashed(self, nbytes: int) -> None:
        """The host has hashed so many bytes: C does, in one call, which no instructions tell of."""
        if self.is_recording:
            self._before += HostWork(hashed=nbytes)

    def waits(self, work: frozenset[Any] | None) -> None:
        """The script waits on the host until work has ended.

        Args:
            work: call nodes; None: all that was issued.
        """
        if not self._recording or self._paused:
            return
        optimizing = self._optimizing or self._forced == OPTIMIZER
        phase = OPTIMIZER if optimizing else self._forced or self.phase
        meta = {PHASE: phase, MODULE: self._stack[-1] if self._stack else "", AFTER: work}
        self.add_call(wait_for_work, (), {}, None, meta | self.of_micro_batch())

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """What runs is no work of the step, nor of its host."""
        with super().pausing(), self.counter.aside():
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.counter.enter()
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.counter.leave()

    def _module_begins(self, module: Any, args: Any) -> None:
        self.counter.enter()
        try:
            self.counter.module()
            super()._module_begins(module, args)
            names = self._standing_in(module, args)
            if names:
                self.counter.muted += 1
                self._stand_ins[self._stack[-1]] = names
        finally:
            self.counter.leave()

    def _module_ends(self, *args: Any) -> None:
        self.counter.enter()
        try:
            if self._stack and self._stack[-1] in self._stand_ins:
                self.counter.muted -= 1
            super()._module_ends(*args)
        finally:
            self.counter.leave()

    def step_begins(self) -> None:
        """A training step begins; the work of the one that is asked for is counted."""
        before = self._recording
        super().step_begins()
        if self._recording and not before:
            CapturedStream.host_waits = self.waits
            self.counter.begin()

    def _put_off(self, line: str) -> None:
        CapturedStream.host_waits = nobody_waits
        self.counter.end()
        super()._put_off(line)

    def _finish(self) -> None:
        CapturedStream.host_waits = nobody_waits
        self.counter.end()
        super()._finish()
        self._count_whole()

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (
            not self._recording
            or self._paused
            or not self.counter.entered_once
            or func.namespace in SILENT_NAMESPACES
        ):
            return super()._called(func, args, kwargs)
        self._made = None
        instructions, modules_called = self.counter.take()
        taken = torch.is_grad_enabled() and any(t.requires_grad for t in _tensors(args))
        node = torch._C._current_autograd_node()
        reached = node is not None and node is not self._reached
        self._reached = node
        out = super()._called(func, args, kwargs)
        made = self._made
        works = made is not None and not is_allocation(made)
        self._before += HostWork(
            instructions=instructions,
            modules=modules_called,
            light=not works or (made is not None and is_view(made)),
            gradients=taken,
            nodes=reached,
            functions=reached and isinstance(node, BackwardCFunction),
        )
        if made is not None and self.counter.region:
            made.meta[COMPILED_CALL] = self.counter.region
        if made is not None and self.counter.function:
            made.meta[_FUNCTION] = self.counter.function
        if made is not None and type(node).__name__ == "AccumulateGrad":
            made.meta[_OF_HOOK] = True
        if made is not None and self.counter.batch:
            made.meta[_BATCH] = self.counter.batch
        if made is not None and not reached and isinstance(node, BackwardCFunction):
            made.meta[_WITHIN] = True
        if made is not None and works:
            made.meta[WORK], self._before = self._before, HostWork()
        return out

    def add_call(self, *args: Any) -> Node:
        """Appends a call node, and remembers the first that computes, behind views that it reads or writes by."""
        node = super().add_call(*args)
        if self._made is None or is_allocation(self._made) or is_view(self._made):
            self._made = node
        return node

    def _count_whole(self) -> None:
        """Puts calls that count as a whole in place of what was counted in them.

        Of something compiled the first operator has the call, and the others are none: it is one kernel. Of a
        layer or function that stands in for another one the first has the call, and each of the others still is
        a kernel.
        """
        regions = {n.name: n.meta[COMPILED_CALL] for n in self.graph.nodes if COMPILED_CALL in n.meta}
        functions = {n.name: n.meta[_FUNCTION] for n in self.graph.nodes if _FUNCTION in n.meta}
        begun: set[tuple[Any, ...]] = set()
        inside: tuple[Any, ...] = ()
        left = HostWork()
        for node in self.graph.nodes:
            if WORK not in node.meta or node.target is operator.getitem:
                continue
            work: HostWork = node.meta[WORK]
            passed_on, left = left, HostWork()
            outside = passed_on + HostWork(
                instructions=work.instructions, modules=work.modules, batches=work.batches,
                handed_over=work.handed_over, hashed=work.hashed,
            )  # fmt: skip
            # A hook of a parameter is no part of the call that made its gradient.
            hook = _OF_HOOK in node.meta
            forward = "" if hook else node.meta.get(FORWARD_NODE, "")
            region = node.meta.get(COMPILED_CALL) or regions.get(forward)
            function = node.meta.get(_FUNCTION) or functions.get(forward)
            own, names = ("", ()) if hook else self._stand_in_of(node)
            if function:
                own, names = str(function[0]), function[1:]
            if region:
                call = (region, node.meta[PHASE])
                if call in begun:
                    del node.meta[WORK]
                    left = outside
                else:
                    begun.add(call)
                    again = COMPILED_CALL not in node.meta
                    node.meta[WORK] = outside + HostWork(compiled=not again, compiled_backward=again)
            elif own:
                place = (own, node.meta[PHASE], node.meta.get(MICRO_BATCH))
                if place == inside and _WITHIN in node.meta:  # its own Python, which the whole call has
                    outside = passed_on
                phase = "backward" if node.meta[PHASE] == BACKWARD else "forward"
                calls = tuple(f"{name}.{phase}" for name in names)
                node.meta[WORK] = outside + HostWork(stood_in=() if place == inside else calls)
                inside = place
            else:
                node.meta[WORK] = work + passed_on
            if not own and not hook:
                inside = ()
        self._send_together()

    def _send_together(self) -> None:
        """Of a batch of messages the first has the work of all, and the others none: they go out with it."""
        first: dict[int, Node] = {}
        for node in self.graph.nodes:
            if WORK not in node.meta or COMMUNICATION not in node.meta or _BATCH not in node.meta:
                continue
            leads = first.setdefault(node.meta[_BATCH], node)
            if leads is not node:
                leads.meta[WORK] += node.meta.pop(WORK) + HostWork(light=True)

    def _stand_in_of(self, node: Node) -> tuple[str, tuple[str, ...]]:
        """Path of the layer that stands in for another one and has the node, and what its calls are known by."""
        path = str(node.meta[MODULE])
        while path and path not in self._stand_ins:
            path = path.rpartition(".")[0]
        return path, self._stand_ins.get(path, ())


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
