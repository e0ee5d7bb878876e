"""How what lives through a step is divided over data-parallel ranks, and blocks whose optimizer works on shards.

Every data-parallel rank would do the same update; instead each updates its part of the parameters, and keeps that
part of the optimizer's state alone (Rajbhandari et al., "ZeRO", SC 2020, stage 1; Megatron-LM's distributed
optimizer). Which tensors are parts follows from the data axes of the mesh and from what divides them already.

In such a block a tensor can stand for several: a parameter or a gradient is whole to the forward and backward
passes and a shard to the optimizer. Tensors are named by their old row and the phase that uses them; a port is
bound by both.

Data parallelism: gradients in buckets, reduced while backward goes on; with ZeRO, an optimizer on shards.

Gradients are put into buckets in the order in which they become ready; a bucket holds one data type and one set
of ranks: a gradient is added up over the data axes of the mesh that it is not divided over
(`model.reduction_axes`). When the last gradient of a bucket is ready, the bucket is reduced on its group's
own stream, buckets in order. After backward the compute stream waits for all of them.

- `zero=0`: PyTorch's DistributedDataParallel (Li et al., "PyTorch Distributed", VLDB 2020). A bucket closes at
  1 MiB, the later ones at 25 MiB; gradients are copied into it, all-reduced, and copied back. Buffers are
  broadcast before forward.
- `zero=1`: Megatron-LM's distributed optimizer (`--use-distributed-optimizer`). Gradients live in contiguous
  buckets of max(40 M, 1 M times ranks) elements, filled up to a multiple of the ranks and of 128, and are
  reduce-scattered after the last micro-batch. Each rank updates its elements, cut evenly from the buckets, and the
  parameters are all-gathered bucket by bucket: after the optimizer, or with `overlap_param_gather` at the head of
  the step, as left by the one before, where the first bucket is waited for and the gather of each next one runs
  beside the layers of the bucket before. Pipeline stages other than the first reduce all at once, as there. That
  weight gradients are added to the bucket by the products themselves is assumed where there is one
  micro-batch (`gradient_accumulation_fusion`). With `instances` groups of ranks each divide the optimizer among
  themselves, and shards are all-reduced between the groups once a bucket is scattered.
- `zero=2`: DeepSpeed's stage 2. As 1, but only the shards of the gradients live through the step: every
  micro-batch copies its gradients into buckets, reduces these, and adds the shard that it gets to its own.

DeepSpeed reduces by all-reduce and keeps its part, in stages 1 and 2 (`use_multi_rank_bucket_allreduce`, its
default): that is `reduce_scatter=False`. What the ranks of a group share inside (tensor parallelism) is beside
it.

Every data-parallel rank would do the same update; instead each updates its part of the parameters, and keeps that
part of the optimizer's state alone (Rajbhandari et al., "ZeRO", SC 2020, stage 1; Megatron-LM's distributed
optimizer). Which tensors are parts follows from the data axes of the mesh and from what divides them already.

In such a block a tensor can stand for several: a parameter or a gradient is whole to the forward and backward
passes and a shard to the optimizer. Tensors are named by their old row and the phase that uses them; a port is
bound by both.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from math import ceil, inf, lcm, prod
from typing import ClassVar, Protocol

import numpy as np

from echograph.errors import PlanError
from echograph.ir import graph as g
from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder, append_blocks, copy_ops, copy_tensors
from echograph.ir.columns import NONE, OP_COLUMNS, Bools, Float64, Int64, distinct
from echograph.ir.graph import Axis, Block, Graph, JobGraph, StepGraph, kept
from echograph.ir.passes.model import (
    DATA,
    REPLICATE,
    Gradient,
    ProgramPoint,
    adds_up,
    axes_group,
    final_gradients,
    first_reads,
    model_buffer_bytes,
    overflow_flags,
    ready_gradients,
    reduction_axes,
    split_at_optimizer,
    total_norms,
    updated_parameters,
)
from echograph.ir.passes.rewrite import (
    ACCUMULATE,
    ADD_TO_GRADIENT,
    UPDATE,
    Call,
    PassLabel,
    accumulate,
    copy_tables,
    empty_copy,
    in_micro_batch,
)
from echograph.ir.structure import FLAT, Amount, DividedOver, Resizable, Shards, Sized, at_rest

_ROLES = {int(role): role for role in t.TensorRole}
PERSISTENT = (t.TensorRole.PARAMETER, t.TensorRole.GRADIENT, t.TensorRole.OPTIMIZER_STATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How what lives through the step is divided over data-parallel ranks.

    Attributes:
        graph: the step, or a pipeline's job.
        mesh: of the job.
        gradients: rows of the final gradients.
        copies: data axes whose ranks keep copies (HSDP's replicas).
        flat: elements are cut evenly, whatever the shape, as in a contiguous buffer; else one dimension is.
        none: nothing is divided.
        lasting: of each tensor, whether it lives through the step.
    """

    graph: Graph
    mesh: tuple[Axis, ...]
    gradients: frozenset[int]
    copies: tuple[str, ...] = ()
    flat: bool = False
    none: bool = False
    _axes: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict, init=False, repr=False)
    _origin: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    _cut: dict[int, bool] = field(default_factory=dict, init=False, repr=False)
    _sizes: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    lasting: Bools = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._sizes.update((axis.name, axis.size) for axis in self.mesh)
        lasting = np.isin(self.graph.tensors.role, PERSISTENT)
        lasting[list(self.gradients)] = True
        object.__setattr__(self, "lasting", lasting)

    def axes(self, tensor: t.Tensor) -> tuple[str, ...]:
        """The axes over which a tensor becomes divided; a scalar is not."""
        if self.none or not tensor.shape:
            return ()
        if tensor.sharded not in self._axes:
            found = reduction_axes(self.mesh, tensor.sharded)
            self._axes[tensor.sharded] = tuple(axis for axis in found if axis not in self.copies)
        return self._axes[tensor.sharded]

    @property
    def all_axes(self) -> tuple[str, ...]:
        """Every axis over which some tensor is, or was already, divided."""
        return () if self.none else tuple(a for a in reduction_axes(self.mesh, ()) if a not in self.copies)

    def ranks(self, axes: Iterable[str]) -> int:
        """Positions along some axes together."""
        return prod([self._sizes[name] for name in axes])

    def shape(self, tensor: t.Tensor) -> tuple[int, ...]:
        """The shape of the largest shard."""
        ranks = self.ranks(self.axes(tensor))
        if ranks == 1:
            return tensor.shape
        if self.flat:
            return (ceil(tensor.numel / ranks),)
        dim = self.dim(tensor)
        return (*tensor.shape[:dim], ceil(tensor.shape[dim] / ranks), *tensor.shape[dim + 1 :])

    def dim(self, tensor: t.Tensor) -> int:
        """The dimension that is cut: the first, or the second of stacked matrices fewer than ranks.

        torchtitan cuts experts so (`shard_placement_fn`), where the first would be padded many times over.
        """
        ranks = self.ranks(self.axes(tensor))
        stacked = len(tensor.shape) > 2 and tensor.shape[0] < ranks and tensor.shape[1] % ranks == 0
        return 1 if stacked else 0

    def padded(self, tensor: t.Tensor) -> int:
        """Elements of all shards together, those that fill up included."""
        return prod(self.shape(tensor)) * self.ranks(self.axes(tensor))

    def origin(self, row: int) -> int:
        """The tensor that a tensor has its value from, in the first instance of its block."""
        if row not in self._origin:
            number = bisect_right(self.graph.blocks, row, key=lambda block: block.tensors.stop)
            bound = bool(self.graph.blocks[number].instances)
            self._origin[row] = self.graph.value(number, 0, row)[2] if bound else row
        return self._origin[row]

    def role(self, row: int) -> t.TensorRole:
        """The role of a tensor; a final gradient is one, also where a capture took it for an activation's."""
        return t.TensorRole.GRADIENT if row in self.gradients else _ROLES[self.graph.tensors.roles[row]]

    def of_optimizer(self, row: int) -> bool:
        """Whether an operation of the optimizer makes a tensor's value."""
        maker = int(self.graph.maker[self.origin(row)])
        return maker != NONE and bool(self.graph.ops.phases[maker] == t.Phase.OPTIMIZER)

    def cut(self, row: int) -> bool:
        """Whether the optimizer's tensor is a shard; what it makes is, where it is as large as what it reads."""
        if row not in self._cut:
            tensor = self.graph.tensor(row)
            if tensor.role in PERSISTENT or self.origin(row) in self.gradients:
                self._cut[row] = bool(self.axes(tensor))
            else:
                self._cut[row] = self.of_optimizer(row) and self._makes_shard(tensor)
        return self._cut[row]

    def _makes_shard(self, tensor: t.Tensor) -> bool:
        op = self.graph.ops[int(self.graph.maker[self.origin(tensor.id)])]
        if not tensor.shape:
            return False
        if isinstance(op, t.Recv):
            return op.payload == t.Payload.GRADIENT and bool(self.axes(tensor))
        return any(self.graph.tensor(i).shape == tensor.shape and self.cut(i) for i in op.inputs)


