"""The step of a pipeline whose stages and micro-batches are mostly alike, put together from those that differ.

A pass of a stage (forward of one micro-batch, say) does to the clocks of its lanes what `segments` says: it sends
them through a row of max-plus matrices, and waits at messages. Stages that do the same on other layers, and all
micro-batches between the first and the last, have the same rows. So these are cut and worked out once, of a job in
which each distinct pass stands once (`Sample`), and a step is a list of them for every stage, in the order of its
schedule: only clocks go through all of them, and messages keep the times that the places of their stages say.

What such a job is cut into, and what waits for what, does not depend on how long anything takes (`_Layout`): it is
worked out once for all jobs of one structure. Of each step there are left the constants of its segments and the
clocks, both loops that are compiled.

What cannot be put together so, as a pass that waits for one of another micro-batch, is refused (`NotAlike`), and
then the whole job has to be simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from echograph.ir.columns import NONE, Bools, Int64
from echograph.ir.passes.pipeline.alike import DISTINCT, NotAlike, Sample
from echograph.ir.passes.rewrite import PassLabel
from echograph.ir.structure import structure
from echograph.ir.types import OpKind
from echograph.simulator.engine.machine_code import compiled
from echograph.simulator.engine.segments import (
    LONGEST_PS,
    NEVER,
    UNKNOWN,
    SegmentedJob,
    SegmentKind,
    SegmentSequence,
    cut,
)
from echograph.simulator.groups import occurrences

MESSAGES = (OpKind.SEND, OpKind.RECV)


MessageTime = Callable[[int, int], int]
"""Picoseconds of a message, by its row of the operation table and its stage."""


MOST_LAYOUTS = 512
"""So many layouts are kept, some hundred kilobytes each."""
KnownLayouts = dict[Hashable, "_Layout | NotAlike"]
"""Layouts, or why there is none, by what they depend on."""


def step_ps(sample: Sample, device: Int64, host: Int64, message_ps: MessageTime, known: KnownLayouts) -> int:
    """When the step ends, picoseconds.

    Args:
        sample: the passes that differ, and their order.
        device: int64 [rows], picoseconds on the device.
        host: int64 [rows], picoseconds that the host takes.
        message_ps: what a message takes.
        known: layouts of samples before; gets this one's.

    Raises:
        NotAlike: the step cannot be put together from the sample.
    """
    like = _like(sample)
    layout = known.get(like)
    if layout is None:
        if len(known) >= MOST_LAYOUTS:
            del known[next(iter(known))]
        try:
            layout = known[like] = _layout(sample)
        except NotAlike as error:
            layout = known[like] = error
    if isinstance(layout, NotAlike):
        raise NotAlike(*layout.args)
    _check_length(sample, device, host)
    return _run(sample, layout, np.where(layout.hosts, 0, device), host, message_ps)


def _like(sample: Sample) -> Hashable:
    """What a layout depends on: the job's structure, how far messages go around in their groups, and the stages.

    Of micro-batches it counts how many differ.
    """
    job = sample.job
    messages = np.isin(job.ops.kind, MESSAGES)
    groups = np.unique(job.ops.group[messages]).tolist()
    return (
        structure(job), *(job.group_size(job.groups[number]) for number in groups), *map(tuple, sample.labels),
        tuple(sample.stand_for), sample.chunks, sample.update, min(sample.micro_batches, DISTINCT),
    )  # fmt: skip


def _check_length(sample: Sample, device: Int64, host: Int64) -> None:
    """Refuses a step in which the sums of `NEVER` and a time would not stay apart from times."""
    work = device.astype(np.float64) + host
    longest = max(float(np.dot(sample.job.run_counts(n), work)) for n in range(len(sample.job.programs)))
    if not longest * sample.micro_batches * len(sample.stand_for) < LONGEST_PS:
        raise NotAlike("the step may be too long for its constants")


# -- constants ----------------------------------------------------------------------------------------------------


class KindColumns(NamedTuple):
    """The kinds of segments, as columns. Rendezvous have no operations here.

    Attributes:
        row: of each kind, the row of its first operation.
        op_at: where the operations of each kind begin in the columns of operations.
        own: of each operation, number of its lane among those of its kind.
        port: of each operation, the entry at which it waits for another segment; -1 for none.
        pairs: of each operation, whether it starts together with the one behind it.
        waits_at: of each operation, where those that it waits for begin.
        waits: operations of the same kind that are waited for.
        exits_at: of each kind, where its outputs begin.
        exits: operations that others wait for.
    """

    row: Int64
    op_at: Int64
    own: Int64
    port: Int64
    pairs: Bools
    waits_at: Int64
    waits: Int64
    exits_at: Int64
    exits: Int64


class MatrixColumns(NamedTuple):
    """The matrices: one of each kind of segment, then those of kinds that follow each other.

    Attributes:
        lanes: of all matrices; those of matrix k begin at `lanes_at[k]`, and are `lanes_of[k]`.
        lanes_at: see `lanes`.
        lanes_of: see `lanes`; none of a rendezvous.
        inputs_of: of each matrix, entries beside the lanes.
        outputs_of: of each matrix, exits beside the lanes.
        over_at: where the constants of each begin, row by row, and where the last ones end.
        uses: of each matrix, its lanes as bits.
        product_at: where the kinds of each product begin.
        product: kinds in a row.
    """

    lanes: Int64
    lanes_at: Int64
    lanes_of: Int64
    inputs_of: Int64
    outputs_of: Int64
    over_at: Int64
    uses: Int64
    product_at: Int64
    product: Int64


class _Matrices:
    """The matrices that passes go through.

    Args:
        kinds: of the segments.
        lane: of each row.
    """

    def __init__(self, kinds: Sequence[SegmentKind], lane: Int64) -> None:
        self.kinds, of_row = kinds, lane.tolist()
        self.lanes = [() if its.rendezvous else _lanes(of_row, its.rows) for its in kinds]
        self.ports = [(0, 0) if its.rendezvous else (len(its.inputs), len(its.outputs)) for its in kinds]
        self.products: dict[tuple[int, ...], int] = {}
        self.lane = lane

    def of(self, kinds: tuple[int, ...]) -> int:
        """The matrix of segments that follow each other, none of which has inputs or outputs."""
        if kinds not in self.products:
            self.products[kinds] = len(self.lanes)
            self.lanes.append(tuple(sorted({lane for kind in {*kinds} for lane in self.lanes[kind]})))
            self.ports.append((0, 0))
        return self.products[kinds]

    def columns(self) -> MatrixColumns:
        """All of them."""
        ports, count = np.array(self.ports, np.int64).reshape(-1, 2), np.array(list(map(len, self.lanes)))
        return MatrixColumns(
            lanes=np.array([lane for its in self.lanes for lane in its], np.int64),
            lanes_at=np.cumsum(count) - count,
            lanes_of=count,
            inputs_of=ports[:, 0].copy(),
            outputs_of=ports[:, 1].copy(),
            over_at=np.append(0, np.cumsum((count + ports[:, 0]) * (count + ports[:, 1]))),
            uses=np.array([sum(1 << lane for lane in its) for its in self.lanes], np.int64),
            product_at=np.cumsum([0, *map(len, self.products)]),
            product=np.array([kind for its in self.products for kind in its], np.int64),
        )

    def kind_columns(self) -> KindColumns:
        """What the constants of each kind are worked out of."""
        own, port, pairs = list[int](), list[int](), list[bool]()
        counts, waits, exits, of_row = [0], list[_Ops](), list[_Ops](), self.lane.tolist()
        for kind, lanes in zip(self.kinds, self.lanes, strict=False):
            begin, count = len(own), 0 if kind.rendezvous else len(kind.rows)
            counts.append(count)
            exits.append(kind.outputs if count else ())
            if not count:
                continue
            place = {lane: at for at, lane in enumerate(lanes)}
            own += [place[lane] for lane in of_row[kind.rows.start : kind.rows.stop]]
            port += [NONE] * count
            pairs += [False] * count
            for at, op in enumerate(kind.inputs, len(lanes)):
                port[begin + op] = at
            for op in kind.exchanges:
                pairs[begin + op] = True
            waits += kind.waits
        return KindColumns(
            row=np.array([kind.rows.start for kind in self.kinds], np.int64),
            op_at=np.cumsum(counts),
            own=np.array(own, np.int64),
            port=np.array(port, np.int64),
            pairs=np.array(pairs, np.bool_),
            waits_at=np.cumsum([0, *map(len, waits)]),
            waits=np.array([op for its in waits for op in its], np.int64),
            exits_at=np.cumsum([0, *map(len, exits)]),
            exits=np.array([op for its in exits for op in its], np.int64),
        )


_Ops = tuple[int, ...]


def _lanes(lane: Sequence[int], rows: range) -> _Ops:
    """The lanes of a segment, ascending; the host's is 0."""
    return tuple(sorted({0, *lane[rows.start : rows.stop]}))


