"""What all commands share: one line for an error, results on stdout, everything else on stderr."""

from __future__ import annotations

import errno
import gc
import importlib.util
import io
import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import typer

from echograph import __version__
from echograph.cli.plain import read_plainly
from echograph.cli.progress import progress
from echograph.errors import EchoError, MissingExtraError, OutputError

__all__ = [
    "EXIT_INTERRUPTED",
    "make_app",
    "print_error",
    "print_json",
    "print_line",
    "print_table",
    "print_text",
    "printable",
    "progress",
    "require_torch",
    "run",
    "shortened",
]

EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 143
MOST_OF_ERROR = 500
_CUT = " ... "
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def make_app(name: str, summary: str) -> typer.Typer:
    """A command with the options that every command has."""
    app = typer.Typer(
        name=name, help=summary, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
    )

    @app.callback()
    def options(
        debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
        version: bool = typer.Option(
            False, "--version", help="Print the version and exit.", is_eager=True, callback=_print_version
        ),
    ) -> None:
        if debug:
            os.environ["ECHOGRAPH_DEBUG"] = "1"

    return app


def _print_version(asked: bool) -> None:
    if asked:
        print_line(__version__)
        raise typer.Exit


def run(app: typer.Typer, name: str) -> None:
    """Runs a command line: exit 0, 1 for an error, 2 for wrong usage; never a traceback without --debug."""
    # What a command builds lives until it ends: the usual thresholds make it look for garbage in vain.
    gc.set_threshold(100_000, 50, 50)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What the terminal's encoding lacks is spelt out, too.
            with suppress(OSError):
                stream.reconfigure(errors="backslashreplace")
    try:
        with _terminable():
            status = _command_of(app)(prog_name=name, standalone_mode=False)
            if status == EXIT_INTERRUPTED:
                raise KeyboardInterrupt  # of which Typer made this status
            if sys.stdout is not None:
                sys.stdout.flush()
    except BaseException as error:
        if os.environ.get("ECHOGRAPH_DEBUG") and not isinstance(error, SystemExit):
            for line in traceback.format_exc().splitlines():
                print_error(line)
        status = _report(name, error)
    sys.exit(status if isinstance(status, int) else 0)


@cache
def _command_of(app: typer.Typer) -> Callable[..., object]:
    """The commands and options of an app: looking through all of their annotations takes a while."""
    command = typer.main.get_command(app)
    read_plainly(command)
    return command


class _Terminated(BaseException):
    """Another process asked this one to end."""


@contextmanager
def _terminable() -> Iterator[None]:
    """In the context, SIGTERM unwinds as an interrupt does: nothing half-made and no process stays behind."""

    def terminate(*_: object) -> None:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _report(name: str, error: BaseException) -> int:
    if isinstance(error, EchoError):
        return _say(name, str(error), error.exit_code)
    # Typer makes a SystemExit of a pipe that breaks while the command runs.
    if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
        _drop_output()
        return 0
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return _say(name, "interrupted", EXIT_INTERRUPTED)
    if isinstance(error, _Terminated):
        return _say(name, "terminated", EXIT_TERMINATED)
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if type(error).__name__ == "NoArgsIsHelpError":
        for line in error.ctx.get_help().splitlines():  # type: ignore[attr-defined]
            print_error(line)
        return 2
    message = getattr(error, "format_message", None)
    if callable(message):
        return _say(name, f"{message()} (see {name} --help)", 2)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        _drop_output()
        return _say(name, "cannot write the result: no space left", 1)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return _say(name, f"{error.filename}: {error.strerror}", 1)
    if isinstance(error, MemoryError):
        return _say(name, "out of memory: the input is too large for this machine", 1)
    line = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return _say(name, f"internal error, please report it ({line}); --debug shows the traceback", 1)


def _drop_output() -> None:
    """The reader has gone, or the disk is full: what is left in the buffer must not fail once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(name: str, message: str, status: int) -> int:
    # One line, whatever an error's text holds.
    print_error(shortened(printable(f"{name}: {' '.join(message.split())}")))
    return status


def require_torch(purpose: str = "compiling models") -> None:
    """Says which extra is missing before anything else is done.

    Raises:
        MissingExtraError: PyTorch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("PyTorch", "torch", purpose)


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


def print_error(text: str) -> None:
    """A line beside the result: progress, notes, errors."""
    if sys.stderr is not None:
        sys.stderr.write(printable(text) + "\n")


def print_json(value: Any) -> None:
    """A result for programs."""
    print_text(json.dumps(value, indent=2, allow_nan=False))
