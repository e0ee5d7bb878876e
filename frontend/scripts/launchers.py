"""Launchers that are run as scripts: what each would start, a process a rank, runs here.

`torchrun`, `python -m torch.distributed.run` and `accelerate launch` end in a class of PyTorch, `deepspeed` and
scripts that call it (gpt-neox's `deepy.py`) in a function of DeepSpeed's. The script that they were to start runs
in their place, as one rank of the capture's world, with the arguments and the environment that they made.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from echograph.errors import CaptureError
from echograph.frontend.scripts.adapter import patched, replaced
from echograph.frontend.scripts.world import World


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

    def launch(script: str, arguments: Sequence[str], as_module: bool) -> None:
        # What the launcher says of ranks and their places is of its own world.
        os.environ.update(world.environment)
        sys.argv = [script, *arguments]
        if as_module:
            spec = find_spec(script)
            started.append(Path(spec.origin if spec is not None and spec.origin is not None else script))
            runpy.run_module(script, run_name="__main__", alter_sys=True)
            return
        path = Path(script).resolve()
        if not path.is_file():
            raise CaptureError(f"{script}: no such file: the launcher was to start this script")
        started.append(path)
        sys.path.insert(0, str(path.parent))
        runpy.run_path(str(path), run_name="__main__")

    def by_torch(config: Any, entrypoint: Any) -> Callable[..., None]:
        del config

        def start(*given: str) -> None:
            if callable(entrypoint):
                os.environ.update(world.environment)
                entrypoint(*given)
                return
            python = entrypoint == sys.executable
            parts = [part for part in given if part != "-u"] if python else [entrypoint, *given]
            as_module = parts[0] == "-m"
            script, *arguments = parts[1:] if as_module else parts
            launch(script, arguments, as_module)

        return start

    def by_deepspeed(module: Any) -> Callable[[Any], Callable[..., None]]:
        def main(arguments: Sequence[str] | None = None) -> None:
            given = module.parse_args(arguments)
            rank = [] if given.no_local_rank else [f"--local_rank={world.local_rank}"]
            launch(given.user_script, [*rank, *given.user_args], given.module)

        return lambda _: main

    with ExitStack() as stack:
        for owner in (torchrun, api):  # each has the name; run as a module, the first is made anew
            stack.enter_context(replaced(owner, "elastic_launch", by_torch))
        if "deepspeed" in sys.modules:
            from deepspeed.launcher import runner

            stack.enter_context(patched(runner, "main", by_deepspeed(runner)))
        yield
