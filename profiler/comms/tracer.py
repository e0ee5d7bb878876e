"""`trace_collectives`: one line in a training script, one file a rank.

A `Writer` puts lines into the file from a thread of its own; a `Watchdog` reports collectives that do not end:
which, for how long, and who has come. Who has come stands in the files of the other ranks: each writes beside its
calls, once a second, how many it has issued in each channel. So the watchdog sees the ranks whose files are in its
folder: all of them on one machine or on a shared file system, and else says whose it does not see. It never stops
anything.
"""

from __future__ import annotations

import atexit
import glob
import os
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from copy import copy
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from echograph.errors import MissingExtraError, OutputError, UsageError
from echograph.ir.comms.record import (
    DECODER,
    FORMAT,
    MAJOR,
    MINOR,
    UNKNOWN,
    UNREADABLE,
    CallRow,
    CallSignature,
    EndLine,
    GroupLine,
    HeaderLine,
    Heartbeat,
    RecordLine,
    StuckCall,
    encode,
)
from echograph.profiler.comms.call import WALL_NS, CallKind, TracedCall
from echograph.profiler.comms.groups import TracedGroup

QUEUE = 1 << 16
INTERVAL_S = 0.2
Item: TypeAlias = RecordLine | CallRow | TracedCall


class Writer:
    """Takes lines from any thread and appends them to a file, whole lines only.

    Putting is kept as short as can be: a call is spelled when it is written. A disk that is full, or that cannot
    follow, costs lines, which are counted, and one warning; never an exception in the thread that puts.

    Args:
        path: file, made anew.
        tick: called in the writer's thread before each time that it looks for lines.
        rows: a call as the bytes of its row, and of what must stand before it; called by who writes.
        queue: most lines in memory.
        interval_s: seconds between two looks.
    """

    def __init__(
        self,
        path: Path,
        tick: Callable[[], None] = lambda: None,
        rows: Callable[[TracedCall], bytes] = lambda call: _text(call.row(0)),
        *,
        queue: int = QUEUE,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.path = path
        self.dropped = 0
        self._tick = tick
        self._rows = rows
        self._limit = queue
        self._half = queue // 2
        self._interval_s = interval_s
        self._lines: deque[Item] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._lock = threading.Lock()
        self._broken = False
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._thread = threading.Thread(target=self._run, name="echograph-comms", daemon=True)
        self._thread.start()

    def put(self, line: Item) -> None:
        """Queues a line; where the queue is full a row is dropped and counted, other lines are kept."""
        waiting = len(self._lines)
        if (waiting >= self._limit or self._broken) and _is_row(line):
            self.dropped += 1
            return
        self._lines.append(line)
        if waiting > self._half:
            self._wake.set()

    def close(self, last: Callable[[], RecordLine] | None = None) -> None:
        """Writes what is queued, then a last line, and closes the file; twice does nothing."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=30)
        self.flush()
        if last is not None:
            self._lines.append(last())
            self.flush()
        with suppress(OSError):
            os.close(self._file)

    def flush(self) -> None:
        """Writes what is queued now."""
        with self._lock:
            while self._lines and not self._broken:
                batch = [self._lines.popleft() for _ in range(min(len(self._lines), 4096))]
                self._write(batch)
            if self._broken:
                self._lines.clear()

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            self._tick()
            self.flush()

    def _write(self, batch: list[Item]) -> None:
        data = b"".join(self._rows(line) if isinstance(line, TracedCall) else _text(line) for line in batch)
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            self._give_up(batch, data, written, error)

    def _give_up(self, batch: list[Item], data: bytes, written: int, error: OSError) -> None:
        self._broken = True
        whole = data.rfind(b"\n", 0, written) + 1
        rows = sum(map(_is_row, batch))
        rows -= sum(line[:1] == b"[" for line in data[:whole].splitlines())
        # A line cut in two is taken back; a device (/dev/full) has no length to cut.
        with suppress(OSError):
            os.ftruncate(self._file, os.lseek(self._file, 0, os.SEEK_CUR) - (written - whole))
        self.dropped += rows + sum(map(_is_row, self._lines))
        sys.stderr.write(
            f"echograph: {self.path}: {error.strerror or error}: collectives are no longer written; "
            "training goes on\n"
        )


def _is_row(line: Item) -> bool:
    return isinstance(line, (tuple, TracedCall))


def spell_row(row: CallRow) -> bytes:
    """A call as a line with its end."""
    return b"[%d,%d,%d,%d,%d,%d]\n" % row


def _text(line: RecordLine | CallRow) -> bytes:
    return spell_row(line) if isinstance(line, tuple) else encode(line)


TAIL_BYTES = 1 << 20


class Watchdog:
    """Looks at the calls of one rank that have not ended.

    Args:
        path: where all ranks write, as it was asked for.
        rank: this rank.
        restart: which start of the job this is.
        timeout_s: seconds after which a call is reported, once.
    """

    def __init__(self, path: Path, rank: int, restart: int, timeout_s: float) -> None:
        self._path = path
        self._rank = rank
        self._restart = restart
        self._timeout_ns = int(timeout_s * 1e9)
        self._reported: set[tuple[str, int]] = set()

    def look(
        self, pending: Iterable[TracedCall], now: int, read_events: Callable[[], None]
    ) -> Iterator[StuckCall]:
        """Reports on stderr, and as lines for the trace, the calls that are late and were not reported yet.

        Args:
            pending: calls that have not ended.
            now: nanoseconds of `perf_counter`.
            read_events: looks whether calls on devices have ended unseen.
        """
        late = [call for call in pending if now - call.queued > self._timeout_ns]
        late = [call for call in late if (call.kind.channel, call.sequence) not in self._reported]
        if late:
            read_events()
        for call in late:
            if call.end < 0:
                self._reported.add((call.kind.channel, call.sequence))
                stuck = self._describe(call, now)
                sys.stderr.write(_spell(self._rank, call, stuck))
                yield stuck

    def _describe(self, call: TracedCall, now: int) -> StuckCall:

        arrived, missing, unheard = [], [], []
        for rank in call.group.ranks:
            if rank == self._rank:
                arrived.append(rank)
                continue
            if call.kind.peer >= 0 and rank != call.kind.peer:
                continue
            issued = last_heartbeat(file_of(self._path, rank, self._restart))
            if issued is None:
                unheard.append(rank)
            elif issued.get(call.kind.channel, 0) > call.sequence:
                arrived.append(rank)
            else:
                missing.append(rank)
        return StuckCall(
            op=call.kind.op,
            channel=call.kind.channel,
            sequence=call.sequence,
            seconds=round((now - call.queued) / 1e9, 1),
            arrived=tuple(arrived),
            missing=tuple(missing),
            unheard=tuple(unheard),
            site=call.kind.site,
        )


def last_heartbeat(path: Path) -> dict[str, int] | None:
    """Calls that a rank has issued, by channel, as its file last says; None where it does not."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, 2) - TAIL_BYTES))
            lines = stream.read().split(b"\n")
    except OSError:
        return None
    for line in reversed(lines[:-1]):
        if line.startswith(b"{"):
            try:
                found = DECODER.decode(line)
            except UNREADABLE:
                continue
            if isinstance(found, Heartbeat):
                return found.issued
    return None


def _spell(rank: int, call: TracedCall, stuck: StuckCall) -> str:
    where = f", {stuck.site}" if stuck.site else ""
    who = [f"arrived: {_ranks(stuck.arrived)}"]
    who += [f"not arrived: {_ranks(stuck.missing)}"] if stuck.missing else []
    who += [f"their files are not here: {_ranks(stuck.unheard)}"] if stuck.unheard else []
    return (
        f"echograph: rank {rank}: {stuck.op} {stuck.sequence} of {stuck.channel} ({call.kind.bytes} bytes{where}) "
        f"has not ended after {stuck.seconds:g} s; {'; '.join(who)}\n"
    )


def _ranks(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    return shown + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")


MAX_KINDS = 1 << 16
RANK = "{rank}"
MAX_CHANNELS = 512
OPEN_AFTER_NS = 10**9
HEARTBEAT_NS = 10**9

_lock = threading.Lock()
_capture: Any = None
_tracers: list[Tracer] = []


def trace_collectives(
    path: str | os.PathLike[str] = "trace.jsonl", *, timeout_s: float = 480.0, enabled: bool = True
) -> Tracer:
    """Traces every collective of this process from now on, until `stop()` or the end of the process.

    May be called before or after PyTorch is imported, groups are made or models are wrapped; the training code
    stays as it is. Each rank writes a file of its own, `trace.<rank>.jsonl` for `trace.jsonl`, made at its first
    collective; `echoprof comms report` reads them.

    Args:
        path: file; the rank is put before its ending, or where `{rank}` stands.
        timeout_s: seconds after which a collective that has not ended is reported on stderr and in the file.
        enabled: False does nothing at all, so that a script can leave the line where it is.

    Raises:
        MissingExtraError: PyTorch is not installed, or has no torch.distributed.
        UsageError: another tracer of this process writes to this path, or the timeout is not above 0.
        OutputError: the folder cannot be written to.
    """
    target = Path(path)
    if not timeout_s > 0:
        raise UsageError(f"trace_collectives: timeout_s is {timeout_s:g}: give seconds above 0")
    tracer = Tracer(target, timeout_s)
    if not enabled:
        return tracer
    if any(other.path.absolute() == target.absolute() for other in _tracers):
        raise UsageError(
            f"trace_collectives: {target} is being written by another tracer: stop it, or name another"
        )
    if RANK not in str(target) and not os.access(target.parent, os.W_OK):
        raise OutputError(f"cannot write {target}: no folder {target.parent} that can be written to")
    tracer._begin()
    return tracer


class Tracer:
    """A running trace; made by `trace_collectives`.

    Attributes:
        path: as it was asked for.
        file: this rank's file, None before the first collective.
        calls: calls seen so far.
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        self.path = path
        self.file: Path | None = None
        self.calls = 0
        self._counts: dict[CallKind, int] = {}
        self._counted: Counter[tuple[str, str, int]] = Counter()
        self._kinds: dict[CallKind, int] = {}
        self._next_kind = 0
        self._groups: set[str] = set()
        self._writer: Writer | None = None
        self._running = False
        self._heartbeat_ns = 0
        self._issued: dict[str, int] = {}
        self._opening = threading.Lock()
        self._timeout_s = timeout_s
        self._watchdog: Watchdog | None = None
        self._failed = 0

    def attach(self, model: Any) -> Tracer:
        """Notes the phase and the module of each call from now on, by looking at this model's modules.

        Args:
            model: a `torch.nn.Module`, wrapped or not.
        """
        if self._running:
            _capture.phases.attach(model)
        return self

    def optimizing(self, entered: int) -> None:
        """Says that a step of a framework, around those of PyTorch's optimizers, is entered (1) or left (-1)."""
        if self._running:
            _capture.phases.optimizing += entered

    def counts(self) -> dict[tuple[str, str, int], int]:
        """Calls so far by operation, group and message size in bytes."""
        counts = self._counted.copy()
        for kind, n in list(self._counts.items()):
            counts[kind.op, kind.group, kind.bytes] += n
        return {what: n for what, n in counts.items() if n}

    @property
    def dropped(self) -> int:
        """Calls that could not be written, because the disk was full or too slow."""
        return self._writer.dropped if self._writer is not None else 0

    def stop(self) -> None:
        """Stops tracing and closes the file; twice does nothing. Without other tracers PyTorch is as it was."""
        if not self._running:
            return
        _capture.read_events()
        _capture.settle(0)
        self._running = False
        for call in list(_capture.pending.values()):
            if self in call.listeners and self._writer is not None:
                self._writer.put(call)
        with _lock:
            _tracers.remove(self)
            _capture.remove(self)
        atexit.unregister(self.stop)
        if self._writer is not None:
            self._writer.close(self._last_line)

    def __enter__(self) -> Tracer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def issued(self, call: TracedCall) -> None:
        """Told by the capture."""
        self.calls += 1
        kind, counts = call.kind, self._counts
        counts[kind] = counts.get(kind, 0) + 1
        if len(counts) > MAX_KINDS:
            self._counted = Counter(self.counts())
            counts.clear()
        if self._writer is None:
            self._open()

    def refused(self, call: TracedCall) -> None:
        """Told by the capture."""
        self.calls -= 1
        self._failed += 1
        kind = call.kind
        self._counted[kind.op, kind.group, kind.bytes] -= 1

    def ended(self, call: TracedCall) -> None:
        """Told by the capture."""
        if self._running and self._writer is not None:
            self._writer.put(call)

    def _begin(self) -> None:
        capture = shared_capture()
        with _lock:
            capture.add(self)
            _tracers.append(self)
        self._running = True
        atexit.register(self.stop)

    def _open(self) -> None:
        with self._opening:
            if self._writer is not None:
                return
            import torch
            from torch import distributed

            here = distributed.is_initialized()
            rank = distributed.get_rank() if here else int(os.environ.get("RANK", "0"))
            restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
            self.file = file_of(self.path, rank, restart)
            writer = Writer(self.file, self._tick, self._spell)
            writer.put(
                HeaderLine(
                    format=FORMAT,
                    version=(MAJOR, MINOR),
                    rank=rank,
                    world=distributed.get_world_size() if here else 1,
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    began_ns=time.perf_counter_ns() + WALL_NS,
                    torch=str(torch.__version__),
                    unknown=_capture.unknown,
                )
            )
            self._watchdog = Watchdog(self.path, rank, restart, self._timeout_s)
            self._writer = writer

    def _spell(self, call: TracedCall) -> bytes:
        """The row of a call, behind what it refers to; one thread at a time writes."""
        kind = self._kinds.get(call.kind)
        if kind is not None:
            return spell_row(call.row(kind))
        if len(self._kinds) >= MAX_KINDS:
            self._kinds.clear()
        kind = self._kinds[call.kind] = self._next_kind
        self._next_kind += 1
        return (
            self._group_line(call.group)
            + encode(CallSignature(id=kind, **call.kind.what))
            + spell_row(call.row(kind))
        )

    def _group_line(self, group: TracedGroup) -> bytes:
        if group.name in self._groups:
            return b""
        self._groups.add(group.name)
        line = GroupLine(
            name=group.name,
            ranks=group.ranks,
            torch_name=group.torch_name,
            about=group.about,
            backend=group.backend,
        )
        return encode(line)

    def _tick(self) -> None:
        """What the writer's thread does between two looks."""
        now = time.perf_counter_ns()
        writer = self._writer
        if writer is None or not self._running:
            return
        _capture.settle()
        for call in list(_capture.pending.values()):
            if self in call.listeners and not call.written and now - call.queued > OPEN_AFTER_NS:
                call.written = True
                # As it is now: it may end before the row is spelled, and has another row then.
                still = copy(call)
                if still.end == UNKNOWN:
                    writer.put(still)
        if now - self._heartbeat_ns > HEARTBEAT_NS:
            issued = _capture.groups.issued()
            if issued != self._issued or now - self._heartbeat_ns > 10 * HEARTBEAT_NS:
                self._issued, self._heartbeat_ns = issued, now
                latest = dict(list(issued.items())[-MAX_CHANNELS:])
                writer.put(Heartbeat(at_ns=now + WALL_NS, issued=latest))
        if self._watchdog is not None:
            for stuck in self._watchdog.look(list(_capture.pending.values()), now, _capture.read_events):
                writer.put(stuck)

    def _last_line(self) -> EndLine:
        return EndLine(calls=self.calls, dropped=self.dropped, failed=self._failed, errors=_capture.errors)


def shared_capture() -> Any:
    """The process's one `Capture`.

    Raises:
        MissingExtraError: PyTorch is not installed, or has no torch.distributed.
    """
    global _capture
    try:
        import torch.distributed

        if not torch.distributed.is_available():
            raise ImportError
    except ImportError:
        raise MissingExtraError("PyTorch with torch.distributed", "torch", "tracing collectives") from None
    with _lock:
        if _capture is None:
            from echograph.profiler.comms.capture import Capture

            _capture = Capture()
            os.register_at_fork(after_in_child=_forget)
        return _capture


def file_of(path: Path, rank: int, restart: int = 0) -> Path:
    """Where a rank writes: `trace.3.jsonl` for `trace.jsonl`.

    Args:
        path: as it was asked for; where it says `{rank}`, that is all that the ranks' files differ by.
        rank: global rank.
        restart: how often torchrun has started the job anew; each start has files of its own.
    """
    if RANK in str(path):
        return Path(str(path).replace(RANK, str(rank)))
    again = f".restart{restart}" if restart else ""
    return path.with_name(f"{path.stem}{again}.{rank}{path.suffix or '.jsonl'}")


def files_of(path: Path) -> list[Path]:
    """What is there of all ranks and restarts, by name; `path` as of `file_of`."""
    escaped = Path(glob.escape(str(path.absolute())))
    every = escaped.with_name(f"{escaped.stem}.*{escaped.suffix or '.jsonl'}")
    pattern = Path(str(escaped).replace(RANK, "*")) if RANK in str(path) else every
    return sorted(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor))))


def _forget() -> None:
    """In a forked child: nothing is traced there, and the parent's file is left alone."""
    for tracer in _tracers:
        tracer._running = False
        atexit.unregister(tracer.stop)
        _capture.remove(tracer)
    _tracers.clear()
