"""One call on its way, from the moment it is issued until its end is known, and where it comes from.

Where is the line of code, the function of torch.distributed, the phase, the module.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Protocol

from echograph.ir.comms.record import UNKNOWN, CallRow
from echograph.profiler.comms.groups import TracedGroup

# The wall clock of a process: read once, so that later steps of the system's clock do not tear calls apart.
WALL_NS = time.time_ns() - time.perf_counter_ns()


class CallKind:
    """What calls have in common: the fields of a `What`, without its number. Equal is what is one object."""

    __slots__ = ("asynchronous", "bytes", "channel", "coalesced", "group", "op", "peer", "site", "what")

    def __init__(self, **fields: Any) -> None:
        self.what = fields
        self.op: str = fields["op"]
        self.group: str = fields["group"]
        self.channel: str = fields["channel"]
        self.bytes: int = fields["bytes"]
        self.asynchronous: bool = fields["asynchronous"]
        self.coalesced: bool = fields["coalesced"]
        self.peer: int = fields["peer"]
        self.site: str = fields["site"]


class Listener(Protocol):
    """What is told of calls; from any thread, and must not raise."""

    def issued(self, call: TracedCall) -> None:
        """A call is about to be made."""

    def refused(self, call: TracedCall) -> None:
        """PyTorch raised an error instead of making it."""

    def ended(self, call: TracedCall) -> None:
        """A call has ended, or will never be seen to end."""


class TracedCall:
    """One call of a collective or of a point-to-point operation.

    Attributes:
        kind: what it has in common with others.
        group: its group.
        sequence: its number in its channel, from 0.
        queued: nanoseconds of `perf_counter` when the call was issued.
        start: nanoseconds of that clock when the call could begin; -1 where not known.
        end: nanoseconds of that clock when the call ended; -1 where not known.
        wait: nanoseconds of that clock when the caller first waited; -1 if never.
        listeners: who is told of its end.
        holder: weak reference to the Work that an asynchronous caller was given.
        work: the Work, held only as long as its end must be found from it.
        timer: what a clock needs.
        written: whether it stands in the file as not ended.
    """

    __slots__ = (
        "end", "group", "holder", "kind", "listeners", "queued", "sequence", "start", "timer", "wait", "work",
        "written",
    )  # fmt: skip

    def __init__(self, kind: CallKind, group: TracedGroup, sequence: int, listeners: tuple[Listener, ...]) -> None:
        self.kind = kind
        self.group = group
        self.sequence = sequence
        self.listeners = listeners
        self.start = self.end = self.wait = UNKNOWN
        self.holder: Any = None
        self.work: Any = None
        self.timer: Any = None
        self.written = False
        self.queued = time.perf_counter_ns()

    def row(self, what: int) -> CallRow:
        """The call as a line of the trace.

        Args:
            what: number of its `What`.
        """
        queued, start, end, wait = self.queued, self.start, self.end, self.wait
        return (
            what,
            self.sequence,
            queued + WALL_NS,
            UNKNOWN if start == UNKNOWN else start - queued,
            UNKNOWN if end == UNKNOWN else end - queued,
            UNKNOWN if wait == UNKNOWN else wait - queued,
        )


_OWN, _API, _TORCH, _USER = range(4)
MAX_CODES = 1 << 16
_DECORATORS = ("/contextlib.py", "/functools.py", "/typing_extensions.py", "/warnings.py")
_API_FILES = (
    "distributed/distributed_c10d.py",
    "distributed/c10d_logger.py",
    "distributed/_functional_collectives.py",
    "distributed/_functional_collectives_impl.py",
)


class CallSite:
    """A place in the code that calls: `file:line function`, and the function of torch.distributed called there.

    Two are equal if they are one object.
    """

    __slots__ = ("api", "site")

    def __init__(self, code: CodeType | None, line: int, api: CodeType | None) -> None:
        self.api = "" if api is None else api.co_name
        self.site = ""
        if code is not None:
            self.site = f"{Path(code.co_filename).name}:{line} {getattr(code, 'co_qualname', code.co_name)}"


class CallSites:
    """Finds the caller's line; remembers what it learned of each piece of code."""

    def __init__(self) -> None:
        import torch

        self._torch = str(Path(torch.__file__).parent)
        self._own = str(Path(__file__).parent)
        # By identity, since the hash of code is computed anew each time; the code is kept, so that it stays its
        # own.
        self._kinds: dict[int, tuple[int, CodeType]] = {}
        self._sites: dict[tuple[int, int, int], CallSite] = {}
        # By instruction, since the line of one must be searched for.
        self._instructions: dict[tuple[int, int, int], CallSite] = {}

    def at(self, frame: FrameType | None) -> CallSite:
        """The first code outside PyTorch, and the function of torch.distributed that it called.

        Args:
            frame: where to begin; None in a thread that runs no Python, of PyTorch's C++.
        """
        api, in_api, known = None, True, self._kinds
        while frame is not None:
            code = frame.f_code
            found = known.get(id(code))
            kind = found[0] if found is not None else self._classify(code)
            if kind == _USER:
                key = (id(code), frame.f_lasti, id(api))
                site = self._instructions.get(key)
                if site is None:
                    site = self._instructions[key] = self._site(code, frame.f_lineno, api)
                return site
            if kind == _API and in_api:
                api = code
            elif kind == _TORCH and api is not None:
                in_api = False
            frame = frame.f_back
        return self._site(None, 0, api)

    def _site(self, code: CodeType | None, line: int, api: CodeType | None) -> CallSite:
        if len(self._instructions) >= MAX_CODES:
            self._instructions.clear()
        key = (id(code), line, id(api))
        site = self._sites.get(key)
        if site is None:
            if len(self._sites) >= MAX_CODES:
                self._sites.clear()
            site = self._sites[key] = CallSite(code, line, api)
        return site

    def _classify(self, code: CodeType) -> int:
        name = code.co_filename
        if name.startswith(self._own) or name.endswith(_DECORATORS):
            kind = _OWN
        elif name.endswith(_API_FILES) and name.startswith(self._torch):
            # Decorators of torch.distributed are no functions that anybody calls.
            kind = _OWN if code.co_name == "wrapper" else _API
        elif name.startswith((self._torch, "<")):
            kind = _TORCH
        else:
            kind = _USER
        if len(self._kinds) >= MAX_CODES:
            # Sites are known by the same identities.
            self._kinds.clear()
            self._sites.clear()
            self._instructions.clear()
        self._kinds[id(code)] = kind, code
        return kind


