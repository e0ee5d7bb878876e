"""Pipeline parallelism: the layers of a step on the stages of a pipeline, micro-batches flowing through them.

Stage s runs chunk s of the layers, or with interleaving chunks s, s + stages, ... (Narayanan et al., "Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021), or chunks that turn back at the
last stage (`schedules.ChunkOrder`), where what crosses from one to the next stays where it is. Else what crosses
from chunk to chunk is sent on a stream of its direction and received on another one, as separate NCCL operations
between neighbours; so a stage neither blocks its own work by sending nor orders what it receives by what it sends.

A schedule that splits backward runs gradients of weights in passes of their own (`placement.parts`). Clipping by
the norm of all gradients and fp16 loss scaling all-reduce one scalar over the stages
(`placement.OptimizerPlacer`).

A job has a block for each chunk, and those of the layers that it calls. A chunk's block is its part of the main
block, with what it receives and sends. Its rows stand in the order in which they run: receives, operations and
sends of forward, the same of backward, weight gradients, then what the optimizer needs. The layers stay blocks of
their own, called in between. `PipelineContext` is what all chunks have in common while they are written,
`StageCommunication` writes what stages say to each other.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import starmap, zip_longest
from math import prod
from typing import Any, ClassVar

import numpy as np

from echograph.errors import PlanError
from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder, copy_ops, copy_tensors
from echograph.ir.columns import NONE, Int64
from echograph.ir.graph import Axis, JobGraph, StepGraph, kept
from echograph.ir.passes.model import adds_up, axes_group, final_gradients
from echograph.ir.passes.pipeline.alike import AXIS, DISTINCT, StageNames
from echograph.ir.passes.pipeline.placement import (
    OptimizerPlacer,
    Partition,
    PipelinePhase,
    Routes,
    parts,
    place_operations,
    route,
)
from echograph.ir.passes.pipeline.schedules import (
    PAIRED,
    SPLIT,
    TURNING,
    Action,
    ChunkOrder,
    Computation,
    check_schedule,
    order,
    paired,
)
from echograph.ir.passes.rewrite import UPDATE, Call, PassLabel, accumulate, empty_copy, in_micro_batch
from echograph.ir.structure import Sized
from echograph.ir.types import Tensor, TensorRole

BlockInstance = tuple[int, int]
"""(block, instance) of the step."""
MAIN = -1
"""In place of a chunk: what is of the main block."""


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
        first_op_id: the id in the job of its first operation, once all blocks are known.
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
        written: the layers that are written; None: all.
    """

    def __init__(
        self,
        graph: StepGraph,
        parts: list[PipelinePhase],
        leads: dict[BlockInstance, frozenset[int]],
        written: Container[BlockInstance] | None = None,
    ) -> None:
        self.graph, self.parts = graph, parts
        self.blocks: list[LayerBlock] = []
        self.of: dict[BlockInstance, tuple[LayerBlock, int]] = {}
        self._runs: dict[tuple[int, int, PipelinePhase], tuple[int, int] | None] = {}
        for number, block in enumerate(graph.blocks[1:], 1):
            alike: dict[frozenset[int], LayerBlock] = {}
            for index in range(len(block.instances)):
                if written is not None and (number, index) not in written:
                    continue
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
        graph = self.graph
        block = graph.blocks[made.block]
        made.begin = builder.op_count()
        tensors = np.arange(len(graph.tensors)) + (builder.tensor_count() - block.tensors.start)
        rows, ops = np.array(list(made.places), np.int64), np.full(len(graph.ops), NONE)
        ops[rows] = made.begin + np.arange(len(rows))
        shares = [i for i, value in enumerate(graph.ops.attribute_values) if isinstance(value, t.MultiTensor)]
        launches = rows[np.isin(graph.ops.attributes[rows], shares)].tolist()
        led = {row: with_lead(graph.op(row), leads=row in made.leads) for row in launches}
        attributes = {row: op.attributes for row, op in led.items() if isinstance(op, t.Compute) and op.attributes}
        copy_tensors(builder, graph, block.tensors, tensors)
        copy_ops(builder, graph, rows, tensors, ops, attributes)

    def number(self, first_id: int, first_op_id: int) -> tuple[int, int]:
        """Gives the blocks their ids, from the first ones on; returns those after them."""
        for made in self.blocks:
            made.first_id, made.first_op_id = first_id, first_op_id
            first_id += self.graph.tensor_bases[made.block][1] * len(made.instances)
            first_op_id += len(made.places) * len(made.instances)
        return first_id, first_op_id

    def tensor_id(self, layer: BlockInstance, row: int) -> int:
        """The id in the job of a layer's own tensor, a row of the step's table."""
        made, index = self.of[layer]
        own = self.graph.tensor_bases[made.block][1]
        return made.first_id + index * own + int(self.graph.local_position[row])

    def op_id(self, layer: BlockInstance, row: int) -> int:
        """The id in the job of a layer's operation, a row of the step's table."""
        made, index = self.of[layer]
        return made.first_op_id + index * len(made.places) + made.places[row]

    def begin(self, block: int) -> int:
        """Row of the first operation of a block of the job if it is a layers' block, else 0."""
        return self.blocks[block - 1].begin if 0 < block <= len(self.blocks) else 0

    def call(self, layer: BlockInstance, begin: int, end: int, part: PipelinePhase) -> Call | None:
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
    graph: StepGraph, placement: Partition, where: ChunkOrder
) -> tuple[set[tuple[int, int]], dict[BlockInstance, frozenset[int]]]:
    """Who bears the launches of multi-tensor kernels on each stage: one share of each launch does.

    Returns:
        (chunk, operation) of the main block, and the operations of layers on stages that have no share there.
    """
    main: dict[tuple[int, int], tuple[int, int]] = {}
    layers: dict[tuple[int, int], tuple[BlockInstance, int]] = {}
    stage = [where.stage(chunk) for chunk in range(placement.chunks)]
    for (block, instance, row), launch in _launches(graph).items():
        if block:
            chunk = placement.instances[block, instance]
            layers.setdefault((stage[chunk], launch), ((block, instance), row))
        else:
            for chunk in sorted(placement.ops[row]):
                main.setdefault((stage[chunk], launch), (chunk, row))
    led: dict[BlockInstance, frozenset[int]] = {}
    for key, (layer, row) in layers.items():
        if key not in main:
            led[layer] = led.get(layer, frozenset()) | {row}
    return set(main.values()), led


