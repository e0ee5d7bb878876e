"""What commands show and write: results on stdout, all else on stderr, files whole or not at all."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echograph.errors import OutputError, UsageError
from echograph.progress import Progress
from echograph.units import format_bytes

if TYPE_CHECKING:
    from echograph.ir.graph import Graph, JobGraph, StepGraph
    from echograph.profiler.analyses.table import AnswerTable
    from echograph.simulator.result import Result

MOST_OF_ERROR = 500
WIDEST = 72
QUIET_S = 2.0
"""A command that writes to a file or a pipe says nothing of its stages for so long."""
_CUT = " ... "
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Text as a terminal may show it: what would control the terminal or turn the line around is spelt out.

    These are the control characters (C0, DEL, C1), the ends of lines and paragraphs, the marks of bidirectional
    text, and what no encoding has. They are spelt as JSON spells them, so what programs read stays what it was.
    """
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


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
    """Aligned columns, numbers to the right; as wide as they need to be, so that other programs can cut them."""
    cells = [list(map(printable, titles)), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(titles))]
    right = [all(line[i][:1].isdigit() or line[i] == "-" for line in cells[1:]) for i in range(len(titles))]
    for line in cells:
        aligned = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True))
        print_line("  ".join(aligned).rstrip())


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else printable(str(value))


def print_tables(tables: Mapping[str, AnswerTable], number: Callable[[float], object]) -> None:
    """Tables one below the other, under their names where there are several.

    Args:
        tables: of the library, by name.
        number: how a number is shown.
    """
    for place, (name, table) in enumerate(tables.items()):
        if len(tables) > 1:
            print_text(f"\n{name}" if place else name)
        rows = ([_short(value, number) for value in row] for row in table.rows())
        print_table(list(table.columns), rows)


def _short(value: object, number: Callable[[float], object]) -> object:
    """A cell that fits: names of kernels are templates of hundreds of characters."""
    if isinstance(value, str) and len(value) > WIDEST:
        return value[: WIDEST - 3] + "..."
    return number(value) if isinstance(value, float) else value


def print_error(text: str) -> None:
    """A line beside the result: progress, notes, errors."""
    if sys.stderr is not None:
        sys.stderr.write(printable(text) + "\n")


def print_notes(notes: Iterable[str]) -> None:
    """What a result leaves out or takes for something, a line each, beside it."""
    for note in notes:
        print_error(f"note: {note}")


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
    """Shows the progress of work on a graph; yields the graph of a file, and what is to be told of the work."""
    from echograph.ir import serde

    with progress(f"reading {path}") as say:
        yield serde.load(path, say), say


def save_graph(graph: Graph, path: Path, say: Progress) -> dict[str, Any]:
    """Writes a graph; what its record for programs begins with."""
    from echograph.ir import serde

    say(f"writing {path}")
    return {"output": str(path), "bytes": serde.save(graph, path, say)}


def print_written(record: Mapping[str, Any]) -> None:
    """Says which file was written, by `save_graph`, and how large it is."""
    print_error(f"wrote {record['output']} ({format_bytes(record['bytes'])})")


@contextmanager
def progress(text: str) -> Iterator[Progress]:
    """Shows what is going on until the work ends; yields what is to be told of it.

    On a terminal it is one line with a count and the time, which goes away at the end. Elsewhere every stage that
    begins, or still runs, after `QUIET_S` gets a line, so that quick commands and their errors stay alone.

    Args:
        text: the first stage.
    """
    with _on_terminal(text) if sys.stderr is not None and sys.stderr.isatty() else _as_lines(text) as say:
        yield say


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

        def say(stage: str, done: int = 0, total: int = 0) -> None:
            count = f"{done:,} of {total:,}" if total else f"{done:,}" if done else ""
            bar.update(task, description=_one_line(stage), count=count)

        yield say


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

    def say(stage: str, done: int = 0, total: int = 0) -> None:
        nonlocal current
        current = stage
        if stage != said and time.monotonic() - begun >= QUIET_S:
            show()

    timer = Timer(QUIET_S, show)
    timer.daemon = True
    timer.start()
    try:
        yield say
    finally:
        with lock:
            current = ""  # nothing comes after what the command itself says
        timer.cancel()


def _write(line: str) -> None:
    print_error(f"{_one_line(line)} ...")
    sys.stderr.flush()


def _one_line(text: str) -> str:
    return " ".join(text.split())
