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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from echograph.ir.columns import NONE, Int64
from echograph.ir.graph import JobGraph
from echograph.ir.passes.rewrite import PassLabel
from echograph.ir.types import OpKind
from echograph.simulator.engine.machine_code import compiled
from echograph.simulator.engine.segments import (
    LONGEST_PS,
    NEVER,
    SegmentChain,
    SegmentedJob,
    SegmentSequence,
    TransferMatrix,
    cut,
    transfer_matrix,
    work_of,
)

UNKNOWN = -(2**63) + 1
"""The end of what has not ended yet."""
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


def step_ps(sample: Sample, device: Int64, host: Int64, message_ps: MessageTime) -> int:
    """When the step ends, picoseconds.

    Args:
        sample: the passes that differ, and their order.
        device: int64 [rows], picoseconds on the device.
        host: int64 [rows], picoseconds that the host takes.
        message_ps: what a message takes.

    Raises:
        NotAlike: the step cannot be put together from the sample.
    """
    segments = cut(sample.job)
    if segments is None:
        raise NotAlike("runs of the same operations do not wait alike")
    _check_length(sample, device, host)
    pieces = _Pieces(sample, segments, device, host)
    return _Step(sample, pieces, message_ps).run()


def _check_length(sample: Sample, device: Int64, host: Int64) -> None:
    """Refuses a step in which the sums of `NEVER` and a time would not stay apart from times."""
    work = device.astype(np.float64) + host
    longest = max(float(np.dot(sample.job.run_counts(n), work)) for n in range(len(sample.job.programs)))
    if not longest * sample.micro_batches * len(sample.stand_for) < LONGEST_PS:
        raise NotAlike("the step may be too long for its constants")


# -- the passes that differ ---------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Input:
    """What one entry of a stretch waits for: an output of the same pass, or of another one.

    Attributes:
        port: number of the input.
        of: the pass, None for the same one.
        slot: number of the output among those of its pass.
    """

    port: int
    of: PassLabel | None
    slot: int


@dataclass(slots=True, kw_only=True)
class _Stretch:
    """Segments that go through one matrix, or one rendezvous."""

    chain: SegmentChain | None
    row: int
    inputs: list[_Input]
    slot: int


@dataclass(slots=True, kw_only=True)
class _Piece:
    """A pass of the sample."""

    label: PassLabel
    stretches: list[_Stretch] = field(default_factory=list)
    slots: int = 0


class _Pieces:
    """All passes of a sample, with the matrices that they are made of."""

    def __init__(self, sample: Sample, segments: SegmentedJob, device: Int64, host: Int64) -> None:
        self.sample, self.segments = sample, segments
        self.work = work_of(sample.job, device[:, None], host[:, None])
        self.matrices: dict[int, TransferMatrix] = {}
        self.chains: dict[tuple[int, ...], SegmentChain] = {}
        self.alike: dict[object, TransferMatrix] = {}
        self.multiplied: dict[tuple[TransferMatrix, ...], SegmentChain] = {}
        self.device, self.host = device, host
        self.columns = self.work.lane, self.work.hosts, device.tolist(), host.tolist()
        self.of = [self._program(number, sequence) for number, sequence in enumerate(segments.sequences)]

    def _program(self, number: int, sequence: SegmentSequence) -> dict[PassLabel, _Piece]:
        calls = self.sample.job.programs[number].calls
        starts = np.cumsum(calls[:, 2] - calls[:, 1])
        call = np.searchsorted(starts, sequence.start[:-1], side="right").tolist()
        labels = [self.sample.labels[number][at] for at in call]
        pieces: dict[PassLabel, _Piece] = {}
        slot_of: dict[int, int] = {}
        for first, end in pairwise(self._bounds(sequence, labels)):
            label = labels[first]
            if label in pieces and labels[first - 1] != label:
                raise NotAlike(f"pass {label} does not run in one go")
            piece = pieces.setdefault(label, _Piece(label=label))
            kinds = tuple(sequence.kind[first:end].tolist())
            kind, outputs = self.segments.kinds[kinds[0]], len(self.segments.kinds[kinds[-1]].outputs)
            waits = sequence.incoming.get(first, ())
            piece.stretches.append(
                _Stretch(
                    chain=None if kind.rendezvous else self._chain(kinds),
                    row=kind.rows.start,
                    inputs=[self._input(sequence, labels, slot_of, label, *its) for its in waits],
                    slot=piece.slots if outputs else NONE,
                )
            )
            slot_of[end - 1] = piece.slots
            piece.slots += outputs
        return pieces

    def _bounds(self, sequence: SegmentSequence, labels: list[PassLabel]) -> list[int]:
        """Where stretches begin: at rendezvous, at what waits and after what is waited for, and with each pass."""
        kinds = self.segments.kinds
        cuts = np.array([kind.rendezvous for kind in kinds] or [False])[sequence.kind]
        cuts[1:] |= cuts[:-1]
        cuts[[*sequence.incoming]] = True
        # An output that nobody waits for is none of the stretch's, so what has outputs ends one always.
        has = np.array([bool(kind.outputs or kind.inputs) for kind in kinds] or [False])[sequence.kind]
        cuts |= has
        cuts[1:] |= has[:-1]
        # Passes that run once or twice are quicker sent through their segments than through a product of them.
        often = self.sample.micro_batches > ONCE
        for at, label in enumerate(labels):
            if not (often and label[1] == 1 and at and label == labels[at - 1]):
                cuts[at] = True
        return [*np.flatnonzero(cuts).tolist(), len(cuts)]

    def _input(
        self,
        sequence: SegmentSequence,
        labels: list[PassLabel],
        slot_of: dict[int, int],
        label: PassLabel,
        port: int,
        edge: int,
    ) -> _Input:
        """What an input waits for, where a pass waits alike in every micro-batch."""
        maker, out_port = sequence.maker[edge]
        of = labels[maker]
        last = min(self.sample.micro_batches, 3) - 1
        if of != label and not (of[1] == label[1] if label != self.sample.update else of[1] == last):
            raise NotAlike(f"pass {label} waits for pass {of}")
        return _Input(port=port, of=None if of == label else of, slot=slot_of[maker] + out_port)

    def _matrix(self, number: int) -> TransferMatrix:
        """The matrix of a kind of segment: one for all kinds that take as long, and wait alike."""
        if number not in self.matrices:
            kind = self.segments.kinds[number]
            rows = slice(kind.rows.start, kind.rows.stop)
            times = tuple(tuple(column[rows]) for column in self.columns)
            key = (*times, kind.waits, kind.inputs, kind.outputs)
            if key not in self.alike:
                self.alike[key] = transfer_matrix(kind, self.work)
            self.matrices[number] = self.alike[key]
        return self.matrices[number]

    def _chain(self, kinds: tuple[int, ...]) -> SegmentChain:
        if kinds not in self.chains:
            matrices = tuple(map(self._matrix, kinds))
            if matrices not in self.multiplied:
                self.multiplied[matrices] = SegmentChain(matrices)
            self.chains[kinds] = self.multiplied[matrices]
        return self.chains[kinds]


