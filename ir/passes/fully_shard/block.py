"""One block of a fully sharded job: its units' operations on gathered parameters, with gathers and reductions.

A unit is a layer: an instance of a repeated block, or a layer that does not repeat exactly (the first of T5, whose
attention has a bias of positions) and so stands in the main block, where modules' paths say what belongs to it.
The rest of a main block is the *root*. That is `fully_shard` applied to each layer, and then to the model.

A parameter is its shard to the optimizer, the gathered parameter to the forward pass, and what is gathered again
to the backward pass; a gradient is whole to the backward pass and a shard to the optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder
from echograph.ir.columns import NONE
from echograph.ir.graph import Graph
from echograph.ir.passes.data_parallel.distributed_optimizer import SHARD, WHOLE, Division, ShardedBlock, Written
from echograph.ir.passes.gradients import REPLICATE, axes_group


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A unit of a block.

    Attributes:
        module: path of the layer in a main block; "" for a block that is a layer, and for the root.
        root: whether it is the root.
        parameters: rows of its parameters.
        gradients: rows of its final gradients.
    """

    module: str
    root: bool
    parameters: tuple[int, ...]
    gradients: tuple[int, ...]


def phase_of(phase: int) -> t.Phase:
    """Recomputation belongs to the backward pass, and what is not named to the forward pass."""
    named = {t.Phase.RECOMPUTE: t.Phase.BACKWARD, t.Phase.OTHER: t.Phase.FORWARD}
    return named.get(t.Phase(phase), t.Phase(phase))


class Units:
    """The units of every block of a graph.

    Args:
        graph: the step, or a pipeline's job, whose chunks each have a main block.
        gradients: rows of its final gradients.
    """

    def __init__(self, graph: Graph, gradients: list[int]) -> None:
        self.graph = graph
        layers = sorted({re.escape(b.name) for n, b in enumerate(graph.blocks) if self._is_layer(n)})
        self._module = re.compile(rf"(?:{'|'.join(layers)})\.\d+(?=\.|$)") if layers else None
        self.of_block = [self._units(number, gradients) for number in range(len(graph.blocks))]
        self._modules: dict[tuple[int, str], int] = {}

    def is_main(self, block: int) -> bool:
        """Whether a block is no layer, and runs forward."""
        rows = self.graph.blocks[block].ops
        forward = (self.graph.ops.phase[rows.start : rows.stop] == t.Phase.FORWARD).any()
        return bool(forward) and not self._is_layer(block)

    def of_op(self, block: int, row: int) -> int:
        """Number of the unit in its block that an operation belongs to."""
        if len(self.of_block[block]) == 1:
            return 0
        module = self.graph.strings[self.graph.ops.module[row]]
        if (block, module) not in self._modules:
            found = self._layer(module)
            modules = [unit.module for unit in self.of_block[block]]
            self._modules[block, module] = modules.index(found) if found in modules else 0
        return self._modules[block, module]

    def _is_layer(self, block: int) -> bool:
        return any(instance.label for instance in self.graph.blocks[block].instances)

    def _layer(self, path: str) -> str:
        found = self._module.match(path) if self._module else None
        return found.group() if found else ""

    def _units(self, number: int, gradients: list[int]) -> tuple[Unit, ...]:
        graph, block = self.graph, self.graph.blocks[number]
        parameters: dict[str, list[int]] = {"": []}
        reduced: dict[str, list[int]] = {}
        main = not self._is_layer(number)
        for row in block.tensors:
            if self._is_parameter(row):
                layer = self._layer(graph.strings[graph.tensors.name[row]]) if main else ""
                parameters.setdefault(layer, []).append(row)
        for row in gradients:
            if row in block.tensors:
                layer = self._layer(graph.strings[graph.tensors.name[row]]) if main else ""
                reduced.setdefault(layer if layer in parameters else "", []).append(row)
        return tuple(
            Unit(
                module=layer, root=main and not layer, parameters=tuple(rows),
                gradients=tuple(reduced.get(layer, ())),
            )
            for layer, rows in parameters.items()
        )  # fmt: skip

    def _is_parameter(self, row: int) -> bool:
        tensors = self.graph.tensors
        made = self.graph.maker[row] != NONE or tensors.alias_of[row] != NONE or tensors.port[row]
        return not made and bool(tensors.role[row] == t.TensorRole.PARAMETER)


