"""Runs a command with the tracer on in all Python processes that it starts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from echograph.errors import UsageError

STARTUP = Path(__file__).parent / "startup"


def run_traced(command: Sequence[str], path: Path, timeout_s: float) -> int:
    """Runs a command to its end and answers its exit status.

    Args:
        command: program and arguments.
        path: where the traces go, as `trace_collectives` takes it.
        timeout_s: when collectives that do not end are reported.

    Raises:
        UsageError: there is no such program.
    """
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    inherited = os.environ.get("PYTHONPATH")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(STARTUP), *([inherited] if inherited else [])]),
        "ECHOGRAPH_TRACE": str(path.absolute()),
        "ECHOGRAPH_TRACE_TIMEOUT_S": str(timeout_s),
    }
    try:
        status = subprocess.run(list(command), env=environment, check=False).returncode
    except OSError as error:
        raise UsageError(f"cannot run '{command[0]}': {error.strerror or error}") from None
    return status if status >= 0 else 128 - status
