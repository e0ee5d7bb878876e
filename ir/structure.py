"""What of a graph does not depend on its sizes, and what a pass made of one graph with the sizes of another.

A pass that decides by what operations are, and by what they read and make, does the same to every graph of one
structure: another micro-batch or another number of tensor-parallel ranks changes extents, bytes and FLOPs alone.
So its result is kept as a `Sized`, which knows of each row where its sizes come from. Where sizes of what lives
through the step decide more than can be asked again, a pass does the same to every graph in which these are equal
(`at_rest`), whatever its activations: its result is kept as a `Resizable`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np

from echograph.ir.columns import NONE, OP_COLUMNS, TENSOR_COLUMNS, Bools, Int64, OpTable, Ragged
from echograph.ir.graph import Axis, Graph, JobGraph, kept
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


FLAT = -2
"""Of a shard that is a part of all elements, in one dimension, in place of the dimension that is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """The tensors of a job that are shards, and of what.

    Attributes:
        axes: sets of axes over whose ranks something is divided.
        over: int64, of each tensor the number of its axes among these; -1 of one that is no shard.
        dim: int64, of each shard the dimension that is cut, or `FLAT`.
    """

    axes: tuple[tuple[str, ...], ...]
    over: Int64
    dim: Int64

    @classmethod
    def of(cls, count: int, shards: Mapping[int, DividedOver]) -> Shards:
        """Those of so many tensors, of which some rows are shards."""
        axes = {its: number for number, its in enumerate(dict.fromkeys(its for its, _ in shards.values()))}
        over, dim = np.full((2, count), NONE)
        over[list(shards)] = [axes[its] for its, _ in shards.values()]
        dim[list(shards)] = [its for _, its in shards.values()]
        return cls(axes=tuple(axes), over=over, dim=dim)


DividedOver = tuple[tuple[str, ...], int]
"""Axes over whose ranks a tensor is divided, and the dimension that is cut, or `FLAT`."""


