"""Copying a graph into a builder, for a pass that adds to it."""

from __future__ import annotations

from collections.abc import Iterable

from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import Graph
from echograph.ir.rows import copy_rows
from echograph.ir.types import Phase, Tensor

__all__ = [
    "ACCUMULATE",
    "Call",
    "accumulate",
    "add_to_gradient",
    "copy_blocks",
    "copy_rows",
    "copy_tables",
    "empty_copy",
    "in_micro_batch",
]

Call = tuple[int, int, int, int, int]
ACCUMULATE = "accumulate"
"""Name of the blocks that add a micro-batch's gradients to those of the ones before it."""


def empty_copy(graph: Graph) -> GraphBuilder:
    """A builder with what a graph says of itself, its streams and groups, but nothing in its tables."""
    builder = GraphBuilder(
        name=graph.name, workload=graph.workload, producer=graph.producer, streams=graph.streams
    )
    builder.unknown = graph.unknown
    builder.mesh = graph.mesh
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
    for number, block in enumerate(graph.blocks):
        if number:
            builder.begin_block(block.name)
        copy_rows(builder, graph, block)
        for instance in block.instances:
            builder.instance(number, instance.label, bindings=instance.bindings, op_bindings=instance.op_bindings)


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
