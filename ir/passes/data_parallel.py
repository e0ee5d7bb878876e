"""Data parallelism as PyTorch's DistributedDataParallel does it.

Gradients are put into buckets in the order in which they become ready (the order that DDP settles on after the
first iteration): a bucket closes when it holds at least its limit, 1 MiB for the first and 25 MiB for the others,
and holds one data type. When the last gradient of a bucket is ready, each is scaled and copied into the bucket and
the bucket is all-reduced on the group's own stream, buckets in order, while backward goes on. After backward the
compute stream waits for all of them and the results are copied back. Buffers are broadcast before forward.
(Li et al., "PyTorch Distributed", VLDB 2020, sections 3 and 4; torch.nn.parallel documentation.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from echograph.errors import PlanError
from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder
from echograph.ir.columns import NONE
from echograph.ir.graph import Axis, Graph, JobGraph, StepGraph
from echograph.ir.passes.rewrite import Call, accumulate, add_to_gradient, copy_blocks, in_micro_batch

MIB = 2**20
AXIS = "dp"
STAGES = "pp"
MAX_REPLICAS = 10_000_000
MAX_MICRO_BATCHES = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gradient:
    """A gradient that is ready: where it is, and at which call and operation."""

    tensor_id: int
    tensor: int
    ready: tuple[int, int]


@dataclass(slots=True, kw_only=True)
class _Bucket:
    gradients: list[_Gradient] = field(default_factory=list)
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """Lowers a step graph to a job of `replicas` equal ranks, in the way of DistributedDataParallel.

    Attributes:
        replicas: number of ranks, each with the whole model and its own micro-batches.
        micro_batches: forward and backward passes of each rank before the optimizer; gradients add up, and only
            the last pass reduces them (`no_sync`).
        bucket_bytes: size at which a bucket closes (`bucket_cap_mb`).
        first_bucket_bytes: the same for the first bucket.
        gradient_as_bucket_view: gradients live in the buckets, so nothing is copied in and out.
        broadcast_buffers: rank 0's buffers are broadcast before each forward pass.
    """

    replicas: int
    micro_batches: int = 1
    bucket_bytes: int = 25 * MIB
    first_bucket_bytes: int = 1 * MIB
    gradient_as_bucket_view: bool = False
    broadcast_buffers: bool = True

    def __call__(self, graph: StepGraph | JobGraph) -> JobGraph:
        """The job graph; a pipeline's job graph is replicated stage by stage, and keeps its micro-batches.

        Raises:
            PlanError: the number of replicas is not between 1 and 10 million, or that of micro-batches not
                between 1 and 65,536.
        """
        if not 1 <= self.micro_batches <= MAX_MICRO_BATCHES:
            raise PlanError(f"{self.micro_batches} micro-batches: choose between 1 and {MAX_MICRO_BATCHES:,}")
        if not 1 <= self.replicas <= MAX_REPLICAS:
            raise PlanError(f"{self.replicas} data-parallel replicas: choose between 1 and {MAX_REPLICAS:,}")
        if isinstance(graph, JobGraph):
            return self._replicate_stages(graph)
        builder = copy_blocks(graph)
        # What shares a replica (tensor parallelism) is inside: its ranks are neighbours.
        builder.mesh = (Axis(name=AXIS, size=self.replicas), *graph.mesh)
        builder.group(AXIS, axes=(AXIS,))
        calls: list[Call] = [(b, x, y, i, m) for b, x, y, i, m in graph.programs[0].calls.tolist() if y > x]
        passes, update = _split(graph, calls)
        gradients = _ready_gradients(graph, passes)
        last = passes
        if self.replicas > 1 and gradients:
            last = self._add(graph, builder, passes, gradients, self._broadcast)
        added = []
        if self.micro_batches > 1:
            added = [accumulate(builder, ((graph.tensors[g.tensor], g.tensor_id) for g in gradients))]
        program = in_micro_batch(passes if self.micro_batches > 1 else last, 0)
        for micro_batch in range(1, self.micro_batches):
            done = [*passes, *added]
            if micro_batch == self.micro_batches - 1 and last is not passes:
                done = last
            program += in_micro_batch(done, micro_batch)
        program += in_micro_batch(update, self.micro_batches - 1)
        builder.program(program, role="replica")
        return builder.build(JobGraph)

    def _replicate_stages(self, graph: JobGraph) -> JobGraph:
        """Each stage reduces its own gradients, in the last of its micro-batches; its ranks stay together."""
        if self.micro_batches != 1:
            raise PlanError("the pipeline has its micro-batches already: give them to it alone")
        outer = [axis for axis in graph.mesh if axis.name == STAGES]
        builder = copy_blocks(graph, inside=1 if len(graph.mesh) > len(outer) else self.replicas)
        builder.mesh = (*outer, Axis(name=AXIS, size=self.replicas), *(a for a in graph.mesh if a not in outer))
        for program in graph.programs:
            calls: list[Call] = [(b, x, y, i, m) for b, x, y, i, m in program.calls.tolist() if y > x]
            # Every micro-batch makes the gradients; they are ready when the last one has.
            ready = {g.tensor_id: g for g in _ready_gradients(graph, calls)}
            gradients = sorted(ready.values(), key=lambda g: g.ready)
            if self.replicas > 1 and gradients:
                calls = self._add(graph, builder, calls, gradients, None)
            builder.program(calls, role=program.role, coordinates=program.coordinates, ranks=program.ranks)
        return builder.build(JobGraph)

    def _add(
        self,
        graph: Graph,
        builder: GraphBuilder,
        calls: list[Call],
        gradients: list[_Gradient],
        broadcast: Callable[[Graph, GraphBuilder], list[int]] | None,
    ) -> list[Call]:
        """Adds a block with everything that DDP does; returns the calls with its operations among them."""
        block = builder.begin_block("ddp")
        start = broadcast(graph, builder) if broadcast is not None and self.broadcast_buffers else []
        after: dict[tuple[int, int], list[int]] = {}
        bindings: list[int] = []
        reduced = []
        trigger = (0, 0)
        for number, bucket in enumerate(self._buckets(graph, gradients)):
            ops, copies = self._reduce(graph, builder, bucket, number, bindings)
            # DDP launches bucket n only after bucket n - 1, also when its gradients are ready sooner.
            trigger = max(trigger, bucket.gradients[-1].ready)
            after.setdefault(trigger, []).extend(ops)
            reduced.append((ops[-1], bucket, copies))
        after.setdefault(gradients[-1].ready, []).extend(self._finish(graph, builder, reduced))
        builder.instance(block, bindings=bindings)
        first = [(block, start[0], start[-1] + 1, 0, 0)] if start else []
        return first + _insert(calls, after, block)

    def _buckets(self, graph: Graph, gradients: list[_Gradient]) -> list[_Bucket]:
        """Assigns gradients to buckets, one open bucket for each data type."""
        open_buckets: dict[int, _Bucket] = {}
        closed: list[_Bucket] = []
        limit: dict[int, int] = {}
        sizes = graph.tensors.nbytes
        for gradient in gradients:
            dtype = int(graph.tensors.dtype[gradient.tensor])
            bucket = open_buckets.setdefault(dtype, _Bucket())
            bucket.gradients.append(gradient)
            bucket.nbytes += int(sizes[gradient.tensor])
            if bucket.nbytes >= limit.get(dtype, self.first_bucket_bytes):
                closed.append(open_buckets.pop(dtype))
                limit[dtype] = self.bucket_bytes
        return [*closed, *open_buckets.values()]

    def _reduce(
        self, graph: Graph, builder: GraphBuilder, bucket: _Bucket, number: int, bindings: list[int]
    ) -> tuple[list[int], list[int]]:
        """Operations that fill and reduce a bucket, and the tensors that hold the bucket's gradients."""
        ports, ops = [], []
        for gradient in bucket.gradients:
            tensor = graph.tensors[gradient.tensor]
            ports.append(builder.tensor(tensor.name, tensor.shape, tensor.dtype, tensor.role, port=True))
            bindings.append(gradient.tensor_id)
            if self.micro_batches > 1:
                ops.append(add_to_gradient(builder, ports[-1], tensor.nbytes))
            if not self.gradient_as_bucket_view:
                copy = builder.tensor(f"{tensor.name}.bucket", tensor.shape, tensor.dtype, t.TensorRole.BUFFER)
                ops.append(_copy(builder, "ddp.copy_to_bucket", ports[-1], tensor.nbytes, (copy,)))
                ports[-1] = copy
        reduce = builder.collective(
            f"ddp.bucket_{number}",
            t.CollectiveKind.ALL_REDUCE,
            group=builder.group(AXIS, axes=(AXIS,)),
            bytes_per_rank=bucket.nbytes,
            dtype=t.DType(int(graph.tensors.dtype[bucket.gradients[0].tensor])),
            payload=t.Payload.GRADIENT,
            asynchronous=True,
            phase=t.Phase.BACKWARD,
            inputs=ports,
            deps=ops,
            stream=builder.stream(f"comm.{AXIS}"),
        )
        return [*ops, reduce], ports

    def _finish(
        self, graph: Graph, builder: GraphBuilder, reduced: list[tuple[int, _Bucket, list[int]]]
    ) -> list[int]:
        """The compute stream waits for every bucket; then the gradients are copied out of the buckets."""
        wait = builder.compute("ddp.wait", phase=t.Phase.BACKWARD, deps=[op for op, _, _ in reduced])
        if self.gradient_as_bucket_view:
            return [wait]
        sizes = graph.tensors.nbytes
        return [wait] + [
            _copy(builder, "ddp.copy_from_bucket", copy, int(sizes[gradient.tensor]))
            for _, bucket, copies in reduced
            for gradient, copy in zip(bucket.gradients, copies, strict=True)
        ]

    def _broadcast(self, graph: Graph, builder: GraphBuilder) -> list[int]:
        nbytes = sum(
            int(size) * len(block.instances)
            for block in graph.blocks
            for size in graph.tensors.nbytes[block.tensors.start : block.tensors.stop][
                _own_buffers(graph, block.tensors)
            ]
        )
        if nbytes == 0:
            return []
        sync = builder.collective(
            "ddp.broadcast_buffers",
            t.CollectiveKind.BROADCAST,
            group=builder.group(AXIS, axes=(AXIS,)),
            bytes_per_rank=nbytes,
            dtype=t.DType.UINT8,
            payload=t.Payload.OTHER,
            phase=t.Phase.FORWARD,
            stream=builder.stream(f"comm.{AXIS}"),
        )
        return [sync, builder.compute("ddp.wait", phase=t.Phase.FORWARD, deps=[sync])]


