"""Rows copied column by column are those that the builder would have written one by one."""

from __future__ import annotations

from layered import layered_step, timed

from echograph.ir import serde
from echograph.ir.builder import GraphBuilder, copy_rows
from echograph.ir.graph import JobGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.rewrite import empty_copy
from echograph.ir.types import Compute, MultiTensor


def job() -> JobGraph:
    return timed(DataParallel(replicas=4, zero=1, micro_batches=2)(layered_step(6)), "h100-sxm", 7)


def one_by_one(builder: GraphBuilder, graph: JobGraph, number: int) -> None:
    block = graph.blocks[number]
    tensors, ops = builder.tensor_count() - block.tensors.start, builder.op_count() - block.ops.start
    for tensor in graph.tensors[block.tensors.start : block.tensors.stop]:
        alias = None if tensor.alias_of is None else tensor.alias_of + tensors
        builder.tensor(
            tensor.name, tensor.shape, tensor.dtype, tensor.role, alias_of=alias, port=tensor.port,
            sharded=tensor.sharded,
        )  # fmt: skip
    for op in graph.ops[block.ops.start : block.ops.stop]:
        changes: dict[str, object] = {
            "inputs": [i + tensors for i in op.inputs],
            "outputs": [i + tensors for i in op.outputs],
            "deps": [before + ops for before in op.deps],
        }
        if isinstance(op, Compute) and op.forward_op is not None and op.forward_op >= 0:
            changes["forward_op"] = op.forward_op + ops
        builder.add(op, **changes)


def copied(graph: JobGraph, *, columns: bool, twice: bool) -> bytes:
    """All blocks; or the second one twice, so that everything after it is shifted."""
    builder = empty_copy(graph)
    for number, block in enumerate(graph.blocks):
        if number:
            builder.begin_block(block.name)
        for _ in range(1 + (twice and number == 1)):
            if columns:
                copy_rows(builder, graph, block)
            else:
                one_by_one(builder, graph, number)
    builder.program([], role="none")
    return b"".join(serde.encode(builder.build(JobGraph)))


def test_blocks_are_the_same_bytes_wherever_they_begin() -> None:
    graph = job()
    for twice in (False, True):
        assert copied(graph, columns=True, twice=twice) == copied(graph, columns=False, twice=twice)


def test_operations_may_get_other_attributes() -> None:
    graph = job()
    builder = empty_copy(graph)
    other = MultiTensor(parts=3)
    copy_rows(builder, graph, graph.blocks[0], {graph.blocks[0].ops.start: other})
    copy = builder.build(JobGraph)
    first, *rest = copy.ops
    assert isinstance(first, Compute)
    assert first.attributes == other
    its = graph.ops[1 : graph.blocks[0].ops.stop]
    assert [getattr(op, "attributes", None) for op in rest] == [getattr(op, "attributes", None) for op in its]
