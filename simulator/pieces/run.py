"""Sends the clocks of all programs through their pieces."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from echograph.ir.columns import Int64
from echograph.ir.graph import JobGraph
from echograph.ir.types import OpKind
from echograph.simulator.pieces.cut import Kind, Line, Pieces
from echograph.simulator.pieces.passages import NEVER, Chain, Work, passage


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
class Step:
    """Pieces of a program that follow each other.

    Attributes:
        first: number of the first piece.
        chain: what they do; None for a meeting, which is a step of its own.
        row: of a meeting, its row of the operation table.
        incoming: (inlet, edge) of the first piece.
        outgoing: (outlet, edge) of the last one.
    """

    first: int
    chain: Chain | None
    row: int
    incoming: list[tuple[int, int]]
    outgoing: list[tuple[int, int]]

    @property
    def count(self) -> int:
        """How many pieces they are."""
        return len(self.chain.passages) if self.chain else 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """What the programs did.

    Attributes:
        pieces: of the job.
        work: durations.
        steps: of each program.
        entries: for each step, int64 [entries, scenarios]; of a meeting, the clocks of the host and of its lane,
            then its inlet.
        outlets: for each program, int64 [scenarios] of each edge, the end of what is waited for.
        clocks: for each program, int64 [lanes, scenarios], at the end.
        met: by meeting.
    """

    pieces: Pieces
    work: Work
    steps: list[list[Step]]
    entries: list[list[Int64]]
    outlets: list[list[Int64]]
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
    lanes = 1 + len(pieces.job.streams)
    steps = _steps(pieces, work)
    programs = [
        _Program(number, line, its, work, lanes)
        for number, (line, its) in enumerate(zip(pieces.lines, steps, strict=True))
    ]
    meetings = _Meetings(pieces.members)
    ready = list(programs)
    while ready:
        ready += ready.pop().advance(meetings)
    if any(program.at < len(program.steps) or program.pending for program in programs):
        return None
    return Run(
        pieces=pieces,
        work=work,
        steps=steps,
        entries=[program.entries for program in programs],
        outlets=[[end for end in program.outlets if end is not None] for program in programs],
        clocks=[program.clocks for program in programs],
        met=meetings.met,
    )


@dataclass(slots=True, eq=False)
class _Arrival:
    """A program at a meeting."""

    program: _Program
    step: Step
    lane: int
    ready: Int64
    duration: Int64


@dataclass(slots=True)
class _Meetings:
    """Who has come to which meeting."""

    members: tuple[int, ...]
    waiting: dict[int, list[_Arrival]] = field(default_factory=dict)
    met: dict[int, Met] = field(default_factory=dict)

    def arrive(self, meeting: int, arrival: _Arrival) -> list[_Program]:
        """The programs that can go on, all of its members when the last has come."""
        here = self.waiting.setdefault(meeting, [])
        here.append(arrival)
        if len(here) < self.members[meeting]:
            return []
        del self.waiting[meeting]
        start = here[0].ready
        for its in here[1:]:
            start = np.maximum(start, its.ready)
        last = min((-int(its.ready[0]), its.program.number, its.step.first) for its in here)
        self.met[meeting] = Met(start=int(start[0]), last=last[1:])
        for its in here:
            its.program.resume(its.step, its.lane, start + its.duration)
        return [its.program for its in here]


class _Program:
    """The state of one program. A lane that is at a meeting is pending: its clock is not known."""

    def __init__(self, number: int, line: Line, steps: list[Step], work: Work, lanes: int) -> None:
        self.number, self.line, self.steps, self.work = number, line, steps, work
        self.at, self.pending = 0, 0
        self.clocks = np.zeros((lanes, work.device.shape[1]), np.int64)
        self.entries: list[Int64] = []
        self.outlets: list[Int64 | None] = [None] * len(line.maker)

    def advance(self, meetings: _Meetings) -> list[_Program]:
        """Goes on until it has to wait; returns the programs that can go on since."""
        free: list[_Program] = []
        while self.at < len(self.steps):
            step = self.steps[self.at]
            chain = step.chain
            if chain is None:
                found = self._meet(step, meetings)
                if found is None:
                    break
                free += found
                continue
            if self.pending & chain.uses:
                break
            entry = self.clocks[chain.at]
            if chain.inlets:
                inlets = self._inlets(step, chain.inlets)
                if inlets is None:
                    break
                entry = np.concatenate([entry, inlets])
            self.entries.append(entry)
            after = (chain.over + entry).max(axis=1)
            self.clocks[chain.at] = after[: len(chain.lanes)]
            for outlet, edge in step.outgoing:
                self.outlets[edge] = after[len(chain.lanes) + outlet]
            self.at += 1
        return free

    def _inlets(self, step: Step, count: int) -> Int64 | None:
        """When what the inlets wait for ended; None where that is not known yet."""
        values = np.full((count, self.clocks.shape[1]), NEVER)
        for inlet, edge in step.incoming:
            end = self.outlets[edge]
            if end is None:
                return None
            np.maximum(values[inlet], end, out=values[inlet])
        return values

    def _meet(self, step: Step, meetings: _Meetings) -> list[_Program] | None:
        """Comes to a meeting; None where it cannot yet."""
        lane = self.work.lane[step.row]
        inlet = self._inlets(step, 1) if not self.pending & (1 | 1 << lane) else None
        if inlet is None:
            return None
        entry = np.concatenate([self.clocks[[0, lane]], inlet])
        self.entries.append(entry)
        self.clocks[0] += self.work.host[step.row]
        ready = np.maximum(np.maximum(self.clocks[0], entry[1]), entry[2])
        self.pending |= 1 << lane
        self.at += 1
        arrival = _Arrival(self, step, lane, ready, self.work.device[step.row])
        return meetings.arrive(int(self.line.meeting[step.first]), arrival)

    def resume(self, step: Step, lane: int, end: Int64) -> None:
        """Goes on from a meeting."""
        self.clocks[lane] = end
        self.pending &= ~(1 << lane)
        for _, edge in step.outgoing:
            self.outlets[edge] = end


def _steps(pieces: Pieces, work: Work) -> list[list[Step]]:
    """The steps of each program. Chains that stand once do not pay: their pieces go one by one."""
    passages = [None if kind.meets else passage(kind, work) for kind in pieces.kinds]
    stretches = [_stretches(line, pieces.kinds) for line in pieces.lines]
    often = Counter(kinds for its in stretches for _, kinds in its)
    chains: dict[tuple[int, ...], Chain] = {}
    steps = []
    for line, its in zip(pieces.lines, stretches, strict=True):
        found = []
        for first, kinds in its:
            alone = often[kinds] == 1
            for at, together in enumerate((number,) for number in kinds) if alone else [(0, kinds)]:
                one = [passages[number] for number in together]
                if together not in chains and one[0] is not None:
                    chains[together] = Chain(tuple(its for its in one if its is not None))
                begin, end = first + at, first + at + len(together)
                found.append(
                    Step(
                        first=begin, chain=chains.get(together), row=pieces.kinds[together[0]].rows.start,
                        incoming=line.incoming.get(begin, []), outgoing=line.outgoing.get(end - 1, []),
                    )
                )  # fmt: skip
        steps.append(found)
    return steps


def _stretches(line: Line, kinds: tuple[Kind, ...]) -> list[tuple[int, tuple[int, ...]]]:
    """The pieces of a program between those that meet, wait for others, or are waited for: first, and kinds."""
    cuts = np.array([kind.meets for kind in kinds] or [False])[line.kind]
    cuts[1:] |= cuts[:-1]
    cuts[[*line.incoming]] = True
    cuts[[piece + 1 for piece in line.outgoing]] = True
    cuts[:1] = True
    numbers = line.kind.tolist()
    bounds = [*np.flatnonzero(cuts).tolist(), len(cuts)]
    return [(first, tuple(numbers[first:end])) for first, end in pairwise(bounds)]
