"""Puts lines into a file from a thread of its own; never more than a bounded number wait in memory."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from echograph.ir.comms.record import CallRow, RecordLine, encode
from echograph.profiler.comms.call import Call

QUEUE = 1 << 16
INTERVAL_S = 0.2
Item: TypeAlias = RecordLine | CallRow | Call


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
        rows: Callable[[Call], bytes] = lambda call: _text(call.row(0)),
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
        data = b"".join(self._rows(line) if isinstance(line, Call) else _text(line) for line in batch)
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
    return isinstance(line, (tuple, Call))


def spell_row(row: CallRow) -> bytes:
    """A call as a line with its end."""
    return b"[%d,%d,%d,%d,%d,%d]\n" % row


def _text(line: RecordLine | CallRow) -> bytes:
    return spell_row(line) if isinstance(line, tuple) else encode(line)
