"""One block of a fully sharded job: its operations on gathered parameters, and the gathers and reductions around.

A tensor of the block can stand for several: a parameter is its shard to the optimizer, the gathered parameter to
the forward pass, and what is gathered again to the backward pass; a gradient is whole to the backward pass and a
shard to the optimizer. So tensors are named by their old row and the phase that uses them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, prod

from echograph.errors import PlanError
from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder
from echograph.ir.columns import NONE
from echograph.ir.graph import StepGraph
from echograph.ir.passes.data_parallel import final_gradients

GATHERED, REGATHERED, REDUCED = "gathered", "regathered", "reduced"
_SHARDED = (t.TensorRole.PARAMETER, t.TensorRole.GRADIENT, t.TensorRole.OPTIMIZER_STATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """How blocks are sharded: group sizes, where to communicate, and FSDP's options."""

    ranks: int
    axis: str
    copies: int
    group: int
    replicate_group: int
    stream: int
    replicate_stream: int
    reshard: bool
    reduce_dtype: t.DType | None


@dataclass(slots=True, kw_only=True)
class Unit:
    """What a block became.

    Attributes:
        ranges: operations of "gather", "unshard", "regather", "reunshard" and "reduce", where it has them.
        tokens: tensors that say that its parameters are gathered or its gradients reduced.
        ports: for each port in table order, the tensor and what it means: (old row, phase), or a token's name.
        tensors: new row of each (old row, phase).
        tensor_range: its rows of the tensor table.
        op_range: its rows of the operation table.
    """

    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    ports: list[tuple[int, tuple[int, t.Phase] | str]] = field(default_factory=list)
    tensors: dict[tuple[int, t.Phase], int] = field(default_factory=dict)
    tensor_range: tuple[int, int] = (0, 0)
    op_range: tuple[int, int] = (0, 0)

    def tensor(self, old: int, phase: t.Phase) -> int:
        """The tensor that another block's port means."""
        for variant in (phase, t.Phase.FORWARD, t.Phase.BACKWARD, t.Phase.OPTIMIZER):
            if (old, variant) in self.tensors:
                return self.tensors[old, variant]
        raise PlanError(f"tensor {old} is read by another block, but this one does not hold it")


def phase_of(phase: int) -> t.Phase:
    """Recomputation belongs to the backward pass, and what is not named to the forward pass."""
    named = {t.Phase.RECOMPUTE: t.Phase.BACKWARD, t.Phase.OTHER: t.Phase.FORWARD}
    return named.get(t.Phase(phase), t.Phase(phase))


def padded(shape: tuple[int, ...], ranks: int) -> int:
    """Elements of a tensor whose first dimension is filled up to a multiple of the ranks."""
    return ceil((shape[0] if shape else 1) / ranks) * ranks * prod(shape[1:])


