"""Protobuf messages to a graph, through the builder, so that what is read is also verified."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from echograph.errors import FormatError
from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder
from echograph.ir.columns import NONE
from echograph.ir.graph import Axis, JobGraph, StepGraph, Workload
from echograph.proto import workload_pb2 as pb

MAX_CALLS = 2**26


class Decoder:
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
                causal_attention_flops=w.causal_attention_flops,
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
        columns = self.builder.tensor_rows()
        for tensor in chunk.tensors:
            alias = tensor.alias_of if tensor.HasField("alias_of") else NONE
            columns(tensor.name, tensor.shape, tensor.dtype, tensor.role, alias, tensor.port, tensor.sharded)
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
            builder.program(
                zip(*columns, strict=True), role=program.role, ranks=program.ranks,
                coordinates={c.axis: c.value for c in program.coordinates},
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


def _collective(decoder: Decoder, op: pb.Op, add: Callable[..., None]) -> None:
    c = op.collective
    decoder.communication(
        t.OpKind.COLLECTIVE, op, add, variant=c.collective, group=c.group, nbytes=c.bytes_per_rank, dtype=c.dtype,
        payload=c.payload, asynchronous=c.asynchronous,
    )  # fmt: skip


def _send(decoder: Decoder, op: pb.Op, add: Callable[..., None]) -> None:
    p = op.send
    decoder.communication(
        t.OpKind.SEND, op, add, group=p.group, peer=p.peer, tag=p.tag, nbytes=p.bytes, payload=p.payload
    )


def _recv(decoder: Decoder, op: pb.Op, add: Callable[..., None]) -> None:
    p = op.recv
    decoder.communication(
        t.OpKind.RECV, op, add, group=p.group, peer=p.peer, tag=p.tag, nbytes=p.bytes, payload=p.payload
    )


def _copy(decoder: Decoder, op: pb.Op, add: Callable[..., None]) -> None:
    decoder.communication(t.OpKind.COPY, op, add, variant=op.copy.direction, nbytes=op.copy.bytes)


def _host(decoder: Decoder, op: pb.Op, add: Callable[..., None]) -> None:
    decoder.communication(t.OpKind.HOST, op, add)


_OPS: dict[str, Callable[[Decoder, pb.Op, Callable[..., None]], None]] = {
    "compute": Decoder.compute,
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
            return t.Gemm(transpose_a=message.gemm.transpose_a, transpose_b=message.gemm.transpose_b)
        case "attention":
            a = message.attention
            return t.Attention(
                heads=a.heads, kv_heads=a.kv_heads, head_dim=a.head_dim, causal=a.causal, dropout=a.dropout
            )
        case "convolution":
            c = message.convolution
            return t.Convolution(
                stride=tuple(c.stride), padding=tuple(c.padding), dilation=tuple(c.dilation), groups=c.groups,
                transposed=c.transposed,
            )  # fmt: skip
        case "multi_tensor":
            return t.MultiTensor(parts=message.multi_tensor.parts, leads=message.multi_tensor.leads)
        case _:
            raise FormatError("corrupted: operation attributes of an unknown kind")
