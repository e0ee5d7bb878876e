"""A capture in a process of its own, so that whatever a script does to its process, the caller knows how it ended.

A script may end its process (`os._exit`, `os.execv`, a crash), close its streams, leave threads behind, or ignore
signals. Its process leaves what it captured in a folder, and nothing else of it counts.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echograph import errors
from echograph.errors import CaptureError, EchoError
from echograph.frontend.scripts import saved
from echograph.frontend.scripts.adapter import Adapter
from echograph.frontend.scripts.capture import capture_script
from echograph.frontend.scripts.run import Script
from echograph.frontend.scripts.world import World
from echograph.ir import serde
from echograph.ir.formats import Imported
from echograph.progress import Progress, silent

_OUTCOME, _HANGS = "outcome.json", "runs.txt"
_GRACE_S, _LOOK_S = 0.5, 0.02


class CaptureProcess:
    """A running capture of a script; a context that ends it.

    It begins where the context does. Where the system cannot fork, the script runs here when its result is
    asked for.
    """

    def __init__(
        self,
        script: Script,
        world: World,
        adapter: Adapter,
        *,
        ranks: Sequence[int] = (),
        quiet: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Says what is captured, as `capture_script` does.

        Args:
            script: what is run.
            world: the world.
            adapter: of the framework.
            ranks: those that are run; none: what the adapter says.
            quiet: whether what the script prints goes to stderr.
            timeout_s: seconds after which the script is ended; None: never. Where the system cannot fork, never.
        """
        self._timeout_s = timeout_s
        self._script, self._world, self._adapter = script, world, adapter
        self._ranks, self._quiet = tuple(ranks), quiet
        self._child = 0

    def __enter__(self) -> CaptureProcess:
        self._folder = Path(tempfile.mkdtemp(prefix="echograph-"))
        if not hasattr(os, "fork"):
            return self
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        self._said, said = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            os.close(self._said)
            self._run(said)
        os.close(said)
        return self

    def __exit__(self, *_: object) -> None:
        if self._child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
        for files in self._folder.glob("echograph-saved-*"):  # of a script that ended its process
            with contextlib.suppress(OSError):
                saved.put_back(files)
        shutil.rmtree(self._folder, ignore_errors=True)

    def result(self, progress: Progress = silent) -> Imported:
        """Waits for the capture.

        Args:
            progress: is told what is going on.

        Raises:
            CaptureError: the process ended without a result; and all that `capture_script` raises.
        """
        if not self._child:
            with contextlib.redirect_stdout(sys.stderr) if self._quiet else contextlib.nullcontext():
                return self._capture(progress)
        threading.Thread(target=_repeat, args=(self._said, progress), daemon=True).start()
        status = self._wait()
        self._child = 0
        outcome = self._folder / _OUTCOME
        if not outcome.exists():
            raise _ended(self._script, os.waitstatus_to_exitcode(status))
        told = json.loads(outcome.read_text(encoding="utf-8"))
        if "error" in told:
            raise _rebuilt(**told)
        return Imported(
            graph=serde.load(self._folder / "job.pb"), notes=tuple(told["notes"]), warnings=tuple(told["warnings"])
        )

    def _wait(self) -> int:
        """How the script's process ended.

        Raises:
            CaptureError: it has not in the time that it has.
        """
        if self._timeout_s is None:
            return os.waitpid(self._child, 0)[1]
        end = time.monotonic() + self._timeout_s + _GRACE_S  # in which it writes down where it is
        while time.monotonic() < end:
            ended, status = os.waitpid(self._child, os.WNOHANG)
            if ended:
                return status
            time.sleep(_LOOK_S)
        if (self._folder / _OUTCOME).exists():  # only what it does at its end goes on
            os.kill(self._child, signal.SIGKILL)
            return os.waitpid(self._child, 0)[1]
        where = _innermost(self._script.path, self._folder / _HANGS)
        raise CaptureError(
            f"{where} runs for more than {self._timeout_s:g} s: give a longer --timeout, or a smaller job that "
            f"makes {self._script.step} training steps sooner"
        )

    def _capture(self, progress: Progress) -> Imported:
        return capture_script(self._script, self._world, self._adapter, ranks=self._ranks, progress=progress)

    def _run(self, said: int) -> None:
        """The life of the child, which never returns."""

        def progress(stage: str, done: int = 0, total: int = 0) -> None:
            with contextlib.suppress(OSError):  # the script may have closed it
                os.write(said, f"{json.dumps([stage, done, total])}\n".encode())  # a name may hold a newline

        leave = os._exit
        saved.keep_in(self._folder)
        try:
            atexit._clear()  # what the caller registered is the caller's to do
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self._timeout_s is not None:
                hangs = (self._folder / _HANGS).open("w", encoding="utf-8")
                faulthandler.dump_traceback_later(self._timeout_s, file=hangs)
            if self._quiet:
                os.dup2(2, 1)
            found = self._capture(progress)
            serde.save(found.graph, self._folder / "job.pb")
            told: dict[str, Any] = {"notes": list(found.notes), "warnings": list(found.warnings)}
        except BaseException as error:
            told = {
                "error": type(error).__name__,
                "line": str(error),
                "status": getattr(error, "exit_code", 1),
                "framework": getattr(error, "framework", ""),
                "trace": traceback.format_exc(),
            }
        try:
            (self._folder / "told.json").write_text(json.dumps(told), encoding="utf-8")
            (self._folder / "told.json").rename(self._folder / _OUTCOME)
            _end_as_python()
        finally:
            leave(0)


def _innermost(script: Path, trace: Path) -> str:
    """The line of a script's own that runs, of what `faulthandler` wrote: innermost frames first."""
    folder = str(script.resolve().parent)
    frames = re.findall(r'File "(.*)", line (\d+)', trace.read_text(encoding="utf-8") if trace.exists() else "")
    own = [
        (Path(file).name, line) for file, line in frames if file.startswith(folder) and "site-packages" not in file
    ]
    return ":".join(own[0]) if own else script.name


def _end_as_python() -> None:
    """Calls what the script registered for its end, and ends its children; that it exits there is no news."""
    for child in multiprocessing.active_children():
        child.terminate()
    report = sys.unraisablehook
    sys.unraisablehook = lambda raised: None if raised.exc_type is SystemExit else report(raised)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
    atexit._run_exitfuncs()


def _repeat(source: int, progress: Progress) -> None:
    with os.fdopen(source, encoding="utf-8") as lines:
        for line in lines:
            progress(*json.loads(line))


def _ended(script: Script, status: int) -> CaptureError:
    how = f"with exit status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
    error = CaptureError(
        f"{script.path.name} ended its process {how} without a graph: its training steps have to run in the "
        "process that it is started in, and it has to end by returning or by sys.exit"
    )
    error.exit_code = status if status > 0 else 128 - status if status else 1
    return error


def _rebuilt(error: str, line: str, status: int, framework: str, trace: str) -> BaseException:
    """The error that ended a capture in another process."""
    kind = getattr(errors, error, None)
    rebuilt: BaseException
    if isinstance(kind, type) and issubclass(kind, EchoError):
        made = BaseException.__new__(kind, line)
        made.exit_code = status
        if isinstance(made, errors.OtherFrameworkError):
            made.framework = framework
        rebuilt = made
    elif error == "KeyboardInterrupt":
        rebuilt = KeyboardInterrupt()
    elif error == "MemoryError":
        rebuilt = MemoryError(line)
    else:
        rebuilt = RuntimeError(f"{error}: {line}")
    rebuilt.add_note(trace)
    return rebuilt
