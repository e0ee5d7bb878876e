"""The events of a Chrome or Kineto trace file, a batch at a time, in memory bounded by the batch.

A file is an object with `traceEvents`, or the array of events alone. The decoder itself says where an event ends:
a prefix of the array is cut before some `{` that follows `},`; if what stands before the cut is a valid array, the
cut fell between two events, since all strings and brackets are closed there. Where it is not (a cut within an
event, the end of the array, broken text), the events are walked one by one.
"""

from __future__ import annotations

import codecs
import functools
import json
import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from echograph.errors import DataError
from echograph.ir.columns import Bools, Int64
from echograph.ir.files import Unpacked
from echograph.profiler.traces.trace import DEVICE, KERNELS, NONE, OPERATORS, Trace

CHUNK_BYTES = 1 << 20
# Beyond this, text without the end of an event, or before the first, is not a trace.
MAX_EVENT_BYTES = 1 << 26
_LITERAL = len("false") + 1
_BLANK = b" \t\r\n"
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_GAP = re.compile(r"[\s,]*")


class ArgumentGroup(NamedTuple):
    """Arguments that come together: an event without the first has none of the others.

    Attributes:
        of: categories of the events that have them.
        names: names of our fields to names in the file.
    """

    of: frozenset[str]
    names: dict[str, str]


# What analyses need of an event; whatever else it says is read anew when it is asked for (`details`).
GROUPS = (
    ArgumentGroup(DEVICE, {"bytes": "bytes"}),
    ArgumentGroup(DEVICE, {"bandwidth": "memory bandwidth (GB/s)"}),
    ArgumentGroup(DEVICE, {"graph_node": "graph node id"}),
    ArgumentGroup(
        frozenset({"cuda_sync"}),
        {"wait_stream": "wait_on_stream", "wait_record": "wait_on_cuda_event_record_corr_id"},
    ),
    ArgumentGroup(OPERATORS, {"sequence": "Sequence number", "forward_thread": "Fwd thread id"}),
    ArgumentGroup(
        OPERATORS | KERNELS,
        {
            "collective": "Collective name",
            "dtype": "dtype",
            "in_elements": "In msg nelems",
            "out_elements": "Out msg nelems",
            "group_size": "Group size",
            "group": "Process Group Name",
            "ranks": "Process Group Ranks",
        },
    ),
)
NAMES = {field: name for group in GROUPS for field, name in group.names.items()}
# PyTorch 1.8 wrote "external id" of what ran on a device.
_RENAMED = NAMES | {"external_id": "External id", "old_external_id": "external id"}
TEXTS = frozenset({"Collective name", "dtype", "Process Group Name", "Process Group Ranks"})


class EventArguments(msgspec.Struct, frozen=True, gc=False, rename=_RENAMED):
    """What analyses need of an event's `args`; -1 or None where it does not say."""

    external_id: int | None = -1
    old_external_id: int | None = None
    sequence: int | None = None
    forward_thread: int | None = None
    stream: int | str | None = -1
    correlation: int | None = -1
    bytes: int | float | None = None
    # "N/A" where a transfer took no time.
    bandwidth: float | str | None = None
    collective: str | None = None
    dtype: str | None = None
    in_elements: int | None = None
    out_elements: int | None = None
    group_size: int | None = None
    group: str | None = None
    ranks: str | None = None
    wait_stream: int | None = None
    wait_record: int | None = None
    graph_node: int | None = None


NOTHING = EventArguments()
_TYPES = {field.encode_name: field.type for field in msgspec.structs.fields(EventArguments)}


