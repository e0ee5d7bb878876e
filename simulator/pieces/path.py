"""The critical path of a run: from the task that ends last, cause by cause, to the start of the step.

Inside a piece the path depends on one thing, the entry that it comes from, unless two entries let a task start at
the same picosecond. So it is followed once for each kind of piece, task and entry.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from echograph.ir.columns import NONE, Int64
from echograph.simulator.pieces.cut import Kind
from echograph.simulator.pieces.passages import Passage
from echograph.simulator.pieces.run import Run
from echograph.simulator.pieces.times import after

HOST, DEVICE = 0, 1
Task = tuple[int, int, int, int]
"""Program, piece, operation of the piece, and whether the host or the device does it."""


def critical_path(run: Run, weight: Int64) -> tuple[int, Int64]:
    """The program that ends last, and how long tasks of each family are on the path.

    Args:
        run: what ran.
        weight: int64 [2, rows], the family of every row's task on the host and on the device.

    Returns:
        The program, and picoseconds by family.
    """
    path = _Path(run, weight)
    task = path.last()
    program = task[0]
    found: Task | None = task
    while found is not None:
        found = path.back(found)
    return program, path.total


@dataclass(frozen=True, slots=True)
class _Way:
    """A path inside a piece: picoseconds by family, and the entry that it comes from."""

    total: Int64
    entry: int


@dataclass(kw_only=True)
class _Line:
    """Of a program: for each piece, its step; for each step, its lanes as bits."""

    step: list[int]
    lanes: list[int]
    kind: list[int]


class _Path:
    def __init__(self, run: Run, family: Int64) -> None:
        self.run, self.family = run, family
        self.device, self.host = run.work.device[:, 0].tolist(), run.work.host[:, 0].tolist()
        self.total = np.zeros(int(family.max(initial=0)) + 1, np.int64)
        self.known: dict[tuple[int, int, int, int], _Way] = {}
        self.places = {
            (int(meeting), program): piece
            for program, line in enumerate(run.pieces.lines)
            for piece, meeting in enumerate(line.meeting.tolist())
            if meeting != NONE
        }
        self.lines = [self._line(number) for number in range(len(run.steps))]

    def _line(self, number: int) -> _Line:
        run, line = self.run, self.run.pieces.lines[number]
        kind = line.kind.tolist()
        step = np.repeat(np.arange(len(run.steps[number])), [count for _, count in run.steps[number]])
        return _Line(step=step.tolist(), lanes=[self._uses(kind[p]) for p, _ in run.steps[number]], kind=kind)

    def _uses(self, number: int) -> int:
        its = self.run.passages[number]
        return its.uses if its else 1 | 1 << self.run.work.lane[self.run.pieces.kinds[number].rows.start]
