"""How a command starts and ends: options of every command, values read soon, one line for an error."""

from __future__ import annotations

import atexit
import errno
import importlib.util
import io
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

import typer

from echograph import __version__
from echograph.cli.output import print_error, print_line, shortened
from echograph.errors import EchoError, MissingExtraError
from echograph.ir.tables import printable

EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 143


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


def require_torch(purpose: str = "compiling models") -> None:
    """Says which extra is missing before anything else is done.

    Raises:
        MissingExtraError: PyTorch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("PyTorch", "torch", purpose)


def run(app: typer.Typer, name: str) -> None:
    """Runs a command line: exit 0, 1 for an error, 2 for wrong usage; never a traceback without --debug."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What the terminal's encoding lacks is spelt out, too.
            with suppress(OSError):
                stream.reconfigure(errors="backslashreplace")
    try:
        with _terminable():
            status = _command_of(app, *sys.argv[1:2])(prog_name=name, standalone_mode=False)
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


def end_with(app: typer.Typer, name: str) -> NoReturn:
    """Runs a command line that is all of its process, and ends that as the interpreter would, but for one thing.

    It would take everything that was imported apart again, object by object: a quarter of what PyTorch takes.
    """
    status: object = 0
    try:
        run(app, name)
    except SystemExit as ended:
        status = ended.code
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
    os._exit(status if isinstance(status, int) else 0)


@cache
def _command_of(app: typer.Typer, word: str = "") -> Callable[..., object]:
    """The commands and options of an app: looking through all of their annotations takes a while.

    Args:
        app: the app.
        word: the first of the command line; where it names a command, that one alone is made.
    """
    command = typer.main.get_command(_asked(app, word))
    read_plainly(command)
    return command


def _asked(app: typer.Typer, word: str) -> typer.Typer:
    named = [its for its in app.registered_commands if (its.name or _name_of(its.callback)) == word != ""]
    if not named:
        return app
    alone = copy(app)
    alone.registered_commands, alone.registered_groups = named, []
    return alone


def _name_of(function: Callable[..., Any] | None) -> str:
    return "" if function is None else function.__name__.lower().replace("_", "-")


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
    """Says what went wrong in one line; the exit status."""
    # Typer makes a SystemExit of a pipe that breaks while the command runs.
    broken = isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError)
    if broken and not isinstance(error, EchoError):
        _drop_output()
        return 0
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if type(error).__name__ == "NoArgsIsHelpError":
        for line in error.ctx.get_help().splitlines():  # type: ignore[attr-defined]
            print_error(line)
        return 2
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        _drop_output()
    message, status = _said(name, error)
    # One line, whatever an error's text holds.
    print_error(shortened(printable(f"{name}: {' '.join(message.split())}")))
    return status


def _said(name: str, error: BaseException) -> tuple[str, int]:
    """What is said of an error, and the exit status."""
    if isinstance(error, EchoError):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return "interrupted", EXIT_INTERRUPTED
    if isinstance(error, _Terminated):
        return "terminated", EXIT_TERMINATED
    if callable(message := getattr(error, "format_message", None)):
        said = str(message()).rstrip(".")
        if getattr(getattr(error, "ctx", None), "info_name", "") == "capture" and hasattr(error, "possibilities"):
            return f"{said}: a script's own options stand behind -- (see {name} capture --help)", 2
        return f"{message()} (see {name} --help)", 2
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "cannot write the result: no space left", 1
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}", 1
    if isinstance(error, MemoryError):
        return "out of memory: the input is too large for this machine", 1
    line = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return f"internal error, please report it ({line}); --debug shows the traceback", 1


def _drop_output() -> None:
    """The reader has gone, or the disk is full: what is left in the buffer must not fail once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# -- plain values ------------------------------------------------------------------------------------------------
# Typer checks every option by a library that takes longer to load than some predictions take, also those that
# were not given. Whole numbers, decimal numbers, texts and paths are read here; what is not plainly one, and what
# is out of range, is left to Typer, which knows how to say so.

_LIMITS = ("clamp", "parser", "click_type", "path_type", "formats", "exists", "resolve_path", "writable")


def read_plainly(command: Any) -> None:
    """Makes a command, and those under it, read plain values without that library.

    Args:
        command: made by typer; one whose parameters keep no such reader stays as it is.
    """
    for parameter in command.get_params(typer.Context(command)):
        if not hasattr(parameter, "_runtime_param") or not hasattr(parameter, "get_runtime_param"):
            continue
        about = parameter.type_descriptor
        low, high, *limits = (getattr(about.parameter_info, name, None) for name in ("min", "max", *_LIMITS))
        limited = any(limit is not None and limit is not False for limit in limits)
        parameter._runtime_param = _Plain(parameter, None if limited else about.annotation, low, high)
    for under in getattr(command, "commands", {}).values():
        read_plainly(under)


class _Plain:
    """Reads the value of one parameter."""

    def __init__(self, parameter: Any, kind: Any, low: float | None, high: float | None) -> None:
        self.parameter, self.kind, self.low, self.high = parameter, kind, low, high

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """The value, as typer calls it."""
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        if type(value) is self.kind and self._within(value):
            return value
        if isinstance(value, tuple | list) and get_origin(self.kind) is list and self._within(value):
            each = _READERS.get(get_args(self.kind)[0])
            several = [each(text) if each and isinstance(text, str) else None for text in value]
            if None not in several:
                return several
        read = _READERS.get(self.kind)
        found = read(value) if read is not None and isinstance(value, str) else None
        if found is not None and self._within(found):
            return found
        self.parameter._runtime_param = None
        return self.parameter.get_runtime_param().coerce(value, param=param, ctx=ctx)

    def _within(self, value: Any) -> bool:
        """Whether a value keeps to the bounds of its parameter, where that has any."""
        if self.low is None and self.high is None:
            return True
        return self.kind in (int, float) and (
            (self.low is None or value >= self.low) and (self.high is None or value <= self.high)
        )


def _int(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None


def _float(text: str) -> float | None:
    return float(text) if re.fullmatch(r"-?[0-9]{1,18}(\.[0-9]{1,18})?", text) else None


def _path(text: str) -> Path | None:
    return Path(text) if "\0" not in text and (os.access(text, os.R_OK) or not os.path.lexists(text)) else None


_READERS: dict[Any, Callable[[str], Any]] = {int: _int, float: _float, str: str, Path: _path}
