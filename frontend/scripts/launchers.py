"""Launchers that are run as scripts: what each would start, a process a rank, runs here.

`torchrun`, `python -m torch.distributed.run` and `accelerate launch` end in a class of PyTorch, `deepspeed` and
scripts that call it (gpt-neox's `deepy.py`) in a function of DeepSpeed's. The script that they were to start runs
in their place, as one rank of the capture's world, with the arguments and the environment that they made. So does
what a script starts by one of them as a process of its own, or in its own place (`os.execvp`), and what
`accelerate launch` starts for one GPU by `python`.
"""

from __future__ import annotations

import os
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from echograph.errors import CaptureError
from echograph.frontend.scripts.adapter import once_imported, patched, replaced
from echograph.frontend.scripts.world import World


class _Training(list[str]):
    """A command that starts a training script."""


def _launching(command: Any) -> tuple[str, list[str]] | None:
    """The module of the launcher that a command starts, and its arguments; None: it starts none.

    Args:
        command: its words, or, of a shell, the line of them.
    """
    if isinstance(command, str):
        command = [] if _SHELLS & set(command) else shlex.split(command)
    if isinstance(command, bytes | os.PathLike) or not command:
        return None
    name, *arguments = (os.fsdecode(word) for word in command)
    program = Path(name).name
    if program == "accelerate" and arguments[:1] == ["launch"]:
        return "accelerate.commands.launch", arguments[1:]
    if program in _PROGRAMS:
        return _PROGRAMS[program], arguments
    arguments = [part for part in arguments if part != "-u"]
    if program.startswith("python") and arguments[:1] == ["-m"] and arguments[1:2] and arguments[1] in _MODULES:
        return arguments[1], arguments[2:]
    return None


DEEPSPEED = "deepspeed.launcher.runner"
_PROGRAMS = {
    "torchrun": "torch.distributed.run",
    "accelerate-launch": "accelerate.commands.launch",
    "deepspeed": DEEPSPEED,
}
_MODULES = (*_PROGRAMS.values(), "torch.distributed.launch")
_SHELLS = frozenset("|&;<>()$`\n*?")


@contextmanager
def _marked() -> Iterator[None]:
    """In the context, accelerate's launcher for one process says that what it starts is a training script."""

    def marking(original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare(arguments: Any) -> Any:
            command, environment = original(arguments)
            return _Training(command) if command[0] == sys.executable else command, environment

        return prepare

    with patched(sys.modules["accelerate.utils"], "prepare_simple_launcher_cmd_env", marking):
        yield


def run(launcher: str, arguments: Sequence[str]) -> None:
    """Runs a launcher, whose functions stand for what starts processes."""
    module = import_module(launcher)
    sys.argv = [str(module.__file__), *arguments]
    module.main()


@dataclass(frozen=True, slots=True)
class _InPlace:
    """What stands for launchers.

    Attributes:
        world: of the capture, whose rank the script runs as.
        started: is told the scripts.
    """

    world: World
    started: list[Path]

    def launch(self, script: str, arguments: Sequence[str], as_module: bool) -> None:
        """Runs a script or a module."""
        sys.argv = [script, *arguments]
        if as_module:
            spec = find_spec(script)
            self.started.append(Path(spec.origin if spec is not None and spec.origin is not None else script))
            runpy.run_module(script, run_name="__main__", alter_sys=True)
            return
        path = Path(script).resolve()
        if not path.is_file():
            raise CaptureError(f"{script}: no such file: the launcher was to start this script")
        self.started.append(path)
        sys.path.insert(0, str(path.parent))
        runpy.run_path(str(path), run_name="__main__")

    def command(self, words: Sequence[str]) -> None:
        """Runs what the words of a command start behind the interpreter."""
        parts = [part for part in words if part != "-u"]
        as_module = parts[0] == "-m"
        script, *arguments = parts[1:] if as_module else parts
        self.launch(script, arguments, as_module)

    def by_torch(self, config: Any, entrypoint: Any) -> Callable[..., None]:
        """Stands for `elastic_launch`."""
        from torch.distributed.elastic.utils.api import macros

        del config

        def start(*given: str) -> None:
            # What the launcher says of ranks and their places is of its own world.
            os.environ.update(self.world.environment)
            if callable(entrypoint):
                entrypoint(*given)
                return
            given = tuple(macros.substitute(list(given), str(self.world.local_rank)))
            self.command(given if entrypoint == sys.executable else [entrypoint, *given])

        return start

    def by_process(self, original: Callable[..., None]) -> Callable[..., None]:
        """Stands for the constructor of `Popen`, where it starts a launcher, or is accelerate's."""

        def start(popen: Any, args: Any, *given: Any, **named: Any) -> None:
            launching = None if isinstance(args, _Training) else _launching(args)
            if launching is None and not isinstance(args, _Training):
                original(popen, args, *given, **named)
                return
            os.environ.update(named.get("env") or {})
            os.chdir(named.get("cwd") or ".")
            if launching is None:
                os.environ.update(self.world.environment if self.world.launched else {})
                self.command(args[1:])
            else:
                run(*launching)
            named.pop("shell", None)
            original(popen, [sys.executable, "-IS", "-c", ""], *given, **named)  # one that has ended

        return start

    def by_itself(self, original: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        """Stands for functions that put a program in the place of the process (`os.execvp`)."""

        def execute(file: Any, args: Any, *environment: Mapping[str, str]) -> NoReturn:
            launching = _launching(args)
            if launching is None:
                original(file, args, *environment)
            os.environ.update(*environment)
            run(*launching)
            raise SystemExit(0)

        return execute

    def by_shell(self, original: Callable[[Any], int]) -> Callable[[Any], int]:
        """Stands for `os.system`."""

        def start(command: Any) -> int:
            launching = _launching(command)
            if launching is None:
                return original(command)
            run(*launching)
            return 0

        return start

    def of_deepspeed(self) -> AbstractContextManager[None]:
        """In the context, the launcher of DeepSpeed runs what it launches."""
        module = sys.modules[DEEPSPEED]
        return patched(module, "main", self.by_deepspeed(module))

    def by_deepspeed(self, module: Any) -> Callable[[Any], Callable[..., None]]:
        """Stands for the `main` of DeepSpeed's launcher."""

        def main(arguments: Sequence[str] | None = None) -> None:
            given = module.parse_args(arguments)
            os.environ.update(self.world.environment)
            rank = [] if given.no_local_rank else [f"--local_rank={self.world.local_rank}"]
            self.launch(given.user_script, [*rank, *given.user_args], given.module)

        return lambda _: main


@contextmanager
def in_place(world: World, started: list[Path]) -> Iterator[None]:
    """In the context, launchers run what they launch.

    Args:
        world: of the capture, whose rank the script runs as, whatever the launcher was told of ranks. Like what
            the script sets itself, arguments, paths and environment are put back at the end of the run.
        started: is told the scripts.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.launcher import api

    stands = _InPlace(world, started)
    with ExitStack() as stack:
        for owner in (torchrun, api):  # each has the name; run as a module, the first is made anew
            stack.enter_context(replaced(owner, "elastic_launch", stands.by_torch))
        stack.enter_context(patched(subprocess.Popen, "__init__", stands.by_process))
        stack.enter_context(once_imported("accelerate.utils", _marked))
        for name in ("execv", "execve", "execvp", "execvpe"):
            stack.enter_context(patched(os, name, stands.by_itself))
        stack.enter_context(patched(os, "system", stands.by_shell))
        stack.enter_context(once_imported(DEEPSPEED, stands.of_deepspeed))
        yield
