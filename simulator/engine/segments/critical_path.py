"""The critical path of a run: from the task that ends last, cause by cause, to the start of the step.

Inside a segment the path depends on one thing, the entry that it comes from, unless two entries let a task
start at the same picosecond. So it is followed once for each kind of segment, task and entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from echograph.ir.columns import Int64
from echograph.simulator.engine.segments.run import SegmentRun
from echograph.simulator.engine.segments.transfer import TransferMatrix

HOST, DEVICE = 0, 1
Task = tuple[int, int, int, int]
"""Program, segment, operation of the segment, and whether the host or the device does it."""
_Times = list[list[int]]


@dataclass(frozen=True, slots=True, eq=False)
class _Way:
    """A path inside a segment: picoseconds by family, and the entry that it comes from."""

    total: Int64
    entry: int


def critical_path(run: SegmentRun, family: Int64) -> tuple[int, Int64]:
    """The program that ends last, and how long tasks of each family are on the path to its end.

    Args:
        run: what ran.
        family: int64 [2, rows], the family of every row's task on the host and on the device.

    Returns:
        Its number, and picoseconds by family.
    """
    path = _Path(run, family)
    task = last = path.last()
    while task is not None:
        task = path.back(task)
    return last[0] if last else 0, path.total


class _Path:
    def __init__(self, run: SegmentRun, family: Int64) -> None:
        self.run, self.family = run, family.tolist()
        self.durations: _Times = [run.work.host[:, 0].tolist(), run.work.device[:, 0].tolist()]
        self.total = np.zeros(int(family.max(initial=0)) + 1, np.int64)
        self.ways: dict[tuple[int, int, int, int], _Way] = {}
        self.kind_of = [sequence.kind.tolist() for sequence in run.segments.sequences]
        self.stretch_of = [
            np.repeat(np.arange(len(its)), [stretch.count for stretch in its]).tolist() for its in run.stretches
        ]
        self.last_on = cache(self._last_on)

    # -- where a path begins -------------------------------------------------------------------------------

    def last(self) -> Task | None:
        """The first task, in the order of programs, that ends when the step does."""
        end = int(self.run.ends[0])
        for program, clocks in enumerate(self.run.clocks):
            lanes: list[int] = np.flatnonzero(clocks[:, 0] == end).tolist()
            if found := [self._first_at(program, lane, end) for lane in lanes]:
                tasks = [task for task in found if task is not None]
                return min(tasks, default=None, key=lambda task: task[1:])
        return None

    def _first_at(self, program: int, lane: int, end: int) -> Task | None:
        """The first task of a lane that ends then, which the lane does."""
        task = self.before(program, len(self.kind_of[program]), lane)
        while task is not None:
            _, segment, _, side = task
            its = self._matrix(program, segment)
            lanes = its.lanes if its else (0, self._lane(self.kind_of[program][segment], 0))
            earlier = self.before(program, segment, lane)
            if earlier is None or self._entry(program, segment)[lanes.index(lane)] < end:
                kind = self.kind_of[program][segment]
                ends = self._ends(program, segment)
                on = [op for op in range(len(ends)) if side == HOST or self._lane(kind, op) == lane]
                return program, segment, next(op for op in on if ends[op][side] == end), side
            task = earlier
        return None

    # -- segments --------------------------------------------------------------------------------------------

    def _lane(self, kind: int, op: int) -> int:
        return self.run.work.lane[self.run.segments.kinds[kind].rows[op]]

    def _matrix(self, program: int, segment: int) -> TransferMatrix | None:
        stretch = self.run.stretches[program][self.stretch_of[program][segment]]
        return stretch.chain.matrices[segment - stretch.first] if stretch.chain else None

    def _entry(self, program: int, segment: int) -> Int64:
        """Clocks with which a segment begins."""
        number = self.stretch_of[program][segment]
        stretch, entry = self.run.stretches[program][number], self.run.entries[program][number][:, 0]
        if stretch.chain is None:
            return entry
        into: Int64 = (stretch.chain.before[segment - stretch.first] + entry).max(axis=1)
        return into

    def _ends(self, program: int, segment: int) -> _Times:
        its, rows = self._matrix(program, segment), self.run.segments.kinds[self.kind_of[program][segment]].rows
        if its is None:
            met = self.run.met[int(self.run.segments.sequences[program].rendezvous[segment])]
            starts = [[int(self._entry(program, segment)[0]), met.start]]
        else:
            starts = (its.starts + self._entry(program, segment)).max(axis=2).tolist()
        return [
            [start[side] + self.durations[side][row] for side in (HOST, DEVICE)]
            for row, start in zip(rows, starts, strict=True)
        ]

    def _last_on(self, kind: int, lane: int) -> int | None:
        """The last operation of a kind of segment on a lane."""
        rows = self.run.segments.kinds[kind].rows
        on = [op for op in range(len(rows)) if not lane or self._lane(kind, op) == lane]
        return on[-1] if on else None

    def before(self, program: int, segment: int, lane: int) -> Task | None:
        """The task before a segment on a lane."""
        for earlier in range(segment - 1, -1, -1):
            op = self.last_on(self.kind_of[program][earlier], lane)
            if op is not None:
                return program, earlier, op, DEVICE if lane else HOST
        return None

    def _maker(self, program: int, segment: int, in_port: int) -> Task:
        """What an input waited for: of several that ended last, the first."""
        sequence, ends = self.run.segments.sequences[program], self.run.outputs[program]
        edges = [edge for its, edge in sequence.incoming[segment] if its == in_port]
        its, out_port = sequence.maker[max(edges, key=lambda edge: int(ends[edge][0]))]
        return program, its, self.run.segments.kinds[self.kind_of[program][its]].outputs[out_port], DEVICE

    # -- causes --------------------------------------------------------------------------------------------

    def back(self, task: Task) -> Task | None:
        """Counts a task, and what is before it in its segment on the path; returns the next of another segment."""
        program, segment, op, side = task
        kind = self.kind_of[program][segment]
        its = self._matrix(program, segment)
        if its is None:
            return self._back_from_rendezvous(program, segment, side)
        entry = self._entry(program, segment)
        ready = its.starts[op, side] + entry
        first = int(ready.argmax())
        key = (kind, op, side, first)
        if int((ready == ready[first]).sum()) > 1:
            way = self._follow(its, op, side, entry)
        elif (known := self.ways.get(key)) is not None:
            way = known
        else:
            way = self.ways[key] = self._follow(its, op, side, entry)
        self.total += way.total
        if way.entry < len(its.lanes):
            return self.before(program, segment, its.lanes[way.entry])
        return self._maker(program, segment, way.entry - len(its.lanes))

    def _back_from_rendezvous(self, program: int, segment: int, side: int) -> Task | None:
        """A rendezvous starts when the program that comes last does."""
        row = self.run.segments.kinds[self.kind_of[program][segment]].rows.start
        self.total[self.family[side][row]] += self.durations[side][row]
        if side == HOST:
            return self.before(program, segment, 0)
        program, segment = self.run.met[int(self.run.segments.sequences[program].rendezvous[segment])].last
        row = self.run.segments.kinds[self.kind_of[program][segment]].rows.start
        host, now, told = self._entry(program, segment).tolist()
        issued = host + self.durations[HOST][row]
        if told > max(now, issued):
            return self._maker(program, segment, 0)
        if issued > now:
            return program, segment, 0, HOST
        return self.before(program, segment, self.run.work.lane[row])

    def _follow(self, matrix: TransferMatrix, op: int, side: int, entry: Int64) -> _Way:
        """The path inside a segment that begins with these clocks."""
        kind, lane_of = matrix.kind, self.run.work.lane
        clocks, starts = entry.tolist(), (matrix.starts + entry).max(axis=2).tolist()
        total, lanes = np.zeros_like(self.total), matrix.lanes

        def end(its: int, where: int) -> int:
            return int(starts[its][where]) + self.durations[where][kind.rows[its]]

        while True:
            row = kind.rows[op]
            total[self.family[side][row]] += self.durations[side][row]
            lane = lane_of[row] if side else 0
            earlier = next(
                (its for its in range(op - 1, -1, -1) if not side or lane_of[kind.rows[its]] == lane), None
            )
            cause = None if earlier is None else (earlier, side)
            where = lanes.index(lane)
            now = end(*cause) if cause else clocks[where]
            if side and end(op, HOST) > now:
                now, cause = end(op, HOST), (op, HOST)
            if (side == HOST) == self.run.work.hosts[row]:
                in_port = len(lanes) + kind.inputs.index(op) if op in kind.inputs else None
                if in_port is not None and clocks[in_port] > now:
                    now, cause, where = clocks[in_port], None, in_port
                for its in kind.waits[op]:
                    if end(its, DEVICE) > now:
                        now, cause = end(its, DEVICE), (its, DEVICE)
            if cause is None:
                return _Way(total, where)
            op, side = cause
