"""How every binary file of echograph is framed, read and written, whatever message it holds.

A file is one protobuf message whose last field, number 2047, is the CRC-32 of all bytes before it. One that does
not end with it is truncated. Nothing here knows a schema, so nothing here imports protobuf.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from echograph.errors import FormatError, InputError, OutputError
from echograph.units import format_bytes

MAX_FILE_BYTES = 16 * 2**30
CHECKSUM_FIELD = 2047
_CHECKSUM_TAG = bytes([0xFD, 0x7F])  # field 2047, wire type 5 (fixed32)
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class Field(NamedTuple):
    """A top-level field: its number, and where its tag, its body and its end are in the file."""

    number: int
    start: int
    body: int
    end: int


def fields(data: bytes) -> Iterator[Field]:
    """The top-level fields of a file without its checksum, whose value is verified on the way.

    Raises:
        FormatError: the bytes are no protobuf message, or the checksum is missing, wrong or not the last field.
    """
    at = 0
    while at < len(data):
        field, wire = _field(data, at)
        if field.number == CHECKSUM_FIELD:
            if (
                wire != _FIXED32
                or zlib.crc32(memoryview(data)[:at]).to_bytes(4, "little") != data[field.body : field.end]
            ):
                raise FormatError("corrupted: its checksum does not match")
            if field.end != len(data):
                raise FormatError("corrupted: bytes follow its checksum")
            return
        yield field
        at = field.end
    raise FormatError("not an echograph file, or truncated: it does not end with a checksum")


def _field(data: bytes, start: int) -> tuple[Field, int]:
    tag, body = _varint(data, start)
    number, wire = tag >> 3, tag & 7
    end = body
    if wire == _VARINT:
        _, end = _varint(data, body)
    elif wire in (_FIXED32, _FIXED64):
        end = body + (4 if wire == _FIXED32 else 8)
    elif wire == _BYTES:
        length, body = _varint(data, body)
        end = body + length
    else:
        raise FormatError("not an echograph file, or corrupted")
    if end > len(data) or number == 0:
        raise FormatError("not an echograph file, or truncated")
    return Field(number, start, body, end), wire


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise FormatError("not an echograph file, or truncated")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise FormatError("not an echograph file, or corrupted")


def with_checksum(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The pieces of an encoded message, then its checksum field."""
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
        yield piece
    yield _CHECKSUM_TAG + crc.to_bytes(4, "little")


def read_whole(path: Path, hint: str, limit: int = MAX_FILE_BYTES) -> bytes:
    """A file's bytes.

    Args:
        path: the file.
        hint: what to do where there is none.
        limit: bytes of the largest file that is read.

    Raises:
        InputError: the file does not exist or cannot be read.
        FormatError: it is larger than the limit.
    """
    try:
        if path.stat().st_size > limit:
            raise FormatError(f"{path}: larger than {format_bytes(limit)}, not read")
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; {hint}") from None


def write_whole(path: Path, pieces: Iterable[str | bytes]) -> int:
    """Writes a file that appears only when it is complete; returns the bytes written.

    A pipe or a device is written as it stands, since there is nothing to replace.

    Raises:
        OutputError: the path cannot be written.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            with path.open("wb") as out:
                return sum(out.write(_bytes(piece)) for piece in pieces)
        return _replace(path.resolve(), pieces)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from None


def _replace(path: Path, pieces: Iterable[str | bytes]) -> int:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".echograph-")
    scratch = Path(name)
    try:
        with os.fdopen(handle, "wb") as out:
            total = sum(out.write(_bytes(piece)) for piece in pieces)
        mask = os.umask(0)
        os.umask(mask)
        scratch.chmod(0o666 & ~mask)
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    return total


def _bytes(piece: str | bytes) -> bytes:
    return piece.encode() if isinstance(piece, str) else piece


def check_writable(path: Path) -> None:
    """Fails now rather than after the work whose result is to be written.

    Raises:
        OutputError: the folder does not exist or cannot be written to, or the path is a folder.
    """
    try:
        if path.is_dir():
            raise OutputError(f"cannot write {path}: it is a folder")
        handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:64]}.")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from None
    os.close(handle)
    Path(scratch).unlink()
