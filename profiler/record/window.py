"""Which steps are recorded, and where they end in a script that nobody edited.

Which steps, and where to, is said by arguments or by the environment.

PyTorch tells of every step of every `torch.optim.Optimizer`. A framework's own optimizer or engine calls those
from a method `step` of its own, several times a step where it cuts parameters into parts, and gathers them
afterwards; so a step ends where the outermost `step` method on the stack returns. It is looked for once, and
wrapped.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from echograph.errors import UsageError

FOLDER, START, END = "recording", 10, 13


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The steps `start` to `end - 1`; a step's number is how many had ended when it began.

    Attributes:
        folder: where the ranks' folders go.
        start: first step, at least 1: where step 0 began nobody knows.
        end: the step before which recording ends.
        shapes: whether the trace has the shapes of operators' inputs, which costs some microseconds an operator.

    Raises:
        UsageError: the steps are no window.
    """

    folder: Path
    start: int
    end: int
    shapes: bool = True

    def __post_init__(self) -> None:
        if self.start < 1:
            raise UsageError(f"start step {self.start}: give 1 or more; where step 0 begins is not known")
        if self.end <= self.start:
            raise UsageError(
                f"end step {self.end}: give more than the start step, {self.start}; it is not recorded"
            )

    def environment(self) -> dict[str, str]:
        """The variables that say the same to another process."""
        return {
            "ECHOGRAPH_RECORD": "1",
            "ECHOGRAPH_RECORD_DIR": str(self.folder.absolute()),
            "ECHOGRAPH_RECORD_START_STEP": str(self.start),
            "ECHOGRAPH_RECORD_END_STEP": str(self.end),
            "ECHOGRAPH_RECORD_SHAPES": str(int(self.shapes)),
        }


def choose_window(
    folder: Path | None = None,
    start: int | None = None,
    end: int | None = None,
    shapes: bool | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Window:
    """What is given; what is not, from `ECHOGRAPH_RECORD_*`, else from ByteProfile's variables, else as usual.

    Args:
        folder: where the ranks' folders go (usual: `recording`).
        start: first step (usual: 10).
        end: the step before which recording ends (usual: three steps).
        shapes: whether the trace has shapes (usual: it has).
        environment: variables; those of ByteProfile count where `BYTEPS_TRACE_ON` is 1.

    Raises:
        UsageError: a variable is no number, or the steps are no window.
    """
    prefixes = ["ECHOGRAPH_RECORD", *(["BYTEPS_TRACE"] if environment.get("BYTEPS_TRACE_ON") == "1" else [])]

    def said(what: str) -> tuple[str, str] | None:
        names = (f"{prefix}_{what}" for prefix in prefixes)
        return next(((name, environment[name]) for name in names if environment.get(name)), None)

    def number(what: str) -> int | None:
        found = said(what)
        if found is None:
            return None
        try:
            return int(found[1])
        except ValueError:
            raise UsageError(f"{found[0]}: '{found[1]}' is no number of a step") from None

    if folder is None:
        named = said("DIR")
        folder = Path(named[1]) if named else Path(FOLDER)
    if start is None:
        start = number("START_STEP")
    if end is None:
        end = number("END_STEP")
    if start is None:
        start = START if end is None else max(1, min(START, end - 1))
    if shapes is None:
        shapes = number("SHAPES") != 0
    return Window(folder=folder, start=start, end=start + END - START if end is None else end, shapes=shapes)


class StepEnds:
    """Tells of each end of a training step: of the optimizer that stepped first, where a script has several.

    Args:
        ended: told, on the thread that trains.
        lost: told when a step could not be followed: called by a name that was taken before its first time.
        within: told 1 where the outermost `step` is entered, -1 where it is left.
    """

    def __init__(self, ended: Callable[[], None], lost: Callable[[], None], within: Callable[[int], None]) -> None:
        self._ended = ended
        self._lost = lost
        self._within = within
        self._depth = 0
        self._outer = 0
        self._stepped = False
        self._first: Any = None
        self._wrapped = False
        self._unwrapped: FrameType | None = None
        self._restore: list[Callable[[], None]] = []

    def install(self) -> None:
        """Listens from now on."""
        from torch.optim import optimizer

        self._restore += [
            optimizer.register_optimizer_step_pre_hook(self._begins).remove,
            optimizer.register_optimizer_step_post_hook(self._steps).remove,
        ]

    def remove(self) -> None:
        """Stops listening and puts back what was wrapped."""
        while self._restore:
            self._restore.pop()()
        self._unwrapped = self._first = None

    def _begins(self, optimizer: Any, *_: Any) -> None:
        if self._first is None:
            self._first = optimizer
        self._depth += 1

    def _steps(self, optimizer: Any, *_: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if optimizer is not self._first:
            return
        if self._depth or self._outer:
            self._stepped = True
        elif not self._wrapped:
            # This once the end is taken where the optimizer stepped; from the next call on it is seen.
            frame, owner = _outermost_step(sys._getframe(1)) or (None, optimizer)
            self._unwrapped = frame
            self._wrap(owner)
            self._ended()
        elif self._unwrapped is None or not _on_stack(self._unwrapped, sys._getframe(1)):
            self._lost()

    def _wrap(self, owner: Any) -> None:
        original: Callable[..., Any] = owner.step
        own = "step" in vars(owner)
        # Learning rate schedulers take the method of an optimizer apart, and leave a function in its place.
        method = isinstance(original, types.MethodType)
        function = original.__func__ if isinstance(original, types.MethodType) else original

        @functools.wraps(original)
        def step(*arguments: Any, **named: Any) -> Any:
            self._unwrapped = None
            self._outer += 1
            self._within(1)
            try:
                return function(*arguments, **named)
            finally:
                self._outer -= 1
                self._within(-1)
                if self._outer == 0 and self._stepped:
                    self._stepped = False
                    self._ended()

        owner.step = types.MethodType(step, owner) if method else step
        self._restore.append(lambda: setattr(owner, "step", original) if own else delattr(owner, "step"))
        self._wrapped = True


def _outermost_step(frame: FrameType | None) -> tuple[FrameType, type] | None:
    """The outermost frame of a method `step`, and the class that has it."""
    found = None
    while frame is not None:
        code = frame.f_code
        if code.co_name == "step" and code.co_argcount:
            owner = _owner(type(frame.f_locals.get(code.co_varnames[0])), code)
            if owner is not None:
                found = frame, owner
        frame = frame.f_back
    return found


def _owner(kind: type, code: Any) -> type | None:
    for owner in kind.__mro__:
        method = owner.__dict__.get("step")
        if callable(method) and getattr(inspect.unwrap(method), "__code__", None) is code:
            return owner
    return None


def _on_stack(sought: FrameType, frame: FrameType | None) -> bool:
    while frame is not None and frame is not sought:
        frame = frame.f_back
    return frame is sought
