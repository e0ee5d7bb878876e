"""Which reader a trace file has, by how it begins: one line a format, all of which give the same columns."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from echograph.errors import DataError
from echograph.ir.files import Unpacked
from echograph.profiler.traces.trace import Trace
from echograph.progress import Progress, silent

Reader = Callable[[Path, Progress], Trace]
HEAD_BYTES = 1 << 16
"""How much of a file is looked at, unpacked, to tell what it is."""
_DEFAULT = "kineto:read_trace"


class TraceFormat(NamedTuple):
    """A format beside the profiler's own JSON.

    Attributes:
        name: what people call it.
        begins: what its files begin with.
        reader: `module:function` of path and progress, in this package.
    """

    name: str
    begins: re.Pattern[bytes]
    reader: str


FORMATS = (
    TraceFormat("a memory snapshot of PyTorch", re.compile(rb"\x80[\x02-\x05]"), "memory_snapshot:read_memory"),
    TraceFormat("an export of Nsight Systems", re.compile(rb"SQLite format 3\0"), "nsight:read_nsight"),
    TraceFormat("rocprofv3's JSON", re.compile(rb'\s*\{\s*"rocprofiler-sdk-tool"'), "rocprof:read_rocprof"),
    # A message's first field, planes, whose own first field is its number or its name.
    TraceFormat(
        "an XPlane of XLA", re.compile(rb"\x0a[\x80-\xff]{0,9}[\x00-\x7f][\x08\x12\x1a]"), "xplane:read_xplane"
    ),
)
# What is no trace, by how it begins, and what to do with it.
_READ_BY = "no profile: the analysis {} reads it with --option file=..."
_BESIDE = (
    (
        re.compile(rb'\s*\{(?!.*"traceEvents").*"nodes"\s*:\s*\[', re.DOTALL),
        f"an execution trace, {_READ_BY.format('execution-trace')}",
    ),
    (re.compile(rb"\s*\[\s*\["), f"a memory timeline, {_READ_BY.format('memory-categories')}"),
    (re.compile(rb".{257}ustar", re.DOTALL), "a tar archive: unpack it"),
)
# What cannot be read, by its ending, and what to do.
_HINTS = {
    ".nsys-rep": "export it first: nsys export --type sqlite",
    ".qdrep": "export it first: nsys export --type sqlite",
    ".pftrace": "a Perfetto trace is not read; let rocprofv3 write --output-format json",
    ".perfetto-trace": "a Perfetto trace is not read; let the profiler write JSON",
}


def head_of(path: Path) -> bytes:
    """How a file begins, unpacked.

    Raises:
        InputError: it cannot be read.
    """
    found = bytearray()
    for piece in Unpacked(path):
        found += piece
        if len(found) >= HEAD_BYTES:
            break
    return bytes(found[:HEAD_BYTES])


def format_of(head: bytes) -> TraceFormat | None:
    """The format of a file that begins so; None for the profiler's JSON, or none that is known."""
    return next((known for known in FORMATS if known.begins.match(head)), None)


def what_else(head: bytes) -> str | None:
    """What a file that begins so is, if that is known to be no trace, and what to do with it."""
    return next((line for pattern, line in _BESIDE if pattern.match(head)), None)


def read_any(path: Path, progress: Progress = silent) -> Trace:
    """The trace in a file of any format.

    Args:
        path: the file, gzipped or not.
        progress: told how far the reading is.

    Raises:
        InputError: the file cannot be read.
        DataError: it is no trace, or broken.
    """
    if (hint := _HINTS.get(path.suffix.lower())) is not None and path.is_file():
        raise DataError(f"{path}: {hint}")
    head = head_of(path)
    known = format_of(head)
    if known is None and (beside := what_else(head)) is not None:
        raise DataError(f"{path}: {beside}")
    module, _, function = (_DEFAULT if known is None else known.reader).partition(":")
    reader: Reader = getattr(import_module(f"echograph.profiler.traces.{module}"), function)
    return reader(path, progress)
