"""Copying a graph into a builder, for a pass that adds to it or writes other operations in its blocks.

A pass that adds copies the blocks (`copy_blocks`) and begins others. One that rewrites overrides
`StepWriter.operation`, which is called for each operation in the order of the table, and adds what it wants with
the open builder. Ports, instances, forward operations and calls are carried over; a block may stand several times,
for some of its instances each, and differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder, append_blocks, copy_rows
from echograph.ir.columns import NONE
from echograph.ir.graph import Graph, StepGraph
from echograph.ir.types import Phase, Tensor

__all__ = [
    "ACCUMULATE",
    "UPDATE",
    "Call",
    "PassLabel",
    "accumulate",
    "ADD_TO_GRADIENT",
    "copy_blocks",
    "copy_rows",
    "copy_tables",
    "empty_copy",
    "in_micro_batch",
    "issued",
]

Call = tuple[int, int, int, int, int]
PassLabel = tuple[str, int, int]
"""What a call is of: a kind of pass, a micro-batch, and a chunk of the stage's."""
UPDATE: PassLabel = ("update", 0, 0)
"""The optimizer's calls, once all passes are done."""
G = TypeVar("G", bound=Graph)
ACCUMULATE = "accumulate"
"""Name of the blocks that add a micro-batch's gradients to those of the ones before it."""


def empty_copy(graph: Graph) -> GraphBuilder:
    """A builder with what a graph says of itself, its streams and groups, but nothing in its tables."""
    builder = GraphBuilder(
        name=graph.name, workload=graph.workload, producer=graph.producer, streams=graph.streams
    )
    builder.unknown = graph.unknown
    builder.mesh, builder.passes = graph.mesh, graph.passes
    for group in graph.groups:
        builder.add_group(group)
    return builder


def copy_blocks(graph: Graph) -> GraphBuilder:
    """A builder that holds all blocks and instances of a graph, but no program.

    Table positions and ids stay what they were; what a pass adds goes into blocks of its own, begun after.
    """
    builder = empty_copy(graph)
    copy_tables(builder, graph)
    return builder


def copy_tables(builder: GraphBuilder, graph: Graph) -> None:
    """Copies all blocks and instances of a graph into a builder that has none."""
    append_blocks(builder, graph, graph.blocks)
    for number, block in enumerate(graph.blocks):
        for instance in block.instances:
            builder.instance(number, instance.label, bindings=instance.bindings, op_bindings=instance.op_bindings)


def accumulate(builder: GraphBuilder, gradients: Iterable[tuple[Tensor, str, int]]) -> Call:
    """A block that adds a micro-batch's gradients to those of the ones before it; returns the call of it.

    Args:
        builder: gets the block.
        gradients: each with its name and its tensor id.
    """
    made = list(gradients)
    block = builder.begin_block(ACCUMULATE)
    begin = builder.op_count()
    ports = builder.tensors(
        [tensor for tensor, _, _ in made],
        names=[name for _, name, _ in made],
        ports=[True] * len(made),
    )
    sizes = {id(tensor): tensor.nbytes for tensor in {id(tensor): tensor for tensor, _, _ in made}.values()}
    nbytes = [sizes[id(tensor)] for tensor, _, _ in made]
    builder.computes(
        [ADD_TO_GRADIENT] * len(made), phase=Phase.BACKWARD, inputs=[(port,) for port in ports],
        bytes_read=[2 * each for each in nbytes], bytes_written=nbytes,
    )  # fmt: skip
    builder.instance(block, bindings=[tensor_id for _, _, tensor_id in made])
    return block, begin, builder.op_count(), 0, 0


ADD_TO_GRADIENT = "aten.add_"
"""The operation that adds a gradient to what earlier micro-batches left: it reads both, and writes one."""


def in_micro_batch(calls: Iterable[Call], micro_batch: int) -> list[Call]:
    """The same calls for a micro-batch."""
    return [(block, begin, end, instance, micro_batch) for block, begin, end, instance, _ in calls]


def issued(ops: Sequence[t.Op]) -> list[t.Duration]:
    """What issuing some operations as one takes: on any host, where that is known of each; their scripts' work."""
    known = [[duration for duration in op.durations if duration.device == t.ANY_HOST] for op in ops]
    works = [duration for op in ops for duration in op.durations if duration.device.endswith(t.SCRIPT)]
    found = list(known[-1]) if all(known) else []
    if works:
        found.append(replace(works[0], picoseconds=sum(each.picoseconds for each in works)))
    return found


@dataclass(slots=True, kw_only=True)
class BlockMapping:
    """A block of the new graph.

    Attributes:
        block: the block of the old graph that it is made from.
        instances: the instances of that block that it has, in order.
        tensors: new row of each tensor that stands for an old one.
        ops: new row of the operation that stands for an old one.
        starts: the new row at which what an old operation became begins.
        tensor_rows: its rows of the new tensor table.
        op_rows: its rows of the new operation table.
    """

    block: int
    instances: tuple[int, ...]
    tensors: dict[int, int] = field(default_factory=dict)
    ops: dict[int, int] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)
    tensor_rows: range = range(0)
    op_rows: range = range(0)


