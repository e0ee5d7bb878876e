"""A simulated step on lanes: the critical path, what every role does at each moment, and its streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from echograph.ir.columns import NONE, Bools, Int64, distinct
from echograph.ir.graph import JobGraph
from echograph.ir.intervals import Pieces
from echograph.ir.timeline import Lane, Timeline
from echograph.ir.types import Phase
from echograph.profiler.page.lanes import Spans, TimelineTrack, drawing
from echograph.simulator.breakdown import COMPUTE, BreakdownLayers

MOST_SPANS = 24_000
# What is shorter than this share of the step and between work of one kind is drawn within that.
_GAP = 1 / 400
_OF_PHASE = {Phase.FORWARD: 0, Phase.BACKWARD: 2, Phase.RECOMPUTE: 5, Phase.OPTIMIZER: 3, Phase.OTHER: 6}
OF_COMMUNICATION = (1, 4, 6, 5, 3)
_PHASE_COLOURS = np.array([_OF_PHASE.get(Phase(n), 6) if n else 6 for n in range(len(Phase) + 1)])
HOST, IDLE = 7, 8
_EXPOSED = "exposed: "
_LEVELS = ("each operation", "all work of a layer", "all work of a micro-batch")


def colours(layers: BreakdownLayers) -> list[int]:
    """The colour of every kind of moment."""
    cycle = [OF_COMMUNICATION[i % len(OF_COMMUNICATION)] for i in range(len(layers.labels))]
    return [0, *cycle, HOST, IDLE]


class ShownStep:
    """What is put on lanes: a job, when it ran, and what its roles did at each moment."""

    def __init__(self, job: JobGraph, timeline: Timeline, layers: BreakdownLayers) -> None:
        self.job, self.timeline, self.layers = job, timeline, layers
        self.colours = colours(layers)
        self.several = int(timeline.micro_batch.max(initial=0)) > 0
        self.gap_ps = int(timeline.makespan * _GAP)

    def drawing(self, found: Mapping[int, Pieces], idle: str, note: str) -> str:
        """The lanes as HTML.

        Args:
            found: moments of the programs that are shown.
            idle: what it is called when nothing runs.
            note: on what is shown.
        """
        lanes = [self.path(), *(self.role(number, moments, idle) for number, moments in found.items())]
        streams, level = self.streams(list(found), MOST_SPANS - sum(len(lane.spans.start) for lane in lanes))
        lanes += streams
        busy = f" On the streams, {level} is a bar, as tall as the stream is busy." if streams else ""
        return drawing(lanes, MOST_SPANS, self._key(found, level, idle), f" {note}{busy}")

    def _key(self, found: Mapping[int, Pieces], level: str, idle: str) -> dict[str, int]:
        """What the colours mean that occur."""
        used = np.bincount(np.concatenate([m.layer for m in found.values()]), minlength=self.layers.idle + 1) > 0
        phases = distinct(self.job.ops.phase[self.timeline.op]).tolist()
        shown = {phase.name.lower(): colour for phase, colour in _OF_PHASE.items() if phase in phases}
        if level != _LEVELS[0] and shown.pop("recompute", None) is not None:
            shown = {"backward, with what it recomputes" if n == "backward" else n: c for n, c in shown.items()}
        names = (*(f"{label} communication" for label in self.layers.labels), "host", idle)
        return shown | {name: self.colours[1 + at] for at, name in enumerate(names) if used[1 + at]}

    def path(self) -> TimelineTrack:
        """The critical path."""
        timeline, rows = self.timeline, self.timeline.critical_path()
        rows = rows[timeline.duration[rows] > 0]
        kind = np.where(timeline.lane[rows] == Lane.HOST, self.layers.host, self.layers.of_op[timeline.op[rows]])
        pieces = Pieces(timeline.start[rows], timeline.end[rows], kind, rows)
        of_role = timeline.program[rows].astype(np.int64)
        key = self._work(rows) * len(timeline.programs) + of_role
        several = len(timeline.programs) > 1

        def said(row: int, kind: int) -> str:
            text = self._said(row, kind, "").removeprefix(_EXPOSED)
            return f"{timeline.programs[int(timeline.program[row])]}: {text}" if several else text

        return self._lane("critical path", pieces, key, said)

    def role(self, number: int, pieces: Pieces, idle: str) -> TimelineTrack:
        """What a program does at each moment."""
        return self._lane(
            self.timeline.programs[number],
            pieces,
            self._work(pieces.row),
            lambda row, kind: self._said(row, kind, idle),
        )

    def _work(self, rows: Int64) -> Int64:
        """One number for phase and micro-batch."""
        phase = self._phase(rows)
        return np.asarray(phase * (int(self.timeline.micro_batch.max(initial=0)) + 2) + self._micro_batch(rows))

    def _phase(self, rows: Int64, *, apart: bool = False) -> Int64:
        """Phases; what backward computes again is apart only where each operation is drawn."""
        phase = self.job.ops.phase[self.timeline.op[rows]].astype(np.int64)
        return phase if apart else np.where(phase == Phase.RECOMPUTE, Phase.BACKWARD, phase)

    def _micro_batch(self, rows: Int64) -> Int64:
        return np.asarray(np.maximum(self.timeline.micro_batch[rows].astype(np.int64), 0))

    def _lane(self, label: str, pieces: Pieces, key: Int64, said: Callable[[int, int], str]) -> TimelineTrack:
        """Pieces of one key as one bar, with what is short and lies between them as its strip."""
        found = runs(pieces, np.where(pieces.layer == COMPUTE, key, NONE), self.gap_ps)
        start = pieces.start[found.first]
        end = pieces.end[np.append(found.first[1:], len(key)) - 1]
        kind, rows = pieces.layer[found.longest], pieces.row[found.longest]
        colour = np.where(kind == COMPUTE, _PHASE_COLOURS[self._phase(rows)], np.array(self.colours)[kind])
        names: dict[str, int] = {}
        texts = (said(row, of) for row, of in zip(rows.tolist(), kind.tolist(), strict=True))
        name = np.array([names.setdefault(text, len(names)) for text in texts], np.int64)
        under = np.array([*self.colours, NONE])[found.other]
        filled = found.own / np.maximum(end - start, 1)
        spans = Spans(start, end, name, colour, np.ones(len(name), np.int64), filled, under)
        return TimelineTrack(head="", label=label, spans=spans, strings=tuple(names))

    def _said(self, row: int, kind: int, idle: str) -> str:
        """What a run is."""
        if kind >= self.layers.host:
            return "the host, nothing runs" if kind == self.layers.host else idle
        if kind > 0:
            return f"{_EXPOSED}{self.layers.labels[kind - 1]} communication"
        return self._when(row)

    def _when(self, row: int, *, apart: bool = False) -> str:
        """Phase and micro-batch; the optimizer is of none."""
        phase = Phase(int(self._phase(np.array([row]), apart=apart)[0]))
        number = max(int(self.timeline.micro_batch[row]), 0)
        of_none = not self.several or phase == Phase.OPTIMIZER
        return phase.name.lower() if of_none else f"{phase.name.lower()}, micro-batch {number}"

    def streams(self, programs: Sequence[int], most: int) -> tuple[list[TimelineTrack], str]:
        """The host and the streams of programs, and what a bar of them is: the finest that there is room for."""
        tracks = [(number, *self._tracks(number)) for number in programs]
        for level in _LEVELS:
            parted = [self._parted(rows, track, level) for _, rows, track in tracks]
            if sum(int(new.sum()) for new in parted) <= most:
                break
        lanes = [
            self._stream(number, rows[track == at], new[track == at], level, at, detail=len(programs) > 1)
            for (number, rows, track), new in zip(tracks, parted, strict=True)
            for at in distinct(track).tolist()
        ]
        return lanes, level

    def _tracks(self, number: int) -> tuple[Int64, Int64]:
        """Rows of a program that take time, by host and stream and start; and for each which of these it is on."""
        timeline = self.timeline
        rows = np.flatnonzero((timeline.program == number) & (timeline.duration > 0))
        track = np.where(timeline.lane[rows] == Lane.DEVICE, 1 + timeline.stream[rows].astype(np.int64), 0)
        order = np.lexsort((timeline.start[rows], track))
        return rows[order], track[order]

    def _parted(self, rows: Int64, track: Int64, level: str) -> Bools:
        """Where a bar begins."""
        new = np.full(len(rows), level == _LEVELS[0])
        op = self.timeline.op[rows]
        columns = [track, self._work(rows), np.where(track > 0, self.layers.of_op[op], 0)]
        if level == _LEVELS[1]:
            columns += [self.job.block_of_op[op], self.timeline.instance[rows].astype(np.int64)]
        for column in columns:
            new[1:] |= column[1:] != column[:-1]
        new[:1] = True
        return new

    def _stream(
        self, number: int, rows: Int64, new: Bools, level: str, track: int, *, detail: bool
    ) -> TimelineTrack:
        """What runs on the host (track 0) or a stream, in bars."""
        timeline, first = self.timeline, np.flatnonzero(new)
        length = timeline.duration[rows]
        longest = rows[np.lexsort((-length, np.cumsum(new)))[first]]
        start, end = timeline.start[rows[first]], np.maximum.reduceat(timeline.end[rows], first)
        kind = self.layers.of_op[timeline.op[longest]]
        phase = _PHASE_COLOURS[self._phase(longest, apart=level == _LEVELS[0])]
        colour = np.where(kind == 0, phase, np.array(self.colours)[kind]) if track else np.full(len(first), HOST)
        strings, name = self._texts(longest, level, host=track == 0)
        filled = np.minimum(np.add.reduceat(length, first) / np.maximum(end - start, 1), 1.0)
        many = np.diff(np.append(first, len(rows)))
        return TimelineTrack(
            head=f"{timeline.programs[number]}: streams",
            label=timeline.streams[track - 1] if track else "host",
            spans=Spans(start, end, name, colour, many, filled),
            strings=strings,
            detail=detail,
        )

    def _texts(self, rows: Int64, level: str, *, host: bool) -> tuple[tuple[str, ...], Int64]:
        """What bars are called, each text once, and for each bar which."""
        columns = (self.timeline.op[rows], self.timeline.instance[rows], self._micro_batch(rows))
        _, one, name = np.unique(np.stack(columns), axis=1, return_index=True, return_inverse=True)
        return tuple(self._text(row, level, host=host) for row in rows[one].tolist()), name.ravel()

    def _text(self, row: int, level: str, *, host: bool) -> str:
        """What a bar on a stream is called."""
        job, op = self.job, int(self.timeline.op[row])
        name = job.strings[job.ops.name[op]]
        number = int(job.block_of_op[op])
        label = job.blocks[number].instances[int(self.timeline.instance[row])].label if number else ""
        if level == _LEVELS[0]:
            module = job.strings[job.ops.module[op]].replace("{}", label)
            when = self._when(row, apart=True)
            return f"{name} ({module}), {when}" if module else f"{name}, {when}"
        if self.layers.of_op[op] and not host:
            return f"{self.layers.labels[self.layers.of_op[op] - 1]} communication, {self._when(row)}"
        layer = f"{job.blocks[number].name}.{label}, " if level == _LEVELS[1] and number else ""
        return f"{layer}{self._when(row)}"


class Runs(NamedTuple):
    """Pieces that belong together, as one each.

    Attributes:
        first: the piece with which each begins; it ends with that before the next one's.
        longest: the longest piece of its own kind in it.
        own: picoseconds of that kind.
        other: kind on which most of the rest is spent; -1 for none.
    """

    first: Int64
    longest: Int64
    own: Int64
    other: Int64


def runs(pieces: Pieces, key: Int64, gap_ps: int) -> Runs:
    """Pieces of one key as one each, with what is short and lies between them.

    Args:
        pieces: one at least; they follow each other without a gap.
        key: of compute pieces, >= 0: what they belong to; of others -1.
        gap_ps: what is longer and no compute stands alone.
    """
    start, kind, length, computes = pieces.start, pieces.layer, pieces.end - pieces.start, key >= 0
    place, final = np.arange(len(key)), len(key) - 1
    # The compute pieces before and after each; of a compute piece, itself.
    before = np.maximum.accumulate(np.where(computes, place, NONE))
    after = np.minimum.accumulate(np.where(computes, place, len(key))[::-1])[::-1]
    inside = (before >= 0) & (after <= final)
    before, after = np.maximum(before, 0), np.minimum(after, final)
    inside &= (key[before] == key[after]) & (start[after] - start[np.minimum(before + 1, final)] < gap_ps)
    belongs = np.where(computes | inside, key[before], -2 - kind)
    new = np.concatenate([[True], belongs[1:] != belongs[:-1]])
    first, group = np.flatnonzero(new), np.cumsum(new) - 1
    mine = computes | ~inside
    longest = np.lexsort((-length, ~mine, group))[first]
    own: Int64 = np.add.reduceat(np.where(mine, length, 0), first)
    return Runs(first, longest, own, _rest(group, kind, length, ~mine))


def _rest(group: Int64, kind: Int64, length: Int64, of_rest: Bools) -> Int64:
    """For each run the kind on which most of what is not its own is spent."""
    count, most = int(group[-1]) + 1, int(kind.max(initial=0)) + 1
    spent = np.bincount(group * most + kind, np.where(of_rest, length, 0), count * most).reshape(count, most)
    found: Int64 = np.where(spent.any(axis=1), spent.argmax(axis=1), NONE)
    return found
