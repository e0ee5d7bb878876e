"""Data parallelism: gradients in buckets, reduced while backward goes on; with ZeRO, an optimizer on shards.

Gradients are put into buckets in the order in which they become ready; a bucket holds one data type and one set of
ranks: a gradient is added up over the data axes of the mesh that it is not divided over
(`gradients.reduction_axes`). When the last gradient of a bucket is ready, the bucket is reduced on its group's own
stream, buckets in order. After backward the compute stream waits for all of them.

- `zero=0`: PyTorch's DistributedDataParallel (Li et al., "PyTorch Distributed", VLDB 2020). A bucket closes at
  1 MiB, the later ones at 25 MiB; gradients are copied into it, all-reduced, and copied back. Buffers are
  broadcast before forward.
- `zero=1`: Megatron-LM's distributed optimizer (`--use-distributed-optimizer`). Gradients live in contiguous
  buckets of max(40 M, 1 M times ranks) elements, filled up to a multiple of the ranks and of 128, and are
  reduce-scattered after the last micro-batch. Each rank updates its elements, cut evenly from the buckets, and the
  parameters are all-gathered bucket by bucket: after the optimizer, or with `overlap_param_gather` at the head of
  the step, as left by the one before, where the first bucket is waited for and the gather of each next one runs
  beside the layers of the bucket before. Pipeline stages other than the first reduce all at once, as there. That
  weight gradients are added to the bucket by the products themselves is assumed where there is one
  micro-batch (`gradient_accumulation_fusion`).
- `zero=2`: DeepSpeed's stage 2. As 1, but only the shards of the gradients live through the step: every
  micro-batch copies its gradients into buckets, reduces these, and adds the shard that it gets to its own.

DeepSpeed reduces by all-reduce and keeps its part, in stages 1 and 2 (`use_multi_rank_bucket_allreduce`, its
default): that is `reduce_scatter=False`. What the ranks of a group share inside (tensor parallelism) is beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echograph.errors import PlanError
from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder
from echograph.ir.columns import NONE
from echograph.ir.graph import Axis, Graph, JobGraph, StepGraph
from echograph.ir.passes.data_parallel.distributed_optimizer import Division, ShardedBlock, ShardedGraph, unchanged
from echograph.ir.passes.data_parallel.program import MIB, ProgramWriter
from echograph.ir.passes.gradients import DATA, final_gradients, overflow_flags, reduction_axes, total_norms
from echograph.ir.passes.rewrite import copy_tables, empty_copy

__all__ = [
    "MAX_MICRO_BATCHES",
    "MAX_REPLICAS",
    "MIB",
    "DataParallel",
    "check_sizes",
    "data_mesh",
    "final_gradients",
]

STAGES = "pp"
MAX_REPLICAS = 10_000_000
MAX_MICRO_BATCHES = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """Lowers a step graph, or each stage of a pipeline, to a job of `replicas` equal ranks.

    Attributes:
        replicas: number of ranks, each with the whole model and its own micro-batches.
        micro_batches: forward and backward passes of each rank before the optimizer; gradients add up, and only
            the last pass reduces them (`no_sync`), but for `zero=2`.
        zero: what is divided over the ranks: 0 nothing, 1 the optimizer's state, 2 the gradients, too.
        overlap_grad_reduce: buckets are reduced while backward goes on; else all gradients at once after it.
        overlap_param_gather: parameters are gathered while the forward pass goes on (`zero` 1 and 2).
        bucket_bytes: size at which a bucket closes; None: 25 MiB (`bucket_cap_mb`), with ZeRO as many elements as
            Megatron-LM takes.
        first_bucket_bytes: the same for the first bucket, without ZeRO.
        gradient_as_bucket_view: gradients live in the buckets, so nothing is copied in and out; None: with
            `zero=1` alone.
        reduce_scatter: with ZeRO, ranks get their shards alone; else all-reduced gradients, of which they take
            theirs.
        broadcast_buffers: rank 0's buffers are broadcast before each forward pass, without ZeRO and stages.
    """

    name: ClassVar[str] = "data_parallel"

    replicas: int
    micro_batches: int = 1
    zero: int = 0
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = False
    bucket_bytes: int | None = None
    first_bucket_bytes: int = 1 * MIB
    gradient_as_bucket_view: bool | None = None
    reduce_scatter: bool = True
    broadcast_buffers: bool = True

    def __call__(self, graph: StepGraph | JobGraph) -> JobGraph:
        """The job graph; a pipeline's job graph is replicated stage by stage, and keeps its micro-batches.

        Raises:
            PlanError: a number is out of range, or micro-batches are given for a pipeline, which has its own.
        """
        check_sizes(self.replicas, self.micro_batches, isinstance(graph, JobGraph))
        if self.zero not in (0, 1, 2):
            raise PlanError(f"zero {self.zero}: choose 0, 1 or 2 here; fully sharded data parallelism is stage 3")
        mesh = data_mesh(graph.mesh, (Axis(name=DATA, size=self.replicas),))
        builder = empty_copy(graph)
        builder.mesh = mesh
        builder.group(DATA, axes=(DATA,))
        none = self.zero == 0 or not reduction_axes(mesh, ())
        gradients = frozenset(() if none else final_gradients(graph))
        division = Division(graph=graph, mesh=mesh, gradients=gradients, flat=True, none=none)
        job = self._write(graph, builder, division)
        for program in graph.programs:
            writer = ProgramWriter(options=self, graph=graph, job=job, division=division, program=program)
            builder.program(
                writer.calls(),
                role=program.role or "replica",
                coordinates=program.coordinates,
                ranks=program.ranks,
            )
        return builder.build(JobGraph)

    def _write(self, graph: Graph, builder: GraphBuilder, division: Division) -> ShardedGraph:
        """Writes the graph's own blocks, with the optimizer on shards, or as they are."""
        if division.none:
            copy_tables(builder, graph)
            rows = {row: range(row, row + 1) for row in range(len(graph.ops))}
            return ShardedGraph(graph, builder, [unchanged(graph, block) for block in graph.blocks], rows)
        views = {0: (), 1: (t.TensorRole.PARAMETER, t.TensorRole.GRADIENT), 2: (t.TensorRole.PARAMETER,)}[
            self.zero
        ]
        transient = (t.TensorRole.GRADIENT,) if self.zero == 2 else ()
        scalars = set() if division.none else {*total_norms(graph), *overflow_flags(graph)}
        ops: dict[int, range] = {}
        blocks = []
        for number, block in enumerate(graph.blocks):
            if number:
                builder.begin_block(block.name)
            blocks.append(
                _Block(
                    graph, builder, number, division, ops, views=views, transient=transient, scalars=scalars
                ).write()
            )  # fmt: skip
        job = ShardedGraph(graph, builder, blocks, ops)
        job.bind()
        return job


