"""How files are read and written, whatever they hold, and how every binary file of echograph is framed.

What is read has a limit: of its bytes, and, where gzip packed it, of what it unpacks to. Devices are refused.

A binary file is one protobuf message whose last field, number 2047, is the CRC-32 of all bytes before it. One that
does not end with it is truncated. Nothing here knows a schema, so nothing here imports protobuf.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from echograph.errors import DataError, FormatError, InputError, OutputError
from echograph.units import format_bytes

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_FILE_BYTES = 16 * 2**30
# Profilers' traces shrink to a twentieth, tables of equal rows to a hundredth; gzip packs zeros to a thousandth.
MAX_UNPACKED_BYTES = 128 * 2**30
MAX_RATIO = 200
# What any file may unpack to, however small it is.
FREE_BYTES = 64 * 2**20
_PIECE_BYTES, _PACKED_BYTES = 1 << 20, 1 << 15
_GZIP_MAGIC, _GZIP_WINDOW = b"\x1f\x8b", 31
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


def open_file(path: Path, hint: str = "give the path of a file") -> BinaryIO:
    """A file or a pipe, open for reading.

    Args:
        path: the file.
        hint: what to do where there is none.

    Raises:
        InputError: the file does not exist or cannot be read, or is a device, which may have no end.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            raise InputError(f"{path}: a device, not a file; {hint}")
        return path.open("rb")
    except (OSError, ValueError) as error:
        raise _unreadable(path, error, hint) from None


def _unreadable(path: Path, error: OSError | ValueError, hint: str) -> InputError:
    # A path with a NUL in it is a ValueError.
    return InputError(f"{path}: {getattr(error, 'strerror', None) or error}; {hint}")


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
    with open_file(path, hint) as source:
        try:
            size = os.fstat(source.fileno()).st_size
            # What does not know its size, a pipe for instance, is read until its end or the limit.
            data = source.read(size) if 0 < size <= limit else b"".join(_until(source, limit)) if not size else b""
        except OSError as error:
            raise _unreadable(path, error, hint) from None
    if max(size, len(data)) > limit:
        raise FormatError(f"{path}: larger than {format_bytes(limit)}, not read")
    return data


def _until(source: BinaryIO, limit: int) -> Iterator[bytes]:
    total = 0
    while total <= limit and (piece := source.read(_PIECE_BYTES)):
        total += len(piece)
        yield piece


class Unpacked:
    """A file's bytes, piece by piece; unpacked, where gzip packed them.

    Args:
        path: the file, gzipped or not, whatever its name.
        limit: bytes of the most that is given.
        hint: what to do where there is no such file.

    Attributes:
        cut_off: whether a gzip stream has no end; known when the pieces have ended.
    """

    def __init__(self, path: Path, limit: int = MAX_UNPACKED_BYTES, hint: str = "give the path of a file") -> None:
        self.path, self.limit, self.hint = path, limit, hint
        self.cut_off = False

    def __iter__(self) -> Iterator[bytes]:
        """Pieces of about 1 MiB.

        Raises:
            InputError: the file does not exist or cannot be read.
            FormatError: it is larger than the limit, or unpacks to more than that or `MAX_RATIO` times its size.
            DataError: the gzip stream is damaged.
        """
        total = 0
        with open_file(self.path, self.hint) as source:
            try:
                for piece, packed in self._pieces(source):
                    total += len(piece)
                    self._check(total, packed)
                    yield piece
            except OSError as error:
                raise _unreadable(self.path, error, self.hint) from None
            except zlib.error as error:
                raise DataError(
                    f"{self.path}: the gzip stream is damaged after {format_bytes(total)} of text ({error})"
                ) from None

    def _check(self, total: int, packed: int) -> None:
        if total > self.limit:
            how = "unpacks to more" if packed else "larger"
            raise FormatError(f"{self.path}: {how} than {format_bytes(self.limit)}, not read")
        if packed and total > max(FREE_BYTES, MAX_RATIO * packed):
            raise FormatError(
                f"{self.path}: unpacks to more than {MAX_RATIO} times its size, which no measurement does; "
                "not read: unpack it yourself if you trust it"
            )

    def _pieces(self, source: BinaryIO) -> Iterator[tuple[bytes, int]]:
        """Pieces, and the packed bytes up to their end: 0 where nothing is packed."""
        following = source.read(len(_GZIP_MAGIC))
        if following != _GZIP_MAGIC:
            while following:
                yield following, 0
                following = source.read(_PIECE_BYTES)
            return
        inflate, packed = zlib.decompressobj(_GZIP_WINDOW), len(following)
        while following:
            # A gzip file may have several members, one after the other, and zeros after each.
            if inflate.eof:
                inflate = zlib.decompressobj(_GZIP_WINDOW)
            if piece := inflate.decompress(following, _PIECE_BYTES):
                yield piece, packed
            following = inflate.unconsumed_tail or inflate.unused_data.lstrip(b"\0")
            while not following and (read := source.read(_PACKED_BYTES)):
                following = read.lstrip(b"\0") if inflate.eof else read
                packed += len(read)
        if piece := inflate.flush():
            yield piece, packed
        self.cut_off = not inflate.eof


