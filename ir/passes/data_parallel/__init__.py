"""Data parallelism: gradients in buckets, reduced while backward goes on; with ZeRO, an optimizer on shards.

Gradients are put into buckets in the order in which they become ready; a bucket holds one data type and one set
of ranks: a gradient is added up over the data axes of the mesh that it is not divided over
(`gradients.reduction_axes`). When the last gradient of a bucket is ready, the bucket is reduced on its group's
own stream, buckets in order. After backward the compute stream waits for all of them.

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
default): that is `reduce_scatter=False`. What the ranks of a group share inside (tensor parallelism) is beside
it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil, inf, lcm, prod
from typing import ClassVar

from echograph.errors import PlanError
from echograph.ir import graph as g
from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder
from echograph.ir.columns import NONE
from echograph.ir.graph import Axis, Graph, JobGraph, StepGraph
from echograph.ir.passes.data_parallel.distributed_optimizer import (
    SHARDED,
    WHOLE,
    Division,
    ShardedBlock,
    ShardedGraph,
    unchanged,
)
from echograph.ir.passes.gradients import (
    DATA,
    Gradient,
    ProgramPoint,
    adds_up,
    axes_group,
    buffer_bytes,
    final_gradients,
    first_reads,
    overflow_flags,
    ready_gradients,
    reduction_axes,
    split_at_optimizer,
    total_norms,
    updated_parameters,
)
from echograph.ir.passes.rewrite import (
    ACCUMULATE,
    Call,
    accumulate,
    add_to_gradient,
    copy_tables,
    empty_copy,
    in_micro_batch,
)

MIB = 2**20
_ALIGNED = 128
"""Megatron-LM fills a bucket up to a multiple of this many elements, and of the ranks."""


@dataclass(slots=True, kw_only=True)
class Bucket:
    """Tensors of one data type and one set of ranks, with their ids.

    Attributes:
        axes: along which the ranks lie.
        dtype: of all.
        tensors: each with its id, in order.
        elements: of all together.
    """

    axes: tuple[str, ...]
    dtype: t.DType
    tensors: list[tuple[int, t.Tensor]] = field(default_factory=list)
    elements: int = 0

    def nbytes(self, ranks: int = 1) -> int:
        """Bytes, filled up so that ranks get equal shards; as they are for one rank."""
        step = lcm(ranks, _ALIGNED) if ranks > 1 else 1
        return ceil(self.elements / step) * step * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a bucket is full.

    Attributes:
        nbytes: a bucket closes when it holds as much; None: Megatron-LM's number of elements; infinite: never.
        first_nbytes: the same for the first bucket of its type and ranks; None: as all others.
    """

    nbytes: float | None = None
    first_nbytes: float | None = None

    def of(self, bucket: Bucket, ranks: int, first: bool) -> float:
        """Bytes at which a bucket closes."""
        if first and self.first_nbytes is not None:
            return self.first_nbytes
        return max(40_000_000, 1_000_000 * ranks) * bucket.dtype.itemsize if self.nbytes is None else self.nbytes


def fill(tensors: Iterable[tuple[int, t.Tensor]], mesh: tuple[Axis, ...], limits: Limits) -> list[Bucket]:
    """Puts tensors into buckets, one open bucket for each data type and set of ranks.

    Args:
        tensors: each with its id, in the order in which they are ready; those of no data axis are left out.
        mesh: of the job.
        limits: when a bucket is full.
    """
    sizes = {axis.name: axis.size for axis in mesh}
    opened: dict[tuple[tuple[str, ...], t.DType], Bucket] = {}
    closed: list[Bucket] = []
    begun = set()
    for identity, tensor in tensors:
        axes = reduction_axes(mesh, tensor.sharded)
        if not axes:
            continue
        key = axes, tensor.dtype
        bucket = opened.setdefault(key, Bucket(axes=axes, dtype=tensor.dtype))
        bucket.tensors.append((identity, tensor))
        bucket.elements += tensor.numel
        ranks = prod(sizes[axis] for axis in axes)
        if bucket.nbytes() >= limits.of(bucket, ranks, first=key not in begun):
            closed.append(opened.pop(key))
            begun.add(key)
    return [*closed, *opened.values()]