WHOLE, SHARDED = t.Phase.FORWARD, t.Phase.OPTIMIZER
"""A tensor as the forward and backward passes see it, and as the optimizer does."""
Meaning = tuple[int, t.Phase] | tuple[str, int]
Address = tuple[int, int, int]


@dataclass(slots=True, kw_only=True)
class Written:
    """What a block became.

    Attributes:
        tensors: new row of each old row, by the phase that uses it.
        ports: the new rows that are ports, in table order, with what they stand for: (old row, phase), or
            (name, unit) for a token of the pass.
        tensor_rows: its rows of the new tensor table.
        op_rows: its rows of the new operation table.
        amounts: sizes of what was added to it.
        tokens: the new rows of tokens.
    """

    tensors: dict[tuple[int, t.Phase], int] = field(default_factory=dict)
    ports: list[tuple[int, Meaning]] = field(default_factory=list)
    amounts: list[Amount] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    tensor_rows: range = range(0)
    op_rows: range = range(0)

    def tensor(self, old: int, phase: t.Phase) -> int:
        """The tensor that another block's port means."""
        for variant in (phase, WHOLE, t.Phase.BACKWARD, SHARDED):
            if (old, variant) in self.tensors:
                return self.tensors[old, variant]
        raise PlanError(f"tensor {old} is read by another block, but this one does not hold it")


@dataclass(frozen=True, slots=True, eq=False)
class NewRows:
    """What operations became: by old row, where their new rows begin and end; -1 of those not written yet."""

    starts: Int64
    stops: Int64

    @classmethod
    def of(cls, count: int) -> NewRows:
        """Those of so many operations, of which none is written."""
        return cls(*np.full((2, count), NONE))


def unchanged(graph: Graph, block: Block, tensor: int = 0, op: int = 0) -> Written:
    """A block that stands in the new graph as it stood in the old one, so many tensors and operations behind."""
    rows, ops = block.tensors, block.ops
    ports = (rows.start + np.flatnonzero(graph.tensors.port[rows.start : rows.stop])).tolist()
    return Written(
        tensors={(row, WHOLE): row + tensor for row in rows},
        ports=[(row + tensor, (row, WHOLE)) for row in ports],
        tensor_rows=range(rows.start + tensor, rows.stop + tensor),
        op_rows=range(ops.start + op, ops.stop + op),
    )


class ShardedBlock:
    """Writes a block with its optimizer on shards, in the order of the table.

    Args:
        graph: the step, or a pipeline's job.
        builder: with the block open.
        number: of the block.
        division: how tensors are divided.
        ops: gets the new rows of each operation: its own, and what was added behind it.
        views: roles of which the shard is a part of the whole tensor's memory.
        transient: roles of which the whole tensor lives in one micro-batch only.
        scalars: operations whose last output is a scalar of all gradients together (`model.total_norms`).
    """

    def __init__(
        self,
        graph: Graph,
        builder: GraphBuilder,
        number: int,
        division: Division,
        ops: NewRows,
        *,
        views: tuple[t.TensorRole, ...] = (),
        transient: tuple[t.TensorRole, ...] = (),
        scalars: Collection[int] = (),
    ) -> None:
        self.graph, self.builder, self.number, self.division, self.ops = graph, builder, number, division, ops
        self.views, self.transient, self.scalars = views, transient, frozenset(scalars)
        self.block, self.written = graph.blocks[number], Written()

    def write(self) -> Written:
        """Writes all rows."""
        first_tensor, first_op = self.builder.tensor_count(), self.builder.op_count()
        graph, number = self.graph, self.block.ops
        late = (number.start + np.flatnonzero(graph.ops.phase[number.start : number.stop] == SHARDED)).tolist()
        apart = self._apart(late)
        uses = self._uses(apart)
        for rows, alike in _stretches(self.block.tensors, apart):
            if alike:
                self._copy_tensors(rows)
                continue
            for row in rows:
                for phase in uses.get(row) or (self._unused(row),):
                    self.use(row, phase)
                if row in self.division.gradients:
                    self.use(row, SHARDED)
        for phase, its in groupby(self.block.ops, self.phase):
            of_phase = list(its)
            self.write_ops(range(of_phase[0], of_phase[-1] + 1), phase)
        return self.finish(first_tensor, first_op)

    def write_ops(self, rows: range, phase: t.Phase) -> None:
        """Writes operations on the tensors that a phase uses, and behind scalars of all gradients their sums."""
        begin = rows.start
        for row in sorted(self.scalars.intersection(rows)):
            self._copy_in_phase(range(begin, row + 1), phase)
            self._complete(row)
            begin = row + 1
        if begin < rows.stop:
            self._copy_in_phase(range(begin, rows.stop), phase)

    def _apart(self, late: list[int]) -> set[int]:
        """Tensors that are more, or other, than a copy of the old one: the optimizer's, and what may be lost."""
        graph, inputs, outputs = self.graph, self.graph.ops.inputs, self.graph.ops.outputs
        found = {index for row in late for index in (*inputs.row(row), *outputs.row(row))}
        found |= {row for row in self.division.gradients if row in self.block.tensors}
        roles = graph.tensors.role[self.block.tensors.start : self.block.tensors.stop]
        special = np.isin(roles, (t.TensorRole.OPTIMIZER_STATE, *self.transient))
        return found | {self.block.tensors.start + row for row in np.flatnonzero(special).tolist()}

    def _copy_tensors(self, rows: range) -> None:
        """Writes tensors that stay as they are."""
        aliases, new = self.graph.tensors.alias_of[rows.start : rows.stop], np.full(len(self.graph.tensors), NONE)
        for row in distinct(aliases).tolist():
            if row != NONE and row not in rows:
                new[row] = self.use(row, WHOLE)
        first = self.builder.tensor_count()
        new[rows.start : rows.stop] = first + np.arange(len(rows))
        copy_tensors(self.builder, self.graph, rows, new)
        self.written.tensors |= {(row, WHOLE): made for made, row in enumerate(rows, first)}
        ports = self.graph.tensors.port[rows.start : rows.stop]
        self.written.ports += ((first + at, (rows[at], WHOLE)) for at in np.flatnonzero(ports).tolist())

    def _copy_in_phase(self, rows: range, phase: t.Phase) -> None:
        """Copies operations onto the tensors that a phase uses, made as they are used; shards have less to do."""
        tensors, touched = np.full(len(self.graph.tensors), NONE), self.graph.ops.touched(rows)
        shares = None
        if phase == SHARDED:
            tensors[touched] = [self.use(index, phase) for index in touched]
            shares = self._shares(rows, touched)
        else:
            self._use_whole(touched, phase)
            tensors[touched] = [self.written.tensors[index, self.variant(index, phase)] for index in touched]
        made = self.builder.op_count() + np.arange(len(rows))
        self.ops.starts[rows.start : rows.stop], self.ops.stops[rows.start : rows.stop] = made, made + 1
        copy_ops(self.builder, self.graph, rows, tensors, self.ops.starts, shares=shares)

    def _use_whole(self, touched: Iterable[int], phase: t.Phase) -> None:
        """Makes what tensors are in a phase that does not work on shards, as `use` does, but all at one go."""
        known, alias_of, first = self.written.tensors, self.graph.tensors.alias_of, self.builder.tensor_count()
        made: list[int] = []
        for index in touched:
            variant, its = self.variant(index, phase), list[int]()
            # All aliases of a tensor are the same to a phase; it is made before them.
            while index != NONE and (index, variant) not in known:
                its.append(index)
                index = alias_of.item(index)
            for row in reversed(its):
                known[row, variant] = first + len(made)
                made.append(row)
                if self.graph.tensors.port[row]:
                    self.written.ports.append((known[row, variant], (row, variant)))
        if not made:
            return
        rows, new = np.array(made, np.int64), np.full(len(self.graph.tensors), NONE)
        aliases = distinct(alias_of[rows])
        for row in aliases[aliases != NONE].tolist():
            new[row] = known[row, self.variant(row, phase)]
        lasting = np.flatnonzero(self.division.lasting[rows]).tolist()
        roles = {at: self.whole_role(self.graph.tensor(made[at])) for at in lasting}
        copy_tensors(self.builder, self.graph, rows, new, {first + at: role for at, role in roles.items()})

    def finish(self, first_tensor: int, first_op: int) -> Written:
        """The block, once all its rows are written."""
        self.written.tensor_rows = range(first_tensor, self.builder.tensor_count())
        self.written.op_rows = range(first_op, self.builder.op_count())
        self.written.ports.sort()
        return self.written

    # -- tensors -------------------------------------------------------------------------------------------

    def phase(self, row: int) -> t.Phase:
        """Whether an operation works on shards (`SHARDED`) or on whole tensors."""
        return SHARDED if self.graph.ops.phases[row] == SHARDED else WHOLE

    def _uses(self, tensors: Collection[int]) -> dict[int, list[t.Phase]]:
        """The phases that use each of some tensors."""
        uses: dict[int, list[t.Phase]] = {row: [] for row in tensors}
        inputs, outputs = self.graph.ops.inputs, self.graph.ops.outputs
        for row in self.block.ops if tensors else ():
            touched = [index for index in (*inputs.row(row), *outputs.row(row)) if index in uses]
            phase = self.phase(row) if touched else WHOLE
            for index in touched:
                if (variant := self.variant(index, phase)) not in uses[index]:
                    uses[index].append(variant)
        return uses

    def _unused(self, row: int) -> t.Phase:
        state = self.graph.tensors.roles[row] == t.TensorRole.OPTIMIZER_STATE
        return SHARDED if state else WHOLE

    def variant(self, row: int, phase: t.Phase) -> t.Phase:
        """Which of its tensors an old one is in a phase."""
        return SHARDED if phase == SHARDED and self.division.cut(row) else WHOLE

    def use(self, row: int, phase: t.Phase) -> int:
        """The tensor that an old one is in a phase; made when it is first used."""
        variant = self.variant(row, phase)
        if (row, variant) not in self.written.tensors:
            tensor = self.graph.tensor(row)
            made = (
                self._shard(tensor)
                if variant == SHARDED and self.division.cut(row)
                else self._whole(tensor, variant)
            )
            self.written.tensors[row, variant] = made
        return self.written.tensors[row, variant]

    def _whole(self, tensor: t.Tensor, variant: t.Phase) -> int:
        alias = None if tensor.alias_of is None else self.use(tensor.alias_of, variant)
        return self.add(tensor, variant, tensor.shape, alias, role=self.whole_role(tensor))

    def whole_role(self, tensor: t.Tensor) -> t.TensorRole:
        """The role of a whole tensor."""
        role = self.division.role(tensor.id)
        lost = role in self.transient and self.division.axes(tensor)
        return t.TensorRole.ACTIVATION if lost else tensor.role

    def _shard(self, tensor: t.Tensor) -> int:
        role = self.division.role(tensor.id)
        # The optimizer is given parameters and gradients; all else it makes, or keeps.
        given = role != t.TensorRole.OPTIMIZER_STATE and not self.division.of_optimizer(tensor.id)
        view = given and role in self.views
        if view:
            alias: int | None = self.use(tensor.id, WHOLE)
        elif tensor.alias_of is None or given:
            alias = None
        else:
            alias = self.use(tensor.alias_of, SHARDED)
        shape = self.division.shape(tensor)
        return self.add(tensor, SHARDED, shape, alias, port=tensor.port and not view, role=role)

    def dtype(self, tensor: t.Tensor, variant: t.Phase) -> t.DType:
        """The element type of a tensor."""
        del variant
        return tensor.dtype

    def add(
        self,
        tensor: t.Tensor,
        variant: t.Phase,
        shape: tuple[int, ...],
        alias: int | None,
        *,
        role: t.TensorRole,
        port: bool | None = None,
    ) -> int:
        """Adds what a tensor is in a phase; notes a port."""
        port = tensor.port if port is None else port
        over = self.division.axes(tensor) if variant == SHARDED and role in PERSISTENT else ()
        row = self.builder.tensor(
            tensor.name, shape, self.dtype(tensor, variant), role, alias_of=alias, port=port,
            sharded=(*tensor.sharded, *over),
        )  # fmt: skip
        if port:
            self.written.ports.append((row, (tensor.id, variant)))
        return row

    # -- operations ----------------------------------------------------------------------------------------

    def _complete(self, row: int) -> None:
        """All-reduces a scalar of all gradients: each rank has that of its shards."""
        op = self.graph.ops[row]
        builder, index = self.builder, op.outputs[-1]
        axes = self.division.all_axes
        group, stream = axes_group(builder, axes)
        tensor = self.graph.tensor(index)
        reduce = builder.collective(
            f"{'+'.join(axes)}.all_reduce_scalar", t.CollectiveKind.ALL_REDUCE, group=group,
            bytes_per_rank=tensor.nbytes, dtype=tensor.dtype, payload=t.Payload.OTHER, asynchronous=True,
            phase=op.phase, stream=stream, inputs=(self.use(index, SHARDED),),
            deps=(int(self.ops.starts[row]),),
        )  # fmt: skip
        self.written.amounts.append(Amount(reduce, "nbytes", (index,)))
        builder.compute(f"{'+'.join(axes)}.wait", phase=op.phase, deps=(reduce,))

    def _shares(self, rows: range, touched: Sequence[int]) -> Float64:
        """How much of its work each operation has left: elements of its tensors, new over old."""
        numel = self.graph.tensors.numel
        left = numel.copy()
        for index in touched:
            if self.division.cut(index):
                left[index] = prod(self.division.shape(self.graph.tensor(index)))
        old, new = np.zeros((2, len(rows)), np.int64)
        for side in (self.graph.ops.inputs, self.graph.ops.outputs):
            ends = side.offsets[rows.start : rows.stop + 1]
            values, at = side.values[ends[0] : ends[-1]], ends - ends[0]
            for total, each in ((old, numel), (new, left)):
                total += np.diff(np.append(0, np.cumsum(each[values]))[at])
        return np.divide(new, old, out=np.ones(len(rows)), where=old > 0)


