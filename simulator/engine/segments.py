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

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from echograph.ir.columns import NONE, Bools, Int32, Int64, ascending, distinct, enumerate_ranges, equal_rows
from echograph.ir.graph import JobGraph
from echograph.ir.schedule import Edges
from echograph.ir.timeline import Lane, Timeline
from echograph.ir.types import OpKind
from echograph.simulator.breakdown import Breakdown, breakdown
from echograph.simulator.engine import Roles, StepRun, static
from echograph.simulator.engine.machine_code import array, compiled, interpreted
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

    of_program = _breakdowns(ran, end)
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


def _breakdowns(ran: SegmentRun, end_ps: int) -> Callable[[int], Breakdown]:
    """What works out the breakdown of a program, by its number."""
    job = ran.segments.job
    if max(ran.steps, job.unfolded_ops) >= COMPILE_FROM:
        from echograph.simulator.engine.spent import breakdowns_of

        return breakdowns_of(ran)
    return lambda number: breakdown(job, program_timeline(ran, number), number, end_ps)


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
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
    """One program in segments, and what streams wait for.

    Attributes:
        start: position at which each segment starts, and where the program ends.
        begin: row of its first operation.
        met: segments that are rendezvous.
        before: position of what is waited for.
        after: position of what waits for it, ascending.
        made_by: segment of `before`.
        reader: segment of `after`.
    """

    start: Int64
    begin: Int64
    met: Int64
    before: Int64
    after: Int64
    made_by: Int64
    reader: Int64

    @property
    def lengths(self) -> Int64:
        return np.diff(self.start)

    @property
    def offsets(self) -> tuple[Int64, Int64]:
        """Where `before` and `after` are in their segments."""
        return self.before - self.start[self.made_by], self.after - self.start[self.reader]

    def waits(self, chosen: Bools) -> _Cut:
        """The same with some of what streams wait for."""
        columns = self.before, self.after, self.made_by, self.reader
        before, after, made_by, reader = (column[chosen] for column in columns)
        return replace(self, before=before, after=after, made_by=made_by, reader=reader)


