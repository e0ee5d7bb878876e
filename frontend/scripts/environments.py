"""What environments of reinforcement learning are told: they take an action, whichever it is.

An environment computes with the action that it is given, and goes one way or another by it. What a policy chooses
is not known in a capture, and any choice is as good as another for what a step of training computes.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
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
            if module.startswith("gym.") and "seed" not in dir(environment):
                _as_before(environment, note)
            return environment

        return make

    with patched(sys.modules[module], "make", making):
        yield


def _as_before(environment: Any, note: NoteTaker) -> None:
    """Has an environment of gym, from 0.26 on, answer as before to a file that takes four values of a step."""
    step, reset = environment.step, environment.reset

    def seed(value: int | None = None) -> list[int | None]:
        note(f"{line_of_script()} calls gym's seed, which is no more: a reset takes it")
        reset(seed=value)
        return [value]

    def stepping(action: Any) -> Any:
        made = step(action)
        if not _takes_four(sys._getframe(1).f_code.co_filename) or len(made) == 4:
            return made
        note(f"{line_of_script()} takes four values of gym's step, which gives five: done is the third")
        observation, reward, terminated, truncated, told = made
        return observation, reward, terminated or truncated, told

    def resetting(*args: Any, **kwargs: Any) -> Any:
        made = reset(*args, **kwargs)
        return made[0] if _takes_four(sys._getframe(1).f_code.co_filename) else made

    environment.seed, environment.step, environment.reset = seed, stepping, resetting


@cache
def _takes_four(file: str) -> bool:
    """Whether a file takes four values apart of what a step gives."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return False
    return any(
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr == "step"
        and any(isinstance(target, ast.Tuple) and len(target.elts) == 4 for target in node.targets)
        for node in ast.walk(tree)
    )