@kept
def _launches(graph: StepGraph) -> dict[tuple[int, int, int], int]:
    """For each (block, instance, operation) that shares a launch, which one, of a layer for its first share alone.

    The first share of all leads.
    """
    shares = {i: v.leads for i, v in enumerate(graph.ops.attribute_values) if isinstance(v, t.MultiTensor)}
    found: dict[tuple[int, int, int], int] = {}
    known: set[tuple[int, int, int]] = set()
    launch, attributes = NONE, graph.ops.attributes.tolist()
    for block, begin, end, instance, _ in graph.programs[0].calls.tolist() if shares else ():
        for row in range(begin, end):
            if attributes[row] in shares:
                launch += shares[attributes[row]]
                if block == 0 or (block, instance, launch) not in known:
                    known.add((block, instance, launch))
                    found[block, instance, row] = launch
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineContext:
    """A step and where it goes. "Ids" are those of the step.

    Attributes:
        graph: the step.
        placement: which chunk runs what.
        routes: what crosses between chunks.
        parts: the part of every operation.
        layers: the layers' blocks.
        leads: (chunk, operation of the main block) that bear a launch on their stage.
        leading_layers: for layers that bear launches, the operations that do.
        where: on which stage each chunk is.
        group: the group of the stages.
        shared: for every gradient that chunks share, the group that all-reduces it; None where two exchange it.
        sharers: ranks that send a share each of what crosses between chunks, as all of them have it.
        names: patterns of what depends on the stage in names, where stages stand for others.
        lost: ids of operations that are named, and of layers for which others stand.
    """

    graph: StepGraph
    placement: Partition
    routes: Routes
    parts: list[PipelinePhase]
    layers: Layers
    leads: set[tuple[int, int]]
    leading_layers: dict[BlockInstance, frozenset[int]]
    where: ChunkOrder
    group: int
    shared: dict[int, int | None]
    sharers: int = 1
    names: StageNames | None = None
    _calls: dict[int, list[tuple[int, Call]]] = field(default_factory=dict, init=False)
    _layers: dict[int, list[BlockInstance]] = field(default_factory=dict, init=False)
    lost: list[int] = field(default_factory=list, init=False)

    def tensor(self, row: int) -> t.Tensor:
        """A tensor of the step."""
        return self.graph.tensor(row)

    def calls_of(self, chunk: int) -> list[tuple[int, Call]]:
        """The calls of the step, each with its number, of the main block and of a chunk's layers."""
        if not self._calls:
            self._calls[MAIN] = []
            for number, (block, begin, end, instance, micro_batch) in enumerate(
                self.graph.programs[0].calls.tolist()
            ):
                where = self.placement.instances[block, instance] if block else MAIN
                its = self._calls.setdefault(where, [])
                its.append((number, (block, begin, end, instance, micro_batch)))
        return sorted([*self._calls[MAIN], *self._calls.get(chunk, [])])

    def layers_in(self, chunk: int) -> list[BlockInstance]:
        """The layers of a chunk, block by block."""
        if not self._layers:
            for layer, where in self.placement.instances.items():
                self._layers.setdefault(where, []).append(layer)
        return self._layers.get(chunk, [])

    def is_flag(self, tensor: int) -> bool:
        """Whether a tensor id is a version of a flag that is handed through all stages."""
        flags = self.placement.flag_memory
        return bool(flags) and self.graph.owner(*self.graph.locate_tensor(tensor)) in flags

    def version(self, tensor: int, stage: int) -> int:
        """The last version of a flag that a stage makes, up to the one asked for; any other tensor is itself."""
        if not self.is_flag(tensor):
            return tensor
        graph, place = self.graph, self.graph.locate_tensor(tensor)
        while True:
            block, instance, row = graph.value(*place)
            maker = int(graph.maker[row])
            if maker == NONE or self.runs(stage, (block, instance, maker)):
                return graph.tensor_id(block, instance, row)
            place = block, instance, int(graph.tensors.alias_of[row])

    def runs(self, stage: int, place: tuple[int, int, int]) -> bool:
        """Whether a stage runs (block, instance, operation)."""
        return any(self.where.stage(chunk) == stage for chunk in self.placement.of(place))

    def stays(self, border: int) -> bool:
        """Whether the chunk before a border, which is numbered as the one after it, is on the same stage."""
        return 0 < border < self.placement.chunks and self.where.stage(border - 1) == self.where.stage(border)

    def handed(self, number: int) -> Iterator[int]:
        """Ids of what a chunk is given by its neighbours on its own stage."""
        if self.stays(number):
            yield from self.routes.up[number]
        if self.stays(number + 1):
            yield from self.routes.down[number]

    def has(self, stage: int, tensor: int) -> bool:
        """Whether the optimizer has a tensor on a stage."""
        source = self.graph.source(*self.graph.locate_tensor(tensor))
        return source is None or self.runs(stage, source) or self.is_flag(tensor)

    def of_stages(self, stages: Container[int]) -> PipelineContext:
        """The same with the layers of some stages alone, which stand for others."""
        at, first = self.where.stage, dict[tuple[int, int], int]()
        for (block, instance), chunk in self.placement.instances.items():
            first.setdefault((chunk, block), instance)
        written = {layer for layer, chunk in self.placement.instances.items() if at(chunk) in stages}
        labels = {
            number: tuple(instance.label for instance in block.instances)
            for number, block in enumerate(self.graph.blocks)
        }
        return replace(
            self,
            layers=Layers(self.graph, self.parts, self.leading_layers, written),
            names=StageNames(first=first, labels=labels),
        )

    def label(self, chunk: int, block: int, instance: int) -> str:
        """The label of a layer, as a chunk names it."""
        if self.names is None:
            return self.graph.blocks[block].instances[instance].label
        return self.names.layer(chunk, block, instance, self.placement.instances[block, instance])

    def stages_alike(self) -> list[int]:
        """For every stage the first that does the same on layers of its own, as far from the stages around it.

        The first stage and the last stand for themselves.
        """
        found: dict[object, int] = {}
        count = self.where.stages
        ends = (0, count - 1)
        base: dict[tuple[int, int], int] = {}
        mine: dict[int, list[BlockInstance]] = {}
        for (block, instance), chunk in self.placement.instances.items():
            base.setdefault((chunk, block), instance)
            mine.setdefault(chunk, []).append((block, instance))
        rows: dict[int, list[int]] = {}
        for row, chunks in self.placement.ops.items():
            for chunk in chunks:
                rows.setdefault(chunk, []).append(row)
        stood = []
        for stage in range(count):
            own = self.where.chunks(stage, self.placement.chunks)
            what = [self._chunk_alike(chunk, mine.get(chunk, []), rows.get(chunk, []), base) for chunk in own]
            stood.append(found.setdefault((stage if stage in ends else -1, *what), stage))
        return stood

    def _chunk_alike(
        self, number: int, layers: list[BlockInstance], rows: list[int], base: dict[tuple[int, int], int]
    ) -> object:
        """What a chunk holds, and is given, with layers and chunks counted from its own."""
        graph, placement = self.graph, self.placement

        def place(block: int, instance: int, row: int) -> tuple[int, ...]:
            if not block:
                return (row,)
            chunk = placement.instances[block, instance]
            return block, chunk - number, instance - base.get((number, block), base[chunk, block]), row

        def tensor_places(ids: Iterable[int]) -> tuple[object, ...]:
            return tuple(starmap(place, map(graph.locate_tensor, ids)))

        def instances() -> Iterator[object]:
            for layer in layers:
                its, where = graph.blocks[layer[0]].instances[layer[1]], self.layers.of[layer][0]
                ops = tuple(starmap(place, map(graph.locate_op, its.op_bindings)))
                yield layer[0], where.leads, tensor_places(its.bindings), ops

        up, down = self.routes.up, self.routes.down
        below = down[number - 1 : number] if number else ()
        crossing = (up[number : number + 1], up[number + 1 : number + 2], down[number : number + 1], below)
        return (
            tuple(sorted(rows)),
            tuple(instances()),
            tuple(tuple(map(tensor_places, side)) for side in crossing),
            tuple(row for row in sorted(rows) if (number, row) in self.leads),
            tuple(gradient for chunk, gradient in self.placement.shares if chunk == number),
            tuple(map(tensor_places, self._stagewide_inputs(number))),
        )

    def _stagewide_inputs(self, chunk: int) -> Iterator[list[int]]:
        """Ids of what a stage has of the inputs of operations that every stage runs, in its first chunk."""
        graph = self.graph
        for row in sorted(self.placement.stagewide) if chunk < self.where.stages else ():
            inputs = (graph.tensor_id(0, 0, tensor) for tensor in graph.ops.inputs.row(row))
            yield [tensor for tensor in inputs if self.has(chunk, tensor)]

    def exchanges(self, chunks: list[Chunk]) -> frozenset[int]:
        """Rows of the job's operations that exchange rows of experts."""
        graph = self.graph
        rows = [row for row in range(len(graph.ops)) if graph.strings[graph.ops.name[row]] == EXCHANGE]
        layers = (
            made.begin + made.places[row] for made in self.layers.blocks for row in rows if row in made.places
        )
        return frozenset((*layers, *(chunk.ops[row] for chunk in chunks for row in rows if row in chunk.ops)))

    def is_late(self, tensor: int) -> bool:
        """Whether the optimizer makes a tensor, when all chunks of a stage are done."""
        source = self.graph.source(*self.graph.locate_tensor(tensor))
        return source is not None and self.parts[source[2]] == PipelinePhase.UPDATE


