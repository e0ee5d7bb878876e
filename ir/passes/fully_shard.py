"""Fully sharded data parallelism (ZeRO-3) as PyTorch's FSDP2 does it.

Parameters, gradients and optimizer state are cut along their first dimension over the ranks. A unit (`Units`) is
what is gathered and reduced at once: each layer, and the rest of the model (the root). Its parameters are
all-gathered before its forward pass and, unless it is the root, dropped after it and gathered again before its
backward pass; its gradients are copied into one buffer after it, on the stream of its kernels, and
reduce-scattered. Gathers run ahead by one unit, so they overlap the computation before; one reduction is in flight
at a time. The optimizer works on the shards. With replicas of the sharding group (HSDP), the gradients' shards are
then all-reduced among them. (Zhao et al., "PyTorch FSDP", VLDB 2023; the order of operations and their streams are
those of torch.distributed.fsdp.fully_shard.)

Context- and expert-parallel ranks share the shards, too, but for what is divided over them already (torchtitan's
`dp_shard_cp` and `dp_shard_mod_ep` meshes), and each set of ranks communicates its own.

Under a pipeline each chunk is a root with its layers. As torch's pipelines do, whole gradients then add up over
the micro-batches, and are reduced after the last backward pass of the chunk. torchtitan keeps parameters gathered
there by default, from the first micro-batch to the last: `reshard_after_forward=False`. Else every micro-batch
gathers twice; FSDP2 would keep what backward has gathered for the forward pass of another micro-batch where one
follows, so that is an upper bound.

A unit is a layer: an instance of a repeated block, or a layer that does not repeat exactly (the first of T5,
whose attention has a bias of positions) and so stands in the main block, where modules' paths say what belongs to
it. The rest of a main block is the *root*. That is `fully_shard` applied to each layer, and then to the model.

A parameter is its shard to the optimizer, the gathered parameter to the forward pass, and what is gathered again
to the backward pass; a gradient is whole to the backward pass and a shard to the optimizer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from echograph.errors import PlanError
from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder
from echograph.ir.columns import NONE
from echograph.ir.graph import Axis, Graph, JobGraph, Program, StepGraph
from echograph.ir.passes.data_parallel import (
    SHARDED,
    WHOLE,
    Address,
    Division,
    NewRows,
    ReplicasAlike,
    ShardedBlock,
    ShardedGraph,
    Written,
    check_sizes,
    data_mesh,
)
from echograph.ir.passes.model import (
    REPLICATE,
    SHARD,
    axes_group,
    final_gradients,
    overflow_flags,
    split_at_optimizer,
    total_norms,
)
from echograph.ir.passes.rewrite import ACCUMULATE, UPDATE, Call, PassLabel, empty_copy, in_micro_batch
from echograph.ir.structure import Amount, Resizable, Shards, Sized, at_rest

UnitInstance = tuple[int, int, int]
"""A unit where it runs: block, instance, and number of the unit in the block."""
Piece = tuple[t.Phase, UnitInstance, Call]
"""A part of a call, of one phase and one unit."""
Done = tuple[UnitInstance, str, int]
"""Something done for a unit in a micro-batch: a name of `block.actions`."""


@dataclass(slots=True, kw_only=True)
class _Part:
    """A model part: a root, and the units that run inside it, in the order in which they do."""

    root: UnitInstance
    forward: list[UnitInstance] = field(default_factory=list)
    backward: list[UnitInstance] = field(default_factory=list)


class UnitSchedule:
    """What one program runs, in order.

    Args:
        graph: the step, or a pipeline's job.
        units: of its blocks.
        names: what is done for each unit of each block.
        how: FSDP's options.
        calls: of the program, in old rows, of all micro-batches.
        labels: what each of them is of.
        staged: whether they are a stage's. Where gradients add up whole, its units are then reduced after the last
            backward pass of their part, as torch's pipelines do (`torch.distributed.pipelining`), not within it.
    """

    def __init__(
        self,
        graph: Graph,
        units: Units,
        names: Sequence[Sequence[Collection[str]]],
        how: How,
        calls: Sequence[Call],
        labels: Sequence[PassLabel],
        staged: bool,
    ) -> None:
        self.graph, self.units, self.names, self.how, self.staged = graph, units, names, how, staged
        self._cuts: dict[tuple[int, int, int], list[tuple[t.Phase, int, int, int]]] = {}
        cut = [(piece, label) for call, label in zip(calls, labels, strict=True) for piece in self._cut(call)]
        self.pieces = [piece for piece, _ in cut]
        self.part_of: dict[UnitInstance, _Part] = {}
        self._find_parts()
        self.last = max((call[4] for call in calls), default=0)
        self.first = min((call[4] for call in calls), default=0)
        self._at = 0
        self.items: list[Call | Done] = []
        self.labels: list[PassLabel] = []
        for item in self._items():
            self.items.append(item)
            self.labels.append(cut[self._at][1])

    def _cut(self, call: Call) -> Iterator[Piece]:
        """A call cut where the phase or the unit changes; its operations as rows of the old table."""
        block, begin, end, instance, micro_batch = call
        if (block, begin, end) not in self._cuts:
            runs: list[tuple[t.Phase, int, int, int]] = []
            for op in range(begin, end):
                phase, unit = phase_of(self.graph.ops.phases[op]), self.units.of_op(block, op)
                start = runs.pop()[2] if runs and runs[-1][:2] == (phase, unit) else op
                runs.append((phase, unit, start, op + 1))
            self._cuts[block, begin, end] = runs
        for phase, unit, start, stop in self._cuts[block, begin, end]:
            yield phase, (block, instance, unit), (block, start, stop, instance, micro_batch)

    def _find_parts(self) -> None:
        """Units belong to the root that ran last before their first forward pass."""
        of_root: dict[UnitInstance, _Part] = {}
        part: _Part | None = None
        for phase, place, _ in self.pieces:
            if phase == t.Phase.FORWARD:
                if self.units.is_main(place[0]):
                    root = (place[0], place[1], 0)
                    if root not in of_root:
                        of_root[root] = self.part_of[root] = _Part(root=root, forward=[root])
                    part = of_root[root]
                if part is not None and place not in self.part_of:
                    self.part_of[place] = part
                    part.forward.append(place)
            elif phase == t.Phase.BACKWARD and place in self.part_of:
                its = self.part_of[place]
                if place not in its.backward:
                    its.backward.append(place)

    def before(self) -> dict[tuple[int, str, int], int | None]:
        """For what is done for (block, name, unit), the row of its block that runs next; in the order of running.

        Rows of a block run in ascending order, so what is added must stand where it runs.
        """
        following: dict[tuple[int, int, int], int] = {}
        found: dict[tuple[int, str, int], int | None] = {}
        for item in reversed(self.items):
            if len(item) == 5:
                block, begin, _, instance, micro_batch = item
                following[block, instance, micro_batch] = begin
            else:
                (block, instance, unit), name, micro_batch = item
                found.setdefault((block, name, unit), following.get((block, instance, micro_batch)))
        return dict(reversed(found.items()))

    # -- tokens --------------------------------------------------------------------------------------------

    def _does(self, place: UnitInstance, name: str) -> bool:
        return name in self.names[place[0]][place[2]]

    def token(self, place: UnitInstance, what: str) -> tuple[UnitInstance, str] | None:
        """The unit whose token a unit waits for before it does `what`, and which; None: it does not run here."""
        part = self.part_of.get(place)
        if part is None:
            return None
        name = next(name for name, token in TOKEN_OF.items() if token == what)
        order = part.forward if what == GATHERED else part.backward
        before = order[: order.index(place)] if place in order else []
        found = [(p, what) for p in reversed(before) if self._does(p, name)]
        if what == REGATHERED:
            found += [(p, GATHERED) for p in reversed(part.forward) if self._does(p, "gather")]
        if what == REDUCED:
            found = [(p, its) for p, its in found if p != part.root]
            own = (("regather", REGATHERED), ("gather", GATHERED))
            found += [(place, its) for action, its in own if self._does(place, action)]
        return next(iter(found), (part.root, GATHERED))

    # -- calls ---------------------------------------------------------------------------------------------

    def _items(self) -> Iterator[Call | Done]:
        """The step's calls, in old rows, and what is done for its units between them."""
        left = Counter((place, call[4]) for phase, place, call in self.pieces if phase == t.Phase.BACKWARD)
        of_part = Counter(
            (self.part_of[place].root, call[4])
            for phase, place, call in self.pieces
            if phase == t.Phase.BACKWARD and place in self.part_of
        )
        issued: set[tuple[UnitInstance, int]] = set()
        gathered: set[tuple[UnitInstance, int]] = set()
        regathered: set[tuple[UnitInstance, int]] = set()
        whole: _Part | None = None
        for at, (phase, place, call) in enumerate(self.pieces):
            if whole is not None and self.graph.blocks[place[0]].name != ACCUMULATE:
                yield from self._whole_reduced(whole)
                whole = None
            self._at = at
            micro_batch, part = call[4], self.part_of.get(place)
            if part is None or phase == t.Phase.OPTIMIZER:
                yield call
                continue
            if phase == t.Phase.FORWARD:
                for unit in dict.fromkeys((part.root, place)):
                    if (key := (unit, 0 if self.how.once else micro_batch)) not in gathered:
                        gathered.add(key)
                        names = ("unshard",) if key in issued else ("gather", "unshard")
                        yield from self._added(unit, names, micro_batch)
                for ahead in self._ahead(part, place):
                    if (key := (ahead, 0 if self.how.once else micro_batch)) not in gathered | issued:
                        issued.add(key)
                        yield from self._added(ahead, ("gather",), micro_batch)
            elif self._does(place, "regather") and (place, micro_batch) not in regathered:
                regathered.add((place, micro_batch))
                yield from self._prepare_backward(part, place, micro_batch)
            yield call
            if phase == t.Phase.BACKWARD:
                left[place, micro_batch] -= 1
                of_part[part.root, micro_batch] -= 1
                if not left[place, micro_batch] and place != part.root:
                    yield from self._backward_done(place, micro_batch)
                if not of_part[part.root, micro_batch]:
                    yield from self._backward_done(part.root, micro_batch)
                    whole = part if self.how.whole and self.staged and micro_batch == self.last else None
        if whole is not None:
            yield from self._whole_reduced(whole)

    def _ahead(self, part: _Part, place: UnitInstance) -> list[UnitInstance]:
        """The unit whose forward pass comes after another's, where the host has to issue its gathers before."""
        at = part.forward.index(place) + 1
        return part.forward[at : at + 1] if self.how.apart else []

    def _prepare_backward(self, part: _Part, place: UnitInstance, micro_batch: int) -> Iterator[Done]:
        """Gathers a unit unless it ran ahead, and then the one whose backward comes next."""
        order = [p for p in part.backward if self._does(p, "regather")]
        at = order.index(place)
        if at == 0:
            yield from self._added(place, ("regather",), micro_batch)
        yield from self._added(place, ("reunshard",), micro_batch)
        if at + 1 < len(order):
            yield from self._added(order[at + 1], ("regather",), micro_batch)

    def _backward_done(self, place: UnitInstance, micro_batch: int) -> Iterator[Done]:
        """Adds up gradients and reduces them, where that is not left to the end of the part."""
        if micro_batch > self.first:
            yield from self._added(place, ("sum",), micro_batch)
        if not self.how.whole or (micro_batch == self.last and not self.staged):
            yield from self._reduced(place, micro_batch)

    def _whole_reduced(self, part: _Part) -> Iterator[Done]:
        """Reduces gradients of all units of a part, which have added up over the micro-batches."""
        for place in (*(place for place in part.backward if place != part.root), part.root):
            yield from self._reduced(place, self.last)

    def _reduced(self, place: UnitInstance, micro_batch: int) -> Iterator[Done]:
        yield from self._added(place, ("reduce", "add") if micro_batch > self.first else ("reduce",), micro_batch)

    def _added(self, place: UnitInstance, names: tuple[str, ...], micro_batch: int) -> Iterator[Done]:
        yield from ((place, name, micro_batch) for name in names if self._does(place, name))


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
    return _PHASE_OF[phase]


