"""Graphs to and from files. In `ir`, the `serde` modules alone know the wire format (`proto/workload.proto`).

A file is one protobuf message, yet it is written and read a chunk at a time, so the message never stands in
memory as a whole: protobuf defines the concatenation of two encoded messages as their merge. Messages become a
graph through the builder, so that what is read is also verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message

from echograph.errors import FormatError, GraphError
from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder
from echograph.ir.columns import (
    NONE,
    OP_COLUMNS,
    TENSOR_COLUMNS,
    Column,
    Int64,
    OpTable,
    Ragged,
    TensorTable,
    UInt8,
    UInt64,
)
from echograph.ir.files import fields, read_whole, with_checksum, write_whole
from echograph.ir.graph import FORMAT_MAJOR, Axis, Graph, Group, JobGraph, StepGraph, Workload
from echograph.ir.types import OpKind
from echograph.progress import Progress, silent
from echograph.proto import workload_pb2 as pb

MAGIC = "echograph"
HEADER_FIELDS = range(1, 4)
_KNOWN_FIELDS = {field.number for field in pb.Graph.DESCRIPTOR.fields}


def save(graph: Graph, path: Path | str, progress: Progress = silent) -> int:
    """Writes a graph whole or not at all; returns the bytes written.

    Args:
        graph: the graph.
        path: the file.
        progress: told how many operations have been written.

    Raises:
        OutputError: the path cannot be written.
    """
    return write_whole(Path(path), encode(graph, progress))


def load(path: Path | str, progress: Progress = silent) -> StepGraph | JobGraph:
    """Reads and verifies a graph.

    Args:
        path: the file.
        progress: told how many operations have been read.

    Raises:
        InputError: the file does not exist or cannot be read.
        FormatError: it is not a graph, is truncated or corrupted, or of a newer format.
    """
    path = Path(path)
    data = read_whole(path, f"write one with: echoc compile --model NAME -o {path.name}")
    try:
        return decode(data, progress)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None


def encode(graph: Graph, progress: Progress = silent) -> Iterator[bytes]:
    """The file's bytes, piece by piece.

    Raises:
        GraphError: a name is no text that a file can hold.
    """
    return with_checksum(_pieces(graph, progress))


def _pieces(graph: Graph, progress: Progress) -> Iterator[bytes]:
    try:
        for message in _messages(graph, progress):
            yield message if isinstance(message, bytes) else message.SerializeToString(deterministic=True)
    except UnicodeEncodeError as error:
        raise GraphError(
            f"a name of the graph holds half a character, which no file can: {error.object[:40]!a}"
        ) from None


def _messages(graph: Graph, progress: Progress) -> Iterator[Message | bytes]:
    yield _header(graph)
    yield from _tensor_chunks(graph.tensors, pb.Graph.TENSOR_CHUNKS_FIELD_NUMBER)
    yield from op_chunks(graph.ops, pb.Graph.OP_CHUNKS_FIELD_NUMBER, progress)
    yield _trailer(graph)
    yield graph.unknown


def decode(data: bytes, progress: Progress = silent) -> StepGraph | JobGraph:
    """Parses and verifies the bytes of a file.

    Raises:
        FormatError: not a graph, truncated, corrupted, or of a newer format.
    """
    if not data:
        raise FormatError("the file is empty")
    try:
        return _decode(data, progress)
    except GraphError as error:
        raise FormatError(f"corrupted: {error}") from None
    except (DecodeError, OverflowError, ValueError, IndexError, UnicodeDecodeError) as error:
        line = " ".join(str(error).split())[:120]
        raise FormatError(f"not an echograph graph, or truncated or corrupted ({line})") from None


def _decode(data: bytes, progress: Progress) -> StepGraph | JobGraph:
    identity, small, unknown = bytearray(), bytearray(), bytearray()
    tensor_chunks: list[tuple[int, int]] = []
    op_chunks: list[tuple[int, int]] = []
    for number, start, body, end in fields(data):
        if number == pb.Graph.TENSOR_CHUNKS_FIELD_NUMBER:
            tensor_chunks.append((body, end))
        elif number == pb.Graph.OP_CHUNKS_FIELD_NUMBER:
            op_chunks.append((body, end))
        elif number in HEADER_FIELDS:
            identity += data[start:end]
        elif number in _KNOWN_FIELDS:
            small += data[start:end]
        else:
            unknown += data[start:end]
    check_header(pb.Graph.FromString(bytes(identity)), MAGIC, FORMAT_MAJOR)
    head = pb.Graph.FromString(bytes(small))
    if head.level == pb.LEVEL_UNSPECIFIED:
        raise FormatError("corrupted: it has no level")
    decoder = _Decoder(head, bytes(unknown))
    for body, end in tensor_chunks:
        decoder.tensors(pb.TensorChunk.FromString(data[body:end]))
    done = 0
    for body, end in op_chunks:
        chunk = pb.OpChunk.FromString(data[body:end])
        decoder.ops(chunk)
        progress("reading operations", done := done + len(chunk.ops), head.op_count)
    progress("verifying the graph")
    return decoder.finish()


class Header(Protocol):
    """What every file begins with; the fields `HEADER_FIELDS` of its message."""

    magic: str
    format_major: int
    format_minor: int


def check_header(header: Header, magic: str, newest: int) -> None:
    """Refuses another kind of file and a newer major format, before anything else is looked at.

    Args:
        header: of the file.
        magic: what the kind of file begins with.
        newest: major format that is read.

    Raises:
        FormatError: the file is not one that this version reads.
    """
    if header.magic != magic:
        raise FormatError(f"not an {magic} file")
    if header.format_major > newest:
        version = f"{header.format_major}.{header.format_minor}"
        raise FormatError(f"format {version} is newer than this echograph reads ({newest}.x): upgrade echograph")
    if not header.format_major:
        raise FormatError("corrupted: it has no format version")


# -- columns to messages, a chunk at a time ----------------------------------------------------------------------

CHUNK = 65_536


def _header(graph: Graph) -> pb.Graph:
    """Everything before the tables."""
    w, (major, minor) = graph.workload, graph.format
    return pb.Graph(
        magic=MAGIC,
        format_major=major,
        format_minor=minor,
        level=pb.LEVEL_JOB if isinstance(graph, JobGraph) else pb.LEVEL_STEP,
        name=graph.name,
        producer=graph.producer,
        workload=pb.Workload(
            model=w.model, parameters=w.parameters, batch_size=w.batch_size, sequence_length=w.sequence_length,
            dtype=pb.DType.ValueType(w.dtype), optimizer=w.optimizer, master_weights=w.master_weights,
            model_flops=w.model_flops, causal_attention_flops=w.causal_attention_flops, stack=w.stack,
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


def _trailer(graph: Graph) -> pb.Graph:
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
            held=[pb.Held(by=by, bytes=nbytes) for by, nbytes in p.held.items()],
        )
        for p in graph.programs
    ]
    return pb.Graph(blocks=blocks, programs=programs)


def encode_attributes(value: t.Attributes) -> pb.Attributes:
    """The message of a compute operation's attributes."""
    match value:
        case t.Gemm():
            return pb.Attributes(
                gemm=pb.Gemm(
                    transpose_a=value.transpose_a, transpose_b=value.transpose_b, block=value.block,
                    tf32=value.tf32,
                )
            )  # fmt: skip
        case t.Attention():
            return pb.Attributes(
                attention=pb.Attention(
                    heads=value.heads, kv_heads=value.kv_heads, head_dim=value.head_dim, causal=value.causal,
                    dropout=value.dropout, deterministic=value.deterministic,
                )
            )  # fmt: skip
        case t.Convolution():
            return pb.Attributes(
                convolution=pb.Convolution(
                    stride=value.stride, padding=value.padding, dilation=value.dilation, groups=value.groups,
                    transposed=value.transposed, ieee=value.ieee,
                )
            )  # fmt: skip
        case t.MultiTensor():
            return pb.Attributes(multi_tensor=pb.MultiTensor(parts=value.parts, leads=value.leads))