def _stretches(rows: range, apart: Container[int]) -> Iterator[tuple[range, bool]]:
    """Rows in stretches, and whether each is of rows that do not stand apart."""
    for alone, its in groupby(rows, key=apart.__contains__):
        found = list(its)
        yield range(found[0], found[-1] + 1), not alone


class ShardedGraph:
    """The blocks of a graph, written with `ShardedBlock`, and what their rows and ids became."""

    def __init__(self, graph: Graph, builder: GraphBuilder, blocks: list[Written], ops: NewRows) -> None:
        self.graph, self.builder, self.blocks, self.ops = graph, builder, blocks, ops
        self._ids: dict[tuple[int, t.Phase], tuple[int, int]] = {}
        self._own = []
        self._firsts, start = [], 0
        self._op_firsts, op_start = [], 0
        for made, block in zip(blocks, graph.blocks, strict=True):
            ports = {row for row, _ in made.ports}
            mine = [row for row in made.tensor_rows if row not in ports]
            self._own.append(dict(zip(mine, range(len(mine)), strict=True)))
            self._firsts.append(start)
            self._op_firsts.append(op_start)
            start += len(mine) * len(block.instances)
            op_start += len(made.op_rows) * len(block.instances)

    def new_id(self, address: Address) -> int:
        """The id of a tensor given as (block, instance, new row)."""
        block, instance, row = address
        return self._firsts[block] + instance * len(self._own[block]) + self._own[block][row]

    def tensor_id(self, old_id: int, phase: t.Phase) -> int:
        """The id of what a tensor became, given its old id and the phase that uses it."""
        block, instance, row = self.graph.locate_tensor(old_id)
        found = self._ids.get((row, phase))
        if found is None:
            first = self.new_id((block, 0, self.blocks[block].tensor(row, phase)))
            found = self._ids[row, phase] = first, len(self._own[block])
        first, of_instance = found
        return first + instance * of_instance

    def call(self, call: Call) -> Call:
        """A call of old rows, of new ones."""
        block, begin, end, instance, micro_batch = call
        return block, self.ops.starts.item(begin), self.ops.stops.item(end - 1), instance, micro_batch

    def calls(self, calls: Int64) -> Int64:
        """Calls of old rows, of new ones."""
        made = calls.copy()
        made[:, 1], made[:, 2] = self.ops.starts[calls[:, 1]], self.ops.stops[calls[:, 2] - 1]
        return made

    def origins(self, job: JobGraph) -> tuple[Int64, Int64]:
        """For each tensor and operation of the job that was made of it, the graph's that it was; -1 if added."""
        tensors, ops = np.full(len(job.tensors), NONE), np.full(len(job.ops), NONE)
        for made in self.blocks:
            for (old, _), row in made.tensors.items():
                tensors[row] = old
        written = np.flatnonzero(self.ops.starts != NONE)
        ops[self.ops.starts[written]] = written
        return tensors, ops

    @property
    def amounts(self) -> list[Amount]:
        """Sizes of what was added to its blocks."""
        return [amount for made in self.blocks for amount in made.amounts]

    def shards(self, division: Division, dims: Mapping[int, int] | None = None) -> dict[int, DividedOver]:
        """The new rows that are shards of old ones.

        Args:
            division: how tensors are divided.
            dims: of each that is, the dimension that is cut; None: their elements are.
        """
        if division.none:
            return {}
        rows = [
            (row, old) for made in self.blocks for (old, phase), row in made.tensors.items() if phase == SHARDED
        ]
        cut = ((row, old) for row, old in rows if division.cut(old))
        return {
            row: (division.axes(self.graph.tensor(old)), FLAT if dims is None else dims[old]) for row, old in cut
        }

    def bind(self, token: Callable[[int, int, str, int], Address] | None = None) -> None:
        """Adds all instances.

        Args:
            token: what a token's port is bound to, given its block, instance, name and unit.
        """
        for number, block in enumerate(self.graph.blocks):
            for index, instance in enumerate(block.instances):
                bindings = []
                for _, (what, which) in self.blocks[number].ports:
                    if isinstance(what, str):
                        assert token is not None
                        bindings.append(self.new_id(token(number, index, what, which)))
                    else:
                        bindings.append(self.tensor_id(self._bound(number, index, what), t.Phase(which)))
                self.builder.instance(
                    number, instance.label, bindings=bindings, op_bindings=map(self._op_id, instance.op_bindings)
                )

    def _bound(self, block: int, instance: int, port: int) -> int:
        return self.graph.tensor_id(block, instance, port)

    def _op_id(self, identity: int) -> int:
        block, instance, row = self.graph.locate_op(identity)
        rows = self.blocks[block].op_rows
        return self._op_firsts[block] + instance * len(rows) + self.ops.starts.item(row) - rows.start


