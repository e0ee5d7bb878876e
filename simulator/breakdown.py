"""Where the time of a step goes, as parts that add up to it exactly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echograph.ir.columns import Int64
from echograph.ir.graph import JobGraph
from echograph.ir.timeline import Lane, Timeline
from echograph.ir.types import COMMUNICATIONS, OpKind

Mask = npt.NDArray[np.bool_]


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


def breakdown(job: JobGraph, timeline: Timeline, program: int) -> Breakdown:
    """Splits the step of one program, from 0 to the end of the timeline, which may hold others."""
    mine = timeline.program == program
    device = mine & (timeline.lane == Lane.DEVICE) & (timeline.duration > 0)
    kind = job.ops.kind[timeline.op]
    communicates = device & np.isin(kind, COMMUNICATIONS)
    labels = _labels(job)
    label = np.array([_label(job, g) for g in range(len(job.groups))] or [""])
    layers: list[Mask] = [device & ~communicates]
    of_group = np.where(communicates, job.ops.group[timeline.op], -1)
    layers += [communicates & np.isin(of_group, np.flatnonzero(label == name)) for name in labels]
    layers.append(mine & (timeline.lane == Lane.HOST) & (timeline.duration > 0))
    covered = _cover(timeline, layers, timeline.makespan)
    idle = timeline.makespan - sum(covered)
    staged = "pp" in {axis.name for axis in job.mesh} or (not job.mesh and _sends(kind[mine]))
    return Breakdown(
        compute=covered[0],
        exposed_communication=dict(zip(labels, covered[1:-1], strict=True)),
        host=covered[-1],
        bubble=idle if staged else 0,
        wait=0 if staged else idle,
    )


def _sends(kinds: npt.NDArray[np.int8]) -> bool:
    """An imported job names no axes: who sends is taken for a pipeline's stage."""
    return bool(np.isin(kinds, (OpKind.SEND, OpKind.RECV)).any())


def _labels(job: JobGraph) -> list[str]:
    return list(dict.fromkeys(_label(job, g) for g in range(len(job.groups))))


def _label(job: JobGraph, group: int) -> str:
    return job.groups[group].label or f"group{group}"


def _cover(timeline: Timeline, layers: list[Mask], end: int) -> list[int]:
    """Picoseconds that each layer covers and no earlier one does."""
    covered: list[int] = []
    starts, stops = np.zeros(0, np.int64), np.zeros(0, np.int64)
    before = 0
    for layer in layers:
        starts = np.concatenate([starts, timeline.start[layer]])
        stops = np.concatenate([stops, timeline.end[layer]])
        starts, stops = _merge(starts, stops)
        now = int((np.minimum(stops, end) - starts).sum())
        covered.append(now - before)
        before = now
    return covered


def _merge(starts: Int64, stops: Int64) -> tuple[Int64, Int64]:
    """The union of intervals as disjoint ones, ascending."""
    if not len(starts):
        return starts, stops
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(stops[order])
    first = np.concatenate([[True], starts[1:] > reach[:-1]])
    return starts[first], reach[np.concatenate([first[1:], [True]])]