def _constants(
    kinds: KindColumns, matrices: MatrixColumns, hosts: Bools, host: Int64, device: Int64, ends: Int64,
    clocks: Int64, over: Int64,
) -> None:  # fmt: skip
    """The constants of all kinds from each of their entries: clocks that begin there alone, sent through them.

    Args:
        kinds: of segments.
        matrices: theirs are worked out.
        hosts: [rows] which are the host's own work.
        host: [rows] picoseconds of the host.
        device: [rows] picoseconds of the device.
        ends: [operations of the longest kind], written here.
        clocks: [lanes], written here.
        over: gets the constants.
    """
    for kind in range(len(kinds.row)):
        lanes, first, row = matrices.lanes_of[kind], kinds.op_at[kind], kinds.row[kind]
        entries, at = lanes + matrices.inputs_of[kind], matrices.over_at[kind]
        for entry in range(entries):
            for each in range(lanes):
                clocks[each] = 0 if each == entry else NEVER
            for op in range(kinds.op_at[kind + 1] - first):
                its = first + op
                ready, told = clocks[0], NEVER
                for wait in range(kinds.waits_at[its], kinds.waits_at[its + 1]):
                    told = max(told, ends[kinds.waits[wait]])
                if kinds.port[its] == entry:
                    told = max(told, 0)
                if hosts[row + op]:
                    ready = max(ready, told)
                clocks[0] = ready + host[row + op]
                ready = max(clocks[kinds.own[its]], clocks[0])
                if not hosts[row + op]:
                    ready = max(ready, told)
                if op > 0 and kinds.pairs[its - 1]:
                    ready = max(ready, ends[op - 1])
                    ends[op - 1] = clocks[kinds.own[its - 1]] = ready + device[row + op - 1]
                # A send starts with the receive behind it: till then, this is when it is ready.
                ends[op] = ready
                if not kinds.pairs[its]:
                    ends[op] = clocks[kinds.own[its]] = ready + device[row + op]
            for each in range(lanes):
                over[at + each * entries + entry] = max(clocks[each], NEVER)
            for each in range(matrices.outputs_of[kind]):
                end = ends[kinds.exits[kinds.exits_at[kind] + each]]
                over[at + (lanes + each) * entries + entry] = max(end, NEVER)


