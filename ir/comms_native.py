"""Reads the traces of collectives that `trace_collectives` wrote."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from echograph.errors import FormatError, InputError
from echograph.ir.comms_record import (
    COLUMNS,
    DECODER,
    FORMAT,
    MAJOR,
    UNREADABLE,
    Beat,
    End,
    GroupLine,
    Header,
    Line,
    Stuck,
)
from echograph.ir.comms_source import Rows, Source, known_rows, no_rows

BLOCK_BYTES = 1 << 20
MAX_WHATS = 1 << 22
_NUMBERS = msgspec.json.Decoder(list[int])


class NativeSource(Source):
    """A file that `trace_collectives` wrote; half a line at its end, or a broken one inside, costs that line."""

    kind = "echograph"

    def open(self) -> None:
        """Reads the header.

        Raises:
            InputError: the file cannot be read.
            FormatError: it has no header, or one of a newer version.
        """
        self.complete = False
        try:
            with self.path.open("rb") as stream:
                first = stream.readline(1 << 20)
        except OSError as error:
            raise InputError(f"{self.path}: {error.strerror or error}") from None
        try:
            header = DECODER.decode(first)
        except UNREADABLE:
            header = None
        if not isinstance(header, Header) or header.format != FORMAT:
            raise FormatError(f"{self.path}: its first line is no header of a trace of collectives")
        if header.version[0] > MAJOR:
            version = ".".join(map(str, header.version))
            raise FormatError(
                f"{self.path}: version {version}, newer than {MAJOR}: read it with a newer echograph"
            )
        self.rank, self.world, self.host = header.rank, header.world, header.host
        if header.unknown:
            self.problems[f"operators that the tracer does not see: {', '.join(header.unknown)}"] += 1

    def rows(self) -> Iterator[Rows]:
        """Rows of the file."""
        rest = b""
        with self.path.open("rb") as stream:
            while block := stream.read(BLOCK_BYTES):
                block = rest + block
                cut = block.rfind(b"\n") + 1
                rest = block[cut:]
                yield self._block(block[:cut])
        if rest:
            self.problems["half-written last lines"] += 1

    def _block(self, block: bytes) -> Rows:
        if b"{" in block or block[:1] != b"[":
            lines = block.splitlines()
            for line in lines:
                if line[:1] != b"[":
                    self._object(line)
            block = b"\n".join([line for line in lines if line[:1] == b"["])
        if not block:
            return no_rows()
        return known_rows(self._numbers(block), self)

    def _numbers(self, block: bytes) -> Rows:
        try:
            flat = _NUMBERS.decode(b"[%b]" % block.translate(None, b"[]").strip().replace(b"\n", b","))
            if len(flat) == COLUMNS * (block.strip().count(b"\n") + 1):
                return np.array(flat, dtype=np.int64).reshape(-1, COLUMNS)
        except UNREADABLE:
            pass
        good = []
        for line in block.splitlines():
            try:
                numbers = _NUMBERS.decode(line)
                np.array(numbers, dtype=np.int64)
            except UNREADABLE:
                numbers = []
            if len(numbers) == COLUMNS:
                good.append(numbers)
            else:
                self.problems["unreadable lines"] += 1
        return np.array(good, dtype=np.int64).reshape(-1, COLUMNS)

    def _object(self, text: bytes) -> None:
        try:
            line: Line = DECODER.decode(text)
        except UNREADABLE:
            self.problems["unreadable lines"] += 1
            return
        match line:
            case GroupLine():
                self.groups[line.name] = line.ranks
            case Stuck():
                self.stuck.append(line)
            case End():
                self.complete, self.dropped = True, line.dropped
            case Header() | Beat():
                pass
            case what:
                if not 0 <= what.id < MAX_WHATS:
                    self.problems["unreadable lines"] += 1
                    return
                self.whats += [None] * (what.id + 1 - len(self.whats))
                self.whats[what.id] = what
