"""What an engine answers: start times, or who waits for whom for ever."""

from __future__ import annotations

from dataclasses import dataclass

from echograph.errors import DeadlockError
from echograph.ir.columns import Int64


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