def _multiply(first: int, matrices: MatrixColumns, after: Int64, clocks: Int64, over: Int64) -> None:
    """The products: the identity, sent through matrices that have lanes alone.

    Args:
        first: number of the first product among the matrices.
        matrices: those of products are worked out.
        after: [lanes], written here.
        clocks: [lanes], written here.
        over: the constants of single kinds; gets the others.
    """
    lanes, lanes_at, lanes_of = matrices.lanes, matrices.lanes_at, matrices.lanes_of
    for product in range(len(matrices.product_at) - 1):
        matrix = first + product
        at, size = lanes_at[matrix], lanes_of[matrix]
        for entry in range(size):
            for each in range(size):
                clocks[lanes[at + each]] = 0 if each == entry else NEVER
            for place in range(matrices.product_at[product], matrices.product_at[product + 1]):
                kind = matrices.product[place]
                its, count, constant = lanes_at[kind], lanes_of[kind], matrices.over_at[kind]
                for out in range(count):
                    latest = NEVER
                    for each in range(count):
                        latest = max(latest, over[constant + each] + clocks[lanes[its + each]])
                    constant += count
                    after[out] = latest
                for out in range(count):
                    clocks[lanes[its + out]] = after[out]
            for out in range(size):
                over[matrices.over_at[matrix] + out * size + entry] = clocks[lanes[at + out]]


