"""A report as one HTML page, and its calls as a Chrome trace; neither loads anything from anywhere."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from types import TracebackType
from typing import Any

from echograph.ir.files import check_writable, write_whole
from echograph.profiler.comms.report import Batch, Merge, Report, wait_and_transfer
from echograph.profiler.page.frame import document, key, notes
from echograph.units import PS_PER_S, format_bytes, format_time


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
            what = merge.signatures[batch.kind[row]]
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


def collectives_page(report: Report, title: str) -> str:
    """The report as HTML.

    Args:
        report: what to show.
        title: of the page.
    """
    ranks = len({rank["rank"] for rank in report.ranks})
    many = "" if len(report.groups) == 1 else "s"
    parts = [
        f"<h1>{escape(title)}</h1><p>{report.calls:,} calls on {ranks} ranks, {len(report.groups)} group{many}."
        "</p>",
        notes(report.troubles()),
        '<p class="note">Time of all ranks together:</p>',
        key(["waiting for the last rank", "transfer", "not told apart"], list(_COLOURS.values())),
    ]
    operations = sorted(report.operations, key=lambda row: -row["total_s"])
    rates = ("algbw_GBps", "busbw_GBps")
    parts.append(_table("Operations", operations, ("operation", "shape", "dtype", "bytes"), rates))
    parts.append(_table("Groups", report.groups, ("name",), ()))
    parts.append(_table("Phases", report.phases, ("name",), ()))
    parts.append(_table("Ranks", report.ranks, ("rank",), ("times_last", "lateness_s")))
    return document(title, parts)


# Of the page's style.
_COLOURS = {"wait": 1, "transfer": 0, "rest": 8}
_TITLES = {
    "name": "name",
    "bytes": "size",
    "times_last": "times last",
    "lateness_s": "late by",
    "algbw_GBps": "algbw GB/s",
    "busbw_GBps": "busbw GB/s",
}


def _table(title: str, rows: Sequence[Mapping[str, Any]], first: Sequence[str], after: Sequence[str]) -> str:
    if not rows:
        return ""
    longest = max(row["total_s"] for row in rows) or 1.0
    heads = [*first, "calls", "total", "average", "", "exposed", "hidden", *after]
    lines = ["".join(f"<th>{escape(_TITLES.get(head, head))}</th>" for head in heads)]
    for row in rows:
        cells = [_cell(name, row[name]) for name in first]
        cells += [f"{row['calls']:,}", _time(row["total_s"]), _time(row["mean_s"]), _bar(row, longest)]
        known = row["exposed_s"] + row["hidden_s"] > 0
        cells += [_time(row[name]) if known else "–" for name in ("exposed_s", "hidden_s")]
        cells += [_cell(name, row[name]) for name in after]
        lines.append("".join(f"<td>{cell}</td>" for cell in cells))
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<h2>{escape(title)}</h2><div class="scroll"><table>{body}</table></div>'


def _bar(row: Mapping[str, Any], longest: float) -> str:
    rest = max(0.0, row["total_s"] - row["wait_s"] - row["transfer_s"])
    shares = (("wait", row["wait_s"]), ("transfer", row["transfer_s"]), ("rest", rest))
    told = ", ".join(f"{name} {_time(value)}" for name, value in shares)
    inside = "".join(
        f'<div class="b{_COLOURS[name]}" style="width:{100 * v / longest:.2f}%"></div>' for name, v in shares
    )
    return f'<div class="bar" title="{told}">{inside}</div>'


def _cell(name: str, value: Any) -> str:
    if name == "bytes":
        return format_bytes(value)
    if name.endswith("_s"):
        return _time(value)
    return f"{value:.3g}" if isinstance(value, float) else escape(str(value))


def _time(seconds: float) -> str:
    return format_time(seconds * PS_PER_S)