# -- tables ---------------------------------------------------------------------------------------------------
# Both tables to protobuf messages: all rows of a chunk at a time, field by field.
#
# A message is what protobuf makes of the same values: fields by number, those with their default left out.
# First it is worked out how long every field of every row is, and so where it stands; then a field is written for
# all of them.


_ROWS = 1
"""The field of a chunk that holds tensors, or operations."""

_MESSAGE_OF = {
    OpKind.COMPUTE: 10,
    OpKind.COLLECTIVE: 11,
    OpKind.SEND: 12,
    OpKind.RECV: 13,
    OpKind.COPY: 14,
    OpKind.HOST: 15,
}


class _Part(Protocol):
    """A field of all rows."""

    lengths: Int64
    """Bytes that it takes; 0 where it is left out."""

    def write(self, out: UInt8, at: Int64) -> None:
        """Writes it where it stands."""


def _tensor_chunks(tensors: TensorTable, first: int) -> Iterator[bytes]:
    """The tensor table as pieces of a graph's message, a chunk of tensors each.

    Args:
        tensors: the table.
        first: the field of a graph that holds chunks.
    """
    for low in range(0, len(tensors), CHUNK):
        high = min(low + CHUNK, len(tensors))
        yield from _chunk(first, [*_fields(pb.Tensor, tensors, TENSOR_COLUMNS, low, high)], high - low)


