"""Writes the calls as a Chrome trace, as they are read: one process a rank, one thread a group."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import TracebackType

from echograph.ir.files import check_writable, write_whole
from echograph.profiler.comms.merge import Batch, Merge
from echograph.profiler.comms.report import wait_and_transfer


class ChromeTrace:
    """A sink for `report_on`; opens in Perfetto. Times are microseconds from the first call that was read.

    The file is there when all calls are in it.

    Args:
        path: file.
    """

    def __init__(self, path: Path) -> None:
        check_writable(path)
        self._path = path
        # What a report reads may be larger than memory, so that its trace waits on disk.
        self._stream = tempfile.TemporaryFile("w+", encoding="utf-8", dir=path.parent)  # noqa: SIM115
        self._stream.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        self._first: int | None = None
        self._comma = ""
        self._threads: dict[tuple[int, str], int] = {}

    def __call__(self, batch: Batch, merge: Merge) -> None:
        """Adds the calls whose time is known."""
        wait, transfer = wait_and_transfer(batch)
        for row in range(len(batch.kind)):
            source = merge.sources[batch.source[row]]
            if batch.duration[row] < 0 or not source.timed:
                continue
            start = int(batch.start[row])
            self._first = start if self._first is None else self._first
            what = merge.whats[batch.kind[row]]
            event = {
                "name": what.op,
                "ph": "X",
                "ts": (start - self._first) / 1e3,
                "dur": int(batch.duration[row]) / 1e3,
                "pid": source.rank,
                "tid": self._thread(source.rank, what.group),
                "args": {
                    "channel": what.channel,
                    "sequence": int(batch.sequence[row]),
                    "bytes": what.bytes,
                    "shapes": what.shapes,
                    "dtype": what.dtype,
                    "site": what.site,
                    "phase": what.phase,
                    "module": what.module,
                    **(
                        {"wait_us": wait[row] / 1e3, "transfer_us": transfer[row] / 1e3}
                        if batch.whole[row]
                        else {}
                    ),
                },
            }
            self._write(event)

    def _thread(self, rank: int, group: str) -> int:
        thread = self._threads.get((rank, group))
        if thread is None:
            thread = self._threads[rank, group] = len(self._threads)
            name = {"name": f"group {group}"}
            self._write({"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": name})
        return thread

    def _write(self, event: dict[str, object]) -> None:
        self._stream.write(self._comma + json.dumps(event))
        self._comma = ",\n"

    def __enter__(self) -> ChromeTrace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stream:
            self._stream.write("\n]}\n")
            if error is None:
                self._stream.seek(0)
                write_whole(self._path, iter(lambda: self._stream.read(1 << 20), ""))