class TraceEvent(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """A complete event as it stands in the file; microseconds."""

    cat: str = ""
    name: str = ""
    ts: int | float | None = None
    dur: int | float | None = None
    pid: int | str | None = None
    tid: int | str | None = None
    args: EventArguments | None = NOTHING


class ExactEvent(TraceEvent, gc=False, tag_field="ph", tag="X"):
    """A complete event whose time needs more digits than a float has (nanoseconds since 1970)."""

    ts: Decimal | None = None  # type: ignore[assignment]


class BeginEvent(msgspec.Struct, gc=False, tag_field="ph", tag="B"):
    """The begin of an event that another event ends; microseconds."""

    cat: str = ""
    name: str = ""
    ts: Decimal | None = None
    pid: int | str | None = None
    tid: int | str | None = None
    args: EventArguments | None = NOTHING


class EndEvent(msgspec.Struct, gc=False, tag_field="ph", tag="E"):
    """The end of the last event of its thread that is open; microseconds."""

    ts: Decimal | None = None
    pid: int | str | None = None
    tid: int | str | None = None
    args: EventArguments | None = NOTHING


class MetadataEvent(msgspec.Struct, gc=False, tag_field="ph", tag="M"):
    """What a process or thread is called."""

    name: str = ""
    pid: int | str | None = None
    args: Any = None


# All that the Trace Event Format has besides; nothing of them is kept.
_OTHERS = [
    msgspec.defstruct("Other", [], tag_field="ph", tag=phase, gc=False) for phase in "IiCbneSTpFstfPNODVvRca()="
]


class OpenEvents:
    """Matches ends with begins: an end is that of the last begin of its thread, and name, that is still open.

    Attributes:
        unmatched: ends that had no begin, so far.
    """

    def __init__(self) -> None:
        self.unmatched = 0
        self._open: dict[tuple[str, str], list[tuple[str, Any]]] = defaultdict(list)

    def begin(self, pid: Any, tid: Any, event: Any, name: Any = None) -> None:
        """Keeps an event until it ends."""
        self._open[str(pid), str(tid)].append((str(name), event))

    def end(self, pid: Any, tid: Any, name: Any = None) -> Any:
        """The event that ends, or None; without a name, whatever began last."""
        begun = self._open[str(pid), str(tid)]
        for place in range(len(begun) - 1, -1, -1):
            if name in (None, "") or str(name) == begun[place][0]:
                return begun.pop(place)[1]
        self.unmatched += 1
        return None

    def notes(self, path: Path) -> Iterator[str]:
        """A line for what began and did not end, and for what ended and did not begin."""
        if still := sum(map(len, self._open.values())):
            yield f"{path}: {still} events begin and do not end: they are left out"
        if self.unmatched:
            yield f"{path}: {self.unmatched} events end and did not begin: they are left out"


class _Walked(NamedTuple):
    """Events, the text after them (None: as it was), and whether the array ended."""

    events: list[Any]
    rest: bytes | None
    ended: bool


class EventStream:
    """The events of one file, batch by batch.

    Args:
        path: a JSON file, gzipped or not.
        event: what a complete event becomes: `TraceEvent`, `ExactEvent` for times that a float cannot hold, a
            `dict` of all that it says, or its text; in these cases, events of other phases too.

    Attributes:
        header: what the file says before and after the events; complete when the batches have ended.
        notes: what is missing, one line each; complete when the batches have ended.
    """

    def __init__(self, path: Path, event: type[TraceEvent | dict[str, Any] | msgspec.Raw] = TraceEvent) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self.notes: list[str] = []
        phases = (event, BeginEvent, EndEvent, MetadataEvent, *_OTHERS)
        self._typed = issubclass(event, TraceEvent)
        self._kinds: Any = functools.reduce(operator.or_, phases) if self._typed else dict[str, Any]
        of: Any = msgspec.Raw if event is msgspec.Raw else self._kinds
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(list[of], strict=False)
        exact = Decimal if event is ExactEvent else float
        self._json = json.JSONDecoder(strict=False, parse_float=exact)
        self._count = 0
        self._misfits = 0
        self._misfit: str | None = None
        self._cut_off = False
        self._enough = CHUNK_BYTES

    def __iter__(self) -> Iterator[list[Any]]:
        """Batches of events.

        Raises:
            InputError: the file cannot be read, or does not hold a trace, or is broken (not merely cut off).
        """
        pieces = self._pieces()
        # The rest of the array, with its bracket: closed at a cut, it is what the decoder takes as it stands.
        buffer = bytearray(b"[" + self._find_events(pieces))
        ended = False
        while not ended:
            piece = next(pieces, b"")
            buffer += piece
            events, rest, ended = self._decode(buffer, last=not piece)
            buffer = bytearray(b"[" + rest) if rest is not None else buffer
            yield events
            if not ended and not piece:
                self._cut_off = True
                break
        if ended:
            self._finish(bytes(buffer[1:]), pieces)
        if self._cut_off:
            self.notes.append(f"{self.path}: cut off after {self._count} events; what follows is missing")
        if self._misfits:
            self.notes.append(
                f"{self.path}: {self._misfits} events have arguments that are not of their type, which are left "
                f"out ({self._misfit} first)"
            )

    def head(self) -> dict[str, Any]:
        """What the file says before the events, without reading on.

        Raises:
            InputError: as for the batches.
        """
        self._find_events(self._pieces())
        return self.header

    def text(self, limit: int) -> bytes:
        """The file's text, not compressed: all of it, or the first bytes up to a limit."""
        found = bytearray()
        for piece in self._pieces():
            found += piece
            if len(found) >= limit:
                break
        return bytes(found[:limit])

    def with_events(self, added: Iterable[bytes]) -> Iterator[bytes]:
        """The file's text, not compressed, with further events before its first; the rest byte for byte.

        Args:
            added: the JSON of each.

        Raises:
            InputError: as for the batches.
        """
        seen: list[bytes] = []
        pieces = self._pieces()

        def noted() -> Iterator[bytes]:
            for piece in pieces:
                seen.append(piece)
                yield piece

        rest = self._find_events(noted())
        before = b"".join(seen)
        yield before[: len(before) - len(rest)]
        while not rest.strip(_BLANK) and (piece := next(pieces, b"")):
            rest += piece
        following = not rest.lstrip(_BLANK).startswith(b"]")
        separator = b"\n"
        for event in added:
            yield separator + event
            separator = b",\n"
        yield (b"," if following and separator == b",\n" else b"") + rest
        yield from pieces

    def _pieces(self) -> Iterator[bytes]:
        unpacked = Unpacked(self.path)
        yield from unpacked
        self._cut_off = unpacked.cut_off

    def _find_events(self, pieces: Iterator[bytes]) -> bytes:
        head = b""
        for piece in pieces:
            head = (head + piece).removeprefix(codecs.BOM_UTF8)
            if head.lstrip(_BLANK).startswith(b"["):
                return head.lstrip(_BLANK)[1:]
            if found := _EVENTS.search(head):
                self._read_header(head[: found.start()].rstrip(_BLANK).removesuffix(b",") + b"}")
                return head[found.end() :]
            if len(head) > MAX_EVENT_BYTES:
                break
        raise DataError(f"{self.path}: not a trace: it has no traceEvents")

    def _finish(self, rest: bytes, pieces: Iterator[bytes]) -> None:
        for piece in pieces:
            rest += piece
            if len(rest) > MAX_EVENT_BYTES:
                raise DataError(f"{self.path}: more than {MAX_EVENT_BYTES >> 20} MiB follow the events")
        tail = rest.strip(_BLANK).removeprefix(b",")
        if tail and not self._cut_off:
            self._read_header(b"{" + tail)

    def _read_header(self, text: bytes) -> None:
        try:
            said = whole_characters(json.loads(text.decode("utf-8", "replace"), strict=False))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self.path}: what stands beside the events is not valid JSON ({error})") from None
        if "traceEvents" in said:
            raise DataError(f"{self.path}: has traceEvents twice: split it into a file for each")
        self.header |= said

    def _decode(self, buffer: bytearray, *, last: bool) -> _Walked:
        cut = _last_gap(buffer)
        if not cut:
            # An event longer than a piece is looked for again when there is twice as much of it.
            if not last and len(buffer) < self._enough:
                return _Walked([], None, False)
            walked = self._walk(bytes(buffer[1:]))
            self._enough = CHUNK_BYTES if walked.events else 2 * len(buffer)
            return walked
        after, buffer[cut] = buffer[cut], ord("]")
        try:
            events = self._decoder.decode(buffer[: cut + 1])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            buffer[cut] = after
            return self._walk(bytes(buffer[1:]))
        self._count += len(events)
        rest = bytes(buffer[cut + 1 :]).lstrip(b" \t\r\n,")
        if not last:
            return _Walked(events, rest, False)
        walked = self._walk(rest)
        return _Walked(events + walked.events, walked.rest, walked.ended)

    def _walk(self, buffer: bytes) -> _Walked:
        # One character for every byte that is no UTF-8, so that places in both texts are the same.
        kept = buffer.decode("utf-8", "surrogateescape")
        text = kept.encode("utf-8", "replace").decode()
        events: list[Any] = []
        at = 0
        while True:
            at = _GAP.match(text, at).end()  # type: ignore[union-attr]
            if text.startswith("]", at):
                return _Walked(events, kept[at + 1 :].encode("utf-8", "surrogateescape"), True)
            try:
                said, at = self._json.raw_decode(text, at)
                events.append(self._event(said))
                self._count += 1
            except json.JSONDecodeError as error:
                rest = kept[at:].encode("utf-8", "surrogateescape")
                open_ended = error.pos >= len(text) - _LITERAL or error.msg.startswith("Unterminated")
                if not open_ended or len(rest) > MAX_EVENT_BYTES:
                    raise self._broken(error.msg) from None
                return _Walked(events, rest, False)
            except RecursionError:
                raise self._broken("it is nested too deeply") from None
            except (msgspec.ValidationError, ValueError, OverflowError) as error:
                raise self._broken(str(error)) from None

    def _event(self, said: Any) -> Any:
        if not self._typed:
            return msgspec.convert(whole_characters(said), self._kinds, strict=False)
        if isinstance(said, dict) and said.get("ph") not in ("X", "B", "E", "M"):
            return _OTHERS[0]()
        try:
            return msgspec.convert(said, self._kinds, strict=False)
        except (msgspec.ValidationError, OverflowError):
            if not isinstance(said, dict) or ("args" not in said and said.get("ph") != "M"):
                raise
            if said.get("ph") == "M":
                return _OTHERS[0]()
        args = said["args"] if isinstance(said["args"], dict) else {}
        fitting = {name: value for name, value in args.items() if _fits(name, value)}
        event = msgspec.convert(said | {"args": fitting}, self._kinds, strict=False)
        self._misfits += 1
        if self._misfit is None:
            name = next(iter(args.keys() - fitting.keys()), None)
            self._misfit = f"event {self._count}" if name is None else f"event {self._count}: '{name}'"
        return event

    def _broken(self, why: str) -> DataError:
        return DataError(f"{self.path}: event {self._count} is broken: {why}")


