"""Columns to protobuf messages, a chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from echograph.ir import types as t
from echograph.ir.columns import NONE, Ragged, TensorTable
from echograph.ir.graph import FORMAT_MAJOR, Graph, Group
from echograph.proto import workload_pb2 as pb

CHUNK = 65_536


def header(graph: Graph, magic: str, level: pb.Level.ValueType) -> pb.Graph:
    """Everything before the tables."""
    w = graph.workload
    return pb.Graph(
        magic=magic,
        format_major=FORMAT_MAJOR,
        format_minor=graph.format_minor,
        level=level,
        name=graph.name,
        producer=graph.producer,
        workload=pb.Workload(
            model=w.model, parameters=w.parameters, batch_size=w.batch_size, sequence_length=w.sequence_length,
            dtype=pb.DType.ValueType(w.dtype), optimizer=w.optimizer, master_weights=w.master_weights,
            model_flops=w.model_flops, causal_attention_flops=w.causal_attention_flops,
        ),
        tensor_count=len(graph.tensors),
        op_count=len(graph.ops),
        strings=graph.strings,
        attributes=[encode_attributes(a) for a in graph.ops.attribute_values],
        streams=graph.streams,
        mesh=[pb.Axis(name=a.name, size=a.size) for a in graph.mesh],
        groups=list(map(_group, graph.groups)),
        passes=graph.passes,
    )  # fmt: skip


def _group(group: Group) -> pb.Group:
    if not group.positions:
        return pb.Group(name=group.name, axes=group.axes, ranks=group.ranks)
    # Who does not know positions must not take all ranks along the axis for members: it finds neither.
    (along,) = group.axes
    return pb.Group(name=group.name, along=along, positions=group.positions)


def trailer(graph: Graph) -> pb.Graph:
    """Blocks and programs."""
    blocks = [
        pb.Block(
            name=b.name, tensor_begin=b.tensors.start, tensor_end=b.tensors.stop, op_begin=b.ops.start,
            op_end=b.ops.stop,
            instances=[
                pb.Instance(label=i.label, bindings=i.bindings, op_bindings=i.op_bindings) for i in b.instances
            ],
        )
        for b in graph.blocks
    ]  # fmt: skip
    programs = [
        pb.Program(
            role=p.role,
            coordinates=[pb.Coordinate(axis=a, value=v) for a, v in p.coordinates.items()],
            ranks=p.ranks,
            block=p.calls[:, 0].tolist(),
            begin=p.calls[:, 1].tolist(),
            end=p.calls[:, 2].tolist(),
            instance=p.calls[:, 3].tolist(),
            micro_batch=p.calls[:, 4].tolist(),
        )
        for p in graph.programs
    ]
    return pb.Graph(blocks=blocks, programs=programs)


def tensor_chunks(tensors: TensorTable) -> Iterator[pb.TensorChunk]:
    """The tensor table, a chunk at a time."""
    for low in range(0, len(tensors), CHUNK):
        high = min(low + CHUNK, len(tensors))
        chunk = pb.TensorChunk()
        columns = (tensors.name, tensors.dtype, tensors.role, tensors.alias_of, tensors.port)
        ragged = (_rows(tensors.shape, low, high), _rows(tensors.sharded, low, high))
        rows = zip(*(c[low:high].tolist() for c in columns), *ragged, strict=True)
        for name, dtype, role, alias_of, port, shape, sharded in rows:
            tensor = chunk.tensors.add(name=name, dtype=dtype, role=role, port=port)
            tensor.shape.extend(shape)
            tensor.sharded.extend(sharded)
            if alias_of != NONE:
                tensor.alias_of = alias_of
        yield chunk


def _rows(ragged: Ragged, low: int, high: int) -> Iterator[list[int]]:
    offsets = ragged.offsets[low : high + 1].tolist()
    first = offsets[0] if offsets else 0
    values = ragged.values[first : offsets[-1]].tolist() if offsets else []
    return (values[a - first : b - first] for a, b in pairwise(offsets))


def encode_attributes(value: t.Attributes) -> pb.Attributes:
    """The message of a compute operation's attributes."""
    match value:
        case t.Gemm():
            return pb.Attributes(gemm=pb.Gemm(transpose_a=value.transpose_a, transpose_b=value.transpose_b))
        case t.Attention():
            return pb.Attributes(
                attention=pb.Attention(
                    heads=value.heads, kv_heads=value.kv_heads, head_dim=value.head_dim, causal=value.causal,
                    dropout=value.dropout,
                )
            )  # fmt: skip
        case t.Convolution():
            return pb.Attributes(
                convolution=pb.Convolution(
                    stride=value.stride, padding=value.padding, dilation=value.dilation, groups=value.groups,
                    transposed=value.transposed,
                )
            )  # fmt: skip
        case t.MultiTensor():
            return pb.Attributes(multi_tensor=pb.MultiTensor(parts=value.parts, leads=value.leads))
