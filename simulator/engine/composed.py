"""The step of a pipeline whose stages and micro-batches are mostly alike, put together from those that differ.

A pass of a stage (forward of one micro-batch, say) does to the clocks of its lanes what `segments` says: it sends
them through a row of max-plus matrices, and waits at messages. Stages that do the same on other layers, and all
micro-batches between the first and the last, have the same rows. So these are cut and worked out once, of a job in
which each distinct pass stands once (`Sample`), and a step is a list of them for every stage, in the order of its
schedule: only clocks go through all of them, and messages keep the times that the places of their stages say.

What cannot be put together so, as a pass that waits for one of another micro-batch, is refused (`NotAlike`), and
then the whole job has to be simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from echograph.ir.columns import NONE, Bools, Int64
from echograph.ir.graph import JobGraph
from echograph.ir.passes.rewrite import PassLabel
from echograph.ir.structure import structure
from echograph.ir.types import OpKind
from echograph.simulator.engine.machine_code import compiled
from echograph.simulator.engine.segments import (
    LONGEST_PS,
    NEVER,
    UNKNOWN,
    RowTimes,
    SegmentedJob,
    SegmentKind,
    SegmentSequence,
    cut,
    work_of,
)
from echograph.simulator.groups import occurrences

MESSAGES = (OpKind.SEND, OpKind.RECV)


class NotAlike(Exception):
    """A step is not what its distinct passes say; the reason, for tests."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """A job of the passes that differ, and how a step is made of them.

    Attributes:
        job: a program for each distinct stage, over as many micro-batches as differ, pass by pass.
        labels: for each program, the pass that each of its calls is of.
        stand_for: for every stage of the step, the program of the stage that stands for it.
        orders: for every stage, its passes in order.
        micro_batches: of the step.
        chunks: of each stage.
        update: the label of what is done once all passes are.
    """

    job: JobGraph
    labels: Sequence[Sequence[PassLabel]]
    stand_for: Sequence[int]
    orders: Sequence[PassOrder]
    micro_batches: int
    chunks: int
    update: PassLabel


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassOrder:
    """The passes of a stage in order, as columns.

    Attributes:
        kinds: names of the kinds of passes.
        kind: int64, number of each pass's kind.
        micro_batch: int64.
        chunk: int64.
    """

    kinds: tuple[str, ...]
    kind: Int64
    micro_batch: Int64
    chunk: Int64

    @classmethod
    def of(cls, passes: Sequence[PassLabel]) -> PassOrder:
        """The columns of passes."""
        kinds = tuple(dict.fromkeys(kind for kind, _, _ in passes))
        columns = np.array([(kinds.index(kind), m, chunk) for kind, m, chunk in passes], np.int64)
        kind, micro_batch, chunk = columns.reshape(-1, 3).T
        return cls(kinds=kinds, kind=kind, micro_batch=micro_batch, chunk=chunk)


MessageTime = Callable[[int, int], int]
"""Picoseconds of a message, by its row of the operation table and its stage."""


MOST_CUTS = 256
"""What so many jobs are cut into is kept, some hundred kilobytes each."""
KnownCuts = dict[Hashable, SegmentedJob | None]
"""What jobs are cut into, by what that depends on."""


def step_ps(sample: Sample, device: Int64, host: Int64, message_ps: MessageTime, known: KnownCuts) -> int:
    """When the step ends, picoseconds.

    Args:
        sample: the passes that differ, and their order.
        device: int64 [rows], picoseconds on the device.
        host: int64 [rows], picoseconds that the host takes.
        message_ps: what a message takes.
        known: what samples before were cut into; gets this one's.

    Raises:
        NotAlike: the step cannot be put together from the sample.
    """
    like = _like(sample.job)
    if like not in known:
        if len(known) >= MOST_CUTS:
            del known[next(iter(known))]
        known[like] = cut(sample.job)
    segments = known[like]
    if segments is None:
        raise NotAlike("runs of the same operations do not wait alike")
    _check_length(sample, device, host)
    work = work_of(sample.job, device[:, None], host[:, None])
    return _Step(sample, segments, work, message_ps).run()


def _like(job: JobGraph) -> Hashable:
    """What a job is cut by: its structure, and how far messages go around in their groups."""
    messages = np.isin(job.ops.kind, MESSAGES)
    groups = np.unique(job.ops.group[messages]).tolist()
    return structure(job), *(job.group_size(job.groups[number]) for number in groups)


def _check_length(sample: Sample, device: Int64, host: Int64) -> None:
    """Refuses a step in which the sums of `NEVER` and a time would not stay apart from times."""
    work = device.astype(np.float64) + host
    longest = max(float(np.dot(sample.job.run_counts(n), work)) for n in range(len(sample.job.programs)))
    if not longest * sample.micro_batches * len(sample.stand_for) < LONGEST_PS:
        raise NotAlike("the step may be too long for its constants")


# -- the passes that differ ---------------------------------------------------------------------------------------


class _Matrices:
    """The constants of segments, written one after the other; equal ones once.

    Args:
        segments: of the sample.
        work: durations of its rows.

    Attributes:
        columns: `Tables.over` and `Tables.lanes`, and of each matrix what `Tables` says of it.
    """

    def __init__(self, segments: SegmentedJob, work: RowTimes) -> None:
        self.kinds = segments.kinds
        self.rows = np.stack([np.array(work.lane), np.array(work.hosts), work.host[:, 0], work.device[:, 0]])
        self.over: list[Int64] = []
        self.lanes: list[tuple[int, ...]] = []
        self.ports: list[tuple[int, int]] = []
        self.alike: dict[object, int] = {}
        self.products: dict[tuple[int, ...], int] = {}
        self.of = np.full(len(segments.kinds), NONE, np.int64)

    def of_kinds(self, kinds: Int64) -> Int64:
        """The matrices of kinds of segments: one for all that take as long, and wait alike."""
        for number in np.unique(kinds[self.of[kinds] == NONE]).tolist():
            kind = self.kinds[number]
            rows = np.ascontiguousarray(self.rows[:, kind.rows.start : kind.rows.stop])
            key = rows.tobytes(), kind.waits, kind.inputs, kind.outputs, kind.exchanges
            if key not in self.alike:
                self.alike[key] = self._written(kind, rows)
            self.of[number] = self.alike[key]
        return self.of[kinds]

    def _written(self, kind: SegmentKind, rows: Int64) -> int:
        """Works a matrix out (`segments.transfer_matrix`)."""
        lanes, own = np.unique(np.append(rows[0], 0), return_inverse=True)
        inputs, outputs, count = len(kind.inputs), len(kind.outputs), len(kind.rows)
        port = np.full(count, NONE, np.int64)
        port[list(kind.inputs)] = len(lanes) + np.arange(inputs)
        waits_at = np.cumsum([0, *map(len, kind.waits)])
        waits = np.array([op for its in kind.waits for op in its], np.int64)
        over = np.empty((len(lanes) + outputs, len(lanes) + inputs), np.int64)
        ends, clocks = np.empty(count, np.int64), np.empty(len(lanes), np.int64)
        exits, pairs = np.array(kind.outputs, np.int64), np.zeros(count, np.bool_)
        pairs[list(kind.exchanges)] = True
        loop = compiled(_constants)
        loop(own.astype(np.int64), rows, waits_at, waits, port, pairs, exits, ends, clocks, over)
        return self._add(over, tuple(lanes.tolist()), inputs, outputs)

    def product(self, matrices: tuple[int, ...]) -> int:
        """The matrix of segments that follow each other, none of which has inputs or outputs."""
        if matrices not in self.products:
            lanes = sorted({lane for number in {*matrices} for lane in self.lanes[number]})
            numbers = sorted({*matrices})
            at = {number: place for place, number in enumerate(numbers)}
            own = [np.searchsorted(lanes, self.lanes[number]) for number in numbers]
            clocks = np.full((len(lanes), len(lanes)), NEVER)
            np.fill_diagonal(clocks, 0)
            loop = compiled(_multiply)
            loop(
                np.array([at[number] for number in matrices], np.int64),
                np.concatenate([self.over[number].ravel() for number in numbers]),
                np.cumsum([0, *(self.over[number].size for number in numbers)]),
                np.cumsum([0, *(len(its) for its in own)]),
                np.concatenate(own),
                np.empty(len(lanes), np.int64),
                clocks,
            )
            self.products[matrices] = self._add(clocks, tuple(lanes), 0, 0)
        return self.products[matrices]

    def _add(self, over: Int64, lanes: tuple[int, ...], inputs: int, outputs: int) -> int:
        self.over.append(over)
        self.lanes.append(lanes)
        self.ports.append((inputs, outputs))
        return len(self.over) - 1

    def columns(self) -> dict[str, Int64]:
        """What `Tables` says of matrices."""
        ports = np.array(self.ports, np.int64).reshape(-1, 2)
        lengths = np.array([len(its) for its in self.lanes], np.int64)
        none = np.zeros(0, np.int64)
        return {
            "over": np.concatenate([none, *(its.ravel() for its in self.over)]),
            "over_at": np.cumsum([0, *(its.size for its in self.over)]),
            "lanes": np.array([lane for its in self.lanes for lane in its], np.int64),
            "lanes_at": np.cumsum(lengths) - lengths,
            "lanes_of": lengths,
            "inputs_of": ports[:, 0].copy(),
            "outputs_of": ports[:, 1].copy(),
            "uses": np.array([sum(1 << lane for lane in its) for its in self.lanes], np.int64),
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pieces:
    """The passes of a program of the sample, in the order in which it runs them, made of stretches.

    A stretch is segments that go through one matrix, or one rendezvous.

    Attributes:
        labels: of each pass.
        at: int64 [passes + 1], where its stretches begin.
        slots: int64 [passes], how many outputs others wait for.
        piece: int64 [stretches], the pass.
        matrix: int64 [stretches]; -1 for a rendezvous.
        row: int64 [stretches], row of the first operation.
        slot: int64 [stretches], number of its first output among those of its pass; -1 where it has none.
        reader: int64 [edges], the stretch that waits, ascending.
        port: int64 [edges], number of its input.
        of: int64 [edges], the pass that is waited for.
        of_slot: int64 [edges], number of the output among those of that pass.
    """

    labels: list[PassLabel]
    at: Int64
    slots: Int64
    piece: Int64
    matrix: Int64
    row: Int64
    slot: Int64
    reader: Int64
    port: Int64
    of: Int64
    of_slot: Int64


def _pieces(sample: Sample, segments: SegmentedJob, matrices: _Matrices, number: int) -> _Pieces:
    """The passes of a program.

    Raises:
        NotAlike: a pass does not run in one go, or waits for one of another micro-batch.
    """
    sequence, kinds = segments.sequences[number], segments.kinds
    label, labels = _labels(sample, number, sequence)
    begins = np.diff(label, prepend=NONE) != 0
    piece = np.cumsum(begins) - 1
    run = label[begins].tolist()
    if len(run) > len({*run}):
        again = next(its for at, its in enumerate(run) if its in run[:at])
        raise NotAlike(f"pass {labels[again]} does not run in one go")
    of_pass = [labels[its] for its in run]
    meets = np.array([kind.rendezvous for kind in kinds], np.bool_)[sequence.kind]
    first = _bounds(sample, segments, sequence, meets, begins, np.array([its[1] for its in of_pass])[piece])
    end = np.append(first, len(piece))[1:]
    outputs = np.array([len(kind.outputs) for kind in kinds], np.int64)[sequence.kind[end - 1]]
    of_stretch = piece[first]
    at = np.searchsorted(of_stretch, np.arange(len(run) + 1))
    before = np.append(0, np.cumsum(outputs))
    offset = before[:-1] - before[at[of_stretch]]
    made_by = np.searchsorted(first, sequence.made_by, side="right") - 1
    reader = np.searchsorted(first, sequence.reader, side="right") - 1
    _check_waits(sample, of_pass, of_stretch[reader], of_stretch[made_by])
    return _Pieces(
        labels=of_pass,
        at=at,
        slots=before[at[1:]] - before[at[:-1]],
        piece=of_stretch,
        matrix=_matrices_of(matrices, sequence.kind, first, end, meets[first]),
        row=np.array([kind.rows.start for kind in kinds], np.int64)[sequence.kind[first]],
        slot=np.where(outputs > 0, offset, NONE),
        reader=reader,
        port=sequence.into,
        of=of_stretch[made_by],
        of_slot=offset[made_by] + sequence.out,
    )


def _labels(sample: Sample, number: int, sequence: SegmentSequence) -> tuple[Int64, list[PassLabel]]:
    """Of each segment of a program the number of its label, and the labels."""
    calls = sample.job.programs[number].calls
    numbers: dict[PassLabel, int] = {}
    of_call = [numbers.setdefault(label, len(numbers)) for label in sample.labels[number]]
    ends = np.cumsum(calls[:, 2] - calls[:, 1])
    call = np.searchsorted(ends, sequence.start[:-1], side="right")
    return np.array(of_call, np.int64)[call], list(numbers)


def _bounds(
    sample: Sample,
    segments: SegmentedJob,
    sequence: SegmentSequence,
    meets: Bools,
    begins: Bools,
    micro_batch: Int64,
) -> Int64:
    """Where stretches begin: at rendezvous, at what waits and after what is waited for, and with each pass."""
    # An output that nobody waits for is none of the stretch's, so what has outputs ends one always.
    has = np.array([bool(kind.outputs or kind.inputs) for kind in segments.kinds], np.bool_)[sequence.kind]
    cuts = meets | has
    cuts[1:] |= cuts[:-1]
    # Passes that run once or twice are quicker sent through their segments than through a product of them.
    often = sample.micro_batches > ONCE
    return np.flatnonzero(cuts | begins | (micro_batch != 1) | (not often))


def _check_waits(sample: Sample, labels: Sequence[PassLabel], reader: Int64, of: Int64) -> None:
    """Refuses a pass that does not wait alike in every micro-batch."""
    last = min(sample.micro_batches, 3) - 1
    of_micro_batch = np.array([label[1] for label in labels], np.int64)
    waits_in = np.array([last if label == sample.update else label[1] for label in labels], np.int64)
    bad = np.flatnonzero((of != reader) & (of_micro_batch[of] != waits_in[reader]))
    if len(bad):
        raise NotAlike(f"pass {labels[reader[bad[0]]]} waits for pass {labels[of[bad[0]]]}")


def _matrices_of(matrices: _Matrices, kind: Int64, first: Int64, end: Int64, meets: Bools) -> Int64:
    """The matrix of every stretch; -1 for a rendezvous."""
    found = np.full(len(first), NONE, np.int64)
    alone = ~meets & (end - first == 1)
    found[alone] = matrices.of_kinds(kind[first[alone]])
    for at in np.flatnonzero(~meets & ~alone).tolist():
        its = matrices.of_kinds(kind[first[at] : end[at]])
        found[at] = matrices.product(tuple(its.tolist()))
    return found


ONCE = 8
"""Up to so many micro-batches, passes are not worth a product of their matrices."""


def _constants(
    lane: Int64, rows: Int64, waits_at: Int64, waits: Int64, port: Int64, pairs: Bools, exits: Int64, ends: Int64,
    clocks: Int64, over: Int64,
) -> None:  # fmt: skip
    """The constants of a segment from each of its entries: clocks that begin there alone, sent through it."""
    lanes = len(clocks)
    for entry in range(over.shape[1]):
        for each in range(lanes):
            clocks[each] = 0 if each == entry else NEVER
        for op in range(len(port)):
            ready, told = clocks[0], NEVER
            for at in range(waits_at[op], waits_at[op + 1]):
                told = max(told, ends[waits[at]])
            if port[op] == entry:
                told = max(told, 0)
            if rows[1, op]:
                ready = max(ready, told)
            clocks[0] = ready + rows[2, op]
            ready = max(clocks[lane[op]], clocks[0])
            if not rows[1, op]:
                ready = max(ready, told)
            if op > 0 and pairs[op - 1]:
                ready = max(ready, ends[op - 1])
                ends[op - 1] = clocks[lane[op - 1]] = ready + rows[3, op - 1]
            # A send starts with the receive behind it: till then, this is when it is ready.
            ends[op] = ready
            if not pairs[op]:
                ends[op] = clocks[lane[op]] = ready + rows[3, op]
        for each in range(lanes):
            over[each, entry] = max(clocks[each], NEVER)
        for each in range(len(exits)):
            over[lanes + each, entry] = max(ends[exits[each]], NEVER)


def _multiply(
    numbers: Int64, over: Int64, over_at: Int64, lanes_at: Int64, lanes: Int64, after: Int64, clocks: Int64
) -> None:
    """Sends the identity through matrices that have lanes alone."""
    for entry in range(clocks.shape[1]):
        for number in numbers:
            first, at = lanes_at[number], over_at[number]
            size = lanes_at[number + 1] - first
            for out in range(size):
                latest = NEVER
                for each in range(size):
                    latest = max(latest, over[at + out * size + each] + clocks[lanes[first + each], entry])
                after[out] = latest
            for out in range(size):
                clocks[lanes[first + out], entry] = after[out]


# -- a step of them -----------------------------------------------------------------------------------------------


class Tables(NamedTuple):
    """What the loop reads, as columns.

    Attributes:
        over: constants of all matrices, row by row; those of matrix k begin at `over_at[k]`.
        over_at: see `over`.
        lanes: of all matrices; those of matrix k begin at `lanes_at[k]`, and are `lanes_of[k]`.
        lanes_at: see `lanes`.
        lanes_of: see `lanes`.
        inputs_of: of each matrix, entries beside the lanes.
        outputs_of: of each matrix, exits beside the lanes.
        uses: of each matrix, its lanes as bits.
        matrix: of each stretch, its matrix; -1 for a rendezvous.
        lane: of each rendezvous.
        host: of each rendezvous, what issuing takes.
        meets: of each rendezvous, `2 line` of a message in the stage that stands for others, or `2 number + 1`.
        slot: of each stretch, number of its first output in its pass; -1 where it has none.
        edges_at: where the inputs of each stretch begin in `edge_port`, `edge_of`, `edge_slot`.
        edge_port: number of the input.
        edge_of: name of the pass whose output it is; -1 for the same pass.
        edge_slot: number of the output in that pass.
        piece_at: where the stretches of each piece begin.
        passes_at: where the passes of each stage begin in `piece`, `micro_batch`, `base`.
        piece: of each pass.
        micro_batch: of each pass.
        base: first slot of the outputs of each pass.
        offset: [stages, names, micro-batches], the same by name of the pass.
        takes: [stages, stretches], what each rendezvous takes there.
        shift: of each stage, how far its lines are from those of the stage that stands for it.
        members: of each rendezvous, how many take part.
        sizes: names of passes, micro-batches, stretches, lines.
    """

    over: Int64
    over_at: Int64
    lanes: Int64
    lanes_at: Int64
    lanes_of: Int64
    inputs_of: Int64
    outputs_of: Int64
    uses: Int64
    matrix: Int64
    lane: Int64
    host: Int64
    meets: Int64
    slot: Int64
    edges_at: Int64
    edge_port: Int64
    edge_of: Int64
    edge_slot: Int64
    piece_at: Int64
    passes_at: Int64
    piece: Int64
    micro_batch: Int64
    base: Int64
    offset: Int64
    takes: Int64
    shift: Int64
    members: Int64
    sizes: Int64


class StepState(NamedTuple):
    """What the loop changes.

    Attributes:
        clocks: [stages, lanes].
        pending: of each stage, lanes that are at a rendezvous, as bits.
        at: of each stage, how many passes it has done.
        stretch: of each stage, how many stretches of the next one.
        slots: when outputs ended; `UNKNOWN` before they have.
        arrived: of each rendezvous, how many are there.
        begins: of each rendezvous, when the last so far was ready.
        head: of each rendezvous, the arrival that came last; -1 for none.
        behind: of each arrival, the one before it there.
        of_stage: of each arrival.
        of_lane: of each arrival.
        of_slot: of each arrival, where its end is written; -1 where nobody waits for it.
        ends_after: of each arrival, what the rendezvous takes there.
        entry: entries of one stretch.
        arrivals: how many so far.
    """

    clocks: Int64
    pending: Int64
    at: Int64
    stretch: Int64
    slots: Int64
    arrived: Int64
    begins: Int64
    head: Int64
    behind: Int64
    of_stage: Int64
    of_lane: Int64
    of_slot: Int64
    ends_after: Int64
    entry: Int64
    arrivals: Int64


EACH = 8
"""Messages from a chunk to the next one in one pass, at most."""


class _Step:
    """The step as columns.

    Args:
        sample: the passes that differ, and their order.
        segments: what its programs are cut into.
        work: durations of its rows.
        message_ps: what a message takes.
    """

    def __init__(self, sample: Sample, segments: SegmentedJob, work: RowTimes, message_ps: MessageTime) -> None:
        self.sample, self.work, self.message_ps = sample, work, message_ps
        self.distinct, self.stages = min(sample.micro_batches, 3), len(sample.stand_for)
        self.lines = 2 * self.stages * sample.chunks * EACH
        self.matrices = _Matrices(segments, work)
        programs = range(len(sample.job.programs))
        self.pieces = [_pieces(sample, segments, self.matrices, number) for number in programs]
        self.first_piece = np.cumsum([0, *(len(its.labels) for its in self.pieces)]).tolist()
        self.first = np.cumsum([0, *(len(its.piece) for its in self.pieces)]).tolist()
        self.row = np.concatenate([its.row for its in self.pieces])
        self.slots = np.concatenate([its.slots for its in self.pieces])
        self.names: dict[tuple[str, int], int] = {}
        self.pairs: dict[object, int] = {}

    def run(self) -> int:
        """When it ends, picoseconds."""
        tables = self._tables()
        state = self._state(tables)
        loop = compiled(_send_through, _known, _arrive, _to_rendezvous, _through_matrix)
        loop(tables, state)
        if (state.at < np.diff(tables.passes_at)).any() or state.pending.any():
            raise NotAlike("passes wait for each other in a circle")
        return int(state.clocks.max(initial=0))

    # -- the passes that differ ----------------------------------------------------------------------------

    def _tables(self) -> Tables:
        sample = self.sample
        matrix = np.concatenate([its.matrix for its in self.pieces])
        stretches = len(matrix)
        meets = self._meets(matrix)
        columns = {
            "matrix": matrix,
            "lane": np.array(self.work.lane, np.int64)[self.row],
            "host": self.work.host[self.row, 0],
            "meets": meets,
            "slot": np.concatenate([its.slot for its in self.pieces]),
            "piece_at": np.append(
                np.concatenate([its.at[:-1] + at for its, at in zip(self.pieces, self.first, strict=False)]),
                stretches,
            ),
        }
        columns |= self.matrices.columns() | self._edges(stretches) | self._passes()
        columns |= self._rendezvous(meets, matrix)
        sizes = np.array([max(1, len(self.names)), sample.micro_batches, stretches, self.lines], np.int64)
        return Tables(**columns, sizes=sizes)

    def _edges(self, stretches: int) -> dict[str, Int64]:
        """What each stretch waits for."""
        reader = np.concatenate([its.reader + at for its, at in zip(self.pieces, self.first, strict=False)])
        return {
            "edges_at": np.searchsorted(reader, np.arange(stretches + 1)),
            "edge_port": np.concatenate([its.port for its in self.pieces]),
            "edge_of": np.concatenate([self._names(its) for its in self.pieces]),
            "edge_slot": np.concatenate([its.of_slot for its in self.pieces]),
        }

    def _names(self, pieces: _Pieces) -> Int64:
        """The name of the pass that each edge waits for; -1 for the same pass."""
        name = np.full(len(pieces.labels), NONE, np.int64)
        other = pieces.of != pieces.piece[pieces.reader]
        for number in np.unique(pieces.of[other]).tolist():
            kind, _, chunk = pieces.labels[number]
            name[number] = self.names.setdefault((kind, chunk), len(self.names))
        return np.where(other, name[pieces.of], NONE)

    def _meets(self, matrix: Int64) -> Int64:
        """Where each communication meets others: `Tables.meets`; 0 of what does not."""
        found = np.zeros(len(matrix), np.int64)
        for program, (pieces, first) in enumerate(zip(self.pieces, self.first, strict=False)):
            at = np.flatnonzero(pieces.matrix == NONE)
            found[first + at] = self._meetings(program, pieces, at)
        return found

    def _meetings(self, program: int, pieces: _Pieces, at: Int64) -> Int64:
        """The same for communications of a program. What runs in passes are messages between chunks."""
        ops, row, piece = self.sample.job.ops, pieces.row[at], pieces.piece[at]
        kind, tag, group = (column[row].astype(np.int64) for column in (ops.kind, ops.tag, ops.group))
        _, end = np.unique(np.stack([piece, kind, tag, group]), axis=1, return_inverse=True)
        turn = occurrences(end.ravel())
        update = np.array([label == self.sample.update for label in pieces.labels], np.bool_)[piece]
        between = np.array(["pp" in its.axes for its in self.sample.job.groups], np.bool_)[group]
        message = np.isin(kind, MESSAGES) & between
        # A line goes from a chunk to the next one, or back: its tag says from which.
        bad = np.flatnonzero(~update & (~message | (turn >= EACH) | (tag * EACH >= self.lines)))
        if len(bad):
            label = pieces.labels[piece[bad[0]]]
            raise NotAlike(f"pass {label} meets others than its neighbours, or too often")
        found = 2 * (tag * EACH + turn)
        for which in np.flatnonzero(update).tolist():
            pair = self._pair(program, int(row[which]), int(turn[which]))
            found[which] = 2 * self.pairs.setdefault(pair, len(self.pairs)) + 1
        return found

    def _pair(self, program: int, row: int, turn: int) -> object:
        """What those that meet after all passes have in common."""
        job, ops = self.sample.job, self.sample.job.ops
        group = int(ops.group[row])
        if int(ops.kind[row]) not in MESSAGES:
            return group, turn
        if list(self.sample.stand_for).count(program) > 1:
            raise NotAlike("stages that stand for each other exchange messages after their passes")
        here = job.programs[program].coordinates.get("pp", 0)
        ends = here, here + int(ops.peer[row])
        return group, int(ops.tag[row]), ends if ops.kind[row] == OpKind.SEND else ends[::-1], turn

    # -- all passes ------------------------------------------------------------------------------------------

    def _passes(self) -> dict[str, Int64]:
        """The passes of every stage in order, and where the outputs of each stand."""
        sample, slots, found = self.sample, 0, []
        size = self.slots
        offset = np.zeros((self.stages, max(1, len(self.names)), sample.micro_batches), np.int64)
        for stage, (program, order) in enumerate(zip(sample.stand_for, sample.orders, strict=True)):
            labels, at = self.pieces[program].labels, self.first_piece[program]
            numbers = {label: number for number, label in enumerate(labels, at)}
            piece, micro_batch, name = self._in_order(numbers, order)
            base = slots + np.cumsum(size[piece]) - size[piece]
            slots += int(size[piece].sum())
            named = name >= 0
            offset[stage, name[named], micro_batch[named]] = base[named]
            found.append((piece, micro_batch, base))
        passes_at = np.cumsum([0, *(len(piece) for piece, _, _ in found)])
        piece, micro_batch, base = (np.concatenate(each) for each in zip(*found, strict=True))
        return {
            "piece": piece, "micro_batch": micro_batch, "base": base,
            "offset": offset.ravel(), "passes_at": passes_at,
        }  # fmt: skip

    def _in_order(self, numbers: Mapping[PassLabel, int], order: PassOrder) -> tuple[Int64, Int64, Int64]:
        """Of each pass of a stage, and its update, the piece, the micro-batch and the name; -1 for no name."""
        sample, kinds = self.sample, order.kinds
        pieces = np.full((len(kinds), self.distinct, sample.chunks), NONE)
        names = np.full((len(kinds), sample.chunks), NONE)
        for (kind, micro_batch, chunk), number in numbers.items():
            if kind in kinds:
                pieces[kinds.index(kind), micro_batch, chunk] = number
        for (kind, chunk), number in self.names.items():
            if kind in kinds:
                names[kinds.index(kind), chunk] = number
        last = sample.micro_batches - 1
        which = np.where(order.micro_batch == last, self.distinct - 1, np.minimum(order.micro_batch, 1))
        piece = np.append(pieces[order.kind, which, order.chunk], numbers.get(sample.update, NONE))
        name = np.append(names[order.kind, order.chunk], NONE)
        # A pass may have nothing to do, as the update of a step without an optimizer.
        does = piece >= 0
        return piece[does], np.append(order.micro_batch, last)[does], name[does]

    def _rendezvous(self, meets: Int64, matrix: Int64) -> dict[str, Int64]:
        """What each rendezvous takes at each stage, and how many take part."""
        sample, job = self.sample, self.sample.job
        stands: dict[int, list[int]] = {}
        for stage, program in enumerate(sample.stand_for):
            stands.setdefault(program, []).append(stage)
        first = self.lines * sample.micro_batches
        takes = np.zeros((self.stages, len(matrix)), np.int64)
        members = np.full(first + len(self.pairs), 2)
        members[first:] = 0
        meeting = np.flatnonzero(matrix == NONE)
        programs = (np.searchsorted(self.first, meeting, side="right") - 1).tolist()
        for at, program, row in zip(meeting.tolist(), programs, self.row[meeting].tolist(), strict=True):
            message = int(job.ops.kind[row]) in MESSAGES
            for stage in stands.get(program, ()):
                takes[stage, at] = self.message_ps(row, stage) if message else self.work.device[row, 0]
            if meets[at] % 2:
                members[first + meets[at] // 2] += len(stands.get(program, ()))
        places = [job.programs[program].coordinates.get("pp", 0) for program in sample.stand_for]
        shift = 2 * EACH * (np.arange(self.stages) - np.array(places, np.int64))
        return {"takes": takes.ravel(), "members": members, "shift": shift}

    def _state(self, tables: Tables) -> StepState:
        size = self.slots
        meets = np.concatenate([[0], np.cumsum(tables.matrix == NONE)])
        arrivals = int((meets[tables.piece_at[1:]] - meets[tables.piece_at[:-1]])[tables.piece].sum())
        count, lanes = len(tables.members), 1 + len(self.sample.job.streams)
        of_arrivals = ("behind", "of_stage", "of_lane", "of_slot", "ends_after")
        each = {name: np.zeros(arrivals, np.int64) for name in of_arrivals}
        return StepState(
            clocks=np.zeros((self.stages, lanes), np.int64),
            pending=np.zeros(self.stages, np.int64),
            at=np.zeros(self.stages, np.int64),
            stretch=np.zeros(self.stages, np.int64),
            slots=np.full(int(size[tables.piece].sum()), UNKNOWN),
            arrived=np.zeros(count, np.int64),
            begins=np.full(count, NEVER),
            head=np.full(count, NONE),
            entry=np.zeros(lanes + 1 + int(tables.inputs_of.max(initial=0)), np.int64),
            arrivals=np.zeros(1, np.int64),
            **each,
        )


# The loop, which is compiled: the state goes through the tables.


def _known(tables: Tables, state: StepState, stage: int, place: int, stretch: int, first: int) -> bool:
    """Writes when the inputs of a stretch ended, from an entry on; whether all are known."""
    names, count, micro_batch = tables.sizes[0], tables.sizes[1], tables.micro_batch[place]
    for edge in range(tables.edges_at[stretch], tables.edges_at[stretch + 1]):
        of = tables.edge_of[edge]
        base = tables.base[place] if of < 0 else tables.offset[(stage * names + of) * count + micro_batch]
        end = state.slots[base + tables.edge_slot[edge]]
        if end == UNKNOWN:
            return False
        port = first + tables.edge_port[edge]
        state.entry[port] = max(state.entry[port], end)
    return True


def _arrive(tables: Tables, state: StepState, meeting: int, arrival: int) -> None:
    """One more is at a rendezvous; when all are there, it begins."""
    state.arrived[meeting] += 1
    state.behind[arrival] = state.head[meeting]
    state.head[meeting] = arrival
    if state.arrived[meeting] < tables.members[meeting]:
        return
    its = state.head[meeting]
    while its >= 0:
        end = state.begins[meeting] + state.ends_after[its]
        stage, lane = state.of_stage[its], state.of_lane[its]
        state.clocks[stage, lane] = end
        state.pending[stage] &= ~(1 << lane)
        if state.of_slot[its] >= 0:
            state.slots[state.of_slot[its]] = end
        its = state.behind[its]


def _to_rendezvous(tables: Tables, state: StepState, stage: int, place: int, stretch: int) -> bool:
    """A stage comes to a rendezvous; whether it could."""
    lane, meets = tables.lane[stretch], tables.meets[stretch]
    state.entry[0] = NEVER
    if state.pending[stage] & (1 | 1 << lane) or not _known(tables, state, stage, place, stretch, 0):
        return False
    if meets % 2:
        meeting = tables.sizes[3] * tables.sizes[1] + meets // 2
    else:
        meeting = (meets // 2 + tables.shift[stage]) * tables.sizes[1] + tables.micro_batch[place]
    state.clocks[stage, 0] += tables.host[stretch]
    ready = max(state.clocks[stage, 0], state.clocks[stage, lane], state.entry[0])
    state.begins[meeting] = max(state.begins[meeting], ready)
    state.pending[stage] |= 1 << lane
    arrival = state.arrivals[0]
    state.arrivals[0] += 1
    state.of_stage[arrival], state.of_lane[arrival] = stage, lane
    state.ends_after[arrival] = tables.takes[stage * tables.sizes[2] + stretch]
    state.of_slot[arrival] = tables.base[place] + tables.slot[stretch] if tables.slot[stretch] >= 0 else -1
    _arrive(tables, state, meeting, arrival)
    return True


def _through_matrix(tables: Tables, state: StepState, stage: int, place: int, stretch: int) -> bool:
    """The clocks of a stage go through a matrix, as a vector of max-plus algebra; whether they could."""
    matrix = tables.matrix[stretch]
    if state.pending[stage] & tables.uses[matrix]:
        return False
    lanes, first = tables.lanes_of[matrix], tables.lanes_at[matrix]
    entries = lanes + tables.inputs_of[matrix]
    for each in range(lanes):
        state.entry[each] = state.clocks[stage, tables.lanes[first + each]]
    for each in range(lanes, entries):
        state.entry[each] = NEVER
    if not _known(tables, state, stage, place, stretch, lanes):
        return False
    over, slot = tables.over_at[matrix], tables.base[place] + tables.slot[stretch]
    for out in range(lanes + tables.outputs_of[matrix]):
        latest = tables.over[over] + state.entry[0]
        for each in range(1, entries):
            latest = max(latest, tables.over[over + each] + state.entry[each])
        over += entries
        if out < lanes:
            state.clocks[stage, tables.lanes[first + out]] = latest
        else:
            state.slots[slot + out - lanes] = latest
    return True


def _send_through(tables: Tables, state: StepState) -> None:
    """Sends the clocks of all stages through their passes, each as far as it gets, until none gets further."""
    moved = True
    while moved:
        moved = False
        for stage in range(len(tables.passes_at) - 1):
            while state.at[stage] < tables.passes_at[stage + 1] - tables.passes_at[stage]:
                place = tables.passes_at[stage] + state.at[stage]
                piece = tables.piece[place]
                stretch, goes = tables.piece_at[piece] + state.stretch[stage], True
                while goes and stretch < tables.piece_at[piece + 1]:
                    if tables.matrix[stretch] < 0:
                        goes = _to_rendezvous(tables, state, stage, place, stretch)
                    else:
                        goes = _through_matrix(tables, state, stage, place, stretch)
                    if goes:
                        moved = True
                        stretch += 1
                if not goes:
                    state.stretch[stage] = stretch - tables.piece_at[piece]
                    break
                state.at[stage] += 1
                state.stretch[stage] = 0
