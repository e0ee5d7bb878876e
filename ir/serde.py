"""Graphs to and from files. This module alone in `ir` knows the wire format (`proto/workload.proto`).

A file is one protobuf message, yet it is written and read a chunk at a time, so the message never stands in
memory as a whole: protobuf defines the concatenation of two encoded messages as their merge.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError, Message

from echograph.errors import FormatError, GraphError, InputError, OutputError
from echograph.ir.graph import FORMAT_MAJOR, Graph, JobGraph, StepGraph
from echograph.ir.serde_decode import Decoder
from echograph.ir.serde_encode import header, op_chunks, tensor_chunks, trailer
from echograph.proto import workload_pb2 as pb

MAGIC = "echograph"
MAX_FILE_BYTES = 16 * 2**30
_CRC_FIELD = 2047
_CRC_TAG = bytes([0xFD, 0x7F])  # field 2047, wire type 5 (fixed32)
_KNOWN_FIELDS = {field.number for field in pb.Graph.DESCRIPTOR.fields}


def save(graph: Graph, path: Path | str) -> int:
    """Writes a graph whole or not at all; returns the bytes written.

    Raises:
        OutputError: the path cannot be written.
    """
    return write_whole(Path(path), encode(graph))


def load(path: Path | str) -> StepGraph | JobGraph:
    """Reads and verifies a graph.

    Raises:
        InputError: the file does not exist or cannot be read.
        FormatError: it is not a graph, is truncated or corrupted, or of a newer format.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise FormatError(f"{path}: larger than {MAX_FILE_BYTES >> 30} GiB, not read")
        data = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror or error}; write one with: echoc compile --model NAME -o {path.name}"
        ) from None
    try:
        return decode(data)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None


def encode(graph: Graph) -> Iterator[bytes]:
    """The file's bytes, piece by piece."""
    crc = 0
    for message in _messages(graph):
        piece = message if isinstance(message, bytes) else message.SerializeToString(deterministic=True)
        crc = zlib.crc32(piece, crc)
        yield piece
    yield _CRC_TAG + crc.to_bytes(4, "little")


def _messages(graph: Graph) -> Iterator[Message | bytes]:
    level = pb.LEVEL_JOB if isinstance(graph, JobGraph) else pb.LEVEL_STEP
    yield header(graph, MAGIC, level)
    yield from (pb.Graph(tensor_chunks=[chunk]) for chunk in tensor_chunks(graph.tensors))
    yield from (pb.Graph(op_chunks=[chunk]) for chunk in op_chunks(graph.ops))
    yield trailer(graph)
    yield graph.unknown


def decode(data: bytes) -> StepGraph | JobGraph:
    """Parses and verifies the bytes of a file.

    Raises:
        FormatError: not a graph, truncated, corrupted, or of a newer format.
    """
    if not data:
        raise FormatError("the file is empty")
    try:
        return _decode(data)
    except GraphError as error:
        raise FormatError(f"corrupted: {error}") from None
    except (DecodeError, OverflowError, ValueError, IndexError, UnicodeDecodeError) as error:
        line = " ".join(str(error).split())[:120]
        raise FormatError(f"not an echograph graph, or truncated or corrupted ({line})") from None


def _decode(data: bytes) -> StepGraph | JobGraph:
    fields = list(_split(data))
    small, unknown = bytearray(), bytearray()
    big: dict[int, list[tuple[int, int]]] = {
        pb.Graph.TENSOR_CHUNKS_FIELD_NUMBER: [],
        pb.Graph.OP_CHUNKS_FIELD_NUMBER: [],
    }
    crc: int | None = None
    for number, start, body, end in fields:
        if number in big:
            big[number].append((body, end))
        elif number == _CRC_FIELD:
            crc = int.from_bytes(data[body:end], "little")
            _check_crc(data, start, end, crc)
        elif number in _KNOWN_FIELDS:
            small += data[start:end]
        else:
            unknown += data[start:end]
    head = pb.Graph.FromString(bytes(small))
    _check_header(head)
    decoder = Decoder(head, bytes(unknown))
    for body, end in big[pb.Graph.TENSOR_CHUNKS_FIELD_NUMBER]:
        decoder.tensors(pb.TensorChunk.FromString(data[body:end]))
    for body, end in big[pb.Graph.OP_CHUNKS_FIELD_NUMBER]:
        decoder.ops(pb.OpChunk.FromString(data[body:end]))
    return decoder.finish()


def _check_header(head: pb.Graph) -> None:
    if head.magic != MAGIC:
        raise FormatError("not an echograph graph")
    if head.format_major > FORMAT_MAJOR:
        version = f"{head.format_major}.{head.format_minor}"
        raise FormatError(
            f"format {version} is newer than this echograph reads ({FORMAT_MAJOR}.x): upgrade echograph"
        )
    if head.format_major != FORMAT_MAJOR or head.level == pb.LEVEL_UNSPECIFIED:
        raise FormatError("has no format version or level")


def _check_crc(data: bytes, start: int, end: int, expected: int) -> None:
    if zlib.crc32(memoryview(data)[:start]) != expected:
        raise FormatError("corrupted: its checksum does not match")
    if end != len(data):
        raise FormatError("corrupted: bytes follow its checksum")


def _split(data: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Top-level fields as (number, start of tag, start of body, end), without parsing the bodies."""
    at = 0
    while at < len(data):
        start = at
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            body = at
            _, at = _varint(data, at)
        elif wire in (1, 5):
            body, at = at, at + (8 if wire == 1 else 4)
        elif wire == 2:
            length, body = _varint(data, at)
            at = body + length
        else:
            raise FormatError("not an echograph graph")
        if at > len(data) or number == 0:
            raise FormatError("not an echograph graph, or truncated")
        yield number, start, body, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise FormatError("truncated")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise FormatError("not an echograph graph")


def write_whole(path: Path, pieces: Iterable[Any]) -> int:
    """Writes bytes or text to a file that appears only when it is complete; returns the bytes written.

    Raises:
        OutputError: the path cannot be written.
    """
    total, scratch = 0, None
    try:
        handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as out:
            for piece in pieces:
                total += out.write(piece.encode() if isinstance(piece, str) else piece)
        mask = os.umask(0)
        os.umask(mask)
        Path(scratch).chmod(0o666 & ~mask)
        Path(scratch).replace(path)
    except BaseException as error:
        if scratch is not None:
            Path(scratch).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OutputError(f"cannot write {path}: {error.strerror or error}") from None
        raise
    return total