class Phases:
    """Which phase of training this is, and in which module, once a model is attached.

    The forward pass is known by the module's hooks, the backward pass by autograd's running, the optimizer's step
    by the hooks that PyTorch has for all optimizers. A module that runs forward during the backward pass is
    recomputed. In the backward pass the module is the last one whose output's gradient was reached. Hooks only
    look.

    Attributes:
        optimizing: how many steps of optimizers are under way; who knows of steps around PyTorch's own adds them.
        entered: when modules were, in nanoseconds of `perf_counter`, from when someone puts a list there.
    """

    def __init__(self) -> None:
        import torch

        self._graph_task: Callable[[], int] = torch._C._current_graph_task_id
        self._stack: list[str] = []
        self._backward = ""
        self.optimizing = 0
        self.entered: list[int] | None = None
        self._handles: list[Any] = []

    def attach(self, model: Any) -> None:
        """Looks at the modules of a model from now on."""
        if not self._handles:
            from torch.optim import optimizer

            self._handles += [
                optimizer.register_optimizer_step_pre_hook(self._optimizer_begins),
                optimizer.register_optimizer_step_post_hook(self._optimizer_ends),
            ]
        self.watch(model)

    def watch(self, model: Any) -> None:
        """Looks at the modules of a model alone, not at optimizers."""
        for path, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._enter(path), prepend=True))
            self._handles.append(module.register_forward_hook(self._leave(path), always_call=True))

    def detach(self) -> None:
        """Takes all hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.clear()
        self.entered = None

    def here(self) -> tuple[str, str]:
        """Phase and module of this moment, each "" where not known."""
        in_backward = self._graph_task() != -1
        if self._stack:
            return "recompute" if in_backward else "forward", self._stack[-1]
        if in_backward:
            return "backward", self._backward
        return ("optimizer", "") if self.optimizing else ("", "")

    def _enter(self, path: str) -> Callable[..., None]:
        def hook(module: Any, inputs: Any) -> None:
            self._stack.append(path)
            if self.entered is not None:
                self.entered.append(time.perf_counter_ns())

        return hook

    def _leave(self, path: str) -> Callable[..., None]:
        def backward_reaches(gradients: Any) -> None:
            self._backward = path

        def hook(module: Any, inputs: Any, output: Any) -> None:
            if path in self._stack:
                # An exception may have left deeper modules behind.
                del self._stack[len(self._stack) - 1 - self._stack[::-1].index(path) :]
            for tensor in _tensors(output):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(backward_reaches)

        return hook

    def _optimizer_begins(self, *_: Any) -> None:
        self.optimizing += 1

    def _optimizer_ends(self, *_: Any) -> None:
        self.optimizing = max(0, self.optimizing - 1)


def _tensors(output: Any) -> list[Any]:
    import torch

    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    return [t for t in output if isinstance(t, torch.Tensor)] if isinstance(output, (list, tuple)) else []
