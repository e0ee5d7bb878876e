"""Blocks whose optimizer works on shards: what ZeRO and fully sharded data parallelism have in common.

A tensor of a block can stand for several: a parameter or a gradient is whole to the forward and backward passes
and a shard to the optimizer. Tensors are named by their old row and the phase that uses them; a port is bound by
both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from math import ceil, prod

from echograph.errors import PlanError
from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import Block, Graph
from echograph.ir.passes.data_parallel_axes import axes_group
from echograph.ir.passes.distributed_optimizer import PERSISTENT, Division
from echograph.ir.passes.rewrite import Call

WHOLE, SHARD = t.Phase.FORWARD, t.Phase.OPTIMIZER
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
        for variant in (phase, WHOLE, t.Phase.BACKWARD, SHARD):
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
        scalars: operations whose last output is a scalar of all gradients together (`gradient_norm`).
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
                self.use(row, SHARD)
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
        """Whether an operation works on shards (`SHARD`) or on whole tensors."""
        return SHARD if self.graph.ops.phase[row] == t.Phase.OPTIMIZER else WHOLE

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
        return SHARD if state else WHOLE

    def variant(self, row: int, phase: t.Phase) -> t.Phase:
        """Which of its tensors an old one is in a phase."""
        return SHARD if phase == SHARD and self.division.cut(row) else WHOLE

    def use(self, row: int, phase: t.Phase) -> int:
        """The tensor that an old one is in a phase; made when it is first used."""
        variant = self.variant(row, phase)
        if (row, variant) not in self.written.tensors:
            tensor = self.graph.tensors[row]
            made = (
                self._shard(tensor)
                if variant == SHARD and self.division.cut(row)
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
            alias = self.use(tensor.alias_of, SHARD)
        shape = self.division.shape(tensor)
        return self.add(tensor, SHARD, shape, alias, port=tensor.port and not view, role=role)

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
        over = self.division.axes(tensor) if variant == SHARD and role in PERSISTENT else ()
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
        share = self._share(op) if phase == SHARD else 1.0
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
            phase=op.phase, stream=stream, inputs=(self.use(index, SHARD),), deps=(made,),
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