def whole_characters(value: Any) -> Any:
    """What JSON spelled, without halves of characters, which no terminal or file takes."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {whole_characters(name): whole_characters(inner) for name, inner in value.items()}
    return [whole_characters(inner) for inner in value] if isinstance(value, list) else value


def _fits(name: str, value: Any) -> bool:
    """Whether an argument is of its type; those that are not kept may be anything."""
    try:
        msgspec.convert(value, _TYPES.get(name, Any), strict=False)
    except (msgspec.ValidationError, OverflowError):
        return False
    return True


def _last_gap(buffer: bytearray) -> int:
    """Where the last `}` ends that a comma and a `{` follow; 0 when there is none."""
    at = len(buffer)
    while (at := buffer.rfind(b"{", 0, at)) > 0:
        before = buffer[max(0, at - 256) : at].rstrip(_BLANK)
        if before.endswith(b","):
            event = before[:-1].rstrip(_BLANK)
            if event.endswith(b"}"):
                return at - (min(at, 256) - len(event))
    return 0


def whole_events(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every event of a file with its position, whatever its phase, as the file has it; `args` are always a dict.

    Times that need more digits than a float has are rounded; a `Trace` has them exactly.

    Raises:
        InputError: the file cannot be read, or is broken.
    """
    index = 0
    for batch in EventStream(path, dict):
        for event in batch:
            if not isinstance(event.get("args"), dict):
                event["args"] = {}
            yield index, event
            index += 1


