"""What engines share: their answer, start times or who waits for whom for ever, and how they loop over tasks.

Loops are written once: interpreted where tasks are few, compiled where they are many. Loading the compiler costs
more than interpreting some hundred thousand tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from echograph.errors import DeadlockError
from echograph.ir.columns import Int64
from echograph.simulator.tasks import TaskGraph


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Starts:
    """When each task starts, and why not sooner.

    Attributes:
        start: picoseconds.
        cause: the task whose end let it start: the one before it on its resource if that ended last, else the
            first of its dependencies that did; -1 when it waited for nothing. Tasks that meet have one cause,
            that of the one that was ready last (of several, the lowest number).
    """

    start: Int64
    cause: Int64


def deadlock(stuck: list[int]) -> DeadlockError:
    """What to raise when resources stand still.

    Args:
        stuck: the task first in line on each of them.
    """
    few = ", ".join(f"task {task}" for task in stuck[:2])
    return DeadlockError(f"deadlock: {few} and {max(0, len(stuck) - 2)} more wait for each other", tuple(stuck))


COMPILE_FROM = 300_000
"""Efforts from which compiled code pays."""


def effort(tasks: TaskGraph) -> int:
    """About how long interpreting one pass over tasks takes, in tasks of programs that wait for nobody."""
    return len(tasks) * (4 if tasks.has_rendezvous else 1)


def execute(loop: Callable[..., None], effort: int, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Runs a loop.

    Args:
        loop: a function of all inputs and outputs that indexes them and nothing else: arrays and lists do alike.
        effort: how long it would take interpreted, as `effort` counts.
        inputs: arrays that it reads.
        outputs: arrays that it changes.
    """
    if effort >= COMPILE_FROM:
        compiled(loop)(*(np.require(i, requirements=("C", "W")) for i in inputs), *outputs)
        return
    # Lists are several times quicker to index than arrays.
    lists = [array.tolist() for array in outputs]
    loop(*(array.tolist() for array in inputs), *lists)
    for array, values in zip(outputs, lists, strict=True):
        array[:] = values


@cache
def compiled(loop: Callable[..., None]) -> Callable[..., None]:
    """The loop as machine code, from the cache on disk if it was compiled before."""
    from echograph.simulator.engine.machine_code import kept

    return kept(loop, nogil=True)