def op_chunks(ops: OpTable, first: int, progress: Progress = silent) -> Iterator[bytes]:
    """The operation table as pieces of a graph's message, a chunk of operations each.

    Args:
        ops: the table.
        first: the field of a graph that holds chunks.
        progress: told how many operations have been written.
    """
    durations = pb.Op.DURATIONS_FIELD_NUMBER
    for low in range(0, len(ops), CHUNK):
        high = min(low + CHUNK, len(ops))
        common = _fields(pb.Op, ops, OP_COLUMNS, low, high)
        kinds = _kinds(ops, slice(low, high))
        yield from _chunk(first, [*common, _Durations(durations, ops, low, high), *kinds], high - low)
        progress("writing operations", high, len(ops))


def _fields(
    message: type[Message], table: object, columns: Mapping[str, Column], low: int, high: int
) -> Iterator[_Part]:
    """The fields of a row's message that are columns of its table."""
    for field in message.DESCRIPTOR.fields:
        if column := columns.get(field.name):
            values = getattr(table, field.name)
            if column.ragged:
                yield _Packed(field.number, values, low, high)
            else:
                yield _Number(field.number, values[low:high], values[low:high] != column.default)


def _chunk(first: int, parts: Sequence[_Part], count: int) -> Iterator[bytes]:
    whole = _Message(_ROWS, parts, np.ones(count, np.bool_))
    ends = np.concatenate([[0], np.cumsum(whole.lengths)])
    head = np.array([first << 3 | 2, ends[-1]], np.uint64)
    sizes = _sizes(head)
    out = np.zeros(int(sizes.sum()), np.uint8)
    _put(out, np.cumsum(sizes) - sizes, head, sizes)
    yield out.tobytes()
    out = np.zeros(int(ends[-1]), np.uint8)
    whole.write(out, ends[:-1])
    yield out.tobytes()


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


# -- messages to a graph ----------------------------------------------------------------------------------------

MAX_CALLS = 2**26