def read_unpacked(path: Path, hint: str, limit: int) -> bytes:
    """A file's bytes; unpacked, where gzip packed them.

    Args:
        path: the file.
        hint: what to do where there is none.
        limit: bytes of the most that is given.

    Raises:
        InputError: the file does not exist or cannot be read.
        FormatError: it is larger than the limit, or unpacks to more than that or than a measurement does.
        DataError: the gzip stream is damaged, or cut off.
    """
    unpacked = Unpacked(path, limit, hint)
    data = b"".join(unpacked)
    if unpacked.cut_off:
        raise DataError(
            f"{path}: the gzip stream is cut off after {format_bytes(len(data))} of text: copy it anew"
        )
    return data


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
    _remove_stale(path)
    scratch, handle = _claimed_file(path)
    try:
        with os.fdopen(handle, "wb") as out:
            total = sum(out.write(_bytes(piece)) for piece in pieces)
            mask = os.umask(0)
            os.umask(mask)
            scratch.chmod(0o666 & ~mask)
            out.flush()
            scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    return total


@contextmanager
def whole_folder(path: Path, mark: str = "") -> Iterator[Path]:
    """A folder to write in, empty at first, whose files come to stand in `path` at the end, if nothing went wrong.

    Until then they are in one hidden folder beside `path`. What a process that was killed leaves of it is removed
    when the same folder is written again.

    Args:
        path: where the files are to be.
        mark: name of a file that every such folder holds: one that has it is replaced as a whole, another one that
            holds anything is left alone. "": there may be a folder with anything, to which the files are added.

    Raises:
        OutputError: the path is a file, holds something else, or cannot be written.
    """
    path = path.resolve()
    try:
        if not mark:
            path.parent.mkdir(parents=True, exist_ok=True)
        check_replaceable(path, mark)
        _remove_stale(path)
        scratch, lock = _claimed_folder(path)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from None
    try:
        new = scratch / _NEW
        new.mkdir()
        yield new
        if mark or (not path.exists() and any(new.iterdir())):
            _take_the_place(new, path, scratch / _OLD)
        elif not mark:
            _add(new, path)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        _restore(scratch, path)
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(lock)