# -- the passes that differ ---------------------------------------------------------------------------------------


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
    first = _bounds(segments, sequence, meets, begins)
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


def _bounds(segments: SegmentedJob, sequence: SegmentSequence, meets: Bools, begins: Bools) -> Int64:
    """Where stretches begin: at rendezvous, at what waits and after what is waited for, and with each pass."""
    # An output that nobody waits for is none of the stretch's, so what has outputs ends one always.
    has = np.array([bool(kind.outputs or kind.inputs) for kind in segments.kinds], np.bool_)[sequence.kind]
    cuts = meets | has
    cuts[1:] |= cuts[:-1]
    return np.flatnonzero(cuts | begins)


def _check_waits(sample: Sample, labels: Sequence[PassLabel], reader: Int64, of: Int64) -> None:
    """Refuses a pass that does not wait alike in every micro-batch."""
    last = min(sample.micro_batches, DISTINCT) - 1
    of_micro_batch = np.array([label[1] for label in labels], np.int64)
    waits_in = np.array([last if label == sample.update else label[1] for label in labels], np.int64)
    bad = np.flatnonzero((of != reader) & (of_micro_batch[of] != waits_in[reader]))
    if len(bad):
        raise NotAlike(f"pass {labels[reader[bad[0]]]} waits for pass {labels[of[bad[0]]]}")


def _matrices_of(matrices: _Matrices, kind: Int64, first: Int64, end: Int64, meets: Bools) -> Int64:
    """The matrix of every stretch; -1 for a rendezvous."""
    found = np.where(meets, NONE, kind[first])
    for at in np.flatnonzero(~meets & (end - first > 1)).tolist():
        found[at] = matrices.of(tuple(kind[first[at] : end[at]].tolist()))
    return found


# -- a step of them -----------------------------------------------------------------------------------------------


