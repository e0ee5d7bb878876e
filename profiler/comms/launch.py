"""Runs a command with the tracer, or the recorder, on in all Python processes that it starts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from echograph.errors import UsageError
from echograph.profiler.comms.tracer import files_of

STARTUP = Path(__file__).parent / "startup"


def run_traced(command: Sequence[str], path: Path, timeout_s: float) -> tuple[int, list[Path]]:
    """Runs a command with the tracer on to its end.

    Args:
        command: program and arguments.
        path: where the traces go, as `trace_collectives` takes it.
        timeout_s: when collectives that do not end are reported.

    Returns:
        Its exit status, and the traces that it wrote, of all ranks.

    Raises:
        UsageError: there is no such program, or no time.
    """
    if not timeout_s > 0:
        raise UsageError(f"--timeout: {timeout_s:g}: give seconds above 0")
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    said = {"ECHOGRAPH_TRACE": str(path.absolute()), "ECHOGRAPH_TRACE_TIMEOUT_S": str(timeout_s)}
    before = {file: file.stat().st_mtime_ns for file in files_of(path)}
    status = run_started(command, said)
    return status, [file for file in files_of(path) if before.get(file) != file.stat().st_mtime_ns]


def run_started(command: Sequence[str], said: Mapping[str, str]) -> int:
    """Runs a command to its end and answers its exit status.

    Args:
        command: program and arguments.
        said: environment variables that say what begins in each Python process (see `startup`).

    Raises:
        UsageError: there is no such program.
    """
    inherited = os.environ.get("PYTHONPATH")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(STARTUP), *([inherited] if inherited else [])]),
        **said,
    }
    try:
        status = subprocess.run(list(command), env=environment, check=False).returncode
    except OSError as error:
        raise UsageError(f"cannot run '{command[0]}': {error.strerror or error}") from None
    return status if status >= 0 else 128 - status
