"""The step of a pipeline whose stages and micro-batches are mostly alike, put together from those that differ.

A pass of a stage (forward of one micro-batch, say) does to the clocks of its lanes what `segments` says: it sends
them through a row of max-plus matrices, and waits at messages. Stages that do the same on other layers, and all
micro-batches between the first and the last, have the same rows. So these are cut and worked out once, of a job in
which each distinct pass stands once (`Sample`), and a step is a list of them for every stage, in the order of its
schedule: only clocks go through all of them, and messages keep the times that the places of their stages say.

What cannot be put together so, as what a pass waits for in another micro-batch's, is refused (`NotAlike`), and then
the whole job has to be simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from echograph.ir.columns import NONE, Int64
from echograph.ir.graph import JobGraph
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

Pass = tuple[str, int, int]
"""Kind of a pass, micro-batch, and chunk of the stage."""
UNKNOWN = -(2**63) + 1
"""The end of what has not ended yet."""
LINK = {OpKind.SEND: 1, OpKind.RECV: -1}


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
    labels: Sequence[Sequence[Pass]]
    stand_for: Sequence[int]
    orders: Sequence[PassOrder]
    micro_batches: int
    chunks: int
    update: Pass


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
    def of(cls, passes: Sequence[Pass]) -> PassOrder:
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
    of: Pass | None
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

    label: Pass
    stretches: list[_Stretch] = field(default_factory=list)
    slots: int = 0


class _Pieces:
    """All passes of a sample, with the matrices that they are made of."""

    def __init__(self, sample: Sample, segments: SegmentedJob, device: Int64, host: Int64) -> None:
        self.sample, self.segments = sample, segments
        self.work = work_of(sample.job, device[:, None], host[:, None])
        self.matrices: dict[int, TransferMatrix] = {}
        self.chains: dict[tuple[int, ...], SegmentChain] = {}
        self.device, self.host = device, host
        self.of = [
            self._program(number, sequence) for number, sequence in enumerate(segments.sequences)
        ]

    def _program(self, number: int, sequence: SegmentSequence) -> dict[Pass, _Piece]:
        calls = self.sample.job.programs[number].calls
        starts = np.cumsum(calls[:, 2] - calls[:, 1])
        call = np.searchsorted(starts, sequence.start[:-1], side="right").tolist()
        labels = [self.sample.labels[number][at] for at in call]
        pieces: dict[Pass, _Piece] = {}
        bounds = self._bounds(sequence, labels)
        slot_of: dict[int, int] = {}
        for first, end in zip(bounds, bounds[1:], strict=False):
            label = labels[first]
            piece = pieces.get(label)
            if piece is None:
                piece = pieces[label] = _Piece(label=label)
            elif labels[first - 1] != label:
                raise NotAlike(f"pass {label} does not run in one go")
            slot_of[end - 1] = piece.slots
            kinds = tuple(sequence.kind[first:end].tolist())
            kind = self.segments.kinds[kinds[0]]
            inputs = [self._input(sequence, labels, slot_of, label, *its) for its in sequence.incoming.get(first, ())]
            outputs = len(self.segments.kinds[kinds[-1]].outputs)
            piece.stretches.append(
                _Stretch(
                    chain=None if kind.rendezvous else self._chain(kinds),
                    row=kind.rows.start,
                    inputs=inputs,
                    slot=piece.slots if outputs else NONE,
                )
            )
            piece.slots += outputs
        return pieces

    def _bounds(self, sequence: SegmentSequence, labels: list[Pass]) -> list[int]:
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
        labels: list[Pass],
        slot_of: dict[int, int],
        label: Pass,
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

    def _matrix(self, kind: int) -> TransferMatrix:
        if kind not in self.matrices:
            self.matrices[kind] = transfer_matrix(self.segments.kinds[kind], self.work)
        return self.matrices[kind]

    def _chain(self, kinds: tuple[int, ...]) -> SegmentChain:
        if kinds not in self.chains:
            self.chains[kinds] = SegmentChain(tuple(map(self._matrix, kinds)))
        return self.chains[kinds]


ONCE = 8
"""Up to so many micro-batches, passes are not worth a product of their matrices."""


# -- a step of them -----------------------------------------------------------------------------------------------


class Tables(NamedTuple):
    """What the loop reads: matrices, stretches, pieces, and passes of all stages, as columns.

    A stretch is a chain (`matrix` >= 0) or a rendezvous on `lane`.
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
    slot: Int64
    edges_at: Int64
    edge_port: Int64
    edge_of: Int64
    edge_slot: Int64
    meets: Int64
    piece_at: Int64
    passes_at: Int64
    piece: Int64
    micro_batch: Int64
    base: Int64
    offset: Int64
    offset_at: Int64
    takes: Int64
    members: Int64


