"""Columns to protobuf messages, a chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from echograph.ir import types as t
from echograph.ir.columns import NONE, Int64, OpTable, Ragged, TensorTable, UInt8, UInt64
from echograph.ir.graph import FORMAT_MAJOR, Graph, Group
from echograph.ir.types import OpKind
from echograph.progress import Progress, silent
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


# -- operations -----------------------------------------------------------------------------------------------
# The operation table to protobuf messages: all operations of a chunk at a time, field by field.
#
# A message is what protobuf makes of the same values: fields by number, those with their default left out.
# First it is worked out how long every field of every operation is, and so where it stands; then a field is
# written for all of them.


_OPS = 1
"""The field of a chunk that holds operations."""

_MESSAGE_OF = {
    OpKind.COMPUTE: 10,
    OpKind.COLLECTIVE: 11,
    OpKind.SEND: 12,
    OpKind.RECV: 13,
    OpKind.COPY: 14,
    OpKind.HOST: 15,
}


class _Part(Protocol):
    """A field of all operations."""

    lengths: Int64
    """Bytes that it takes; 0 where it is left out."""

    def write(self, out: UInt8, at: Int64) -> None:
        """Writes it where it stands."""


def op_chunks(ops: OpTable, first: int, progress: Progress = silent) -> Iterator[bytes]:
    """The operation table as pieces of a graph's message, a chunk of operations each.

    Args:
        ops: the table.
        first: the field of a graph that holds chunks.
        progress: told how many operations have been written.
    """
    for low in range(0, len(ops), CHUNK):
        body = _chunk(ops, low, min(low + CHUNK, len(ops)))
        head = np.array([first << 3 | 2, len(body)], np.uint64)
        sizes = _sizes(head)
        out = np.zeros(int(sizes.sum()), np.uint8)
        _put(out, np.cumsum(sizes) - sizes, head, sizes)
        yield out.tobytes()
        yield body
        progress("writing operations", min(low + CHUNK, len(ops)), len(ops))


def _chunk(ops: OpTable, low: int, high: int) -> bytes:
    part = slice(low, high)
    fields: list[_Part] = [
        _Number(1, ops.name[part]),
        _Number(2, ops.phase[part]),
        _Number(3, ops.module[part]),
        _Packed(4, ops.inputs, low, high),
        _Packed(5, ops.outputs, low, high),
        _Number(6, ops.stream[part]),
        _Packed(7, ops.deps, low, high),
        _Durations(8, ops, low, high),
        *_kinds(ops, part),
    ]
    whole = _Message(_OPS, fields, np.ones(high - low, np.bool_))
    ends = np.concatenate([[0], np.cumsum(whole.lengths)])
    out = np.zeros(int(ends[-1]), np.uint8)
    whole.write(out, ends[:-1])
    return out.tobytes()


def _kinds(ops: OpTable, part: slice) -> Iterator[_Part]:
    kind = ops.kind[part]
    group, peer, nbytes = ops.group[part], ops.peer[part].astype(np.int64), ops.nbytes[part]
    variant, dtype, payload = ops.variant[part], ops.dtype[part], ops.payload[part]
    forward, attributes = ops.forward_op[part], ops.attributes[part]
    zigzag = peer << 1 ^ peer >> 63
    message = [group, zigzag, ops.tag[part], nbytes, payload]
    columns: dict[OpKind, list[Any]] = {
        OpKind.COMPUTE: [
            forward, -2 - forward, ops.flops[part], ops.bytes_read[part], ops.bytes_written[part], attributes,
            ops.arguments[part],
        ],
        OpKind.COLLECTIVE: [variant, group, nbytes, dtype, payload, ops.asynchronous[part]],
        OpKind.SEND: message,
        OpKind.RECV: message,
        OpKind.COPY: [variant, nbytes],
        OpKind.HOST: [],
    }  # fmt: skip
    # What stands in the message though it is 0, and what is left out though it is not.
    stated = {1: forward >= 0, 2: forward < NONE, 6: attributes != NONE}
    for one, values in columns.items():
        rows = kind == one
        if rows.any():
            own = stated if one == OpKind.COMPUTE else {}
            fields = [
                _Number(number, value, rows & own.get(number, np.asarray(value) != 0))
                for number, value in enumerate(values, 1)
            ]
            yield _Message(_MESSAGE_OF[one], fields, rows)


class _Number:
    """A number, left out where it is 0 unless it is said which stand."""

    def __init__(self, field: int, values: Any, stands: npt.NDArray[np.bool_] | None = None) -> None:
        self.tag = field << 3
        self.rows = np.flatnonzero(values if stands is None else stands)
        self.values = np.asarray(values)[self.rows].astype(np.int64).view(np.uint64)
        self.sizes = _sizes(self.values)
        self.lengths = np.zeros(len(values), np.int64)
        self.lengths[self.rows] = 1 + self.sizes

    def write(self, out: UInt8, at: Int64) -> None:
        """Tag and number."""
        at = at[self.rows]
        out[at] = self.tag
        _put(out, at + 1, self.values, self.sizes)


class _Float:
    """A number of four bytes, left out where all are 0."""

    def __init__(self, field: int, values: npt.NDArray[np.float32]) -> None:
        self.tag = field << 3 | 5
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        self.rows = np.flatnonzero(bits)
        self.bytes = bits[self.rows].astype("<u4").view(np.uint8).reshape(-1, 4)
        self.lengths = np.where(bits != 0, 5, 0)

    def write(self, out: UInt8, at: Int64) -> None:
        """Tag and bytes."""
        at = at[self.rows]
        out[at] = self.tag
        out[at[:, None] + np.arange(1, 5)] = self.bytes


class _Packed:
    """A list of numbers, left out where it is empty."""

    def __init__(self, field: int, ragged: Ragged, low: int, high: int) -> None:
        self.tag = field << 3 | 2
        offsets = ragged.offsets[low : high + 1]
        self.values = np.asarray(ragged.values[offsets[0] : offsets[-1]]).astype(np.int64).view(np.uint64)
        self.sizes = _sizes(self.values)
        ends = np.concatenate([[0], np.cumsum(self.sizes)])
        starts = ends[offsets - offsets[0]]
        self.bodies = np.diff(starts)
        self.rows = np.flatnonzero(self.bodies)
        self.heads = _sizes(self.bodies[self.rows].view(np.uint64))
        self.lengths = self.bodies.copy()
        self.lengths[self.rows] += 1 + self.heads
        self.row_of = np.repeat(np.arange(high - low), np.diff(offsets))
        self.within = ends[:-1] - starts[self.row_of]

    def write(self, out: UInt8, at: Int64) -> None:
        """Tag, length and numbers."""
        body = at + 1
        body[self.rows] += self.heads
        out[at[self.rows]] = self.tag
        _put(out, at[self.rows] + 1, self.bodies[self.rows].view(np.uint64), self.heads)
        _put(out, body[self.row_of] + self.within, self.values, self.sizes)


class _Message:
    """A message within, of some operations."""

    def __init__(self, field: int, fields: Sequence[_Part], rows: npt.NDArray[np.bool_]) -> None:
        self.tag, self.fields = field << 3 | 2, fields
        self.bodies = sum((part.lengths for part in fields), np.zeros(len(rows), np.int64))
        self.heads = _sizes(self.bodies.view(np.uint64))
        self.rows = np.flatnonzero(rows)
        self.lengths = np.where(rows, 1 + self.heads + self.bodies, 0)

    def write(self, out: UInt8, at: Int64) -> None:
        """Tag, length and fields."""
        out[at[self.rows]] = self.tag
        _put(out, at[self.rows] + 1, self.bodies[self.rows].view(np.uint64), self.heads[self.rows])
        at = at + 1 + self.heads
        for part in self.fields:
            part.write(out, at)
            at = at + part.lengths


class _Durations:
    """The durations of operations: messages, any number of them."""

    def __init__(self, field: int, ops: OpTable, low: int, high: int) -> None:
        offsets = ops.duration.offsets[low : high + 1]
        part = slice(int(offsets[0]), int(offsets[-1]))
        fields: list[_Part] = [
            _Number(1, ops.duration_device[part]),
            _Number(2, ops.duration.values[part]),
            _Number(3, ops.duration_source[part]),
            _Number(4, ops.duration_samples[part]),
            _Float(5, ops.duration_spread[part]),
        ]
        whole = _Message(field, fields, np.ones(part.stop - part.start, np.bool_))
        ends = np.concatenate([[0], np.cumsum(whole.lengths)])
        self.bytes = np.zeros(int(ends[-1]), np.uint8)
        whole.write(self.bytes, ends[:-1])
        self.lengths = np.diff(ends[offsets - offsets[0]])

    def write(self, out: UInt8, at: Int64) -> None:
        """All of them, which follow each other as the operations do."""
        rows = np.flatnonzero(self.lengths)
        lengths = self.lengths[rows]
        ends = np.cumsum(lengths)
        out[np.repeat(at[rows] - (ends - lengths), lengths) + np.arange(len(self.bytes))] = self.bytes


def _sizes(values: UInt64) -> Int64:
    """Bytes of numbers in sevens of bits."""
    sizes = np.ones(len(values), np.int64)
    most, limit = int(values.max(initial=0)), 1 << 7
    while limit <= most:
        sizes += values >= np.uint64(limit)
        limit <<= 7
    return sizes


def _put(out: UInt8, at: Int64, values: UInt64, sizes: Int64) -> None:
    """Writes numbers in sevens of bits, the lowest first."""
    for place in range(int(sizes.max(initial=0))):
        if place:
            rows = sizes > place
            at, values, sizes = at[rows], values[rows], sizes[rows]
        seven = (values >> np.uint64(7 * place)).astype(np.uint8) & 0x7F
        out[at + place] = seven | (sizes > place + 1).astype(np.uint8) << 7
