"""Rows copied column by column are those that the builder would have written one by one."""

from __future__ import annotations

import pytest
from layered import layered_step, timed

from echograph.errors import GraphError
from echograph.ir import serde
from echograph.ir.builder import GraphBuilder, append_blocks, copy_rows
from echograph.ir.graph import JobGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.rewrite import empty_copy
from echograph.ir.text import to_text
from echograph.ir.types import Compute, DType, MultiTensor, Phase, Tensor, TensorRole


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


def test_blocks_that_follow_each_other_are_the_same_bytes_at_one_go() -> None:
    graph = job()
    builder = empty_copy(graph)
    append_blocks(builder, graph, graph.blocks[:1])
    builder.begin_block(graph.blocks[1].name)
    append_blocks(builder, graph, graph.blocks[1:])
    builder.program([], role="none")
    assert b"".join(serde.encode(builder.build(JobGraph))) == copied(graph, columns=False, twice=False)


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


GRADIENTS = [
    Tensor(id=0, name="a", shape=(4, 8), dtype=DType.BF16, role=TensorRole.GRADIENT, sharded=("tp",)),
    Tensor(id=1, name="b", shape=(), dtype=DType.FP32, role=TensorRole.GRADIENT),
    Tensor(id=2, name="c", shape=(3,), dtype=DType.FP32, role=TensorRole.BUFFER, sharded=("ep", "tp")),
]


def added(*, at_once: bool, roles: bool = True) -> str:
    """Tensors and kernels of a block, between others that are added one by one."""
    builder = GraphBuilder(name="rows")
    first = builder.tensor("first", (2,), DType.BF16, TensorRole.PARAMETER)
    builder.compute("aten.mul", inputs=(first,), flops=7, stream=0, module="before")
    names, axes = [f"{each.name}.grad" for each in GRADIENTS], [("tp",), (), ("tp", "ep")]
    kinds, aliases = [TensorRole.BUFFER] * 3, [first, -1, -1]
    if at_once:
        rows = builder.tensors(
            GRADIENTS, names=names, roles=kinds if roles else (), ports=[False] * 3, alias_of=aliases, sharded=axes
        )
    else:
        rows = range(1, 4)
        for each, name, role, alias, its in zip(GRADIENTS, names, kinds, aliases, axes, strict=True):
            role = role if roles else each.role
            alias_of = None if alias < 0 else alias
            builder.tensor(name, each.shape, each.dtype, role, alias_of=alias_of, sharded=its)
    operators, sizes, outputs = ["aten.add_", "copy", "aten.add_"], [96, 4, 24], [(), (rows[2],), ()]
    if at_once:
        made = builder.computes(
            operators, phase=Phase.BACKWARD, inputs=[(row,) for row in rows], outputs=outputs,
            bytes_read=[2 * size for size in sizes], bytes_written=sizes,
        )  # fmt: skip
        assert made == range(1, 4)
    else:
        for name, row, out, size in zip(operators, rows, outputs, sizes, strict=True):
            builder.compute(
                name, phase=Phase.BACKWARD, inputs=(row,), outputs=out, bytes_read=2 * size, bytes_written=size
            )
    builder.compute("aten.sub", inputs=(rows[0],), deps=(2,), forward_op=0, bytes_read=5, module="after")
    return "".join(to_text(builder.build(JobGraph, whole=False)))


def test_what_is_added_at_once_is_what_is_added_one_by_one() -> None:
    for roles in (True, False):
        assert added(at_once=True, roles=roles) == added(at_once=False, roles=roles)


def test_bytes_beyond_64_bits_are_refused_at_once_as_well() -> None:
    builder = GraphBuilder(name="rows")
    with pytest.raises(GraphError, match=r"'aten.add_' has a number beyond 64 bits"):
        builder.computes(["aten.add_"], phase=Phase.BACKWARD, inputs=[()], bytes_read=[2**64], bytes_written=[1])
