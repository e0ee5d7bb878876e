"""The layers' blocks of a pipeline's job, and where their tensors and operations went.

A block of the step is written with its operations in the order of the parts that they run in, so that each part of
a layer is one call. Layers that bear the launch of a multi-tensor kernel on their stage, which no other operation
of the stage does, make a block of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder
from echograph.ir.columns import NONE
from echograph.ir.graph import StepGraph
from echograph.ir.passes.pipeline_placement import Placement
from echograph.ir.passes.pipeline_routes import Part
from echograph.ir.passes.rewrite import Call

Layer = tuple[int, int]
"""(block, instance) of the step."""


@dataclass(slots=True, kw_only=True)
class LayerBlock:
    """A block of the job.

    Attributes:
        block: the block of the step that it is made from.
        leads: operations of that block that bear a launch.
        instances: the instances of that block that it has, in order.
        number: its number in the job.
        places: position of each operation in the block, by its row in the step.
        begin: row of its first operation in the job.
        first_id: the id in the job of its first tensor, once all blocks are known.
        first_op_id: the same of its first operation.
    """

    block: int
    leads: frozenset[int]
    instances: list[int] = field(default_factory=list)
    number: int = 0
    places: dict[int, int] = field(default_factory=dict)
    begin: int = 0
    first_id: int = 0
    first_op_id: int = 0


class Layers:
    """All layers of the step.

    Args:
        graph: the step.
        parts: the part of each operation.
        leads: for layers that bear launches, the operations that do.
    """

    def __init__(self, graph: StepGraph, parts: list[Part], leads: dict[Layer, frozenset[int]]) -> None:
        self.graph, self.parts = graph, parts
        self.blocks: list[LayerBlock] = []
        self.of: dict[Layer, tuple[LayerBlock, int]] = {}
        self._runs: dict[tuple[int, int, Part], tuple[int, int] | None] = {}
        for number, block in enumerate(graph.blocks[1:], 1):
            alike: dict[frozenset[int], LayerBlock] = {}
            for index in range(len(block.instances)):
                led = leads.get((number, index), frozenset())
                made = alike.setdefault(led, LayerBlock(block=number, leads=led))
                self.of[number, index] = made, len(made.instances)
                made.instances.append(index)
            for made in alike.values():
                order = sorted(block.ops, key=parts.__getitem__)
                made.places = {row: place for place, row in enumerate(order)}
            self.blocks += alike.values()
        for number, made in enumerate(self.blocks, 1):  # the main block is that of the first chunk
            made.number = number

    def write(self, builder: GraphBuilder) -> None:
        """Writes all blocks, without their instances."""
        for made in self.blocks:
            builder.begin_block(self.graph.blocks[made.block].name)
            self._write(made, builder)

    def _write(self, made: LayerBlock, builder: GraphBuilder) -> None:
        block = self.graph.blocks[made.block]
        tensors = builder.tensor_count() - block.tensors.start
        for tensor in self.graph.tensors[block.tensors.start : block.tensors.stop]:
            alias = None if tensor.alias_of is None else tensor.alias_of + tensors
            builder.tensor(
                tensor.name, tensor.shape, tensor.dtype, tensor.role, alias_of=alias, port=tensor.port,
                sharded=tensor.sharded,
            )  # fmt: skip
        made.begin = builder.op_count()
        for row in made.places:
            op = self.graph.ops[row]
            changes: dict[str, object] = {
                "inputs": [tensor + tensors for tensor in op.inputs],
                "outputs": [tensor + tensors for tensor in op.outputs],
                "deps": [made.begin + made.places[before] for before in op.deps],
            }
            if isinstance(op, t.Compute) and op.forward_op is not None and op.forward_op >= 0:
                changes["forward_op"] = made.begin + made.places[op.forward_op]
            builder.add(with_lead(op, leads=row in made.leads), **changes)

    def number(self, first_id: int, first_op_id: int) -> tuple[int, int]:
        """Gives the blocks their ids, from the first ones on; returns those after them."""
        for made in self.blocks:
            made.first_id, made.first_op_id = first_id, first_op_id
            first_id += self.graph.tensor_bases[made.block][1] * len(made.instances)
            first_op_id += len(made.places) * len(made.instances)
        return first_id, first_op_id

    def tensor_id(self, layer: Layer, row: int) -> int:
        """The id in the job of a layer's own tensor, a row of the step's table."""
        made, index = self.of[layer]
        own = self.graph.tensor_bases[made.block][1]
        return made.first_id + index * own + int(self.graph.local_position[row])

    def op_id(self, layer: Layer, row: int) -> int:
        """The id in the job of a layer's operation, a row of the step's table."""
        made, index = self.of[layer]
        return made.first_op_id + index * len(made.places) + made.places[row]

    def begin(self, block: int) -> int:
        """Row of the first operation of a block of the job if it is a layers' block, else 0."""
        return self.blocks[block - 1].begin if 0 < block <= len(self.blocks) else 0

    def call(self, layer: Layer, begin: int, end: int, part: Part) -> Call | None:
        """What of a call of the step runs in a part; None where nothing does.

        Operations count from the first one of the block, whose row is known once the block is written (`begin`).
        """
        key = begin, end, part
        if key not in self._runs:
            rows = [row for row in range(begin, end) if self.parts[row] == part]
            self._runs[key] = (rows[0], rows[-1]) if rows else None
        run = self._runs[key]
        if run is None:
            return None
        made, index = self.of[layer]
        return made.number, made.places[run[0]], made.places[run[1]] + 1, index, 0


def with_lead(op: t.Op, *, leads: bool) -> t.Op:
    """The operation, bearing the launch that it shares with others or not."""
    if isinstance(op, t.Compute) and isinstance(op.attributes, t.MultiTensor) and op.attributes.leads != leads:
        return replace(op, attributes=replace(op.attributes, leads=leads))
    return op


def leaders(
    graph: StepGraph, placement: Placement, stages: int
) -> tuple[set[tuple[int, int]], dict[Layer, frozenset[int]]]:
    """Who bears the launches of multi-tensor kernels on each stage: one share of each launch does.

    Returns:
        (chunk, operation) of the main block, and the operations of layers on stages that have no share there.
    """
    main: dict[tuple[int, int], tuple[int, int]] = {}
    layers: dict[tuple[int, int], tuple[Layer, int]] = {}
    for (block, instance, row), launch in _launches(graph).items():
        if block:
            chunk = placement.instances[block, instance]
            layers.setdefault((chunk % stages, launch), ((block, instance), row))
        else:
            for chunk in sorted(placement.ops[row]):
                main.setdefault((chunk % stages, launch), (chunk, row))
    led: dict[Layer, frozenset[int]] = {}
    for where, (layer, row) in layers.items():
        if where not in main:
            led[layer] = led.get(layer, frozenset()) | {row}
    return set(main.values()), led


def _launches(graph: StepGraph) -> dict[tuple[int, int, int], int]:
    """For each (block, instance, operation) that shares a launch, which one; its first share leads."""
    shares = {i: v.leads for i, v in enumerate(graph.ops.attribute_values) if isinstance(v, t.MultiTensor)}
    found: dict[tuple[int, int, int], int] = {}
    launch, attributes = NONE, graph.ops.attributes.tolist()
    for block, begin, end, instance, _ in graph.programs[0].calls.tolist() if shares else ():
        for row in range(begin, end):
            if attributes[row] in shares:
                launch += shares[attributes[row]]
                found[block, instance, row] = launch
    return found
