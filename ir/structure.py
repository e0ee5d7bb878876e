"""What of a graph does not depend on its sizes, and what a pass made of one graph with the sizes of another.

A pass that decides by what operations are, and by what they read and make, does the same to every graph of one
structure: another micro-batch or another number of tensor-parallel ranks changes extents, bytes and FLOPs alone.
So its result is kept as a `Sized`, which knows of each row where its sizes come from.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import numpy as np

from echograph.ir.columns import NONE, OP_COLUMNS, TENSOR_COLUMNS, Int64, Ragged, TensorTable
from echograph.ir.graph import Graph, JobGraph, StepGraph, kept

SIZES = ("flops", "bytes_read", "bytes_written", "nbytes")
"""Columns of operations that hold sizes; of tensors it is the extents of their shapes."""
_OF_NO_PASS = ("arguments", *SIZES)


@kept
def structure(graph: Graph) -> Hashable:
    """All of a graph but its sizes; equal for two graphs that differ in nothing else.

    Of attributes, which hold sizes, too, it has which operations share them.
    """
    tables = ((graph.tensors, TENSOR_COLUMNS), (graph.ops, OP_COLUMNS))
    columns = [
        _structural(getattr(table, name), name == "shape")
        for table, its in tables
        for name, column in its.items()
        if name not in _OF_NO_PASS and column.of != "duration" and name != "duration"
    ]
    calls = [(program.calls.tobytes(), program.role, *program.coordinates.items()) for program in graph.programs]
    return (
        *columns, graph.ops.is_view.tobytes(), graph.strings, graph.streams, graph.groups, graph.blocks,
        tuple(axis.name for axis in graph.mesh), tuple(map(type, graph.ops.attribute_values)), *calls,
    )  # fmt: skip


def _structural(column: object, lengths_alone: bool) -> Hashable:
    if isinstance(column, Ragged):
        return column.offsets.tobytes(), b"" if lengths_alone else np.asarray(column.values).tobytes()
    return np.asarray(column).tobytes()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sized:
    """A job that a pass made of a step, and where its sizes come from.

    Attributes:
        job: the job.
        tensors: int64, for each of its tensors the one of the step whose shape it has.
        ops: int64, for each of its operations the one of the step whose sizes it has; -1 for what the pass added.
        times: by column of sizes, int64: of what the pass added, how many times its first tensor's bytes it has.
        attributes: for each of the job's attributes, those of the step that they are; -1 if changed.
    """

    job: JobGraph
    tensors: Int64
    ops: Int64
    times: dict[str, Int64]
    attributes: Int64

    @classmethod
    def of(cls, step: StepGraph, job: JobGraph, tensors: Int64, ops: Int64) -> Sized | None:
        """What a pass made of a step; None where it is not known of every size where it comes from.

        Args:
            step: the step.
            job: what the pass made of it.
            tensors: as the attribute; -1 where it is not known. Of a port it need not be.
            ops: as the attribute; where sizes are others than the step's, that is found.
        """
        tensors = _through_ports(job, tensors)
        if (tensors == NONE).any() or not _same_shapes(job.tensors, step.tensors, tensors):
            return None
        same = ops != NONE
        for name in SIZES:
            same &= getattr(job.ops, name) == getattr(step.ops, name)[ops]
        ops, nbytes = np.where(same, ops, NONE), _first_bytes(job)
        times = {}
        for name in SIZES:
            column = np.where(same, 0, getattr(job.ops, name))
            times[name] = column // np.maximum(nbytes, 1)
            if (times[name] * nbytes != column).any() or (times[name] > 2).any():
                return None
        attributes = _attributes_of(step, job, ops)
        return None if attributes is None else cls(
            job=job, tensors=tensors, ops=ops, times=times, attributes=attributes
        )  # fmt: skip

    def of_step(self, step: StepGraph) -> JobGraph:
        """The job that the pass makes of another step of the same structure."""
        job, tables = self.job, self.job.tensors
        _, where = _extents(step.tensors.shape, self.tensors)
        shape = Ragged(tables.shape.offsets, step.tensors.shape.values[where])
        tensors = replace(tables, shape=shape)
        nbytes, copied = _first_bytes(replace(job, tensors=tensors)), self.ops != NONE
        sizes = {
            name: np.where(copied, getattr(step.ops, name)[self.ops], times * nbytes)
            for name, times in self.times.items()
        }
        values = tuple(
            old if at == NONE else step.ops.attribute_values[at]
            for old, at in zip(job.ops.attribute_values, self.attributes.tolist(), strict=True)
        )
        ops = replace(job.ops, attribute_values=values, **sizes)
        axes = {axis.name: axis for axis in step.mesh}
        mesh = tuple(axes.get(axis.name, axis) for axis in job.mesh)
        return replace(job, tensors=tensors, ops=ops, workload=step.workload, mesh=mesh, passes=step.passes)


def _through_ports(job: JobGraph, tensors: Int64) -> Int64:
    """Where shapes come from, of ports by what their first instance binds to them."""
    found = tensors.copy()
    for row in np.flatnonzero((tensors == NONE) & job.tensors.port).tolist():
        number = next(n for n, block in enumerate(job.blocks) if row in block.tensors)
        instances = job.blocks[number].instances
        if instances:
            found[row] = tensors[job.locate_tensor(instances[0].bindings[int(job.port_position[row])])[2]]
    return found


def _extents(shape: Ragged, rows: Int64) -> tuple[Int64, Int64]:
    """How many extents rows have, and where they stand."""
    begin = shape.offsets[rows]
    lengths = shape.offsets[rows + 1] - begin
    before = np.cumsum(lengths) - lengths
    return lengths, np.repeat(begin - before, lengths) + np.arange(int(lengths.sum()))


def _same_shapes(mine: TensorTable, its: TensorTable, rows: Int64) -> bool:
    lengths, where = _extents(its.shape, rows)
    return np.array_equal(lengths, mine.shape.lengths) and np.array_equal(
        its.shape.values[where], mine.shape.values
    )


def _first_bytes(job: JobGraph) -> Int64:
    """Bytes of the first tensor that each operation reads, or else makes; 0 where there is none."""
    nbytes, found = np.append(job.tensors.nbytes, 0), np.full(len(job.ops), NONE)
    for side in (job.ops.outputs, job.ops.inputs):
        some = side.lengths > 0
        found[some] = side.values[side.offsets[:-1][some]]
    return np.asarray(nbytes[found], np.int64)


def _attributes_of(step: StepGraph, job: JobGraph, ops: Int64) -> Int64 | None:
    """For each of the job's attributes those of the step; None where two of the step's became one."""
    found = np.full(len(job.ops.attribute_values), NONE)
    rows = np.flatnonzero((ops != NONE) & (job.ops.attributes != NONE))
    mine, its = job.ops.attributes[rows], step.ops.attributes[ops[rows]]
    pairs = zip(mine.tolist(), its.tolist(), strict=True)
    alike = np.array([job.ops.attribute_values[m] == step.ops.attribute_values[s] for m, s in pairs], np.bool_)
    found[mine[alike]] = its[alike]
    return found if np.array_equal(found[mine[alike]], its[alike]) else None
