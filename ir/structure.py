"""What of a graph does not depend on its sizes, and what a pass made of one graph with the sizes of another.

A pass that decides by what operations are, and by what they read and make, does the same to every graph of one
structure: another micro-batch or another number of tensor-parallel ranks changes extents, bytes and FLOPs alone.
So its result is kept as a `Sized`, which knows of each row where its sizes come from. A pass that looks at the
sizes of what lives through the step, as to divide it, does the same to every graph in which these are equal
(`at_rest`), whatever its activations: its result is kept as a `Resizable`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from echograph.ir.columns import NONE, OP_COLUMNS, TENSOR_COLUMNS, Bools, Int64, OpTable, Ragged
from echograph.ir.graph import Graph, JobGraph, kept
from echograph.ir.types import Attributes, DType, MultiTensor, Phase, TensorRole

SIZES = ("flops", "bytes_read", "bytes_written", "nbytes")
"""Columns of operations that hold sizes; of tensors it is the extents of their shapes."""
_OF_NO_PASS = ("arguments", *SIZES)


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """What a graph is but for its sizes: compared whole, and hashed once, however many dictionaries are asked."""

    parts: tuple[Hashable, ...]
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.parts))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and self.parts == other.parts


@kept
def structure(graph: Graph) -> Structure:
    """All of a graph but its sizes; equal for two graphs that differ in nothing else.

    Of attributes, which hold sizes, too, it has which operations share them; all of those that say what shares a
    launch.
    """
    tables = ((graph.tensors, TENSOR_COLUMNS), (graph.ops, OP_COLUMNS))
    columns = [
        _structural(getattr(table, name), name == "shape")
        for table, its in tables
        for name, column in its.items()
        if name not in _OF_NO_PASS and column.of != "duration" and name != "duration"
    ]
    values = graph.ops.attribute_values
    launches = tuple(value if isinstance(value, MultiTensor) else type(value) for value in values)
    programs = [
        (its.calls.tobytes(), its.role, its.ranks, *its.coordinates.items(), *its.held.items())
        for its in graph.programs
    ]
    parts = (
        *columns, graph.ops.is_view.tobytes(), graph.strings, graph.streams, graph.groups, graph.blocks,
        tuple(axis.name for axis in graph.mesh), launches, *programs,
    )  # fmt: skip
    return Structure(parts)


def _structural(column: object, lengths_alone: bool) -> Hashable:
    if isinstance(column, Ragged):
        return column.offsets.tobytes(), b"" if lengths_alone else np.asarray(column.values).tobytes()
    return np.asarray(column).tobytes()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sized:
    """A job that passes made of a graph, and where its sizes come from. "Its" are those of that graph.

    Attributes:
        job: the job.
        tensors: int64, for each of the job's tensors its one whose shape it has.
        counted: bool, those whose shape says how many tensors there are, whatever their sizes.
        shards: bool, those that are a rank's part of its elements, in one dimension.
        ops: int64, for each of the job's operations its one whose sizes it has; -1 for what was added.
        shared: bool, those that do as much less as their tensors have fewer elements.
        times: by column of sizes, int64: of what was added, how many times its first tensor's bytes it has.
        buckets: int64, rows of collectives over all elements that they make, or else read, filled up.
        attributes: for each of the job's attributes, its ones that they are; -1 if changed.
    """

    job: JobGraph
    tensors: Int64
    counted: Bools
    shards: Bools
    ops: Int64
    shared: Bools
    times: dict[str, Int64]
    buckets: Int64
    attributes: Int64

    @classmethod
    def of(
        cls, graph: Graph, job: JobGraph, tensors: Int64, ops: Int64, *, counted: Bools | None = None,
        shards: Bools | None = None, shared: Bools | None = None, buckets: Int64 | None = None, ranks: int = 1,
        filled: int = 1,
    ) -> Sized | None:  # fmt: skip
        """What passes made of a graph; None where it is not known of every size where it comes from.

        Args:
            graph: the graph.
            job: what they made of it.
            tensors: as the attribute; -1 where it is not known. Of a port it need not be.
            ops: as the attribute; where sizes are others than the graph's, that is found.
            counted: as the attribute; None: there are none.
            shards: the same.
            shared: the same.
            buckets: the same.
            ranks: as of `of_graph`.
            filled: the same.
        """
        counted = np.zeros(len(job.tensors), np.bool_) if counted is None else counted
        tensors = np.where(counted, NONE, _through_ports(job, tensors))
        if ((tensors == NONE) & ~counted).any():
            return None
        shared = np.zeros(len(job.ops), np.bool_) if shared is None else shared
        same = (ops != NONE) & ~_of_counted(job, counted)
        for name in SIZES:
            same &= shared | (getattr(job.ops, name) == getattr(graph.ops, name)[ops])
        ops, nbytes = np.where(same, ops, NONE), np.maximum(_first_bytes(job.ops, job.tensors.nbytes), 1)
        attributes, still = _attributes_of(graph, job, ops), _of_counted(job, counted)
        if attributes is None or len(job.ops.duration.values):  # which are of these sizes
            return None
        found = cls(
            job=job,
            tensors=tensors,
            counted=counted,
            shards=np.zeros(len(job.tensors), np.bool_) if shards is None else shards,
            ops=ops,
            shared=shared & same,
            times={name: np.where(same | still, 0, getattr(job.ops, name) // nbytes) for name in SIZES},
            buckets=np.zeros(0, np.int64) if buckets is None else buckets,
            attributes=attributes,
        )
        return found if found._says(graph, ranks, filled) else None

    def _says(self, graph: Graph, ranks: int, filled: int) -> bool:
        """Whether it makes of its own graph the job that it was made of."""
        for name, times in self.times.items():
            added = np.delete(times, self.buckets) if name == "nbytes" else times
            if (added > MOST_TIMES).any():
                return False
        job = self.job
        if (self.tensors_of(graph, ranks) != job.tensors.shape.values).any():
            return False
        mine = self.of_graph(graph, ranks=ranks, filled=filled).ops
        return all(np.array_equal(getattr(mine, name), getattr(job.ops, name)) for name in SIZES)

    def tensors_of(self, graph: Graph, ranks: int) -> Int64:
        """The extents of all tensors of the job."""
        shape, its = self.job.tensors.shape, graph.tensors.shape
        values = np.array(shape.values, np.int64)
        whole = np.flatnonzero(~(self.shards | self.counted))
        lengths, where = its.places(self.tensors[whole])
        if not np.array_equal(lengths, shape.lengths[whole]):
            return np.full(len(values), NONE)
        values[shape.places(whole)[1]] = its.values[where]
        values[shape.offsets[:-1][self.shards]] = -(-graph.tensors.numel[self.tensors[self.shards]] // ranks)
        return values

    def of_graph(self, graph: Graph, *, ranks: int = 1, filled: int = 1) -> JobGraph:
        """The job that the passes make of another graph of the same structure.

        Args:
            graph: the graph.
            ranks: that have a part of what is divided.
            filled: of what collectives are filled up to a multiple: elements.
        """
        job, old = self.job, graph.ops
        shape = Ragged(job.tensors.shape.offsets, self.tensors_of(graph, ranks))
        tensors = replace(job.tensors, shape=shape)
        numel = tensors.numel
        nbytes, copied = _first_bytes(job.ops, tensors.nbytes), self.ops != NONE
        sizes: dict[str, Any] = {
            name: np.where(copied, getattr(old, name)[self.ops], times * nbytes)
            for name, times in self.times.items()
        }
        if self.shared.any():
            mine = _elements(job.ops, numel)[self.shared]
            its = _elements(job.ops, graph.tensors.numel[self.tensors])[self.shared]
            share = mine / np.maximum(its, 1)
            for column in sizes.values():
                column[self.shared] = np.ceil(column[self.shared] * share).astype(np.int64)
        still = _of_counted(job, self.counted)
        for name, column in sizes.items():
            column[still] = getattr(job.ops, name)[still]
        elements = -(-self.in_buckets(numel) // filled) * filled
        sizes["nbytes"][self.buckets] = elements * _BITS[job.ops.dtype[self.buckets]] // 8
        ops = replace(job.ops, attribute_values=_attributes_from(job, graph, self.attributes), **sizes)
        axes = {axis.name: axis for axis in graph.mesh}
        mesh = tuple(axes.get(axis.name, axis) for axis in job.mesh)
        return replace(job, tensors=tensors, ops=ops, workload=graph.workload, mesh=mesh, passes=graph.passes)

    def in_buckets(self, numel: Int64) -> Int64:
        """Elements of each bucket, not filled up, of tensors of so many."""
        made, read = _summed(self.job.ops.outputs, numel), _summed(self.job.ops.inputs, numel)
        return np.where(self.job.ops.outputs.lengths > 0, made, read)[self.buckets]


@kept
def at_rest(graph: Graph) -> Hashable:
    """The mesh, and the shapes of all that lives through the step, or that the optimizer reads or makes."""
    ops, tensors = graph.ops, graph.tensors
    found = ~np.isin(tensors.role, (TensorRole.ACTIVATION, TensorRole.INPUT))
    for side in (ops.inputs, ops.outputs):
        found[side.values[ops.phase[side.rows] == Phase.OPTIMIZER]] = True
    rows = np.flatnonzero(found)
    lengths, where = tensors.shape.places(rows)
    return graph.mesh, rows.tobytes(), lengths.tobytes(), tensors.shape.values[where].tobytes()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resizable:
    """A job that passes made of a graph, of which they looked at nothing but its structure and what is `at_rest`.

    Attributes:
        job: the job.
        tensors: int64, for each of the job's tensors the graph's one whose shape it has; -1 where it has its own.
        ops: int64, for each of the job's operations the graph's one whose sizes it has; -1 where it has its own.
        attributes: for each of the job's attributes, the graph's ones that they are; -1 if they are its own.
    """

    job: JobGraph
    tensors: Int64
    ops: Int64
    attributes: Int64

    @classmethod
    def of(cls, graph: Graph, job: JobGraph, tensors: Int64, ops: Int64) -> Resizable | None:
        """What passes made of a graph; None where two of its attributes became one.

        Args:
            graph: the graph.
            job: what they made of it.
            tensors: int64, for each of the job's tensors the graph's one that it was, whatever its shape; -1 for
                what was added.
            ops: int64, the same of operations, whatever their sizes.
        """
        mine, its = job.tensors.shape, graph.tensors.shape
        same = (tensors != NONE) & (mine.lengths == its.lengths[tensors])
        rows = np.flatnonzero(same)
        differ = mine.values[mine.places(rows)[1]] != its.values[its.places(tensors[rows])[1]]
        same[rows[np.repeat(np.arange(len(rows)), mine.lengths[rows])[differ]]] = False
        kept_ops = ops != NONE
        for name in SIZES:
            kept_ops &= getattr(job.ops, name) == getattr(graph.ops, name)[ops]
        ops = np.where(kept_ops, ops, NONE)
        attributes = _attributes_of(graph, job, ops)
        if attributes is None or len(job.ops.duration.values):
            return None
        return cls(job=job, tensors=np.where(same, tensors, NONE), ops=ops, attributes=attributes)

    def of_graph(self, graph: Graph) -> JobGraph:
        """The job that the passes make of another graph of the same structure, with the same at rest."""
        job, old = self.job, graph.ops
        rows = np.flatnonzero(self.tensors != NONE)
        values = np.array(job.tensors.shape.values, np.int64)
        where = graph.tensors.shape.places(self.tensors[rows])[1]
        values[job.tensors.shape.places(rows)[1]] = graph.tensors.shape.values[where]
        tensors = replace(job.tensors, shape=Ragged(job.tensors.shape.offsets, values))
        sizes: dict[str, Any] = {
            name: np.where(self.ops != NONE, getattr(old, name)[self.ops], getattr(job.ops, name))
            for name in SIZES
        }
        ops = replace(job.ops, attribute_values=_attributes_from(job, graph, self.attributes), **sizes)
        return replace(job, tensors=tensors, ops=ops, workload=graph.workload, passes=graph.passes)


def _attributes_from(job: JobGraph, graph: Graph, attributes: Int64) -> tuple[Attributes, ...]:
    """The job's attributes, of which some are a graph's."""
    return tuple(
        known if at == NONE else graph.ops.attribute_values[at]
        for known, at in zip(job.ops.attribute_values, attributes.tolist(), strict=True)
    )


MOST_TIMES = 2
"""What a pass adds reads or writes a tensor at most so often."""
_BITS = np.zeros(256, np.int64)
for _dtype in DType:
    _BITS[_dtype] = _dtype.bits


def _of_counted(job: JobGraph, counted: Bools) -> Bools:
    """Operations on tensors whose shapes say how many there are, and scalars, alone."""
    scalar = counted | (job.tensors.shape.lengths == 0)
    found = np.zeros(len(job.ops), np.bool_)
    for side in (job.ops.inputs, job.ops.outputs):
        found[side.rows[counted[side.values]]] = True
    for side in (job.ops.inputs, job.ops.outputs):
        found[side.rows[~scalar[side.values]]] = False
    return found


def _summed(side: Ragged, numel: Int64) -> Int64:
    """Elements of all tensors of each row."""
    before = np.append(0, np.cumsum(numel[side.values]))
    return np.asarray(before[side.offsets[1:]] - before[side.offsets[:-1]], np.int64)


def _elements(ops: OpTable, numel: Int64) -> Int64:
    """Elements that each operation reads and makes."""
    return _summed(ops.inputs, numel) + _summed(ops.outputs, numel)


def _through_ports(job: JobGraph, tensors: Int64) -> Int64:
    """Where shapes come from, of ports by what their first instance binds to them."""
    found = tensors.copy()
    for row in np.flatnonzero((tensors == NONE) & job.tensors.port).tolist():
        number = next(n for n, block in enumerate(job.blocks) if row in block.tensors)
        instances = job.blocks[number].instances
        if instances:
            found[row] = tensors[job.locate_tensor(instances[0].bindings[int(job.port_position[row])])[2]]
    return found


def _first_bytes(ops: OpTable, nbytes: Int64) -> Int64:
    """Bytes of the first tensor that each operation reads, or else makes; 0 where there is none."""
    found = np.full(len(ops), NONE)
    for side in (ops.outputs, ops.inputs):
        some = side.lengths > 0
        found[some] = side.values[side.offsets[:-1][some]]
    return np.asarray(np.append(nbytes, 0)[found], np.int64)


def _attributes_of(graph: Graph, job: JobGraph, ops: Int64) -> Int64 | None:
    """For each of the job's attributes those of the graph; None where two of the graph's became one."""
    found = np.full(len(job.ops.attribute_values), NONE)
    rows = np.flatnonzero((ops != NONE) & (job.ops.attributes != NONE))
    mine, its = job.ops.attributes[rows], graph.ops.attributes[ops[rows]]
    pairs = zip(mine.tolist(), its.tolist(), strict=True)
    alike = np.array([job.ops.attribute_values[m] == graph.ops.attribute_values[s] for m, s in pairs], np.bool_)
    found[mine[alike]] = its[alike]
    return found if np.array_equal(found[mine[alike]], its[alike]) else None
