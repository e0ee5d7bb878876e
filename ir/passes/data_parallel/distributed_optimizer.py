"""How what lives through a step is divided over data-parallel ranks, and blocks whose optimizer works on shards.

Every data-parallel rank would do the same update; instead each updates its part of the parameters, and keeps that
part of the optimizer's state alone (Rajbhandari et al., "ZeRO", SC 2020, stage 1; Megatron-LM's distributed
optimizer). Which tensors are parts follows from the data axes of the mesh and from what divides them already.

In such a block a tensor can stand for several: a parameter or a gradient is whole to the forward and backward
passes and a shard to the optimizer. Tensors are named by their old row and the phase that uses them; a port is
bound by both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from math import ceil, prod

import numpy as np

from echograph.errors import PlanError
from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder
from echograph.ir.columns import NONE
from echograph.ir.graph import Axis, Block, Graph
from echograph.ir.passes.gradients import axes_group, reduction_axes
from echograph.ir.passes.rewrite import Call

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
    """

    graph: Graph
    mesh: tuple[Axis, ...]
    gradients: frozenset[int]
    copies: tuple[str, ...] = ()
    flat: bool = False
    none: bool = False
    _origin: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    _cut: dict[int, bool] = field(default_factory=dict, init=False, repr=False)

    def axes(self, tensor: t.Tensor) -> tuple[str, ...]:
        """The axes over which a tensor becomes divided; a scalar is not."""
        if self.none or not tensor.shape:
            return ()
        return tuple(a for a in reduction_axes(self.mesh, tensor.sharded) if a not in self.copies)

    @property
    def all_axes(self) -> tuple[str, ...]:
        """Every axis over which some tensor is, or was already, divided."""
        return () if self.none else tuple(a for a in reduction_axes(self.mesh, ()) if a not in self.copies)

    def ranks(self, axes: Iterable[str]) -> int:
        """Positions along some axes together."""
        sizes = {axis.name: axis.size for axis in self.mesh}
        return prod(sizes[name] for name in axes)

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
            number = int(np.searchsorted([b.tensors.stop for b in self.graph.blocks], row, side="right"))
            bound = bool(self.graph.blocks[number].instances)
            self._origin[row] = self.graph.value(number, 0, row)[2] if bound else row
        return self._origin[row]

    def role(self, row: int) -> t.TensorRole:
        """The role of a tensor; a final gradient is one, also where a capture took it for an activation's."""
        return t.TensorRole.GRADIENT if row in self.gradients else t.TensorRole(int(self.graph.tensors.role[row]))

    def of_optimizer(self, row: int) -> bool:
        """Whether an operation of the optimizer makes a tensor's value."""
        maker = int(self.graph.maker[self.origin(row)])
        return maker != NONE and bool(self.graph.ops.phase[maker] == t.Phase.OPTIMIZER)

    def cut(self, row: int) -> bool:
        """Whether the optimizer's tensor is a shard; what it makes is, where it is as large as what it reads."""
        if row not in self._cut:
            tensor = self.graph.tensors[row]
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
        return any(self.graph.tensors[i].shape == tensor.shape and self.cut(i) for i in op.inputs)


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
    """

    tensors: dict[tuple[int, t.Phase], int] = field(default_factory=dict)
    ports: list[tuple[int, Meaning]] = field(default_factory=list)
    tensor_rows: range = range(0)
    op_rows: range = range(0)

    def tensor(self, old: int, phase: t.Phase) -> int:
        """The tensor that another block's port means."""
        for variant in (phase, WHOLE, t.Phase.BACKWARD, SHARDED):
            if (old, variant) in self.tensors:
                return self.tensors[old, variant]
        raise PlanError(f"tensor {old} is read by another block, but this one does not hold it")


def unchanged(graph: Graph, block: Block) -> Written:
    """A block that stands in the new graph where and as it stood in the old one."""
    return Written(
        tensors={(row, WHOLE): row for row in block.tensors},
        ports=[(row, (row, WHOLE)) for row in block.tensors if graph.tensors.port[row]],
        tensor_rows=block.tensors,
        op_rows=block.ops,
    )


