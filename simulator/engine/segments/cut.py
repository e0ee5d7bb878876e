"""Programs cut into segments: kinds of segments that stand once, and sequences of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from echograph.ir.columns import NONE, Int64
from echograph.ir.graph import JobGraph
from echograph.ir.schedule import Edges, spread
from echograph.ir.types import OpKind
from echograph.simulator.groups import RendezvousKeys, number_rendezvous, occurrences


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentKind:
    """What segments of the same operations have in common. Operations are counted from the first one.

    Attributes:
        rows: of the operation table.
        meets: whether it is one communication that other programs take part in.
        waits: for each operation, those of the segment on other streams that it waits for, ascending.
        inputs: operations that wait for another segment in some run, ascending.
        outputs: operations that another segment waits for, ascending.
    """

    rows: range
    meets: bool
    waits: tuple[tuple[int, ...], ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class SegmentSequence:
    """The segments of one program, in order.

    Attributes:
        kind: number of each segment's kind.
        start: int64 [segments + 1], position in the program of its first operation.
        rendezvous: number of each segment's rendezvous; -1 for segments that do not meet.
        incoming: by segment, (number of the input, edge) of what it waits for, in the order of the makers.
        outgoing: by segment, (number of the output, edge) of what waits for it.
        maker: of each edge, the segment and the number of its output.
    """

    kind: Int64
    start: Int64
    rendezvous: Int64
    incoming: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    outgoing: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    maker: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SegmentedJob:
    """All programs of a job in segments.

    Attributes:
        job: the job.
        kinds: of segments.
        sequences: one for each program.
        members: of each rendezvous, how many segments take part.
    """

    job: JobGraph
    kinds: tuple[SegmentKind, ...]
    sequences: tuple[SegmentSequence, ...]
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Cut:
    """One program: positions at which segments start, their first rows, which meet, and what streams wait for."""

    start: Int64
    begin: Int64
    met: Int64
    before: Int64
    after: Int64

    @property
    def lengths(self) -> Int64:
        return np.diff(self.start)

    def segment(self, position: Int64) -> Int64:
        return np.searchsorted(self.start, position, side="right") - 1

    def row(self, position: Int64) -> Int64:
        segment = self.segment(position)
        return self.begin[segment] + position - self.start[segment]


def cut(job: JobGraph) -> SegmentedJob | None:
    """Cuts all programs of a job; None where runs of the same operations do not wait for each other alike."""
    edges = Edges(job)
    keys = RendezvousKeys(job)
    key_of = [keys.of(number) for number in range(len(job.programs))]
    cuts = [_cut(job, number, edges, its >= 0) for number, its in enumerate(key_of)]
    rows = len(job.ops) + 1
    meets = [np.isin(np.arange(len(c.begin)), c.met) for c in cuts]
    names = np.concatenate(
        [(c.begin * rows + c.lengths) * 2 + met for c, met in zip(cuts, meets, strict=True)]
        or [np.zeros(0, np.int64)]
    )
    name, kind = np.unique(names, return_inverse=True)
    first = np.cumsum([0, *(len(c.begin) for c in cuts)])
    inner = _inner(cuts, kind, first)
    if inner is None:
        return None
    rendezvous, members = _meet(job, cuts, key_of)
    outer = [_outer(job, c) for c in cuts]
    ends = [(c, o, kind[f:]) for c, o, f in zip(cuts, outer, first, strict=False)]
    inputs = _slots(len(name), [(k[c.segment(a)], a - c.start[c.segment(a)]) for c, (_, a), k in ends])
    outputs = _slots(len(name), [(k[c.segment(b)], b - c.start[c.segment(b)]) for c, (b, _), k in ends])
    kinds = tuple(
        SegmentKind(
            rows=range(begin := int(n) // 2 // rows, begin + (length := int(n) // 2 % rows)),
            meets=bool(n % 2),
            waits=tuple(tuple(inner.get((number, op), ())) for op in range(length)),
            inputs=tuple(inputs[number]),
            outputs=tuple(outputs[number]),
        )
        for number, n in enumerate(name.tolist())
    )
    sequences = []
    for (c, (before, after), k), met in zip(ends, rendezvous, strict=True):
        sequence = SegmentSequence(kind=k[: len(c.begin)], start=c.start, rendezvous=met)
        _connect(sequence, c, before, after, kinds)
        sequences.append(sequence)
    return SegmentedJob(job=job, kinds=kinds, sequences=tuple(sequences), members=members)


def _cut(job: JobGraph, number: int, edges: Edges, joined: np.ndarray) -> _Cut:
    calls, rows = job.programs[number].calls, np.flatnonzero(joined)
    starts = np.concatenate([[0], np.cumsum(calls[:, 2] - calls[:, 1])])
    call, which = spread(np.searchsorted(rows, calls[:, 1]), np.searchsorted(rows, calls[:, 2]))
    met = starts[call] + rows[which] - calls[call, 1]
    start = np.sort(np.concatenate([starts, met, met + 1]))
    start = start[np.diff(start, prepend=NONE) > 0]
    call = np.searchsorted(starts, start[:-1], side="right") - 1
    before, after = edges.of(number)
    return _Cut(
        start=start,
        begin=calls[call, 1] + start[:-1] - starts[call],
        met=np.searchsorted(start, met),
        before=before,
        after=after,
    )


def _inner(cuts: list[_Cut], kind: Int64, first: Int64) -> dict[tuple[int, int], list[int]] | None:
    """Who waits for whom inside each kind of segment; None where its segments differ."""
    found = []
    longest = int(max((c.lengths.max(initial=0) for c in cuts), default=0))
    for c, number in zip(cuts, first.tolist(), strict=False):
        segment = c.segment(c.after)
        inside = segment == c.segment(c.before)
        segment = segment[inside]
        offsets = (c.after[inside] - c.start[segment]) * longest + c.before[inside] - c.start[segment]
        found.append((number + segment) * longest**2 + offsets)
    edges = np.sort(np.concatenate([*found, np.zeros(0, np.int64)]))
    edges = edges[np.diff(edges, prepend=NONE) > 0]
    segment, offsets = np.divmod(edges, longest**2)
    count = np.bincount(segment, minlength=len(kind))
    _, example = np.unique(kind, return_index=True)
    if not np.array_equal(count, count[example[kind]]):
        return None
    begin = np.cumsum(count) - count
    same = offsets[begin[example[kind[segment]]] + np.arange(len(segment)) - begin[segment]]
    if not np.array_equal(offsets, same):
        return None
    waits: dict[tuple[int, int], list[int]] = {}
    mine = segment == example[kind[segment]]
    for number, offset in zip(kind[segment[mine]].tolist(), offsets[mine].tolist(), strict=True):
        waits.setdefault((number, offset // longest), []).append(offset % longest)
    return waits


def _outer(job: JobGraph, c: _Cut) -> tuple[Int64, Int64]:
    """What segments wait for of others, ascending, without what their stream has waited for before.

    A stream that once waited for a run waits for nothing before it, on the same stream, ever again.
    """
    lanes = 1 + len(job.streams)
    order = np.lexsort((c.before, c.after))
    before, after = c.before[order], c.after[order]
    maker, reader = c.row(before), c.row(after)
    hosts = job.ops.kind[reader] == OpKind.HOST
    pair = (1 + job.ops.stream[maker]) * lanes + np.where(hosts, 0, 1 + job.ops.stream[reader])
    by_pair = np.argsort(pair, kind="stable")
    span = int(c.start[-1]) + 1
    latest = np.maximum.accumulate(pair[by_pair].astype(np.int64) * span + before[by_pair])
    # The first edge of each reader: what stands before it is of earlier ones.
    place = pair[by_pair].astype(np.int64) * span + after[by_pair]
    begin = np.searchsorted(place, place)
    known = np.where(begin > 0, latest[np.maximum(begin, 1) - 1], NONE)
    redundant = np.zeros(len(before), np.bool_)
    redundant[by_pair] = known >= pair[by_pair].astype(np.int64) * span + before[by_pair]
    kept = ~redundant & (c.segment(before) != c.segment(after))
    return before[kept], after[kept]


def _slots(kinds: int, places: list[tuple[Int64, Int64]]) -> list[list[int]]:
    """The distinct operations that edges touch in each kind of segment, ascending."""
    touched: list[set[int]] = [set() for _ in range(kinds)]
    for kind, offset in places:
        for number, op in set(zip(kind.tolist(), offset.tolist(), strict=True)):
            touched[number].add(op)
    return [sorted(ops) for ops in touched]


def _meet(job: JobGraph, cuts: list[_Cut], key_of: list[Int64]) -> tuple[list[Int64], tuple[int, ...]]:
    """The rendezvous of every segment of every program, and how many take part in each."""
    keys = [key[c.begin[c.met]] for c, key in zip(cuts, key_of, strict=True)]
    # A program may hold both ends of a message: its n-th send meets its n-th receive.
    sends = [job.ops.kind[c.begin[c.met]] == OpKind.SEND for c in cuts]
    nth = [occurrences(2 * key + send) for key, send in zip(keys, sends, strict=True)]
    numbers = number_rendezvous(np.concatenate(keys), np.concatenate(nth))
    bounds = np.cumsum([0, *map(len, keys)])
    rendezvous = [np.full(len(c.begin), NONE, np.int64) for c in cuts]
    for its, c, low, high in zip(rendezvous, cuts, bounds[:-1], bounds[1:], strict=True):
        its[c.met] = numbers[low:high]
    return rendezvous, tuple(np.bincount(numbers).tolist())


def _connect(
    sequence: SegmentSequence, c: _Cut, before: Int64, after: Int64, kinds: tuple[SegmentKind, ...]
) -> None:
    maker, reader = c.segment(before), c.segment(after)
    rows = (maker, before - c.start[maker], reader, after - c.start[reader])
    for edge, (its, out_port, segment, in_port) in enumerate(zip(*(row.tolist() for row in rows), strict=True)):
        out = kinds[sequence.kind[its]].outputs.index(out_port)
        into = kinds[sequence.kind[segment]].inputs.index(in_port)
        sequence.incoming.setdefault(segment, []).append((into, edge))
        sequence.outgoing.setdefault(its, []).append((out, edge))
        sequence.maker.append((its, out))
