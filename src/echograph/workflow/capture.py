"""A user's own training script as a job graph, without its ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from echograph.errors import UsageError
from echograph.ir.graph import JobGraph
from echograph.notes import tell, warn
from echograph.progress import Progress, silent

if TYPE_CHECKING:
    from echograph.ir.formats import Imported
    from echograph.profiler.costs.host import HostUnits

_NONE: Mapping[str, bool] = {}


def capture(
    script: str | Path | None = None,
    framework: str = "torch",
    arguments: Sequence[str] = (),
    *,
    world_size: int = 8,
    local_size: int = 8,
    gpus: bool = True,
    decided: Mapping[str, bool] = _NONE,
    ranks: Sequence[int] = (),
    step: int | None = None,
    whole: bool = False,
    config: str | Path | None = None,
    measure_host: bool = False,
    module: str = "",
    strict: bool = False,
    say: Progress = silent,
) -> JobGraph:
    """Runs a training script as one rank of a job that is not there, in a process of its own, and takes a step.

    What a graph cannot hold of the script is told to the logger `echograph`.

    Args:
        script: the file; it is not edited. None: a module is run.
        framework: "torch", "deepspeed" or "megatron".
        arguments: what the script finds behind its name.
        world_size: ranks of the job.
        local_size: ranks of a machine.
        gpus: whether the script finds a GPU for each rank.
        decided: which way the script goes where a tensor's value decides: {"train.py:12": False}.
        ranks: those that are run; none: one of each that differ.
        step: which training step is recorded, from 1; None: the first steady one.
        whole: let the script go on after that step.
        config: a configuration of DeepSpeed, for scripts that take one.
        measure_host: whether the graph says what the script's own work takes the host before each operation.
        module: run in place of a file, as `python -m` does.
        strict: whether what is unlikely to be meant is an error.
        say: told what goes on.

    Returns:
        What all ranks execute in the step, with their groups.

    Raises:
        UnknownNameError: no such framework.
        CaptureError: the script cannot be captured; names its line.
        MissingExtraError: the framework, or PyTorch, is not installed.
    """
    captured = capture_script_file(
        None if script is None else Path(script), framework, arguments, world_size=world_size,
        local_size=local_size, gpus=gpus, decided=decided, ranks=ranks, step=step, whole=whole,
        config=None if config is None else Path(config),
        measure_host=measure_host, module=module, strict=strict, showing=lambda: nullcontext(say),
    )  # fmt: skip
    tell(captured.notes)
    warn(captured.warnings)
    return cast(JobGraph, captured.graph)


def capture_script_file(
    script: Path | None,
    framework: str,
    arguments: Sequence[str],
    *,
    world_size: int,
    local_size: int,
    gpus: bool,
    decided: Mapping[str, bool],
    ranks: Sequence[int],
    step: int | None,
    whole: bool,
    config: Path | None,
    measure_host: bool,
    showing: Callable[[], AbstractContextManager[Progress]],
    module: str = "",
    strict: bool = False,
    quiet: bool = False,
) -> Imported:
    """`capture` with what the graph cannot hold.

    Args:
        script: the file; this and the arguments below are those of `capture`.
        framework: framework that the script uses.
        arguments: command-line arguments of the script.
        world_size: ranks of the job.
        local_size: ranks of a machine.
        gpus: whether there are GPUs.
        decided: which way the script goes.
        ranks: those that are run.
        step: which is recorded.
        whole: let the script go on.
        config: a configuration of DeepSpeed.
        measure_host: whether the graph says what the host does.
        showing: opens the display of progress, which has threads, once the script's process has been forked.
        module: run in place of a file.
        strict: whether warnings are errors.
        quiet: whether what the script prints goes to stderr.

    Raises:
        UsageError: there is neither a file nor a module, or both.
    """
    from echograph.frontend.scripts import ADAPTERS
    from echograph.frontend.scripts.process import CaptureProcess
    from echograph.frontend.scripts.run import Script
    from echograph.frontend.scripts.world import World

    adapter = ADAPTERS[framework]()
    if not gpus and framework != "torch":
        raise UsageError(
            f"--device cpu is for scripts of plain PyTorch: {framework} is captured as it runs on GPUs"
        )
    if (script is None) == (not module):
        raise UsageError("give a script by --script, or a module by --module: one of them")
    asked: dict[str, Any] = {
        "arguments": adapter.arguments(tuple(arguments), config), "step": step or adapter.steady_step,
        "whole": whole, "host": _units(adapter.host) if measure_host else None, "strict": strict,
    }  # fmt: skip
    run = Script(path=script, **asked) if script is not None else Script.of_module(module, **asked)
    world = World(size=world_size, local_size=local_size, gpus=gpus, decided=dict(decided))
    with CaptureProcess(run, world, adapter, ranks=tuple(ranks), quiet=quiet) as running, showing() as say:
        return running.result(say)


def _units(framework: str) -> HostUnits:
    from echograph.profiler.costs.host import load_units

    return load_units(framework)


def parse_decision(text: str) -> tuple[str, bool]:
    """A line of a script and which way it goes, from "train.py:12=no".

    Raises:
        UsageError: the text says something else.
    """
    where, _, which = text.rpartition("=")
    name, _, line = where.rpartition(":")
    if not name or not line.isdecimal() or which not in ("yes", "no"):
        raise UsageError(f"--decide {text}: give a line of the script and which way it goes, as train.py:12=no")
    return where, which == "yes"
