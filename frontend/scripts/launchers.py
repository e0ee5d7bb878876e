"""Launchers that are run as scripts: what each would start, a process a rank, runs here.

`torchrun`, `python -m torch.distributed.run` and `accelerate launch` end in a class of PyTorch, `deepspeed` and
scripts that call it (gpt-neox's `deepy.py`) in a function of DeepSpeed's. The script that they were to start runs
in their place, as one rank of the capture's world, with the arguments and the environment that they made. So does
what a script starts as a process of its own by `torchrun`, or `accelerate launch` for one GPU by `python`.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from echograph.errors import CaptureError
from echograph.frontend.scripts.adapter import once_imported, patched, replaced
from echograph.frontend.scripts.world import World


class _Training(list[str]):
    """A command that starts a training script."""


def _for_torchrun(command: Any) -> list[str] | None:
    """The arguments of `torchrun` in a command that starts it; None: it is another one."""
    if isinstance(command, str | bytes | os.PathLike):
        return None
    name, *arguments = map(os.fspath, command)
    program = Path(name).name
    if program == "torchrun":
        return arguments
    arguments = [part for part in arguments if part != "-u"]
    if program.startswith("python") and arguments[:1] == ["-m"] and arguments[1:2] in ([m] for m in _TORCHRUN):
        return arguments[2:]
    return None


_TORCHRUN = ("torch.distributed.run", "torch.distributed.launch")


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
        del config

        def start(*given: str) -> None:
            # What the launcher says of ranks and their places is of its own world.
            os.environ.update(self.world.environment)
            if callable(entrypoint):
                entrypoint(*given)
                return
            words = given if entrypoint == sys.executable else (entrypoint, *given)
            self.command([self._told_its_rank(word) for word in words])

        return start

    def _told_its_rank(self, word: str) -> str:
        """A word of the command, with the rank that the launcher fills in; its option as it was before PyTorch 2.

        Parsers take either spelling (`_either_spelling`); who reads the command by hand is older.
        """
        if not word.startswith(_DASHED):
            return word
        return word.replace("${local_rank}", str(self.world.local_rank)).replace(_DASHED, _UNDERSCORED)

    def by_process(self, original: Callable[..., None]) -> Callable[..., None]:
        """Stands for the constructor of `Popen`, where it starts a launcher, or is accelerate's."""
        from torch.distributed import run as torchrun

        def start(popen: Any, args: Any, *given: Any, **named: Any) -> None:
            arguments = None if isinstance(args, _Training) else _for_torchrun(args)
            if arguments is None and not isinstance(args, _Training):
                original(popen, args, *given, **named)
                return
            os.environ.update(named.get("env") or {})
            os.chdir(named.get("cwd") or ".")
            if arguments is None:
                os.environ.update(self.world.environment if self.world.launched else {})
                self.command(args[1:])
            else:
                torchrun.main(arguments)
            original(popen, [sys.executable, "-IS", "-c", ""], *given, **named)  # one that has ended

        return start

    def by_deepspeed(self, module: Any) -> Callable[[Any], Callable[..., None]]:
        """Stands for the `main` of DeepSpeed's launcher."""

        def main(arguments: Sequence[str] | None = None) -> None:
            given = module.parse_args(arguments)
            os.environ.update(self.world.environment)
            rank = [] if given.no_local_rank else [f"--local_rank={self.world.local_rank}"]
            self.launch(given.user_script, [*rank, *given.user_args], given.module)

        return lambda _: main


_DASHED, _UNDERSCORED = "--local-rank", "--local_rank"
"""What PyTorch's launcher says by now, and what it said before."""


def _either_spelling(original: Callable[..., Any]) -> Callable[..., Any]:
    """`parse_known_args` of a parser that is told its rank by the name that it knows."""

    def parse(parser: ArgumentParser, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        known = parser._option_string_actions
        if _DASHED in known and _UNDERSCORED not in known:
            told = sys.argv[1:] if args is None else args
            args = [
                word.replace(_UNDERSCORED, _DASHED) if word.startswith(_UNDERSCORED) else word for word in told
            ]
        return original(parser, args, namespace)

    return parse


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
        stack.enter_context(patched(ArgumentParser, "parse_known_args", _either_spelling))
        stack.enter_context(patched(subprocess.Popen, "__init__", stands.by_process))
        stack.enter_context(once_imported("accelerate.utils", _marked))
        if "deepspeed" in sys.modules:
            from deepspeed.launcher import runner

            stack.enter_context(patched(runner, "main", stands.by_deepspeed(runner)))
        yield
