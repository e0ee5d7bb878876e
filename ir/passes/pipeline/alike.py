"""Stages of a pipeline that do the same on layers of their own: each is lowered once, and the job is made of them.

A `Sample` is a job of the stages and the micro-batches that differ. Its programs run pass by pass, and each call
says of which pass it is; a schedule says in which order a stage runs its passes. `whole` puts the job of all
stages together: every stage has the rows of the one that stands for it, and calls them for layers of its own, in
its own order. That job is the one that the passes make of all stages, one by one: what depends on the stage is in
names, tags of messages, and the instances that calls and bindings name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from echograph.ir.columns import (
    NONE,
    OP_COLUMNS,
    TENSOR_COLUMNS,
    Column,
    Holds,
    Int64,
    OpTable,
    Ragged,
    TensorTable,
    enumerate_ranges,
    equal_rows,
)
from echograph.ir.graph import Block, Instance, JobGraph, Program
from echograph.ir.passes.rewrite import ACCUMULATE, PassLabel
from echograph.ir.types import OpKind
from echograph.ir.verify import verify

AXIS = "pp"
"""The mesh axis of the stages."""
DISTINCT = 3
"""Micro-batches that differ: gradients are not added yet, added, or added and reduced."""


class NotAlike(Exception):
    """A step is not what its distinct passes say; the reason, for tests."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassOrder:
    """The passes of all stages, each stage's in order and its update behind them, as columns.

    Attributes:
        kinds: names of the kinds of passes.
        at: int64 [stages + 1], where the passes of each stage begin.
        kind: int64, number of each pass's kind.
        micro_batch: int64; of an update that of the last pass.
        chunk: int64.
    """

    kinds: tuple[str, ...]
    at: Int64
    kind: Int64
    micro_batch: Int64
    chunk: Int64

    @classmethod
    def of(cls, stages: Sequence[Sequence[PassLabel]], update: PassLabel) -> PassOrder:
        """The columns of passes.

        Args:
            stages: the passes of each.
            update: what each does once they are done.
        """
        every = [its for passes in stages for its in (*passes, update)]
        names, micro_batches, chunks = zip(*every, strict=True)
        kinds = {kind: number for number, kind in enumerate(dict.fromkeys(names))}
        micro_batch, at = np.array(micro_batches, np.int64), np.cumsum([0, *(len(its) + 1 for its in stages)])
        micro_batch[at[1:] - 1] = micro_batch.max()
        kind, chunk = np.array([kinds[name] for name in names], np.int64), np.array(chunks, np.int64)
        return cls(kinds=tuple(kinds), at=at, kind=kind, micro_batch=micro_batch, chunk=chunk)

    def of_pieces(
        self, pieces: Sequence[Mapping[PassLabel, int]], stand_for: Sequence[int], chunks: int, update: PassLabel
    ) -> Int64:
        """Of every pass the number of the piece that it is; -1 where it has nothing to do, as an update may have.

        Args:
            pieces: of each program that stands for stages, the number of each of its passes.
            stand_for: the program of each stage.
            chunks: of each stage.
            update: the label of updates, which stand once, whatever the micro-batch that they follow.
        """
        number, last = {kind: n for n, kind in enumerate(self.kinds)}, int(self.micro_batch.max(initial=0))
        count = min(last + 1, DISTINCT)
        found = np.full((len(pieces), len(self.kinds), count, chunks), NONE)
        for program, its in enumerate(pieces):
            for label, piece in its.items():
                kind, micro_batch, chunk = label
                found[program, number[kind], slice(None) if label == update else micro_batch, chunk] = piece
        which = np.where(self.micro_batch == last, count - 1, np.minimum(self.micro_batch, 1))
        stage = np.repeat(np.arange(len(stand_for)), np.diff(self.at))
        return np.asarray(found[np.array(stand_for, np.int64)[stage], self.kind, which, self.chunk], np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """A job of the passes that differ, and how a step is made of them.

    Attributes:
        job: a program for each distinct stage, over as many micro-batches as differ, pass by pass.
        labels: for each program, the pass that each of its calls is of.
        stand_for: for every stage of the step, the program of the stage that stands for it.
        order: the passes of all stages.
        micro_batches: of the step.
        chunks: of each stage.
        update: the label of what is done once all passes are.
        names: of what depends on the stage in names; None where that is not known.
    """

    job: JobGraph
    labels: Sequence[Sequence[PassLabel]]
    stand_for: Sequence[int]
    order: PassOrder
    micro_batches: int
    chunks: int
    update: PassLabel
    names: StageNames | None = None


_PATTERN = re.compile("\0{(\\d+)(?:,(\\d+),(-?\\d+))?}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageNames:
    """What depends on the stage in the names of a stage that stands for others: chunks, and layers, as patterns.

    Attributes:
        first: for every chunk and block of layers, the first instance that the chunk has.
        labels: of all layers, by block.
        elsewhere: for the label of a layer, and which of the operations that it names, the label of the layer of
            another stage whose operation that is. One of its own stands for it.
    """

    first: Mapping[tuple[int, int], int]
    labels: Mapping[int, tuple[str, ...]]
    elsewhere: dict[tuple[str, int], str] = field(default_factory=dict)

    def chunk(self, number: int) -> str:
        """The pattern of a chunk's number."""
        return f"\0{{{number}}}"

    def layer(self, chunk: int, block: int, instance: int, its: int) -> str:
        """The pattern of a layer's label, told by how far it is from the first such layer of a chunk.

        Args:
            chunk: that names it, and from whose layers it counts if it has any of the block.
            block: of the layer.
            instance: of the layer.
            its: the chunk that has it.
        """
        of = chunk if (chunk, block) in self.first else its
        return f"\0{{{of},{block},{instance - self.first[of, block]}}}"

    def note(self, chunk: int, layer: tuple[int, int], at: int, other: tuple[int, int], its: int) -> None:
        """Notes that an operation which a layer of a chunk names is of a layer of another stage, in its chunk."""
        self.elsewhere[self.layer(chunk, *layer, chunk), at] = self.layer(chunk, *other, its)

    def located(self, label: str, shift: int) -> tuple[int, int]:
        """Block and instance of a layer by the pattern of its label, of a stage as of `resolved`."""
        found = _PATTERN.fullmatch(label)
        assert found is not None
        chunk, block, behind = (int(found[at]) for at in (1, 2, 3))
        return block, self.first[chunk + shift, block] + behind

    def resolved(self, text: str, shift: int) -> str:
        """A name with patterns, of the stage that is so many behind the one that stands for it."""

        def one(found: re.Match[str]) -> str:
            if found[2] is None:
                return str(int(found[1]) + shift)
            block, instance = self.located(found[0], shift)
            return self.labels[block][instance]

        return _PATTERN.sub(one, text)


def whole(sample: Sample) -> JobGraph:
    """The job of all stages, as the passes make it that made the sample.

    Raises:
        NotAlike: stages cannot be told apart by the blocks that they call, or a pass does not run in one go.
        GraphError: the job breaks an invariant.
    """
    if sample.names is None:
        raise NotAlike("names of some operations are lost")
    job = _Whole(sample, sample.names).job()
    verify(job)
    return job


class _Copy(NamedTuple):
    """A block of the whole job: of the sample, of a stage or of all, with instances of stages."""

    block: int
    shift: int
    instances: list[tuple[int, int]]


class _Whole:
    """Puts a job together.

    Instances of all blocks of the sample are numbered one after the other ("slots").

    Args:
        sample: the passes that differ.
        names: of it.
    """

    def __init__(self, sample: Sample, names: StageNames) -> None:
        self.sample, self.graph, self.names = sample, sample.job, names
        blocks, programs = self.graph.blocks, self.graph.programs
        self.stages = len(sample.stand_for)
        self.stand_for = np.array(sample.stand_for, np.int64)
        places = np.array([program.coordinates[AXIS] for program in programs], np.int64)
        self.shift = np.arange(self.stages) - places[self.stand_for]
        self.first = np.cumsum([0, *(len(block.instances) for block in blocks)])
        self.owner, self.chunk = self._owners()
        self.copies = self._copies()
        # Of every stage and slot: its block in the whole job, and its instance there; -1 of others' slots.
        self.block_of, self.instance_of = np.full((2, self.stages, int(self.first[-1])), NONE)
        for number, copy in enumerate(self.copies):
            for place, (stage, slot) in enumerate(copy.instances):
                self.block_of[stage, slot], self.instance_of[stage, slot] = number, place

    def job(self) -> JobGraph:
        """All of it."""
        rows = _Rows(self.sample, self.names, self.copies)
        return replace(
            self.graph,
            tensors=rows.tensors,
            ops=rows.ops,
            blocks=self._blocks(rows),
            programs=tuple(self._program(stage, rows) for stage in range(self.stages)),
        )

    # -- who has what --------------------------------------------------------------------------------------

    def _owners(self) -> tuple[Int64, Int64]:
        """Of every slot the program that calls it, and which of its chunks."""
        graph, count = self.graph, int(self.first[-1])
        owner, chunk = np.full(count, NONE), np.full(count, self.sample.chunks)
        for number, (program, labels) in enumerate(zip(graph.programs, self.sample.labels, strict=True)):
            slot = self.first[program.calls[:, 0]] + program.calls[:, 3]
            if ((owner[slot] != NONE) & (owner[slot] != number)).any():
                raise NotAlike("two stages call one instance of a block")
            owner[slot] = number
            of_call = [its if kind != self.sample.update[0] else self.sample.chunks for kind, _, its in labels]
            np.minimum.at(chunk, slot, np.array(of_call, np.int64))
        for left in np.flatnonzero(owner == NONE).tolist():
            # What nobody calls is of the stage whose tensors it names.
            block = int(np.searchsorted(self.first, left, side="right")) - 1
            bound = graph.blocks[block].instances[left - int(self.first[block])].bindings
            names = {int(owner[self._slot_of(identity)]) for identity in bound}
            if len(names) != 1 or NONE in names:
                raise NotAlike(f"no stage calls block {graph.blocks[block].name}")
            owner[left] = names.pop()
        return owner, np.where(chunk == self.sample.chunks, 0, chunk)

    def _slot_of(self, tensor: int) -> int:
        block, instance, _ = self.graph.locate_tensor(tensor)
        return int(self.first[block]) + instance

    def _copies(self) -> list[_Copy]:
        """The blocks of the whole job, in the order in which passes write them.

        Layers are instances of one block for all stages. Chunks come by their numbers, and what is added for a
        stage stage by stage.
        """
        found: list[tuple[tuple[int, int, int], _Copy]] = []
        section, before = NONE, None
        for number, block in enumerate(self.graph.blocks):
            slots = range(int(self.first[number]), int(self.first[number + 1]))
            kind = self._kind(number, block)
            section += kind != before or kind == "layers"
            before = kind
            of_stages = [
                (stage, slot)
                for slot in slots
                for stage in np.flatnonzero(self.stand_for == self.owner[slot]).tolist()
            ]
            if kind == "layers":
                of_stages.sort(key=lambda its: (int(self.chunk[its[1]]), *its))
                found.append(((section, 0, 0), _Copy(number, 0, of_stages)))
                continue
            if len(slots) != 1:
                raise NotAlike(f"block {block.name} is of several stages, and its instances have no labels")
            for stage, slot in of_stages:
                behind = int(self.chunk[slot]) * self.stages if kind == "chunk" else 0
                found.append(
                    ((section, behind + stage, number), _Copy(number, int(self.shift[stage]), [(stage, slot)]))
                )
        found.sort(key=lambda its: its[0])
        if len(found[0][1].instances) != 1 or found[0][1].block:
            raise NotAlike("the main block is of several stages")
        return [copy for _, copy in found]

    def _kind(self, number: int, block: Block) -> str:
        """What a block is, as far as that decides where its copies stand."""
        if any(instance.label for instance in block.instances):
            return "layers"
        if number == 0 or _PATTERN.search(block.name):
            return "chunk" if number else "main"
        return ACCUMULATE if block.name == ACCUMULATE else ""

    # -- blocks and programs -------------------------------------------------------------------------------

    def _blocks(self, rows: _Rows) -> tuple[Block, ...]:
        graph, ports = self.graph, self.graph.ports
        own = np.array([count for _, count in graph.tensor_bases], np.int64)
        width = np.array([count for _, count in graph.op_bases], np.int64)
        of = np.array([copy.block for copy in self.copies], np.int64)
        counts = np.array([len(copy.instances) for copy in self.copies], np.int64)
        bases, op_bases = (np.cumsum(size[of] * counts) - size[of] * counts for size in (own, width))
        block, instance, row = ports.located
        bound, position = self.first[block] + instance, graph.local_position[row]
        begin = np.cumsum([0, *(len(i.bindings) for b in graph.blocks for i in b.instances)]).tolist()
        ids = []
        for stage in range(self.stages):
            where = self.block_of[stage, bound]
            mine = bases[where] + self.instance_of[stage, bound] * own[block] + position
            ids.append(np.where(where == NONE, NONE, mine).tolist())
        made = []
        for copy, (tensors, ops) in zip(self.copies, rows.ranges, strict=True):
            old = graph.blocks[copy.block]
            instances = []
            for stage, slot in copy.instances:
                its = old.instances[slot - int(self.first[copy.block])]
                bindings = tuple(ids[stage][begin[slot] : begin[slot + 1]])
                if NONE in bindings:
                    raise NotAlike(f"stage {stage} reads what another stage has")
                op_bindings = tuple(
                    self._op_id(stage, its.label, at, op, op_bases) for at, op in enumerate(its.op_bindings)
                )
                label = self.names.resolved(its.label, int(self.shift[stage]))
                instances.append(Instance(label=label, bindings=bindings, op_bindings=op_bindings))
            name = self.names.resolved(old.name, copy.shift)
            made.append(Block(name=name, tensors=tensors, ops=ops, instances=tuple(instances)))
        return tuple(made)

    def _op_id(self, stage: int, label: str, at: int, identity: int, bases: Int64) -> int:
        """The id of an operation that a stage names.

        Args:
            stage: the stage.
            label: of the layer of the sample that names it.
            at: which of those that it names.
            identity: in the sample.
            bases: the first id of every block.
        """
        block, instance, row = self.graph.locate_op(identity)
        slot, own = int(self.first[block]) + instance, self.graph.blocks[block].ops
        if (label, at) in self.names.elsewhere:
            other = self.names.located(self.names.elsewhere[label, at], int(self.shift[stage]))
            stage, slot = self._layers[other]
        elif self.owner[slot] != self.stand_for[stage]:  # of the main block, where one stage alone has it
            stage, *others = np.flatnonzero(self.stand_for == self.owner[slot]).tolist()
            if others:
                raise NotAlike(f"block {self.graph.blocks[block].name} is named by other stages")
        where = int(self.block_of[stage, slot])
        if len(self.graph.blocks[self.copies[where].block].ops) != len(own):
            raise NotAlike("layers of one block differ in their operations")
        return int(bases[where]) + int(self.instance_of[stage, slot]) * len(own) + row - own.start

    @cached_property
    def _layers(self) -> dict[tuple[int, int], tuple[int, int]]:
        """The stage and slot of every layer of the step."""
        found = {}
        for number, block in enumerate(self.graph.blocks):
            for slot, instance in enumerate(block.instances, int(self.first[number])):
                for stage in np.flatnonzero(self.block_of[:, slot] != NONE).tolist() if instance.label else ():
                    found[self.names.located(instance.label, int(self.shift[stage]))] = stage, slot
        return found

    def _program(self, stage: int, rows: _Rows) -> Program:
        order, number = self.sample.order, int(self.stand_for[stage])
        program = self.graph.programs[number]
        its = slice(int(order.at[stage]), int(order.at[stage + 1]))
        piece = self._pieces[its]
        does = np.flatnonzero(piece >= 0)
        begin, end = self._bounds[number]
        piece, micro_batch = piece[does], order.micro_batch[its][does]
        run, which = enumerate_ranges(begin[piece], end[piece])
        calls = program.calls[which]
        slot = self.first[calls[:, 0]] + calls[:, 3]
        block = self.block_of[stage, slot]
        moved = rows.op_starts[block] - self._op_starts[calls[:, 0]]
        calls[:, 0], calls[:, 3] = block, self.instance_of[stage, slot]
        calls[:, 1:3] += moved[:, None]
        calls[:, 4] = micro_batch[run]
        calls.setflags(write=False)
        coordinates = {**program.coordinates, AXIS: stage}
        return replace(program, calls=calls, role=f"stage {stage}", coordinates=coordinates)

    @cached_property
    def _op_starts(self) -> Int64:
        return np.array([block.ops.start for block in self.graph.blocks], np.int64)

    @cached_property
    def _runs(self) -> list[dict[PassLabel, tuple[int, int]]]:
        """Of each program, the calls of every pass: where they begin and end."""
        found = []
        for labels in self.sample.labels:
            its: dict[PassLabel, tuple[int, int]] = {}
            for at, label in enumerate(labels):
                begin, end = its.get(label, (at, at))
                if end != at:
                    raise NotAlike(f"pass {label} does not run in one go")
                its[label] = begin, at + 1
            found.append(its)
        return found

    @cached_property
    def _bounds(self) -> list[tuple[Int64, Int64]]:
        """Of each program, where the calls of its passes begin and end."""
        columns = [np.array(list(its.values()), np.int64).reshape(-1, 2) for its in self._runs]
        return [(its[:, 0], its[:, 1]) for its in columns]

    @cached_property
    def _pieces(self) -> Int64:
        """Of every pass of the step its number among those of the program that stands for its stage."""
        sample = self.sample
        numbers = [{label: number for number, label in enumerate(its)} for its in self._runs]
        return sample.order.of_pieces(numbers, sample.stand_for, sample.chunks, sample.update)


class _Rows:
    """The tables of the whole job.

    Args:
        sample: the passes that differ.
        names: of it.
        copies: the blocks of the job.

    Attributes:
        tensors: the table.
        ops: the table.
        ranges: rows of both, of every block.
        op_starts: first row of the operations of every block.
    """

    def __init__(self, sample: Sample, names: StageNames, copies: Sequence[_Copy]) -> None:
        self.names, graph = names, sample.job
        blocks = [graph.blocks[copy.block] for copy in copies]
        plain = (text for text in graph.strings if not _PATTERN.search(text))
        self._strings = {text: number for number, text in enumerate(plain)}
        self._shift = [copy.shift for copy in copies]
        tensors, ops = ([getattr(block, side) for block in blocks] for side in ("tensors", "ops"))
        starts, self.op_starts = (_starts(its) for its in (tensors, ops))
        self.ranges = [
            (range(t, t + len(block.tensors)), range(o, o + len(block.ops)))
            for t, o, block in zip(starts.tolist(), self.op_starts.tolist(), blocks, strict=True)
        ]
        moved = starts - [its.start for its in tensors], self.op_starts - [its.start for its in ops]
        columns = self._gathered(graph, graph.tensors, TENSOR_COLUMNS, tensors, moved)
        op_columns = self._gathered(graph, graph.ops, OP_COLUMNS, ops, moved)
        op_columns["tag"] = self._tags(sample, op_columns, np.repeat(self._shift, [len(its) for its in ops]))
        strings = tuple(self._strings)
        self.tensors = TensorTable(strings=strings, **columns)
        self.ops = OpTable(strings=strings, attribute_values=graph.ops.attribute_values, **op_columns)

    def _gathered(
        self,
        graph: JobGraph,
        table: TensorTable | OpTable,
        columns: Mapping[str, Column],
        blocks: Sequence[range],
        moved: tuple[Int64, Int64],
    ) -> dict[str, Any]:
        """The columns of a table whose blocks are copies.

        Args:
            graph: the sample.
            table: of it.
            columns: of the table.
            blocks: rows of each copy's block.
            moved: how much later the tensors, and the operations, of each copy stand.
        """
        lengths = [len(its) for its in blocks]
        rows = np.concatenate([np.arange(its.start, its.stop) for its in blocks])
        copy = np.repeat(np.arange(len(blocks)), lengths)
        by = {Holds.TENSOR: moved[0], Holds.OP: moved[1]}
        found: dict[str, Any] = {}
        for name, column in columns.items():
            old = getattr(table, name)
            ragged = old if column.ragged else getattr(table, column.of) if column.of else None
            of, values = copy, old
            if ragged is not None:
                counts, where = ragged.places(rows)
                of, values = np.repeat(copy, counts), (old.values if column.ragged else old)[where]
            else:
                values = old[rows]
            if column.holds == Holds.STRING:
                values = self._renamed(graph, of, values)
            elif column.holds in by:
                values = np.where(values >= 0, values + by[column.holds][of], values)
            values = values.astype(old.values.dtype if column.ragged else old.dtype)
            found[name] = Ragged(np.append(0, np.cumsum(counts)), values) if column.ragged else values
        return found

    def _renamed(self, graph: JobGraph, copy: Int64, values: Int64) -> Int64:
        """Numbers of strings, for those of the sample; each of a copy."""
        shift = np.array(self._shift, np.int64)[copy]
        example, which = equal_rows(shift * len(graph.strings) + values)
        numbers = [
            self._number(graph.strings[value], by)
            for value, by in zip(values[example].tolist(), shift[example].tolist(), strict=True)
        ]
        return np.array(numbers, np.int64)[which]

    def _number(self, text: str, shift: int) -> int:
        text = self.names.resolved(text, shift) if "\0" in text else text
        return self._strings.setdefault(text, len(self._strings))

    def _tags(self, sample: Sample, columns: Mapping[str, Any], shift: Int64) -> Int64:
        """Tags of messages: between chunks they say from which, two of each."""
        graph, tag = sample.job, columns["tag"]
        of_stages = np.array([AXIS in group.axes for group in graph.groups] + [False], np.bool_)
        between = np.isin(columns["kind"], (OpKind.SEND, OpKind.RECV)) & of_stages[columns["group"]]
        between &= tag < 2 * len(sample.stand_for) * sample.chunks
        return np.asarray(np.where(between, tag + 2 * shift, tag), np.int64)


def _starts(blocks: Sequence[range]) -> Int64:
    lengths = np.array([len(its) for its in blocks], np.int64)
    return np.asarray(np.cumsum(lengths) - lengths, np.int64)