class Amount(NamedTuple):
    """Bytes that an operation which a pass added reads, writes or sends, by the tensors of the graph.

    Attributes:
        row: row of the operation in the job.
        column: the size that it is, one of `SIZES`.
        tensors: rows of the graph's tensors whose bytes add up to it.
        axes: mesh axes over whose ranks these tensors are divided; (): they are whole.
        dims: dimension of each tensor that is cut into equal parts, padded where it does not divide; (): none is.
        fill: their elements together are padded to a multiple of this and of the ranks; 0: they are not padded.
        dtype: type of the elements; None: each tensor's own.
        part: whether the amount is one rank's part of the sum, not the whole sum.
        times: how many times the sum counts.
    """

    row: int
    column: str
    tensors: tuple[int, ...]
    axes: tuple[str, ...] = ()
    dims: tuple[int, ...] = ()
    fill: int = 0
    dtype: DType | None = None
    part: bool = False
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """Amounts as columns.

    Attributes:
        axes: sets of axes.
        row: int64.
        column: int64, numbers of `SIZES`.
        over: int64, numbers of the axes.
        fill: int64.
        bits: int64, of an element; 0: each tensor's own.
        part: bool.
        times: int64.
        tensors: `Amount.tensors` of each amount.
        dim: int64, `Amount.dims` of each of these tensors; -1 for none.
    """

    axes: tuple[tuple[str, ...], ...]
    row: Int64
    column: Int64
    over: Int64
    fill: Int64
    bits: Int64
    part: Bools
    times: Int64
    tensors: Ragged
    dim: Int64

    @classmethod
    def of(cls, amounts: Sequence[Amount]) -> Amounts:
        """The columns."""
        axes = {its: number for number, its in enumerate(dict.fromkeys(each.axes for each in amounts))}
        whole = [(*each.dims, *[NONE] * (len(each.tensors) - len(each.dims))) for each in amounts]
        rows = [
            (
                x.row,
                SIZES.index(x.column),
                axes[x.axes],
                x.fill,
                x.dtype.bits if x.dtype is not None else 0,
                x.times,
            )
            for x in amounts
        ]
        columns = np.array(rows, np.int64).reshape(-1, 6).T
        return cls(
            axes=tuple(axes), row=columns[0], column=columns[1], over=columns[2], fill=columns[3], bits=columns[4],
            part=np.array([each.part for each in amounts], np.bool_), times=columns[5],
            tensors=Ragged(
                np.cumsum([0, *(len(each.tensors) for each in amounts)]),
                np.array([row for each in amounts for row in each.tensors], np.int64),
            ),
            dim=np.array([dim for its in whole for dim in its], np.int64),
        )  # fmt: skip

    def elements(self, graph: Graph) -> Int64:
        """Elements of all tensors of each, nothing filled up."""
        return _sums(self.tensors, graph.tensors.numel[self.tensors.values])

    def nbytes(self, graph: Graph, mesh: Sequence[Axis]) -> Int64:
        """Bytes of each."""
        rows, tensors = self.tensors.values, graph.tensors
        ranks = ranks_along(self.axes, mesh)[self.over]
        numel = tensors.numel[rows]
        cut = np.flatnonzero(self.dim != NONE)
        extent = tensors.shape.values[tensors.shape.offsets[rows[cut]] + self.dim[cut]]
        among = ranks[self.tensors.rows[cut]]
        numel[cut] = numel[cut] // np.maximum(extent, 1) * (-(-extent // among) * among)
        bits = self.bits[self.tensors.rows]
        each = -(-numel * np.where(bits == 0, _BITS[tensors.dtype[rows]], bits) // 8)
        step = np.lcm(np.maximum(self.fill, 1), ranks)
        filled = -(-_sums(self.tensors, numel) // step) * step
        found = np.where(self.fill > 0, -(-filled * self.bits // 8), _sums(self.tensors, each))
        return np.asarray(self.times * np.where(self.part, found // ranks, found), np.int64)


def ranks_along(axes: Sequence[tuple[str, ...]], mesh: Sequence[Axis]) -> Int64:
    """Ranks along sets of axes of a mesh."""
    sizes = {axis.name: axis.size for axis in mesh}
    return np.array([prod(sizes[name] for name in its) for its in axes], np.int64)


def _sums(of: Ragged, values: Int64) -> Int64:
    """The sum of the values of each row, given one by one."""
    before = np.append(0, np.cumsum(values))
    return np.asarray(before[of.offsets[1:]] - before[of.offsets[:-1]], np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sized:
    """A job that passes made of a graph, and where its sizes come from. "Its" are those of that graph.

    Attributes:
        job: the job.
        tensors: int64, for each of the job's tensors its one whose shape it has.
        counted: bool, those that have shapes of their own: tokens, and what says how many tensors there are.
        shards: those that are a rank's part.
        ops: int64, for each of the job's operations its one whose sizes it has; -1 for what was added.
        shared: bool, those that do as much less as their tensors have fewer elements.
        times: by column of sizes, int64: of what was added, how many times its first tensor's bytes it has.
        amounts: sizes of what was added of which more is known.
        attributes: for each of the job's attributes, its ones that they are; -1 if changed.
    """

    job: JobGraph
    tensors: Int64
    counted: Bools
    shards: Shards
    ops: Int64
    shared: Bools
    times: dict[str, Int64]
    amounts: Amounts
    attributes: Int64

    @classmethod
    def of(
        cls, graph: Graph, job: JobGraph, tensors: Int64, ops: Int64, *, counted: Bools | None = None,
        shards: Shards | None = None, shared: Bools | None = None, amounts: Sequence[Amount] = (),
    ) -> Sized | None:  # fmt: skip
        """What passes made of a graph; None where it is not known of every size where it comes from.

        Args:
            graph: the graph.
            job: what they made of it.
            tensors: as the attribute; -1 where it is not known. Of a port it need not be.
            ops: as the attribute; where sizes are others than the graph's, that is found.
            counted: as the attribute; None: there are none.
            shards: as the attribute; None: no tensor is a shard.
            shared: as the attribute; None: none are.
            amounts: what `Amounts` holds, as rows.
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
        known = Amounts.of(amounts)
        times = {name: np.where(same | still, 0, getattr(job.ops, name) // nbytes) for name in SIZES}
        for number, name in enumerate(SIZES):
            times[name][known.row[known.column == number]] = 0
        if any((its > MOST_TIMES).any() for its in times.values()):
            return None
        found = cls(
            job=job,
            tensors=tensors,
            counted=counted,
            shards=Shards.of(len(job.tensors), {}) if shards is None else shards,
            ops=ops,
            shared=shared & same,
            times=times,
            amounts=known,
            attributes=attributes,
        )
        return found if found._says(graph) else None

    def _says(self, graph: Graph) -> bool:
        """Whether it makes of its own graph the job that it was made of."""
        job = self.job
        if not np.array_equal(self.tensors_of(graph, job.mesh), job.tensors.shape.values):
            return False
        mine = self.of_graph(graph, job.mesh).ops
        return all(np.array_equal(getattr(mine, name), getattr(job.ops, name)) for name in SIZES)

    def tensors_of(self, graph: Graph, mesh: Sequence[Axis]) -> Int64:
        """The extents of all tensors of the job."""
        shape, its, shards = self.job.tensors.shape, graph.tensors.shape, self.shards
        values = np.array(shape.values, np.int64)
        flat = (shards.over != NONE) & (shards.dim == FLAT)
        whole = np.flatnonzero(~(flat | self.counted))
        lengths, where = its.places(self.tensors[whole])
        if not np.array_equal(lengths, shape.lengths[whole]):
            return np.full(len(values), NONE)
        values[shape.places(whole)[1]] = its.values[where]
        ranks = ranks_along(shards.axes, mesh)
        parts = np.flatnonzero(flat)
        values[shape.offsets[parts]] = -(-graph.tensors.numel[self.tensors[parts]] // ranks[shards.over[parts]])
        cut = np.flatnonzero((shards.over != NONE) & ~flat)
        at = shape.offsets[cut] + shards.dim[cut]
        values[at] = -(-values[at] // ranks[shards.over[cut]])
        return values

    def of_graph(self, graph: Graph, mesh: tuple[Axis, ...] = ()) -> JobGraph:
        """The job that the passes make of another graph of the same structure.

        Args:
            graph: the graph.
            mesh: of the job; (): its own, with the graph's axes.
        """
        job, old = self.job, graph.ops
        axes = {axis.name: axis for axis in graph.mesh}
        mesh = mesh or tuple(axes.get(axis.name, axis) for axis in job.mesh)
        shape = Ragged(job.tensors.shape.offsets, self.tensors_of(graph, mesh))
        tensors = replace(job.tensors, shape=shape)
        nbytes, copied = _first_bytes(job.ops, tensors.nbytes), self.ops != NONE
        sizes: dict[str, Any] = {
            name: np.where(copied, getattr(old, name)[self.ops], times * nbytes)
            for name, times in self.times.items()
        }
        if self.shared.any():
            mine = _elements(job.ops, tensors.numel)[self.shared]
            its = _elements(job.ops, graph.tensors.numel[self.tensors])[self.shared]
            share = mine / np.maximum(its, 1)
            for column in sizes.values():
                column[self.shared] = np.ceil(column[self.shared] * share).astype(np.int64)
        still = _of_counted(job, self.counted)
        for name, column in sizes.items():
            column[still] = getattr(job.ops, name)[still]
        amounts = self.amounts.nbytes(graph, mesh)
        for number, column in enumerate(sizes.values()):
            its = self.amounts.column == number
            column[self.amounts.row[its]] = amounts[its]
        ops = replace(job.ops, attribute_values=_attributes_from(job, graph, self.attributes), **sizes)
        return replace(job, tensors=tensors, ops=ops, workload=graph.workload, mesh=mesh, passes=graph.passes)


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


def _elements(ops: OpTable, numel: Int64) -> Int64:
    """Elements that each operation reads and makes."""
    return _sums(ops.inputs, numel[ops.inputs.values]) + _sums(ops.outputs, numel[ops.outputs.values])


def _through_ports(job: JobGraph, tensors: Int64) -> Int64:
    """Where shapes come from, of ports by what their first instance binds to them."""
    found, unknown = tensors.copy(), (tensors == NONE) & job.tensors.port
    for block in job.blocks:
        its = slice(block.tensors.start, block.tensors.stop)
        rows = block.tensors.start + np.flatnonzero(unknown[its])
        if len(rows) and block.instances:
            bound = np.array(block.instances[0].bindings, np.int64)[job.port_position[rows]]
            found[rows] = tensors[job.ports.locate(bound)[2]]
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