_PHASE_OF = {int(phase): phase for phase in t.Phase}
_PHASE_OF |= {int(t.Phase.RECOMPUTE): t.Phase.BACKWARD, int(t.Phase.OTHER): t.Phase.FORWARD}


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
        self._shared = self._read_elsewhere()
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
                layer = self._home(graph.strings[graph.tensors.name[row]]) if main else ""
                parameters.setdefault(layer, []).append(row)
        for row in gradients:
            if row in block.tensors:
                layer = self._home(graph.strings[graph.tensors.name[row]]) if main else ""
                reduced.setdefault(layer if layer in parameters else "", []).append(row)
        return tuple(
            Unit(
                module=layer, root=main and not layer, parameters=tuple(rows),
                gradients=tuple(reduced.get(layer, ())),
            )
            for layer, rows in parameters.items()
        )  # fmt: skip

    def _home(self, name: str) -> str:
        """The layer in a main block that gathers a parameter, and reduces its gradient; "" for the root."""
        return "" if name.removesuffix(".grad") in self._shared else self._layer(name)

    def _read_elsewhere(self) -> set[str]:
        """Names of parameters in main blocks that another layer than their own reads, as layers that share do.

        One would drop them while another still reads them, so they are the root's, which alone stays gathered
        (FSDP asks for that of those who share parameters).
        """
        if self._module is None:
            return set()
        graph, readers = self.graph, dict[str, set[str]]()
        main = [block.ops for number, block in enumerate(graph.blocks) if not self._is_layer(number)]
        read, by = graph.root[graph.ops.inputs.values], graph.ops.inputs.rows
        for row in np.unique(read[np.isin(by, [op for ops in main for op in ops])]).tolist():
            if self._is_parameter(row):
                ops = by[(read == row) & (graph.ops.phase[by] != t.Phase.OPTIMIZER)]
                modules = np.unique(graph.ops.module[ops]).tolist()
                name = graph.strings[graph.tensors.name[row]]
                readers.setdefault(name, set()).update(self._layer(graph.strings[module]) for module in modules)
        for block in (b for n, b in enumerate(graph.blocks) if self._is_layer(n)):
            for instance in block.instances:
                for number, _, bound in map(graph.locate_tensor, instance.bindings):
                    if not self._is_layer(number) and self._is_parameter(row := int(graph.root[bound])):
                        name = graph.strings[graph.tensors.name[row]]
                        readers.setdefault(name, set()).add(f"{block.name}.{instance.label}")
        return {name for name, layers in readers.items() if layers - {self._layer(name)}}

    def _is_parameter(self, row: int) -> bool:
        tensors = self.graph.tensors
        made = self.graph.maker[row] != NONE or tensors.alias_of[row] != NONE or tensors.port[row]
        return not made and bool(tensors.roles[row] == t.TensorRole.PARAMETER)