def check_replaceable(path: Path, mark: str) -> None:
    """Fails where a folder cannot be written, or would replace what it is not an older version of.

    Raises:
        OutputError: as `whole_folder`.
    """
    if not path.parent.is_dir():
        raise OutputError(f"cannot write {path}: no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise OutputError(f"cannot write {path}: {path.parent} is read-only")
    if path.exists() and not path.is_dir():
        raise OutputError(f"cannot write {path}: it is a file, and a folder is written")
    if mark and path.is_dir() and any(path.iterdir()) and not (path / mark).is_file():
        raise OutputError(f"cannot write {path}: it is not empty, and no earlier export: give another folder")


def _take_the_place(new: Path, path: Path, old: Path) -> None:
    """Puts a folder where another one may be; at once where the system can exchange two names."""
    if path.exists() and not _exchange(new, path):
        path.rename(old)
        new.rename(path)
    elif not path.exists():
        new.rename(path)


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two names; whether the system could."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    here, both = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), both) == 0


def _add(new: Path, path: Path) -> None:
    """Moves every file to its place in a folder that there is."""
    for file in sorted(new.rglob("*")):
        target = path / file.relative_to(new)
        if file.is_dir():
            target.mkdir(exist_ok=True)
        else:
            file.replace(target)


def _restore(scratch: Path, path: Path) -> None:
    """Puts back a folder that was moved out of the way of one that never came."""
    if (scratch / _OLD).exists() and not path.exists():
        (scratch / _OLD).rename(path)


# What is written beside its place bears a name that begins like this, and is locked by the process that writes it:
# the lock goes with the process, however it ends. It gets the name when it is locked, so what is not is nobody's.
_NEW, _OLD, _LOCK = "new", "old", "lock"


def _prefix(path: Path) -> str:
    return f".{path.name[:64]}.echograph-"


def _claimed_file(path: Path) -> tuple[Path, int]:
    """A file beside a path, and its handle, which holds its lock."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".echograph-")
    return _claim(Path(name), handle, path), handle


def _claimed_folder(path: Path) -> tuple[Path, int]:
    """A folder beside a path, and the handle of its lock."""
    scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=".echograph-"))
    handle = os.open(scratch / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    return _claim(scratch, handle, path), handle


def _claim(scratch: Path, handle: int, path: Path) -> Path:
    with suppress(OSError):  # a file system without locks: what is left there stays
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        claimed = scratch.with_name(_prefix(path) + scratch.name.removeprefix(".echograph-"))
        scratch.rename(claimed)
        return claimed
    return scratch


def _remove_stale(path: Path) -> None:
    """Removes what a process that was killed has left of the same file or folder."""
    with suppress(OSError):
        for entry in os.scandir(path.parent):
            if entry.name.startswith(_prefix(path)):
                with suppress(OSError):
                    _remove_unless_locked(Path(entry.path), path)


def _remove_unless_locked(scratch: Path, path: Path) -> None:
    folder = scratch.is_dir() and not scratch.is_symlink()
    handle = os.open(scratch / _LOCK if folder else scratch, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if folder:
            _restore(scratch, path)
            shutil.rmtree(scratch)
        else:
            scratch.unlink()
    finally:
        os.close(handle)


def _bytes(piece: str | bytes) -> bytes:
    # Names in files may have halves of characters, which no encoding has: they stand as their numbers.
    return piece.encode("utf-8", "backslashreplace") if isinstance(piece, str) else piece


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


# -- archives of arrays ---------------------------------------------------------------------------------------
# Reads numpy's archives of arrays (.npz), which are zip files, within the limits of all that is unpacked.


# What zipfile and numpy raise for damage. A shape larger than the data is damage too, whatever memory there is.
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, LookupError, TypeError, AttributeError,
    SyntaxError, RuntimeError, MemoryError,
)  # fmt: skip


def read_arrays(path: Path, names: Collection[str] = ()) -> dict[str, npt.NDArray[Any]]:
    """The arrays of an archive by name; nothing is unpickled.

    Args:
        path: the archive.
        names: the arrays that are asked for; () for all that it has.

    Raises:
        InputError: the file does not exist or cannot be read.
        FormatError: it is no such archive, lacks a name, or unpacks to more than `MAX_FILE_BYTES` or `MAX_RATIO`
            times its size.
    """
    # Those who only read names and texts start without numpy.
    import numpy as np

    with open_file(path) as source:
        try:
            with zipfile.ZipFile(source) as archive:
                # No member gives more than what it says here.
                total = sum(member.file_size for member in archive.infolist())
            size = os.fstat(source.fileno()).st_size
            if total <= min(MAX_FILE_BYTES, max(FREE_BYTES, MAX_RATIO * size)):
                source.seek(0)
                with np.load(source, allow_pickle=False) as stored:
                    return {name: stored[name] for name in names or stored.files}
        except _DAMAGE as error:
            why = " ".join(str(error).split())[:100]
            raise FormatError(f"{path}: no archive of arrays, or a damaged one ({why})") from None
    raise FormatError(f"{path}: {format_bytes(size)} that unpack to {format_bytes(total)}, not read")
