"""What all commands share: one line for an error, results on stdout, everything else on stderr."""

from __future__ import annotations

import errno
import gc
import importlib.util
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from echograph import __version__
from echograph.cli.plain import read_plainly
from echograph.errors import EchoError, MissingExtraError

EXIT_INTERRUPTED = 130
MAX_LINE = 500
# What a terminal obeys rather than shows, and halves of characters, which no encoding has.
_UNSHOWN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


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
    try:
        command = typer.main.get_command(app)
        read_plainly(command)
        status = command(prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except BaseException as error:
        if os.environ.get("ECHOGRAPH_DEBUG") and not isinstance(error, SystemExit):
            traceback.print_exc()
        status = _report(name, error)
    sys.exit(status if isinstance(status, int) else 0)


def _report(name: str, error: BaseException) -> int:
    if isinstance(error, EchoError):
        return _say(name, str(error), error.exit_code)
    # Typer makes a SystemExit of a pipe that breaks while the command runs.
    if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
        # The reader has gone: nothing more to say, and nothing to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return _say(name, "interrupted", EXIT_INTERRUPTED)
    if type(error).__name__ == "NoArgsIsHelpError":
        print_error(error.ctx.get_help())  # type: ignore[attr-defined]
        return 2
    message = getattr(error, "format_message", None)
    if callable(message):
        return _say(name, f"{message()} (see {name} --help)", 2)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return _say(name, "cannot write the result: no space left", 1)
    if isinstance(error, MemoryError):
        return _say(name, "out of memory: the input is too large for this machine", 1)
    line = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return _say(name, f"internal error, please report it ({line}); --debug shows the traceback", 1)


def _say(name: str, message: str, status: int) -> int:
    # One line that can be read, whatever an error's text holds: what and where stand first, what to do last.
    line = f"{name}: {' '.join(message.split())}"
    if len(line) > MAX_LINE:
        line = f"{line[: MAX_LINE - 160]} ... {line[-150:]}"
    print_error(line)
    return status


def require_torch(purpose: str = "compiling models") -> None:
    """Says which extra is missing before anything else is done.

    Raises:
        MissingExtraError: PyTorch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("PyTorch", "torch", purpose)


def print_line(text: str = "") -> None:
    """A line of the result."""
    sys.stdout.write(shown(text) + "\n")


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Aligned columns, numbers to the right; as wide as they need to be, so that other programs can cut them."""
    cells = [list(titles), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(titles))]
    right = [all(line[i][:1].isdigit() or line[i] == "-" for line in cells[1:]) for i in range(len(titles))]
    for line in cells:
        aligned = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True))
        print_line("  ".join(aligned).rstrip())


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


def print_error(text: str) -> None:
    """A line beside the result: progress, notes, errors."""
    sys.stderr.write(shown(text) + "\n")


def shown(text: str) -> str:
    """A text as a terminal can show it: control characters stand as their numbers.

    Args:
        text: lines, with names that files gave.
    """
    return _UNSHOWN.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def print_json(value: Any) -> None:
    """A result for programs."""
    print_line(json.dumps(value, indent=2, allow_nan=False))


@contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """Shows what is going on while stderr is a terminal; yields a function that changes the text."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status(escape(shown(text))) as status:
        yield lambda new: status.update(escape(shown(new)))
