"""The workload graph: blocks of operations, and the programs that call them.

A *block* is a sub-graph that stands once and has *instances* (layer 0, layer 1, ...). Its operations name
tensors by position in the graph's tensor table. Tensors that come from elsewhere are *ports*: formal
parameters that each instance binds to the tensor it means. Block 0, the main block, has one instance.

A *program* is a list of *calls*: run operations [begin, end) of a block, for one instance and one micro-batch.
A step graph has one program; a job graph has one for each role, with a mesh of ranks and process groups.

Every (block, instance, non-port tensor) has a *tensor id*, the number that bindings use: the ids of block 0
come first (and equal the table positions where it has no port), then those of block 1 instance 0, block 1
instance 1, and so on. Operations have ids made the same way.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from itertools import chain
from math import prod
from typing import Any, TypeVar

import numpy as np

from echograph.errors import GraphError
from echograph.ir.columns import NONE, Int64, OpTable, TensorTable, distinct
from echograph.ir.types import DType, Op, Tensor

FORMAT_MAJOR = 2
FORMAT_MINOR = 2
"""The newest that is known; docs/ir.md says what came with each."""

BETWEEN_STEPS = "between steps"
"""Holds what a script keeps from one step and drops within the next; what all others hold lives throughout."""

Told = TypeVar("Told")

CALL_FIELDS = ("block", "begin", "end", "instance", "micro_batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What the step trains, for tokens per second and utilisation.

    Attributes:
        model: the model's name.
        parameters: trainable elements, tied ones once.
        batch_size: samples of one micro-batch.
        sequence_length: tokens of one sample; 0 where samples have no tokens (images).
        dtype: of the forward pass.
        optimizer: its name ("adamw"); "" when the step has none.
        master_weights: whether the optimizer keeps fp32 copies of 16-bit parameters.
        model_flops: what the model asks of one micro-batch, forward and backward, on however many ranks it runs:
            nothing computed again, padded or computed by several ranks; 0 where unknown.
        causal_attention_flops: those of them in attention with a causal mask, masked pairs included.
        stack: software that was captured, a word of the stacks; "" where it is not known.
    """

    model: str = ""
    parameters: int = 0
    batch_size: int = 1
    sequence_length: int = 0
    dtype: DType = DType.FP32
    optimizer: str = ""
    master_weights: bool = False
    model_flops: int = 0
    causal_attention_flops: int = 0
    stack: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One occurrence of a block.

    Attributes:
        label: replaces `{}` in the names of the block's tensors and modules ("layer 3" has the label "3").
        bindings: tensor id for each port of the block, in table order.
        op_bindings: operation ids that the block's `forward_op` values below -1 refer to.
    """

    label: str = ""
    bindings: tuple[int, ...] = ()
    op_bindings: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A repeated sub-graph: rows of the tensor and operation tables, and its instances."""

    name: str
    tensors: range
    ops: range
    instances: tuple[Instance, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis of the device mesh."""

    name: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that communicate: those that differ only along `axes`, or an explicit list.

    Attributes:
        name: for people.
        axes: mesh axes; the group stands for one set of ranks at each place on the other axes.
        ranks: or one set of ranks, in the order of their positions.
        positions: with `axes`, the positions of its members among the ranks along them, ascending; empty for all.
    """

    name: str
    axes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """What results call it: its axes, or its name where it is not the whole of them."""
        return self.name if self.positions else "+".join(self.axes) or self.name


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """What one role executes.

    Attributes:
        calls: int64 array [calls, 5] with the columns `CALL_FIELDS`; begin and end are operation indices.
        role: the role's name.
        coordinates: its place in the mesh; axes not named are free (the role has one rank for each value).
        ranks: or the ranks themselves, where the job has no mesh.
        held: bytes that no tensor of the graph stands for, by what holds them: a library, for its workspaces, or
            `BETWEEN_STEPS`.
    """

    calls: Int64
    role: str = ""
    coordinates: Mapping[str, int] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    held: Mapping[str, int] = field(default_factory=dict)

    @property
    def unfolded_ops(self) -> int:
        """Operations that it runs, those of a call as often as they are called."""
        return int((self.calls[:, 2] - self.calls[:, 1]).sum())

    @property
    def usual_calls(self) -> Int64:
        """The calls of one micro-batch amid the others; all of them where none is of a micro-batch."""
        of = self.calls[:, CALL_FIELDS.index("micro_batch")]
        micro_batches = distinct(of[of >= 0])
        return self.calls[of == micro_batches[len(micro_batches) // 2]] if len(micro_batches) else self.calls


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """What step and job graphs have in common. Made by `GraphBuilder`, never changed.

    `passes` says what was applied, in order, each with its options as `ir.passes` reads them; it changes nothing.
    """

    name: str
    producer: str
    workload: Workload
    streams: tuple[str, ...]
    tensors: TensorTable
    ops: OpTable
    blocks: tuple[Block, ...]
    programs: tuple[Program, ...]
    mesh: tuple[Axis, ...] = ()
    groups: tuple[Group, ...] = ()
    passes: tuple[str, ...] = ()
    unknown: bytes = b""

    @property
    def strings(self) -> tuple[str, ...]:
        """The table that the name columns index."""
        return self.ops.strings

    @property
    def format(self) -> tuple[int, int]:
        """The lowest version of the format that can say the graph, major and minor: its file has that one."""
        fixed = any(getattr(each, "deterministic", 0) for each in self.ops.attribute_values)
        newest = fixed or bool(self.workload.stack) or any(program.held for program in self.programs)
        rounded = any(getattr(each, "tf32", getattr(each, "ieee", 0)) for each in self.ops.attribute_values)
        if any((column == DType.FP4_E2M1).any() for column in (self.tensors.dtype, self.ops.dtype)):
            return 2, 2 if rounded else int(newest)
        if rounded or newest:
            return 1, 5 if rounded else 4
        if any(getattr(each, "block", 0) for each in self.ops.attribute_values):
            return 1, 3
        if self.passes:
            return 1, 2
        newer = self.workload.model_flops or self.ops.arguments.any() or any(g.positions for g in self.groups)
        return 1, int(bool(newer))

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of the mesh, or the ranks that programs list."""
        if self.mesh:
            size = 1
            for axis in self.mesh:
                size *= axis.size
            return size
        return max(1, sum(len(p.ranks) for p in self.programs))

    def group_size(self, group: Group) -> int:
        """Ranks of one set of a group."""
        whole = prod(axis.size for axis in self.mesh if axis.name in group.axes)
        return len(group.ranks) or len(group.positions) or whole

    @cached_property
    def strides(self) -> dict[str, int]:
        """How far apart in rank two neighbours along each axis are."""
        return {a.name: prod(b.size for b in self.mesh[i + 1 :]) for i, a in enumerate(self.mesh)}

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank along each axis."""
        return {axis.name: rank // self.strides[axis.name] % axis.size for axis in self.mesh}

    def ranks_along(self, axes: Collection[str], start: int = 0) -> range | list[int]:
        """The ranks at all places along some axes, ascending, from one at the first place along them on."""
        chosen = [axis for axis in self.mesh if axis.name in axes]
        if len(chosen) == 1:
            stride = self.strides[chosen[0].name]
            return range(start, start + chosen[0].size * stride, stride)
        ranks = np.array([start], np.int64)
        for axis in chosen:
            ranks = (ranks[:, None] + np.arange(axis.size) * self.strides[axis.name]).ravel()
        found: list[int] = ranks.tolist()
        return found

    def group_ranks(self, group: Group, coordinates: Mapping[str, int] | None = None) -> range | list[int]:
        """The ranks of a group whose places along other axes are these (0 where not named)."""
        if not group.axes:
            return list(group.ranks)
        start = sum(self.strides[axis] * at for axis, at in (coordinates or {}).items() if axis not in group.axes)
        whole = self.ranks_along(group.axes, start)
        return [whole[position] for position in group.positions] or whole

    def lowest_rank(self, program: int) -> int:
        """The lowest rank that a program stands for; its number where it lists none."""
        its, rank = self.programs[program], 0
        if not self.mesh:
            return min(its.ranks, default=program)
        for axis in self.mesh:
            rank = rank * axis.size + its.coordinates.get(axis.name, 0)
        return rank

    @property
    def unfolded_ops(self) -> int:
        """Operations that all programs run together."""
        return sum(program.unfolded_ops for program in self.programs)

    def run_counts(self, program: int | None = None) -> Int64:
        """int64 [ops]: how often one program, or all of them together, run each row of the operation table."""
        change = np.zeros(len(self.ops) + 1, np.int64)
        for its in self.programs if program is None else [self.programs[program]]:
            # Counting is several times quicker than np.add.at.
            change += np.bincount(its.calls[:, 1], minlength=len(change))
            change -= np.bincount(its.calls[:, 2], minlength=len(change))
        counts: Int64 = np.cumsum(change)[:-1]
        return counts

    @cached_property
    def local_position(self) -> Int64:
        """For every tensor, its position among the non-port tensors of its block; -1 for a port."""
        position = np.full(len(self.tensors), NONE, np.int64)
        for block in self.blocks:
            own = ~self.tensors.port[block.tensors.start : block.tensors.stop]
            position[block.tensors.start : block.tensors.stop][own] = np.arange(int(own.sum()))
        return position

    @cached_property
    def port_position(self) -> Int64:
        """For every tensor, its position among the ports of its block; -1 for any other."""
        position = np.full(len(self.tensors), NONE, np.int64)
        for block in self.blocks:
            ports = self.tensors.port[block.tensors.start : block.tensors.stop]
            position[block.tensors.start : block.tensors.stop][ports] = np.arange(int(ports.sum()))
        return position

    @cached_property
    def tensor_bases(self) -> tuple[tuple[int, int], ...]:
        """For every block, the first tensor id and how many ids an instance takes."""
        bases, start = [], 0
        for block in self.blocks:
            own = int((~self.tensors.port[block.tensors.start : block.tensors.stop]).sum())
            bases.append((start, own))
            start += own * len(block.instances)
        return tuple(bases)

    @cached_property
    def op_bases(self) -> tuple[tuple[int, int], ...]:
        """For every block, the first operation id and how many ids an instance takes."""
        bases, start = [], 0
        for block in self.blocks:
            bases.append((start, len(block.ops)))
            start += len(block.ops) * len(block.instances)
        return tuple(bases)

    @cached_property
    def maker(self) -> Int64:
        """For every tensor, the operation that makes it; -1 for inputs of the graph, ports and views."""
        maker = np.full(len(self.tensors), NONE, np.int64)
        maker[self.ops.outputs.values] = self.ops.outputs.rows
        return maker

    @cached_property
    def root(self) -> Int64:
        """For every tensor, the tensor that owns its memory: itself, or the end of its alias chain."""
        root = np.where(self.tensors.alias_of == NONE, np.arange(len(self.tensors)), self.tensors.alias_of)
        while True:
            further = root[root]
            if np.array_equal(further, root):
                return root
            root = further

    @cached_property
    def origin(self) -> Int64:
        """For every tensor, where its value comes from: the first of its alias chain that an operation makes.

        It is a port or an input of the graph where no operation makes any of them.
        """
        step = np.where((self.maker == NONE) & (self.tensors.alias_of != NONE), self.tensors.alias_of, -1)
        origin = np.where(step == NONE, np.arange(len(step)), step)
        while True:
            further = origin[origin]
            if np.array_equal(further, origin):
                return origin
            origin = further

    @cached_property
    def block_of_op(self) -> Int64:
        """For every operation, the number of its block."""
        return np.repeat(np.arange(len(self.blocks)), [len(b.ops) for b in self.blocks])

    @cached_property
    def ports(self) -> Ports:
        """What the ports of all instances are bound to, as columns."""
        return Ports(self)

    @cached_property
    def _tensors(self) -> dict[int, Tensor]:
        return {}

    def tensor(self, row: int) -> Tensor:
        """A row of the tensor table, kept for those who ask for it again."""
        found = self._tensors.get(row)
        return self._tensors.setdefault(row, self.tensors[row]) if found is None else found

    @cached_property
    def _ops(self) -> dict[int, Op]:
        return {}

    def op(self, row: int) -> Op:
        """A row of the operation table, kept for those who ask for it again."""
        found = self._ops.get(row)
        return self._ops.setdefault(row, self.ops[row]) if found is None else found

    def value(self, block: int, instance: int, index: int) -> tuple[int, int, int]:
        """(block, instance, tensor) where a tensor has its value from, through aliases and ports.

        An operation makes that tensor, or it is an input of the graph.
        """
        while self.tensors.port[index := int(self.origin[index])]:
            block, instance, index = self.locate_tensor(self.tensor_id(block, instance, index))
        return block, instance, index

    def owner(self, block: int, instance: int, index: int) -> tuple[int, int, int]:
        """(block, instance, tensor) that owns the memory of a tensor, through all aliases and ports."""
        while self.tensors.port[index := int(self.root[index])]:
            block, instance, index = self.locate_tensor(self.tensor_id(block, instance, index))
        return block, instance, index

    def source(self, block: int, instance: int, index: int) -> tuple[int, int, int] | None:
        """(block, instance, operation) that makes the value of a tensor; None for an input of the graph."""
        block, instance, index = self.value(block, instance, index)
        maker = int(self.maker[index])
        return None if maker == NONE else (block, instance, maker)

    def tensor_id(self, block: int, instance: int, index: int) -> int:
        """The id that a tensor of the table has in one instance of its block, ports resolved."""
        position = self.local_position.item(index)
        if position == NONE:
            return self.blocks[block].instances[instance].bindings[self.port_position.item(index)]
        base, count = self.tensor_bases[block]
        return base + instance * count + position

    def locate_tensor(self, tensor_id: int) -> tuple[int, int, int]:
        """(block, instance, table index) of a tensor id: the inverse of `tensor_id`."""
        bases = self._tensor_starts, self.tensor_bases
        number, instance, position = _locate(*bases, self.blocks, tensor_id, "tensor")
        return number, instance, self._own_tensors[number][position]

    @cached_property
    def _tensor_starts(self) -> list[int]:
        return [start for start, _ in self.tensor_bases]

    @cached_property
    def _op_starts(self) -> list[int]:
        return [start for start, _ in self.op_bases]

    @cached_property
    def _own_tensors(self) -> tuple[list[int], ...]:
        return tuple(
            (b.tensors.start + np.flatnonzero(~self.tensors.port[b.tensors.start : b.tensors.stop])).tolist()
            for b in self.blocks
        )

    def bindings(self) -> Iterator[tuple[int, int, int, tuple[int, int, int]]]:
        """Block, instance and port of every port, and the (block, instance, tensor) that is bound to it."""
        for number, block in enumerate(self.blocks):
            ports = [i for i in block.tensors if self.tensors.port[i]]
            for instance, made in enumerate(block.instances):
                for port, bound in zip(ports, made.bindings, strict=True):
                    yield number, instance, port, self.locate_tensor(bound)

    def op_id(self, block: int, instance: int, index: int) -> int:
        """The id of an operation of the table in one instance of its block."""
        base, count = self.op_bases[block]
        return base + instance * count + index - self.blocks[block].ops.start

    def locate_op(self, op_id: int) -> tuple[int, int, int]:
        """(block, instance, table index) of an operation id."""
        number, instance, position = _locate(self._op_starts, self.op_bases, self.blocks, op_id, "operation")
        return number, instance, self.blocks[number].ops.start + position


def _locate(
    starts: Sequence[int], bases: Sequence[tuple[int, int]], blocks: Sequence[Block], identity: int, what: str
) -> tuple[int, int, int]:
    """(block, instance, position among the block's own) of an id; `starts` are the first of each of the bases."""
    number = bisect_right(starts, identity) - 1
    base, count = bases[number] if number >= 0 else (0, 0)
    if not 0 <= identity - base < count * len(blocks[number].instances):
        raise IndexError(f"no {what} has the id {identity}")
    return number, *divmod(identity - base, count)


class StepGraph(Graph):
    """What one micro-batch and one optimizer step compute, on one device."""


class JobGraph(Graph):
    """What every rank of a job executes: one program per role, a mesh, process groups and streams."""

    def rank_count(self, program: int) -> int:
        """How many ranks a program stands for."""
        its = self.programs[program]
        if not self.mesh:
            return max(1, len(its.ranks))
        return prod(axis.size for axis in self.mesh if axis.name not in its.coordinates)

    def program_of(self, rank: int) -> int:
        """The number of the program that a rank runs.

        Raises:
            GraphError: none does.
        """
        place = self.coordinates(rank) if 0 <= rank < self.world_size else {}
        for number, program in enumerate(self.programs if place or not self.mesh else ()):
            if rank in program.ranks or (not program.ranks and program.coordinates.items() <= place.items()):
                return number
        raise GraphError(f"{self.name}: no program for rank {rank} of a job of {self.world_size} ranks")

    def role_name(self, program: int) -> str:
        """The role of a program; "rank N", the lowest that it stands for, where the job does not name it."""
        return self.programs[program].role or f"rank {self.lowest_rank(program)}"


# -- what ports are bound to ----------------------------------------------------------------------------------
# What the ports of a graph are bound to, all instances at once: `Graph.value` on columns.
#
# A *slot* is one port of one instance. Slots follow each other as blocks, instances and ports do.


_Place = tuple[Int64, Int64, Int64]
"""Blocks, instances, and rows of the tensor table."""


class Ports:
    """The slots of a graph.

    Args:
        graph: every instance binds all ports of its block, to ids that exist.
    """

    def __init__(self, graph: Graph) -> None:
        # Columns of the graph, which holds this: without a circle, it goes when nobody needs it.
        self._port, self._origin, self._position = graph.tensors.port, graph.origin, graph.port_position
        self._tensors = np.array([block.tensors.start for block in graph.blocks], np.int64)
        self._bases = np.array(graph.tensor_bases, np.int64).reshape(-1, 2)
        counts = [len(block.instances) for block in graph.blocks]
        instances = [instance for block in graph.blocks for instance in block.instances]
        lengths = np.array([len(instance.bindings) for instance in instances], np.int64)
        self._first_instance = np.cumsum([0, *counts])
        self._first_slot: Int64 = np.cumsum(lengths) - lengths
        self._instance_of: Int64 = np.repeat(np.arange(len(instances)), lengths)
        self.bound: Int64 = np.fromiter(chain.from_iterable(i.bindings for i in instances), np.int64)

    def __len__(self) -> int:
        return len(self.bound)

    @property
    def instances(self) -> tuple[Int64, Int64]:
        """The block and the instance of every slot."""
        block = np.searchsorted(self._first_instance, self._instance_of, side="right") - 1
        return block, self._instance_of - self._first_instance[block]

    @property
    def rows(self) -> Int64:
        """The port that every slot is of, as a row of the tensor table."""
        rows = np.flatnonzero(self._port)
        before = np.concatenate([[0], np.cumsum(self._port)])[self._tensors]
        place = np.arange(len(self)) - self._first_slot[self._instance_of]
        found: Int64 = rows[before[self.instances[0]] + place]
        return found

    @cached_property
    def located(self) -> _Place:
        """Where the tensor stands that every slot is bound to."""
        return self.locate(self.bound)

    def locate(self, tensor_id: Int64) -> _Place:
        """`Graph.locate_tensor` of ids that exist."""
        starts, counts = self._bases.T
        block = np.searchsorted(starts, tensor_id, side="right") - 1
        instance, position = np.divmod(tensor_id - starts[block], np.maximum(counts, 1)[block])
        own = np.flatnonzero(~self._port)
        return block, instance, own[(np.cumsum(counts) - counts)[block] + position]

    def slot(self, block: Int64, instance: Int64, port: Int64) -> Int64:
        """The slots of ports, given as rows, in instances of their blocks."""
        slots: Int64 = self._first_slot[self._first_instance[block] + instance] + self._position[port]
        return slots

    def last(self, owner: Int64) -> Int64:
        """For every slot, the last of the chain that it begins; -1 where the chain never ends.

        Args:
            owner: `Graph.origin` or `Graph.root`: for each tensor, whose value or memory it has.
        """
        block, instance, row = self.located
        row = owner[row]
        goes_on = self._port[row]
        after = np.arange(len(self))
        after[goes_on] = self.slot(block[goes_on], instance[goes_on], row[goes_on])
        for _ in range(len(self).bit_length()):
            after = after[after]
        return np.where(goes_on[after], NONE, after)

    @cached_property
    def _values(self) -> _Place:
        """Where every slot has its value from."""
        last = self.last(self._origin)
        block, instance, row = (column[last] for column in self.located)
        return block, instance, self._origin[row]

    def value(self, block: Int64, instance: Int64, row: Int64) -> _Place:
        """`Graph.value` of many tensors."""
        row = self._origin[row]
        through = np.flatnonzero(self._port[row])
        slots = self.slot(block[through], instance[through], row[through])
        found = block.copy(), instance.copy(), row
        for column, values in zip(found, self._values, strict=True):
            column[through] = values[slots]
        return found


def kept(tells: Callable[[Any], Told]) -> Callable[[Any], Told]:
    """A function of a graph whose answer stays with the graph, which never changes; nor may the answer be."""

    @wraps(tells)
    def told(graph: Graph) -> Told:
        known: dict[Any, Told] = graph.__dict__.setdefault("_told", {})
        if tells not in known:
            known[tells] = tells(graph)
        return known[tells]

    return told