MIB = 2**20
_ALIGNED = 128
"""Megatron-LM fills a bucket up to a multiple of this many elements, and of the ranks."""


@dataclass(slots=True, kw_only=True)
class Bucket:
    """Tensors of one data type and one set of ranks, with their ids.

    Attributes:
        axes: along which the ranks lie.
        dtype: of all.
        tensors: each with its id, in order.
        elements: of all together.
    """

    axes: tuple[str, ...]
    dtype: t.DType
    tensors: list[tuple[int, t.Tensor]] = field(default_factory=list)
    elements: int = 0

    def nbytes(self, ranks: int = 1) -> int:
        """Bytes, filled up so that ranks get equal shards; as they are for one rank."""
        step = lcm(ranks, _ALIGNED) if ranks > 1 else 1
        return self.dtype.nbytes(ceil(self.elements / step) * step)


def zero_bucket_elements(ranks: int) -> int:
    """Elements at which a bucket of gradients closes with ZeRO, unless it is said: those of Megatron-LM."""
    return max(40_000_000, 1_000_000 * ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a bucket is full.

    Attributes:
        nbytes: a bucket closes when it holds as much; None: Megatron-LM's number of elements; infinite: never.
        first_nbytes: the same for the first bucket of its type and ranks; None: as all others.
    """

    nbytes: float | None = None
    first_nbytes: float | None = None

    def of(self, bucket: Bucket, ranks: int, first: bool) -> float:
        """Bytes at which a bucket closes."""
        if first and self.first_nbytes is not None:
            return self.first_nbytes
        return bucket.dtype.nbytes(zero_bucket_elements(ranks)) if self.nbytes is None else self.nbytes


def fill(tensors: Iterable[tuple[int, t.Tensor]], mesh: tuple[Axis, ...], limits: Limits) -> list[Bucket]:
    """Puts tensors into buckets, one open bucket for each data type and set of ranks.

    Args:
        tensors: each with its id, in the order in which they are ready; those of no data axis are left out.
        mesh: of the job.
        limits: when a bucket is full.
    """
    sizes = {axis.name: axis.size for axis in mesh}
    opened: dict[_Like, Bucket] = {}
    closed: list[Bucket] = []
    full: dict[_Like, float] = {}
    known: dict[int, tuple[_Like, int]] = {}
    for identity, tensor in tensors:
        if tensor.id not in known:
            known[tensor.id] = (reduction_axes(mesh, tensor.sharded), tensor.dtype), tensor.numel
        key, elements = known[tensor.id]
        if not key[0]:
            continue
        bucket = opened.get(key)
        if bucket is None:
            bucket = opened[key] = Bucket(axes=key[0], dtype=key[1])
        if key not in full:
            full[key] = limits.of(bucket, prod(sizes[axis] for axis in key[0]), first=True)
        bucket.tensors.append((identity, tensor))
        bucket.elements += elements
        if bucket.nbytes() >= full[key]:
            closed.append(opened.pop(key))
            full[key] = limits.of(bucket, prod(sizes[axis] for axis in key[0]), first=False)
    return [*closed, *opened.values()]


_Like = tuple[tuple[str, ...], t.DType]
"""Tensors of one set of ranks, and data type."""


def by_axes(buckets: list[Bucket]) -> dict[tuple[str, ...], list[Bucket]]:
    """The buckets of each set of ranks."""
    found: dict[tuple[str, ...], list[Bucket]] = {}
    for bucket in buckets:
        found.setdefault(bucket.axes, []).append(bucket)
    return found


@dataclass(slots=True, kw_only=True)
class _Reduction:
    """A bucket's operations: those that fill and reduce it, and the tensors that then hold its gradients."""

    bucket: Bucket
    ops: list[int]
    held: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledBucket:
    """What a bucket was filled with.

    Attributes:
        stage: of its program.
        first: whether it is the first bucket.
        axes: along which its ranks lie.
        dtype: of its elements.
        full: whether it closed because it was.
        tensors: rows of the graph's tensors, that which was put in last behind the others.
    """

    stage: int
    first: bool
    axes: tuple[str, ...]
    dtype: t.DType
    full: bool
    tensors: tuple[int, ...]


class _Rows:
    """Operations of one phase that are written at one go.

    Args:
        first: the row of the first one.
    """

    _COLUMNS: ClassVar = {
        name: OP_COLUMNS[name].default
        for name in (
            "stream", "bytes_read", "bytes_written", "variant", "group", "nbytes", "dtype", "payload",
            "asynchronous",
        )
    }  # fmt: skip

    def __init__(self, first: int) -> None:
        self.first = first
        self.kinds: list[int] = []
        self.names: list[str] = []
        self.given: list[tuple[Sequence[int], Sequence[int], Sequence[int]]] = []
        self.columns: dict[str, dict[int, int]] = {name: {} for name in self._COLUMNS}

    def add(
        self, kind: t.OpKind, name: str, inputs: Sequence[int], outputs: Sequence[int] = (),
        deps: Sequence[int] = (), **values: int,
    ) -> int:  # fmt: skip
        """Adds one, with values of columns; returns its row."""
        at = len(self.names)
        self.kinds.append(kind)
        self.names.append(name)
        self.given.append((inputs, outputs, deps))
        for column, value in values.items():
            self.columns[column][at] = value
        return self.first + at

    def write(self, builder: GraphBuilder, phase: t.Phase) -> None:
        """Writes all of them."""
        columns = {
            name: [its.get(at, default) for at in range(len(self.names))]
            for (name, its), default in zip(self.columns.items(), self._COLUMNS.values(), strict=True)
            if its
        }
        inputs, outputs, deps = zip(*self.given, strict=True) if self.given else ((), (), ())
        builder.rows(
            self.names, kind=self.kinds, phase=phase, inputs=inputs, outputs=outputs, deps=deps, **columns
        )


class ProgramWriter:
    """Writes one program.

    Args:
        options: the pass.
        graph: the step, or the pipeline's job.
        job: its blocks as they are written.
        division: how tensors are divided.
        program: of the graph.
        labels: what its calls are of; None for a step, whose calls are of a micro-batch, or of the update.
    """

    def __init__(
        self, *, options: DataParallel, graph: g.Graph, job: ShardedGraph, division: Division, program: g.Program,
        labels: Sequence[PassLabel] | None = None,
    ) -> None:  # fmt: skip
        self.options, self.graph, self.job, self.division = options, graph, job, division
        self.builder: GraphBuilder = job.builder
        self.mesh = self.builder.mesh
        self.staged = isinstance(graph, g.JobGraph)
        self.stage = program.coordinates.get("pp", 0)
        self.name = "zero" if options.zero else "ddp"
        self.reduces = bool(reduction_axes(self.mesh, ()))
        self.bindings: list[int] = []
        self.like: dict[int, tuple[int, bool]] = {}
        self.buckets: list[FilledBucket] = []
        self.amounts: list[Amount] = []
        self._shards: dict[int, t.Tensor] = {}
        self._adding: dict[int, bool] = {}
        self.added: dict[ProgramPoint, list[tuple[int, list[int]]]] = {}
        self.block = 0
        self.accumulations: dict[ProgramPoint, Call] = {}
        self.labels = labels or [UPDATE] * len(program.calls)
        self.source = np.zeros(0, np.int64)
        kept = np.flatnonzero(program.calls[:, 2] > program.calls[:, 1])
        if self.staged:
            kept = kept[self._stays(program.calls[kept])]
        self.steps, self.label = program.calls[kept], kept
        if not self.staged:
            self.steps, self.label = self._of_step(self.steps)
        self.last = int(self.steps[:, 4].max(initial=0))

    @property
    def written(self) -> list[PassLabel]:
        """What each call that was written is of."""
        return [self.labels[number] for number in self.label[self.source].tolist()]

    def calls(self) -> Int64:
        """All calls of the program, in new rows."""
        ready = ready_gradients(self.graph, self.steps, None if self.options.zero == 2 else self.last)
        gradients = sorted(ready.get(self.last, {}).values(), key=lambda gradient: gradient.ready)
        if not self.staged and gradients:
            self._accumulate_whole(gradients)
        if not self.reduces or not gradients:
            return self._merged()
        tensors = [(gradient.tensor_id, self.graph.tensor(gradient.tensor)) for gradient in gradients]
        reduced = by_axes(fill(tensors, self.mesh, self._limits()))
        gathered = by_axes(self._updated()) if self.options.zero else {}
        for number, axes in enumerate({**reduced, **gathered}):
            # Rows of a block run in order, so each group of ranks, whose buckets do, has a block of its own.
            self._begin(self.name if number == 0 else f"{self.name}.{'+'.join(axes)}")
            self._communicate(axes, reduced.get(axes, []), gathered.get(axes, []), ready)
            self.builder.instance(self.block, bindings=self.bindings)
        self._add_unreduced(tensors, ready)
        return self._merged()

    def _communicate(
        self,
        axes: tuple[str, ...],
        reduced: list[Bucket],
        gathered: list[Bucket],
        ready: dict[int, dict[int, Gradient]],
    ) -> None:
        """Everything of one group of ranks, in the order in which it runs."""
        options = self.options
        if axes == reduction_axes(self.mesh, ()) and not (self.staged or options.zero):
            self._broadcast_buffers()
        if options.overlap_param_gather:
            self._gather_ahead(gathered)
        if reduced:
            self._reduce(reduced, ready)
        if gathered and not options.overlap_param_gather:
            ops = [self._gather(bucket, t.Phase.OPTIMIZER) for bucket in gathered]
            wait = self.builder.compute("zero.wait", phase=t.Phase.OPTIMIZER, deps=ops)
            self._at((len(self.steps) - 1, int(self.steps[-1, 2])), [*ops, wait])

    def _begin(self, name: str) -> None:
        self.block, self.bindings = self.builder.begin_block(name), []

    # -- calls ---------------------------------------------------------------------------------------------

    def _of_step(self, calls: Int64) -> tuple[Int64, Int64]:
        """Forward and backward for each micro-batch, then the optimizer; and the numbers of their labels."""
        passes, update = split_at_optimizer(self.graph, calls)
        count, self.pass_length = self.options.micro_batches, len(passes)
        self.labels = [*(("forward", micro_batch, 0) for micro_batch in range(count)), UPDATE]
        label = np.repeat(np.arange(count + 1), [len(passes)] * count + [len(update)])
        every = np.concatenate([np.tile(passes, (count, 1)), update])
        every[:, 4] = np.minimum(label, count - 1)
        return every, label

    def _stays(self, calls: Int64) -> Bools:
        """Which of the pipeline's calls stay: not those that add up gradients where their reduction does."""
        adds = np.array([block.name == ACCUMULATE for block in self.graph.blocks], np.bool_)[calls[:, 0]]
        here = (calls[:, 4] == calls[:, 4].max(initial=0)) | (self.options.zero == 2)
        return np.asarray(~(adds & here & self.reduces))

    def _accumulate_whole(self, gradients: list[Gradient]) -> None:
        """Adds up whole gradients after each micro-batch but the first, and but those whose reduction does."""
        adding = range(1, self.last) if self.reduces else range(1, self.last + 1)
        if not adding or (self.reduces and self.options.zero == 2):
            return
        alone = [x for x in gradients if not adds_up(self.graph, x.tensor)]
        if not alone:
            return
        whole = ((self.graph.tensor(x.tensor), self.job.tensor_id(x.tensor_id, WHOLE)) for x in alone)
        call = accumulate(self.builder, ((tensor, tensor.name, tensor_id) for tensor, tensor_id in whole))
        for micro_batch in adding:
            number = (micro_batch + 1) * self.pass_length - 1
            self.accumulations[number, int(self.steps[number, 2])] = in_micro_batch([call], micro_batch)[0]

    def _merged(self) -> Int64:
        """The step's calls, cut where others are added."""
        cuts: dict[int, set[int]] = {}
        for number, cut in (*self.added, *self.accumulations):
            cuts.setdefault(number, set()).add(cut)
        whole, at = self.job.calls(self.steps), 0
        parts, sources = [], []
        for number in sorted(cuts):
            cut_up = self._cut_up(number, sorted(cuts[number]))
            parts += [whole[at:number], np.array(cut_up, np.int64).reshape(-1, 5)]
            sources += [np.arange(at, number), np.full(len(cut_up), number)]
            at = number + 1
        self.source = np.concatenate([*sources, np.arange(at, len(whole))])
        return np.concatenate([*parts, whole[at:]])

    def _cut_up(self, number: int, cuts: list[int]) -> list[Call]:
        """A call of the step, cut, with what is added in between."""
        block, begin, end, instance, micro_batch = self.steps[number].tolist()
        found: list[Call] = []
        for cut in cuts:
            if cut > begin:
                found.append(self.job.call((block, begin, cut, instance, micro_batch)))
            begin = cut
            for added, ops in self.added.get((number, cut), ()):
                found.append((added, ops[0], ops[-1] + 1, 0, micro_batch))
            if (number, cut) in self.accumulations:
                found.append(self.accumulations[number, cut])
        if begin < end:
            found.append(self.job.call((block, begin, end, instance, micro_batch)))
        return found

    def _at(self, place: ProgramPoint, ops: list[int]) -> None:
        if ops:
            self.added.setdefault(place, []).append((self.block, ops))

    # -- gradients -----------------------------------------------------------------------------------------

    def _limits(self) -> Limits:
        return self.options.limits(self.stage)

    @property
    def _views(self) -> bool:
        asked = self.options.gradient_as_bucket_view
        return self.options.zero == 1 if asked is None else asked

    def _reduce(self, buckets: list[Bucket], ready: dict[int, dict[int, Gradient]]) -> None:
        """Writes the reductions, and says where they run: in the last micro-batch, or in each."""
        reductions = self._reductions(buckets)
        wait = self.builder.compute(
            f"{self.name}.wait", phase=t.Phase.BACKWARD, deps=[reduction.ops[-1] for reduction in reductions]
        )
        keep = self._keep(reductions)
        add = self._add_shards(reductions) if self.options.zero == 2 and self.last else []
        for micro_batch in ready if self.options.zero == 2 else (self.last,):
            of_pass = ready[micro_batch]
            end = max(gradient.ready for gradient in of_pass.values())
            if self.staged and micro_batch == self.last:
                # The stage before needs this one's last message, which is sent before reductions are waited for.
                end = max(end, self._end_of_passes())
            behind = (0, 0)
            for reduction in reductions:
                tensors = reduction.bucket.tensors
                at = max(of_pass[i].ready for i, _ in tensors) if self.options.overlap_grad_reduce else end
                # A bucket is launched after the one before it, also when its gradients are ready sooner.
                behind = max(behind, at)
                self._at(behind, reduction.ops)
            first = micro_batch == min(ready)
            self._at(end, [wait])
            self._at(end, keep if first or not add else add)

    def _end_of_passes(self) -> ProgramPoint:
        """Where forward and backward end, and their messages, and the optimizer begins."""
        passes, _ = split_at_optimizer(self.graph, self.steps)
        return len(passes) - 1, int(passes[-1, 2])

    def _reductions(self, buckets: list[Bucket]) -> list[_Reduction]:
        """Of each bucket the operations that fill and reduce it, and the tensors that hold its gradients then."""
        tensors = [its for bucket in buckets for its in bucket.tensors]
        if self._views:
            ports = held = self._ports(tensors, WHOLE)
        else:
            ports, held = self._with_copies(tensors)
        found, at, rows = [], 0, _Rows(self.builder.op_count())
        for number, bucket in enumerate(buckets):
            its = slice(at, at := at + len(bucket.tensors))
            ops = self._fill(rows, [tensor for _, tensor in bucket.tensors], ports[its], held[its])
            found.append(_Reduction(bucket=bucket, ops=ops, held=list(held[its])))
            self._add_collectives(rows, found[-1], number)
        rows.write(self.builder, t.Phase.BACKWARD)
        return found

    def _with_copies(self, tensors: Sequence[tuple[int, t.Tensor]]) -> tuple[range, range]:
        """Ports for gradients, and their places in buckets."""
        role = t.TensorRole.ACTIVATION if self.options.zero == 2 else t.TensorRole.BUFFER
        self.bindings += (self.job.tensor_id(identity, WHOLE) for identity, _ in tensors)
        made = self.builder.tensors(
            [tensor for _, tensor in tensors for _ in range(2)],
            names=[name for _, tensor in tensors for name in (tensor.name, f"{tensor.name}.bucket")],
            roles=[its for _, tensor in tensors for its in (tensor.role, role)],
            ports=[True, False] * len(tensors),
            sharded=[axes for _, tensor in tensors for axes in (tensor.sharded, ())],
        )
        self._note(made[::2], tensors)
        self._note(made[1::2], tensors)
        return made[::2], made[1::2]

    def _note(self, made: Sequence[int], tensors: Sequence[tuple[int, t.Tensor]], shards: bool = False) -> None:
        """Notes what tensors are like that were added."""
        self.like |= {row: (tensor.id, shards) for row, (_, tensor) in zip(made, tensors, strict=True)}

    def _fill(
        self, rows: _Rows, tensors: Sequence[t.Tensor], ports: Sequence[int], held: Sequence[int]
    ) -> list[int]:
        """Adds gradients to those of the micro-batches before, and copies them into their bucket."""
        ops: list[int] = []
        adds, copies = self.last and self.options.zero < 2, not self._views
        name = f"{self.name}.copy_to_bucket"
        for tensor, port, copy in zip(tensors, ports, held, strict=True):
            if not copies and not adds:
                break
            nbytes = tensor.nbytes
            if adds and not self._adds_up(tensor.id):
                add = rows.add(
                    t.OpKind.COMPUTE, ADD_TO_GRADIENT, (port,), bytes_read=2 * nbytes, bytes_written=nbytes
                )
                ops.append(add)
            if copies:
                # Buckets of whole gradients are there before the step, and written in place.
                read, made = ((port,), (copy,)) if self.options.zero == 2 else ((port, copy), ())
                ops.append(rows.add(t.OpKind.COMPUTE, name, read, made, bytes_read=nbytes, bytes_written=nbytes))
        return ops

    def _add_collectives(self, rows: _Rows, reduction: _Reduction, number: int) -> None:
        """Reduces a bucket, once it is filled."""
        bucket, ops, options = reduction.bucket, reduction.ops, self.options
        scatter = options.zero > 0 and options.reduce_scatter
        kind = t.CollectiveKind.REDUCE_SCATTER if scatter else t.CollectiveKind.ALL_REDUCE
        within = self._within(bucket) if scatter else bucket.axes
        nbytes = bucket.nbytes(self.division.ranks(within) if options.zero else 1)
        self._filled(bucket, bucket.tensors, number == 0)
        ops.append(self._collective(rows, f"bucket_{number}", kind, within, reduction, nbytes, ops))
        self._is(ops[-1], bucket, "nbytes", part=False)
        if across := [axis for axis in bucket.axes if axis not in within]:
            # Groups that divide the optimizer each for itself: their shards are added up.
            nbytes, kind = self._shard_bytes(bucket), t.CollectiveKind.ALL_REDUCE
            ops.append(self._collective(rows, f"shards_{number}", kind, across, reduction, nbytes, ops[-1:]))
            self._is(ops[-1], bucket, "nbytes")

    def _filled(self, bucket: Bucket, tensors: Iterable[tuple[int, t.Tensor]], first: bool) -> None:
        """Notes what a bucket was filled with, in this order."""
        rows = tuple(tensor.id for _, tensor in tensors)
        full = bucket.nbytes() >= self._limits().of(bucket, self.division.ranks(bucket.axes), first)
        self.buckets.append(
            FilledBucket(
                stage=self.stage, first=first, axes=bucket.axes, dtype=bucket.dtype, full=full, tensors=rows
            )
        )  # fmt: skip

    def _is(self, row: int, bucket: Bucket, *columns: str, part: bool = True, times: int = 1) -> None:
        """Notes that sizes of an operation are a bucket's, or this rank's part of it."""
        axes = self._within(bucket) if self.options.zero else ()
        fill = _ALIGNED if self.division.ranks(axes) > 1 else 1
        rows = tuple(tensor.id for _, tensor in bucket.tensors)
        self.amounts += (
            Amount(row, column, rows, axes=axes, fill=fill, dtype=bucket.dtype, part=part, times=times)
            for column in columns
        )

    def _collective(
        self, rows: _Rows, name: str, kind: t.CollectiveKind, axes: Sequence[str], reduction: _Reduction,
        nbytes: int, deps: Sequence[int],
    ) -> int:  # fmt: skip
        """A reduction of a bucket."""
        group, stream = axes_group(self.builder, axes)
        return rows.add(
            t.OpKind.COLLECTIVE, f"{self.name}.{name}", reduction.held, deps=tuple(deps), stream=stream,
            variant=kind, group=group, nbytes=nbytes, dtype=reduction.bucket.dtype, payload=t.Payload.GRADIENT,
            asynchronous=True,
        )  # fmt: skip

    def _within(self, bucket: Bucket) -> tuple[str, ...]:
        """The axes over which a bucket is divided, and not copied."""
        return tuple(axis for axis in bucket.axes if axis not in self.division.copies)

    def _keep(self, reductions: list[_Reduction]) -> list[int]:
        """Copies what was reduced out of the buckets: gradients, or with ZeRO this rank's shards."""
        if self._views:
            return []
        ops = []
        for reduction in reductions if self.options.zero else ():
            shards = self._ports(reduction.bucket.tensors, SHARDED)
            ops.append(self._copy("keep_shard", (*reduction.held, *shards), self._shard_bytes(reduction.bucket)))
            self._is(ops[-1], reduction.bucket, "bytes_read", "bytes_written")
        if not self.options.zero:
            copies = [(copy,) for reduction in reductions for copy in reduction.held]
            nbytes = [tensor.nbytes for reduction in reductions for _, tensor in reduction.bucket.tensors]
            names = [f"{self.name}.copy_from_bucket"] * len(copies)
            return list(
                self.builder.computes(
                    names, phase=t.Phase.BACKWARD, inputs=copies, bytes_read=nbytes, bytes_written=nbytes
                )
            )
        return ops

    def _add_shards(self, reductions: list[_Reduction]) -> list[int]:
        """Adds this rank's shards of the buckets to those of the micro-batches before."""
        ops = []
        for reduction in reductions:
            shards = self._ports(reduction.bucket.tensors, SHARDED)
            nbytes = self._shard_bytes(reduction.bucket)
            ops.append(
                self.builder.compute(
                    "aten.add_", phase=t.Phase.BACKWARD, inputs=(*shards, *reduction.held), bytes_read=2 * nbytes,
                    bytes_written=nbytes,
                )
            )  # fmt: skip
            self._is(ops[-1], reduction.bucket, "bytes_read", times=2)
            self._is(ops[-1], reduction.bucket, "bytes_written")
        return ops

    def _shard_bytes(self, bucket: Bucket) -> int:
        ranks = self.division.ranks(self._within(bucket))
        return bucket.nbytes(ranks) // ranks

    def _add_unreduced(self, tensors: list[tuple[int, t.Tensor]], ready: dict[int, dict[int, Gradient]]) -> None:
        """Adds up gradients that no other rank has a summand of, where no block of their own does."""
        alone = [
            (i, tensor)
            for i, tensor in tensors
            if not reduction_axes(self.mesh, tensor.sharded) and not adds_up(self.graph, tensor.id)
        ]
        if not alone or not self.last:
            return
        self._begin("unreduced")
        nbytes = [tensor.nbytes for _, tensor in alone]
        made = self.builder.computes(
            [ADD_TO_GRADIENT] * len(alone), phase=t.Phase.BACKWARD,
            inputs=[(port,) for port in self._ports(alone, WHOLE)], bytes_read=[2 * each for each in nbytes],
            bytes_written=nbytes,
        )  # fmt: skip
        ops = {i: op for (i, _), op in zip(alone, made, strict=True)}
        for micro_batch in sorted(ready)[1:] if self.options.zero == 2 else (self.last,):
            for identity, op in ops.items():
                self._at(ready[micro_batch][identity].ready, [op])
        self.builder.instance(self.block, bindings=self.bindings)

    # -- parameters and buffers ----------------------------------------------------------------------------

    def _updated(self) -> list[Bucket]:
        """The parameters that the optimizer updates, in buckets, in the order in which forward reads them.

        They are filled from the last one on, as those of gradients are, which share them (Megatron-LM).
        """
        self.updated = updated_parameters(self.graph, self.steps)
        self.reads = first_reads(self.graph, self.steps, set(self.updated))
        start = (0, int(self.steps[0, 1]))
        order = sorted(self.updated, key=lambda i: self.reads.get(i, start), reverse=True)
        tensors = ((i, self.graph.tensor(self.graph.locate_tensor(i)[2])) for i in order)
        buckets = fill(tensors, self.mesh, self._limits())
        for bucket in buckets:
            bucket.tensors.reverse()
        return sorted(buckets, key=lambda bucket: self.reads.get(bucket.tensors[0][0], start))

    def _gather_ahead(self, buckets: list[Bucket]) -> None:
        """Gathers parameters as the step before left them, one bucket ahead of the layers that read it."""
        at = start = (0, int(self.steps[0, 1]))
        issued: list[int] = []
        for bucket in buckets:
            gather = self._gather(bucket, t.Phase.FORWARD)
            self._at(at, [*issued, gather])
            at = max(at, self.reads.get(bucket.tensors[0][0], start))
            issued = [self.builder.compute("zero.wait", phase=t.Phase.FORWARD, deps=(gather,))]
        self._at(at, issued)

    def _gather(self, bucket: Bucket, phase: t.Phase) -> int:
        """Gathers parameters in place: what the optimizer has just made of this rank's shards, or what it left."""
        builder, job, late = self.builder, self.job, phase == t.Phase.OPTIMIZER
        made, ports, alias_of = [], [], []
        for identity, tensor in bucket.tensors:
            if late:
                self.bindings.append(job.tensor_id(self.updated[identity], SHARDED))
                made.append(self._shard(tensor))
            self.bindings.append(job.tensor_id(identity, WHOLE))
            made += tensor, tensor
        first, each = builder.tensor_count(), 3 if late else 2
        for port in range(first + each - 2, first + len(made), each):
            ports += [True] * (each - 1) + [False]
            alias_of += [NONE] * (each - 1) + [port]
        rows = builder.tensors(made, ports=ports, alias_of=alias_of)
        shards, whole = rows[::each] if late else (), rows[each - 1 :: each]
        self._note(shards, bucket.tensors if late else (), True)
        self._note(rows[each - 2 :: each], bucket.tensors)
        self._note(whole, bucket.tensors)
        within = self._within(bucket)
        group, stream = axes_group(builder, within)
        self._filled(bucket, reversed(bucket.tensors), first=False)
        self._is(builder.op_count(), bucket, "nbytes", part=False)
        return builder.collective(
            "zero.all_gather", t.CollectiveKind.ALL_GATHER, group=group,
            bytes_per_rank=bucket.nbytes(self.division.ranks(within)), dtype=bucket.dtype,
            payload=t.Payload.PARAMETER, asynchronous=True, phase=phase, inputs=shards, outputs=whole,
            stream=stream,
        )  # fmt: skip

    def _broadcast_buffers(self) -> None:
        """Rank 0's buffers go to all others before the forward pass that is reduced."""
        builder, nbytes = self.builder, model_buffer_bytes(self.graph)
        if nbytes == 0 or not self.options.broadcast_buffers:
            return
        group, stream = axes_group(builder, reduction_axes(self.mesh, ()))
        sync = builder.collective(
            "ddp.broadcast_buffers", t.CollectiveKind.BROADCAST, group=group, bytes_per_rank=nbytes,
            dtype=t.DType.UINT8, payload=t.Payload.OTHER, phase=t.Phase.FORWARD, stream=stream,
        )  # fmt: skip
        number = int(np.argmax(self.steps[:, 4] == self.last))
        wait = builder.compute("ddp.wait", phase=t.Phase.FORWARD, deps=[sync])
        self._at((number, int(self.steps[number, 1])), [sync, wait])

    # -- rows ----------------------------------------------------------------------------------------------

    def _ports(self, tensors: Sequence[tuple[int, t.Tensor]], phase: t.Phase) -> range:
        """Ports for tensors of the step, whole or this rank's shards."""
        self.bindings += (self.job.tensor_id(identity, phase) for identity, _ in tensors)
        made = [self._shard(tensor) if phase == SHARDED else tensor for _, tensor in tensors]
        rows = self.builder.tensors(made, ports=[True] * len(made))
        self._note(rows, tensors, phase == SHARDED)
        return rows

    def _shard(self, tensor: t.Tensor) -> t.Tensor:
        """This rank's shard of a tensor."""
        if tensor.id not in self._shards:
            sharded = (*tensor.sharded, *self.division.axes(tensor))
            self._shards[tensor.id] = replace(tensor, shape=self.division.shape(tensor), sharded=sharded)
        return self._shards[tensor.id]

    def _adds_up(self, row: int) -> bool:
        if row not in self._adding:
            self._adding[row] = adds_up(self.graph, row)
        return self._adding[row]

    def _copy(self, name: str, inputs: tuple[int, ...], nbytes: int, made: tuple[int, ...] = ()) -> int:
        return self.builder.compute(
            f"{self.name}.{name}", phase=t.Phase.BACKWARD, inputs=inputs, outputs=made, bytes_read=nbytes,
            bytes_written=nbytes,
        )  # fmt: skip


__all__ = [
    "MAX_MICRO_BATCHES",
    "MAX_REPLICAS",
    "MIB",
    "DataParallel",
    "check_sizes",
    "data_mesh",
    "final_gradients",
]

STAGES = "pp"
MAX_REPLICAS = 10_000_000
MAX_MICRO_BATCHES = 65_536


class ReplicatingPass(Protocol):
    """A pass that spreads a graph over data-parallel ranks."""

    @property
    def replicas(self) -> int: ...
    @property
    def micro_batches(self) -> int: ...

    def data_mesh(self, mesh: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """The mesh of the job of a graph with this one."""
        ...

    def does_as(self, known: ReplicasAlike, graph: Graph, mesh: tuple[Axis, ...]) -> bool:
        """Whether it decides for a graph by its sizes as it was decided for one of the same structure."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicasAlike:
    """A graph over data-parallel ranks, for other sizes, too.

    Attributes:
        options: the pass.
        job: the job.
        labels: for each of its programs, what its calls are of.
        rest: what of the graph lives through the step (`structure.at_rest`).
        sized: the job for any graph of the same structure; None where that is not known.
        resizable: without that, the job for any with the same at rest; None where that is not known either.
        buckets: its buckets.
        cut: rows of the graph's tensors of which shards are parts along a dimension, and which it is.
    """

    options: ReplicatingPass
    job: JobGraph
    labels: list[list[PassLabel]]
    rest: Hashable
    sized: Sized | None
    resizable: Resizable | None
    buckets: tuple[FilledBucket, ...] = ()
    cut: tuple[tuple[int, int], ...] = ()

    def of_graph(self, graph: StepGraph | JobGraph, options: ReplicatingPass) -> JobGraph | None:
        """The job of another graph of the same structure; None where it is another one.

        Args:
            graph: the graph.
            options: the pass, which may have other numbers of ranks, but one where this has one.
        """
        check_sizes(options.replicas, options.micro_batches, isinstance(graph, JobGraph))
        if self.sized is None:
            same = options == self.options and at_rest(graph) == self.rest
            return self.resizable.of_graph(graph) if same and self.resizable is not None else None
        mesh = options.data_mesh(graph.mesh)
        return self.sized.of_graph(graph, mesh) if options.does_as(self, graph, mesh) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """Lowers a step graph, or each stage of a pipeline, to a job of `replicas` equal ranks.

    Attributes:
        replicas: number of ranks, each with the whole model and its own micro-batches.
        micro_batches: forward and backward passes of each rank before the optimizer; gradients add up, and only
            the last pass reduces them (`no_sync`), but for `zero=2`.
        zero: what is divided over the ranks: 0 nothing, 1 the optimizer's state, 2 the gradients, too.
        overlap_grad_reduce: buckets are reduced while backward goes on; else all gradients at once after it.
        overlap_param_gather: parameters are gathered while the forward pass goes on (`zero` 1 and 2).
        bucket_bytes: size at which a bucket closes; None: 25 MiB (`bucket_cap_mb`), with ZeRO as many elements as
            Megatron-LM takes.
        first_bucket_bytes: the same for the first bucket, without ZeRO.
        gradient_as_bucket_view: gradients live in the buckets, so nothing is copied in and out; None: with
            `zero=1` alone.
        reduce_scatter: with ZeRO, ranks get their shards alone; else all-reduced gradients, of which they take
            theirs.
        broadcast_buffers: rank 0's buffers are broadcast before each forward pass, without ZeRO and stages.
        instances: groups of neighbouring ranks that each divide what is divided among themselves, and add up their
            shards of the gradients, with `zero=1` (`num_distributed_optimizer_instances` of Megatron-Core).
    """

    name: ClassVar[str] = "data_parallel"

    replicas: int
    micro_batches: int = 1
    zero: int = 0
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = False
    bucket_bytes: int | None = None
    first_bucket_bytes: int = 1 * MIB
    gradient_as_bucket_view: bool | None = None
    reduce_scatter: bool = True
    broadcast_buffers: bool = True
    instances: int = 1

    @property
    def group(self) -> int:
        """Ranks that divide the optimizer among themselves."""
        return self.replicas // self.instances

    def limits(self, stage: int) -> Limits:
        """When a bucket of a stage is full."""
        if not self.overlap_grad_reduce or (self.zero and stage > 0):
            return Limits(nbytes=inf)
        if self.zero:
            return Limits(nbytes=self.bucket_bytes)
        return Limits(
            nbytes=25 * MIB if self.bucket_bytes is None else self.bucket_bytes,
            first_nbytes=self.first_bucket_bytes,
        )

    def few(self) -> DataParallel:
        """With as few ranks as do the same but for sizes: one has nothing to share."""
        instances = min(self.instances, 2)
        return replace(self, replicas=instances * min(self.replicas // max(instances, 1), 2), instances=instances)

    def data_mesh(self, mesh: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """The mesh of the job of a graph with this one.

        Raises:
            PlanError: a number is out of range.
        """
        if self.zero not in (0, 1, 2):
            raise PlanError(f"zero {self.zero}: choose 0, 1 or 2 here; fully sharded data parallelism is stage 3")
        if self.instances < 1 or self.replicas % self.instances:
            raise PlanError(f"{self.instances} instances of the optimizer do not divide {self.replicas} ranks")
        if self.instances > 1 and (self.zero != 1 or self.group == 1 or not self.reduce_scatter):
            raise PlanError(
                f"{self.instances} instances of the optimizer over {self.replicas} ranks with zero {self.zero}: "
                "give zero 1, scattered gradients, and two ranks or more an instance"
            )
        replicate = (Axis(name=REPLICATE, size=self.instances),) if self.instances > 1 else ()
        return data_mesh(mesh, (*replicate, Axis(name=DATA, size=self.group)))

    def does_as(self, known: ReplicasAlike, graph: Graph, mesh: tuple[Axis, ...]) -> bool:
        """Whether buckets close where they did: at their last tensor, or not at all."""
        numel = graph.tensors.numel
        full = cache(lambda stage, first, axes, dtype: self._full(stage, first, axes, dtype, mesh))
        for bucket in known.buckets:
            most = full(bucket.stage, bucket.first, bucket.axes, bucket.dtype)
            elements = int(numel[list(bucket.tensors)].sum())
            if (bucket.dtype.nbytes(elements) >= most) != bucket.full:
                return False
            if bucket.dtype.nbytes(elements - int(numel[bucket.tensors[-1]])) >= most:
                return False
        return True

    def _full(
        self, stage: int, first: bool, axes: tuple[str, ...], dtype: t.DType, mesh: tuple[Axis, ...]
    ) -> float:
        """Bytes at which a bucket closes."""
        ranks = prod(axis.size for axis in mesh if axis.name in axes)
        return self.limits(stage).of(Bucket(axes=axes, dtype=dtype), ranks, first)

    def __call__(self, graph: StepGraph | JobGraph) -> JobGraph:
        """The job graph; a pipeline's job graph is replicated stage by stage, and keeps its micro-batches.

        Raises:
            PlanError: a number is out of range, or micro-batches are given for a pipeline, which has its own.
        """
        return self._written(graph, None)[0]

    def labelled(
        self, graph: StepGraph | JobGraph, labels: Sequence[Sequence[PassLabel]] | None = None
    ) -> tuple[JobGraph, list[list[PassLabel]]]:
        """The job graph, and for each of its programs what its calls are of.

        Args:
            graph: a step, or a pipeline's job.
            labels: of the job, what the calls of each program are of; None: of nothing that matters.

        Raises:
            PlanError: as `__call__`.
        """
        job, writers, _ = self._written(graph, labels)
        return job, [writer.written for writer in writers]

    def alike(
        self, graph: StepGraph | JobGraph, labels: Sequence[Sequence[PassLabel]] | None = None
    ) -> ReplicasAlike:
        """As `labelled`, with the job for other sizes, where these do not decide what it is.

        Raises:
            PlanError: as `__call__`.
        """
        job, writers, blocks = self._written(graph, labels)
        buckets = tuple(bucket for writer in writers for bucket in writer.buckets)
        sized = None
        # Buckets of several kinds are launched in the order in which they are full.
        if isinstance(graph, JobGraph) and len({(bucket.axes, bucket.dtype) for bucket in buckets}) < 2:
            sized = self._sized(graph, job, writers, blocks)
        return ReplicasAlike(
            options=self,
            job=job,
            labels=[writer.written for writer in writers],
            rest=at_rest(graph),
            sized=sized,
            resizable=None if sized is not None else Resizable.of(graph, job, *blocks.origins(job)),
            buckets=buckets,
        )

    def _sized(
        self, graph: JobGraph, job: JobGraph, writers: list[ProgramWriter], blocks: ShardedGraph
    ) -> Sized | None:
        """Where the sizes of the job come from."""
        tensors, ops = blocks.origins(job)
        shards = blocks.shards(writers[0].division)
        for writer in writers:
            shards |= {
                row: (writer.division.axes(graph.tensor(old)), FLAT)
                for row, (old, shard) in writer.like.items()
                if shard
            }
            tensors[list(writer.like)] = [old for old, _ in writer.like.values()]
        return Sized.of(
            graph, job, tensors, ops, shards=Shards.of(len(job.tensors), shards),
            shared=(ops != NONE) & (job.ops.phase == t.Phase.OPTIMIZER) & bool(self.zero),
            amounts=[*blocks.amounts, *(amount for writer in writers for amount in writer.amounts)],
        )  # fmt: skip

    def _written(
        self, graph: StepGraph | JobGraph, labels: Sequence[Sequence[PassLabel]] | None
    ) -> tuple[JobGraph, list[ProgramWriter], ShardedGraph]:
        """The job graph, and what wrote its programs and its blocks; as `labelled`."""
        check_sizes(self.replicas, self.micro_batches, isinstance(graph, JobGraph))
        mesh = self.data_mesh(graph.mesh)
        builder = empty_copy(graph)
        builder.mesh = mesh
        builder.group(DATA, axes=(DATA,))
        none = self.zero == 0 or not reduction_axes(mesh, ())
        gradients = frozenset(() if none else final_gradients(graph))
        copies = (REPLICATE,) if self.instances > 1 else ()
        division = Division(graph=graph, mesh=mesh, gradients=gradients, copies=copies, flat=True, none=none)
        job = self._write(graph, builder, division)
        writers = []
        for number, program in enumerate(graph.programs):
            its = None if labels is None else labels[number]
            writer = ProgramWriter(
                options=self, graph=graph, job=job, division=division, program=program, labels=its
            )
            builder.program(
                writer.calls(),
                role=program.role or "replica",
                coordinates=program.coordinates,
                ranks=program.ranks,
            )
            writers.append(writer)
        return builder.build(JobGraph, whole=labels is None), writers, job

    def _write(self, graph: Graph, builder: GraphBuilder, division: Division) -> ShardedGraph:
        """Writes the graph's own blocks, with the optimizer on shards, or as they are."""
        if division.none:
            copy_tables(builder, graph)
            rows = np.arange(len(graph.ops))
            written = [unchanged(graph, block) for block in graph.blocks]
            return ShardedGraph(graph, builder, written, NewRows(rows, rows + 1))
        views = {0: (), 1: (t.TensorRole.PARAMETER, t.TensorRole.GRADIENT), 2: (t.TensorRole.PARAMETER,)}[
            self.zero
        ]
        transient = (t.TensorRole.GRADIENT,) if self.zero == 2 else ()
        scalars = set() if division.none else {*total_norms(graph), *overflow_flags(graph)}
        ops = NewRows.of(len(graph.ops))
        blocks: list[Written] = []
        divided = _divided_blocks(graph, division, transient, scalars)
        for apart, numbers in groupby(range(len(graph.blocks)), divided.__contains__):
            its = list(numbers)
            if not apart:
                if its[0]:
                    builder.begin_block(graph.blocks[its[0]].name)
                blocks += _as_they_are(graph, builder, graph.blocks[its[0] : its[-1] + 1], ops)
                continue
            for number in its:
                if number:
                    builder.begin_block(graph.blocks[number].name)
                block = _Block(
                    graph, builder, number, division, ops, views=views, transient=transient, scalars=scalars
                )
                blocks.append(block.write())
        job = ShardedGraph(graph, builder, blocks, ops)
        job.bind()
        return job


def _divided_blocks(
    graph: Graph, division: Division, transient: Sequence[t.TensorRole], scalars: Collection[int]
) -> set[int]:
    """Blocks that hold something of which a rank has a part, or that differs between uses of it."""
    tensors = np.isin(graph.tensors.role, (t.TensorRole.OPTIMIZER_STATE, *transient))
    tensors[list(division.gradients)] = True
    ops = graph.ops.phase == SHARDED
    ops[list(scalars)] = True
    begins = np.array([block.tensors.start for block in graph.blocks])
    of_tensors = np.searchsorted(begins, np.flatnonzero(tensors), side="right") - 1
    return {*of_tensors.tolist(), *graph.block_of_op[ops].tolist()}


def _as_they_are(graph: Graph, builder: GraphBuilder, blocks: Sequence[Block], ops: NewRows) -> list[Written]:
    """Blocks that follow each other in which nothing is divided, copied."""
    tensor = builder.tensor_count() - blocks[0].tensors.start
    op = builder.op_count() - blocks[0].ops.start
    append_blocks(builder, graph, blocks)
    rows = np.arange(blocks[0].ops.start, blocks[-1].ops.stop)
    ops.starts[rows], ops.stops[rows] = rows + op, rows + op + 1
    return [unchanged(graph, block, tensor, op) for block in blocks]


class _Block(ShardedBlock):
    """Where gradients live whole (`zero=1`), stages exchange them whole, as Megatron-LM does."""

    def phase(self, row: int) -> t.Phase:
        """Whether an operation works on shards or on whole tensors."""
        whole = t.TensorRole.GRADIENT in self.views and row in _exchanges(self.graph)
        return WHOLE if whole else super().phase(row)


@kept
def _exchanges(graph: Graph) -> frozenset[int]:
    """Operations that are no kernels, or read what was received."""
    ops = graph.ops
    maker = graph.maker[ops.inputs.values]
    received = (maker != NONE) & (ops.kind[maker] == t.OpKind.RECV)
    others = np.flatnonzero(ops.kind != t.OpKind.COMPUTE)
    return frozenset((*ops.inputs.rows[received].tolist(), *others.tolist()))


def check_sizes(replicas: int, micro_batches: int, staged: bool) -> None:
    """Refuses numbers of ranks and micro-batches that no job has.

    Raises:
        PlanError: a number is out of range, or micro-batches are given for a pipeline, which has its own.
    """
    if not 1 <= micro_batches <= MAX_MICRO_BATCHES:
        raise PlanError(f"{micro_batches} micro-batches: choose between 1 and {MAX_MICRO_BATCHES:,}")
    if not 1 <= replicas <= MAX_REPLICAS:
        raise PlanError(f"{replicas} data-parallel replicas: choose between 1 and {MAX_REPLICAS:,}")
    if staged and micro_batches != 1:
        raise PlanError("the pipeline has its micro-batches already: give them to it alone")


def data_mesh(mesh: tuple[Axis, ...], added: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """A mesh with data axes: inside the stages, outside of what shares a replica, whose ranks are neighbours."""
    outer = tuple(axis for axis in mesh if axis.name == STAGES)
    return (*outer, *added, *(axis for axis in mesh if axis.name != STAGES))
