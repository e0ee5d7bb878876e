"""Columns to protobuf messages, a chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from echograph.ir import types as t
from echograph.ir.columns import NONE, OpTable, Ragged, TensorTable
from echograph.ir.graph import FORMAT_MAJOR, FORMAT_MINOR, Graph
from echograph.proto import workload_pb2 as pb

CHUNK = 65_536


def header(graph: Graph, magic: str, level: pb.Level.ValueType) -> pb.Graph:
    """Everything before the tables."""
    w = graph.workload
    return pb.Graph(
        magic=magic,
        format_major=FORMAT_MAJOR,
        format_minor=FORMAT_MINOR,
        level=level,
        name=graph.name,
        producer=graph.producer,
        workload=pb.Workload(
            model=w.model, parameters=w.parameters, batch_size=w.batch_size, sequence_length=w.sequence_length,
            dtype=pb.DType.ValueType(w.dtype), optimizer=w.optimizer, master_weights=w.master_weights,
        ),
        tensor_count=len(graph.tensors),
        op_count=len(graph.ops),
        strings=graph.strings,
        attributes=[encode_attributes(a) for a in graph.ops.attribute_values],
        streams=graph.streams,
        mesh=[pb.Axis(name=a.name, size=a.size) for a in graph.mesh],
        groups=[pb.Group(name=g.name, axes=g.axes, ranks=g.ranks) for g in graph.groups],
    )  # fmt: skip


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


def op_chunks(ops: OpTable) -> Iterator[pb.OpChunk]:
    """The operation table, a chunk at a time."""
    for low in range(0, len(ops), CHUNK):
        high = min(low + CHUNK, len(ops))
        chunk = pb.OpChunk()
        columns = (ops.kind, ops.name, ops.phase, ops.module, ops.stream)
        ragged = (ops.inputs, ops.outputs, ops.deps)
        rows = zip(*(c[low:high].tolist() for c in columns), *(_rows(r, low, high) for r in ragged), strict=True)
        for row, (kind, name, phase, module, stream, inputs, outputs, deps) in enumerate(rows, low):
            op = chunk.ops.add(name=name, phase=phase, module=module, stream=stream)
            op.inputs.extend(inputs)
            op.outputs.extend(outputs)
            if deps:
                op.deps.extend(deps)
            _KINDS[kind](op, ops, row)
            if ops.duration.offsets[row] != ops.duration.offsets[row + 1]:
                _durations(op, ops, row)
        yield chunk


def _rows(ragged: Ragged, low: int, high: int) -> Iterator[list[int]]:
    offsets = ragged.offsets[low : high + 1].tolist()
    first = offsets[0] if offsets else 0
    values = ragged.values[first : offsets[-1]].tolist() if offsets else []
    return (values[a - first : b - first] for a, b in pairwise(offsets))


def _durations(op: pb.Op, ops: OpTable, row: int) -> None:
    for i in range(int(ops.duration.offsets[row]), int(ops.duration.offsets[row + 1])):
        op.durations.add(
            device=int(ops.duration_device[i]),
            picoseconds=int(ops.duration.values[i]),
            source=pb.Source.ValueType(int(ops.duration_source[i])),
            samples=int(ops.duration_samples[i]),
            spread=float(ops.duration_spread[i]),
        )


def _compute(op: pb.Op, ops: OpTable, row: int) -> None:
    compute = op.compute
    compute.SetInParent()
    forward = int(ops.forward_op[row])
    if forward >= 0:
        compute.forward_op = forward
    elif forward < NONE:
        compute.forward_op_port = -2 - forward
    compute.flops = int(ops.flops[row])
    compute.bytes_read = int(ops.bytes_read[row])
    compute.bytes_written = int(ops.bytes_written[row])
    if ops.attributes[row] != NONE:
        compute.attributes = int(ops.attributes[row])
    if ops.arguments[row]:
        compute.arguments = int(ops.arguments[row])


def _collective(op: pb.Op, ops: OpTable, row: int) -> None:
    op.collective.MergeFrom(
        pb.Collective(
            collective=pb.CollectiveKind.ValueType(int(ops.variant[row])),
            group=int(ops.group[row]),
            bytes_per_rank=int(ops.nbytes[row]),
            dtype=pb.DType.ValueType(int(ops.dtype[row])),
            payload=pb.Payload.ValueType(int(ops.payload[row])),
            asynchronous=bool(ops.asynchronous[row]),
        )
    )


def _point_to_point(op: pb.Op, ops: OpTable, row: int) -> None:
    target = op.send if ops.kind[row] == t.OpKind.SEND else op.recv
    target.MergeFrom(
        pb.PointToPoint(
            group=int(ops.group[row]),
            peer=int(ops.peer[row]),
            tag=int(ops.tag[row]),
            bytes=int(ops.nbytes[row]),
            payload=pb.Payload.ValueType(int(ops.payload[row])),
        )
    )


def _copy(op: pb.Op, ops: OpTable, row: int) -> None:
    op.copy.direction = pb.CopyDirection.ValueType(int(ops.variant[row]))
    op.copy.bytes = int(ops.nbytes[row])


def _host(op: pb.Op, ops: OpTable, row: int) -> None:
    op.host.SetInParent()


_KINDS = {
    t.OpKind.COMPUTE: _compute,
    t.OpKind.COLLECTIVE: _collective,
    t.OpKind.SEND: _point_to_point,
    t.OpKind.RECV: _point_to_point,
    t.OpKind.COPY: _copy,
    t.OpKind.HOST: _host,
}


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