TENSOR = "tp"
EXCHANGE = "ep.all_to_all"
"""Name of what takes rows to experts, or home."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCommunication:
    """Writes the communications of a chunk.

    Attributes:
        builder: the builder, with the chunk's block open.
        number: which chunk.
        where: on which stage each chunk is.
        group: the group of the stages.
    """

    builder: GraphBuilder
    number: int
    where: ChunkOrder
    group: int

    def send(
        self, row: int, nbytes: int, other: int, tag: int, what: str, phase: t.Phase, payload: t.Payload
    ) -> int:
        """Sends a tensor to the stage of another chunk."""
        return self.builder.send(
            f"{AXIS}.send_{what}", group=self.group, peer=self._peer(other), tag=tag, nbytes=nbytes,
            payload=payload, phase=phase, inputs=(row,), stream=self._stream(other, f"{what}.send"),
        )  # fmt: skip

    def receive(
        self, row: int, nbytes: int, other: int, tag: int, what: str, phase: t.Phase, payload: t.Payload
    ) -> int:
        """Receives a tensor from the stage of another chunk."""
        return self.builder.recv(
            f"{AXIS}.recv_{what}", group=self.group, peer=self._peer(other), tag=tag, nbytes=nbytes,
            payload=payload, phase=phase, outputs=(row,), stream=self._stream(other, f"{what}.recv"),
        )  # fmt: skip

    def _stream(self, other: int, what: str) -> int:
        """Of chunks on their way back another one: what goes either way waits for other neighbours."""
        back = self.where.turns and min(self.number, other) >= self.where.stages
        return self.builder.stream(f"comm.{AXIS}.{'back.' if back else ''}{what}")

    def _peer(self, other: int) -> int:
        return self.where.stage(other) - self.where.stage(self.number)

    def all_reduce(
        self, row: int, tensor: t.Tensor, group: int, what: str, phase: t.Phase, payload: t.Payload, *made: int
    ) -> int:
        """All-reduces a tensor in place; `made` is its next version, where that has a name."""
        return self.builder.collective(
            f"{AXIS}.all_reduce_{what}", t.CollectiveKind.ALL_REDUCE, group=group, bytes_per_rank=tensor.nbytes,
            dtype=tensor.dtype, payload=payload, asynchronous=True, phase=phase, inputs=(row,), outputs=made,
            stream=self.builder.stream(f"comm.{AXIS}.{what}"),
        )  # fmt: skip

    def wait(self, ops: list[int], phase: t.Phase) -> int:
        """The compute stream waits for communications."""
        return self.builder.compute(f"{AXIS}.wait", phase=phase, deps=ops)


Moment = tuple[int, int, int]
"""When something runs within a part: call of the step, operation of the step, before (0) or after (1) it."""
_PHASES = {PipelinePhase.FORWARD: t.Phase.FORWARD, PipelinePhase.BACKWARD: t.Phase.BACKWARD}
_FIRST, _LAST = (-1, 0, 0), (2**31, 0, 0)


@dataclass(slots=True, kw_only=True)
class Chunk:
    """The block of a chunk as it is written. "Ids" are those of the step.

    Attributes:
        plan: what all chunks have in common.
        number: which chunk.
        builder: the builder, with the chunk's block open.
        block: number of that block.
        rows: new row of each tensor in the block, by id.
        own: position of these rows among those that are no ports.
        ports: ids of the tensors of layers, and of other chunks of the stage, that the ports stand for.
        ops: new row of each operation, by its row in the step.
        forward_ops: ids of the operations elsewhere that are named as forward operations.
        calls: what runs in each part, and when; operations of layers count from the first of their block.
        names: for rows that hold a share of a gradient, the gradient's name.
        shapes: shapes of what is shorter on one stage than in the step, by id.
        siblings: the other chunks of the stage.
        handed: ids of what the chunk is given by neighbours on its own stage.
        like: for rows that the pass adds, the row of the step whose shape they have.
        written: rows of all operations of the block.
        first_id: the id in the job of the block's first tensor, once all blocks are known.
        first_op_id: the same of its first operation.
    """

    plan: PipelineContext
    number: int
    builder: GraphBuilder
    block: int
    rows: dict[int, int] = field(default_factory=dict)
    own: dict[int, int] = field(default_factory=dict)
    ports: list[int] = field(default_factory=list)
    ops: dict[int, int] = field(default_factory=dict)
    forward_ops: list[int] = field(default_factory=list)
    calls: dict[PipelinePhase, list[tuple[Moment, Call]]] = field(
        default_factory=lambda: {part: [] for part in PipelinePhase}
    )
    names: dict[int, str] = field(default_factory=dict)
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    siblings: list[Chunk] = field(default_factory=list)
    handed: frozenset[int] = field(init=False)
    like: dict[int, int] = field(default_factory=dict)
    written: range = range(0)
    first_id: int = 0
    first_op_id: int = 0

    def __post_init__(self) -> None:
        self.handed = frozenset(self.plan.handed(self.number))

    @property
    def stage(self) -> int:
        """The stage that the chunk is on."""
        return self.plan.where.stage(self.number)

    @property
    def links(self) -> StageCommunication:
        """Writes communications into the block."""
        plan = self.plan
        return StageCommunication(builder=self.builder, number=self.number, where=plan.where, group=plan.group)

    def write(self) -> None:
        """Writes all rows, and the calls that run them and the layers."""
        graph = self.plan.graph
        first = self.builder.op_count()
        self._name_shares()
        own = self.plan.calls_of(self.number)
        for part in PipelinePhase:
            self._run(part, _FIRST, self._begin(part))
            for number, (block, begin, end, instance, _) in own:
                if block == 0:
                    self._main(part, number, range(begin, end))
                else:
                    call = self.plan.layers.call((block, instance), begin, end, part)
                    self.calls[part] += [((number, begin, 0), call)] if call else []
            self._run(part, _LAST, self._end(part))
        for block, instance in self.plan.layers_in(self.number):
            for bound in graph.blocks[block].instances[instance].bindings:
                if not self.has_layer_of(bound):
                    self.tensor(bound)
        for tensor in _untouched(graph) if self.number == 0 else ():
            self.tensor(tensor)
        self.written = range(first, self.builder.op_count())

    def _main(self, part: PipelinePhase, number: int, rows: range) -> None:
        """Writes the chunk's operations of a call of the main block."""
        placement, stages = self.plan.placement, self.plan.where.stages
        completed = placement.totals | placement.flags.keys()
        for row in rows:
            if self.plan.parts[row] != part:
                continue
            if self.number in placement.ops[row]:
                self._run(part, (number, row, 0), [self._op(row)])
            if row in completed and self.number < stages > 1:
                self._run(part, (number, row, 1), self._complete(row))

    def _run(self, part: PipelinePhase, when: Moment, ops: list[int]) -> None:
        if ops:
            self.calls[part].append((when, (self.block, ops[0], ops[-1] + 1, 0, 0)))

    # -- calls ---------------------------------------------------------------------------------------------

    def timed(self, part: PipelinePhase) -> list[tuple[Moment, Call]]:
        """What runs in a part, and when, once all blocks are written."""
        begin = self.plan.layers.begin
        return [
            (when, (block, x + begin(block), y + begin(block), instance, 0))
            for when, (block, x, y, instance, _) in self.calls[part]
        ]

    def has_layer_of(self, tensor: int) -> bool:
        """Whether a tensor is of a layer of this chunk, or of what the stage's optimizer makes in another's."""
        block, instance, _ = self.plan.graph.locate_tensor(tensor)
        if not block:
            return False
        chunk = self.plan.placement.instances[block, instance]
        if chunk == self.number or tensor in self.handed:
            return True
        return self.plan.where.stage(chunk) == self.stage and self.plan.is_late(tensor)

    # -- communication -------------------------------------------------------------------------------------

    def _begin(self, part: PipelinePhase) -> list[int]:
        routes = self.plan.routes
        if part == PipelinePhase.UPDATE:
            return self._add_shares_up()
        if part == PipelinePhase.WEIGHT:
            return []
        border, crossing = (
            (self.number, routes.up) if part == PipelinePhase.FORWARD else (self.number + 1, routes.down)
        )
        received = () if self.plan.stays(border) else crossing[self.number]
        ops = [self._receive(tensor, part) for tensor in received]
        if ops and self.plan.sharers > 1:
            gathers = [self._gather(recv, tensor, part) for recv, tensor in zip(ops, received, strict=True)]
            return [*ops, *gathers, self.links.wait([*ops, *gathers], _PHASES[part])]
        # All of the pass waits, also what it recomputes, as it does in torch and Megatron-LM.
        return [*ops, self.links.wait(ops, _PHASES[part])] if ops else ops

    def _end(self, part: PipelinePhase) -> list[int]:
        plan, sent = self.plan, tuple[int, ...]()
        if part == PipelinePhase.FORWARD and self.number + 1 < plan.placement.chunks:
            sent = () if plan.stays(self.number + 1) else plan.routes.up[self.number + 1]
        elif part == PipelinePhase.BACKWARD and self.number > 0:
            sent = () if plan.stays(self.number) else plan.routes.down[self.number - 1]
        return [self._send(tensor, part) for tensor in sent]

    def _receive(self, tensor: int, part: PipelinePhase) -> int:
        value = self.value(tensor)
        made = self._add(tensor, replace(value, role=t.TensorRole.ACTIVATION, port=False, alias_of=None))
        other = self.number - 1 if part == PipelinePhase.FORWARD else self.number + 1
        return self.links.receive(made, self._sent_bytes(value), other, *self._line(other, part))

    def _sent_bytes(self, value: t.Tensor) -> int:
        """Bytes of a tensor that a rank sends, where those that have the same share that."""
        return -(-value.nbytes // self.plan.sharers)

    def _gather(self, recv: int, tensor: int, part: PipelinePhase) -> int:
        """Gathers a received tensor from the tensor-parallel ranks, which have a shard each."""
        value, (group, stream) = self.value(tensor), axes_group(self.builder, (TENSOR,))
        return self.builder.collective(
            f"{AXIS}.all_gather", t.CollectiveKind.ALL_GATHER, group=group, bytes_per_rank=value.nbytes,
            dtype=value.dtype, payload=t.Payload.ACTIVATION, asynchronous=True, phase=_PHASES[part], stream=stream,
            deps=(recv,),
        )  # fmt: skip

    def _send(self, tensor: int, part: PipelinePhase) -> int:
        other = self.number + 1 if part == PipelinePhase.FORWARD else self.number - 1
        nbytes = self._sent_bytes(self.value(tensor))
        return self.links.send(self.tensor(tensor), nbytes, other, *self._line(other, part))

    def _line(self, other: int, part: PipelinePhase) -> tuple[int, str, t.Phase, t.Payload]:
        """Tag, label, phase and payload of what a pass says to another chunk."""
        return 2 * min(other, self.number) + part, part.name.lower(), _PHASES[part], t.Payload.ACTIVATION

    def _add_shares_up(self) -> list[int]:
        """Adds what other chunks have of the gradients that it shares with them."""
        shares, plan, links = self.plan.placement.shares, self.plan, self.links
        mine = [gradient for chunk, gradient in shares if chunk == self.number]
        ops = []
        for gradient in mine:
            if (group := plan.shared[gradient]) is not None:
                about = "shared_gradient", t.Phase.OPTIMIZER, t.Payload.GRADIENT
                ops.append(links.all_reduce(self._share(gradient), plan.graph.tensors[gradient], group, *about))
        if ops:
            ops.append(links.wait(ops, t.Phase.OPTIMIZER))
        for gradient in mine:
            if plan.shared[gradient] is None:
                (other,) = (chunk for chunk, its in shares if its == gradient and chunk != self.number)
                ops += self._exchange(gradient, other)
        return ops

    def _exchange(self, gradient: int, other: int) -> list[int]:
        """An all-reduce of two stages out of more, which no group of axes can say: both send, and both add."""
        value, builder, share = self.plan.graph.tensors[gradient], self.builder, self._share(gradient)
        tag = 2 * self.plan.placement.chunks + sorted(self.plan.shared).index(gradient)
        about = value.nbytes, other, tag, "shared_gradient", t.Phase.OPTIMIZER, t.Payload.GRADIENT
        theirs = builder.tensor(f"{value.name}.of_{other}", value.shape, value.dtype, t.TensorRole.ACTIVATION)
        self.own[theirs], self.like[theirs] = len(self.own), gradient
        send, recv = self.links.send(share, *about), self.links.receive(theirs, *about)
        add = builder.compute(
            "aten.add_",
            phase=t.Phase.OPTIMIZER,
            inputs=(share, theirs),
            deps=(send,),
            bytes_read=2 * value.nbytes,
            bytes_written=value.nbytes,
        )
        return [send, recv, add]

    def _share(self, gradient: int) -> int:
        """New row of the chunk's share of a gradient."""
        share = self.plan.placement.shares[self.number, gradient]
        return self.tensor(self.plan.graph.tensor_id(0, 0, share))

    def _complete(self, row: int) -> list[int]:
        """All-reduces the stage's share of what an operation makes over the stages, in place."""
        plan = self.plan
        tensor = plan.placement.flags.get(row, plan.graph.tensor_id(0, 0, plan.graph.ops.outputs.row(row)[0]))
        what = "overflow" if row in plan.placement.flags else "norm"
        share, value = self.tensor(tensor), self.value(tensor)
        about = value, plan.group, what, t.Phase.OPTIMIZER, t.Payload.OTHER
        total = self.builder.tensor(value.name, value.shape, value.dtype, value.role, alias_of=share)
        self.own[total], self.like[total] = len(self.own), plan.graph.locate_tensor(tensor)[2]
        reduced = self.links.all_reduce(share, *about, total)
        return [reduced, self.links.wait([reduced], t.Phase.OPTIMIZER)]

    # -- rows ----------------------------------------------------------------------------------------------

    def _op(self, row: int) -> int:
        graph = self.plan.graph
        op = with_lead(graph.op(row), leads=(self.number, row) in self.plan.leads)
        deps = op.deps
        if op.phase == t.Phase.FORWARD and len(self.plan.placement.ops[row]) > 1:
            # What hangs on no layer runs on every chunk that reads it: what it comes after is not on all of them.
            deps = tuple(before for before in deps if before in self.ops)
        if not set(deps) <= self.ops.keys():
            raise PlanError(
                f"operation {row} ({op.name}) waits for one of another pipeline stage: use fewer stages"
            )
        changes = self._share_of(op) if row in self.plan.placement.stagewide else {}
        changes["inputs"] = [self._read(tensor) for tensor in changes.get("inputs", op.inputs)]
        changes["outputs"] = [self.tensor(graph.tensor_id(0, 0, tensor)) for tensor in op.outputs]
        changes["deps"] = [self.ops[before] for before in deps]
        if isinstance(op, t.Compute) and op.forward_op is not None:
            changes["forward_op"] = self._forward_op(op.forward_op)
        self.ops[row] = self.builder.add(op, **changes)
        return self.ops[row]

    def _share_of(self, op: t.Op) -> dict[str, Any]:
        """What changes where a stage has a part of what an operation reads: a stack of that is shorter."""
        graph, plan = self.plan.graph, self.plan
        inputs = [i for i in op.inputs if plan.has(self.stage, graph.tensor_id(0, 0, i))]
        for tensor in op.outputs:
            shape = graph.tensors[tensor].shape
            if len(inputs) < len(op.inputs) and shape[:1] == (len(op.inputs),):
                self.shapes[graph.tensor_id(0, 0, tensor)] = (len(inputs), *shape[1:])
        changes: dict[str, Any] = {"inputs": inputs}
        for name, before, now in (("bytes_read", op.inputs, inputs), ("bytes_written", op.outputs, op.outputs)):
            if isinstance(op, t.Compute) and getattr(op, name) == sum(graph.tensors[i].nbytes for i in before):
                changes[name] = sum(self.value(graph.tensor_id(0, 0, i)).nbytes for i in now)
        return changes

    def _forward_op(self, forward: int) -> int:
        graph = self.plan.graph
        if forward in self.ops:
            return self.ops[forward]
        if forward >= 0:
            forward_id = graph.op_id(0, 0, forward)
        else:
            forward_id = graph.blocks[0].instances[0].op_bindings[-2 - forward]
        if forward_id not in self.forward_ops:
            self.forward_ops.append(forward_id)
        return -2 - self.forward_ops.index(forward_id)

    def _read(self, row: int) -> int:
        """New row of a tensor of the main block; of the chunk's own terms, where it is a sum over chunks."""
        term = self.plan.placement.terms.get((self.number, row), row)
        return self.tensor(self.plan.graph.tensor_id(0, 0, term))

    def tensor(self, tensor: int) -> int:
        """New row of a tensor, by its id in the step: a copy of the main block's, a port for what is elsewhere.

        Raises:
            PlanError: it is made elsewhere and does not come here.
        """
        if tensor not in self.rows:
            version = self.plan.version(tensor, self.stage)
            if version == tensor:
                self._admit(tensor)
            else:
                self.rows[tensor] = self.tensor(version)
        return self.rows[tensor]

    def _admit(self, tensor: int) -> None:
        graph, value = self.plan.graph, self.value(tensor)
        block, _, row = graph.locate_tensor(tensor)
        maker = int(graph.maker[row])
        mine = block == 0 and (maker == NONE or self.number in self.plan.placement.ops[maker])
        if not mine:
            sibling = block == 0 and self.plan.is_late(tensor) and self.plan.runs(self.stage, (0, 0, maker))
            if not sibling and tensor not in self.handed and not self.has_layer_of(tensor):
                raise PlanError(f"tensor {value.name} is not on pipeline chunk {self.number}: use fewer stages")
            self.ports.append(tensor)
            role = value.role if value.role.persistent else t.TensorRole.ACTIVATION
            self._add(tensor, replace(value, role=role, port=True, alias_of=None))
            return
        alias = None if value.alias_of is None else self.tensor(graph.tensor_id(0, 0, value.alias_of))
        if row in self.names:  # a share stands for the gradient, so it lives as long
            value = replace(value, name=self.names[row], role=t.TensorRole.GRADIENT)
        self._add(tensor, replace(value, alias_of=alias))

    def _add(self, tensor: int, value: t.Tensor) -> int:
        row = self.builder.tensor(
            value.name,
            value.shape,
            value.dtype,
            value.role,
            alias_of=value.alias_of,
            port=value.port,
            sharded=value.sharded,
        )
        self.rows[tensor] = row
        if not value.port:
            self.own[row] = len(self.own)
        return row

    def new_id(self, tensor: int) -> int:
        """The id in the job of a tensor that the block, a layer or another chunk of the stage owns."""
        tensor = tensor if tensor in self.rows else self.plan.version(tensor, self.stage)
        for chunk in (self, *self.siblings):
            row = chunk.rows.get(tensor)
            if row in chunk.own:
                return chunk.first_id + chunk.own[row]
        version = self.plan.version(tensor, self.stage)
        block, instance, row = self.plan.graph.locate_tensor(version)
        return self.plan.layers.tensor_id((block, instance), row) if block else self.new_id(version)

    def value(self, tensor: int) -> t.Tensor:
        """A tensor of the step with the name that it has in its instance, and the shape that it has here."""
        graph = self.plan.graph
        block, instance, row = graph.locate_tensor(tensor)
        value = self.plan.tensor(row)
        name = value.name.replace("{}", self.plan.label(self.number, block, instance)) if block else value.name
        shape = self.shapes.get(tensor, value.shape)
        return value if (name, shape) == (value.name, value.shape) else replace(value, name=name, shape=shape)

    def _name_shares(self) -> None:
        graph = self.plan.graph
        for (chunk, gradient), share in self.plan.placement.shares.items():
            row = share
            while chunk == self.number and row not in (gradient, NONE):
                self.names[row] = graph.tensors[gradient].name
                row = int(graph.tensors.alias_of[row])


def in_order(calls: Iterable[tuple[Moment, Call]]) -> list[Call]:
    """Calls in the order of their moments; those that go on where one ended join it."""
    found: list[Call] = []
    for _, (block, begin, end, instance, _) in sorted(calls):
        if found and found[-1][:4:3] == (block, instance) and found[-1][2] == begin:
            begin = found.pop()[1]
        found.append((block, begin, end, instance, 0))
    return found


def interleaved(first: list[Call], second: list[Call], exchanges: Container[int]) -> list[Call]:
    """Two passes as one: after each exchange that one has begun, what the other does up to its next.

    Megatron-Core's `overlap_moe_expert_parallel_comm` runs a backward and a forward so, layer by layer: the
    combine of the backward beside attention of the forward, then the dispatch of the forward beside the experts'
    backward, and so on.

    Args:
        first: calls of the pass that begins.
        second: calls of the other.
        exchanges: rows of the job's operations that exchange.
    """
    segments = zip_longest(_cut(first, exchanges), _cut(second, exchanges), fillvalue=())
    return [call for pair in segments for segment in pair for call in segment]


def _cut(calls: list[Call], after: Container[int]) -> list[list[Call]]:
    """Calls in segments, each but the last of which ends with an operation of `after`."""
    segments: list[list[Call]] = [[]]
    for block, begin, end, instance, micro_batch in calls:
        for row in range(begin, end):
            if row in after:
                segments[-1].append((block, begin, row + 1, instance, micro_batch))
                segments.append([])
                begin = row + 1
        if begin < end:
            segments[-1].append((block, begin, end, instance, micro_batch))
    return segments


def _untouched(graph: StepGraph) -> Iterator[int]:
    """Tensors of the main block that nothing reads or makes, such as an unused parameter."""
    bound = {b for block in graph.blocks[1:] for instance in block.instances for b in instance.bindings}
    touched = set(graph.ops.inputs.values.tolist()) | set(graph.tensors.alias_of.tolist())
    for row in graph.blocks[0].tensors:
        if graph.maker[row] == NONE and not graph.tensors.port[row] and row not in touched:
            tensor = graph.tensor_id(0, 0, row)
            if tensor not in bound:
                yield tensor


MAX_STAGES = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagesAlike:
    """The stages of a pipeline that differ (`Pipeline.alike`).

    Attributes:
        job: a program for each of them, ascending.
        labels: for each program, the pass that each of its calls is of; `UPDATE` for the optimizer's.
        stand_for: for every stage of the pipeline, the stage that stands for it.
        sized: the job for any step of the same structure; None where that is not known.
        names: of what depends on the stage in names; None where one of them is lost.
    """

    job: JobGraph
    labels: list[list[PassLabel]]
    stand_for: tuple[int, ...]
    sized: Sized | None
    names: StageNames | None

    def of_step(self, step: StepGraph) -> StagesAlike:
        """The same of another step of the structure of the one that it was made of (`ir.structure`)."""
        assert self.sized is not None
        return replace(self, job=self.sized.of_graph(step))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Lowers a folded step graph to a job with one program for each pipeline stage.

    Attributes:
        stages: number of stages, the size of the mesh axis "pp".
        micro_batches: forward and backward passes before the optimizer; gradients add up.
        schedule: a name of `schedules.SCHEDULES`.
        chunks: chunks of layers on each stage; more than one for "interleaved" only, two for those that turn.
        layers: layers of each chunk in the order of the model; None splits evenly, and the first chunks take one
            more where it does not divide. The first may have 0, then it has the embedding alone, and so may the
            last.
        overlap_experts: whether a forward and the backward beside it run as one pass (`schedules.paired`),
            in which either computes while the other exchanges rows of experts (`interleaved`).
        scatter_gather: each tensor-parallel rank sends a piece of an activation that all of them have, and those
            of the next stage gather it (Narayanan et al. 2021, section 4.1).
    """

    name: ClassVar[str] = "pipeline"

    stages: int
    micro_batches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    layers: tuple[int, ...] | None = None
    overlap_experts: bool = False
    scatter_gather: bool = False

    def __call__(self, graph: StepGraph) -> JobGraph:
        """The job graph.

        Raises:
            PlanError: the plan does not fit the schedule or the model, or the step combines values of several
                stages in a way that a pipeline cannot, as an optimizer kernel over all parameters would.
            UnknownNameError: no such schedule.
        """
        plan, builder = self._context(graph)
        stages = range(self.stages)
        chunks = _write(plan, builder, stages)
        for stage in stages:
            actions = order(self.schedule, stage, *self._sizes, ahead=int(self.overlap_experts))
            own = [chunks[number] for number in self.where.chunks(stage, len(chunks))]
            self._program(builder, stage, self._calls(plan, builder, own, actions)[0])
        return builder.build(JobGraph)

    def alike(self, graph: StepGraph) -> StagesAlike:
        """The stages that differ, each written once, over as many micro-batches as differ.

        Stages that do the same on other layers stand for each other, and so do all micro-batches between the first
        and the last. A stage's programs run micro-batch by micro-batch here, whatever the schedule; the job is no
        whole one, as those stages are missing that others stand for.

        Raises:
            PlanError: as `__call__`, or forward and backward passes run as one, or chunks turn back.
        """
        if self.overlap_experts:
            raise PlanError("passes that exchange rows of experts in pairs are told by their whole schedule alone")
        if self.where.turns:
            raise PlanError("chunks that turn back at the last stage are told by their whole schedule alone")
        plan, builder = self._context(graph)
        chosen = plan.stages_alike()
        stages = sorted(set(chosen))
        plan = plan.of_stages(stages)
        chunks = _write(plan, builder, stages)
        count = min(self.micro_batches, DISTINCT)
        kinds: tuple[Computation, ...] = ("backward", "weight") if self.schedule in SPLIT else ("backward",)
        labels = []
        for stage in stages:
            actions: list[Action] = []
            for micro_batch in range(count):
                actions += (("forward", micro_batch, chunk) for chunk in range(self.chunks))
                actions += ((kind, micro_batch, c) for kind in kinds for c in reversed(range(self.chunks)))
            own = [chunk for chunk in chunks if chunk.stage == stage]
            calls, of = replace(self, micro_batches=count)._calls(plan, builder, own, actions)
            self._program(builder, stage, calls)
            labels.append([(*actions, UPDATE)[number] for number in of.tolist()])
        job = builder.build(JobGraph, whole=False)
        counted = np.zeros(len(job.tensors), np.bool_)
        counted[[chunk.rows[tensor] for chunk in chunks for tensor in chunk.shapes]] = True
        sized = Sized.of(graph, job, *_origins(plan, job, chunks), counted=counted)
        for chunk in chunks:  # those that name each other stay until Python looks for cycles, and many are made
            chunk.siblings.clear()
        names = None if plan.lost else plan.names
        return StagesAlike(job=job, labels=labels, stand_for=tuple(chosen), sized=sized, names=names)

    @property
    def where(self) -> ChunkOrder:
        """On which stage each chunk is."""
        return ChunkOrder(self.stages, turns=self.schedule in TURNING)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.stages, self.micro_batches, self.chunks

    def _program(self, builder: GraphBuilder, stage: int, calls: Int64) -> None:
        builder.program(calls, role=f"stage {stage}", coordinates={AXIS: stage})

    def _context(self, graph: StepGraph) -> tuple[PipelineContext, GraphBuilder]:
        """What all chunks have in common, and the builder that they are written into."""
        self.check(graph)
        placement = place_operations(graph, self.stages * self.chunks, self.layers)
        OptimizerPlacer(graph, placement, self.stages).place()
        routes = route(graph, placement)
        of = parts(graph, routes, split=self.schedule in SPLIT)
        leads, leading_layers = leaders(graph, placement, self.where)
        builder = empty_copy(graph)
        builder.mesh = (Axis(name=AXIS, size=self.stages), *graph.mesh)
        context = PipelineContext(
            graph=graph,
            placement=placement,
            routes=routes,
            parts=of,
            layers=Layers(graph, of, leading_layers),
            leads=leads,
            leading_layers=leading_layers,
            where=self.where,
            group=builder.group(AXIS, axes=(AXIS,)),
            shared=self._groups(graph, placement, builder),
            sharers=prod(a.size for a in graph.mesh if a.name == TENSOR) if self.scatter_gather else 1,
        )
        return context, builder

    def check(self, graph: StepGraph) -> None:
        """Refuses what no pipeline of this graph can be.

        Raises:
            PlanError: stages or chunks are out of range, the schedule cannot do them, or it has a pipeline.
            UnknownNameError: no such schedule.
        """
        if not 1 <= self.stages <= MAX_STAGES:
            raise PlanError(f"{self.stages} pipeline stages: choose between 1 and {MAX_STAGES:,}")
        if self.chunks < 1:
            raise PlanError(f"{self.chunks} chunks a stage: give 1 or more")
        check_schedule(self.schedule, self.stages, self.micro_batches, self.chunks)
        if self.overlap_experts and self.schedule not in PAIRED:
            raise PlanError(
                f"schedule {self.schedule}: passes in which experts' exchanges overlap are of schedule "
                f"{' or '.join(sorted(PAIRED))}"
            )
        if self.overlap_experts and self.schedule == "interleaved" and self.micro_batches <= self.stages:
            raise PlanError(
                f"{self.micro_batches} micro-batches on {self.stages} stages leave no forward pass beside a "
                "backward one, in which experts' exchanges overlap: give more micro-batches"
            )
        if any(axis.name == AXIS for axis in graph.mesh):
            raise PlanError("the graph has a pipeline already: give its step graph without one")

    def _groups(self, graph: StepGraph, placement: Partition, builder: GraphBuilder) -> dict[int, int | None]:
        """The group of every gradient that several chunks have a share of; None where two stages exchange it."""
        sharers: dict[int, list[int]] = {}
        for chunk, gradient in placement.shares:
            sharers.setdefault(gradient, []).append(self.where.stage(chunk))
        groups: dict[int, int | None] = {}
        for gradient, stages in sharers.items():
            name = graph.tensors[gradient].name
            if len(set(stages)) < len(stages):
                raise PlanError(f"parameter of {name} is in two chunks of a stage: use another schedule")
            if len(stages) == self.stages:
                groups[gradient] = builder.group("embedding", axes=(AXIS,))
            elif graph.mesh and len(stages) == 2:
                groups[gradient] = None
            else:
                groups[gradient] = builder.group("embedding", axes=(AXIS,), positions=sorted(stages))
        return groups

    def _calls(
        self, plan: PipelineContext, builder: GraphBuilder, chunks: list[Chunk], actions: list[Action]
    ) -> tuple[Int64, Int64]:
        """The calls of a stage that runs these passes, then the update's.

        Returns:
            int64 [calls, 5], and int64 [calls], the number of the action that each is of, one beyond the last for
            the update.
        """
        added: dict[int, list[Call]] = {}
        if self.micro_batches > 1:
            gradients = {c.number: _gradients(plan, c) for c in chunks}
            added = {number: [accumulate(builder, its)] if its else [] for number, its in gradients.items()}
        last = "weight" if self.schedule in SPLIT else "backward"
        runs = {(chunk.number, part): in_order(chunk.timed(part)) for chunk in chunks for part in PipelinePhase}
        exchanges = plan.exchanges(chunks) if self.overlap_experts else ()
        pairs = paired(self.schedule, actions) if exchanges else frozenset()

        def of_pass(kind: Computation, number: int, adds: bool, beside: _Kind | None) -> list[Call]:
            # In micro-batch 0 the pass's own calls, in 1 those of the pass that runs beside it.
            run = runs[chunks[number].number, _PARTS[kind]]
            if beside is not None:
                other = runs[chunks[beside[1]].number, _PARTS[beside[0]]]
                run = interleaved(run, in_micro_batch(other, 1), exchanges)
            return run + added[chunks[number].number] if adds else run

        update = in_order([call for chunk in chunks for call in chunk.timed(PipelinePhase.UPDATE)])
        known: dict[tuple[Computation, int, bool, _Kind | None], int] = {}
        passes: list[tuple[int, int, int, int]] = []
        beside: _Kind | None = None
        its = 0
        for at, (kind, micro_batch, number) in enumerate(actions):
            if at in pairs:
                beside, its = (kind, number), micro_batch
                continue
            adds = kind == last and micro_batch > 0
            like = known.setdefault((kind, number, adds, beside), len(known))
            passes.append((at, like, micro_batch, its))
            beside = None
        passes.append((len(actions), len(known), self.micro_batches - 1, 0))
        return _in_passes([*(of_pass(*like) for like in known), update], passes)


def _in_passes(alike: list[list[Call]], passes: list[tuple[int, int, int, int]]) -> tuple[Int64, Int64]:
    """The calls of passes, and the number of the pass that each is of.

    Args:
        alike: calls of passes that are alike, in micro-batch 0, and 1 where another one runs beside.
        passes: of each its number, which of these it is, and what the two micro-batches are.
    """
    every = np.array([call for its in alike for call in its], np.int64).reshape(-1, 5)
    lengths = np.array([len(its) for its in alike], np.int64)
    columns = np.array(passes, np.int64)
    own = np.repeat(np.arange(len(columns)), lengths[columns[:, 1]])
    begin = np.cumsum(lengths) - lengths
    written = np.cumsum(lengths[columns[:, 1]]) - lengths[columns[:, 1]]
    calls = every[begin[columns[own, 1]] + np.arange(len(own)) - written[own]]
    calls[:, 4] = columns[own, 2 + calls[:, 4]]
    return calls, columns[own, 0]


_Kind = tuple[Computation, int]
"""What a pass computes, and of which of the stage's chunks."""
_PARTS: dict[Computation, PipelinePhase] = {
    "forward": PipelinePhase.FORWARD,
    "backward": PipelinePhase.BACKWARD,
    "weight": PipelinePhase.WEIGHT,
}


def _write(plan: PipelineContext, builder: GraphBuilder, stages: Container[int]) -> list[Chunk]:
    """Writes the first chunk as the main block, the layers' blocks, then the blocks of the other chunks.

    Args:
        plan: what they have in common.
        builder: gets them.
        stages: those whose chunks are written; the first is among them.
    """
    chunks = [Chunk(plan=plan, number=0, builder=builder, block=0)]
    chunks[0].write()
    plan.layers.write(builder)
    for number in range(1, plan.placement.chunks):
        if plan.where.stage(number) not in stages:
            continue
        name = str(number) if plan.names is None else plan.names.chunk(number)
        chunks.append(Chunk(plan=plan, number=number, builder=builder, block=builder.begin_block(f"main.{name}")))
        chunks[-1].write()
    for chunk in chunks:
        chunk.siblings += (c for c in chunks if c.stage == chunk.stage and c is not chunk)
    _bind(plan, builder, chunks)
    return chunks


def _origins(plan: PipelineContext, job: JobGraph, chunks: list[Chunk]) -> tuple[Int64, Int64]:
    """Of every tensor and operation of the job the one of the step that it is, or is made for; -1 where none."""
    tensors, ops = np.full(len(job.tensors), NONE), np.full(len(job.ops), NONE)
    for made in plan.layers.blocks:
        block = job.blocks[made.number]
        its = plan.graph.blocks[made.block].tensors
        tensors[block.tensors.start : block.tensors.stop] = np.arange(its.start, its.stop)
        ops[block.ops.start : block.ops.stop] = list(made.places)
    for chunk in chunks:
        for identity, row in chunk.rows.items():
            tensors[row] = plan.graph.locate_tensor(identity)[2]
        tensors[list(chunk.like)] = list(chunk.like.values())
        ops[list(chunk.ops.values())] = list(chunk.ops)
    return tensors, ops


def _bind(plan: PipelineContext, builder: GraphBuilder, chunks: list[Chunk]) -> None:
    """Adds all instances, now that it is known where every block begins."""
    graph, layers = plan.graph, plan.layers
    by_number = {chunk.number: chunk for chunk in chunks}
    tensors, ops = layers.number(len(chunks[0].own), len(chunks[0].written))
    for chunk in chunks[1:]:
        chunk.first_id, chunk.first_op_id = tensors, ops
        tensors += len(chunk.own)
        ops += len(chunk.written)
    for chunk in chunks:
        builder.instance(
            chunk.block,
            bindings=[chunk.new_id(tensor) for tensor in chunk.ports],
            op_bindings=[_op_id(plan, by_number, chunk.number, op) for op in chunk.forward_ops],
        )
    for made in layers.blocks:
        for index in made.instances:
            instance = graph.blocks[made.block].instances[index]
            chunk = by_number[plan.placement.instances[made.block, index]]
            builder.instance(
                made.number,
                plan.label(chunk.number, made.block, index),
                bindings=[chunk.new_id(tensor) for tensor in instance.bindings],
                op_bindings=[
                    _op_id(plan, by_number, chunk.number, op, ((made.block, index), at))
                    for at, op in enumerate(instance.op_bindings)
                ],
            )


def _op_id(
    plan: PipelineContext,
    chunks: dict[int, Chunk],
    number: int,
    op: int,
    named: tuple[BlockInstance, int] | None = None,
) -> int:
    """The id in the job of an operation of the step; of its copy on the same chunk, if there is one.

    Args:
        plan: what all chunks have in common.
        chunks: those that are written.
        number: of the chunk that names it.
        op: the operation.
        named: the layer that does, and which of those that it names it is; None: the chunk does.
    """
    block, instance, row = plan.graph.locate_op(op)
    if block:
        where = plan.where.stage
        its = plan.placement.instances[block, instance]
        if named is not None and plan.names is not None and where(its) != where(number):
            # The layer that it is of is another one for each stage: this stands for it.
            plan.names.note(number, *named, (block, instance), its)
            (block, instance), _ = named
            if block == plan.graph.locate_op(op)[0]:
                return plan.layers.op_id((block, instance), row)
        elif (block, instance) in plan.layers.of:
            return plan.layers.op_id((block, instance), row)
        plan.lost.append(op)
        return 0
    runs = plan.placement.ops[row] & chunks.keys()
    chunk = chunks[number if number in runs else min(runs)]
    return chunk.first_op_id + chunk.ops[row] - chunk.written.start


def _gradients(plan: PipelineContext, chunk: Chunk) -> list[tuple[Tensor, str, int]]:
    """The final gradients that a chunk makes and that have to be added up, with names and ids in the job."""
    graph, placement = plan.graph, plan.placement
    places: dict[int, list[tuple[int, str]]] = {}
    for block, instance in plan.layers_in(chunk.number):
        places.setdefault(block, []).append((instance, plan.label(chunk.number, block, instance)))
    found = []
    for row in final_gradients(graph):
        if adds_up(graph, row):
            continue
        block = int(graph.block_of_op[graph.maker[row]])
        if block:
            # Of a layer all is as in the step; only the name has its label.
            value = replace(plan.tensor(row), role=TensorRole.GRADIENT)
            found += [
                (value, value.name.replace("{}", label), plan.layers.tensor_id((block, instance), row))
                for instance, label in places.get(block, ())
            ]
            continue
        if (chunk.number, row) in placement.shares:
            ids = [graph.tensor_id(0, 0, placement.shares[chunk.number, row])]
        else:
            ids = [graph.tensor_id(0, 0, row)] if chunk.number in placement.ops[int(graph.maker[row])] else []
        for i in ids:
            value = replace(chunk.value(i), role=TensorRole.GRADIENT)
            found.append((value, value.name, chunk.new_id(i)))
    return found
