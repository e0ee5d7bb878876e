"""What engines take beside tasks, columns that differ in durations; and what they answer: times and causes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echograph.errors import DeadlockError
from echograph.ir.columns import NONE, Float64, Int32, Int64
from echograph.simulator.tasks import TaskGraph


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """Runs of one task graph side by side: ranks of its roles, or scenarios.

    A column's tasks are those of all others, its durations its own. Columns may wait for each other, as the ranks
    of a role do in a collective.

    Attributes:
        kind: int32 [tasks], the row of `factor` for each task.
        factor: float64 [kinds, columns]: durations are multiplied with it and rounded to the picosecond.
        place: int32 [tasks], the row of `places` for each task; -1 where a column waits for no other.
        places: int32 [rows, columns]: where a column has its rendezvous, from 0 to columns - 1. All that are in
            one place start together, be they of one task or of those that have a rendezvous in the task graph.
        jitter: relative standard deviation of each duration of a stream that nobody is waited for in.
        seed: of the jitter.
    """

    kind: Int32
    factor: Float64
    place: Int32
    places: Int32
    jitter: float = 0.0
    seed: int = 0

    def __len__(self) -> int:
        return len(self.factor[0])


def apart(tasks: TaskGraph, kind: Int32, factor: Float64) -> Columns:
    """Columns that never wait for each other."""
    none = np.full(len(tasks), NONE, np.int32)
    return Columns(kind=kind, factor=factor, place=none, places=np.zeros((1, factor.shape[1]), np.int32))


def alone(tasks: TaskGraph) -> Columns:
    """The tasks as they are: one column."""
    return apart(tasks, np.zeros(len(tasks), np.int32), np.ones((1, 1)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ends:
    """When columns end.

    Attributes:
        end: int64 [resources, columns], picoseconds, when each resource ends its last task.
        waited: int64 [resources, columns], picoseconds that a resource was ready and its like in other columns
            were not.
        start: int64 [tasks], when the tasks of the recorded column start; empty where none was recorded.
        duration: int64 [tasks], how long they take.
    """

    end: Int64
    waited: Int64
    start: Int64
    duration: Int64

    @property
    def last(self) -> Int64:
        """int64 [columns], picoseconds, the end of the last task."""
        latest: Int64 = self.end.max(axis=0, initial=0)
        return latest


def causes(tasks: TaskGraph, start: Int64) -> Int64:
    """Why each task did not start sooner, read off the times.

    Args:
        tasks: with the durations that they took.
        start: int64 [tasks], picoseconds, when they started.

    Returns:
        int64 [tasks], the task whose end let each start: the one before it on its resource if that ended last,
        else the first of its dependencies that did; -1 where it waited for nothing, or for what is not among the
        tasks. Tasks that start together in a rendezvous have one cause, that of the one that was ready last (of
        several, the lowest number).
    """
    end, cause = start + tasks.duration, _before(tasks)
    ready = np.where(cause == NONE, 0, end[cause])
    its = np.flatnonzero(np.diff(tasks.deps.offsets))
    if len(its):
        # Of each task that depends on others: the latest end among these, and the first that has it.
        ends = end[tasks.deps.values]
        latest = np.maximum.reduceat(ends, tasks.deps.offsets[its])
        of = np.repeat(np.arange(len(its)), tasks.deps.lengths[its])
        found = np.flatnonzero(ends == latest[of])[::-1]
        first = np.empty(len(its), np.int64)
        first[of[found]] = tasks.deps.values[found]
        later = latest > ready[its]
        cause[its[later]], ready[its[later]] = first[later], latest[later]
    if tasks.has_rendezvous:
        # Those that started together, the one that was ready last first. Of columns that have a rendezvous not all
        # of one number do: a rank's send meets one neighbour, its receive another.
        its = np.flatnonzero(tasks.rendezvous != NONE)
        its = its[np.lexsort((-ready[its], start[its], tasks.rendezvous[its]))]
        first_here = (np.diff(tasks.rendezvous[its], prepend=NONE) > 0) | (np.diff(start[its], prepend=NONE) != 0)
        last = its[np.flatnonzero(first_here)][np.cumsum(first_here) - 1]
        cause[its], ready[its] = cause[last], ready[last]
    cause[start > ready] = NONE
    return cause


def _before(tasks: TaskGraph) -> Int64:
    """The task before each on its resource; -1 for the first."""
    queues, before = tasks.queues, np.full(len(tasks), NONE, np.int64)
    before[queues.values[1:]] = queues.values[:-1]
    before[queues.values[queues.offsets[:-1][queues.lengths > 0]]] = NONE
    return before


def deadlock(stuck: list[int]) -> DeadlockError:
    """What to raise when resources stand still.

    Args:
        stuck: the task first in the queue of each of them.
    """
    few = ", ".join(f"task {task}" for task in stuck[:2])
    return DeadlockError(f"deadlock: {few} and {max(0, len(stuck) - 2)} more wait for each other", tuple(stuck))