class Tables(NamedTuple):
    """What the loop reads, as columns.

    Attributes:
        over: constants of all matrices.
        matrices: where they stand, and what they go from and to.
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
    matrices: MatrixColumns
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layout:
    """What a step is made of, whatever its operations take.

    Attributes:
        hosts: bool [rows], which are the host's own work.
        kinds: what segments are alike.
        matrices: what passes go through.
        row: int64 [stretches], row of the first operation.
        labels: of the passes of each program.
        first_piece: number of each program's first pass.
        meetings: of each program, its stretches that are rendezvous, their rows, each once, and which each has.
        slots: of each pass, how many outputs others wait for.
        names: of passes that others wait for, by kind and chunk.
        pairs: of each rendezvous after all passes, how many take part.
        columns: of `Tables`, those that are always the same.
        lines: of messages from chunk to chunk, as many as there can be in a pass of every chunk.
    """

    hosts: Bools
    kinds: KindColumns
    matrices: MatrixColumns
    row: Int64
    labels: list[list[PassLabel]]
    first_piece: list[int]
    meetings: list[tuple[Int64, Int64, Int64]]
    slots: Int64
    names: dict[tuple[str, int], int]
    pairs: Int64
    columns: dict[str, Int64]
    lines: int


def _layout(sample: Sample) -> _Layout:
    """The layout of a sample.

    Raises:
        NotAlike: the step cannot be put together from it.
    """
    segments = cut(sample.job)
    if segments is None:
        raise NotAlike("runs of the same operations do not wait alike")
    return _LayoutWriter(sample, segments).layout()


class _LayoutWriter:
    """Writes a layout.

    Args:
        sample: the passes that differ, and their order.
        segments: what its programs are cut into.
    """

    def __init__(self, sample: Sample, segments: SegmentedJob) -> None:
        self.sample, self.stages = sample, len(sample.stand_for)
        self.lane = 1 + sample.job.ops.stream.astype(np.int64)
        self.matrices = _Matrices(segments.kinds, self.lane)
        programs = range(len(sample.job.programs))
        self.pieces = [_pieces(sample, segments, self.matrices, number) for number in programs]
        self.first = np.cumsum([0, *(len(its.piece) for its in self.pieces)]).tolist()
        self.row = np.concatenate([its.row for its in self.pieces])
        self.names: dict[tuple[str, int], int] = {}
        self.pairs: dict[object, int] = {}

    def layout(self) -> _Layout:
        """All of it."""
        sample, pieces = self.sample, self.pieces
        matrix = np.concatenate([its.matrix for its in pieces])
        program = np.repeat(np.arange(len(pieces)), [len(its.piece) for its in pieces])
        meets, each = self._meets(matrix)
        ends = np.concatenate([its.at[:-1] + at for its, at in zip(pieces, self.first, strict=False)])
        places = [sample.job.programs[program].coordinates.get("pp", 0) for program in sample.stand_for]
        columns = {
            "matrix": matrix,
            "lane": self.lane[self.row],
            "meets": meets,
            "slot": np.concatenate([its.slot for its in pieces]),
            "piece_at": np.append(ends, len(matrix)),
            "shift": 2 * each * (np.arange(self.stages) - np.array(places, np.int64)),
        }
        columns |= self._edges(len(matrix))
        together = np.flatnonzero((matrix == NONE) & (meets % 2 == 1))
        stands = np.bincount(np.array(sample.stand_for, np.int64), minlength=len(pieces))
        pairs = np.zeros(len(self.pairs), np.int64)
        np.add.at(pairs, meets[together] // 2, stands[program[together]])
        return _Layout(
            hosts=sample.job.ops.kind == OpKind.HOST,
            kinds=self.matrices.kind_columns(),
            matrices=self.matrices.columns(),
            row=self.row,
            labels=[its.labels for its in pieces],
            first_piece=np.cumsum([0, *(len(its.labels) for its in pieces)]).tolist(),
            meetings=[self._meeting(matrix, program == number) for number in range(len(pieces))],
            slots=np.concatenate([its.slots for its in pieces]),
            names=self.names,
            pairs=pairs,
            columns=columns,
            lines=2 * self.stages * sample.chunks * each,
        )

    def _meeting(self, matrix: Int64, mine: Bools) -> tuple[Int64, Int64, Int64]:
        """Rendezvous of a program: of its stretches these, and their rows."""
        stretches = np.flatnonzero(mine & (matrix == NONE))
        rows, which = np.unique(self.row[stretches], return_inverse=True)
        return stretches, rows, which.ravel()

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

    def _meets(self, matrix: Int64) -> tuple[Int64, int]:
        """Where each communication meets others: `Tables.meets`, 0 of what does not; and messages of a line."""
        found = np.zeros((3, len(matrix)), np.int64)
        for program, (pieces, first) in enumerate(zip(self.pieces, self.first, strict=False)):
            at = np.flatnonzero(pieces.matrix == NONE)
            found[:, first + at] = self._meetings(program, pieces, at)
        line, turn, pair = found
        each = 1 + int(turn.max(initial=0))
        return np.where(pair > 0, 2 * pair - 1, 2 * (line * each + turn)), each

    def _meetings(self, program: int, pieces: _Pieces, at: Int64) -> Int64:
        """Line, number on it, and number of the pair, from 1, of communications of a program.

        What runs in passes are messages between chunks, and in no pair.
        """
        ops, row, piece = self.sample.job.ops, pieces.row[at], pieces.piece[at]
        kind, tag, group = (column[row].astype(np.int64) for column in (ops.kind, ops.tag, ops.group))
        _, end = np.unique(np.stack([piece, kind, tag, group]), axis=1, return_inverse=True)
        turn = occurrences(end.ravel())
        update = np.array([label == self.sample.update for label in pieces.labels], np.bool_)[piece]
        between = np.array(["pp" in its.axes for its in self.sample.job.groups], np.bool_)[group]
        message = np.isin(kind, MESSAGES) & between
        # A line goes from a chunk to the next one, or back: its tag says from which.
        lines = 2 * self.stages * self.sample.chunks
        bad = np.flatnonzero(~update & (~message | (tag >= lines)))
        if len(bad):
            label = pieces.labels[piece[bad[0]]]
            raise NotAlike(f"pass {label} meets others than its neighbours")
        found = np.stack([tag, turn, np.zeros(len(at), np.int64)])
        for which in np.flatnonzero(update).tolist():
            pair = self._pair(program, int(row[which]), int(turn[which]))
            found[:, which] = 0, 0, 1 + self.pairs.setdefault(pair, len(self.pairs))
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


# -- all passes ---------------------------------------------------------------------------------------------------


def _run(sample: Sample, layout: _Layout, device: Int64, host: Int64, message_ps: MessageTime) -> int:
    """When a step ends, picoseconds; arguments as of `step_ps`."""
    members = np.append(np.full(layout.lines * sample.micro_batches, 2), layout.pairs)
    sizes = [max(1, len(layout.names)), sample.micro_batches, len(layout.row), layout.lines]
    tables = Tables(
        over=_over(sample, layout, device, host),
        matrices=layout.matrices,
        host=host[layout.row],
        takes=_takes(sample, layout, device, message_ps).ravel(),
        members=members,
        sizes=np.array(sizes, np.int64),
        **layout.columns,
        **_passes(sample, layout),
    )
    state = _state(sample, layout, tables)
    loop = compiled(_send_through, _known, _arrive, _to_rendezvous, _through_matrix)
    loop(tables, state)
    if (state.at < np.diff(tables.passes_at)).any() or state.pending.any():
        raise NotAlike("passes wait for each other in a circle")
    return int(state.clocks.max(initial=0))


def _over(sample: Sample, layout: _Layout, device: Int64, host: Int64) -> Int64:
    """The constants of all matrices."""
    kinds, matrices = layout.kinds, layout.matrices
    over = np.empty(int(matrices.over_at[-1]), np.int64)
    clocks = np.empty((2, 1 + len(sample.job.streams)), np.int64)
    ends = np.empty(int(np.diff(kinds.op_at).max(initial=0)), np.int64)
    compiled(_constants)(kinds, matrices, layout.hosts, host, device, ends, clocks[0], over)
    compiled(_multiply)(len(kinds.row), matrices, clocks[1], clocks[0], over)
    return over


def _passes(sample: Sample, layout: _Layout) -> dict[str, Int64]:
    """The passes of every stage in order, and where the outputs of each stand."""
    order, stages = sample.order, len(sample.stand_for)
    number = {kind: n for n, kind in enumerate(order.kinds)}
    names = np.full((len(order.kinds), sample.chunks), NONE)
    for (kind, chunk), known in layout.names.items():
        names[number[kind], chunk] = known
    stage = np.repeat(np.arange(stages), np.diff(order.at))
    pieces = [
        {label: at for at, label in enumerate(labels, first)}
        for labels, first in zip(layout.labels, layout.first_piece, strict=False)
    ]
    piece = order.of_pieces(pieces, sample.stand_for, sample.chunks, sample.update)
    # A pass may have nothing to do, as the update of a step without an optimizer.
    does = np.flatnonzero(piece >= 0)
    piece, stage, micro_batch = piece[does], stage[does], order.micro_batch[does]
    name = names[order.kind[does], order.chunk[does]]
    size = layout.slots[piece]
    base = np.cumsum(size) - size
    offset = np.zeros((stages, max(1, len(layout.names)), sample.micro_batches), np.int64)
    named = name >= 0
    offset[stage[named], name[named], micro_batch[named]] = base[named]
    return {
        "piece": piece, "micro_batch": micro_batch, "base": base, "offset": offset.ravel(),
        "passes_at": np.searchsorted(stage, np.arange(stages + 1)),
    }  # fmt: skip


def _takes(sample: Sample, layout: _Layout, device: Int64, message_ps: MessageTime) -> Int64:
    """[stages, stretches] What each rendezvous takes at each stage."""
    takes = np.zeros((len(sample.stand_for), len(layout.row)), np.int64)
    for program, (stretches, rows, which) in enumerate(layout.meetings):
        stages = np.flatnonzero(np.array(sample.stand_for, np.int64) == program)
        times = np.repeat(device[rows][None], len(stages), axis=0)
        for at in np.flatnonzero(np.isin(sample.job.ops.kind[rows], MESSAGES)).tolist():
            row = int(rows[at])
            times[:, at] = [message_ps(row, stage) for stage in stages.tolist()]
        takes[np.ix_(stages, stretches)] = times[:, which]
    return takes


def _state(sample: Sample, layout: _Layout, tables: Tables) -> StepState:
    """Before anything has run."""
    meets = np.concatenate([[0], np.cumsum(tables.matrix == NONE)])
    arrivals = int((meets[tables.piece_at[1:]] - meets[tables.piece_at[:-1]])[tables.piece].sum())
    stages, count, lanes = len(sample.stand_for), len(tables.members), 1 + len(sample.job.streams)
    of_arrivals = ("behind", "of_stage", "of_lane", "of_slot", "ends_after")
    each = {name: np.zeros(arrivals, np.int64) for name in of_arrivals}
    return StepState(
        clocks=np.zeros((stages, lanes), np.int64),
        pending=np.zeros(stages, np.int64),
        at=np.zeros(stages, np.int64),
        stretch=np.zeros(stages, np.int64),
        slots=np.full(int(layout.slots[tables.piece].sum()), UNKNOWN),
        arrived=np.zeros(count, np.int64),
        begins=np.full(count, NEVER),
        head=np.full(count, NONE),
        entry=np.zeros(lanes + 1 + int(tables.matrices.inputs_of.max(initial=0)), np.int64),
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
    if state.pending[stage] & tables.matrices.uses[matrix]:
        return False
    lanes, first = tables.matrices.lanes_of[matrix], tables.matrices.lanes_at[matrix]
    entries = lanes + tables.matrices.inputs_of[matrix]
    for each in range(lanes):
        state.entry[each] = state.clocks[stage, tables.matrices.lanes[first + each]]
    for each in range(lanes, entries):
        state.entry[each] = NEVER
    if not _known(tables, state, stage, place, stretch, lanes):
        return False
    over, slot = tables.matrices.over_at[matrix], tables.base[place] + tables.slot[stretch]
    for out in range(lanes + tables.matrices.outputs_of[matrix]):
        latest = tables.over[over] + state.entry[0]
        for each in range(1, entries):
            latest = max(latest, tables.over[over + each] + state.entry[each])
        over += entries
        if out < lanes:
            state.clocks[stage, tables.matrices.lanes[first + out]] = latest
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
