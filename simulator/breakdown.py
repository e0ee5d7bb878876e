"""Where the time of a step goes, as parts that add up to it exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from echograph.ir.columns import NONE, Int64
from echograph.ir.graph import JobGraph
from echograph.ir.intervals import Pieces, layered, spent_in_layers
from echograph.ir.timeline import Lane, Timeline
from echograph.ir.types import COMMUNICATIONS, OpKind
from echograph.units import to_s

COMPUTE = 0
"""The layer of kernels."""
_SENDS = (OpKind.SEND, OpKind.RECV)


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
    return Role(
        name=job.role_name(program),
        stage=job.programs[program].coordinates.get("pp"),
        rank=job.lowest_rank(program) if rank is None else rank,
        ranks=job.rank_count(program),
    )


class BreakdownLayers(NamedTuple):
    """What a moment of a step can be, the first that applies: compute, a communication, the host alone, nothing.

    Attributes:
        labels: of the communications' groups, which are the layers from 1 on.
        of_op: int64 [rows], the layer of every operation's task on the device.
    """

    labels: tuple[str, ...]
    of_op: Int64

    @property
    def host(self) -> int:
        """The device does nothing, and the host issues."""
        return len(self.labels) + 1

    @property
    def idle(self) -> int:
        """Nothing runs."""
        return len(self.labels) + 2


def layers_of(job: JobGraph) -> BreakdownLayers:
    """The layers of a job."""
    names = [group.label or f"group{i}" for i, group in enumerate(job.groups)]
    labels = tuple(dict.fromkeys(names))
    number = np.array([1 + labels.index(name) for name in names] or [0])
    communicates = np.isin(job.ops.kind, COMMUNICATIONS)
    return BreakdownLayers(labels, np.where(communicates, number[np.where(communicates, job.ops.group, 0)], 0))


def moments(layers: BreakdownLayers, timeline: Timeline, rows: Int64) -> Pieces:
    """What a program does from 0 to the end of the step: a breakdown laid out in time.

    Args:
        layers: of the job.
        timeline: of all of the step.
        rows: those of the program.

    Returns:
        Pieces whose rows are the timeline's.
    """
    rows = rows[timeline.duration[rows] > 0]
    found = layered(*_laid_out(layers, timeline, rows, timeline.makespan))
    return found._replace(row=np.append(rows, NONE)[found.row])


def _laid_out(
    layers: BreakdownLayers, timeline: Timeline, rows: Int64, end_ps: int
) -> tuple[Int64, Int64, Int64, int, int]:
    """Starts, ends and layers of rows, how many layers there are, and where the step ends."""
    layer = np.where(timeline.lane[rows] == Lane.DEVICE, layers.of_op[timeline.op[rows]], layers.host)
    return timeline.start[rows], timeline.end[rows], layer, layers.idle, end_ps


def breakdown(job: JobGraph, timeline: Timeline, program: int, end_ps: int | None = None) -> Breakdown:
    """Splits the step of one program, from 0 to its end.

    Args:
        job: the job.
        timeline: of the program, and maybe of others.
        program: its number.
        end_ps: of the step; None where the timeline holds all of it.
    """
    return _split(job, layers_of(job), timeline, np.flatnonzero(timeline.program == program), end_ps)


def breakdowns(job: JobGraph, timeline: Timeline) -> list[Breakdown]:
    """`breakdown` of every program of a job."""
    layers, order = layers_of(job), np.argsort(timeline.program, kind="stable")
    edges = np.searchsorted(timeline.program[order], np.arange(len(job.programs) + 1))
    return [_split(job, layers, timeline, order[begin:end]) for begin, end in pairwise(edges.tolist())]


def _split(
    job: JobGraph, layers: BreakdownLayers, timeline: Timeline, rows: Int64, end_ps: int | None = None
) -> Breakdown:
    taking = rows[timeline.duration[rows] > 0]
    end = timeline.makespan if end_ps is None else end_ps
    spent = spent_in_layers(*_laid_out(layers, timeline, taking, end))
    return _parts(job, layers, spent, timeline.op[rows])


def of_spent(job: JobGraph, layers: BreakdownLayers, spent: Sequence[int], program: int) -> Breakdown:
    """The breakdown of a program of which is known what each layer takes.

    Args:
        job: the job.
        layers: of the job.
        spent: picoseconds of each layer, and last of none.
        program: its number.
    """
    return _parts(job, layers, spent, np.flatnonzero(job.run_counts(program)))


def _parts(job: JobGraph, layers: BreakdownLayers, spent: Sequence[int], ops: Int64) -> Breakdown:
    """The breakdown of a program that runs these operations."""
    compute, *exposed, host, idle = spent
    # An imported job names no axes: who sends is taken for a stage of a pipeline.
    sends = not job.mesh and bool(np.isin(job.ops.kind[ops], _SENDS).any())
    staged = sends or "pp" in {axis.name for axis in job.mesh}
    return Breakdown(
        compute=compute,
        exposed_communication=dict(zip(layers.labels, exposed, strict=True)),
        host=host,
        bubble=idle if staged else 0,
        wait=0 if staged else idle,
    )


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