class _Block(ShardedBlock):
    """Where gradients live whole (`zero=1`), stages exchange them whole, as Megatron-LM does."""

    def phase(self, row: int) -> t.Phase:
        """Whether an operation works on shards or on whole tensors."""
        whole = t.TensorRole.GRADIENT in self.views and self._exchanges(row)
        return t.Phase.FORWARD if whole else super().phase(row)

    def _exchanges(self, row: int) -> bool:
        ops, graph = self.graph.ops, self.graph
        if ops.kind[row] != t.OpKind.COMPUTE:
            return True
        makers = [int(graph.maker[i]) for i in ops.inputs.row(row)]
        return any(maker != NONE and ops.kind[maker] == t.OpKind.RECV for maker in makers)


def check_sizes(replicas: int, micro_batches: int, staged: bool) -> None:
    """Refuses numbers of ranks and micro-batches that no job has.

    Raises:
        PlanError: a number is out of range, or micro-batches are given for a pipeline, which has its own.
    """
    if not 1 <= micro_batches <= MAX_MICRO_BATCHES:
        raise PlanError(f"{micro_batches} micro-batches: choose between 1 and {MAX_MICRO_BATCHES:,}")
    if not 1 <= replicas <= MAX_REPLICAS:
        raise PlanError(f"{replicas} data-parallel replicas: choose between 1 and {MAX_REPLICAS:,}")
    if staged and micro_batches != 1:
        raise PlanError("the pipeline has its micro-batches already: give them to it alone")


def data_mesh(mesh: tuple[Axis, ...], added: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """A mesh with data axes: inside the stages, outside of what shares a replica, whose ranks are neighbours."""
    outer = tuple(axis for axis in mesh if axis.name == STAGES)
    return (*outer, *added, *(axis for axis in mesh if axis.name != STAGES))