ONCE = 8
"""Up to so many micro-batches, passes are not worth a product of their matrices."""


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
_OF_MATRICES = ("over_at", "lanes_at", "lanes_of", "inputs_of", "outputs_of", "uses")
_OF_STRETCHES = ("matrix", "lane", "host", "meets", "slot", "edges_at", "edge_port", "edge_of", "edge_slot")


class _Step:
    """The step as columns.

    Args:
        sample: the passes that differ, and their order.
        pieces: these passes.
        message_ps: what a message takes.
    """

    def __init__(self, sample: Sample, pieces: _Pieces, message_ps: MessageTime) -> None:
        self.sample, self.pieces, self.message_ps = sample, pieces, message_ps
        self.distinct, self.stages = min(sample.micro_batches, 3), len(sample.stand_for)
        self.lines = 2 * self.stages * sample.chunks * EACH
        self.columns: dict[str, list[int]] = {name: [] for name in (*_OF_MATRICES, *_OF_STRETCHES, "piece_at")}
        self.columns["over_at"], self.columns["lanes_at"] = [0], [0]
        self.over: list[Int64] = [np.zeros(0, np.int64)]
        self.lanes: list[int] = []
        self.chains: dict[SegmentChain, int] = {}
        self.names: dict[tuple[str, int], int] = {}
        self.meeting: list[tuple[int, int, int]] = []  # stretch, program, row
        self.pairs: dict[object, int] = {}
        self.number_of = [self._pieces_of(program, its) for program, its in enumerate(pieces.of)]

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

    def _pieces_of(self, program: int, pieces: Mapping[PassLabel, _Piece]) -> dict[PassLabel, int]:
        """Writes the passes of a program; returns their numbers."""
        numbers, columns = {}, self.columns
        for label, piece in pieces.items():
            numbers[label] = len(columns["piece_at"])
            columns["piece_at"].append(len(columns["matrix"]))
            seen: dict[object, int] = {}
            for stretch in piece.stretches:
                columns["edges_at"].append(len(columns["edge_port"]))
                for each in stretch.inputs:
                    name = each.of and self.names.setdefault((each.of[0], each.of[2]), len(self.names))
                    columns["edge_port"].append(each.port)
                    columns["edge_of"].append(NONE if name is None else name)
                    columns["edge_slot"].append(each.slot)
                columns["slot"].append(stretch.slot)
                if stretch.chain is not None:
                    self._add(self._matrix(stretch.chain), NONE, 0, NONE)
                    continue
                row = stretch.row
                self.meeting.append((len(columns["matrix"]), program, row))
                meets = self._meets(program, label, row, seen)
                self._add(NONE, self.pieces.work.lane[row], int(self.pieces.host[row]), meets)
        return numbers

    def _add(self, matrix: int, lane: int, host: int, meets: int) -> None:
        for name, value in zip(_OF_STRETCHES, (matrix, lane, host, meets), strict=False):
            self.columns[name].append(value)

    def _matrix(self, chain: SegmentChain) -> int:
        """The number of a matrix, written when it is first used."""
        if chain not in self.chains:
            self.chains[chain] = len(self.chains)
            self.over.append(chain.over[:, :, 0].ravel())
            self.lanes += chain.lanes
            lanes, columns = len(chain.lanes), self.columns
            columns["over_at"].append(columns["over_at"][-1] + self.over[-1].size)
            columns["lanes_at"].append(len(self.lanes))
            columns["lanes_of"].append(lanes)
            columns["inputs_of"].append(chain.inputs)
            columns["outputs_of"].append(len(chain.over) - lanes)
            columns["uses"].append(chain.uses)
        return self.chains[chain]

    def _meets(self, program: int, label: PassLabel, row: int, seen: dict[object, int]) -> int:
        """Where a communication meets others: `Tables.meets`. What runs in passes are messages between chunks."""
        job, ops = self.sample.job, self.sample.job.ops
        message, tag, group = int(ops.kind[row]) in MESSAGES, int(ops.tag[row]), int(ops.group[row])
        end = int(ops.kind[row]), tag, group
        turn = seen[end] = seen.get(end, -1) + 1
        if label != self.sample.update:
            # A line goes from a chunk to the next one, or back: its tag says from which.
            if not message or turn >= EACH or tag * EACH >= self.lines:
                raise NotAlike(f"pass {label} meets others than its neighbours, or too often")
            return 2 * (tag * EACH + turn)
        key: object = group, turn
        if message:
            if list(self.sample.stand_for).count(program) > 1:
                raise NotAlike("stages that stand for each other exchange messages after their passes")
            here = job.programs[program].coordinates.get("pp", 0)
            ends = here, here + int(ops.peer[row])
            key = group, tag, ends if ops.kind[row] == OpKind.SEND else ends[::-1], turn
        return 2 * self.pairs.setdefault(key, len(self.pairs)) + 1

    # -- all passes ------------------------------------------------------------------------------------------

    def _tables(self) -> Tables:
        sample = self.sample
        columns = {name: np.array(values, np.int64) for name, values in self.columns.items()}
        stretches = len(columns["matrix"])
        columns["piece_at"] = np.append(columns["piece_at"], stretches)
        columns["edges_at"] = np.append(columns["edges_at"], len(columns["edge_port"]))
        columns |= self._passes()
        columns |= self._rendezvous(columns["meets"], stretches)
        sizes = np.array([max(1, len(self.names)), sample.micro_batches, stretches, self.lines], np.int64)
        return Tables(**columns, over=np.concatenate(self.over), lanes=np.array(self.lanes, np.int64), sizes=sizes)

    def _passes(self) -> dict[str, Int64]:
        """The passes of every stage in order, and where the outputs of each stand."""
        sample, slots, found = self.sample, 0, []
        size = np.array([its[label].slots for its in self.pieces.of for label in its], np.int64)
        offset = np.zeros((self.stages, max(1, len(self.names)), sample.micro_batches), np.int64)
        for stage, (program, order) in enumerate(zip(sample.stand_for, sample.orders, strict=True)):
            piece, micro_batch, name = self._in_order(self.number_of[program], order)
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

    def _rendezvous(self, meets: Int64, stretches: int) -> dict[str, Int64]:
        """What each rendezvous takes at each stage, and how many take part."""
        sample, job = self.sample, self.sample.job
        stands: dict[int, list[int]] = {}
        for stage, program in enumerate(sample.stand_for):
            stands.setdefault(program, []).append(stage)
        first = self.lines * sample.micro_batches
        takes, members = np.zeros((self.stages, stretches), np.int64), np.full(first + len(self.pairs), 2)
        members[first:] = 0
        for at, program, row in self.meeting:
            message = int(job.ops.kind[row]) in MESSAGES
            for stage in stands[program]:
                takes[stage, at] = self.message_ps(row, stage) if message else self.pieces.device[row]
            if meets[at] % 2:
                members[first + meets[at] // 2] += len(stands[program])
        places = [job.programs[program].coordinates.get("pp", 0) for program in sample.stand_for]
        shift = 2 * EACH * (np.arange(self.stages) - np.array(places, np.int64))
        return {"takes": takes.ravel(), "members": members, "shift": shift}

    def _state(self, tables: Tables) -> StepState:
        size = np.array([its[label].slots for its in self.pieces.of for label in its], np.int64)
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