class State(NamedTuple):
    """What the loop changes."""

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
    ends_after: Int64
    of_slot: Int64
    entry: Int64
    count: Int64


class _Step:
    """The step as columns."""

    def __init__(self, sample: Sample, pieces: _Pieces, message_ps: MessageTime) -> None:
        self.sample, self.pieces, self.message_ps = sample, pieces, message_ps
        self.distinct = min(sample.micro_batches, 3)
        self.stages = len(sample.stand_for)
        self.total = self.stages * sample.chunks
        self.pairs: dict[object, int] = {}

    def run(self) -> int:
        """When it ends."""
        tables, state = self._tables()
        loop = compiled(_send_through, _known, _arrive)
        loop(tables, state)
        if (state.at < np.diff(tables.passes_at)).any() or state.pending.any():
            raise NotAlike("passes wait for each other in a circle")
        return int(state.clocks.max(initial=0))

    def _tables(self) -> tuple[Tables, State]:
        sample = self.sample
        chains: dict[SegmentChain, int] = {}
        over: list[Int64] = []
        lanes: list[int] = []
        columns: dict[str, list[int]] = {name: [] for name in Tables._fields}
        columns["over_at"], columns["lanes_at"] = [0], [0]
        # Passes that a pass names are numbered by kind and chunk.
        names: dict[tuple[str, int], int] = {}
        number_of: list[dict[Pass, int]] = []
        meeting: list[tuple[int, int, _Stretch]] = []  # stretch, program, and what it is
        for program, its in enumerate(self.pieces.of):
            numbers: dict[Pass, int] = {}
            for label, piece in its.items():
                numbers[label] = len(columns["piece_at"])
                columns["piece_at"].append(len(columns["matrix"]))
                nth: dict[int, int] = {}
                for stretch in piece.stretches:
                    columns["edges_at"].append(len(columns["edge_port"]))
                    for each in stretch.inputs:
                        columns["edge_port"].append(each.port)
                        name = None if each.of is None else (each.of[0], each.of[2])
                        columns["edge_of"].append(NONE if name is None else names.setdefault(name, len(names)))
                        columns["edge_slot"].append(each.slot)
                    columns["slot"].append(stretch.slot)
                    if stretch.chain is None:
                        meeting.append((len(columns["matrix"]), program, stretch))
                        columns["matrix"].append(NONE)
                        columns["lane"].append(self.pieces.work.lane[stretch.row])
                        columns["host"].append(int(self.pieces.host[stretch.row]))
                        columns["meets"].append(self._meets(program, label, stretch.row, nth))
                        continue
                    chain = stretch.chain
                    if chain not in chains:
                        chains[chain] = len(chains)
                        over.append(chain.over[:, :, 0].ravel())
                        columns["over_at"].append(columns["over_at"][-1] + over[-1].size)
                        lanes += chain.lanes
                        columns["lanes_at"].append(len(lanes))
                        columns["lanes_of"].append(len(chain.lanes))
                        columns["inputs_of"].append(chain.inputs)
                        columns["outputs_of"].append(chain.over.shape[0] - len(chain.lanes))
                        columns["uses"].append(chain.uses)
                    columns["matrix"].append(chains[chain])
                    for name_of in ("lane", "host", "meets"):
                        columns[name_of].append(NONE)
            number_of.append(numbers)
        columns["piece_at"].append(len(columns["matrix"]))
        columns["edges_at"].append(len(columns["edge_port"]))
        arrays = {name: np.array(values, np.int64) for name, values in columns.items()}
        arrays["over"] = np.concatenate(over) if over else np.zeros(0, np.int64)
        arrays["lanes"] = np.array(lanes, np.int64)
        slots = self._passes(arrays, number_of, names)
        rendezvous = self._rendezvous(arrays, meeting)
        lanes_count = 1 + len(sample.job.streams)
        # How often programs arrive anywhere.
        count = np.add.reduceat(
            np.append(arrays["matrix"] == NONE, False), arrays["piece_at"][:-1]
        ) * (np.diff(arrays["piece_at"]) > 0)
        arrivals = int(count[arrays["piece"]].sum())
        state = State(
            clocks=np.zeros((self.stages, lanes_count), np.int64),
            pending=np.zeros(self.stages, np.int64),
            at=np.zeros(self.stages, np.int64),
            stretch=np.zeros(self.stages, np.int64),
            slots=np.full(slots, UNKNOWN, np.int64),
            arrived=np.zeros(rendezvous, np.int64),
            begins=np.full(rendezvous, NEVER, np.int64),
            head=np.full(rendezvous, NONE, np.int64),
            behind=np.zeros(arrivals, np.int64),
            of_stage=np.zeros(arrivals, np.int64),
            of_lane=np.zeros(arrivals, np.int64),
            ends_after=np.zeros(arrivals, np.int64),
            of_slot=np.zeros(arrivals, np.int64),
            entry=np.zeros(64 + int(arrays["inputs_of"].max(initial=0)), np.int64),
            count=np.zeros(1, np.int64),
        )
        return Tables(**arrays), state

    def _passes(
        self, arrays: dict[str, Int64], number_of: list[dict[Pass, int]], names: Mapping[tuple[str, int], int]
    ) -> int:
        """The passes of every stage in order, and where the outputs of each stand; returns how many there are."""
        sample, slots = self.sample, 0
        size = np.array([its[label].slots for its in self.pieces.of for label in its], np.int64)
        passes, micro_batches, bases, at = [], [], [], [0]
        offsets = np.full((self.stages, max(1, len(names)), sample.micro_batches), 0, np.int64)
        for stage, (program, order) in enumerate(zip(sample.stand_for, sample.orders, strict=True)):
            numbers = number_of[program]
            micro, chunk, kind = order.micro_batch, order.chunk, order.kind
            which = np.where(micro == sample.micro_batches - 1, self.distinct - 1, np.minimum(micro, 1))
            table = np.full((len(order.kinds), self.distinct, sample.chunks), NONE)
            named = np.full((len(order.kinds), sample.chunks), NONE)
            for (what, m, its), number in numbers.items():
                if what in order.kinds:
                    table[order.kinds.index(what), m, its] = number
            for (what, its), number in names.items():
                if what in order.kinds:
                    named[order.kinds.index(what), its] = number
            piece = np.append(table[kind, which, chunk], numbers.get(sample.update, NONE))
            name = np.append(named[kind, chunk], NONE)
            micro = np.append(micro, sample.micro_batches - 1)
            here = piece >= 0
            piece, micro, name = piece[here], micro[here], name[here]
            taken = size[piece]
            base = slots + np.cumsum(taken) - taken
            slots += int(taken.sum())
            its = name >= 0
            offsets[stage, name[its], micro[its]] = base[its]
            passes.append(piece)
            micro_batches.append(micro)
            bases.append(base)
            at.append(at[-1] + len(piece))
        arrays["piece"], arrays["micro_batch"] = np.concatenate(passes), np.concatenate(micro_batches)
        arrays["base"], arrays["passes_at"] = np.concatenate(bases), np.array(at, np.int64)
        arrays["offset"] = offsets.ravel()
        arrays["offset_at"] = np.array(offsets.shape, np.int64)
        return slots

    # -- who meets whom --------------------------------------------------------------------------------------

    def _meets(self, program: int, label: Pass, row: int, nth: dict[int, int]) -> int:
        """A number of the line between two chunks that a message takes, and its place there; of others, their own.

        Numbers of messages are even, with the line relative to the stage: `_rendezvous` makes them those of a
        stage and a micro-batch.
        """
        ops = self.sample.job.ops
        kind, tag = int(ops.kind[row]), int(ops.tag[row])
        number = nth.setdefault(row, 0)
        nth[row] += 1
        same = nth.setdefault(-1 - (2 * tag + (kind == OpKind.SEND)), 0)
        nth[-1 - (2 * tag + (kind == OpKind.SEND))] += 1
        del number
        if kind in LINK and tag < 2 * self.total and label != self.sample.update:
            return 2 * (tag * EACH + same) if same < EACH else self._refuse("too many messages cross")
        if label != self.sample.update:
            self._refuse("stages meet within a pass")
        job, its = self.sample.job, self.sample.job.programs[program]
        group = int(ops.group[row])
        key: object = ("all", group, same if kind != OpKind.COLLECTIVE else self._turn(program, group))
        if kind in LINK:
            if list(self.sample.stand_for).count(program) > 1:
                self._refuse("a message of stages that stand for others")
            here = its.coordinates.get("pp", 0)
            there = here + int(ops.peer[row])
            key = (group, min(here, there), max(here, there), tag, here < there) if kind == OpKind.SEND else (
                group, min(here, there), max(here, there), tag, here > there
            )
            key = (*key, same)
        del job
        return 2 * self.pairs.setdefault(key, len(self.pairs)) + 1

    def _turn(self, program: int, group: int) -> int:
        turn = self.__dict__.setdefault("turns", {})
        turn[program, group] = turn.get((program, group), -1) + 1
        found: int = turn[program, group]
        return found

    def _refuse(self, why: str) -> int:
        raise NotAlike(why)

    def _rendezvous(
        self, arrays: dict[str, Int64], meeting: list[tuple[int, int, _Stretch]]
    ) -> int:
        """What messages take at each stage, and of how many each rendezvous is; returns how many there are."""
        sample, job = self.sample, self.sample.job
        stands: dict[int, list[int]] = {}
        for stage, program in enumerate(sample.stand_for):
            stands.setdefault(program, []).append(stage)
        takes = np.zeros((self.stages, len(arrays["matrix"])), np.int64)
        lines = 2 * self.total * EACH
        members = np.full(lines * sample.micro_batches + len(self.pairs), 2, np.int64)
        members[lines * sample.micro_batches :] = 0
        for at, program, stretch in meeting:
            own = int(job.ops.kind[stretch.row])
            for stage in stands[program]:
                takes[stage, at] = (
                    self.message_ps(stretch.row, stage) if own in LINK else self.pieces.device[stretch.row]
                )
            if arrays["meets"][at] % 2:
                members[lines * sample.micro_batches + arrays["meets"][at] // 2] += len(stands[program])
        arrays["takes"], arrays["members"] = takes.ravel(), members
        # How far the line of a stage is from that of the stage that stands for it.
        stands_at = [int(job.programs[program].coordinates.get("pp", 0)) for program in sample.stand_for]
        shift = np.arange(self.stages) - np.array(stands_at)
        arrays["meets"] = np.concatenate(
            [arrays["meets"], shift * 2 * EACH, [lines, sample.micro_batches, len(arrays["matrix"])]]
        )
        return len(members)


EACH = 8
"""Messages from a chunk to the next one in one pass, at most."""


def _known(tables: Tables, state: State, stage: int, stretch: int, base: int, micro_batch: int, first: int) -> bool:
    """Writes when the inputs of a stretch ended behind its clocks; whether all are known."""
    names, count = tables.offset_at[1], tables.offset_at[2]
    for edge in range(tables.edges_at[stretch], tables.edges_at[stretch + 1]):
        of = tables.edge_of[edge]
        where = base if of < 0 else tables.offset[(stage * names + of) * count + micro_batch]
        end = state.slots[where + tables.edge_slot[edge]]
        if end == UNKNOWN:
            return False
        port = first + tables.edge_port[edge]
        if end > state.entry[port]:
            state.entry[port] = end
    return True


def _arrive(tables: Tables, state: State, meeting: int, arrival: int) -> None:
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


def _send_through(tables: Tables, state: State) -> None:
    """Sends the clocks of all stages through their passes, each as far as it gets, until none gets further."""
    stages = len(tables.passes_at) - 1
    count = len(tables.meets) - 3 - stages
    lines, micro_batches, stretches = tables.meets[-3], tables.meets[-2], tables.meets[-1]
    moved = True
    while moved:
        moved = False
        for stage in range(stages):
            while state.at[stage] < tables.passes_at[stage + 1] - tables.passes_at[stage]:
                place = tables.passes_at[stage] + state.at[stage]
                piece, base, micro_batch = tables.piece[place], tables.base[place], tables.micro_batch[place]
                stretch, end = tables.piece_at[piece] + state.stretch[stage], tables.piece_at[piece + 1]
                waits = False
                while stretch < end:
                    matrix = tables.matrix[stretch]
                    if matrix < 0:
                        lane = tables.lane[stretch]
                        state.entry[0] = NEVER
                        if state.pending[stage] & (1 | 1 << lane) or not _known(
                            tables, state, stage, stretch, base, micro_batch, 0
                        ):
                            waits = True
                            break
                        state.clocks[stage, 0] += tables.host[stretch]
                        ready = max(state.clocks[stage, 0], state.clocks[stage, lane], state.entry[0])
                        meeting = tables.meets[stretch]
                        if meeting % 2:
                            meeting = lines * micro_batches + meeting // 2
                        else:
                            meeting = (meeting // 2 + tables.meets[count + stage]) * micro_batches + micro_batch
                        if ready > state.begins[meeting]:
                            state.begins[meeting] = ready
                        state.pending[stage] |= 1 << lane
                        arrival = state.count[0]
                        state.count[0] += 1
                        state.of_stage[arrival], state.of_lane[arrival] = stage, lane
                        state.ends_after[arrival] = tables.takes[stage * stretches + stretch]
                        slot = tables.slot[stretch]
                        state.of_slot[arrival] = base + slot if slot >= 0 else -1
                        _arrive(tables, state, meeting, arrival)
                    else:
                        if state.pending[stage] & tables.uses[matrix]:
                            waits = True
                            break
                        lanes, first = tables.lanes_of[matrix], tables.lanes_at[matrix]
                        entries = lanes + tables.inputs_of[matrix]
                        for each in range(lanes):
                            state.entry[each] = state.clocks[stage, tables.lanes[first + each]]
                        for each in range(lanes, entries):
                            state.entry[each] = NEVER
                        if not _known(tables, state, stage, stretch, base, micro_batch, lanes):
                            waits = True
                            break
                        over = tables.over_at[matrix]
                        for out in range(lanes + tables.outputs_of[matrix]):
                            latest = tables.over[over] + state.entry[0]
                            for each in range(1, entries):
                                latest = max(latest, tables.over[over + each] + state.entry[each])
                            over += entries
                            if out < lanes:
                                state.clocks[stage, tables.lanes[first + out]] = latest
                            else:
                                state.slots[base + tables.slot[stretch] + out - lanes] = latest
                    stretch += 1
                    moved = True
                state.stretch[stage] = stretch - tables.piece_at[piece]
                if waits:
                    break
                state.at[stage] += 1
                state.stretch[stage] = 0
                moved = True