class _Decoder:
    """Takes the chunks of a file in order and makes a graph of them.

    Args:
        head: the message without its chunks.
        unknown: encoded top-level fields of a newer minor version, kept as they are.
    """

    def __init__(self, head: pb.Graph, unknown: bytes) -> None:
        self.head = head
        w = head.workload
        self.builder = GraphBuilder(
            name=head.name,
            producer=head.producer,
            workload=Workload(
                model=w.model, parameters=w.parameters, batch_size=w.batch_size,
                sequence_length=w.sequence_length, dtype=t.DType(w.dtype), optimizer=w.optimizer,
                master_weights=w.master_weights, model_flops=w.model_flops,
                causal_attention_flops=w.causal_attention_flops, stack=w.stack,
            ),
            streams=head.streams,
        )  # fmt: skip
        self.builder.unknown, self.builder.passes = unknown, tuple(head.passes)
        self.builder.mesh = tuple(Axis(name=a.name, size=a.size) for a in head.mesh)
        for number, group in enumerate(head.groups):
            if bool(group.positions) != bool(group.along) or (group.along and group.axes):
                raise FormatError(f"corrupted: group {number} has positions along no axis, or along several")
            axes = [group.along] if group.along else group.axes
            if self.builder.group(group.name, axes=axes, ranks=group.ranks, positions=group.positions) != number:
                raise FormatError(f"corrupted: group {number} repeats an earlier one")
        self.strings = list(head.strings)
        if self.strings[:1] != [""] or len(set(self.strings)) != len(self.strings):
            raise FormatError("corrupted: its string table does not begin with the empty one, or repeats one")
        for text in self.strings:
            self.builder.string(text)
        self.attributes = [decode_attributes(a) for a in head.attributes]
        for attributes in self.attributes:
            self.builder.attribute(attributes)
        self.blocks = list(head.blocks)
        self.tensor_count = self.op_count = 0

    def tensors(self, chunk: pb.TensorChunk) -> None:
        """Takes the next tensors."""
        add = self.builder.tensor_row
        for tensor in chunk.tensors:
            add({field.name: value for field, value in tensor.ListFields()})
        self.tensor_count += len(chunk.tensors)

    def ops(self, chunk: pb.OpChunk) -> None:
        """Takes the next operations."""
        add = self.builder.op_row
        for op in chunk.ops:
            kind = op.WhichOneof("kind")
            if kind is None:
                raise FormatError(f"corrupted: operation {self.op_count} has no kind")
            _OPS[kind](self, op, add)
            self.op_count += 1

    def finish(self) -> StepGraph | JobGraph:
        """Verifies and returns the graph."""
        head, builder = self.head, self.builder
        if self.tensor_count != head.tensor_count or self.op_count != head.op_count:
            tensors = f"{self.tensor_count} of {head.tensor_count} tensors"
            raise FormatError(f"truncated: it holds {tensors}, {self.op_count} of {head.op_count} operations")
        builder.set_blocks([(b.name, b.tensor_begin, b.op_begin) for b in head.blocks], _ends(head))
        for number, block in enumerate(head.blocks):
            for instance in block.instances:
                builder.instance(
                    number, instance.label, bindings=instance.bindings, op_bindings=instance.op_bindings
                )
        if not head.programs:
            raise FormatError("corrupted: it has no program")
        for program in head.programs:
            columns = (program.block, program.begin, program.end, program.instance, program.micro_batch)
            if len({len(c) for c in columns}) != 1 or len(program.block) > MAX_CALLS:
                raise FormatError("corrupted: the columns of a program differ in length")
            if len({h.by for h in program.held}) != len(program.held):
                raise FormatError("corrupted: a program says twice what one holds")
            builder.program(
                zip(*columns, strict=True), role=program.role, ranks=program.ranks,
                coordinates={c.axis: c.value for c in program.coordinates},
                held={h.by: h.bytes for h in program.held},
            )  # fmt: skip
        return builder.build(JobGraph) if head.level == pb.LEVEL_JOB else builder.build(StepGraph)

    def _durations(self, op: pb.Op) -> list[tuple[int, int, int, int, float]]:
        return [(d.device, d.picoseconds, d.source, d.samples, d.spread) for d in op.durations]

    def compute(self, op: pb.Op, add: Callable[..., None]) -> None:
        """Takes a compute operation."""
        c = op.compute
        forward = c.WhichOneof("forward")
        which = NONE if forward is None else c.forward_op if forward == "forward_op" else -2 - c.forward_op_port
        attributes = NONE
        if c.HasField("attributes"):
            attributes = self.builder.attribute(self.attributes[c.attributes])
        add(
            t.OpKind.COMPUTE, op.name, op.phase, op.module, op.stream, op.inputs, op.outputs, op.deps,
            self._durations(op) if op.durations else (), forward_op=which, flops=c.flops, bytes_read=c.bytes_read,
            bytes_written=c.bytes_written, attributes=attributes, arguments=c.arguments,
        )  # fmt: skip

    def communication(self, kind: t.OpKind, op: pb.Op, add: Callable[..., None], **values: Any) -> None:
        """Takes an operation of any other kind."""
        add(
            kind, op.name, op.phase, op.module, op.stream, op.inputs, op.outputs, op.deps,
            self._durations(op) if op.durations else (), **values,
        )  # fmt: skip


