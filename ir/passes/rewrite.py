"""Copying a graph into a builder, for a pass that adds to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import Block, Graph
from echograph.ir.types import Attributes, Compute, Phase, Tensor

Call = tuple[int, int, int, int, int]
ACCUMULATE = "accumulate"
"""Name of the blocks that add a micro-batch's gradients to those of the ones before it."""


def empty_copy(graph: Graph, inside: int = 1) -> GraphBuilder:
    """A builder with what a graph says of itself, its streams and groups, but nothing in its tables.

    Args:
        graph: the graph.
        inside: ranks that each of its ranks becomes, counted by a new innermost axis; groups of listed ranks are
            then those of the axis' first position.
    """
    builder = GraphBuilder(
        name=graph.name, workload=graph.workload, producer=graph.producer, streams=graph.streams
    )
    builder.unknown = graph.unknown
    builder.mesh = graph.mesh
    for group in graph.groups:
        builder.group(group.name, axes=group.axes, ranks=[rank * inside for rank in group.ranks])
    return builder


def copy_rows(
    builder: GraphBuilder, graph: Graph, block: Block, attributes: Mapping[int, Attributes] = MappingProxyType({})
) -> None:
    """Copies the tensors and operations of a block into the open block, wherever that begins.

    Args:
        builder: of the new graph.
        graph: the old one.
        block: of it.
        attributes: by row, those of operations that have others now.
    """
    tensors, ops = builder.tensor_count() - block.tensors.start, builder.op_count() - block.ops.start
    for tensor in graph.tensors[block.tensors.start : block.tensors.stop]:
        builder.tensor(
            tensor.name,
            tensor.shape,
            tensor.dtype,
            tensor.role,
            alias_of=None if tensor.alias_of is None else tensor.alias_of + tensors,
            port=tensor.port,
            sharded=tensor.sharded,
        )
    for op in graph.ops[block.ops.start : block.ops.stop]:
        changes: dict[str, object] = {
            "inputs": [tensor + tensors for tensor in op.inputs],
            "outputs": [tensor + tensors for tensor in op.outputs],
            "deps": [before + ops for before in op.deps],
        }
        if isinstance(op, Compute) and op.forward_op is not None and op.forward_op >= 0:
            changes["forward_op"] = op.forward_op + ops
        if op.id in attributes:
            changes["attributes"] = attributes[op.id]
        builder.add(op, **changes)


def copy_blocks(graph: Graph) -> GraphBuilder:
    """A builder that holds all blocks and instances of a graph, but no program.

    Table positions and ids stay what they were; what a pass adds goes into blocks of its own, begun after.
    """
    builder = empty_copy(graph)
    for number, block in enumerate(graph.blocks):
        if number:
            builder.begin_block(block.name)
        copy_rows(builder, graph, block)
        for instance in block.instances:
            builder.instance(number, instance.label, bindings=instance.bindings, op_bindings=instance.op_bindings)
    return builder


def accumulate(builder: GraphBuilder, gradients: Iterable[tuple[Tensor, int]]) -> Call:
    """A block that adds a micro-batch's gradients to those of the ones before it; returns the call of it.

    Args:
        builder: gets the block.
        gradients: each with its tensor id.
    """
    block = builder.begin_block(ACCUMULATE)
    begin = builder.op_count()
    bindings = []
    for tensor, tensor_id in gradients:
        port = builder.tensor(
            tensor.name, tensor.shape, tensor.dtype, tensor.role, port=True, sharded=tensor.sharded
        )
        add_to_gradient(builder, port, tensor.nbytes)
        bindings.append(tensor_id)
    builder.instance(block, bindings=bindings)
    return block, begin, builder.op_count(), 0, 0


def add_to_gradient(builder: GraphBuilder, gradient: int, nbytes: int) -> int:
    """The operation that adds a gradient to what earlier micro-batches left."""
    return builder.compute(
        "aten.add_", phase=Phase.BACKWARD, inputs=(gradient,), bytes_read=2 * nbytes, bytes_written=nbytes
    )


def in_micro_batch(calls: Iterable[Call], micro_batch: int) -> list[Call]:
    """The same calls for a micro-batch."""
    return [(block, begin, end, instance, micro_batch) for block, begin, end, instance, _ in calls]