def shard_shape(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """The largest shard of a tensor cut along its first dimension; a scalar is not cut."""
    return (ceil(shape[0] / ranks), *shape[1:]) if shape else shape


def write_block(graph: StepGraph, builder: GraphBuilder, number: int, how: Shard, ops: dict[int, int]) -> Unit:
    """Writes a block into the builder; `ops` gets the new row of each of its operations.

    Raises:
        PlanError: the block's phases do not follow each other.
    """
    return _Writer(graph, builder, number, how, ops).write()


class _Writer:
    def __init__(
        self, graph: StepGraph, builder: GraphBuilder, number: int, how: Shard, ops: dict[int, int]
    ) -> None:
        self.graph, self.builder, self.number, self.how, self.ops = graph, builder, number, how, ops
        self.block, self.unit = graph.blocks[number], Unit()
        self.phases = [phase_of(int(graph.ops.phase[op])) for op in self.block.ops]
        if self.phases != sorted(self.phases):
            raise PlanError(f"block {self.block.name} mixes forward, backward and optimizer operations")
        rows = range(self.block.tensors.start, self.block.tensors.stop)
        self.parameters = [row for row in rows if self._is_parameter(row)]
        self.gradients = [row for row in final_gradients(graph) if row in rows]
        self.parameter_shapes = {graph.tensors[row].shape for row in self.parameters if graph.tensors[row].shape}
        # The root stays gathered from its forward pass to the end of backward.
        self.regathers = how.reshard and number > 0 and bool(self.parameters)

    def _is_parameter(self, row: int) -> bool:
        tensors = self.graph.tensors
        made = self.graph.maker[row] != NONE or tensors.alias_of[row] != NONE or tensors.port[row]
        return not made and tensors.role[row] == t.TensorRole.PARAMETER

    def write(self) -> Unit:
        unit, builder = self.unit, self.builder
        first_tensor, first_op = builder.tensor_count(), builder.op_count()
        if self.number == 0 and not self.parameters:
            unit.tokens[GATHERED] = self._token(GATHERED)
            begin = builder.compute("fsdp.begin", phase=t.Phase.FORWARD, outputs=(unit.tokens[GATHERED],))
            unit.ranges["gather"] = (begin, begin + 1)
        elif self.parameters:
            self._gather(t.Phase.FORWARD, GATHERED, ("gather", "unshard"))
        for phase in (t.Phase.FORWARD, t.Phase.BACKWARD, t.Phase.OPTIMIZER):
            if phase == t.Phase.BACKWARD and self.regathers:
                self._gather(t.Phase.BACKWARD, REGATHERED, ("regather", "reunshard"))
            for op, its in zip(self.block.ops, self.phases, strict=True):
                if its == phase:
                    self._op(op, phase)
            if phase == t.Phase.BACKWARD and self.gradients:
                self._reduce()
        for row in self.block.tensors:
            role = self.graph.tensors.role[row]
            if not any((row, phase) in unit.tensors for phase in t.Phase):
                self._use(row, t.Phase.OPTIMIZER if role in _SHARDED else t.Phase.FORWARD)
        unit.tensor_range = (first_tensor, builder.tensor_count())
        unit.op_range = (first_op, builder.op_count())
        return unit

    # -- tensors -------------------------------------------------------------------------------------------

    def _variant(self, row: int, phase: t.Phase) -> t.Phase:
        role = t.TensorRole(int(self.graph.tensors.role[row]))
        made = int(self.graph.maker[row])
        if phase == t.Phase.OPTIMIZER:
            updated = made != NONE and self.graph.ops.phase[made] == t.Phase.OPTIMIZER
            return phase if role in _SHARDED or updated else t.Phase.FORWARD
        if phase == t.Phase.BACKWARD and self.regathers and int(self.graph.root[row]) in self.parameters:
            return phase
        return t.Phase.FORWARD

    def _use(self, row: int, phase: t.Phase) -> int:
        """The tensor that an old one is in a phase; made when it is first used."""
        variant = self._variant(row, phase)
        if (row, variant) not in self.unit.tensors:
            tensor = self.graph.tensors[row]
            alias = None if tensor.alias_of is None else self._use(tensor.alias_of, variant)
            self.unit.tensors[row, variant] = self._tensor(tensor, variant, alias)
            if tensor.port:
                self.unit.ports.append((self.unit.tensors[row, variant], (row, variant)))
        return self.unit.tensors[row, variant]

    def _tensor(self, tensor: t.Tensor, variant: t.Phase, alias: int | None) -> int:
        shape, dtype, role, sharded = tensor.shape, tensor.dtype, tensor.role, tensor.sharded
        if variant == t.Phase.OPTIMIZER:
            if role in _SHARDED or shape in self.parameter_shapes:
                shape, sharded = shard_shape(shape, self.how.ranks), (*sharded, self.how.axis)
            if role == t.TensorRole.GRADIENT and self._is_reduced(tensor.id):
                dtype = self.how.reduce_dtype or dtype
        elif role in (t.TensorRole.PARAMETER, t.TensorRole.GRADIENT):
            role = t.TensorRole.ACTIVATION
        return self.builder.tensor(
            tensor.name, shape, dtype, role, alias_of=alias, port=tensor.port, sharded=sharded
        )

    def _is_reduced(self, row: int) -> bool:
        """Whether a gradient is what backward makes, not a copy that the optimizer makes."""
        maker = self.graph.source(self.number, 0, row)
        return maker is not None and self.graph.ops.phase[maker[2]] != t.Phase.OPTIMIZER

    def _token(self, name: str, *, port: bool = False) -> int:
        return self.builder.tensor(name, (1,), t.DType.BOOL, t.TensorRole.ACTIVATION, port=port)

    def _wait_for(self, what: str) -> tuple[int, ...]:
        """A port for the token that the unit before leaves; the root waits for none."""
        if self.number == 0:
            return ()
        port = self._token(what, port=True)
        self.unit.ports.append((port, what))
        return (port,)

    # -- operations ----------------------------------------------------------------------------------------

    def _op(self, row: int, phase: t.Phase) -> None:
        op = self.graph.ops[row]
        changes: dict[str, object] = {
            "inputs": [self._use(i, phase) for i in op.inputs],
            "outputs": [self._use(i, phase) for i in op.outputs],
            "deps": [self.ops[i] for i in op.deps],
        }
        forward = getattr(op, "forward_op", None)
        if forward is not None and forward >= 0:
            changes["forward_op"] = self.ops[forward]
        if isinstance(op, t.Compute) and phase == t.Phase.OPTIMIZER:
            share = self._share(op)
            changes |= {k: ceil(getattr(op, k) * share) for k in ("flops", "bytes_read", "bytes_written")}
        self.ops[row] = self.builder.add(op, **changes)

    def _share(self, op: t.Compute) -> float:
        """How much of an optimizer operation's work a rank has left: its tensors' elements, new over old."""
        old = new = 0
        for row in (*op.inputs, *op.outputs):
            tensor = self.graph.tensors[row]
            cut = tensor.role in _SHARDED or tensor.shape in self.parameter_shapes
            old += tensor.numel
            new += prod(shard_shape(tensor.shape, self.how.ranks)) if cut else tensor.numel
        return new / old if old else 1.0

    def _gather(self, phase: t.Phase, token: str, names: tuple[str, str]) -> None:
        how, builder, tensors = self.how, self.builder, [self.graph.tensors[row] for row in self.parameters]
        shards = [self._use(row, t.Phase.OPTIMIZER) for row in self.parameters]
        total = sum(padded(x.shape, how.ranks) * x.dtype.itemsize for x in tensors)
        copy_in = builder.compute(
            "fsdp.all_gather_copy_in", phase=phase, stream=how.stream, inputs=(*shards, *self._wait_for(token)),
            bytes_read=total // how.ranks, bytes_written=total // how.ranks,
        )  # fmt: skip
        gather = builder.collective(
            "fsdp.all_gather", t.CollectiveKind.ALL_GATHER, group=how.group, bytes_per_rank=total,
            dtype=tensors[0].dtype, payload=t.Payload.PARAMETER, asynchronous=True, phase=phase, stream=how.stream,
            deps=(copy_in,),
        )  # fmt: skip
        self.unit.ranges[names[0]] = (copy_in, gather + 1)
        whole = [self._use(row, phase) for row in self.parameters]
        self.unit.tokens[token] = self._token(token)
        copy_out = builder.compute(
            "fsdp.split_with_sizes_copy", phase=phase, outputs=(*whole, self.unit.tokens[token]), deps=(gather,),
            bytes_read=total, bytes_written=sum(x.nbytes for x in tensors),
        )  # fmt: skip
        self.unit.ranges[names[1]] = (copy_out, copy_out + 1)

    def _reduce(self) -> None:
        how, builder, tensors = self.how, self.builder, [self.graph.tensors[row] for row in self.gradients]
        dtype = how.reduce_dtype or tensors[0].dtype
        total = sum(padded(x.shape, how.ranks) * (how.reduce_dtype or x.dtype).itemsize for x in tensors)
        whole = [self._use(row, t.Phase.BACKWARD) for row in self.gradients]
        first = builder.op_count()
        if wait := self._wait_for(REDUCED):
            builder.compute("fsdp.wait", phase=t.Phase.BACKWARD, inputs=wait)
        cat = builder.compute(
            "fsdp.chunk_cat", phase=t.Phase.BACKWARD, stream=how.stream, inputs=whole,
            bytes_read=sum(x.nbytes for x in tensors), bytes_written=total,
        )  # fmt: skip
        self.unit.tokens[REDUCED] = self._token(REDUCED)
        made = (*(self._use(row, t.Phase.OPTIMIZER) for row in self.gradients), self.unit.tokens[REDUCED])
        last = builder.collective(
            "fsdp.reduce_scatter", t.CollectiveKind.REDUCE_SCATTER, group=how.group, bytes_per_rank=total,
            dtype=dtype, payload=t.Payload.GRADIENT, asynchronous=True, phase=t.Phase.BACKWARD, stream=how.stream,
            deps=(cat,), outputs=made if how.copies == 1 else (),
        )  # fmt: skip
        if how.copies > 1:
            last = builder.collective(
                "hsdp.all_reduce", t.CollectiveKind.ALL_REDUCE, group=how.replicate_group,
                bytes_per_rank=total // how.ranks, dtype=dtype, payload=t.Payload.GRADIENT, asynchronous=True,
                phase=t.Phase.BACKWARD, stream=how.replicate_stream, deps=(last,), outputs=made,
            )  # fmt: skip
        if self.number == 0:
            last = builder.compute("fsdp.wait", phase=t.Phase.BACKWARD, deps=(last,))
        self.unit.ranges["reduce"] = (first, last + 1)