def by_axes(buckets: list[Bucket]) -> dict[tuple[str, ...], list[Bucket]]:
    """The buckets of each set of ranks."""
    found: dict[tuple[str, ...], list[Bucket]] = {}
    for bucket in buckets:
        found.setdefault(bucket.axes, []).append(bucket)
    return found


@dataclass(slots=True, kw_only=True)
class _Reduction:
    """A bucket's operations: those that fill and reduce it, and the tensors that then hold its gradients."""

    bucket: Bucket
    ops: list[int]
    held: list[int]


class ProgramWriter:
    """Writes one program.

    Args:
        options: the pass.
        graph: the step, or the pipeline's job.
        job: its blocks as they are written.
        division: how tensors are divided.
        program: of the graph.
    """

    def __init__(
        self, *, options: DataParallel, graph: g.Graph, job: ShardedGraph, division: Division, program: g.Program
    ) -> None:
        self.options, self.graph, self.job, self.division = options, graph, job, division
        self.builder: GraphBuilder = job.builder
        self.mesh = self.builder.mesh
        self.staged = isinstance(graph, g.JobGraph)
        self.stage = program.coordinates.get("pp", 0)
        self.name = "zero" if options.zero else "ddp"
        self.reduces = bool(reduction_axes(self.mesh, ()))
        self.bindings: list[int] = []
        self.added: dict[ProgramPoint, list[tuple[int, list[int]]]] = {}
        self.block = 0
        self.accumulations: dict[ProgramPoint, Call] = {}
        calls: list[Call] = [(b, x, y, i, m) for b, x, y, i, m in program.calls.tolist() if y > x]
        self.steps = self._of_pipeline(calls) if self.staged else self._of_step(calls)
        self.last = max((call[4] for call in self.steps), default=0)

    def calls(self) -> list[Call]:
        """All calls of the program, in new rows."""
        ready = ready_gradients(self.graph, self.steps, None if self.options.zero == 2 else self.last)
        gradients = sorted(ready.get(self.last, {}).values(), key=lambda gradient: gradient.ready)
        if not self.staged and gradients:
            self._accumulate_whole(gradients)
        if not self.reduces or not gradients:
            return self._merged()
        tensors = [(gradient.tensor_id, self.graph.tensors[gradient.tensor]) for gradient in gradients]
        reduced = by_axes(fill(tensors, self.mesh, self._limits()))
        gathered = by_axes(self._updated()) if self.options.zero else {}
        for number, axes in enumerate({**reduced, **gathered}):
            # Rows of a block run in order, so each group of ranks, whose buckets do, has a block of its own.
            self._begin(self.name if number == 0 else f"{self.name}.{'+'.join(axes)}")
            self._communicate(axes, reduced.get(axes, []), gathered.get(axes, []), ready)
            self.builder.instance(self.block, bindings=self.bindings)
        self._add_unreduced(tensors, ready)
        return self._merged()

    def _communicate(
        self,
        axes: tuple[str, ...],
        reduced: list[Bucket],
        gathered: list[Bucket],
        ready: dict[int, dict[int, Gradient]],
    ) -> None:
        """Everything of one group of ranks, in the order in which it runs."""
        options = self.options
        if axes == reduction_axes(self.mesh, ()) and not (self.staged or options.zero):
            self._broadcast_buffers()
        if options.overlap_param_gather:
            self._gather_ahead(gathered)
        if reduced:
            self._reduce(reduced, ready)
        if gathered and not options.overlap_param_gather:
            ops = [self._gather(bucket, t.Phase.OPTIMIZER) for bucket in gathered]
            wait = self.builder.compute("zero.wait", phase=t.Phase.OPTIMIZER, deps=ops)
            self._at((len(self.steps) - 1, self.steps[-1][2]), [*ops, wait])

    def _begin(self, name: str) -> None:
        self.block, self.bindings = self.builder.begin_block(name), []

    # -- calls ---------------------------------------------------------------------------------------------

    def _of_step(self, calls: list[Call]) -> list[Call]:
        """Forward and backward for each micro-batch, then the optimizer."""
        passes, update = split_at_optimizer(self.graph, calls)
        count, self.pass_length = self.options.micro_batches, len(passes)
        every = [call for micro_batch in range(count) for call in in_micro_batch(passes, micro_batch)]
        return every + in_micro_batch(update, count - 1)

    def _of_pipeline(self, calls: list[Call]) -> list[Call]:
        """The pipeline's calls, without those that add up gradients where their reduction does."""
        last = max((call[4] for call in calls), default=0)
        return [
            call
            for call in calls
            if self.graph.blocks[call[0]].name != ACCUMULATE
            or not (self.reduces and (call[4] == last or self.options.zero == 2))
        ]

    def _accumulate_whole(self, gradients: list[Gradient]) -> None:
        """Adds up whole gradients after each micro-batch but the first, and but those whose reduction does."""
        adding = range(1, self.last) if self.reduces else range(1, self.last + 1)
        if not adding or (self.reduces and self.options.zero == 2):
            return
        alone = [x for x in gradients if not adds_up(self.graph, x.tensor)]
        if not alone:
            return
        tensors = ((self.graph.tensors[x.tensor], self.job.tensor_id(x.tensor_id, WHOLE)) for x in alone)
        call = accumulate(self.builder, tensors)
        for micro_batch in adding:
            number = (micro_batch + 1) * self.pass_length - 1
            self.accumulations[number, self.steps[number][2]] = in_micro_batch([call], micro_batch)[0]

    def _merged(self) -> list[Call]:
        """The step's calls, cut where others are added."""
        cuts: dict[int, set[int]] = {}
        for number, cut in (*self.added, *self.accumulations):
            cuts.setdefault(number, set()).add(cut)
        out: list[Call] = []
        for number, (block, begin, end, instance, micro_batch) in enumerate(self.steps):
            for cut in sorted(cuts[number]) if number in cuts else ():
                if cut > begin:
                    out.append(self.job.call((block, begin, cut, instance, micro_batch)))
                begin = cut
                for added, ops in self.added.get((number, cut), ()):
                    out.append((added, ops[0], ops[-1] + 1, 0, micro_batch))
                if (number, cut) in self.accumulations:
                    out.append(self.accumulations[number, cut])
            if begin < end:
                out.append(self.job.call((block, begin, end, instance, micro_batch)))
        return out

    def _at(self, place: ProgramPoint, ops: list[int]) -> None:
        if ops:
            self.added.setdefault(place, []).append((self.block, ops))

    # -- gradients -----------------------------------------------------------------------------------------

    def _limits(self) -> Limits:
        options = self.options
        if not options.overlap_grad_reduce or (options.zero and self.stage > 0):
            return Limits(nbytes=inf)
        if options.zero:
            return Limits(nbytes=options.bucket_bytes)
        return Limits(
            nbytes=25 * MIB if options.bucket_bytes is None else options.bucket_bytes,
            first_nbytes=options.first_bucket_bytes,
        )

    @property
    def _views(self) -> bool:
        asked = self.options.gradient_as_bucket_view
        return self.options.zero == 1 if asked is None else asked

    def _reduce(self, buckets: list[Bucket], ready: dict[int, dict[int, Gradient]]) -> None:
        """Writes the reductions, and says where they run: in the last micro-batch, or in each."""
        reductions = [self._reduction(bucket, number) for number, bucket in enumerate(buckets)]
        wait = self.builder.compute(
            f"{self.name}.wait", phase=t.Phase.BACKWARD, deps=[reduction.ops[-1] for reduction in reductions]
        )
        keep = self._keep(reductions)
        add = self._add_shards(reductions) if self.options.zero == 2 and self.last else []
        for micro_batch in ready if self.options.zero == 2 else (self.last,):
            of_pass = ready[micro_batch]
            end = max(gradient.ready for gradient in of_pass.values())
            if self.staged and micro_batch == self.last:
                # The stage before needs this one's last message, which is sent before reductions are waited for.
                end = max(end, self._end_of_passes())
            behind = (0, 0)
            for reduction in reductions:
                tensors = reduction.bucket.tensors
                at = max(of_pass[i].ready for i, _ in tensors) if self.options.overlap_grad_reduce else end
                # A bucket is launched after the one before it, also when its gradients are ready sooner.
                behind = max(behind, at)
                self._at(behind, reduction.ops)
            first = micro_batch == min(ready)
            self._at(end, [wait])
            self._at(end, keep if first or not add else add)

    def _end_of_passes(self) -> ProgramPoint:
        """Where forward and backward end, and their messages, and the optimizer begins."""
        passes, _ = split_at_optimizer(self.graph, self.steps)
        return len(passes) - 1, passes[-1][2]

    def _reduction(self, bucket: Bucket, number: int) -> _Reduction:
        """Operations that fill and reduce a bucket, and the tensors that hold its gradients then."""
        builder, options = self.builder, self.options
        ops, held = [], []
        for identity, tensor in bucket.tensors:
            port = self._port(identity, tensor, WHOLE)
            if self.last and options.zero < 2 and not adds_up(self.graph, tensor.id):
                ops.append(add_to_gradient(builder, port, tensor.nbytes))
            if not self._views:
                role = t.TensorRole.ACTIVATION if options.zero == 2 else t.TensorRole.BUFFER
                copy = builder.tensor(f"{tensor.name}.bucket", tensor.shape, tensor.dtype, role)
                ops.append(self._copy("copy_to_bucket", (port,), tensor.nbytes, made=(copy,)))
                port = copy
            held.append(port)
        group, stream = axes_group(builder, bucket.axes)
        scatter = options.zero > 0 and options.reduce_scatter
        ops.append(
            builder.collective(
                f"{self.name}.bucket_{number}",
                t.CollectiveKind.REDUCE_SCATTER if scatter else t.CollectiveKind.ALL_REDUCE,
                group=group,
                bytes_per_rank=bucket.nbytes(self.division.ranks(bucket.axes) if options.zero else 1),
                dtype=bucket.dtype,
                payload=t.Payload.GRADIENT,
                asynchronous=True,
                phase=t.Phase.BACKWARD,
                inputs=held,
                deps=ops,
                stream=stream,
            )
        )
        return _Reduction(bucket=bucket, ops=ops, held=held)

    def _keep(self, reductions: list[_Reduction]) -> list[int]:
        """Copies what was reduced out of the buckets: gradients, or with ZeRO this rank's shards."""
        if self._views:
            return []
        ops = []
        for reduction in reductions:
            if self.options.zero:
                shards = [self._port(i, tensor, SHARDED) for i, tensor in reduction.bucket.tensors]
                ops.append(
                    self._copy("keep_shard", (*reduction.held, *shards), self._shard_bytes(reduction.bucket))
                )
            else:
                tensors = zip(reduction.held, reduction.bucket.tensors, strict=True)
                ops += [self._copy("copy_from_bucket", (copy,), tensor.nbytes) for copy, (_, tensor) in tensors]
        return ops

    def _add_shards(self, reductions: list[_Reduction]) -> list[int]:
        """Adds this rank's shards of the buckets to those of the micro-batches before."""
        ops = []
        for reduction in reductions:
            shards = [self._port(i, tensor, SHARDED) for i, tensor in reduction.bucket.tensors]
            nbytes = self._shard_bytes(reduction.bucket)
            ops.append(
                self.builder.compute(
                    "aten.add_", phase=t.Phase.BACKWARD, inputs=(*shards, *reduction.held), bytes_read=2 * nbytes,
                    bytes_written=nbytes,
                )
            )  # fmt: skip
        return ops

    def _shard_bytes(self, bucket: Bucket) -> int:
        ranks = self.division.ranks(bucket.axes)
        return bucket.nbytes(ranks) // ranks

    def _add_unreduced(self, tensors: list[tuple[int, t.Tensor]], ready: dict[int, dict[int, Gradient]]) -> None:
        """Adds up gradients that no other rank has a summand of, where no block of their own does."""
        alone = [
            (i, tensor)
            for i, tensor in tensors
            if not reduction_axes(self.mesh, tensor.sharded) and not adds_up(self.graph, tensor.id)
        ]
        if not alone or not self.last:
            return
        self._begin("unreduced")
        ops = {
            i: add_to_gradient(self.builder, self._port(i, tensor, WHOLE), tensor.nbytes) for i, tensor in alone
        }
        for micro_batch in sorted(ready)[1:] if self.options.zero == 2 else (self.last,):
            for identity, op in ops.items():
                self._at(ready[micro_batch][identity].ready, [op])
        self.builder.instance(self.block, bindings=self.bindings)

    # -- parameters and buffers ----------------------------------------------------------------------------

    def _updated(self) -> list[Bucket]:
        """The parameters that the optimizer updates, in buckets, in the order in which forward reads them.

        They are filled from the last one on, as those of gradients are, which share them (Megatron-LM).
        """
        self.updated = updated_parameters(self.graph, self.steps)
        self.reads = first_reads(self.graph, self.steps, set(self.updated))
        start = (0, self.steps[0][1])
        order = sorted(self.updated, key=lambda i: self.reads.get(i, start), reverse=True)
        tensors = ((i, self.graph.tensors[self.graph.locate_tensor(i)[2]]) for i in order)
        buckets = fill(tensors, self.mesh, self._limits())
        for bucket in buckets:
            bucket.tensors.reverse()
        return sorted(buckets, key=lambda bucket: self.reads.get(bucket.tensors[0][0], start))

    def _gather_ahead(self, buckets: list[Bucket]) -> None:
        """Gathers parameters as the step before left them, one bucket ahead of the layers that read it."""
        at = start = (0, self.steps[0][1])
        issued: list[int] = []
        for bucket in buckets:
            gather = self._gather(bucket, t.Phase.FORWARD)
            self._at(at, [*issued, gather])
            at = max(at, self.reads.get(bucket.tensors[0][0], start))
            issued = [self.builder.compute("zero.wait", phase=t.Phase.FORWARD, deps=(gather,))]
        self._at(at, issued)

    def _gather(self, bucket: Bucket, phase: t.Phase) -> int:
        """Gathers parameters in place: what the optimizer has just made of this rank's shards, or what it left."""
        builder, shards, whole = self.builder, [], []
        for identity, tensor in bucket.tensors:
            if phase == t.Phase.OPTIMIZER:
                shards.append(self._port(self.updated[identity], tensor, SHARDED))
            port = self._port(identity, tensor, WHOLE)
            whole.append(
                builder.tensor(
                    tensor.name, tensor.shape, tensor.dtype, tensor.role, alias_of=port, sharded=tensor.sharded
                )
            )
        group, stream = axes_group(builder, bucket.axes)
        return builder.collective(
            "zero.all_gather", t.CollectiveKind.ALL_GATHER, group=group,
            bytes_per_rank=bucket.nbytes(self.division.ranks(bucket.axes)), dtype=bucket.dtype,
            payload=t.Payload.PARAMETER, asynchronous=True, phase=phase, inputs=shards, outputs=whole,
            stream=stream,
        )  # fmt: skip

    def _broadcast_buffers(self) -> None:
        """Rank 0's buffers go to all others before the forward pass that is reduced."""
        builder, nbytes = self.builder, buffer_bytes(self.graph)
        if nbytes == 0 or not self.options.broadcast_buffers:
            return
        group, stream = axes_group(builder, reduction_axes(self.mesh, ()))
        sync = builder.collective(
            "ddp.broadcast_buffers", t.CollectiveKind.BROADCAST, group=group, bytes_per_rank=nbytes,
            dtype=t.DType.UINT8, payload=t.Payload.OTHER, phase=t.Phase.FORWARD, stream=stream,
        )  # fmt: skip
        number = next(n for n, call in enumerate(self.steps) if call[4] == self.last)
        wait = builder.compute("ddp.wait", phase=t.Phase.FORWARD, deps=[sync])
        self._at((number, self.steps[number][1]), [sync, wait])

    # -- rows ----------------------------------------------------------------------------------------------

    def _port(self, identity: int, tensor: t.Tensor, phase: t.Phase) -> int:
        """A port for a tensor of the step, whole or this rank's shard."""
        self.bindings.append(self.job.tensor_id(identity, phase))
        divided = self.division.axes(tensor) if phase == SHARDED else ()
        shape = self.division.shape(tensor) if phase == SHARDED else tensor.shape
        return self.builder.tensor(
            tensor.name, shape, tensor.dtype, tensor.role, port=True, sharded=(*tensor.sharded, *divided)
        )

    def _copy(self, name: str, inputs: tuple[int, ...], nbytes: int, made: tuple[int, ...] = ()) -> int:
        return self.builder.compute(
            f"{self.name}.{name}", phase=t.Phase.BACKWARD, inputs=inputs, outputs=made, bytes_read=nbytes,
            bytes_written=nbytes,
        )  # fmt: skip


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
