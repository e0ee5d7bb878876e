"""Every rank of a job, not only every role: what slow ranks and noise do.

The programs of a job stand for the ranks that differ along the axes which programs leave free. Those ranks are
columns (`engine.columns`): all run the role's tasks, each with clocks and durations of its own, and meet the
other ranks of their groups.

The critical path goes on in the rank that was waited for (`rank_path`). A simulation writes down when the tasks
of one column start. Where they waited for another column, the path leads into that one, of which a further
simulation tells. The columns in question are those whose ranks meet there. The one that waited least is looked
at first; it is the right one if its own work let the meeting start. Only so many columns are looked at: what
lies before the last of them remains unsaid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from echograph.errors import SimulationError, UsageError
from echograph.ir.columns import NONE, Int32, Int64
from echograph.ir.graph import Axis, Group, JobGraph
from echograph.ir.timeline import Lane, Timeline
from echograph.ir.types import COMMUNICATIONS, OpKind
from echograph.simulator.engine import static, write_timeline
from echograph.simulator.engine.columns import Columns, Ends
from echograph.simulator.limits import families, largest_first
from echograph.simulator.tasks import DEVICE, TaskGraph
from echograph.units import to_s

if TYPE_CHECKING:
    from echograph.simulator.engine.sharing import Sharing


MAX_FACTOR = 1000
MAX_JITTER = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryRank:
    """How ranks differ.

    Attributes:
        slow: rank -> factor on the durations of its kernels (1.1: a tenth slower).
        jitter: relative standard deviation of every kernel's duration, independent and nearly normal.
        seed: of the jitter; the same seed gives the same step.
        draws: simulations with seeds that follow `seed`, for percentiles of the step time.

    Raises:
        UsageError: a factor, the jitter or the seed is out of range.
    """

    slow: Mapping[int, float] = field(default_factory=dict)
    jitter: float = 0.0
    seed: int = 0
    draws: int = 1

    def __post_init__(self) -> None:
        for rank, factor in self.slow.items():
            if not 0 < factor <= MAX_FACTOR:
                raise UsageError(f"rank {rank} slower by {factor}: give a factor over 0 and up to {MAX_FACTOR:,}")
        if not 0 <= self.jitter <= MAX_JITTER:
            raise UsageError(f"jitter {self.jitter}: give a relative deviation from 0 to {MAX_JITTER}")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed {self.seed}: give a whole number from 0 to 2^63 - 1")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankTimes:
    """What every rank did, by number.

    Attributes:
        end_ps: int64 [ranks], the end of its last task.
        waited_ps: int64 [ranks], how long its streams together stood ready for other ranks of its role. The one
            that they wait for has waited least.
        column: of `Mesh`, the ranks whose tasks are told.
    """

    end_ps: Int64
    waited_ps: Int64
    column: int = 0

    def to_json(self) -> dict[str, Any]:
        """Lowest, middle and highest of each time, and the ranks that waited least."""
        columns = {"end_s": self.end_ps, "waited_s": self.waited_ps}
        record: dict[str, Any] = {
            name: {"min": to_s(int(c.min())), "median": float(np.median(c)) / 1e12, "max": to_s(int(c.max()))}
            for name, c in columns.items()
        }
        return {**record, "waited_least": np.argsort(self.waited_ps, kind="stable")[:8].tolist()}


def run_every_rank(
    job: JobGraph,
    tasks: TaskGraph,
    every: EveryRank,
    *,
    engine: str = "static",
    sharing: Sharing | None = None,
    column: int | None = None,
) -> tuple[Timeline, RankTimes]:
    """Runs all ranks of a job.

    Args:
        job: the job.
        tasks: what its roles do.
        every: how their ranks differ.
        engine: "static", or "events", which alone can share links.
        sharing: the links that communications share; None where they leave each other alone.
        column: the column that is wanted; None for that of the rank which ends last.

    Returns:
        What one column did (without a cause where a rank of another column was waited for), and the times of all
        ranks.

    Raises:
        SimulationError: ranks cannot be told apart by the mesh, or `every` names one that is not there.
        DeadlockError: tasks wait for each other for ever.
    """
    mesh = Mesh(job)
    slowest = max((1.0, *every.slow.values())) * (1 + 4 * every.jitter)
    if not float(tasks.duration.sum(dtype=np.float64)) * slowest < 2**63:
        raise SimulationError(f"the step may take more than {to_s(2**63) / 86_400:.0f} days: give smaller factors")
    columns = kernel_columns(mesh, tasks, every)
    run: Callable[..., Ends]
    if engine == "events":
        # The compiler is loaded where it is needed.
        from echograph.simulator.engine import events

        run = partial(events.run_columns, tasks, columns, sharing)
    else:
        run = partial(static.run_columns, tasks, columns, order=static.topological_order(tasks))
    told = column or 0
    ends = run(record=told)
    if column is None and (last := int(np.argmax(ends.last))) != told:
        ends, told = run(record=last), last
    timeline = write_timeline(job, replace(tasks, duration=ends.duration), ends.start)
    return timeline, replace(_times(mesh, tasks, ends.end, ends.waited), column=told)


def kernel_columns(mesh: Mesh, tasks: TaskGraph, every: EveryRank) -> Columns:
    """The columns of a job's ranks, whose kernels take as long as is said of each.

    Raises:
        SimulationError: `every` names a rank that is not there.
    """
    kernel = (tasks.lane == DEVICE) & (mesh.job.ops.kind == OpKind.COMPUTE)[tasks.op]
    place, places = mesh.places(tasks)
    return Columns(
        kind=np.where(kernel, 1 + tasks.program, 0),
        factor=_factors(mesh, every),
        place=place,
        places=places,
        jitter=every.jitter,
        seed=every.seed,
    )


def _factors(mesh: Mesh, every: EveryRank) -> np.ndarray:
    """Row 0 for what is not a kernel, then a row for the kernels of each program; a column for each column."""
    ranks = mesh.ranks()
    factor = np.ones((1 + len(ranks), mesh.columns))
    for rank, slower in every.slow.items():
        if rank not in ranks:
            raise SimulationError(f"no rank {rank} to slow down: give one from 0 to {ranks.size - 1}")
        factor[1:][ranks == rank] = slower
    return factor


def _times(mesh: Mesh, tasks: TaskGraph, end: Int64, waited: Int64) -> RankTimes:
    ranks, lanes = mesh.ranks(), tasks.resources // len(mesh.job.programs)
    by_program = (-1, lanes, mesh.columns)
    times = RankTimes(end_ps=np.zeros(ranks.size, np.int64), waited_ps=np.zeros(ranks.size, np.int64))
    times.end_ps[ranks] = end.reshape(by_program).max(axis=1)
    times.waited_ps[ranks] = waited.reshape(by_program).sum(axis=1)
    return times


class Mesh:
    """The ranks of a job as (program, column).

    Raises:
        SimulationError: roles leave different axes free, or a group is not made of axes.
    """

    def __init__(self, job: JobGraph) -> None:
        self.job = job
        pinned = {frozenset(p.coordinates) for p in job.programs}
        listed = [p for p in job.programs if len(p.ranks) > 1]
        if len(pinned) > 1 or (not job.mesh and listed):
            raise SimulationError("roles of this job leave different axes free: simulate roles, not every rank")
        self.free: list[Axis] = [a for a in job.mesh if a.name not in next(iter(pinned))]
        self.columns = prod(a.size for a in self.free)
        grid = np.indices([a.size for a in self.free]).reshape(len(self.free), self.columns)
        self.coordinates = dict(zip((a.name for a in self.free), grid, strict=True))

    def ranks(self) -> Int64:
        """int64 [programs, columns]: the rank that each column of a program is."""
        if not self.job.mesh:
            return np.arange(len(self.job.programs))[:, None]
        ranks = np.zeros((len(self.job.programs), self.columns), np.int64)
        for axis in self.job.mesh:
            own = [self.coordinates.get(axis.name, p.coordinates.get(axis.name, 0)) for p in self.job.programs]
            ranks = ranks * axis.size + np.stack([np.broadcast_to(o, self.columns) for o in own])
        return ranks

    def places(self, tasks: TaskGraph | Timeline) -> tuple[Int32, Int32]:
        """Where the columns of every task meet: `place` and `places` of `engine.columns.Columns`."""
        ops = self.job.ops
        of_row, found = np.full(len(ops), NONE, np.int32), {}
        for row in np.flatnonzero(np.isin(ops.kind, COMMUNICATIONS)).tolist():
            shift = int(ops.peer[row]) if ops.kind[row] == OpKind.RECV else 0
            key = (int(ops.group[row]), ops.kind[row] == OpKind.COLLECTIVE, shift)
            if key not in found:
                found[key] = self._meet(self.job.groups[key[0]], collective=key[1], shift=shift)
            rows = found[key]
            of_row[row] = NONE if rows is None else list(found).index(key)
        same = np.arange(self.columns)
        places = np.array([same if rows is None else rows for rows in found.values()] or [same], np.int32)
        return np.where(tasks.lane == DEVICE, of_row[tasks.op], NONE), places

    def _meet(self, group: Group, *, collective: bool, shift: int) -> Int64 | None:
        """For each column, the lowest column of its group; or for a message, the sender's; None for its own."""
        inside = [a for a in self.free if a.name in group.axes]
        if self.columns > 1 and not group.axes:
            raise SimulationError(f"group '{group.name}' lists ranks: simulate roles, not every rank")
        if not inside:
            return None
        at = {name: values.copy() for name, values in self.coordinates.items()}
        if collective:
            for axis in inside:
                at[axis.name][:] = 0
        elif self.job.group_size(group) != prod(a.size for a in inside):
            raise SimulationError(f"messages in group '{group.name}' cross roles: simulate roles, not every rank")
        else:
            place = np.zeros(self.columns, np.int64)
            for axis in inside:
                place = place * axis.size + at[axis.name]
            place = (place + shift) % self.job.group_size(group)
            for axis in reversed(inside):
                place, at[axis.name] = np.divmod(place, axis.size)
        column = np.zeros(self.columns, np.int64)
        for axis in self.free:
            column = column * axis.size + at[axis.name]
        return column


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
    first: Timeline,
    again: Callable[[int], Timeline],
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
        self, job: JobGraph, times: RankTimes, first: Timeline, again: Callable[[int], Timeline], most: int
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
        its = self.known[self.column]
        task = int(np.argmax(its.end)) if len(its) else NONE
        while task != NONE:
            its = self.known[self.column]
            rank = int(self.ranks[its.program[task], self.column])
            yield rank, int(its.lane[task] != Lane.HOST), int(its.op[task]), int(its.duration[task])
            cause = int(its.cause[task])
            task = self._elsewhere(task) if cause == NONE and its.start[task] > 0 else cause

    @cached_property
    def _places(self) -> tuple[Int64, Int64]:
        place, places = self.mesh.places(self.known[self.column])
        return place.astype(np.int64), places.astype(np.int64)

    def _elsewhere(self, task: int) -> int:
        """What ended last in another column before a meeting, which becomes the column; -1 if it is not found."""
        start = self.known[self.column].start[task]
        for column in self._candidates(task):
            if column not in self.known:
                if not self.left:
                    return NONE
                self.left -= 1
                self.known[column] = self.again(column)
            its = self.known[column]
            if its.start[task] == start and its.cause[task] != NONE:
                self.column = column
                return int(its.cause[task])
        return NONE

    def _candidates(self, task: int) -> list[int]:
        """The columns that a task meets: first those that are known, then those whose ranks have waited least."""
        place, places = self._places
        if place[task] == NONE:
            return []
        meets = places[place[task]]
        columns = np.flatnonzero(meets == meets[self.column])
        waited = self.times.waited_ps[self.ranks[self.known[self.column].program[task]]][columns]
        ordered = columns[np.argsort(waited, kind="stable")].tolist()
        return sorted((c for c in ordered if c != self.column), key=lambda c: c not in self.known)