class ShardedBlock:
    """Writes a block with its optimizer on shards, in the order of the table.

    Args:
        graph: the step, or a pipeline's job.
        builder: with the block open.
        number: of the block.
        division: how tensors are divided.
        ops: gets the new rows of each operation: its own, and where the next one's begin.
        views: roles of which the shard is a part of the whole tensor's memory.
        transient: roles of which the whole tensor lives in one micro-batch only.
        scalars: operations whose last output is a scalar of all gradients together (`gradients.total_norms`).
    """

    def __init__(
        self,
        graph: Graph,
        builder: GraphBuilder,
        number: int,
        division: Division,
        ops: dict[int, range],
        *,
        views: tuple[t.TensorRole, ...] = (),
        transient: tuple[t.TensorRole, ...] = (),
        scalars: Collection[int] = (),
    ) -> None:
        self.graph, self.builder, self.number, self.division, self.ops = graph, builder, number, division, ops
        self.views, self.transient, self.scalars = views, transient, scalars
        self.block, self.written = graph.blocks[number], Written()

    def write(self) -> Written:
        """Writes all rows."""
        first_tensor, first_op = self.builder.tensor_count(), self.builder.op_count()
        uses = self._uses()
        for row in self.block.tensors:
            for phase in uses.get(row) or (self._unused(row),):
                self.use(row, phase)
            if row in self.division.gradients:
                self.use(row, SHARDED)
        for row in self.block.ops:
            self.op(row, self.phase(row))
        return self.finish(first_tensor, first_op)

    def finish(self, first_tensor: int, first_op: int) -> Written:
        """The block, once all its rows are written."""
        self.written.tensor_rows = range(first_tensor, self.builder.tensor_count())
        self.written.op_rows = range(first_op, self.builder.op_count())
        self.written.ports.sort()
        return self.written

    # -- tensors -------------------------------------------------------------------------------------------

    def phase(self, row: int) -> t.Phase:
        """Whether an operation works on shards (`SHARDED`) or on whole tensors."""
        return SHARDED if self.graph.ops.phase[row] == t.Phase.OPTIMIZER else WHOLE

    def _uses(self) -> dict[int, list[t.Phase]]:
        uses: dict[int, list[t.Phase]] = {}
        inputs, outputs = self.graph.ops.inputs, self.graph.ops.outputs
        for row in self.block.ops:
            phase = self.phase(row)
            for index in (*inputs.row(row), *outputs.row(row)):
                found = uses.setdefault(index, [])
                if (variant := self.variant(index, phase)) not in found:
                    found.append(variant)
        return uses

    def _unused(self, row: int) -> t.Phase:
        state = self.graph.tensors.role[row] == t.TensorRole.OPTIMIZER_STATE
        return SHARDED if state else WHOLE

    def variant(self, row: int, phase: t.Phase) -> t.Phase:
        """Which of its tensors an old one is in a phase."""
        return SHARDED if phase == SHARDED and self.division.cut(row) else WHOLE

    def use(self, row: int, phase: t.Phase) -> int:
        """The tensor that an old one is in a phase; made when it is first used."""
        variant = self.variant(row, phase)
        if (row, variant) not in self.written.tensors:
            tensor = self.graph.tensors[row]
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

    def op(self, row: int, phase: t.Phase) -> None:
        """Writes an operation; the optimizer's with the share of the work that a rank has left."""
        op = self.graph.ops[row]
        changes: dict[str, object] = {
            "inputs": [self.use(i, phase) for i in op.inputs],
            "outputs": [self.use(i, phase) for i in op.outputs],
            "deps": [self.ops[i].start for i in op.deps],
        }
        if isinstance(op, t.Compute) and op.forward_op is not None and op.forward_op >= 0:
            changes["forward_op"] = self.ops[op.forward_op].start
        share = self._share(op) if phase == SHARDED else 1.0
        if share != 1.0:
            names = ("flops", "bytes_read", "bytes_written", "bytes_per_rank", "nbytes")
            changes |= {n: ceil(getattr(op, n) * share) for n in names if hasattr(op, n)}
            changes["durations"] = ()
        made = self.builder.add(op, **changes)
        if row in self.scalars:
            self._complete(op, made)
        self.ops[row] = range(made, self.builder.op_count())

    def _complete(self, op: t.Op, made: int) -> None:
        """All-reduces a scalar of all gradients: each rank has that of its shards."""
        builder, index = self.builder, op.outputs[-1]
        axes = self.division.all_axes
        group, stream = axes_group(builder, axes)
        tensor = self.graph.tensors[index]
        reduce = builder.collective(
            f"{'+'.join(axes)}.all_reduce_scalar", t.CollectiveKind.ALL_REDUCE, group=group,
            bytes_per_rank=tensor.nbytes, dtype=tensor.dtype, payload=t.Payload.OTHER, asynchronous=True,
            phase=op.phase, stream=stream, inputs=(self.use(index, SHARDED),), deps=(made,),
        )  # fmt: skip
        builder.compute(f"{'+'.join(axes)}.wait", phase=op.phase, deps=(reduce,))

    def _share(self, op: t.Op) -> float:
        """How much of an optimizer operation's work a rank has left: its tensors' elements, new over old."""
        old = new = 0
        for row in (*op.inputs, *op.outputs):
            tensor = self.graph.tensors[row]
            old += tensor.numel
            new += prod(self.division.shape(tensor)) if self.division.cut(row) else tensor.numel
        return new / old if old else 1.0


class ShardedGraph:
    """The blocks of a graph, written with `ShardedBlock`, and what their rows and ids became."""

    def __init__(self, graph: Graph, builder: GraphBuilder, blocks: list[Written], ops: dict[int, range]) -> None:
        self.graph, self.builder, self.blocks, self.ops = graph, builder, blocks, ops
        self._own = []
        self._firsts, start = [], 0
        self._op_firsts, op_start = [], 0
        for made, block in zip(blocks, graph.blocks, strict=True):
            ports = {row for row, _ in made.ports}
            mine = [row for row in made.tensor_rows if row not in ports]
            self._own.append({row: position for position, row in enumerate(mine)})
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
        return self.new_id((block, instance, self.blocks[block].tensor(row, phase)))

    def call(self, call: Call) -> Call:
        """A call of old rows, of new ones."""
        block, begin, end, instance, micro_batch = call
        return block, self.ops[begin].start, self.ops[end - 1].stop, instance, micro_batch

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
        return self._op_firsts[block] + instance * len(rows) + self.ops[row].start - rows.start
