"""Traces of collectives: the lines of a file, one file a rank, what every reader gives, and the reader of our own.

The tracer writes these lines (`trace_collectives`); readers and frontends know them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from echograph.errors import FormatError, InputError
from echograph.ir.files import open_file

MAJOR, MINOR = 1, 0
FORMAT = "echograph collective trace"
COLUMNS = 6
UNKNOWN = -1
MAX_SIGNATURES = 1 << 22
# Nanoseconds: 73 years after a call, 146 years of the wall clock; sums of both are 64-bit integers.
MAX_NS, MAX_WALL_NS = 1 << 61, 1 << 62
MAX_SEQUENCE = (1 << 40) - 1
WholeNumber: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]
Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=2**24)]
Peer: TypeAlias = Annotated[int, Meta(ge=-1, lt=2**24)]
_Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e12)]


class _Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", omit_defaults=True):
    """Base of the objects; what a newer minor version adds is skipped."""


class HeaderLine(_Line, frozen=True, kw_only=True, tag="header"):
    """First line of a file.

    Attributes:
        format: `FORMAT`.
        version: major and minor; a reader refuses a newer major.
        rank: global rank.
        world: ranks of the job.
        host: name of the machine.
        pid: process.
        began_ns: wall clock when the trace began.
        torch: version of PyTorch, "" where another tool wrote the trace.
        unknown: collective operators of this PyTorch that the tracer does not know, and so does not see.
    """

    format: str
    version: tuple[WholeNumber, WholeNumber]
    rank: Rank
    world: Annotated[int, Meta(ge=1, le=2**24)]
    host: str = ""
    pid: WholeNumber = 0
    began_ns: WholeNumber = 0
    torch: str = ""
    unknown: tuple[str, ...] = ()


class GroupLine(_Line, frozen=True, kw_only=True, tag="group"):
    """A group of ranks.

    Attributes:
        name: same on all its ranks.
        ranks: global ranks, in the order of the group.
        torch_name: as PyTorch numbers it.
        about: what its maker said of it.
        backend: what communicates.
    """

    name: str
    ranks: tuple[Rank, ...]
    torch_name: str = ""
    about: str = ""
    backend: str = ""


class CallSignature(_Line, frozen=True, kw_only=True, tag="what"):
    """What calls have in common: their operation, group, sizes and call site.

    Attributes:
        id: number in this file.
        op: as torch.distributed names it.
        group: name of its group.
        channel: what the sequence counts: the group, or for point to point `group:source>destination/tag`.
        bytes: message size as nccl-tests defines it.
        input_bytes: what this rank gives.
        output_bytes: what this rank gets.
        shapes: of the tensors that count for `bytes`; at most 8 stand here.
        tensors: how many there are.
        dtype: element type.
        asynchronous: whether the caller got a Work to wait for.
        coalesced: whether it is one of several calls that run as one.
        device: type of the device.
        stream: the caller's stream, 0 for the default one.
        api: function of torch.distributed that the caller called; "" where C++ did.
        site: file, line and function that called it.
        phase: forward, recompute, backward, optimizer or "".
        module: path of the module it is for, where a model is attached.
        peer: global rank of the other side (point to point), or -1.
    """

    id: Annotated[int, Meta(ge=0, lt=MAX_SIGNATURES)]
    op: str
    group: str
    channel: str
    bytes: WholeNumber
    input_bytes: WholeNumber
    output_bytes: WholeNumber
    shapes: tuple[tuple[WholeNumber, ...], ...] = ()
    tensors: WholeNumber = 1
    dtype: str = ""
    asynchronous: bool = False
    coalesced: bool = False
    device: str = "cpu"
    stream: WholeNumber = 0
    api: str = ""
    site: str = ""
    phase: str = ""
    module: str = ""
    peer: Peer = -1


class Heartbeat(_Line, frozen=True, kw_only=True, tag="beat"):
    """How far a rank is.

    Attributes:
        at_ns: wall clock.
        issued: calls issued so far, by channel; of the channels that moved last.
    """

    at_ns: WholeNumber
    issued: dict[str, WholeNumber]


class StuckCall(_Line, frozen=True, kw_only=True, tag="stuck"):
    """A call that did not end in time.

    Attributes:
        op: operation.
        channel: its channel.
        sequence: its number there.
        seconds: how long it had been waiting.
        arrived: ranks that have issued it too.
        missing: ranks that have not.
        unheard: ranks whose files are not in this folder.
        site: who called.
    """

    op: str
    channel: str
    sequence: WholeNumber
    seconds: _Seconds
    arrived: tuple[Rank, ...]
    missing: tuple[Rank, ...]
    unheard: tuple[Rank, ...]
    site: str = ""


class EndLine(_Line, frozen=True, kw_only=True, tag="end"):
    """Last line of a file.

    Attributes:
        calls: calls seen.
        dropped: calls that could not be written, because the disk was full or too slow.
        failed: calls that PyTorch refused.
        errors: calls that the tracer failed to describe.
    """

    calls: WholeNumber
    dropped: WholeNumber = 0
    failed: WholeNumber = 0
    errors: WholeNumber = 0


RecordLine: TypeAlias = HeaderLine | GroupLine | CallSignature | Heartbeat | StuckCall | EndLine
CallRow: TypeAlias = tuple[int, int, int, int, int, int]

ENCODER = msgspec.json.Encoder()
# What decoding a broken line raises.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError)
DECODER: msgspec.json.Decoder[RecordLine] = msgspec.json.Decoder(RecordLine)


def encode(line: RecordLine) -> bytes:
    """A line with its end."""
    return ENCODER.encode(line) + b"\n"


CallRows = NDArray[np.int64]
# In the end's place of a row: the call has ended, and nobody knows when.
NO_TIME = -2


class CallSource:
    """One file of one rank.

    Attributes:
        path: the file.
        kind: whose trace it is.
        rank: global rank.
        world: ranks of the job, as the file says.
        host: name of the machine, "" where not known.
        timed: whether the rows tell when a call began; if not, only how long it took.
        signatures: what the rows' first column points into.
        groups: ranks of each group.
        problems: what could not be read, in words, and how often.
        stuck: calls that were reported as not ending.
        complete: whether the file says that its run ended in order.
        dropped: calls that the tracer could not write.
    """

    kind = ""
    timed = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rank = 0
        self.world = 1
        self.host = ""
        self.signatures: list[CallSignature | None] = []
        self.groups: dict[str, tuple[int, ...]] = {}
        self.problems: Counter[str] = Counter()
        self.stuck: list[StuckCall] = []
        self.complete = True
        self.dropped = 0

    def open(self) -> None:
        """Reads what stands before the first row, so that ranks and groups are known.

        Raises:
            InputError: the file cannot be read at all.
        """
        raise NotImplementedError

    def rows(self) -> Iterator[CallRows]:
        """Rows as in the trace format (what, sequence, queued, start, end, wait), some ten thousand at a time."""
        raise NotImplementedError


def known_rows(rows: CallRows, source: CallSource) -> CallRows:
    """Rows whose description has been read; the others are counted."""
    table = np.array([what is not None for what in source.signatures], dtype=np.bool_)
    inside = (rows[:, 0] >= 0) & (rows[:, 0] < len(table))
    inside[inside] = table[rows[inside, 0]]
    if not inside.all():
        source.problems["rows without a description"] += int((~inside).sum())
    return rows[inside]


def no_rows() -> CallRows:
    """None."""
    return np.empty((0, COLUMNS), dtype=np.int64)


BLOCK_BYTES = 1 << 20
# A line that is longer is none of the tracer's.
MAX_LINE_BYTES = 1 << 26
_MOST = np.array([np.iinfo(np.int64).max, MAX_SEQUENCE, MAX_WALL_NS, MAX_NS, MAX_NS, MAX_NS])
_LEAST = np.array([0, 0, 0, -MAX_NS, -MAX_NS, -MAX_NS])
_COLUMN_NAMES = ("what", "sequence", "queued", "start", "end", "wait")
_NUMBERS = msgspec.json.Decoder(list[int])


class NativeSource(CallSource):
    """A file that `trace_collectives` wrote.

    Half a line at its end, or a broken one inside, costs that line; one that is whole and says what cannot be, as
    that a message has less than no bytes, is refused.
    """

    kind = "echograph"
    _line = 0

    def open(self) -> None:
        """Reads the header.

        Raises:
            InputError: the file cannot be read.
            FormatError: it has no header, or one of a newer version.
        """
        self.complete = False
        try:
            with open_file(self.path) as stream:
                first = stream.readline(1 << 20)
        except OSError as error:
            raise InputError(f"{self.path}: {error.strerror or error}") from None
        try:
            header = DECODER.decode(first)
        except UNREADABLE as error:
            self._refuse_what_cannot_be(error, 1)
            header = None
        if not isinstance(header, HeaderLine) or header.format != FORMAT:
            raise FormatError(f"{self.path}: its first line is no header of a trace of collectives")
        if header.version[0] > MAJOR:
            version = ".".join(map(str, header.version))
            raise FormatError(
                f"{self.path}: version {version}, newer than {MAJOR}: read it with a newer echograph"
            )
        self.rank, self.world, self.host = header.rank, header.world, header.host
        if header.unknown:
            self.problems[f"operators that the tracer does not see: {', '.join(header.unknown)}"] += 1

    def rows(self) -> Iterator[CallRows]:
        """Rows of the file.

        Raises:
            FormatError: a line says what cannot be; names line and field.
        """
        rest = b""
        self._line = 0
        with open_file(self.path) as stream:
            while block := stream.read(BLOCK_BYTES):
                if len(rest) > MAX_LINE_BYTES:
                    raise FormatError(
                        f"{self.path}: line {self._line + 1}: longer than {MAX_LINE_BYTES >> 20} MiB: no trace"
                    )
                block = rest + block
                cut = block.rfind(b"\n") + 1
                rest = block[cut:]
                yield self._block(block[:cut])
                self._line += block.count(b"\n", 0, cut)
        if rest:
            self.problems["half-written last lines"] += 1

    def _block(self, block: bytes) -> CallRows:
        """Rows of whole lines, the first of which is the one after `_line`."""
        numbered = None
        if b"{" in block or block[:1] != b"[":
            lines = list(enumerate(block.split(b"\n"), start=self._line + 1))
            for number, line in lines:
                if line and line[:1] != b"[":
                    self._object(line, number)
            numbered = [number for number, line in lines if line[:1] == b"["]
            block = b"\n".join([line for _, line in lines if line[:1] == b"["])
        if not block:
            return no_rows()
        return known_rows(self._numbers(block, numbered), self)

    def _numbers(self, block: bytes, numbered: list[int] | None) -> CallRows:
        """Rows of arrays alone; `numbered` are their lines' numbers, None where they follow each other."""
        block = block.strip()
        try:
            flat = _NUMBERS.decode(b"[%b]" % block.translate(None, b"[]").replace(b"\n", b","))
            if len(flat) == COLUMNS * (block.count(b"\n") + 1):
                return self._in_range(np.array(flat, dtype=np.int64).reshape(-1, COLUMNS), numbered)
        except UNREADABLE:
            pass
        good, places = [], []
        for place, line in enumerate(block.split(b"\n")):
            try:
                numbers = _NUMBERS.decode(line)
                np.array(numbers, dtype=np.int64)
            except UNREADABLE:
                numbers = []
            if len(numbers) == COLUMNS:
                good.append(numbers)
                places.append(numbered[place] if numbered else self._line + 1 + place)
            else:
                self.problems["unreadable lines"] += 1
        return self._in_range(np.array(good, dtype=np.int64).reshape(-1, COLUMNS), places)

    def _in_range(self, rows: CallRows, numbered: list[int] | None) -> CallRows:
        wrong = np.argwhere((rows < _LEAST) | (rows > _MOST))
        if len(wrong):
            row, column = wrong[0].tolist()
            line = numbered[row] if numbered else self._line + 1 + row
            raise FormatError(
                f"{self.path}: line {line}: {_COLUMN_NAMES[column]} is {rows[row, column]}: no call has that; "
                "leave the line out"
            )
        return rows

    def _object(self, text: bytes, number: int) -> None:
        try:
            line: RecordLine = DECODER.decode(text)
        except UNREADABLE as error:
            self._refuse_what_cannot_be(error, number)
            self.problems["unreadable lines"] += 1
            return
        match line:
            case GroupLine():
                self.groups[line.name] = line.ranks
            case StuckCall():
                self.stuck.append(line)
            case EndLine():
                self.complete, self.dropped = True, line.dropped
                if line.errors:
                    self.problems["calls that the tracer could not describe, left out"] += line.errors
            case HeaderLine() | Heartbeat():
                pass
            case what:
                self.signatures += [None] * (what.id + 1 - len(self.signatures))
                self.signatures[what.id] = what

    def _refuse_what_cannot_be(self, error: Exception, number: int) -> None:
        """Damage costs a line; a value of another type, or out of range, in a known kind of line is an error."""
        if (
            isinstance(error, msgspec.ValidationError)
            and " - at `$." in (said := str(error))
            and "`$.line`" not in said
        ):
            raise FormatError(f"{self.path}: line {number}: {said}: leave the line out") from None
