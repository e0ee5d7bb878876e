"""Graphs to and from files. In `ir`, the `serde` modules alone know the wire format (`proto/workload.proto`).

A file is one protobuf message, yet it is written and read a chunk at a time, so the message never stands in
memory as a whole: protobuf defines the concatenation of two encoded messages as their merge.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from google.protobuf.message import DecodeError, Message

from echograph.errors import FormatError, GraphError
from echograph.ir.files import fields, read_whole, with_checksum, write_whole
from echograph.ir.graph import FORMAT_MAJOR, Graph, JobGraph, StepGraph
from echograph.ir.serde.decoder import Decoder
from echograph.ir.serde.encoder import header, op_chunks, tensor_chunks, trailer
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
    level = pb.LEVEL_JOB if isinstance(graph, JobGraph) else pb.LEVEL_STEP
    yield header(graph, MAGIC, level)
    yield from (pb.Graph(tensor_chunks=[chunk]) for chunk in tensor_chunks(graph.tensors))
    yield from op_chunks(graph.ops, pb.Graph.OP_CHUNKS_FIELD_NUMBER, progress)
    yield trailer(graph)
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
    check_header(pb.Graph.FromString(bytes(identity)), MAGIC)
    head = pb.Graph.FromString(bytes(small))
    if head.level == pb.LEVEL_UNSPECIFIED:
        raise FormatError("corrupted: it has no level")
    decoder = Decoder(head, bytes(unknown))
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


def check_header(header: Header, magic: str) -> None:
    """Refuses another kind of file and a newer major format, before anything else is looked at.

    Raises:
        FormatError: the file is not one that this version reads.
    """
    if header.magic != magic:
        raise FormatError(f"not an {magic} file")
    if header.format_major > FORMAT_MAJOR:
        version = f"{header.format_major}.{header.format_minor}"
        raise FormatError(
            f"format {version} is newer than this echograph reads ({FORMAT_MAJOR}.x): upgrade echograph"
        )
    if header.format_major != FORMAT_MAJOR:
        raise FormatError("corrupted: it has no format version")