class StepWriter:
    """Copies a step graph block by block; subclasses say what becomes of an operation. A job is copied alike.

    Args:
        graph: the step, or the job.
        parts: (block, instances) of each block of the new graph, the main block first, every instance once; None:
            the blocks as they are.
    """

    def __init__(self, graph: Graph, parts: Iterable[tuple[int, Sequence[int]]] | None = None) -> None:
        self.graph = graph
        self.builder = empty_copy(graph)
        if parts is None:
            parts = [(number, range(len(block.instances))) for number, block in enumerate(graph.blocks)]
        self.parts = [BlockMapping(block=block, instances=tuple(instances)) for block, instances in parts]
        self.part = self.parts[0]

    def write(self) -> StepGraph:
        """The new step graph; raises as `write_as`."""
        return self.write_as(StepGraph)

    def write_as(self, level: type[G]) -> G:
        """The new graph, of a level.

        Raises:
            GraphError: what the subclass wrote breaks an invariant.
        """
        graph, builder = self.graph, self.builder
        for number, part in enumerate(self.parts):
            block = graph.blocks[part.block]
            if number:
                builder.begin_block(block.name)
            self.part = part
            tensors, ops = builder.tensor_count(), builder.op_count()
            for index in block.tensors:
                if graph.maker[index] == NONE:
                    self.tensor(index)
            for place, row in zip(block.ops, self.order(part.block), strict=True):
                part.starts[place] = builder.op_count()
                self.operation(graph.ops[row])
            part.starts[block.ops.stop] = builder.op_count()
            part.tensor_rows, part.op_rows = range(tensors, builder.tensor_count()), range(ops, builder.op_count())
        self._bind()
        return builder.build(level)

    # -- for subclasses ------------------------------------------------------------------------------------

    def operation(self, op: t.Op) -> None:
        """Writes what becomes of an operation; by default the operation."""
        self.copy(op)

    def order(self, block: int) -> Sequence[int]:
        """The operations of a block in the order in which they are written; none leaves the call that it is in."""
        return self.graph.blocks[block].ops

    def tensor(self, index: int, **changes: object) -> int:
        """New row of an old tensor, added when it is asked for first (then with the changes)."""
        known = self.part.tensors.get(index)
        if known is not None:
            return known
        tensor = replace(self.graph.tensors[index], **changes)  # type: ignore[arg-type]
        alias = None if tensor.alias_of is None else self.tensor(tensor.alias_of)
        self.part.tensors[index] = self.add_tensor(tensor, alias)
        return self.part.tensors[index]

    def add_tensor(self, tensor: t.Tensor, alias: int | None) -> int:
        """Adds a tensor with everything but its alias, which is a new row."""
        return self.builder.tensor(
            tensor.name, tensor.shape, tensor.dtype, tensor.role, alias_of=alias, port=tensor.port,
            sharded=tensor.sharded,
        )  # fmt: skip

    def copy(self, op: t.Op, **changes: object) -> int:
        """Adds an operation on the new rows of its tensors, with fields of `changes` replaced."""
        values = changes | {
            name: [self.tensor(i) for i in getattr(op, name)]
            for name in ("inputs", "outputs") if name not in changes
        }  # fmt: skip
        values.setdefault("deps", [self.part.ops[before] for before in op.deps])
        if isinstance(op, t.Compute) and op.forward_op is not None and op.forward_op >= 0:
            values.setdefault("forward_op", self.part.ops[op.forward_op])
        self.part.ops[op.id] = self.builder.add(op, **values)
        return self.part.ops[op.id]

    # -- instances and calls -------------------------------------------------------------------------------

    def _bind(self) -> None:
        graph, builder = self.graph, self.builder
        where = {(p.block, i): (n, at) for n, p in enumerate(self.parts) for at, i in enumerate(p.instances)}
        ports = [{new for old, new in part.tensors.items() if graph.tensors.port[old]} for part in self.parts]
        position: dict[int, int] = {}
        bases, op_bases, start, op_start = [], [], 0, 0
        for part, formal in zip(self.parts, ports, strict=True):
            own = [row for row in part.tensor_rows if row not in formal]
            position |= {row: at for at, row in enumerate(own)}
            bases.append((start, len(own)))
            op_bases.append(op_start)
            start += len(own) * len(part.instances)
            op_start += len(part.op_rows) * len(part.instances)

        def tensor_id(identity: int) -> int:
            block, instance, index = graph.locate_tensor(identity)
            number, at = where[block, instance]
            base, count = bases[number]
            return base + at * count + position[self.parts[number].tensors[index]]

        def op_id(identity: int) -> int:
            block, instance, row = graph.locate_op(identity)
            number, at = where[block, instance]
            rows = self.parts[number].op_rows
            return op_bases[number] + at * len(rows) + self.parts[number].ops[row] - rows.start

        for number, part in enumerate(self.parts):
            for index in part.instances:
                made = graph.blocks[part.block].instances[index]
                builder.instance(
                    number, made.label, bindings=map(tensor_id, made.bindings),
                    op_bindings=map(op_id, made.op_bindings),
                )  # fmt: skip
        for program in graph.programs:
            calls = []
            for block, begin, end, instance, micro_batch in program.calls.tolist():
                number, at = where[block, instance]
                starts = self.parts[number].starts
                calls.append((number, starts[begin], starts[end], at, micro_batch))
            builder.program(
                calls,
                role=program.role,
                coordinates=program.coordinates,
                ranks=program.ranks,
                held=program.held,
            )
