"""Progress on stderr: a line that counts on a terminal, else one line a stage, once a command takes long."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from echograph.progress import Progress

QUIET_S = 2.0
"""A command that writes to a file or a pipe says nothing of its stages for so long."""


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
        task = bar.add_task(_plain(text), total=None, count="")

        def say(stage: str, done: int = 0, total: int = 0) -> None:
            bar.update(task, description=_plain(stage), count=_count(done, total))

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
    from echograph.cli.app import print_error

    print_error(f"{_plain(line)} ...")
    sys.stderr.flush()


def _plain(text: str) -> str:
    return " ".join(text.split())


def _count(done: int, total: int) -> str:
    if total:
        return f"{done:,} of {total:,}"
    return f"{done:,}" if done else ""
