"""`trace_collectives`: one line in a training script, one file a rank."""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections import Counter
from copy import copy
from pathlib import Path
from types import TracebackType
from typing import Any

from echograph.errors import MissingExtraError, OutputError, UsageError
from echograph.ir.comms.record import (
    FORMAT,
    MAJOR,
    MINOR,
    UNKNOWN,
    Beat,
    EndLine,
    GroupLine,
    HeaderLine,
    What,
    encode,
)
from echograph.profiler.comms.call import WALL_NS, Call, Kind
from echograph.profiler.comms.groups import Group
from echograph.profiler.comms.watchdog import Watchdog
from echograph.profiler.comms.writer import Writer, spell_row

MAX_KINDS = 1 << 16
RANK = "{rank}"
MAX_CHANNELS = 512
OPEN_AFTER_NS = 10**9
BEAT_NS = 10**9

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
        self._counts: dict[Kind, int] = {}
        self._counted: Counter[tuple[str, str, int]] = Counter()
        self._kinds: dict[Kind, int] = {}
        self._next_kind = 0
        self._groups: set[str] = set()
        self._writer: Writer | None = None
        self._running = False
        self._beat_ns = 0
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

    def issued(self, call: Call) -> None:
        """Told by the capture."""
        self.calls += 1
        kind, counts = call.kind, self._counts
        counts[kind] = counts.get(kind, 0) + 1
        if len(counts) > MAX_KINDS:
            self._counted = Counter(self.counts())
            counts.clear()
        if self._writer is None:
            self._open()

    def refused(self, call: Call) -> None:
        """Told by the capture."""
        self.calls -= 1
        self._failed += 1
        kind = call.kind
        self._counted[kind.op, kind.group, kind.bytes] -= 1

    def ended(self, call: Call) -> None:
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

    def _spell(self, call: Call) -> bytes:
        """The row of a call, behind what it refers to; one thread at a time writes."""
        kind = self._kinds.get(call.kind)
        if kind is not None:
            return spell_row(call.row(kind))
        if len(self._kinds) >= MAX_KINDS:
            self._kinds.clear()
        kind = self._kinds[call.kind] = self._next_kind
        self._next_kind += 1
        return self._group_line(call.group) + encode(What(id=kind, **call.kind.what)) + spell_row(call.row(kind))

    def _group_line(self, group: Group) -> bytes:
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
        if now - self._beat_ns > BEAT_NS:
            issued = _capture.groups.issued()
            if issued != self._issued or now - self._beat_ns > 10 * BEAT_NS:
                self._issued, self._beat_ns = issued, now
                latest = dict(list(issued.items())[-MAX_CHANNELS:])
                writer.put(Beat(at_ns=now + WALL_NS, issued=latest))
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


def _forget() -> None:
    """In a forked child: nothing is traced there, and the parent's file is left alone."""
    for tracer in _tracers:
        tracer._running = False
        atexit.unregister(tracer.stop)
        _capture.remove(tracer)
    _tracers.clear()