def _plain(event: msgspec.Raw | dict[str, Any]) -> dict[str, Any]:
    """An event as the file has it; where texts were passed by, one character for every byte that is no UTF-8."""
    if isinstance(event, dict):
        return event
    try:
        return _ANY.decode(event)
    except (msgspec.DecodeError, UnicodeDecodeError):
        said = json.loads(bytes(event).decode("utf-8", "replace"), strict=False)
        return {**whole_characters(said)}


_ANY = msgspec.json.Decoder(dict[str, Any], strict=False)


def details(trace: Trace, rows: Int64 | Bools) -> list[dict[str, Any]]:
    """What the trace's file says of some rows (shapes, grids, types, ...), in the order of the rows.

    Args:
        trace: a trace whose file is still where it was; one without a file says what its columns do.
        rows: row numbers, or which rows.

    Raises:
        InputError: the file is gone or cannot be read.
        DataError: it is not the file that the trace was read from.
    """
    chosen = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
    if not trace.has_file:
        columns = {name: trace.argument(name) for name in trace.arguments.keys() & TEXTS}
        return [
            {"args": {name: trace.strings[of[row]] for name, of in columns.items() if of[row] != NONE}}
            for row in chosen.tolist()
        ]
    wanted = np.unique(trace.index[chosen]).tolist()
    found: dict[int, dict[str, Any]] = {}
    begin = at = 0
    for batch in EventStream(Path(trace.path), msgspec.Raw) if wanted else ():
        while at < len(wanted) and wanted[at] < begin + len(batch):
            event = _plain(batch[wanted[at] - begin])
            found[wanted[at]] = event if isinstance(event.get("args"), dict) else event | {"args": {}}
            at += 1
        begin += len(batch)
        if at == len(wanted):
            break
    answer = []
    for row in chosen.tolist():
        event = found.get(int(trace.index[row]), {})
        if event.get("name") != trace.text(row):
            raise DataError(
                f"{trace.path}: changed since it was read: event {trace.index[row]} is another; read anew"
            )
        answer.append(event)
    return answer
