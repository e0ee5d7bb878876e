"""Pipeline parallelism: the layers of a step on the stages of a pipeline, micro-batches flowing through them.

Stage s runs chunk s of the layers, or with interleaving chunks s, s + stages, ... (Narayanan et al., "Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021). What crosses from chunk to chunk
is sent on a stream of its direction and received on another one, as separate NCCL operations between neighbours;
so a stage neither blocks its own work by sending nor orders what it receives by what it sends.

A schedule that splits backward runs gradients of weights in passes of their own (`routes.parts`). Clipping by
the norm of all gradients and fp16 loss scaling all-reduce one scalar over the stages
(`placement.OptimizerPlacer`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from echograph.errors import PlanError
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import Axis, JobGraph, StepGraph
from echograph.ir.passes.gradients import adds_up, final_gradients
from echograph.ir.passes.pipeline.blocks import AXIS, Chunk, Layers, PipelineContext, in_order, leaders
from echograph.ir.passes.pipeline.placement import OptimizerPlacer, Partition, place
from echograph.ir.passes.pipeline.routes import PipelinePhase, parts, route
from echograph.ir.passes.pipeline.schedules import SPLIT, Computation, check_schedule, order
from echograph.ir.passes.rewrite import Call, accumulate, empty_copy, in_micro_batch
from echograph.ir.types import Tensor, TensorRole

MAX_STAGES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Lowers a folded step graph to a job with one program for each pipeline stage.

    Attributes:
        stages: number of stages, the size of the mesh axis "pp".
        micro_batches: forward and backward passes before the optimizer; gradients add up.
        schedule: a name of `schedules.SCHEDULES`.
        chunks: chunks of layers on each stage; more than one for "interleaved" only.
        layers: layers of each chunk in the order of the model; None splits evenly, and the first chunks take one
            more where it does not divide. The first may have 0, then it has the embedding alone, and so may the
            last. `schedules.split_layers` makes them from Megatron-LM's options.
    """

    name: ClassVar[str] = "pipeline"

    stages: int
    micro_batches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    layers: tuple[int, ...] | None = None

    def __call__(self, graph: StepGraph) -> JobGraph:
        """The job graph.

        Raises:
            PlanError: the plan does not fit the schedule or the model, or the step combines values of several
                stages in a way that a pipeline cannot, as an optimizer kernel over all parameters would.
            UnknownNameError: no such schedule.
        """
        self._check(graph)
        placement = place(graph, self.stages * self.chunks, self.layers)
        OptimizerPlacer(graph, placement, self.stages).place()
        routes = route(graph, placement)
        of = parts(graph, routes, split=self.schedule in SPLIT)
        leads, leading_layers = leaders(graph, placement, self.stages)
        builder = empty_copy(graph)
        builder.mesh = (Axis(name=AXIS, size=self.stages), *graph.mesh)
        plan = PipelineContext(
            graph=graph,
            placement=placement,
            routes=routes,
            parts=of,
            layers=Layers(graph, of, leading_layers),
            leads=leads,
            stages=self.stages,
            group=builder.group(AXIS, axes=(AXIS,)),
            shared=self._groups(graph, placement, builder),
        )
        chunks = _write(plan, builder)
        _bind(plan, builder, chunks)
        for stage in range(self.stages):
            builder.program(
                self._calls(plan, builder, chunks[stage :: self.stages], stage),
                role=f"stage {stage}",
                coordinates={AXIS: stage},
            )
        return builder.build(JobGraph)

    def _check(self, graph: StepGraph) -> None:
        if not 1 <= self.stages <= MAX_STAGES:
            raise PlanError(f"{self.stages} pipeline stages: choose between 1 and {MAX_STAGES:,}")
        if self.chunks < 1:
            raise PlanError(f"{self.chunks} chunks a stage: give 1 or more")
        check_schedule(self.schedule, self.stages, self.micro_batches, self.chunks)
        if any(axis.name == AXIS for axis in graph.mesh):
            raise PlanError("the graph has a pipeline already: give its step graph without one")

    def _groups(self, graph: StepGraph, placement: Partition, builder: GraphBuilder) -> dict[int, int | None]:
        """The group of every gradient that several chunks have a share of; None where two stages exchange it."""
        sharers: dict[int, list[int]] = {}
        for chunk, gradient in placement.shares:
            sharers.setdefault(gradient, []).append(chunk % self.stages)
        groups: dict[int, int | None] = {}
        for gradient, stages in sharers.items():
            name = graph.tensors[gradient].name
            if len(set(stages)) < len(stages):
                raise PlanError(f"parameter of {name} is in two chunks of a stage: use one chunk a stage")
            if len(stages) == self.stages:
                groups[gradient] = builder.group("embedding", axes=(AXIS,))
            elif graph.mesh and len(stages) == 2:
                groups[gradient] = None
            else:
                groups[gradient] = builder.group("embedding", axes=(AXIS,), positions=sorted(stages))
        return groups

    def _calls(self, plan: PipelineContext, builder: GraphBuilder, chunks: list[Chunk], stage: int) -> list[Call]:
        added = {}
        if self.micro_batches > 1:
            gradients = {c.number: _gradients(plan, c) for c in chunks}
            added = {number: [accumulate(builder, its)] if its else [] for number, its in gradients.items()}
        last = "weight" if self.schedule in SPLIT else "backward"
        runs = {(chunk.number, part): in_order(chunk.timed(part)) for chunk in chunks for part in PipelinePhase}
        calls: list[Call] = []
        for kind, micro_batch, number in order(self.schedule, stage, self.stages, self.micro_batches, self.chunks):
            chunk = chunks[number]
            calls += in_micro_batch(runs[chunk.number, _PARTS[kind]], micro_batch)
            if kind == last and micro_batch:
                calls += in_micro_batch(added[chunk.number], micro_batch)
        update = [call for chunk in chunks for call in chunk.timed(PipelinePhase.UPDATE)]
        return calls + in_micro_batch(in_order(update), self.micro_batches - 1)


