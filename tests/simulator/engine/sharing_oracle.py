"""The event engine as one would explain it: exact rates of all flows after everything that happens, in fractions.

Slow: after each end all is looked through again. Ends are whole picoseconds, as the clock counts them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil

import numpy as np

from echograph.simulator.engine.columns import Columns
from echograph.simulator.engine.sharing import Sharing
from echograph.simulator.tasks import TaskGraph

Line = tuple[int, int]
"""A resource in a column."""


@dataclass
class Activity:
    """Tasks that run together: how long each takes, and bytes/s on links at rate 1."""

    lasts: dict[Line, int]
    load: Fraction = Fraction(0)
    weights: dict[int, Fraction] = field(default_factory=lambda: defaultdict(Fraction))
    done: Fraction = Fraction(0)
    rate: Fraction = Fraction(1)

    @property
    def next(self) -> int:
        return min(self.lasts.values())


class Oracle:
    """Runs all columns; then `start` and `end` have the times of (task, column), `carried` the bytes of links."""

    def __init__(self, tasks: TaskGraph, columns: Columns, sharing: Sharing) -> None:
        assert columns.jitter == 0
        self.tasks, self.columns, self.sharing = tasks, columns, sharing
        self.count = columns.factor.shape[1]
        self.lines: dict[Line, list[int]] = {
            (r, c): np.flatnonzero(tasks.resource == r).tolist()[::-1]
            for r in range(tasks.resources)
            for c in range(self.count)
        }
        self.members = defaultdict(list)
        for task in range(len(tasks)):
            self.members[self.what(task)].append(task)
        self.start = np.full((len(tasks), self.count), -1, np.int64)
        self.end = np.full((len(tasks), self.count), -1, np.int64)
        self.carried = [Fraction(0)] * len(sharing.capacity)
        self.now, self.running = 0, list[Activity]()
        while self.begin() or self.running:
            self.advance()
        assert not any(self.lines.values())

    def what(self, task: int) -> tuple[str, int]:
        rendezvous = int(self.tasks.rendezvous[task])
        return ("rendezvous", rendezvous) if rendezvous >= 0 else ("task", task)

    def place(self, task: int, column: int) -> int:
        row = int(self.columns.place[task])
        return column if row < 0 else int(self.columns.places[row, column])

    def begin(self) -> bool:
        """Begins all that can, until nothing does; whether anything did."""
        any_began = False
        while True:
            ready = defaultdict(list)
            for (_, column), line in self.lines.items():
                if not line or self.start[line[-1], column] >= 0:
                    continue
                if all(self.end[d, column] >= 0 for d in self.tasks.deps[line[-1]]):
                    ready[self.what(line[-1]), self.place(line[-1], column)].append((line[-1], column))
            began = False
            for (what, place), here in ready.items():
                all_of_them = [
                    (t, c) for t in self.members[what] for c in range(self.count) if self.place(t, c) == place
                ]
                if len(here) == len(all_of_them):
                    self.begin_one(here, place)
                    began = any_began = True
            if not began:
                return any_began
            self.finish()

    def begin_one(self, members: list[tuple[int, int]], place: int) -> None:
        activity = Activity({})
        for task, column in members:
            factor = self.columns.factor[self.columns.kind[task], column]
            activity.lasts[int(self.tasks.resource[task]), column] = round(self.tasks.duration[task] * factor)
            self.start[task, column] = self.now
        routed = [task for task, _ in members if self.sharing.route[task] >= 0]
        row = int(self.sharing.routes[self.sharing.route[min(routed)], place]) if routed else -1
        if row >= 0:
            activity.load = Fraction(float(self.sharing.load[min(routed)]))
            for k in range(self.sharing.links.offsets[row], self.sharing.links.offsets[row + 1]):
                activity.weights[int(self.sharing.links.values[k])] += Fraction(float(self.sharing.weight[k]))
        self.running.append(activity)

    def finish(self) -> None:
        for activity in self.running:
            for line in [line for line, lasts in activity.lasts.items() if lasts <= activity.done]:
                self.end[self.lines[line].pop(), line[1]] = self.now
                del activity.lasts[line]
        self.running = [activity for activity in self.running if activity.lasts]

    def advance(self) -> None:
        """To the next end."""
        self.share()
        then = min((self.now + ceil((a.next - a.done) / a.rate) for a in self.running), default=self.now)
        for activity in self.running:
            did = min(activity.rate * (then - self.now), activity.next - activity.done)
            activity.done += did
            for link, weight in activity.weights.items():
                self.carried[link] += did * activity.load * weight / 10**12
        self.now = then
        self.finish()

    def share(self) -> None:
        """Progressive filling: all rise together until a link is full or a flow has what it can use."""
        flows = [a for a in self.running if a.load > 0 and any(a.weights.values())]
        left = [Fraction(float(c)) for c in self.sharing.capacity]
        rising = list(flows)
        while rising:
            share = [sum((a.weights.get(k, Fraction(0)) for a in rising), Fraction(0)) for k in range(len(left))]
            levels = [a / b if b else None for a, b in zip(left, share, strict=True)]
            level = min([lv for lv in levels if lv is not None] + [a.load for a in rising])
            full = {k for k, lv in enumerate(levels) if lv == level}
            stops = [a for a in rising if a.load == level or any(a.weights.get(k) for k in full)]
            for activity in stops:
                activity.rate = level / activity.load
                rising.remove(activity)
                for link, weight in activity.weights.items():
                    left[link] -= weight * level
