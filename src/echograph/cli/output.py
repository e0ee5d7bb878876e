"""What commands show and write: results on stdout, all else on stderr, files whole or not at all."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echograph.errors import OutputError, UsageError
from echograph.ir.tables import printable, text_table
from echograph.progress import Progress
from echograph.units import format_bytes

if TYPE_CHECKING:
    from echograph.ir.graph import Graph, JobGraph, StepGraph
    from echograph.profiler.analyses.table import AnswerTable
    from echograph.simulator.result import Result

MOST_OF_ERROR = 500
PAGE = "page: open it in a browser"
QUIET_S = 2.0
"""A command that writes to a file or a pipe says nothing of its stages for so long."""
_CUT = " ... "


def shortened(line: str, most: int = MOST_OF_ERROR) -> str:
    """A line, cut in the middle where it is longer: what happened stands first, what to do last."""
    if len(line) <= most:
        return line
    last = most // 2
    return f"{line[: most - last - len(_CUT)]}{_CUT}{line[-last:]}"


def print_line(text: str = "", *, alarm: bool = False) -> None:
    """A line of the result.

    Args:
        text: the line, as it comes.
        alarm: whether nobody may miss it: bold and red where a terminal shows it.

    Raises:
        OutputError: the caller closed the standard output.
    """
    if sys.stdout is None:
        raise OutputError("cannot write the result: the standard output is closed")
    line = printable(text)
    if alarm and sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        line = f"\x1b[1;31m{line}\x1b[0m"
    sys.stdout.write(line + "\n")


def print_text(text: str) -> None:
    """Lines of the result that are one text already."""
    for line in text.removesuffix("\n").split("\n"):
        print_line(line)


def print_json(value: Any) -> None:
    """A result for programs."""
    print_text(json.dumps(value, indent=2, allow_nan=False))


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Aligned columns, numbers to the right."""
    print_text(text_table(titles, rows))


def print_tables(tables: Mapping[str, AnswerTable], **shown: Any) -> None:
    """Tables one below the other, under their names where there are several; `shown`: of `AnswerTable.text`."""
    texts = ([f"{name}\n"] * (len(tables) > 1) + [table.text(**shown)] for name, table in tables.items())
    print_text("\n\n".join("".join(text) for text in texts))


def print_error(text: str) -> None:
    """A line beside the result: progress, notes, errors."""
    if sys.stderr is not None:
        sys.stderr.write(printable(text) + "\n")


def print_notes(notes: Iterable[str]) -> None:
    """What a result leaves out or takes for something, a line each, beside it."""
    for note in notes:
        print_error(f"note: {note}")


def print_warnings(warnings: Iterable[str]) -> None:
    """What is unlikely to be meant, a line each, beside a result."""
    for warning in warnings:
        print_error(f"warning: {warning}")


def check_outputs(inputs: Mapping[str, Path], outputs: Mapping[str, Path | None]) -> None:
    """Refuses files that cannot be written before any work is done, and two that are one.

    Args:
        inputs: what is read, by what it is called.
        outputs: what is written, by option; None where it was not asked for.

    Raises:
        UsageError: an output is an input, or another output.
        OutputError: one cannot be written.
    """
    from echograph.ir import files

    seen = {path.resolve(): name for name, path in inputs.items()}
    for option, path in outputs.items():
        if path is None:
            continue
        if (other := seen.get(path.resolve())) is not None:
            what = f"is {other} itself" if other in inputs else f"is what {other} writes"
            raise UsageError(f"{option} {path}: {what}: give it a file of its own")
        seen[path.resolve()] = option
        files.check_writable(path)


def write_text(path: Path | None, text: str, what: str) -> None:
    """Writes a file whole, where it was asked for, and says so."""
    from echograph.ir import files

    if path is not None:
        files.write_whole(path, [text])
        print_error(f"wrote {path} ({what})")


def write_json(path: Path | None, record: Any, what: str) -> None:
    """Writes a record as JSON, where it was asked for, and says so."""
    if path is not None:
        write_text(path, json.dumps(record, indent=2) + "\n", what)


def write_trace(path: Path | None, result: Result, ranks: Sequence[int] = ()) -> None:
    """Writes what ran when as a Chrome trace, where it was asked for, and says so."""
    if path is not None:
        assert result.job is not None
        from echograph.ir import files
        from echograph.ir.exporters.chrome import chrome_trace

        files.write_whole(path, chrome_trace(result.job, result.traced or result.timeline, ranks=tuple(ranks)))
        print_error(f"wrote {path} (Chrome trace: open in ui.perfetto.dev)")


@contextmanager
def reading(path: Path) -> Iterator[tuple[StepGraph | JobGraph, Progress]]:
    """Shows the progress of work on a graph; yields the graph of a file, and the progress callback."""
    from echograph.ir import serde

    with show_progress(f"reading {path}") as progress:
        yield serde.load(path, progress), progress


def save_graph(graph: Graph, path: Path, progress: Progress) -> dict[str, Any]:
    """Writes a graph; what its record for programs begins with."""
    from echograph.ir import serde

    progress(f"writing {path}")
    return {"output": str(path), "bytes": serde.save(graph, path, progress)}


def print_written(record: Mapping[str, Any]) -> None:
    """Says which file was written, by `save_graph`, and how large it is."""
    print_error(f"wrote {record['output']} ({format_bytes(record['bytes'])})")


@contextmanager
def show_progress(text: str) -> Iterator[Progress]:
    """Shows what is going on until the work ends; yields the progress callback.

    On a terminal it is one line with a count and the time, which goes away at the end. Elsewhere every stage that
    begins, or still runs, after `QUIET_S` gets a line, so that quick commands and their errors stay alone.

    Args:
        text: the first stage.
    """
    with _on_terminal(text) if sys.stderr is not None and sys.stderr.isatty() else _as_lines(text) as progress:
        yield progress


@contextmanager
def _on_terminal(text: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TextColumn("{task.fields[count]}", markup=False),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(_one_line(text), total=None, count="")

        def progress(stage: str, done: int = 0, total: int = 0) -> None:
            count = f"{done:,} of {total:,}" if total else f"{done:,}" if done else ""
            bar.update(task, description=_one_line(stage), count=count)

        yield progress


@contextmanager
def _as_lines(text: str) -> Iterator[Progress]:
    from threading import Lock, Timer

    begun, lock = time.monotonic(), Lock()
    current, said = text, ""

    def show() -> None:
        nonlocal said
        with lock:
            if current and current != said:
                said = current
                _write(said)

    def progress(stage: str, done: int = 0, total: int = 0) -> None:
        nonlocal current
        current = stage
        if stage != said and time.monotonic() - begun >= QUIET_S:
            show()

    timer = Timer(QUIET_S, show)
    timer.daemon = True
    timer.start()
    try:
        yield progress
    finally:
        with lock:
            current = ""  # nothing comes after what the command itself says
        timer.cancel()


def _write(line: str) -> None:
    print_error(f"{_one_line(line)} ...")
    sys.stderr.flush()


def _one_line(text: str) -> str:
    return " ".join(text.split())