_PARTS: dict[Computation, PipelinePhase] = {
    "forward": PipelinePhase.FORWARD,
    "backward": PipelinePhase.BACKWARD,
    "weight": PipelinePhase.WEIGHT,
}


def _write(plan: PipelineContext, builder: GraphBuilder) -> list[Chunk]:
    """Writes the first chunk as the main block, the layers' blocks, then the blocks of the other chunks."""
    chunks = [Chunk(plan=plan, number=0, builder=builder, block=0)]
    chunks[0].write()
    plan.layers.write(builder)
    for number in range(1, plan.placement.chunks):
        chunks.append(
            Chunk(plan=plan, number=number, builder=builder, block=builder.begin_block(f"main.{number}"))
        )
        chunks[-1].write()
    for chunk in chunks:
        chunk.siblings += (c for c in chunks if c.stage == chunk.stage and c is not chunk)
    return chunks


def _bind(plan: PipelineContext, builder: GraphBuilder, chunks: list[Chunk]) -> None:
    """Adds all instances, now that it is known where every block begins."""
    graph, layers = plan.graph, plan.layers
    tensors, ops = layers.number(len(chunks[0].own), len(chunks[0].written))
    for chunk in chunks[1:]:
        chunk.first_id, chunk.first_op_id = tensors, ops
        tensors += len(chunk.own)
        ops += len(chunk.written)
    for chunk in chunks:
        builder.instance(
            chunk.block,
            bindings=[chunk.new_id(tensor) for tensor in chunk.ports],
            op_bindings=[_op_id(plan, chunks, chunk.number, op) for op in chunk.forward_ops],
        )
    for made in layers.blocks:
        for index in made.instances:
            instance = graph.blocks[made.block].instances[index]
            chunk = chunks[plan.placement.instances[made.block, index]]
            builder.instance(
                made.number,
                instance.label,
                bindings=[chunk.new_id(tensor) for tensor in instance.bindings],
                op_bindings=[_op_id(plan, chunks, chunk.number, op) for op in instance.op_bindings],
            )


def _op_id(plan: PipelineContext, chunks: list[Chunk], number: int, op: int) -> int:
    """The id in the job of an operation of the step; of its copy on the same chunk, if there is one."""
    block, instance, row = plan.graph.locate_op(op)
    if block:
        return plan.layers.op_id((block, instance), row)
    runs = plan.placement.ops[row]
    chunk = chunks[number if number in runs else min(runs)]
    return chunk.first_op_id + chunk.ops[row] - chunk.written.start


def _gradients(plan: PipelineContext, chunk: Chunk) -> list[tuple[Tensor, int]]:
    """The final gradients that a chunk makes and that have to be added up, with their ids in the job."""
    graph, placement = plan.graph, plan.placement
    places: dict[int, list[int]] = {}
    for (block, instance), number in placement.instances.items():
        if number == chunk.number:
            places.setdefault(block, []).append(instance)
    found = []
    for row in final_gradients(graph):
        if adds_up(graph, row):
            continue
        block = int(graph.block_of_op[graph.maker[row]])
        if block:
            ids = [graph.tensor_id(block, instance, row) for instance in places.get(block, ())]
        elif (chunk.number, row) in placement.shares:
            ids = [graph.tensor_id(0, 0, placement.shares[chunk.number, row])]
        else:
            ids = [graph.tensor_id(0, 0, row)] if chunk.number in placement.ops[int(graph.maker[row])] else []
        found += [(replace(chunk.value(i), role=TensorRole.GRADIENT), chunk.new_id(i)) for i in ids]
    return found
