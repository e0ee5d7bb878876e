"""Sends the clocks of all programs through their pieces."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from echograph.ir.columns import Int64
from echograph.ir.graph import JobGraph
from echograph.ir.types import OpKind
from echograph.simulator.pieces.cut import Kind, Line, Pieces
from echograph.simulator.pieces.passages import NEVER, Passage, Work, passage

Steps = list[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Met:
    """How a meeting came about, in the first scenario.

    Attributes:
        start: when it started, picoseconds.
        last: program and piece that was ready last; of several the first.
    """

    start: int
    last: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """What the programs did.

    Attributes:
        pieces: of the job.
        work: durations.
        passages: of each kind of piece; None for kinds that meet.
        steps: for each program, (piece, count): equal pieces that follow each other are one step.
        entries: for each step, int64 [entries, scenarios]; of a meeting, the clocks of the host and of its lane,
            then its inlet.
        clocks: for each program, int64 [lanes, scenarios], at the end.
        met: by meeting.
    """

    pieces: Pieces
    work: Work
    passages: tuple[Passage | None, ...]
    steps: list[Steps]
    entries: list[list[Int64]]
    clocks: list[Int64]
    met: dict[int, Met]

    @property
    def ends(self) -> Int64:
        """When the last task of each scenario ends, picoseconds."""
        latest: Int64 = np.max([clocks.max(axis=0) for clocks in self.clocks], axis=0)
        return latest


def work_of(job: JobGraph, device: Int64, host: Int64) -> Work:
    """Durations in several scenarios.

    Args:
        job: the job.
        device: int64 [rows, scenarios], picoseconds on the device.
        host: int64 [rows, scenarios], picoseconds that the host takes.
    """
    hosts = job.ops.kind == OpKind.HOST
    return Work(
        device=np.where(hosts[:, None], 0, device),
        host=host,
        hosts=hosts.tolist(),
        lane=(1 + job.ops.stream.astype(np.int64)).tolist(),
    )


def run(pieces: Pieces, work: Work) -> Run | None:
    """Runs all programs; None where pieces wait for each other in a circle, which their tasks may not do."""
    passages = tuple(None if kind.meets else passage(kind, work) for kind in pieces.kinds)
    lanes = 1 + len(pieces.job.streams)
    programs = [_Program(number, pieces, passages, work, lanes) for number in range(len(pieces.lines))]
    meetings = _Meetings(pieces.members, programs)
    ready = list(programs)
    while ready:
        ready += ready.pop().advance(meetings)
    if any(program.at < len(program.steps) or program.pending for program in programs):
        return None
    return Run(
        pieces=pieces,
        work=work,
        passages=passages,
        steps=[program.steps for program in programs],
        entries=[program.entries for program in programs],
        clocks=[program.clocks for program in programs],
        met=meetings.met,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class _Arrival:
    """A program at a meeting."""

    program: _Program
    piece: int
    lane: int
    ready: Int64
    duration: Int64


@dataclass(slots=True)
class _Meetings:
    """Who has come to which meeting."""

    members: tuple[int, ...]
    programs: list[_Program]
    waiting: dict[int, list[_Arrival]] = field(default_factory=dict)
    met: dict[int, Met] = field(default_factory=dict)

    def arrive(self, meeting: int, arrival: _Arrival) -> list[_Program]:
        """The programs that can go on, all of its members when the last has come."""
        here = self.waiting.setdefault(meeting, [])
        here.append(arrival)
        if len(here) < self.members[meeting]:
            return []
        del self.waiting[meeting]
        start: Int64 = np.max([its.ready for its in here], axis=0)
        last = min((-int(its.ready[0]), its.program.number, its.piece) for its in here)
        self.met[meeting] = Met(start=int(start[0]), last=last[1:])
        for its in here:
            its.program.resume(its.piece, its.lane, start + its.duration)
        return [its.program for its in here]


class _Program:
    """The state of one program. A lane that is at a meeting is pending: its clock is not known."""

    def __init__(
        self, number: int, pieces: Pieces, passages: tuple[Passage | None, ...], work: Work, lanes: int
    ) -> None:
        self.number, self.line, self.kinds = number, pieces.lines[number], pieces.kinds
        self.passages, self.work = passages, work
        self.steps = _steps(self.line, pieces.kinds)
        self.at, self.pending = 0, 0
        self.clocks = np.zeros((lanes, work.device.shape[1]), np.int64)
        self.entries: list[Int64] = []
        self.outlets: list[Int64 | None] = [None] * len(self.line.maker)

    def advance(self, meetings: _Meetings) -> list[_Program]:
        """Goes on until it has to wait; returns the programs that can go on since."""
        free: list[_Program] = []
        kind_of, passages = self.line.kind.tolist(), self.passages
        while self.at < len(self.steps):
            piece, count = self.steps[self.at]
            its = passages[kind_of[piece]]
            if its is None:
                found = self._meet(piece, self.kinds[kind_of[piece]], meetings)
                if found is None:
                    return free
                free += found
                continue
            if self.pending & its.uses or not self._known(piece):
                return free
            lanes = its.lanes
            entry = self.clocks[lanes, :]
            if its.kind.reads:
                entry = np.concatenate([entry, self._inlets(piece, len(its.kind.reads))])
            self.entries.append(entry)
            if count == 1:
                after = (its.over + entry).max(axis=1)
            else:
                after = (its.times(count) + entry[: len(lanes)]).max(axis=1)
            self.clocks[lanes, :] = after[: len(lanes)]
            for outlet, edge in self.line.outgoing.get(piece, ()):
                self.outlets[edge] = after[len(lanes) + outlet]
            self.at += 1
        return free

    def _known(self, piece: int) -> bool:
        return all(self.outlets[edge] is not None for _, edge in self.line.incoming.get(piece, ()))

    def _inlets(self, piece: int, count: int) -> Int64:
        values = np.full((count, self.clocks.shape[1]), NEVER)
        for inlet, edge in self.line.incoming.get(piece, ()):
            values[inlet] = np.maximum(values[inlet], self.outlets[edge])
        return values

    def _meet(self, piece: int, kind: Kind, meetings: _Meetings) -> list[_Program] | None:
        """Comes to a meeting; None where it cannot yet."""
        row = kind.rows.start
        lane = self.work.lane[row]
        if self.pending & (1 | 1 << lane) or not self._known(piece):
            return None
        entry = np.concatenate([self.clocks[(0, lane), :], self._inlets(piece, 1)])
        self.entries.append(entry)
        self.clocks[0] += self.work.host[row]
        self.pending |= 1 << lane
        self.at += 1
        arrival = _Arrival(
            program=self, piece=piece, lane=lane, duration=self.work.device[row],
            ready=np.maximum(np.maximum(self.clocks[0], entry[1]), entry[2]),
        )  # fmt: skip
        return meetings.arrive(int(self.line.meeting[piece]), arrival)

    def resume(self, piece: int, lane: int, end: Int64) -> None:
        """Goes on from a meeting."""
        self.clocks[lane] = end
        self.pending &= ~(1 << lane)
        for _, edge in self.line.outgoing.get(piece, ()):
            self.outlets[edge] = end


def _steps(line: Line, kinds: tuple[Kind, ...]) -> Steps:
    """Equal pieces that follow each other, and touch no others, as one step."""
    meets = np.array([kind.meets for kind in kinds] or [False])[line.kind]
    alone = meets.copy()
    alone[[*line.incoming, *line.outgoing]] = True
    if not len(alone):
        return []
    first = np.concatenate([[True], alone[1:] | alone[:-1] | (line.kind[1:] != line.kind[:-1])])
    begins = np.flatnonzero(first)
    counts = np.diff(np.append(begins, len(alone)))
    return list(zip(begins.tolist(), counts.tolist(), strict=True))
