"""Copying a graph into a builder, for a pass that adds to it."""

from __future__ import annotations

from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import Graph

Call = tuple[int, int, int, int, int]


def copy_blocks(graph: Graph) -> GraphBuilder:
    """A builder that holds all blocks and instances of a graph, but no program.

    Table positions and ids stay what they were; what a pass adds goes into blocks of its own, begun after.
    """
    builder = GraphBuilder(
        name=graph.name, workload=graph.workload, producer=graph.producer, streams=graph.streams
    )
    builder.unknown = graph.unknown
    builder.mesh = graph.mesh
    for group in graph.groups:
        builder.group(group.name, axes=group.axes, ranks=group.ranks)
    for number, block in enumerate(graph.blocks):
        if number:
            builder.begin_block(block.name)
        for tensor in graph.tensors[block.tensors.start : block.tensors.stop]:
            builder.tensor(
                tensor.name,
                tensor.shape,
                tensor.dtype,
                tensor.role,
                alias_of=tensor.alias_of,
                port=tensor.port,
            )
        for op in graph.ops[block.ops.start : block.ops.stop]:
            builder.add(op)
        for instance in block.instances:
            builder.instance(number, instance.label, bindings=instance.bindings, op_bindings=instance.op_bindings)
    return builder
