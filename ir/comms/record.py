"""The lines of a trace of collectives, one file a rank: what the tracer writes, and readers and frontends know.

A line is a JSON object or a JSON array. Objects, told apart by `line`, come before the first row that needs them:
`header` (once), `group` (a group of ranks), `what` (all that calls have in common: operation, group, bytes,
shapes, call site ...), `beat` (how far the rank is, while it works or
hangs), `stuck` (a call that does not end) and `end` (the last line of a run that ended in order). An array is one
call:

    [what, sequence, queued, start, end, wait]

`queued` is nanoseconds of the wall clock; the other times are nanoseconds after it, or -1 where not known. `wait`
is when the caller first waited for the call. A row whose end is -1 is of a call that had not ended when it was
written; a later row of the same channel and sequence replaces it.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

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