def _ends(head: pb.Graph) -> list[tuple[int, int]]:
    return [(b.tensor_end, b.op_end) for b in head.blocks]


def _collective(decoder: _Decoder, op: pb.Op, add: Callable[..., None]) -> None:
    c = op.collective
    decoder.communication(
        t.OpKind.COLLECTIVE, op, add, variant=c.collective, group=c.group, nbytes=c.bytes_per_rank, dtype=c.dtype,
        payload=c.payload, asynchronous=c.asynchronous,
    )  # fmt: skip


def _send(decoder: _Decoder, op: pb.Op, add: Callable[..., None]) -> None:
    p = op.send
    decoder.communication(
        t.OpKind.SEND, op, add, group=p.group, peer=p.peer, tag=p.tag, nbytes=p.bytes, payload=p.payload
    )


def _recv(decoder: _Decoder, op: pb.Op, add: Callable[..., None]) -> None:
    p = op.recv
    decoder.communication(
        t.OpKind.RECV, op, add, group=p.group, peer=p.peer, tag=p.tag, nbytes=p.bytes, payload=p.payload
    )


def _copy(decoder: _Decoder, op: pb.Op, add: Callable[..., None]) -> None:
    decoder.communication(t.OpKind.COPY, op, add, variant=op.copy.direction, nbytes=op.copy.bytes)


def _host(decoder: _Decoder, op: pb.Op, add: Callable[..., None]) -> None:
    decoder.communication(t.OpKind.HOST, op, add)


_OPS: dict[str, Callable[[_Decoder, pb.Op, Callable[..., None]], None]] = {
    "compute": _Decoder.compute,
    "collective": _collective,
    "send": _send,
    "recv": _recv,
    "copy": _copy,
    "host": _host,
}


def decode_attributes(message: pb.Attributes) -> t.Attributes:
    """A compute operation's attributes.

    Raises:
        FormatError: of no kind that this version knows.
    """
    match message.WhichOneof("value"):
        case "gemm":
            g = message.gemm
            return t.Gemm(transpose_a=g.transpose_a, transpose_b=g.transpose_b, block=g.block, tf32=g.tf32)
        case "attention":
            a = message.attention
            return t.Attention(
                heads=a.heads, kv_heads=a.kv_heads, head_dim=a.head_dim, causal=a.causal, dropout=a.dropout,
                deterministic=a.deterministic,
            )  # fmt: skip
        case "convolution":
            c = message.convolution
            return t.Convolution(
                stride=tuple(c.stride), padding=tuple(c.padding), dilation=tuple(c.dilation), groups=c.groups,
                transposed=c.transposed, ieee=c.ieee,
            )  # fmt: skip
        case "multi_tensor":
            return t.MultiTensor(parts=message.multi_tensor.parts, leads=message.multi_tensor.leads)
        case _:
            raise FormatError("corrupted: operation attributes of an unknown kind")