GATHERED, REGATHERED, REDUCED = "gathered", "regathered", "reduced"
TOKEN_OF = {"gather": GATHERED, "regather": REGATHERED, "reduce": REDUCED}
"""What says that a unit has done something that others wait for."""
UnitAction = tuple[int, str]
"""Number of a unit in its block, and what is done: a name of `actions`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """FSDP's options.

    Attributes:
        reshard: drop a layer's parameters after forward and gather them again for backward.
        once: gather parameters once for all micro-batches.
        whole: whole gradients add up over micro-batches, and are reduced in the last one.
        adds: gradients add up here, over several micro-batches; else they do elsewhere, or there is one.
        reduce_dtype: type in which gradients are reduced; None: their own.
    """

    reshard: bool
    once: bool
    whole: bool
    adds: bool
    reduce_dtype: t.DType | None


def actions(unit: Unit, main: bool, how: How, division: Division) -> tuple[str, ...]:
    """What is done for a unit.

    "gather" issues the gathering of its parameters and "unshard" waits for it, "regather" and "reunshard" do so
    again for backward; "sum" adds whole gradients to those of the micro-batches before, "reduce" reduces them, and
    "add" adds the shards.

    Args:
        unit: the unit.
        main: whether its block is a main block.
        how: FSDP's options.
        division: how tensors are divided.
    """
    tensors = division.graph.tensors
    gathers = any(map(division.cut, unit.parameters))
    divided = [bool(division.axes(tensors[row])) for row in unit.gradients]
    reduces = any(divided) or (bool(divided) and bool(replicas(division)))
    asked = {
        "gather": gathers or (unit.root and main),
        "unshard": gathers,
        # The root stays gathered from its forward pass to the end of backward.
        "regather": gathers and how.reshard and not unit.root,
        "reunshard": gathers and how.reshard and not unit.root,
        "sum": how.adds and (how.whole or not all(divided)),
        "reduce": reduces,
        "add": how.adds and not how.whole and any(divided),
    }
    return tuple(name for name, needed in asked.items() if needed)


def replicas(division: Division) -> list[str]:
    """The axis of the copies of the sharded model, if there is one."""
    return [axis.name for axis in division.mesh if axis.name == REPLICATE and axis.size > 1]


class UnitBlock(ShardedBlock):
    """Writes a block with what is done for its units.

    Args:
        graph: the step, or a pipeline's job.
        builder: with the block open.
        number: of the block.
        division: how tensors are divided.
        ops: gets the new rows of each operation.
        units: of all blocks.
        how: FSDP's options.
        before: what is done before an operation, by its row; by None at the end of the block.
        scalars: operations whose last output is a scalar of all gradients together.

    Attributes:
        ranges: the rows of everything that is done.
        tokens: tensors that say that a unit's parameters are gathered or its gradients reduced.
    """

    def __init__(
        self,
        graph: Graph,
        builder: GraphBuilder,
        number: int,
        division: Division,
        ops: dict[int, range],
        *,
        units: Units,
        how: How,
        before: Mapping[int | None, Sequence[UnitAction]],
        scalars: Collection[int],
    ) -> None:
        super().__init__(graph, builder, number, division, ops, scalars=scalars)
        self.units, self.how, self.before = units.of_block[number], how, before
        self.ranges: dict[UnitAction, tuple[int, int]] = {}
        self.tokens: dict[tuple[int, str], int] = {}
        self.gathers: dict[tuple[int, str], list[int]] = {}
        again = {number for actions in before.values() for number, name in actions if name == "regather"}
        self.regathered = {row for unit in again for row in self._divided(self.units[unit])}

    def write(self) -> Written:
        """Writes all rows."""
        first_tensor, first_op = self.builder.tensor_count(), self.builder.op_count()
        for row in (*self.block.ops, None):
            for number, name in self.before.get(row, ()):
                begin = self.builder.op_count()
                self._act(number, name)
                self.ranges[number, name] = (begin, self.builder.op_count())
            if row is not None:
                self.op(row, self.phase(row))
        for index in self.block.tensors:
            if not any((index, phase) in self.written.tensors for phase in t.Phase):
                self.use(index, self.variant(index, SHARD))
        return self.finish(first_tensor, first_op)

    def _act(self, number: int, name: str) -> None:
        unit = self.units[number]
        match name:
            case "gather":
                self._gather(number, t.Phase.FORWARD, GATHERED)
            case "unshard":
                self._unshard(number, t.Phase.FORWARD, GATHERED)
            case "regather":
                self._gather(number, t.Phase.BACKWARD, REGATHERED)
            case "reunshard":
                self._unshard(number, t.Phase.BACKWARD, REGATHERED)
            case "reduce":
                self._reduce(number)
            case "sum":
                parts = self._by_axes(unit.gradients).items()
                self._add([x for axes, tensors in parts for x in tensors if self.how.whole or not axes], WHOLE, 0)
            case "add":
                for axes, tensors in self._by_axes(unit.gradients).items():
                    if axes:
                        self._add(tensors, SHARD, axes_group(self.builder, axes)[1])

    def _divided(self, unit: Unit) -> list[int]:
        return [row for row in unit.parameters if self.division.cut(row)]

    def _by_axes(self, rows: Collection[int]) -> dict[tuple[str, ...], list[t.Tensor]]:
        """Tensors by the axes over which they are divided; each set of ranks communicates its own."""
        found: dict[tuple[str, ...], list[t.Tensor]] = {}
        for tensor in (self.graph.tensors[row] for row in rows):
            found.setdefault(self.division.axes(tensor), []).append(tensor)
        return found

    # -- tensors -------------------------------------------------------------------------------------------

    def phase(self, row: int) -> t.Phase:
        """The phase of an operation."""
        return phase_of(int(self.graph.ops.phase[row]))

    def variant(self, row: int, phase: t.Phase) -> t.Phase:
        """Which of its tensors an old one is in a phase."""
        if phase == t.Phase.BACKWARD and int(self.graph.root[row]) in self.regathered:
            return phase
        return super().variant(row, phase)

    def whole_role(self, tensor: t.Tensor) -> t.TensorRole:
        """What is gathered lives in a micro-batch, or through the step; so do gradients that add up whole."""
        if not self.division.axes(tensor):
            return tensor.role
        role = self.division.role(tensor.id)
        if role == t.TensorRole.PARAMETER:
            return t.TensorRole.BUFFER if self.how.once else t.TensorRole.ACTIVATION
        return t.TensorRole.ACTIVATION if role == t.TensorRole.GRADIENT and not self.how.whole else role

    def dtype(self, tensor: t.Tensor, variant: t.Phase) -> t.DType:
        """Reduced gradients have the type in which they are reduced."""
        gradient = variant == SHARD and self.division.role(tensor.id) == t.TensorRole.GRADIENT
        reduced = gradient and not self.division.of_optimizer(tensor.id)
        return (self.how.reduce_dtype if reduced else None) or tensor.dtype

    def _token(self, what: str, *, port: bool = False) -> int:
        lasting = self.how.once and what == GATHERED
        role = t.TensorRole.BUFFER if lasting else t.TensorRole.ACTIVATION
        return self.builder.tensor(what, (1,), t.DType.BOOL, role, port=port)

    def _wait_for(self, number: int, unit: Unit, what: str) -> tuple[int, ...]:
        """A port for the token that the unit before leaves; the root waits for none."""
        if unit.root:
            return ()
        port = self._token(what, port=True)
        self.written.ports.append((port, (what, number)))
        return (port,)

    # -- communication -------------------------------------------------------------------------------------

    def _gather(self, number: int, phase: t.Phase, what: str) -> None:
        unit = self.units[number]
        parts = self._by_axes(self._divided(unit))
        if not parts:
            self.tokens[number, what] = self._token(what)
            self.builder.compute("fsdp.begin", phase=phase, outputs=(self.tokens[number, what],))
            return
        wait = self._wait_for(number, unit, what)
        self.gathers[number, what] = [self._gather_part(axes, x, phase, wait) for axes, x in parts.items()]

    def _unshard(self, number: int, phase: t.Phase, what: str) -> None:
        gathers, parts = self.gathers[number, what], self._by_axes(self._divided(self.units[number])).values()
        self.tokens[number, what] = self._token(what)
        for gather, tensors in zip(gathers, parts, strict=True):
            whole = [self.use(tensor.id, phase) for tensor in tensors]
            done = (self.tokens[number, what],) if gather == gathers[-1] else ()
            self.builder.compute(
                "fsdp.split_with_sizes_copy", phase=phase, deps=(gather,), outputs=(*whole, *done),
                bytes_read=self._nbytes(tensors), bytes_written=sum(x.nbytes for x in tensors),
            )  # fmt: skip

    def _gather_part(
        self, axes: tuple[str, ...], tensors: list[t.Tensor], phase: t.Phase, wait: tuple[int, ...]
    ) -> int:
        group, stream = axes_group(self.builder, axes)
        total, ranks = self._nbytes(tensors), self.division.ranks(axes)
        copy_in = self.builder.compute(
            "fsdp.all_gather_copy_in", phase=phase, stream=stream, bytes_read=total // ranks,
            inputs=(*(self.use(x.id, SHARD) for x in tensors), *wait), bytes_written=total // ranks,
        )  # fmt: skip
        return self.builder.collective(
            "fsdp.all_gather", t.CollectiveKind.ALL_GATHER, group=group, bytes_per_rank=total,
            dtype=tensors[0].dtype, payload=t.Payload.PARAMETER, asynchronous=True, phase=phase, stream=stream,
            deps=(copy_in,),
        )  # fmt: skip

    def _nbytes(self, tensors: list[t.Tensor], dtype: t.DType | None = None) -> int:
        return sum(self.division.padded(x) * (dtype or x.dtype).itemsize for x in tensors)

    def _reduce(self, number: int) -> None:
        unit, builder = self.units[number], self.builder
        parts = {a: x for a, x in self._by_axes(unit.gradients).items() if a or replicas(self.division)}
        if wait := self._wait_for(number, unit, REDUCED):
            builder.compute("fsdp.wait", phase=t.Phase.BACKWARD, inputs=wait)
        self.tokens[number, REDUCED] = self._token(REDUCED)
        ends: list[int] = []
        for axes, tensors in parts.items():
            done = () if len(ends) + 1 < len(parts) else (self.tokens[number, REDUCED],)
            ends.append(self._reduce_part(axes, tensors, done))
        if unit.root:
            builder.compute("fsdp.wait", phase=t.Phase.BACKWARD, deps=ends)

    def _reduce_part(self, axes: tuple[str, ...], tensors: list[t.Tensor], done: tuple[int, ...]) -> int:
        """Reduces and scatters gradients, then adds up the shards of the copies; returns the last operation."""
        builder, dtype, copies = self.builder, self.how.reduce_dtype or tensors[0].dtype, replicas(self.division)
        total = self._nbytes(tensors, self.how.reduce_dtype)
        made = (*(self.use(x.id, SHARD) for x in tensors if axes), *done)
        whole = [self.use(x.id, t.Phase.BACKWARD) for x in tensors]
        last: tuple[int, ...] = ()
        if axes:
            group, stream = axes_group(builder, axes)
            cat = builder.compute(
                "fsdp.chunk_cat", phase=t.Phase.BACKWARD, stream=stream, inputs=whole,
                bytes_read=sum(x.nbytes for x in tensors), bytes_written=total,
            )  # fmt: skip
            reduce = builder.collective(
                "fsdp.reduce_scatter", t.CollectiveKind.REDUCE_SCATTER, group=group, bytes_per_rank=total,
                dtype=dtype, payload=t.Payload.GRADIENT, asynchronous=True, phase=t.Phase.BACKWARD, stream=stream,
                deps=(cat,), outputs=() if copies else made,
            )  # fmt: skip
            if not copies:
                return reduce
            last = (reduce,)
        group, stream = axes_group(builder, copies)
        return builder.collective(
            "hsdp.all_reduce", t.CollectiveKind.ALL_REDUCE, group=group, dtype=dtype, outputs=made, deps=last,
            inputs=() if axes else whole, bytes_per_rank=total // self.division.ranks(axes),
            payload=t.Payload.GRADIENT, asynchronous=True, phase=t.Phase.BACKWARD, stream=stream,
        )  # fmt: skip

    def _add(self, tensors: list[t.Tensor], phase: t.Phase, stream: int) -> int:
        """Adds gradients, whole or shards, to those of the micro-batches before."""
        nbytes = self._nbytes(tensors, self.how.reduce_dtype) if phase == SHARD else sum(x.nbytes for x in tensors)
        if phase == SHARD:
            nbytes //= self.division.ranks(self.division.axes(tensors[0]))
        return self.builder.compute(
            "aten.add_", phase=t.Phase.BACKWARD, stream=stream, inputs=[self.use(x.id, phase) for x in tensors],
            bytes_read=2 * nbytes, bytes_written=nbytes,
        )  # fmt: skip
