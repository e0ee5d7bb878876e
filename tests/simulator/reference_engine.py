"""The readable engine: a heap of events, each the end of a task.

Every resource holds its tasks in program order. A task starts when it is first in line, what it depends on has
ended, and, if it meets tasks of other programs, all of those are ready too. Events at the same time are handled in
the order of task numbers, so two runs give the same answer.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from echograph.simulator.engine.columns import deadlock
from echograph.simulator.tasks import TaskGraph


class Starts(NamedTuple):
    """When each task starts, and the task whose end let it start, or -1."""

    start: np.ndarray
    cause: np.ndarray


def run(tasks: TaskGraph) -> Starts:
    """Start times of all tasks.

    Raises:
        DeadlockError: tasks wait for each other for ever; names two of them.
    """
    simulation = _Simulation(tasks)
    simulation.run()
    return Starts(start=np.array(simulation.start, np.int64), cause=_causes(tasks, simulation.start))


class _Simulation:
    def __init__(self, tasks: TaskGraph) -> None:
        count = len(tasks)
        self.resource = tasks.resource.tolist()
        self.duration = tasks.duration.tolist()
        self.rendezvous = tasks.rendezvous.tolist()
        self.start = [-1] * count
        self.waiting = tasks.deps.lengths.tolist()
        self.dependents: dict[int, list[int]] = defaultdict(list)
        for before, after in zip(tasks.deps.values.tolist(), tasks.deps.rows.tolist(), strict=True):
            self.dependents[before].append(after)
        self.line: list[list[int]] = [[] for _ in range(tasks.resources)]
        for task in range(count - 1, -1, -1):
            self.line[self.resource[task]].append(task)
        self.missing: dict[int, int] = defaultdict(int)
        for its in self.rendezvous:
            self.missing[its] += its >= 0
        self.arrived: dict[int, list[int]] = defaultdict(list)
        self.ends: list[tuple[int, int]] = []

    def run(self) -> None:
        for resource in range(len(self.line)):
            self._serve(resource, 0)
        while self.ends:
            now, task = heapq.heappop(self.ends)
            self.line[self.resource[task]].pop()
            for dependent in self.dependents.pop(task, ()):
                self.waiting[dependent] -= 1
                if self.waiting[dependent] == 0:
                    self._serve(self.resource[dependent], now)
            self._serve(self.resource[task], now)
        self._check_done()

    def _serve(self, resource: int, now: int) -> None:
        """Starts the first task in line if nothing holds it."""
        if not self.line[resource]:
            return
        task = self.line[resource][-1]
        if self.waiting[task] or self.start[task] >= 0:
            return
        members = [task]
        if self.rendezvous[task] >= 0:
            members = self.arrived[self.rendezvous[task]]
            if task not in members:
                members.append(task)
            if len(members) < self.missing[self.rendezvous[task]]:
                return
        for member in members:
            self.start[member] = now
            heapq.heappush(self.ends, (now + self.duration[member], member))

    def _check_done(self) -> None:
        stuck = [line[-1] for line in self.line if line]
        if stuck:
            raise deadlock(stuck)


def _causes(tasks: TaskGraph, start: list[int]) -> np.ndarray:
    """Why each task did not start sooner, read off the times."""
    end = (np.array(start, np.int64) + tasks.duration).tolist()
    cause = np.full(len(tasks), -1, np.int64)
    before: dict[int, int] = {}
    meetings: dict[int, list[tuple[int, int]]] = defaultdict(list)
    deps, offsets = tasks.deps.values.tolist(), tasks.deps.offsets.tolist()
    for task, (resource, rendezvous) in enumerate(
        zip(tasks.resource.tolist(), tasks.rendezvous.tolist(), strict=True)
    ):
        latest, why = (end[before[resource]], before[resource]) if resource in before else (0, -1)
        for dep in deps[offsets[task] : offsets[task + 1]]:
            if end[dep] > latest:
                latest, why = end[dep], dep
        cause[task] = why
        before[resource] = task
        if rendezvous >= 0:
            meetings[rendezvous].append((latest, task))
    for met in meetings.values():
        last = max(met, key=lambda member: member[0])[1]
        cause[[task for _, task in met]] = cause[last]
    return cause
