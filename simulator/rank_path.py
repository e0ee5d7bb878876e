"""The critical path where every rank is simulated: it goes on in the rank that was waited for.

A simulation writes down when the tasks of one column (`ranks.Mesh`) start. Where they waited for another column,
the path leads into that one, of which a further simulation tells. The columns in question are those whose ranks
meet there. The one that waited least is looked at first; it is the right one if its own work let the meeting
start. Only so many columns are looked at: what lies before the last of them remains unsaid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from echograph.ir.columns import NONE, Int64
from echograph.ir.graph import JobGraph
from echograph.ir.timeline import Lane
from echograph.simulator.engine.schedule import Starts
from echograph.simulator.limits import families, largest_first
from echograph.simulator.ranks import EveryRank, Mesh, RankTimes
from echograph.simulator.tasks import TaskGraph
from echograph.units import to_s

Recorded = tuple[TaskGraph, Starts]
MOST_COLUMNS = 4
"""Columns that are simulated again to be looked at."""
MOST_TOLD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLimits:
    """What one rank has of the critical path.

    Attributes:
        rank: its number.
        role: its role's name.
        slower: factor on its kernels, as it was asked for.
        limits: picoseconds of each family of work, the largest first.
    """

    rank: int
    role: str
    slower: float
    limits: dict[str, int]

    @property
    def total_ps(self) -> int:
        """Its picoseconds on the path."""
        return sum(self.limits.values())

    def to_json(self) -> dict[str, object]:
        """As the result's JSON has it."""
        return {
            "rank": self.rank,
            "role": self.role,
            "slower": self.slower,
            "limits_s": {name: to_s(value) for name, value in self.limits.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPath:
    """The critical path over ranks.

    Attributes:
        limits: picoseconds of each family of work on it, the largest first; they add up to the step.
        ranks: the ranks with most of it, most first.
    """

    limits: dict[str, int]
    ranks: tuple[RankLimits, ...]


def rank_path(
    job: JobGraph,
    every: EveryRank,
    times: RankTimes,
    first: Recorded,
    again: Callable[[int], Recorded],
    most: int | None = None,
) -> RankPath:
    """Follows the critical path through the ranks that are waited for.

    Args:
        job: the job.
        every: how its ranks differ.
        times: of all ranks.
        first: the column that ends last.
        again: simulates once more and gives another column.
        most: how many columns it may give; None for `MOST_COLUMNS`, as many as are looked at in any case.
    """
    path = _Path(job, times, first, again, MOST_COLUMNS if most is None else min(most, MOST_COLUMNS))
    family = families(job)
    total = np.zeros((len(path.mesh.ranks().ravel()), int(family.max(initial=0)) + 1), np.int64)
    for rank, side, op, duration in path.tasks():
        total[rank, family[side, op]] += duration
    step = int(times.end_ps.max(initial=0))
    order = np.argsort(-total.sum(axis=1), kind="stable")[:MOST_TOLD].tolist()
    return RankPath(
        limits=largest_first(job, total.sum(axis=0), step),
        ranks=tuple(
            RankLimits(
                rank=rank,
                role=job.programs[path.program_of(rank)].role,
                slower=every.slow.get(rank, 1.0),
                limits=largest_first(job, total[rank], int(total[rank].sum())),
            )
            for rank in order
            if total[rank].any()
        ),
    )


class _Path:
    def __init__(
        self, job: JobGraph, times: RankTimes, first: Recorded, again: Callable[[int], Recorded], most: int
    ) -> None:
        self.mesh, self.times, self.again, self.left = Mesh(job), times, again, most
        self.column = int(times.column)
        self.known = {self.column: first}
        self.ranks = self.mesh.ranks()

    def program_of(self, rank: int) -> int:
        """The program that a rank runs."""
        return int(np.argwhere(self.ranks == rank)[0][0])

    def tasks(self) -> Iterator[tuple[int, int, int, int]]:
        """From the end of the step: rank, host (0) or device (1), operation and picoseconds of every task."""
        tasks, starts = self.known[self.column]
        task = int(np.argmax(starts.start + tasks.duration)) if len(tasks) else NONE
        while task != NONE:
            tasks, starts = self.known[self.column]
            rank = int(self.ranks[tasks.program[task], self.column])
            yield rank, int(tasks.lane[task] != Lane.HOST), int(tasks.op[task]), int(tasks.duration[task])
            cause = int(starts.cause[task])
            task = self._elsewhere(task) if cause == NONE and starts.start[task] > 0 else cause

    @cached_property
    def _places(self) -> tuple[Int64, Int64]:
        place, places = self.mesh.places(self.known[self.column][0])
        return place.astype(np.int64), places.astype(np.int64)

    def _elsewhere(self, task: int) -> int:
        """What ended last in another column before a meeting, which becomes the column; -1 if it is not found."""
        start = self.known[self.column][1].start[task]
        for column in self._candidates(task):
            if column not in self.known:
                if not self.left:
                    return NONE
                self.left -= 1
                self.known[column] = self.again(column)
            starts = self.known[column][1]
            if starts.start[task] == start and starts.cause[task] != NONE:
                self.column = column
                return int(starts.cause[task])
        return NONE

    def _candidates(self, task: int) -> list[int]:
        """The columns that a task meets: first those that are known, then those whose ranks have waited least."""
        place, places = self._places
        if place[task] == NONE:
            return []
        meets = places[place[task]]
        columns = np.flatnonzero(meets == meets[self.column])
        waited = self.times.waited_ps[self.ranks[self.known[self.column][0].program[task]]][columns]
        ordered = columns[np.argsort(waited, kind="stable")].tolist()
        return sorted((c for c in ordered if c != self.column), key=lambda c: c not in self.known)