IDLE, GATHER_LIST, REDUCE_LIST = "zero3.idle", "zero3.all_gather", "zero3.reduce_scatter"
"""The wait until the device is idle, and collectives over lists of tensors."""
PERSISTENT_BELOW, KEPT_WITHIN = 100_000, 1_000_000_000
"""Elements: smaller parameters stay gathered, and those that are read again before so many others were, stay, too
(DeepSpeed's defaults of `stage3_param_persistence_threshold` and `stage3_max_reuse_distance`)."""

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
        apart: each tensor is gathered and reduced by a collective of its own, and the host waits before.
        flat: a unit's parameters are views of one tensor.
    """

    reshard: bool
    once: bool
    whole: bool
    adds: bool
    reduce_dtype: t.DType | None
    apart: bool = False
    flat: bool = False


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
        ops: NewRows,
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
        for rows, phase in self._stretches():
            self._act_before(rows.start)
            self.write_ops(rows, phase)
        self._act_before(None)
        for index in self.block.tensors:
            if not any((index, phase) in self.written.tensors for phase in t.Phase):
                self.use(index, self.variant(index, SHARDED))
        return self.finish(first_tensor, first_op)

    def _stretches(self) -> Iterator[tuple[range, t.Phase]]:
        """Operations of one phase that nothing is done between, with the phase."""
        begin = self.block.ops.start
        for row in self.block.ops:
            phase, after = self.phase(row), row + 1
            if after == self.block.ops.stop or after in self.before or self.phase(after) != phase:
                yield range(begin, after), phase
                begin = after

    def _act_before(self, row: int | None) -> None:
        """Does what is done before an operation, or at the end."""
        for number, name in self.before.get(row, ()):
            begin = self.builder.op_count()
            self._act(number, name)
            self.ranges[number, name] = (begin, self.builder.op_count())

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
                        self._add(tensors, SHARDED, axes_group(self.builder, axes)[1])

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
        return phase_of(self.graph.ops.phases[row])

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
        gradient = variant == SHARDED and self.division.role(tensor.id) == t.TensorRole.GRADIENT
        reduced = gradient and not self.division.of_optimizer(tensor.id)
        return (self.how.reduce_dtype if reduced else None) or tensor.dtype

    def _token(self, what: str, *, port: bool = False) -> int:
        lasting = self.how.once and what == GATHERED
        role = t.TensorRole.BUFFER if lasting else t.TensorRole.ACTIVATION
        self.written.tokens.append(self.builder.tensor(what, (1,), t.DType.BOOL, role, port=port))
        return self.written.tokens[-1]

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
            if self.how.flat:
                self.builder.compute("fsdp.views", phase=phase, deps=(gather,), outputs=(*whole, *done))
                continue
            copy = self.builder.compute(
                "fsdp.split_with_sizes_copy", phase=phase, deps=(gather,), outputs=(*whole, *done),
                bytes_read=self._nbytes(tensors), bytes_written=sum(x.nbytes for x in tensors),
            )  # fmt: skip
            self._is(copy, tensors, "bytes_read")
            self._is_whole(copy, tensors, "bytes_written")

    def _is(
        self, row: int, tensors: Sequence[t.Tensor], *columns: str, reduced: bool = False, part: bool = False,
        times: int = 1,
    ) -> None:  # fmt: skip
        """Notes that sizes of an operation are those of shards of all ranks together, or of one rank's part."""
        rows, axes = tuple(x.id for x in tensors), self.division.axes(tensors[0])
        dims = tuple(map(self.division.dim, tensors)) if axes else ()
        dtype = self.how.reduce_dtype if reduced else None
        self.written.amounts += (
            Amount(row, column, rows, axes=axes, dims=dims, dtype=dtype, part=part, times=times)
            for column in columns
        )

    def _is_whole(self, row: int, tensors: Sequence[t.Tensor], column: str, times: int = 1) -> None:
        """Notes that a size of an operation is that of whole tensors."""
        self.written.amounts.append(Amount(row, column, tuple(x.id for x in tensors), times=times))

    def _gather_part(
        self, axes: tuple[str, ...], tensors: list[t.Tensor], phase: t.Phase, wait: tuple[int, ...]
    ) -> int:
        group, stream = axes_group(self.builder, axes)
        total, ranks = self._nbytes(tensors), self.division.ranks(axes)
        if self.how.apart:
            return self._gather_apart(group, stream, tensors, phase, wait)
        copy_in = self.builder.compute(
            "fsdp.all_gather_copy_in", phase=phase, stream=stream, bytes_read=total // ranks,
            inputs=(*(self.use(x.id, SHARDED) for x in tensors), *wait), bytes_written=total // ranks,
        )  # fmt: skip
        self._is(copy_in, tensors, "bytes_read", "bytes_written", part=True)
        self._is(self.builder.op_count(), tensors, "nbytes")
        return self.builder.collective(
            "fsdp.all_gather", t.CollectiveKind.ALL_GATHER, group=group, bytes_per_rank=total,
            dtype=tensors[0].dtype, payload=t.Payload.PARAMETER, asynchronous=True, phase=phase, stream=stream,
            deps=(copy_in,),
        )  # fmt: skip

    def _nbytes(self, tensors: list[t.Tensor], dtype: t.DType | None = None) -> int:
        return sum((dtype or x.dtype).nbytes(self.division.padded(x)) for x in tensors)

    def _gather_apart(
        self, group: int, stream: int, tensors: list[t.Tensor], phase: t.Phase, wait: tuple[int, ...]
    ) -> int:
        """Gathers each large tensor into memory set to zero, once all that was issued before has run."""
        last = self.builder.compute(IDLE, phase=phase, stream=stream, inputs=wait)
        idle, large = last, [x for x in tensors if x.numel >= PERSISTENT_BELOW]
        for tensor in (*large, *self._dropped_between(large, phase)):
            total = self._nbytes([tensor])
            zeros = self.builder.compute(
                "aten.zeros", phase=phase, stream=stream, inputs=(self.use(tensor.id, SHARDED),), deps=(idle,),
                bytes_read=total // self.division.ranks(self.division.axes(tensor)), bytes_written=total,
            )  # fmt: skip
            last = self.builder.collective(
                GATHER_LIST, t.CollectiveKind.ALL_GATHER, group=group, bytes_per_rank=total, dtype=tensor.dtype,
                payload=t.Payload.PARAMETER, asynchronous=True, phase=phase, stream=stream, deps=(zeros,),
            )  # fmt: skip
        return last

    def _dropped_between(self, tensors: list[t.Tensor], phase: t.Phase) -> list[t.Tensor]:
        """What recomputation drops again before backward reads it: so much is used in between."""
        rows = slice(self.block.ops.start, self.block.ops.stop)
        if phase == t.Phase.FORWARD or not (self.graph.ops.phase[rows] == t.Phase.RECOMPUTE).any():
            return []
        after = [sum(x.numel for x in tensors[n + 1 :]) for n in range(len(tensors))]
        return [x for x, between in zip(tensors, after, strict=True) if 2 * between > KEPT_WITHIN]

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
        if unit.root or self.how.apart:
            builder.compute("fsdp.wait", phase=t.Phase.BACKWARD, deps=ends)

    def _reduce_part(self, axes: tuple[str, ...], tensors: list[t.Tensor], done: tuple[int, ...]) -> int:
        """Reduces and scatters gradients, then adds up the shards of the copies; returns the last operation."""
        if self.how.apart and len(tensors) > 1:
            for tensor in tensors[:-1]:
                self._reduce_part(axes, [tensor], ())
            tensors = tensors[-1:]
        builder, dtype, copies = self.builder, self.how.reduce_dtype or tensors[0].dtype, replicas(self.division)
        total = self._nbytes(tensors, self.how.reduce_dtype)
        made = (*(self.use(x.id, SHARDED) for x in tensors if axes), *done)
        whole = [self.use(x.id, t.Phase.BACKWARD) for x in tensors]
        last: tuple[int, ...] = ()
        if axes:
            group, stream = axes_group(builder, axes)
            cat = builder.compute(
                "aten.cat" if self.how.flat else "fsdp.chunk_cat", phase=t.Phase.BACKWARD,
                stream=stream if self.how.apart else 0, inputs=whole,
                bytes_read=sum(x.nbytes for x in tensors), bytes_written=total,
            )  # fmt: skip
            self._is_whole(cat, tensors, "bytes_read")
            self._is(cat, tensors, "bytes_written", reduced=True)
            if self.how.flat:
                cat = builder.compute(
                    "aten.div_", phase=t.Phase.BACKWARD, stream=stream, deps=(cat,), bytes_read=total,
                    bytes_written=total,
                )  # fmt: skip
                self._is(cat, tensors, "bytes_read", "bytes_written", reduced=True)
            name = REDUCE_LIST if self.how.apart else "fsdp.reduce_scatter"
            reduce = builder.collective(
                name, t.CollectiveKind.REDUCE_SCATTER, group=group, bytes_per_rank=total,
                dtype=dtype, payload=t.Payload.GRADIENT, asynchronous=True, phase=t.Phase.BACKWARD, stream=stream,
                deps=(cat,), outputs=() if copies else made,
            )  # fmt: skip
            self._is(reduce, tensors, "nbytes", reduced=True)
            if not copies:
                return reduce
            last = (reduce,)
        group, stream = axes_group(builder, copies)
        self._is(builder.op_count(), tensors, "nbytes", reduced=True, part=True)
        return builder.collective(
            "hsdp.all_reduce", t.CollectiveKind.ALL_REDUCE, group=group, dtype=dtype, outputs=made, deps=last,
            inputs=() if axes else whole, bytes_per_rank=total // self.division.ranks(axes),
            payload=t.Payload.GRADIENT, asynchronous=True, phase=t.Phase.BACKWARD, stream=stream,
        )  # fmt: skip

    def _add(self, tensors: list[t.Tensor], phase: t.Phase, stream: int) -> int:
        """Adds gradients, whole or shards, to those of the micro-batches before."""
        nbytes = sum(x.nbytes for x in tensors)
        if phase == SHARDED:
            nbytes = self._nbytes(tensors, self.how.reduce_dtype)
            nbytes //= self.division.ranks(self.division.axes(tensors[0]))
            self._is(self.builder.op_count(), tensors, "bytes_read", reduced=True, part=True, times=2)
            self._is(self.builder.op_count(), tensors, "bytes_written", reduced=True, part=True)
        else:
            self._is_whole(self.builder.op_count(), tensors, "bytes_read", times=2)
            self._is_whole(self.builder.op_count(), tensors, "bytes_written")
        return self.builder.compute(
            "aten.add_", phase=t.Phase.BACKWARD, stream=stream, inputs=[self.use(x.id, phase) for x in tensors],
            bytes_read=2 * nbytes, bytes_written=nbytes,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FullyShard:
    """Lowers a step graph, or each stage of a pipeline, to a job whose ranks hold shards of the model.

    Attributes:
        replicas: number of ranks, each with its own micro-batches.
        shard: ranks that share one copy of the model; None: all of them. Fewer make copies (HSDP).
        micro_batches: forward and backward passes before the optimizer.
        reshard_after_forward: drop a layer's parameters after its forward pass and gather them again; else, under
            a pipeline, they are gathered once for all micro-batches.
        reduce_every_micro_batch: each micro-batch reduces its gradients, and shards add up; else whole gradients
            do, and the last one reduces them (`set_requires_gradient_sync`). None: no under a pipeline.
        reduce_dtype: type in which gradients are reduced; None: their own.
        apart: each parameter is gathered, and its gradient reduced, by a collective of its own over a list of
            tensors, one a rank; before a layer's parameters are gathered, the layer before, the host waits until
            the device is idle, and backward waits for what it reduces. DeepSpeed's ZeRO-3 of 2021.
        flat: a unit's parameters are views of one tensor, which is gathered as it is, and whose gradient is
            divided before it is reduced. PyTorch's FSDP before `fully_shard` (torch.distributed.fsdp._flat_param).
    """

    name: ClassVar[str] = "fully_shard"

    replicas: int
    shard: int | None = None
    micro_batches: int = 1
    reshard_after_forward: bool = True
    reduce_every_micro_batch: bool | None = None
    reduce_dtype: t.DType | None = None
    apart: bool = False
    flat: bool = False

    def __call__(self, graph: StepGraph | JobGraph) -> JobGraph:
        """The job graph; a pipeline's keeps its micro-batches.

        Raises:
            PlanError: a number is out of range, micro-batches are given for a pipeline, or the sharding group does
                not divide the ranks.
        """
        return self.labelled(graph)[0]

    def labelled(
        self, graph: StepGraph | JobGraph, labels: Sequence[Sequence[PassLabel]] | None = None
    ) -> tuple[JobGraph, list[list[PassLabel]]]:
        """The job graph, and for each of its programs what its calls are of; as `DataParallel.labelled`."""
        writer, job = self._written(graph, labels)
        return job.builder.build(JobGraph, whole=labels is None), [
            schedule.labels for schedule in writer.schedules
        ]

    def alike(
        self, graph: StepGraph | JobGraph, labels: Sequence[Sequence[PassLabel]] | None = None
    ) -> ReplicasAlike:
        """As `labelled`, with the job for other sizes, where these do not decide what it is.

        Raises:
            PlanError: as `__call__`.
        """
        writer, blocks = self._written(graph, labels)
        job, division, sized = blocks.builder.build(JobGraph, whole=labels is None), writer.division, None
        tensors, ops = blocks.origins(job)
        amounts = blocks.amounts
        cut = {
            old for made in blocks.blocks for old, phase in made.tensors if phase == SHARDED and division.cut(old)
        }
        cut |= {row for amount in amounts for row in amount.tensors if amount.dims}
        dims = {row: division.dim(graph.tensor(row)) for row in cut}
        if not self.apart:  # which looks at the sizes of parameters
            counted = np.zeros(len(job.tensors), np.bool_)
            counted[[row for made in blocks.blocks for row in made.tokens]] = True
            sized = Sized.of(
                graph, job, tensors, ops, counted=counted, amounts=amounts,
                shards=Shards.of(len(job.tensors), blocks.shards(division, dims)),
                shared=(ops != NONE) & (job.ops.phase == t.Phase.OPTIMIZER),
            )  # fmt: skip
        return ReplicasAlike(
            options=self,
            job=job,
            labels=[schedule.labels for schedule in writer.schedules],
            rest=at_rest(graph),
            sized=sized,
            resizable=None if sized is not None else Resizable.of(graph, job, tensors, ops),
            cut=tuple(dims.items()),
        )

    def few(self) -> FullyShard:
        """With as few ranks as do the same but for sizes: one has nothing to share."""
        shard = self.replicas if self.shard is None else self.shard
        few = min(shard, 2)
        return replace(self, replicas=few * min(self.replicas // max(shard, 1), 2), shard=few)

    def data_mesh(self, mesh: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """The mesh of the job of a graph with this one.

        Raises:
            PlanError: the sharding group does not divide the ranks.
        """
        shard = self.replicas if self.shard is None else self.shard
        if shard < 1 or self.replicas % shard:
            raise PlanError(f"sharding over {shard} ranks does not divide {self.replicas}: choose a divisor")
        copies = self.replicas // shard
        replicate = (Axis(name=REPLICATE, size=copies),) if copies > 1 else ()
        return data_mesh(mesh, (*replicate, Axis(name=SHARD, size=shard)))

    def does_as(self, known: ReplicasAlike, graph: Graph, mesh: tuple[Axis, ...]) -> bool:
        """Whether the dimensions that are cut are the same."""
        division = Division(graph=graph, mesh=mesh, gradients=frozenset(), copies=(REPLICATE,))
        return all(division.dim(graph.tensor(row)) == dim for row, dim in known.cut)

    def _written(
        self, graph: StepGraph | JobGraph, labels: Sequence[Sequence[PassLabel]] | None
    ) -> tuple[_Writer, ShardedGraph]:
        """What wrote the job graph, and its blocks and programs; as `labelled`."""
        check_sizes(self.replicas, self.micro_batches, isinstance(graph, JobGraph))
        mesh = self.data_mesh(graph.mesh)
        gradients = frozenset(final_gradients(graph))
        division = Division(graph=graph, mesh=mesh, gradients=gradients, copies=(REPLICATE,))
        writer = _Writer(self, graph, division, self._how(graph), labels)
        return writer, writer.job()

    def _how(self, graph: Graph) -> How:
        staged = isinstance(graph, JobGraph)
        every = self.reduce_every_micro_batch
        every = not staged if every is None else every
        count = max((int(p.calls[:, 4].max(initial=0)) for p in graph.programs), default=0) + 1
        several = (count if staged else self.micro_batches) > 1
        return How(
            reshard=self.reshard_after_forward,
            once=staged and not self.reshard_after_forward,
            whole=(several or staged) and not every,
            adds=several and (every or not staged),
            reduce_dtype=self.reduce_dtype,
            apart=self.apart,
            flat=self.flat,
        )


class _Writer:
    def __init__(
        self,
        options: FullyShard,
        graph: StepGraph | JobGraph,
        division: Division,
        how: How,
        labels: Sequence[Sequence[PassLabel]] | None,
    ) -> None:
        self.options, self.graph, self.division, self.how = options, graph, division, how
        self.staged = isinstance(graph, JobGraph)
        self.builder = empty_copy(graph)
        self.builder.mesh = division.mesh
        self.units = Units(graph, sorted(division.gradients))
        self.names = [
            [actions(unit, self.units.is_main(number), how, division) for unit in units]
            for number, units in enumerate(self.units.of_block)
        ]
        self.schedules = [
            self._schedule(program, [UPDATE] * len(program.calls) if labels is None else labels[number])
            for number, program in enumerate(graph.programs)
        ]

    def _schedule(self, program: Program, labels: Sequence[PassLabel]) -> UnitSchedule:
        calls = self._calls(program, labels)
        own = [call for call, _ in calls]
        return UnitSchedule(
            self.graph, self.units, self.names, self.how, own, [label for _, label in calls], self.staged
        )

    def _calls(self, program: Program, labels: Sequence[PassLabel]) -> list[tuple[Call, PassLabel]]:
        """The calls of all micro-batches; a pipeline's without those that add up whole gradients if shards do."""
        its = program.calls[:, 2] > program.calls[:, 1]
        if self.staged:
            every = zip(program.calls.tolist(), labels, its.tolist(), strict=True)
            calls: list[tuple[Call, PassLabel]] = [(tuple(call), label) for call, label, runs in every if runs]
            return [c for c in calls if self.how.whole or self.graph.blocks[c[0][0]].name != ACCUMULATE]
        passes, update = (part.tolist() for part in split_at_optimizer(self.graph, program.calls[its]))
        count = self.options.micro_batches
        runs = [(call, ("forward", m, 0)) for m in range(count) for call in in_micro_batch(passes, m)]
        return runs + [(call, UPDATE) for call in in_micro_batch(update, count - 1)]

    def job(self) -> ShardedGraph:
        """Writes everything."""
        blocks, ops = [], NewRows.of(len(self.graph.ops))
        scalars = {*total_norms(self.graph), *overflow_flags(self.graph)} if self.division.all_axes else set[int]()
        before = self._before()
        for number, block in enumerate(self.graph.blocks):
            if number:
                self.builder.begin_block(block.name)
            made = UnitBlock(
                self.graph, self.builder, number, self.division, ops, units=self.units, how=self.how,
                before=before[number], scalars=scalars,
            )  # fmt: skip
            made.write()
            blocks.append(made)
        job = ShardedGraph(self.graph, self.builder, [block.written for block in blocks], ops)
        job.bind(lambda *where: self._token(blocks, *where))
        for program, schedule in zip(self.graph.programs, self.schedules, strict=True):
            calls = []
            for item in schedule.items:
                if len(item) == 5:
                    calls.append(job.call(item))
                else:
                    (number, instance, unit), name, micro_batch = item
                    calls.append((number, *blocks[number].ranges[unit, name], instance, micro_batch))
            self.builder.program(
                calls, role=program.role or "replica", coordinates=program.coordinates, ranks=program.ranks
            )
        return job

    def _before(self) -> list[dict[int | None, list[UnitAction]]]:
        """Of each block, what is done before which operation; the programs that call it agree."""
        found: list[dict[int | None, list[UnitAction]]] = [{} for _ in self.graph.blocks]
        done = set()
        for schedule in self.schedules:
            for (block, name, unit), row in schedule.before().items():
                if (block, name, unit) not in done:
                    found[block].setdefault(row, []).append((unit, name))
                    done.add((block, name, unit))
        return found

    def _token(self, blocks: list[UnitBlock], block: int, instance: int, what: str, unit: int) -> Address:
        """What a unit's port for a token is bound to; to its own token where no program runs it."""
        place = block, instance, unit
        waits = (schedule.token(place, what) for schedule in self.schedules)
        (number, its_instance, its_unit), name = next((found for found in waits if found), (place, what))
        return number, its_instance, blocks[number].tokens[its_unit, name]
