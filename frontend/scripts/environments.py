"""What environments of reinforcement learning are told: they take an action, whichever it is.

An environment computes with the action that it is given, and goes one way or another by it. What a policy chooses
is not known in a capture, and any choice is as good as another for what a step of training computes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from echograph.frontend.scripts.adapter import once_imported, patched
from echograph.frontend.scripts.values import NoteTaker, StandInInteger, StandInNumber, line_of_script

_MAKING = ("gymnasium.envs.registration", "gym.envs.registration")


@contextmanager
def acting(note: NoteTaker) -> Iterator[None]:
    """In the context, environments take the number that stands for an action as an action like others.

    Args:
        note: is told who gave one.
    """
    with ExitStack() as stack:
        for module in _MAKING:
            stack.enter_context(once_imported(module, partial(_made, module, note)))
        yield


@contextmanager
def _made(module: str, note: NoteTaker) -> Iterator[None]:
    def making(original: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            environment = original(*args, **kwargs)
            step = environment.step

            def taking(action: Any) -> Any:
                if isinstance(action, StandInInteger | StandInNumber):
                    note(f"{line_of_script()} acts as values say, which a capture does not have: by {action:g}")
                    action = int(action) if isinstance(action, int) else float(action)
                return step(action)

            environment.step = taking
            return environment

        return make

    with patched(sys.modules[module], "make", making):
        yield
