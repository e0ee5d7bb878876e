"""The static pass over whole calls: what repeats in a step is worked out once, in max-plus algebra.

A *segment* is a run of operations of one call between two rendezvous with other programs. What it does to the
clocks of its *lanes*, the host (0) and streams (1 + their number), is linear in max-plus algebra, in which the
larger of two numbers is their sum, and their sum their product (Baccelli, Cohen, Olsder and Quadrat,
"Synchronization and Linearity", 1992, chapter 2). So is a message that ranks of one role pass around a ring: a
send with the receive behind it that it meets, an *exchange*, both of which start when both are ready. *Entries*
are the clocks of these lanes as it begins, then its inputs: when what they wait for ended. *Exits* are the clocks
after it, then the ends of its outputs. Every exit is the largest of (entry + constant), and the constant is the
longest path of work between the two: the *transfer matrix* of the segment, one for all that have the same
operations. Matrices of segments that follow each other without waiting for others are multiplied to one, a
*chain*. A program is then a row of matrices through which its clocks are sent. *Scenarios*, which differ in
durations, are worked out side by side.

`cut` finds segments, `transfer_matrix` works their constants out, `run` sends the clocks of all programs through.
Then the answers are read off: `program_timeline`, when operations start, and `critical_path`, from the task that
ends last, cause by cause, to the start of the step. Inside a segment the path depends on one thing, the entry that
it comes from, unless two entries let a task start at the same picosecond: so it is followed once for each kind of
segment, task and entry. All times are those of `static`, to the picosecond.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from operator import itemgetter

import numpy as np

from echograph.ir.columns import NONE, Int64, distinct
from echograph.ir.graph import JobGraph
from echograph.ir.schedule import Edges, spread
from echograph.ir.timeline import Lane, Timeline
from echograph.ir.types import OpKind
from echograph.simulator.breakdown import Breakdown, breakdown
from echograph.simulator.engine import Roles, StepRun, static
from echograph.simulator.groups import RendezvousKeys, number_rendezvous, occurrences
from echograph.simulator.limits import families, largest_first
from echograph.simulator.tasks import DEVICE, HOST

REPEATED = 4
"""How often operations have to run, on average, for segments to pay: a kind takes as long as so many runs."""


def simulate(roles: Roles) -> StepRun | None:
    """One step, and when it ends in the scenarios of its interval.

    Returns:
        The step; None where operations do not repeat, where runs of the same operations do not wait alike, where
        segments wait for each other in a circle, or where threads issue besides the host.
    """
    if roles.host.threads or not _pays(roles):
        return None
    if (segments := cut(roles.job)) is None:
        return None
    device, host = (
        np.rint(times[:, None] * factors).astype(np.int64)
        for times, factors in ((roles.times.picoseconds, roles.factor[:-1]), (roles.issue, roles.factor[-1]))
    )
    ran = run(segments, work_of(roles.job, device, host))
    return None if ran is None else _step(roles, ran)


def _pays(roles: Roles) -> bool:
    """Whether operations repeat often enough, in a step that the constants can hold."""
    job, rows = roles.job, len(roles.job.ops) + 1
    calls = [program.calls[:, 1] * rows + program.calls[:, 2] for program in job.programs]
    begin, end = np.divmod(distinct(np.concatenate(calls)), rows)
    # As floats: what the host does itself stands in both, and their sum may be beyond 64 bits.
    work = roles.times.picoseconds.astype(np.float64) + roles.issue
    longest = float(np.dot(job.run_counts(), work)) * float(roles.factor.max())
    return job.unfolded_ops >= REPEATED * int((end - begin).sum()) and longest < LONGEST_PS


def _step(roles: Roles, ran: SegmentRun) -> StepRun:
    """What the segments did; their tasks are run one by one if they have to be written down."""
    job: JobGraph = roles.job
    last, total = critical_path(ran, families(job))
    end, work = int(ran.ends[0]), ran.work.device[:, 0].astype(np.float64)

    def of_program(number: int) -> Breakdown:
        return breakdown(job, program_timeline(ran, number), number, end)

    return StepRun(
        end_ps=end,
        last=last,
        breakdown=of_program(last),
        breakdowns=lambda: [of_program(number) for number in range(len(job.programs))],
        limits=largest_first(job, total, end),
        busy=job.run_counts() * work,
        busy_of_last=job.run_counts(last) * work,
        write=cache(lambda: roles.step(static.run(roles.tasks)).write()),
        scenario_ends=ran.ends[1:],
    )


NEVER = -(2**62)
"""A constant for what does not depend on an entry, and the clock of an input that nothing holds back."""
LONGEST_PS = 2**60
"""Steps beyond which sums with `NEVER` would not stay apart from those without."""


# -- programs, cut into segments ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentKind:
    """What segments of the same operations have in common. Operations are counted from the first one.

    Attributes:
        rows: of the operation table.
        rendezvous: whether it is one communication that other programs take part in.
        waits: for each operation, those of the segment on other streams that it waits for, ascending.
        inputs: operations that wait for another segment in some run, ascending.
        outputs: operations that another segment waits for, ascending.
        exchanges: sends that start together with the receive behind them, ascending.
    """

    rows: range
    rendezvous: bool
    waits: tuple[tuple[int, ...], ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    exchanges: tuple[int, ...]


@dataclass(kw_only=True, eq=False)
class SegmentSequence:
    """The segments of one program, in order.

    Attributes:
        kind: number of each segment's kind.
        start: int64 [segments + 1], position in the program of its first operation.
        rendezvous: number of each segment's rendezvous; -1 for those that are none.
        reader: int64 [edges], the segment that waits, ascending; of one that waits for several, in their order.
        into: int64 [edges], number of its input.
        made_by: int64 [edges], the segment that is waited for.
        out: int64 [edges], number of its output.
    """

    kind: Int64
    start: Int64
    rendezvous: Int64
    reader: Int64
    into: Int64
    made_by: Int64
    out: Int64

    @cached_property
    def incoming(self) -> dict[int, list[tuple[int, int]]]:
        """By segment, (number of the input, edge) of what it waits for, in the order of the makers."""
        return _by_segment(self.reader, self.into)

    @cached_property
    def outgoing(self) -> dict[int, list[tuple[int, int]]]:
        """By segment, (number of the output, edge) of what waits for it."""
        return _by_segment(self.made_by, self.out)

    @cached_property
    def maker(self) -> list[tuple[int, int]]:
        """Of each edge, the segment and the number of its output."""
        return list(zip(self.made_by.tolist(), self.out.tolist(), strict=True))


def _by_segment(segment: Int64, port: Int64) -> dict[int, list[tuple[int, int]]]:
    found: dict[int, list[tuple[int, int]]] = {}
    for edge, (its, number) in enumerate(zip(segment.tolist(), port.tolist(), strict=True)):
        found.setdefault(its, []).append((number, edge))
    return found


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
    exchanges = _exchanges(job, key_of)
    for its in key_of:
        its[exchanges] = its[exchanges + 1] = NONE
    cuts = [_cut(job, number, edges, its >= 0) for number, its in enumerate(key_of)]
    # Segments of the same rows are of one kind: its number says which rows, and whether they are a rendezvous.
    rows = len(job.ops) + 1
    meets = [np.bincount(c.met, minlength=len(c.begin)) > 0 for c in cuts]
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
    longest = rows  # no segment has as many operations
    inputs = _Ports(longest, len(name), [(k[c.segment(a)], a - c.start[c.segment(a)]) for c, (_, a), k in ends])
    outputs = _Ports(longest, len(name), [(k[c.segment(b)], b - c.start[c.segment(b)]) for c, (b, _), k in ends])
    kinds = tuple(
        SegmentKind(
            rows=range(begin := int(n) // 2 // rows, begin + (length := int(n) // 2 % rows)),
            rendezvous=bool(n % 2),
            waits=tuple(tuple(inner.get((number, op), ())) for op in range(length)),
            inputs=inputs.of[number],
            outputs=outputs.of[number],
            exchanges=tuple((_within(exchanges, begin, begin + length) - begin).tolist()),
        )
        for number, n in enumerate(name.tolist())
    )
    if any(op in kind.waits[op + 1] for kind in kinds for op in kind.exchanges):
        return None  # a receive that waits for its own send: the tasks say what waits for what
    sequences = [
        SegmentSequence(
            kind=k[: len(c.begin)], start=c.start, rendezvous=met, reader=c.segment(after), into=into,
            made_by=c.segment(before), out=out,
        )
        for (c, (before, after), k), met, into, out in zip(
            ends, rendezvous, inputs.numbers, outputs.numbers, strict=True
        )
    ]  # fmt: skip
    return SegmentedJob(job=job, kinds=kinds, sequences=tuple(sequences), members=members)


def _exchanges(job: JobGraph, key_of: list[Int64]) -> Int64:
    """Rows of sends that the receive behind them meets, in every program that runs them, ascending.

    All messages under a key have to be such pairs, or the n-th send might meet another receive.
    """
    ops = job.ops
    sends: Int64 = np.flatnonzero((ops.kind[:-1] == OpKind.SEND) & (ops.kind[1:] == OpKind.RECV))
    sends = sends[ops.stream[sends] != ops.stream[sends + 1]]
    if not len(sends):
        return sends
    apart = np.zeros(len(ops), np.bool_)
    holders = np.zeros(2 + max(int(its.max(initial=NONE)) for its in key_of), np.int64)
    for number, key in enumerate(key_of):
        holders[distinct(key[key != NONE])] += 1
        # A call that has the one without the other parts them, and so does a program in which they meet nobody.
        apart[sends] |= (key[sends] != key[sends + 1]) | np.isin(sends + 1, job.programs[number].calls[:, 1:3])
        apart[sends] |= (job.run_counts(number)[sends] > 0) & (key[sends] == NONE)
    while True:
        pairs: Int64 = sends[~apart[sends]]
        alone = np.ones(len(ops), np.bool_)
        alone[pairs] = alone[pairs + 1] = False
        before = int(apart.sum())
        for key in key_of:
            bad = holders > 1
            bad[distinct(key[alone & (key != NONE)])] = True
            apart[pairs] |= (key[pairs] != NONE) & bad[key[pairs]]
        if int(apart.sum()) == before:
            return pairs


def _within(rows: Int64, begin: int, end: int) -> Int64:
    """Those of ascending rows that are in a range."""
    found: Int64 = rows[np.searchsorted(rows, begin) : np.searchsorted(rows, end)]
    return found


def _cut(job: JobGraph, number: int, edges: Edges, meets: np.ndarray) -> _Cut:
    """One program, cut where its calls begin, and before and after each rendezvous."""
    calls, rows = job.programs[number].calls, np.flatnonzero(meets)
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
    # An edge inside a segment becomes a number, of the segment, who waits there and for whom: sorted, those of one
    # segment lie together.
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
    # Every segment must have the edges of the first one of its kind.
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
    # For each pair of streams, the latest run that was waited for so far; numbers hold the pair and the position.
    by_pair = np.argsort(pair, kind="stable")
    span = int(c.start[-1]) + 1
    latest = np.maximum.accumulate(pair[by_pair].astype(np.int64) * span + before[by_pair])
    # What stands before the first edge of a reader is of earlier readers.
    place = pair[by_pair].astype(np.int64) * span + after[by_pair]
    begin = np.searchsorted(place, place)
    known = np.where(begin > 0, latest[np.maximum(begin, 1) - 1], NONE)
    redundant = np.zeros(len(before), np.bool_)
    redundant[by_pair] = known >= pair[by_pair].astype(np.int64) * span + before[by_pair]
    kept = ~redundant & (c.segment(before) != c.segment(after))
    return before[kept], after[kept]


class _Ports:
    """The operations of each kind of segment that edges touch, numbered from 0, ascending.

    Args:
        most: more than the operations of any segment.
        kinds: how many kinds.
        places: of each program, kind and operation of every edge.

    Attributes:
        of: of each kind, these operations.
        numbers: of each program, the number of every edge's operation.
    """

    def __init__(self, most: int, kinds: int, places: list[tuple[Int64, Int64]]) -> None:
        keys = [kind * most + op for kind, op in places]
        known = np.unique(np.concatenate([*keys, np.zeros(0, np.int64)]))
        first = np.searchsorted(known, np.arange(kinds + 1) * most)
        ops, bounds = (known % most).tolist(), first.tolist()
        self.of = [tuple(ops[low:high]) for low, high in pairwise(bounds)]
        self.numbers = [
            np.searchsorted(known, key) - first[kind] for key, (kind, _) in zip(keys, places, strict=True)
        ]


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


# -- transfer matrices --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowTimes:
    """Picoseconds of every row of the operation table.

    Attributes:
        device: int64 [rows, scenarios].
        host: int64 [rows, scenarios], to issue it, or for `Host` work to do it.
        hosts: which rows are `Host` work.
        lane: lane of each row's stream.
    """

    device: Int64
    host: Int64
    hosts: list[bool]
    lane: list[int]


@dataclass(kw_only=True, eq=False)
class TransferMatrix:
    """The constants of one kind of segment.

    Attributes:
        kind: of which segments.
        lanes: ascending, the host first.
        over: int64 [exits, entries, scenarios].
        host: for each operation, int64 [entries, scenarios]: from the entries to when it is issued.
        device: the same to when it runs.
    """

    kind: SegmentKind
    lanes: tuple[int, ...]
    over: Int64
    host: list[Int64]
    device: list[Int64]

    @cached_property
    def starts(self) -> Int64:
        """Int64 [operations, 2, entries]: from the entries to when host and device start it, first scenario."""
        return np.stack([np.array(self.host)[:, :, 0], np.array(self.device)[:, :, 0]], axis=1)


class SegmentChain:
    """The constants of segments that follow each other, of which only the first has inputs, the last outputs.

    Args:
        matrices: of the segments.

    Attributes:
        matrices: of the segments.
        lanes: of all segments, ascending.
        at: the same, as an index.
        uses: the same, as bits.
        inputs: of the first segment, how many.
        over: int64 [exits, entries, scenarios].
        before: for each segment, int64 [its entries, entries]: to where it begins, first scenario.
    """

    def __init__(self, matrices: tuple[TransferMatrix, ...]) -> None:
        self.matrices = matrices
        self.lanes = tuple(sorted({lane for its in matrices for lane in its.lanes}))
        self.at, self.uses = np.array(self.lanes), sum(1 << lane for lane in self.lanes)
        self.inputs = len(matrices[0].kind.inputs)
        self.before: list[Int64] = []
        self.over = self._alone() if len(matrices) == 1 else self._together()

    def _alone(self) -> Int64:
        """The constants of the one segment, which begins as the chain does."""
        entries = len(self.lanes) + self.inputs
        as_they_are = np.full((entries, entries), NEVER)
        np.fill_diagonal(as_they_are, 0)
        self.before.append(as_they_are)
        return self.matrices[0].over

    def _together(self) -> Int64:
        """The product of the matrices, over the lanes of all; notes the factors that stand before each."""
        matrices = self.matrices
        entries = len(self.lanes) + self.inputs
        clocks = np.full((len(self.lanes), entries, matrices[0].over.shape[2]), NEVER)
        clocks[np.arange(len(self.lanes)), np.arange(len(self.lanes))] = 0
        inputs = np.full((self.inputs, *clocks.shape[1:]), NEVER)
        inputs[np.arange(self.inputs), len(self.lanes) + np.arange(self.inputs)] = 0
        for its in matrices:
            lanes = np.searchsorted(self.at, its.lanes)
            into = clocks[lanes]
            # Of later segments no input is waited for in this chain, or they would begin one of their own.
            if its.kind.inputs:
                closed = np.full((len(its.kind.inputs), *clocks.shape[1:]), NEVER)
                into = np.concatenate([into, closed if self.before else inputs])
            self.before.append(into[:, :, 0])
            # Sums of two `NEVER` must not run away, nor come near what is a time.
            after = np.maximum((its.over[:, :, None] + into[None]).max(axis=1), NEVER)
            clocks[lanes] = after[: len(lanes)]
        return np.concatenate([clocks, after[len(lanes) :]])


def transfer_matrix(kind: SegmentKind, work: RowTimes) -> TransferMatrix:
    """Works the constants of a kind of segment out, operation by operation.

    Every clock is a row of constants, one for each entry: as the segment begins, 0 for its own lane and `NEVER`
    for the others, the identity of max-plus algebra. Then the operations are run as a clock with one value would
    run them: work adds its duration to the row, and what waits takes the larger of two rows.
    """
    rows = kind.rows
    lanes = (0, *sorted({work.lane[row] for row in rows}))
    entries, scenarios = len(lanes) + len(kind.inputs), work.device.shape[1]
    clocks = np.full((len(lanes), entries, scenarios), NEVER)
    clocks[np.arange(len(lanes)), np.arange(len(lanes))] = 0
    clock = dict(zip(lanes, clocks, strict=True))
    inputs = {op: len(lanes) + in_port for in_port, op in enumerate(kind.inputs)}
    ends: list[Int64] = []
    issued, started = [], []
    for op, row in enumerate(rows):
        ready = clock[0] if not work.hosts[row] else _after(clock[0], op, kind, ends, inputs)
        issued.append(ready)
        clock[0] = ready = ready + work.host[row]
        ready = np.maximum(clock[work.lane[row]], ready)
        if not work.hosts[row]:
            ready = _after(ready, op, kind, ends, inputs)
        started.append(ready)
        if op in kind.exchanges:
            continue  # and starts with the next one
        together = [op - 1, op] if op - 1 in kind.exchanges else [op]
        ready = np.maximum(ready, started[together[0]])
        for its in together:
            started[its] = ready
            ends.append(ready + work.device[rows[its]])
            clock[work.lane[rows[its]]] = ends[-1]
    over = np.stack([*(clock[lane] for lane in lanes), *(ends[op] for op in kind.outputs)])
    return TransferMatrix(kind=kind, lanes=lanes, over=np.maximum(over, NEVER), host=issued, device=started)


def _after(ready: Int64, op: int, kind: SegmentKind, ends: list[Int64], inputs: dict[int, int]) -> Int64:
    """When an operation can start that is ready, but for what it waits for."""
    # An input's own constant is 0: it starts then, or later.
    for before in kind.waits[op]:
        ready = np.maximum(ready, ends[before])
    if op in inputs:
        ready = ready.copy()
        ready[inputs[op]] = np.maximum(ready[inputs[op]], 0)
    return ready


# -- clocks, sent through them ------------------------------------------------------------------------------------


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
    """Who has come to which rendezvous.

    Attributes:
        members: of each, how many segments take part.
        waiting: by rendezvous, those that have come.
        met: those that all have come to.
    """

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
        # In the first scenario, which is the step: of those that are ready last, the first in order.
        last = min((-int(its.ready[0]), its.program.number, its.stretch.first) for its in here)
        self.met[rendezvous] = Rendezvous(start=int(start[0]), last=last[1:])
        for its in here:
            its.program.resume(its.stretch, its.lane, start + its.duration)
        return [its.program for its in here]


class _Program:
    """The state of one program.

    It runs ahead of others until it needs what they say. A lane that is at a rendezvous is pending, its clock not
    known: segments on other lanes go on, and so may the host, which only issues.
    """

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
                found = self._arrive(stretch, rendezvous)
                if found is None:
                    break
                free += found
                continue
            if self.pending & chain.uses:
                break
            entry = self.clocks[chain.at]  # a copy, which stays as it is
            if chain.inputs:
                inputs = self._inputs(stretch, chain.inputs)
                if inputs is None:
                    break
                entry = np.concatenate([entry, inputs])
            self.entries.append(entry)
            # The matrix-vector product of max-plus algebra.
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

    def _arrive(self, stretch: Stretch, rendezvous: _Rendezvous) -> list[_Program] | None:
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
    matrices = [None if kind.rendezvous else transfer_matrix(kind, work) for kind in segments.kinds]
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
    """The segments of a program up to rendezvous, and to what waits or is waited for: first, and kinds."""
    cuts = np.array([kind.rendezvous for kind in kinds] or [False])[sequence.kind]
    cuts[1:] |= cuts[:-1]
    cuts[[*sequence.incoming]] = True
    cuts[[segment + 1 for segment in sequence.outgoing]] = True
    cuts[:1] = True
    numbers = sequence.kind.tolist()
    bounds = [*np.flatnonzero(cuts).tolist(), len(cuts)]
    return [(first, tuple(numbers[first:end])) for first, end in pairwise(bounds)]


# -- when operations start ----------------------------------------------------------------------------------------


def program_timeline(run: SegmentRun, program: int) -> Timeline:
    """What one program did, in its order; causes are not worked out (-1)."""
    job, sequence = run.segments.job, run.segments.sequences[program]
    count = int(sequence.start[-1])
    start, op = np.zeros((count, 2), np.int64), np.zeros(count, np.int64)
    for matrix, first, entries in _by_matrix(run, program):
        position = sequence.start[first][:, None] + np.arange(len(matrix.kind.rows))
        op[position] = np.array(matrix.kind.rows)
        found = np.zeros((*position.shape, 2), np.int64)
        for entry in range(matrix.starts.shape[2]):
            np.maximum(found, matrix.starts[:, :, entry] + entries[:, entry, None, None], out=found)
        start[position] = found
    for stretch, its in zip(run.stretches[program], run.entries[program], strict=True):
        if stretch.chain is None:
            here = int(sequence.start[stretch.first])
            op[here] = stretch.row
            start[here] = its[0, 0], run.met[int(sequence.rendezvous[stretch.first])].start
    calls = job.programs[program].calls
    lengths = calls[:, 2] - calls[:, 1]
    instance, micro_batch = (np.repeat(calls[:, field].astype(np.int32), 2 * lengths) for field in (3, 4))
    op = np.repeat(op, 2)
    duration = np.where(np.arange(2 * count) % 2, run.work.device[op, 0], run.work.host[op, 0])
    return Timeline(
        program=np.full(2 * count, program, np.int32),
        lane=np.tile(np.array([Lane.HOST, Lane.DEVICE], np.uint8), count),
        stream=job.ops.stream[op],
        op=op,
        instance=instance,
        micro_batch=micro_batch,
        start=start.ravel(),
        duration=duration,
        cause=np.full(2 * count, NONE, np.int64),
        programs=tuple(p.role or f"rank {i}" for i, p in enumerate(job.programs)),
        streams=job.streams,
    )


def _by_matrix(run: SegmentRun, program: int) -> Iterator[tuple[TransferMatrix, Int64, Int64]]:
    """Numbers of segments that are alike, and int64 [segments, entries] with which they begin."""
    alike: dict[SegmentChain, tuple[list[int], list[Int64]]] = {}
    for stretch, entry in zip(run.stretches[program], run.entries[program], strict=True):
        if stretch.chain is not None:
            firsts, entries = alike.setdefault(stretch.chain, ([], []))
            firsts.append(stretch.first)
            entries.append(entry[:, 0])
    found: dict[TransferMatrix, list[tuple[Int64, Int64]]] = {}
    for chain, (firsts, entries) in alike.items():
        first, entry = np.array(firsts), np.array(entries)
        for at, (matrix, before) in enumerate(zip(chain.matrices, chain.before, strict=True)):
            into = (before[None] + entry[:, None]).max(axis=2)
            found.setdefault(matrix, []).append((first + at, into))
    for matrix, places in found.items():
        yield matrix, np.concatenate([first for first, _ in places]), np.concatenate([into for _, into in places])


# -- the critical path --------------------------------------------------------------------------------------------


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
        kind, starts = matrix.kind, (matrix.starts + entry).max(axis=2).tolist()
        clocks, total = entry.tolist(), np.zeros_like(self.total)
        together = {its: (send, send + 1) for send in kind.exchanges for its in (send, send + 1)}

        def end(its: int, where: int) -> int:
            return int(starts[its][where]) + self.durations[where][kind.rows[its]]

        while True:
            row = kind.rows[op]
            total[self.family[side][row]] += self.durations[side][row]
            ready = together.get(op, (op,)) if side else (op,)
            # An exchange starts when its latter part is ready: of two that are at once, the first counts.
            causes = [self._cause(matrix, its, side, clocks, end) for its in ready]
            _, cause, where = max(causes, key=itemgetter(0))
            if cause is None:
                return _Way(total, where)
            op, side = cause

    def _cause(
        self, matrix: TransferMatrix, op: int, side: int, clocks: list[int], end: Callable[[int, int], int]
    ) -> tuple[int, tuple[int, int] | None, int]:
        """When an operation was ready, which one's end that was, or else of which entry."""
        kind, lane_of, lanes = matrix.kind, self.run.work.lane, matrix.lanes
        row = kind.rows[op]
        lane = lane_of[row] if side else 0
        earlier = next((its for its in range(op - 1, -1, -1) if not side or lane_of[kind.rows[its]] == lane), None)
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
        return now, cause, where