def of_ranks(job: JobGraph, ranks: Sequence[int], of_column: Callable[[int], Timeline]) -> Timeline:
    """What some ranks did, each as a program of its own.

    Args:
        job: the job.
        ranks: the ranks, each once.
        of_column: the timeline of one column of all programs (`ranks.Mesh`).

    Raises:
        SimulationError: a rank that is not there, or ranks cannot be told apart by the mesh.
    """
    where = Mesh(job).ranks()
    parts: dict[int, Timeline] = {}
    found = []
    for at, rank in enumerate(ranks):
        if rank not in where:
            raise SimulationError(f"no rank {rank} to trace: give ranks from 0 to {where.size - 1}")
        program, column = (int(axis[0]) for axis in np.nonzero(where == rank))
        if column not in parts:
            parts[column] = of_column(column)
        found.append(_program(parts[column], program, at))
    return _together(found, tuple(f"rank {rank}" for rank in ranks), job.streams)


COLUMNS = ("program", "lane", "stream", "op", "instance", "micro_batch", "start", "duration", "cause")


def _program(timeline: Timeline, program: int, number: int) -> dict[str, np.ndarray]:
    """The rows of one program, whose causes are rows among them, or -1."""
    rows = np.flatnonzero(timeline.program == program)
    part = {name: getattr(timeline, name)[rows] for name in COLUMNS}
    place = np.full(len(timeline) + 1, NONE, np.int64)
    place[rows] = np.arange(len(rows))
    part["cause"] = place[part["cause"]]
    part["program"] = np.full(len(rows), number, np.int32)
    return part


def _together(parts: list[dict[str, np.ndarray]], names: tuple[str, ...], streams: tuple[str, ...]) -> Timeline:
    before = 0
    for part in parts:
        part["cause"] = np.where(part["cause"] == NONE, NONE, part["cause"] + before)
        before += len(part["cause"])
    columns: dict[str, Any] = {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}
    return Timeline(**columns, programs=names, streams=streams)
