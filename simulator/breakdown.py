"""Where the time of a step goes, as parts that add up to it exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from echograph.ir.columns import Int64
from echograph.ir.graph import JobGraph
from echograph.ir.intervals import union
from echograph.ir.timeline import Lane, Timeline
from echograph.ir.types import COMMUNICATIONS, OpKind
from echograph.units import to_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Parts of a step in picoseconds, each moment counted once, the first that applies.

    Attributes:
        compute: a kernel runs on the device.
        exposed_communication: no kernel runs, a communication does; by the axes of its group.
        host: neither runs, and the host is issuing work.
        bubble: nothing runs while the program waits for another pipeline stage.
        wait: nothing runs for another reason (another rank is late).
    """

    compute: int
    exposed_communication: dict[str, int]
    host: int
    bubble: int
    wait: int

    @property
    def total(self) -> int:
        """The step."""
        parts = self.compute + self.host + self.bubble + self.wait
        return parts + sum(self.exposed_communication.values())

    def flat(self) -> dict[str, int]:
        """The parts by name, in the order in which they are told."""
        exposed = {f"exposed {axis}": value for axis, value in self.exposed_communication.items()}
        return {"compute": self.compute, **exposed, "host": self.host, "bubble": self.bubble, "wait": self.wait}

    def to_json(self) -> dict[str, Any]:
        """In seconds, as the result's JSON has it."""
        return {
            "compute": to_s(self.compute),
            "exposed_communication": {axis: to_s(value) for axis, value in self.exposed_communication.items()},
            "bubble": to_s(self.bubble),
            "wait": to_s(self.wait),
            "host": to_s(self.host),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Whose step a breakdown splits.

    Attributes:
        name: the role's name in the job; "rank N" where it has none.
        stage: of the pipeline; None where the job has none.
        rank: the one that ends last, or the lowest of those that are alike.
        ranks: how many ranks the role has.
    """

    name: str
    stage: int | None
    rank: int
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How the parts of a step differ between ranks.

    Attributes:
        ranks: how many ranks these figures are of.
        mean: over all of them; adds up to the step.
        least: of each part, what the rank has that has least of it; does not add up to the step.
        most: of each part, what the rank has that has most of it; does not add up to the step.
    """

    ranks: int
    mean: Breakdown
    least: Breakdown
    most: Breakdown


def role_of(job: JobGraph, program: int, rank: int | None = None) -> Role:
    """What a program is called, and which ranks it stands for.

    Args:
        job: the job.
        program: its number.
        rank: of its ranks, the one that is meant; None for the lowest.
    """
    its = job.programs[program]
    lowest = job.lowest_rank(program)
    return Role(
        name=its.role or f"rank {lowest}",
        stage=its.coordinates.get("pp"),
        rank=lowest if rank is None else rank,
        ranks=job.rank_count(program),
    )


def breakdown(job: JobGraph, timeline: Timeline, program: int, end_ps: int | None = None) -> Breakdown:
    """Splits the step of one program, from 0 to its end.

    Args:
        job: the job.
        timeline: of the program, and maybe of others.
        program: its number.
        end_ps: of the step; None where the timeline holds all of it.
    """
    return _Splitting(job, timeline, end_ps).of(np.flatnonzero(timeline.program == program))


def breakdowns(job: JobGraph, timeline: Timeline) -> list[Breakdown]:
    """`breakdown` of every program of a job."""
    splitting, order = _Splitting(job, timeline), np.argsort(timeline.program, kind="stable")
    edges = np.searchsorted(timeline.program[order], np.arange(len(job.programs) + 1))
    return [splitting.of(order[begin:end]) for begin, end in pairwise(edges.tolist())]


def spread(parts: Sequence[Breakdown], ranks: Sequence[int]) -> Spread:
    """Mean, least and most of breakdowns of one step.

    Args:
        parts: one for each role.
        ranks: how many ranks each role has.
    """
    table = np.array([_numbers(part) for part in parts], object)
    weight, step = np.array(ranks, object), parts[0].total
    mean = (weight @ table) // sum(ranks)
    # What rounding down leaves of the step, less than a picosecond for each part, goes to the largest.
    mean[int(mean.argmax())] += step - int(mean.sum())
    axes = tuple(parts[0].exposed_communication)
    return Spread(
        ranks=sum(ranks),
        mean=_from_numbers(mean, axes),
        least=_from_numbers(table.min(axis=0), axes),
        most=_from_numbers(table.max(axis=0), axes),
    )


def _numbers(part: Breakdown) -> list[int]:
    return [part.compute, part.host, part.bubble, part.wait, *part.exposed_communication.values()]


def _from_numbers(numbers: npt.NDArray[Any], axes: Sequence[str]) -> Breakdown:
    compute, host, bubble, wait, *exposed = map(int, numbers)
    return Breakdown(
        compute=compute,
        host=host,
        bubble=bubble,
        wait=wait,
        exposed_communication=dict(zip(axes, exposed, strict=True)),
    )


class _Splitting:
    """Splits the step of programs of one timeline."""

    def __init__(self, job: JobGraph, timeline: Timeline, end_ps: int | None = None) -> None:
        self.job, self.timeline = job, timeline
        self.end = timeline.makespan if end_ps is None else end_ps
        names = [group.label or f"group{i}" for i, group in enumerate(job.groups)]
        self.labels = list(dict.fromkeys(names))
        number = {name: i for i, name in enumerate(self.labels)}
        self.label_of = np.array([number[name] for name in names] or [0])
        self.staged = "pp" in {axis.name for axis in job.mesh}

    def of(self, rows: Int64) -> Breakdown:
        """The parts of the step of one program, whose rows these are."""
        timeline, ops = self.timeline, self.job.ops
        takes = timeline.duration[rows] > 0
        device, op = timeline.lane[rows] == Lane.DEVICE, timeline.op[rows]
        kind = ops.kind[op]
        communicates = device & np.isin(kind, COMMUNICATIONS)
        label = np.where(communicates, self.label_of[np.where(communicates, ops.group[op], 0)], -1)
        present = np.unique(label[communicates & takes]).tolist()
        layers = [
            device & ~communicates,
            *(label == number for number in present),
            timeline.lane[rows] == Lane.HOST,
        ]
        covered = _cover(timeline, [rows[layer & takes] for layer in layers], self.end)
        idle = self.end - sum(covered)
        exposed = dict.fromkeys(self.labels, 0)
        exposed |= {self.labels[number]: value for number, value in zip(present, covered[1:-1], strict=True)}
        # An imported job names no axes: who sends is taken for a stage of a pipeline.
        sends = not self.job.mesh and bool(np.isin(kind, (OpKind.SEND, OpKind.RECV)).any())
        staged = self.staged or sends
        return Breakdown(
            compute=covered[0],
            exposed_communication=exposed,
            host=covered[-1],
            bubble=idle if staged else 0,
            wait=0 if staged else idle,
        )


def _cover(timeline: Timeline, layers: list[Int64], end: int) -> list[int]:
    """Picoseconds that each layer covers and no earlier one does."""
    covered: list[int] = []
    starts, stops = np.zeros(0, np.int64), np.zeros(0, np.int64)
    before = 0
    for layer in layers:
        starts = np.concatenate([starts, timeline.start[layer]])
        stops = np.concatenate([stops, timeline.end[layer]])
        starts, stops = union(starts, stops)
        now = int((np.minimum(stops, end) - starts).sum())
        covered.append(now - before)
        before = now
    return covered
