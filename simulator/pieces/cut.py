"""Programs cut into pieces: kinds of pieces that stand once, and lines of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from echograph.ir.columns import NONE, Int64
from echograph.ir.edges import Edges, spread
from echograph.ir.graph import JobGraph
from echograph.ir.types import COMMUNICATIONS, OpKind
from echograph.simulator.tasks import number_meetings, occurrences

Joins = Callable[[int, int], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What pieces of the same operations have in common. Operations are counted from the first one.

    Attributes:
        rows: of the operation table.
        meets: whether it is one communication that other programs take part in.
        waits: for each operation, those of the piece on other streams that it waits for, ascending.
        reads: operations that wait for another piece in some run, ascending: the *inlets*.
        read: operations that another piece waits for, ascending: the *outlets*.
    """

    rows: range
    meets: bool
    waits: tuple[tuple[int, ...], ...]
    reads: tuple[int, ...]
    read: tuple[int, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class Line:
    """The pieces of one program, in order.

    Attributes:
        kind: number of each piece's kind.
        start: int64 [pieces + 1], position in the program of its first operation.
        meeting: number of the meeting; -1 for pieces that do not meet.
        incoming: by piece, (inlet, edge) of what it waits for, in the order of the makers.
        outgoing: by piece, (outlet, edge) of what waits for it.
        maker: of each edge, the piece and its outlet.
    """

    kind: Int64
    start: Int64
    meeting: Int64
    incoming: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    outgoing: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    maker: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """All programs of a job in pieces.

    Attributes:
        job: the job.
        kinds: of pieces.
        lines: one for each program.
        members: of each meeting, how many pieces take part.
    """

    job: JobGraph
    kinds: tuple[Kind, ...]
    lines: tuple[Line, ...]
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Cut:
    """One program: positions at which pieces start, their first rows, which meet, and what streams wait for."""

    start: Int64
    begin: Int64
    met: Int64
    before: Int64
    after: Int64

    @property
    def lengths(self) -> Int64:
        return np.diff(self.start)

    def piece(self, position: Int64) -> Int64:
        return np.searchsorted(self.start, position, side="right") - 1

    def row(self, position: Int64) -> Int64:
        piece = self.piece(position)
        return self.begin[piece] + position - self.start[piece]


def cut(job: JobGraph, joins: Joins) -> Pieces | None:
    """Cuts all programs of a job; None where runs of the same operations do not wait for each other alike.

    Args:
        job: the job.
        joins: as of `tasks.expand`.
    """
    edges = Edges(job)
    keys: dict[object, int] = {}
    key_of = [_keys(job, number, joins, keys) for number in range(len(job.programs))]
    cuts = [_cut(job, number, edges, key >= 0) for number, key in enumerate(key_of)]
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
    meeting, members = _meet(job, cuts, key_of)
    outer = [_outer(job, c) for c in cuts]
    ends = [(c, o, kind[f:]) for c, o, f in zip(cuts, outer, first, strict=False)]
    reads = _slots(len(name), [(k[c.piece(a)], a - c.start[c.piece(a)]) for c, (_, a), k in ends])
    read = _slots(len(name), [(k[c.piece(b)], b - c.start[c.piece(b)]) for c, (b, _), k in ends])
    kinds = tuple(
        Kind(
            rows=range(begin := int(n) // 2 // rows, begin + (length := int(n) // 2 % rows)),
            meets=bool(n % 2),
            waits=tuple(tuple(inner.get((number, op), ())) for op in range(length)),
            reads=tuple(reads[number]),
            read=tuple(read[number]),
        )
        for number, n in enumerate(name.tolist())
    )
    lines = []
    for (c, (before, after), k), met in zip(ends, meeting, strict=True):
        line = Line(kind=k[: len(c.begin)], start=c.start, meeting=met)
        _connect(line, c, before, after, kinds)
        lines.append(line)
    return Pieces(job=job, kinds=kinds, lines=tuple(lines), members=members)


def _keys(job: JobGraph, number: int, joins: Joins, keys: dict[object, int]) -> Int64:
    """For every row, the number of the key under which the program meets others there; -1 for the others."""
    calls, found = job.programs[number].calls, np.full(len(job.ops), NONE, np.int64)
    runs = np.zeros(len(job.ops) + 1, np.int64)
    np.add.at(runs, calls[:, 1], 1)
    np.add.at(runs, calls[:, 2], -1)
    runs = np.cumsum(runs)[:-1]
    for row in np.flatnonzero(np.isin(job.ops.kind, COMMUNICATIONS) & (runs > 0)).tolist():
        if (key := joins(number, row)) is not None:
            found[row] = keys.setdefault(key, len(keys))
    return found


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
    """Who waits for whom inside each kind of piece; None where its pieces differ."""
    found = []
    longest = int(max((c.lengths.max(initial=0) for c in cuts), default=0))
    for c, number in zip(cuts, first.tolist(), strict=False):
        piece = c.piece(c.after)
        inside = piece == c.piece(c.before)
        piece = piece[inside]
        offsets = (c.after[inside] - c.start[piece]) * longest + c.before[inside] - c.start[piece]
        found.append((number + piece) * longest**2 + offsets)
    edges = np.sort(np.concatenate([*found, np.zeros(0, np.int64)]))
    edges = edges[np.diff(edges, prepend=NONE) > 0]
    piece, offsets = np.divmod(edges, longest**2)
    count = np.bincount(piece, minlength=len(kind))
    _, example = np.unique(kind, return_index=True)
    if not np.array_equal(count, count[example[kind]]):
        return None
    begin = np.cumsum(count) - count
    same = offsets[begin[example[kind[piece]]] + np.arange(len(piece)) - begin[piece]]
    if not np.array_equal(offsets, same):
        return None
    waits: dict[tuple[int, int], list[int]] = {}
    mine = piece == example[kind[piece]]
    for number, offset in zip(kind[piece[mine]].tolist(), offsets[mine].tolist(), strict=True):
        waits.setdefault((number, offset // longest), []).append(offset % longest)
    return waits


def _outer(job: JobGraph, c: _Cut) -> tuple[Int64, Int64]:
    """What pieces wait for of others, ascending, without what their stream has waited for before.

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
    kept = ~redundant & (c.piece(before) != c.piece(after))
    return before[kept], after[kept]


def _slots(kinds: int, places: list[tuple[Int64, Int64]]) -> list[list[int]]:
    """The distinct operations that edges touch in each kind of piece, ascending."""
    touched: list[set[int]] = [set() for _ in range(kinds)]
    for kind, offset in places:
        for number, op in set(zip(kind.tolist(), offset.tolist(), strict=True)):
            touched[number].add(op)
    return [sorted(ops) for ops in touched]


def _meet(job: JobGraph, cuts: list[_Cut], key_of: list[Int64]) -> tuple[list[Int64], tuple[int, ...]]:
    """The meeting of every piece of every program, and how many take part in each."""
    keys = [key[c.begin[c.met]] for c, key in zip(cuts, key_of, strict=True)]
    # A program may hold both ends of a message: its n-th send meets its n-th receive.
    sends = [job.ops.kind[c.begin[c.met]] == OpKind.SEND for c in cuts]
    nth = [occurrences(2 * key + send) for key, send in zip(keys, sends, strict=True)]
    numbers = number_meetings(np.concatenate(keys), np.concatenate(nth))
    bounds = np.cumsum([0, *map(len, keys)])
    meeting = [np.full(len(c.begin), NONE, np.int64) for c in cuts]
    for its, c, low, high in zip(meeting, cuts, bounds[:-1], bounds[1:], strict=True):
        its[c.met] = numbers[low:high]
    return meeting, tuple(np.bincount(numbers).tolist())


def _connect(line: Line, c: _Cut, before: Int64, after: Int64, kinds: tuple[Kind, ...]) -> None:
    maker, reader = c.piece(before), c.piece(after)
    rows = (maker, before - c.start[maker], reader, after - c.start[reader])
    for edge, (its, outlet, piece, inlet) in enumerate(zip(*(row.tolist() for row in rows), strict=True)):
        out = kinds[line.kind[its]].read.index(outlet)
        line.incoming.setdefault(piece, []).append((kinds[line.kind[piece]].reads.index(inlet), edge))
        line.outgoing.setdefault(its, []).append((out, edge))
        line.maker.append((its, out))
