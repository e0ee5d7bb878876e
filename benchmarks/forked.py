"""Commands of Echograph as forks of this process, which has imported what they all do: seconds of each are that.

A fork runs what `python -m echograph COMMAND ...` would, in its own folder, environment and group of processes.
What only starts with an interpreter is that of this process: the seed of hashes, variables that PyTorch reads
where it is imported.
"""

from __future__ import annotations

import gc
import importlib
import os
import resource
import signal
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

_LOOK_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command ended.

    Attributes:
        status: of its process, negative of a signal; None: it was ended, since it took too long by the clock.
        out: what it printed.
        errors: what it said besides.
        cpu_s: seconds of a processor, those of its children too.
        wall_s: by the clock.
    """

    status: int | None
    out: str
    errors: str
    cpu_s: float
    wall_s: float


def import_once(modules: Sequence[str]) -> None:
    """Imports what the commands to come do; what is there then is not looked through for garbage again."""
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()


def run(
    arguments: Sequence[str], *, folder: Path, environment: Mapping[str, str], bytecode: Path, limit_s: float,
    patience_s: float,
) -> Ended:  # fmt: skip
    """Runs a command to its end.

    Args:
        arguments: the command and what follows it.
        folder: in which it runs, and where modules are looked for first.
        environment: all of its variables.
        bytecode: where what it imports is kept, compiled.
        limit_s: of a processor, for each of its processes.
        patience_s: by the clock, after which it is ended.
    """
    began = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        child = os.fork()
        if child == 0:
            for number, file in enumerate((out, errors), start=1):
                os.dup2(file.fileno(), number)
            _become(arguments, folder, environment, bytecode, limit_s)
        with suppress(OSError):  # either may be first; the child may have ended
            os.setpgid(child, child)
        status, usage = _wait(child, began + patience_s)
        told = [(file.seek(0), file.read().decode(errors="replace"))[1] for file in (out, errors)]
    return Ended(
        status=status, out=told[0], errors=told[1], cpu_s=usage.ru_utime + usage.ru_stime,
        wall_s=time.monotonic() - began,
    )  # fmt: skip


def _wait(child: int, until: float) -> tuple[int | None, resource.struct_rusage]:
    while time.monotonic() < until:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), usage
        time.sleep(_LOOK_S)
    os.killpg(child, signal.SIGKILL)
    return None, os.wait4(child, 0)[2]


def _become(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], bytecode: Path, limit_s: float
) -> NoReturn:
    """The life of a fork; without what an interpreter does at its end, which would copy all that is shared."""
    status = 1
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False  # folders of this process's parent are not this one's to remove
    try:
        os.setpgid(0, 0)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s), int(limit_s) + 5))
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        warnings.simplefilter("ignore")
        sys.pycache_prefix, sys.dont_write_bytecode = str(bytecode), False
        sys.path.insert(0, str(folder))
        sys.argv = ["echograph", *arguments]
        importlib.import_module("echograph.__main__").main()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:  # the caller reads its last line
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)
