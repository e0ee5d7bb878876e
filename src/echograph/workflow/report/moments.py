"""What each role of a job does at every moment of a step: the parts of its breakdown, where they lie in time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from echograph.ir.columns import NONE, Int64, distinct
from echograph.ir.graph import JobGraph
from echograph.ir.timeline import Lane, Timeline
from echograph.simulator.limits import KERNELS, family_of

COMPUTE = 0


class Kinds(NamedTuple):
    """Numbers of what a moment can be: compute, a communication (1 and up), the host alone, nothing.

    Attributes:
        labels: labels of the communications' groups.
        of_op: int64 [rows], number of every operation.
    """

    labels: tuple[str, ...]
    of_op: Int64

    @property
    def host(self) -> int:
        """Nothing runs, and the host issues."""
        return len(self.labels) + 1

    @property
    def idle(self) -> int:
        """Nothing runs."""
        return len(self.labels) + 2


class Moments(NamedTuple):
    """The step of one program in pieces without gap, from 0 to the end of the step.

    Attributes:
        start: picoseconds.
        end: picoseconds.
        kind: a number of `Kinds`.
        row: row of the timeline that runs; -1 where nothing does.
    """

    start: Int64
    end: Int64
    kind: Int64
    row: Int64


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


def kinds_of(job: JobGraph) -> Kinds:
    """The kinds of moments of a job."""
    family, names = family_of(job)
    labels = tuple(name.removesuffix(" communication") for name in names[len(KERNELS) :])
    return Kinds(labels, np.maximum(family - len(KERNELS) + 1, COMPUTE))


def moments(timeline: Timeline, kinds: Kinds, program: int) -> Moments:
    """What a program does from the start of the step to its end.

    A moment is of the first kind that applies: a kernel runs, a communication runs, the host issues, nothing.

    Args:
        timeline: what ran when in the step.
        kinds: numbers of the kinds of moments in the job.
        program: number of the program.
    """
    rows = np.flatnonzero((timeline.program == program) & (timeline.duration > 0))
    of_row = np.where(timeline.lane[rows] == Lane.DEVICE, kinds.of_op[timeline.op[rows]], kinds.host)
    start, end = timeline.start[rows], timeline.end[rows]
    edges = distinct(np.concatenate([[0, timeline.makespan], start, end]))
    kind = np.full(len(edges) - 1, kinds.idle, np.int64)
    row = np.full(len(edges) - 1, NONE, np.int64)
    for layer in range(kinds.idle):
        mine = np.flatnonzero(of_row == layer)
        if not len(mine):
            continue
        order = mine[np.argsort(start[mine], kind="stable")]
        change = np.zeros(len(edges), np.int64)
        np.add.at(change, np.searchsorted(edges, start[order]), 1)
        np.add.at(change, np.searchsorted(edges, end[order]), -1)
        free = (np.cumsum(change)[:-1] > 0) & (kind == kinds.idle)
        kind[free] = layer
        row[free] = rows[order[np.searchsorted(start[order], edges[:-1][free], "right") - 1]]
    # Neighbours of which nothing tells which work they are of are one.
    new = np.concatenate([[True], (kind[1:] != kind[:-1]) | (row[1:] != row[:-1])])[: len(kind)]
    first = np.flatnonzero(new)
    ends = np.append(edges[:-1][first][1:], edges[-1])
    return Moments(edges[:-1][first], ends, kind[first], row[first])


def totals(found: Moments, kinds: Kinds) -> list[int]:
    """Picoseconds of every kind."""
    length = found.end - found.start
    return [int(length[found.kind == kind].sum()) for kind in range(kinds.idle + 1)]


def runs(pieces: Moments, key: Int64, gap_ps: int) -> Runs:
    """Pieces of one key as one each, with what is short and lies between them.

    Args:
        pieces: one at least; they follow each other without a gap.
        key: what each compute piece belongs to, >= 0; -1 for other pieces.
        gap_ps: what is longer and no compute stands alone.
    """
    start, kind, length, computes = pieces.start, pieces.kind, pieces.end - pieces.start, key >= 0
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


def _rest(group: Int64, kind: Int64, length: Int64, of_rest: npt.NDArray[np.bool_]) -> Int64:
    """For each run the kind on which most of what is not its own is spent."""
    count, most = int(group[-1]) + 1, int(kind.max(initial=0)) + 1
    spent = np.bincount(group * most + kind, np.where(of_rest, length, 0), count * most).reshape(count, most)
    found: Int64 = np.where(spent.any(axis=1), spent.argmax(axis=1), NONE)
    return found