def _split(graph: StepGraph, calls: list[Call]) -> tuple[list[Call], list[Call]]:
    """The calls of forward and backward, and those from the first operation of the optimizer on."""
    optimizer = np.flatnonzero(graph.ops.phase == t.Phase.OPTIMIZER)
    for number, (block, begin, end, instance, micro_batch) in enumerate(calls):
        at = int(np.searchsorted(optimizer, begin))
        if at < len(optimizer) and optimizer[at] < end:
            cut = int(optimizer[at])
            before = [(block, begin, cut, instance, micro_batch)] if cut > begin else []
            return [*calls[:number], *before], [(block, cut, end, instance, micro_batch), *calls[number + 1 :]]
    return calls, []


def _own_buffers(graph: Graph, tensors: range) -> np.ndarray:
    rows = slice(tensors.start, tensors.stop)
    made = (graph.maker[rows] != NONE) | (graph.tensors.alias_of[rows] != NONE)
    return np.asarray((graph.tensors.role[rows] == t.TensorRole.BUFFER) & ~graph.tensors.port[rows] & ~made)


def _copy(builder: GraphBuilder, name: str, source: int, nbytes: int, made: tuple[int, ...] = ()) -> int:
    return builder.compute(
        name, phase=t.Phase.BACKWARD, inputs=(source,), outputs=made, bytes_read=nbytes, bytes_written=nbytes
    )


