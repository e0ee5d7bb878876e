"""Loops over tasks, written once: interpreted where tasks are few, compiled where they are many.

Loading the compiler costs more than interpreting some hundred thousand tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from echograph.simulator.tasks import TaskGraph

COMPILE_FROM = 300_000
"""Efforts from which compiled code pays."""


def effort(tasks: TaskGraph) -> int:
    """About how long interpreting one pass over tasks takes, in tasks of programs that wait for nobody."""
    return len(tasks) * (4 if tasks.joined else 1)


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