def cut(job: JobGraph) -> SegmentedJob | None:
    """Cuts all programs of a job; None where runs of the same operations do not wait for each other alike.

    Nor are jobs cut of more streams than are told apart here.
    """
    if 1 + len(job.streams) > MOST_LANES:
        return None
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
    example, kind = equal_rows(names)
    if any((c.made_by == c.reader).any() for c in cuts):
        return None  # a value comes back into its own segment, in some instance
    name = names[example].tolist()
    spans = [range(begin := n // 2 // rows, begin + n // 2 % rows) for n in name]
    waits = [_waits(its, edges.within(its)) for its in spans]
    rendezvous, members = _meet(job, cuts, key_of)
    first = np.cumsum([0, *(len(c.begin) for c in cuts)])
    settled = _Settled(job, spans, waits)
    ends = [
        (c.waits(_outer(job, c, settled.of(k, c))), k)
        for c, k in zip(cuts, (kind[low:high] for low, high in pairwise(first.tolist())), strict=True)
    ]
    longest = rows  # no segment has as many operations
    inputs = _Ports(longest, len(name), [(k[c.reader], c.offsets[1]) for c, k in ends])
    outputs = _Ports(longest, len(name), [(k[c.made_by], c.offsets[0]) for c, k in ends])
    sends = exchanges.tolist()
    kinds = tuple(
        SegmentKind(
            rows=its,
            rendezvous=bool(n % 2),
            waits=waits[number],
            inputs=inputs.of[number],
            outputs=outputs.of[number],
            exchanges=tuple(row - its.start for row in _within(sends, its.start, its.stop)),
        )
        for number, (n, its) in enumerate(zip(name, spans, strict=True))
    )
    if any(op in kind.waits[op + 1] for kind in kinds for op in kind.exchanges):
        return None  # a receive that waits for its own send: the tasks say what waits for what
    sequences = [
        SegmentSequence(
            kind=k, start=c.start, rendezvous=met, reader=c.reader, into=into, made_by=c.made_by, out=out
        )
        for (c, k), met, into, out in zip(ends, rendezvous, inputs.numbers, outputs.numbers, strict=True)
    ]
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


def _within(rows: list[int], begin: int, end: int) -> list[int]:
    """Those of ascending rows that are in a range."""
    return rows[bisect_left(rows, begin) : bisect_left(rows, end)]


def _cut(job: JobGraph, number: int, edges: Edges, meets: np.ndarray) -> _Cut:
    """One program, cut where its calls begin, and before and after each rendezvous; without waits in segments."""
    calls, rows = job.programs[number].calls, np.flatnonzero(meets)
    starts = np.concatenate([[0], np.cumsum(calls[:, 2] - calls[:, 1])])
    call, which = enumerate_ranges(np.searchsorted(rows, calls[:, 1]), np.searchsorted(rows, calls[:, 2]))
    met = starts[call] + rows[which] - calls[call, 1]
    start = distinct(np.concatenate([starts, met, met + 1]))
    call = np.searchsorted(starts, start[:-1], side="right") - 1
    before, after = edges.of(number, distinct(np.concatenate([rows, rows + 1])))
    order = ascending(before)
    order = order[ascending(after[order])]
    before, after = before[order], after[order]
    return _Cut(
        start=start,
        begin=calls[call, 1] + start[:-1] - starts[call],
        met=np.searchsorted(start, met),
        before=before,
        after=after,
        made_by=np.searchsorted(start, before, side="right") - 1,
        reader=np.searchsorted(start, after, side="right") - 1,
    )


def _waits(rows: range, pairs: list[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """`SegmentKind.waits`, of pairs of rows that wait and are waited for."""
    found: list[list[int]] = [[] for _ in rows]
    for after, before in pairs:
        found[after - rows.start].append(before - rows.start)
    return tuple(map(tuple, found))


class _Settled:
    """For which operations, or later ones of their stream, which lanes wait in their own segment already.

    Args:
        job: the job.
        spans: rows of each kind of segment.
        waits: `SegmentKind.waits` of each.
    """

    def __init__(self, job: JobGraph, spans: list[range], waits: list[tuple[tuple[int, ...], ...]]) -> None:
        self.first = np.cumsum([0, *map(len, spans)])
        self.lanes = np.zeros(int(self.first[-1]), np.int64)
        reader, stream = _reading_lane(job).tolist(), job.ops.stream.tolist()
        for rows, its, first in zip(spans, waits, self.first.tolist(), strict=False):
            lanes = [0] * len(rows)
            for after, of in enumerate(its):
                for before in of:
                    lanes[before] |= 1 << reader[rows[after]]
            later: dict[int, int] = {}
            for op in reversed(range(len(rows))):
                later[stream[rows[op]]] = lanes[op] = lanes[op] | later.get(stream[rows[op]], 0)
            self.lanes[first : first + len(rows)] = lanes

    def of(self, kind: Int64, c: _Cut) -> Int64:
        """Of each wait of a program whose segments are of these kinds, the lanes as bits."""
        return self.lanes[self.first[kind[c.made_by]] + c.offsets[0]]


def _reading_lane(job: JobGraph) -> Int64:
    """The lane on which each row waits: the host's for its own work, else that of its stream."""
    return np.where(job.ops.kind == OpKind.HOST, 0, 1 + job.ops.stream.astype(np.int64))


def _outer(job: JobGraph, c: _Cut, settled: Int64) -> Bools:
    """Which waits count: not those for what the stream has waited for before.

    A stream that once waited for a run waits for nothing before it, on the same stream, ever again.

    Args:
        job: the job.
        c: one of its programs.
        settled: as of `_Settled`.
    """
    lanes, before, after = 1 + len(job.streams), c.before, c.after
    maker, reader = (c.begin[its] + at for its, at in zip((c.made_by, c.reader), c.offsets, strict=True))
    on = _reading_lane(job)[reader]
    pair = (1 + job.ops.stream[maker].astype(np.int64)) * lanes + on
    # For each pair of streams, the latest run that was waited for so far; numbers hold the pair and the position.
    by_pair = ascending(pair)
    span = int(c.start[-1]) + 1
    made = pair[by_pair] * span + before[by_pair]
    latest = np.maximum.accumulate(made)
    # What stands before the first edge of a reader is of earlier readers.
    place = pair[by_pair] * span + after[by_pair]
    begin = np.searchsorted(place, place)
    known = np.where(begin > 0, latest[np.maximum(begin, 1) - 1], NONE)
    kept: Bools = settled >> on & 1 == 0
    kept[by_pair] &= known < made
    return kept


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


UNKNOWN = -(2**63) + 1
"""The end of what has not ended yet."""
MOST_LANES = 62
"""Lanes that are told apart as bits of a number."""
COMPILE_FROM = 2_000_000
"""Steps from which compiled code pays, entries of matrices or operations: loading the compiler takes as long."""


class Stretches(NamedTuple):
    """Segments that follow each other in a program, of all programs one after the other, as columns.

    Attributes:
        bounds: [programs + 1], where those of each program begin.
        program: [stretches].
        first: [stretches], number of the first segment in its program.
        chain: [stretches], number of the chain that they are; -1 for a rendezvous, which is a stretch of its own.
        row: [stretches], row of the first operation.
        rendezvous: [stretches], number of the rendezvous; -1 for a chain.
        entry_at: [stretches + 1], where the entries of each begin; those of a rendezvous are the clocks of the
            host and of its lane, then its input.
        in_at: [stretches + 1], where the inputs of the first segment begin in `in_port`, `in_edge`.
        in_port: number of the input.
        in_edge: number of the edge, of all programs.
        out_at: [stretches + 1], the same of the last segment in `out_port`, `out_edge`.
        out_port: number of the output.
        out_edge: number of the edge.
    """

    bounds: Int32
    program: Int32
    first: Int32
    chain: Int32
    row: Int32
    rendezvous: Int32
    entry_at: Int32
    in_at: Int32
    in_port: Int32
    in_edge: Int32
    out_at: Int32
    out_port: Int32
    out_edge: Int32


class _Chains(NamedTuple):
    """Chains, and the times of rows, as columns.

    Attributes:
        over: constants of all chains, [exits, entries, scenarios] each; those of chain k begin at `over_at[k]`.
        over_at: see `over`.
        lanes: of all chains; those of chain k begin at `lanes_at[k]`.
        lanes_at: [chains + 1].
        inputs: of each chain, entries beside the lanes.
        outputs: of each chain, exits beside the lanes.
        uses: of each chain, its lanes as bits.
        lane: of each row.
        device: [rows, scenarios].
        host: [rows, scenarios].
        members: of each rendezvous, how many take part.
        sizes: lanes, scenarios.
    """

    over: Int64
    over_at: Int64
    lanes: Int64
    lanes_at: Int64
    inputs: Int64
    outputs: Int64
    uses: Int64
    lane: Int64
    device: Int64
    host: Int64
    members: Int64
    sizes: Int64


class _State(NamedTuple):
    """What the loop changes.

    A lane that is at a rendezvous is pending, its clock not known: segments on other lanes go on, and so may the
    host, which only issues.

    Attributes:
        clocks: [programs, lanes, scenarios].
        pending: of each program, lanes that are at a rendezvous, as bits.
        at: of each program, the stretch that is next.
        queue: programs that can go on.
        queued: of each program, whether it is one of them.
        entries: of all stretches (`Stretches.entry_at`), in the first scenario.
        outputs: [edges, scenarios], the end of what is waited for; `UNKNOWN` before.
        begins: [rendezvous, scenarios], when those that have come are ready.
        last: of each rendezvous, the stretch that is ready last in the first scenario; of several the first.
        arrived: of each rendezvous, how many have come.
        head: of each rendezvous, the stretch that came last; -1 for none.
        behind: of each stretch, the one that came before it there.
        entry: [entries, scenarios] of one stretch.
        exit: [exits, scenarios] of one stretch.
    """

    clocks: Int64
    pending: Int64
    at: Int64
    queue: Int64
    queued: Int64
    entries: Int64
    outputs: Int64
    begins: Int64
    last: Int64
    arrived: Int64
    head: Int64
    behind: Int64
    entry: Int64
    exit: Int64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SegmentRun:
    """What the programs did.

    Attributes:
        segments: of the job.
        work: durations.
        stretches: of all programs.
        chains: that they are.
        steps: of the loop that ran them.
        entries: int64, of all stretches (`Stretches.entry_at`), in the first scenario.
        outputs: int64 [edges], the end of what is waited for, in the first scenario.
        clocks: int64 [programs, lanes, scenarios], at the end.
        begins: int64 [rendezvous], when each started, in the first scenario.
        last: int64 [rendezvous], the stretch that was ready last, in the first scenario; of several the first.
    """

    segments: SegmentedJob
    work: RowTimes
    stretches: Stretches
    chains: tuple[SegmentChain, ...]
    steps: int
    entries: Int64
    outputs: Int64
    clocks: Int64
    begins: Int64
    last: Int64

    def maker(self, program: int, edge: int) -> tuple[int, int]:
        """The segment that an edge of a program, by its number in all, waits for, and the number of its output."""
        sequence = self.segments.sequences[program]
        here = edge - sum(len(its.reader) for its in self.segments.sequences[:program])
        return int(sequence.made_by[here]), int(sequence.out[here])

    @property
    def ends(self) -> Int64:
        """When the last task of each scenario ends, picoseconds."""
        latest: Int64 = self.clocks.max(axis=(0, 1))
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
    """Runs all programs; None where segments wait for each other in a circle, which their tasks may not do.

    Nor are programs run of more stretches than 32 bits count.
    """
    if (found := _stretches(segments, work)) is None:
        return None
    stretches, chains = found
    tables = _chain_columns(segments, work, chains)
    state = _begin(segments, stretches, tables)
    sizes = np.diff(tables.over_at)
    steps = int(np.where(stretches.chain == NONE, tables.sizes[1], np.append(sizes, 0)[stretches.chain]).sum())
    if steps >= COMPILE_FROM:
        compiled(_send_through, _told, _come, _meet_all, _go)(stretches, tables, state)
    else:
        interpreted(_send_through, stretches, tables, outputs=state)
    if (state.at < stretches.bounds[1:]).any() or state.pending.any():
        return None
    lanes, scenarios = tables.sizes
    return SegmentRun(
        segments=segments,
        work=work,
        stretches=stretches,
        chains=chains,
        steps=steps,
        entries=state.entries,
        outputs=state.outputs[::scenarios].copy(),
        clocks=state.clocks.reshape(-1, lanes, scenarios),
        begins=state.begins[::scenarios].copy(),
        last=state.last,
    )


def _stretches(segments: SegmentedJob, work: RowTimes) -> tuple[Stretches, tuple[SegmentChain, ...]] | None:
    """All stretches, and their chains; None where they are too many.

    Chains that stand once do not pay: their segments go one by one.
    """
    sequences = segments.sequences
    first_of = np.cumsum([0, *(len(its.kind) for its in sequences)])
    kind = np.concatenate([np.zeros(0, np.int64), *(its.kind for its in sequences)])
    meets = np.array([its.rendezvous for its in segments.kinds] or [False])
    begin = np.concatenate([np.zeros(0, np.int64)] + [
        at + _bounds(its, meets) for its, at in zip(sequences, first_of, strict=False)
    ])  # fmt: skip
    run, often = _runs(kind, begin)
    # A run that stands once becomes its segments.
    length = np.diff(begin, append=len(kind))
    alone = (often[run] == 1) & (length > 1)
    split = np.repeat(alone, length)
    split[begin] = True
    first = np.flatnonzero(split)
    of_run = np.where(alone, NONE, run)[np.searchsorted(begin, first, side="right") - 1]
    chain, chains = _chains(segments, work, kind, first, of_run, meets)
    bounds = np.searchsorted(first, first_of)
    program = np.repeat(np.arange(len(sequences)), np.diff(bounds))
    inputs, outputs = _edges(sequences, first_of, first)
    entries = np.array([len(its.lanes) + its.inputs for its in chains] + [3], np.int64)[chain]
    if max(int(entries.sum()), len(inputs[2])) > np.iinfo(np.int32).max:
        return None
    rows = np.array([its.rows.start for its in segments.kinds] or [0], np.int64)
    rendezvous = np.concatenate([np.zeros(0, np.int64), *(its.rendezvous for its in sequences)])
    columns: dict[str, np.ndarray] = {
        "bounds": bounds, "program": program, "first": first - first_of[program], "chain": chain,
        "row": rows[kind[first]], "rendezvous": rendezvous[first], "entry_at": np.cumsum(np.append(0, entries)),
        "in_at": inputs[0], "in_port": inputs[1], "in_edge": inputs[2],
        "out_at": outputs[0], "out_port": outputs[1], "out_edge": outputs[2],
    }  # fmt: skip
    return Stretches(**{name: array(column, np.int32) for name, column in columns.items()}), chains


def _bounds(sequence: SegmentSequence, meets: Bools) -> Int64:
    """Where segments of a program begin that are cut off: rendezvous, what waits, and after what is waited for."""
    cuts = meets[sequence.kind]
    cuts[1:] |= cuts[:-1]
    cuts[sequence.reader] = True
    after = sequence.made_by + 1
    cuts[after[after < len(cuts)]] = True
    cuts[:1] = True
    return np.flatnonzero(cuts)


def _runs(kind: Int64, begin: Int64) -> tuple[Int64, Int64]:
    """A number for each run of segments, equal ones alike, and how often each number stands."""
    length = np.diff(begin, append=len(kind))
    run, count = np.empty(len(begin), np.int64), 0
    for size in distinct(length).tolist():
        mine = np.flatnonzero(length == size)
        example, number = equal_rows(kind[begin[mine, None] + np.arange(size)])
        run[mine] = count + number
        count += len(example)
    return run, np.bincount(run, minlength=count)


def _chains(
    segments: SegmentedJob, work: RowTimes, kind: Int64, first: Int64, run: Int64, meets: Bools
) -> tuple[Int64, tuple[SegmentChain, ...]]:
    """The chain of every stretch, -1 for a rendezvous; and the chains.

    Args:
        segments: of the job.
        work: durations.
        kind: of each segment.
        first: of each stretch, its first segment.
        run: of each stretch, its number as of `_runs`; -1 for a segment on its own.
        meets: of each kind, whether it is a rendezvous.
    """
    matrices = [None if its.rendezvous else transfer_matrix(its, work) for its in segments.kinds]
    # One name for all that go through the same matrices: a run's, or a kind's.
    length = np.diff(first, append=len(kind))
    one = length == 1
    name = np.where(one, kind[first], len(segments.kinds) + run)
    example, chain = equal_rows(name)
    number = np.full(len(example), NONE, np.int64)
    chains: list[SegmentChain] = []
    for which, at in enumerate(example.tolist()):
        its = [matrices[k] for k in kind[first[at] : first[at] + length[at]].tolist()]
        if its[0] is not None:
            number[which] = len(chains)
            chains.append(SegmentChain(tuple(matrix for matrix in its if matrix is not None)))
    return number[chain], tuple(chains)


_Ends = tuple[Int64, Int64, Int64]


def _edges(sequences: Sequence[SegmentSequence], first_of: Int64, first: Int64) -> tuple[_Ends, _Ends]:
    """Where the inputs of each stretch begin, with ports and edges; and the outputs."""
    none = [np.zeros(0, np.int64)]
    reader = np.concatenate(none + [its.reader + at for its, at in zip(sequences, first_of, strict=False)])
    made_by = np.concatenate(none + [its.made_by + at for its, at in zip(sequences, first_of, strict=False)])
    ports = (
        np.concatenate(none + [its.into for its in sequences]),
        np.concatenate(none + [i.out for i in sequences]),
    )
    found = []
    for segment, port in zip((reader, made_by), ports, strict=True):
        stretch = np.searchsorted(first, segment, side="right") - 1
        edge = ascending(stretch)
        found.append((np.searchsorted(stretch[edge], np.arange(len(first) + 1)), port[edge], edge))
    return found[0], found[1]


def _chain_columns(segments: SegmentedJob, work: RowTimes, chains: Sequence[SegmentChain]) -> _Chains:
    none, lengths = np.zeros(0, np.int64), [len(its.lanes) for its in chains]
    columns = (
        np.concatenate([none, *(its.over.ravel() for its in chains)]),
        np.cumsum([0, *(its.over.size for its in chains)]),
        np.array([lane for its in chains for lane in its.lanes], np.int64),
        np.cumsum([0, *lengths]),
        np.array([its.inputs for its in chains], np.int64),
        np.array([len(its.over) - length for its, length in zip(chains, lengths, strict=True)], np.int64),
        np.array([its.uses for its in chains], np.int64),
        np.array(work.lane, np.int64),
        work.device.ravel(),
        work.host.ravel(),
        np.array(segments.members, np.int64),
        np.array([1 + len(segments.job.streams), work.device.shape[1]], np.int64),
    )
    return _Chains(*(array(column, np.int64) for column in columns))


def _begin(segments: SegmentedJob, stretches: Stretches, chains: _Chains) -> _State:
    lanes, scenarios = chains.sizes.tolist()
    programs, met = len(segments.sequences), len(segments.members)
    entries = np.diff(chains.lanes_at) + chains.inputs
    exits = np.diff(chains.lanes_at) + chains.outputs
    return _State(
        clocks=np.zeros(programs * lanes * scenarios, np.int64),
        pending=np.zeros(programs, np.int64),
        at=stretches.bounds[:-1].astype(np.int64),
        queue=np.arange(programs),
        queued=np.ones(programs, np.int64),
        entries=np.zeros(int(stretches.entry_at[-1]), np.int64),
        outputs=np.full(len(stretches.in_edge) * scenarios, UNKNOWN),
        begins=np.full(met * scenarios, NEVER),
        last=np.full(met, NONE, np.int64),
        arrived=np.zeros(met, np.int64),
        head=np.full(met, NONE, np.int64),
        behind=np.full(len(stretches.chain), NONE, np.int64),
        entry=np.zeros(max(1, int(entries.max(initial=0))) * scenarios, np.int64),
        exit=np.zeros(max(1, int(exits.max(initial=0))) * scenarios, np.int64),
    )


# The loop, which is compiled where there is much to do: clocks are sent through the stretches.


def _told(stretches: Stretches, chains: _Chains, state: _State, stretch: int, first: int, inputs: int) -> bool:
    """Writes when the inputs of a stretch ended, from an entry on; whether all are known."""
    scenarios = chains.sizes[1]
    for each in range(first * scenarios, (first + inputs) * scenarios):
        state.entry[each] = NEVER
    for its in range(stretches.in_at[stretch], stretches.in_at[stretch + 1]):
        into = (first + stretches.in_port[its]) * scenarios
        out = stretches.in_edge[its] * scenarios
        if state.outputs[out] == UNKNOWN:
            return False
        for each in range(scenarios):
            state.entry[into + each] = max(state.entry[into + each], state.outputs[out + each])
    return True


def _come(stretches: Stretches, chains: _Chains, state: _State, program: int, stretch: int) -> bool:
    """A program comes to a rendezvous; whether it can."""
    scenarios, row = chains.sizes[1], stretches.row[stretch]
    lane, meeting = chains.lane[row], stretches.rendezvous[stretch]
    if state.pending[program] & (1 | 1 << lane) or not _told(stretches, chains, state, stretch, 0, 1):
        return False
    host = program * chains.sizes[0] * scenarios
    mine, entry = host + lane * scenarios, stretches.entry_at[stretch]
    state.entries[entry] = state.clocks[host]
    state.entries[entry + 1] = state.clocks[mine]
    state.entries[entry + 2] = state.entry[0]
    for each in range(scenarios):
        state.clocks[host + each] += chains.host[row * scenarios + each]
        ready = max(state.clocks[host + each], state.clocks[mine + each], state.entry[each])
        before = state.begins[meeting * scenarios + each]
        # In the first scenario, which is the step: of those that are ready last, the first in order.
        if each == 0 and (
            ready > before or state.last[meeting] < 0 or (ready == before and stretch < state.last[meeting])
        ):
            state.last[meeting] = stretch
        state.begins[meeting * scenarios + each] = max(before, ready)
    state.pending[program] |= 1 << lane
    state.behind[stretch] = state.head[meeting]
    state.head[meeting] = stretch
    state.arrived[meeting] += 1
    return True


def _meet_all(stretches: Stretches, chains: _Chains, state: _State, meeting: int, queue: int) -> int:
    """All have come to a rendezvous and go on from it; returns how many programs are in the queue."""
    scenarios, its = chains.sizes[1], state.head[meeting]
    while its >= 0:
        program, row = stretches.program[its], stretches.row[its]
        lane = chains.lane[row]
        for each in range(scenarios):
            end = state.begins[meeting * scenarios + each] + chains.device[row * scenarios + each]
            state.clocks[(program * chains.sizes[0] + lane) * scenarios + each] = end
            for out in range(stretches.out_at[its], stretches.out_at[its + 1]):
                state.outputs[stretches.out_edge[out] * scenarios + each] = end
        state.pending[program] &= ~(1 << lane)
        if not state.queued[program]:
            state.queued[program] = 1
            state.queue[queue] = program
            queue += 1
        its = state.behind[its]
    return queue


def _go(stretches: Stretches, chains: _Chains, state: _State, program: int, stretch: int) -> bool:
    """A program goes through a chain, its clocks as a vector of max-plus algebra; whether it can."""
    chain, scenarios = stretches.chain[stretch], chains.sizes[1]
    if state.pending[program] & chains.uses[chain]:
        return False
    first, own = chains.lanes_at[chain], program * chains.sizes[0]
    lanes, inputs = chains.lanes_at[chain + 1] - first, chains.inputs[chain]
    if not _told(stretches, chains, state, stretch, lanes, inputs):
        return False
    for lane in range(lanes):
        clock = (own + chains.lanes[first + lane]) * scenarios
        for each in range(scenarios):
            state.entry[lane * scenarios + each] = state.clocks[clock + each]
    for entry in range(lanes + inputs):
        state.entries[stretches.entry_at[stretch] + entry] = state.entry[entry * scenarios]
    over, at, into, out_of = chains.over, chains.over_at[chain], state.entry, state.exit
    width = (lanes + inputs) * scenarios
    for out in range((lanes + chains.outputs[chain]) * scenarios):
        each = out % scenarios
        latest = over[at + each] + into[each]
        for entry in range(scenarios + each, width, scenarios):
            ready = over[at + entry] + into[entry]
            if ready > latest:
                latest = ready
        out_of[out] = latest
        if each == scenarios - 1:
            at += width
    for lane in range(lanes):
        clock = (own + chains.lanes[first + lane]) * scenarios
        for each in range(scenarios):
            state.clocks[clock + each] = out_of[lane * scenarios + each]
    for its in range(stretches.out_at[stretch], stretches.out_at[stretch + 1]):
        for each in range(scenarios):
            end = state.exit[(lanes + stretches.out_port[its]) * scenarios + each]
            state.outputs[stretches.out_edge[its] * scenarios + each] = end
    return True


def _send_through(stretches: Stretches, chains: _Chains, state: _State) -> None:
    """Sends the clocks of all programs through their stretches, each as far as it gets, until none moves."""
    queue = len(state.queue)
    while queue > 0:
        queue -= 1
        program = state.queue[queue]
        state.queued[program] = 0
        while state.at[program] < stretches.bounds[program + 1]:
            stretch = state.at[program]
            if stretches.chain[stretch] >= 0:
                if not _go(stretches, chains, state, program, stretch):
                    break
            else:
                if not _come(stretches, chains, state, program, stretch):
                    break
                meeting = stretches.rendezvous[stretch]
                if state.arrived[meeting] == chains.members[meeting]:
                    queue = _meet_all(stretches, chains, state, meeting, queue)
            state.at[program] = stretch + 1


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
    its = run.stretches
    mine = np.arange(its.bounds[program], its.bounds[program + 1])
    mine = mine[its.chain[mine] == NONE]
    here = sequence.start[its.first[mine]]
    op[here] = its.row[mine]
    start[here] = np.stack([run.entries[its.entry_at[mine]], run.begins[its.rendezvous[mine]]], axis=1)
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
        programs=tuple(map(job.role_name, range(len(job.programs)))),
        streams=job.streams,
    )


def _by_matrix(run: SegmentRun, program: int) -> Iterator[tuple[TransferMatrix, Int64, Int64]]:
    """Numbers of segments that are alike, and int64 [segments, entries] with which they begin."""
    its = run.stretches
    begin, end = its.bounds[program : program + 2].tolist()
    chains = its.chain[begin:end]
    order = begin + ascending(chains.astype(np.int64))
    bounds = np.searchsorted(its.chain[order], np.arange(len(run.chains) + 1))
    found: dict[TransferMatrix, list[tuple[Int64, Int64]]] = {}
    for number in distinct(chains[chains != NONE]).tolist():
        chain, mine = run.chains[number], order[bounds[number] : bounds[number + 1]]
        first = its.first[mine]
        entry = run.entries[its.entry_at[mine, None] + np.arange(len(chain.lanes) + chain.inputs)]
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
        self.kind_of = [sequence.kind for sequence in run.segments.sequences]
        self.bounds: list[int] = run.stretches.bounds.tolist()
        self.firsts = cache(self._firsts)
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

    def _firsts(self, program: int) -> list[int]:
        """The first segment of each stretch, as a list: a path goes through few programs, and often."""
        firsts: list[int] = self.run.stretches.first[slice(*self.bounds[program : program + 2])].tolist()
        return firsts

    def _stretch(self, program: int, segment: int) -> int:
        return self.bounds[program] + bisect_right(self.firsts(program), segment) - 1

    def _chain(self, stretch: int) -> SegmentChain | None:
        number = int(self.run.stretches.chain[stretch])
        return None if number == NONE else self.run.chains[number]

    def _matrix(self, program: int, segment: int) -> TransferMatrix | None:
        stretch = self._stretch(program, segment)
        chain = self._chain(stretch)
        return chain.matrices[segment - int(self.run.stretches.first[stretch])] if chain else None

    def _entry(self, program: int, segment: int) -> Int64:
        """Clocks with which a segment begins."""
        stretch = self._stretch(program, segment)
        its, chain = self.run.stretches, self._chain(stretch)
        entry = self.run.entries[its.entry_at[stretch] : its.entry_at[stretch + 1]]
        if chain is None or len(chain.matrices) == 1:
            return entry
        into: Int64 = (chain.before[segment - int(its.first[stretch])] + entry).max(axis=1)
        return into

    def _ends(self, program: int, segment: int) -> _Times:
        its, rows = self._matrix(program, segment), self.run.segments.kinds[self.kind_of[program][segment]].rows
        if its is None:
            met = int(self.run.segments.sequences[program].rendezvous[segment])
            starts = [[int(self._entry(program, segment)[0]), int(self.run.begins[met])]]
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
        its = self.run.stretches
        stretch = self._stretch(program, segment)
        here = np.arange(its.in_at[stretch], its.in_at[stretch + 1])
        edges = its.in_edge[here[its.in_port[here] == in_port]]
        edge = int(edges[self.run.outputs[edges].argmax()])
        maker, out_port = self.run.maker(program, edge)
        return program, maker, self.run.segments.kinds[self.kind_of[program][maker]].outputs[out_port], DEVICE

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
        last = int(self.run.last[int(self.run.segments.sequences[program].rendezvous[segment])])
        program, segment = int(self.run.stretches.program[last]), int(self.run.stretches.first[last])
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