def final_gradients(graph: Graph) -> list[int]:
    """The tensors that hold the parameters' gradients when backward is done, as rows of the tensor table.

    Those are what backward makes and the optimizer reads. Roles say less: the gradients of activations may share
    their memory (a sum that flows on, unchanged), and one parameter's gradient may be a part of another's.
    """
    made = ~graph.tensors.port & (graph.maker != NONE)
    final = _read_by_optimizer(graph) & made & (graph.ops.phase[graph.maker] == t.Phase.BACKWARD)
    if final.any():
        return [int(row) for row in np.flatnonzero(final)]
    # No optimizer: a gradient may be a view of what a kernel made, and the later one is the parameter's.
    gradients = np.flatnonzero(made & (graph.tensors.role == t.TensorRole.GRADIENT))
    return list({int(graph.root[row]): int(row) for row in gradients}.values())


def _read_by_optimizer(graph: Graph) -> np.ndarray:
    """For every tensor, whether an operation of the optimizer reads it, in its own block or through a port."""
    inputs, tensors = graph.ops.inputs, graph.tensors
    read = np.zeros(len(tensors), np.bool_)
    read[inputs.values[graph.ops.phase[inputs.rows] == t.Phase.OPTIMIZER]] = True
    for block in graph.blocks:
        ports = block.tensors.start + np.flatnonzero(tensors.port[block.tensors.start : block.tensors.stop])
        for instance in block.instances:
            for port, bound in zip(ports.tolist(), instance.bindings, strict=True):
                if read[port]:
                    read[graph.locate_tensor(bound)[2]] = True
    return read


def _ready_gradients(graph: Graph, calls: list[Call]) -> list[_Gradient]:
    """The final gradients of all parameters, in the order in which backward makes them."""
    made_by: dict[int, list[int]] = {}
    for tensor in final_gradients(graph):
        made_by.setdefault(int(graph.maker[tensor]), []).append(tensor)
    makers = np.array(sorted(made_by), np.int64)
    found = []
    for number, (block, begin, end, instance, _) in enumerate(calls):
        low, high = np.searchsorted(makers, (begin, end))
        for op in makers[low:high].tolist():
            found += [
                _Gradient(tensor_id=graph.tensor_id(block, instance, i), tensor=i, ready=(number, op))
                for i in made_by[op]
            ]
    return found


def _insert(calls: list[Call], after: dict[tuple[int, int], list[int]], added_block: int) -> list[Call]:
    """Cuts calls after given operations and calls the added operations there."""
    cuts: dict[int, list[int]] = {}
    for call, op in after:
        cuts.setdefault(call, []).append(op)
    out: list[Call] = []
    for number, (block, begin, end, instance, micro_batch) in enumerate(calls):
        for op in sorted(cuts.get(number, ())):
            out.append((block, begin, op + 1, instance, micro_batch))
            added = after[number, op]
            out.append((added_block, added[0], added[-1] + 1, 0, micro_batch))
            begin = op + 1
        if begin < end:
            out.append((block, begin, end, instance, micro_batch))
    return out
