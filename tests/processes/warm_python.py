"""Programs as forks of a process that has imported what takes long: their imports cost more than what they do.

`python` and the commands of Echograph in the folder of `warm_programs` run as the real ones do, each in a process,
folder and environment of its own, but their modules are loaded already. So not for what loading itself may change:
the seed of hashes, `python` with options, a module that is missing.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

COMMANDS = ("echoc", "echosim", "echoprof")
IMPORTED = (
    "transformers",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "echograph.workflow.compile",
    "echograph.workflow.predict",
    "echograph.frontend.pytorch.capture",
    "echograph.models.build",
    *(f"echograph.cli.{name}" for name in COMMANDS),
)
# Ends as the fork did, by the same signal if it was one.
PROGRAM = """#!{python} -IS
import json, os, socket, sys
asked = json.dumps([{name!r}, sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [len(asked).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(asked)
    status = int(server.makefile().read())
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a program was called with, and its stdin, stdout and stderr."""

    name: str
    arguments: list[str]
    folder: str
    environment: dict[str, str]
    descriptors: list[int]


@contextlib.contextmanager
def warm_programs() -> Iterator[Path]:
    """A folder with `python`, `echoc`, `echosim` and `echoprof`."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        address = str(folder / "socket")
        for name in ("python", *COMMANDS):
            program = folder / name
            program.write_text(PROGRAM.format(python=sys.executable, name=name, address=address))
            program.chmod(0o755)
        command = [sys.executable, __file__, address]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n", "the process that has imported did not start"
            yield folder
            # The end of its stdin ends it; what has not ended yet is left.
            server.communicate()


def serve(address: str) -> Call | None:
    """Answers calls; returns a call in the fork that is to run it, and None when the tests have ended."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        # Nobody waits for those that wait for the programs.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            ready, *_ = select.select([listener, sys.stdin], [], [])
            if listener not in ready:
                return None
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    return answered(connection)


def answered(connection: socket.socket) -> Call:
    """Forks a program, in which it returns; elsewhere it tells the caller the status and exits."""
    size, descriptors, *_ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as stream:
        name, arguments, folder, environment = json.loads(stream.read(int.from_bytes(size, "big")))
    program = os.fork()
    if program:
        for descriptor in descriptors:
            os.close(descriptor)
        threading.Thread(target=end_with_its_caller, args=(connection, program), daemon=True).start()
        _, status = os.waitpid(program, 0)
        connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    return Call(name=name, arguments=arguments, folder=folder, environment=environment, descriptors=descriptors)


def end_with_its_caller(connection: socket.socket, program: int) -> None:
    """Kills a program whose caller was killed."""
    if not connection.recv(1):
        with contextlib.suppress(ProcessLookupError):
            os.kill(program, signal.SIGKILL)


def end_early(call: Call) -> None:
    """Runs the program, and ends without taking apart what it shares with all forks, which would copy all of it.

    What is unusual is left to the interpreter: an exception, a message as status, a stream that takes no more.
    """
    try:
        become(call)
        status: object = 0
    except SystemExit as stop:
        status = stop.code or 0
        if not isinstance(status, int):
            raise
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except OSError:
        return
    os._exit(status & 0xFF)


def become(call: Call) -> None:
    """Runs the program; its exceptions end the process as they end any."""
    for number, descriptor in enumerate(call.descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(call.folder)
    os.environ.clear()
    os.environ.update(call.environment)
    found = call.environment.get("PYTHONPATH", "")
    sys.path[:1] = [path for path in found.split(os.pathsep) if path]
    if call.name != "python":
        sys.argv = [call.name, *call.arguments]
        importlib.import_module(f"echograph.cli.{call.name}").main()
        return
    first, *rest = call.arguments
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(rest[0], main.__dict__)  # noqa: S102 - the tests' own programs
    elif first == "-m":
        sys.argv = rest
        sys.path.insert(0, call.folder)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = call.arguments
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    for module in IMPORTED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # else the first search for garbage of each fork copies all of it
    asked = serve(sys.argv[1])
    if asked is not None:
        end_early(asked)
