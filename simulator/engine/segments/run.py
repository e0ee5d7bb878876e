"""Sends the clocks of all programs through their segments."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from echograph.ir.columns import Int64
from echograph.ir.graph import JobGraph
from echograph.ir.types import OpKind
from echograph.simulator.engine.segments.cut import SegmentedJob, SegmentKind, SegmentSequence
from echograph.simulator.engine.segments.transfer import NEVER, RowTimes, SegmentChain, transfer_matrix


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rendezvous:
    """How a rendezvous came about, in the first scenario.

    Attributes:
        start: when it started, picoseconds.
        last: program and segment that was ready last; of several the first.
    """

    start: int
    last: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stretch:
    """Segments of a program that follow each other.

    Attributes:
        first: number of the first segment.
        chain: what they do; None for a rendezvous, which is a stretch of its own.
        row: of a rendezvous, its row of the operation table.
        incoming: (number of the input, edge) of the first segment.
        outgoing: (number of the output, edge) of the last one.
    """

    first: int
    chain: SegmentChain | None
    row: int
    incoming: list[tuple[int, int]]
    outgoing: list[tuple[int, int]]

    @property
    def count(self) -> int:
        """How many segments they are."""
        return len(self.chain.matrices) if self.chain else 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SegmentRun:
    """What the programs did.

    Attributes:
        segments: of the job.
        work: durations.
        stretches: of each program.
        entries: for each stretch, int64 [entries, scenarios]; of a rendezvous, the clocks of the host and of its
            lane, then its input.
        outputs: for each program, int64 [scenarios] of each edge, the end of what is waited for.
        clocks: for each program, int64 [lanes, scenarios], at the end.
        met: by rendezvous.
    """

    segments: SegmentedJob
    work: RowTimes
    stretches: list[list[Stretch]]
    entries: list[list[Int64]]
    outputs: list[list[Int64]]
    clocks: list[Int64]
    met: dict[int, Rendezvous]

    @property
    def ends(self) -> Int64:
        """When the last task of each scenario ends, picoseconds."""
        latest: Int64 = np.max([clocks.max(axis=0) for clocks in self.clocks], axis=0)
        return latest


def work_of(job: JobGraph, device: Int64, host: Int64) -> RowTimes:
    """Durations in several scenarios.

    Args:
        job: the job.
        device: int64 [rows, scenarios], picoseconds on the device.
        host: int64 [rows, scenarios], picoseconds that the host takes.
    """
    hosts = job.ops.kind == OpKind.HOST
    return RowTimes(
        device=np.where(hosts[:, None], 0, device),
        host=host,
        hosts=hosts.tolist(),
        lane=(1 + job.ops.stream.astype(np.int64)).tolist(),
    )


def run(segments: SegmentedJob, work: RowTimes) -> SegmentRun | None:
    """Runs all programs; None where segments wait for each other in a circle, which their tasks may not do."""
    lanes = 1 + len(segments.job.streams)
    stretches = _stretches(segments, work)
    programs = [
        _Program(number, sequence, its, work, lanes)
        for number, (sequence, its) in enumerate(zip(segments.sequences, stretches, strict=True))
    ]
    rendezvous = _Rendezvous(segments.members)
    ready = list(programs)
    while ready:
        ready += ready.pop().advance(rendezvous)
    if any(program.at < len(program.stretches) or program.pending for program in programs):
        return None
    return SegmentRun(
        segments=segments,
        work=work,
        stretches=stretches,
        entries=[program.entries for program in programs],
        outputs=[[end for end in program.outputs if end is not None] for program in programs],
        clocks=[program.clocks for program in programs],
        met=rendezvous.met,
    )


@dataclass(slots=True, eq=False)
class _Arrival:
    """A program at a rendezvous."""

    program: _Program
    stretch: Stretch
    lane: int
    ready: Int64
    duration: Int64


@dataclass(slots=True, eq=False)
class _Rendezvous:
    """Who has come to which rendezvous."""

    members: tuple[int, ...]
    waiting: dict[int, list[_Arrival]] = field(default_factory=dict)
    met: dict[int, Rendezvous] = field(default_factory=dict)

    def arrive(self, rendezvous: int, arrival: _Arrival) -> list[_Program]:
        """The programs that can go on, all of its members when the last has come."""
        here = self.waiting.setdefault(rendezvous, [])
        here.append(arrival)
        if len(here) < self.members[rendezvous]:
            return []
        del self.waiting[rendezvous]
        start = here[0].ready
        for its in here[1:]:
            start = np.maximum(start, its.ready)
        last = min((-int(its.ready[0]), its.program.number, its.stretch.first) for its in here)
        self.met[rendezvous] = Rendezvous(start=int(start[0]), last=last[1:])
        for its in here:
            its.program.resume(its.stretch, its.lane, start + its.duration)
        return [its.program for its in here]


class _Program:
    """The state of one program. A lane that is at a rendezvous is pending: its clock is not known."""

    def __init__(
        self, number: int, sequence: SegmentSequence, stretches: list[Stretch], work: RowTimes, lanes: int
    ) -> None:
        self.number, self.sequence, self.stretches, self.work = number, sequence, stretches, work
        self.at, self.pending = 0, 0
        self.clocks = np.zeros((lanes, work.device.shape[1]), np.int64)
        self.entries: list[Int64] = []
        self.outputs: list[Int64 | None] = [None] * len(sequence.maker)

    def advance(self, rendezvous: _Rendezvous) -> list[_Program]:
        """Goes on until it has to wait; returns the programs that can go on since."""
        free: list[_Program] = []
        while self.at < len(self.stretches):
            stretch = self.stretches[self.at]
            chain = stretch.chain
            if chain is None:
                found = self._meet(stretch, rendezvous)
                if found is None:
                    break
                free += found
                continue
            if self.pending & chain.uses:
                break
            entry = self.clocks[chain.at]
            if chain.inputs:
                inputs = self._inputs(stretch, chain.inputs)
                if inputs is None:
                    break
                entry = np.concatenate([entry, inputs])
            self.entries.append(entry)
            after = (chain.over + entry).max(axis=1)
            self.clocks[chain.at] = after[: len(chain.lanes)]
            for out_port, edge in stretch.outgoing:
                self.outputs[edge] = after[len(chain.lanes) + out_port]
            self.at += 1
        return free

    def _inputs(self, stretch: Stretch, count: int) -> Int64 | None:
        """When what the inputs wait for ended; None where that is not known yet."""
        values = np.full((count, self.clocks.shape[1]), NEVER)
        for in_port, edge in stretch.incoming:
            end = self.outputs[edge]
            if end is None:
                return None
            np.maximum(values[in_port], end, out=values[in_port])
        return values

    def _meet(self, stretch: Stretch, rendezvous: _Rendezvous) -> list[_Program] | None:
        """Comes to a rendezvous; None where it cannot yet."""
        lane = self.work.lane[stretch.row]
        in_port = self._inputs(stretch, 1) if not self.pending & (1 | 1 << lane) else None
        if in_port is None:
            return None
        entry = np.concatenate([self.clocks[[0, lane]], in_port])
        self.entries.append(entry)
        self.clocks[0] += self.work.host[stretch.row]
        ready = np.maximum(np.maximum(self.clocks[0], entry[1]), entry[2])
        self.pending |= 1 << lane
        self.at += 1
        arrival = _Arrival(self, stretch, lane, ready, self.work.device[stretch.row])
        return rendezvous.arrive(int(self.sequence.rendezvous[stretch.first]), arrival)

    def resume(self, stretch: Stretch, lane: int, end: Int64) -> None:
        """Goes on from a rendezvous."""
        self.clocks[lane] = end
        self.pending &= ~(1 << lane)
        for _, edge in stretch.outgoing:
            self.outputs[edge] = end


def _stretches(segments: SegmentedJob, work: RowTimes) -> list[list[Stretch]]:
    """The stretches of each program. Chains that stand once do not pay: their segments go one by one."""
    matrices = [None if kind.meets else transfer_matrix(kind, work) for kind in segments.kinds]
    bounded = [_between_bounds(sequence, segments.kinds) for sequence in segments.sequences]
    often = Counter(kinds for its in bounded for _, kinds in its)
    chains: dict[tuple[int, ...], SegmentChain] = {}
    stretches = []
    for sequence, its in zip(segments.sequences, bounded, strict=True):
        found = []
        for first, kinds in its:
            alone = often[kinds] == 1
            for at, together in enumerate((number,) for number in kinds) if alone else [(0, kinds)]:
                one = [matrices[number] for number in together]
                if together not in chains and one[0] is not None:
                    chains[together] = SegmentChain(tuple(its for its in one if its is not None))
                begin, end = first + at, first + at + len(together)
                found.append(
                    Stretch(
                        first=begin, chain=chains.get(together), row=segments.kinds[together[0]].rows.start,
                        incoming=sequence.incoming.get(begin, []), outgoing=sequence.outgoing.get(end - 1, []),
                    )
                )  # fmt: skip
        stretches.append(found)
    return stretches


def _between_bounds(
    sequence: SegmentSequence, kinds: tuple[SegmentKind, ...]
) -> list[tuple[int, tuple[int, ...]]]:
    """The segments of a program between those that meet, wait for others, or are waited for: first, and kinds."""
    cuts = np.array([kind.meets for kind in kinds] or [False])[sequence.kind]
    cuts[1:] |= cuts[:-1]
    cuts[[*sequence.incoming]] = True
    cuts[[segment + 1 for segment in sequence.outgoing]] = True
    cuts[:1] = True
    numbers = sequence.kind.tolist()
    bounds = [*np.flatnonzero(cuts).tolist(), len(cuts)]
    return [(first, tuple(numbers[first:end])) for first, end in pairwise(bounds)]
