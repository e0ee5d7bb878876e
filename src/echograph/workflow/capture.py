"""A user's own training script as a job graph, without its ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from echograph.errors import InputError, UsageError
from echograph.ir.graph import JobGraph
from echograph.notes import tell, warn
from echograph.progress import Progress, silent

if TYPE_CHECKING:
    from echograph.ir.formats import Imported
    from echograph.profiler.costs.host import HostUnits

_NONE: Mapping[str, bool] = {}
_NOTHING: Mapping[str, str | Path | None] = {}


def capture(
    script: str | Path | None = None,
    framework: str = "torch",
    arguments: Sequence[str] = (),
    *,
    world_size: int = 8,
    local_size: int = 8,
    gpus: bool = True,
    decided: Mapping[str, bool | int] = _NONE,
    ranks: Sequence[int] = (),
    step: int | None = None,
    whole: bool = False,
    config: str | Path | None = None,
    measure_host: bool = False,
    module: str = "",
    strict: bool = False,
    fake_data: Mapping[str, str | Path | None] = _NOTHING,
    fake_weights: Mapping[str, str | Path | None] = _NOTHING,
    timeout_s: float | None = None,
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
        decided: which way the script goes where a tensor's value decides: {"train.py:12": False}; or how many
            elements an operator finds there: {"train.py:14": 64}.
        ranks: those that are run; none: one of each that differ.
        step: which training step is recorded, from 1; None: the first steady one.
        whole: let the script go on after that step.
        config: a configuration of DeepSpeed, for scripts that take one.
        measure_host: whether the graph says what the script's own work takes the host before each operation.
        module: run in place of a file, as `python -m` does.
        strict: whether what is unlikely to be meant is an error.
        fake_data: data sets that are made in place of what the script would download: name -> a file with rows of
            their columns; None: as published.
        fake_weights: models of the Hugging Face hub of which the same is true: name -> a folder with a
            config.json, or a model of the zoo; None: the zoo's of that name.
        timeout_s: seconds after which the script is ended, and the capture with an error; None: never.
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
        measure_host=measure_host, module=module, strict=strict, fake_data=fake_data, fake_weights=fake_weights,
        timeout_s=timeout_s, showing=lambda: nullcontext(say),
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
    decided: Mapping[str, bool | int],
    ranks: Sequence[int],
    step: int | None,
    whole: bool,
    config: Path | None,
    measure_host: bool,
    showing: Callable[[], AbstractContextManager[Progress]],
    module: str = "",
    strict: bool = False,
    fake_data: Mapping[str, str | Path | None] = _NOTHING,
    fake_weights: Mapping[str, str | Path | None] = _NOTHING,
    quiet: bool = False,
    timeout_s: float | None = None,
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
        fake_data: data sets that are made.
        fake_weights: models of which the weights are made.
        quiet: whether what the script prints goes to stderr.
        timeout_s: seconds after which the script is ended.

    Raises:
        UsageError: there is neither a file nor a module, or both.
    """
    from echograph.frontend.scripts import ADAPTERS
    from echograph.frontend.scripts.fakes import Fakes
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
        "fakes": Fakes(
            data={name: None if file is None else _there(name, file) for name, file in fake_data.items()},
            weights={
                name: _configuration(name, model)
                for name, model in fake_weights.items() if not _is_file(name)
            },
            files=frozenset(
                _alone(name, model) for name, model in fake_weights.items() if _is_file(name)
            ),
        ),
    }  # fmt: skip
    run = Script(path=script, **asked) if script is not None else Script.of_module(module, **asked)
    world = World(size=world_size, local_size=local_size, gpus=gpus, decided=dict(decided))
    with (
        CaptureProcess(run, world, adapter, ranks=tuple(ranks), quiet=quiet, timeout_s=timeout_s) as running,
        showing() as say,
    ):
        return running.result(say)


def _units(framework: str) -> HostUnits:
    from echograph.profiler.costs.host import load_units

    return load_units(framework)


def _is_file(name: str) -> bool:
    """Whether it names a file of weights, and not a model of the hub."""
    return name.endswith((".pth", ".pt"))


def _alone(name: str, model: str | Path | None) -> str:
    if model is not None:
        raise UsageError(
            f"--fake-weights {name}={model}: a file has the shapes of the model that takes it: give its name alone"
        )
    return name


_ROWS = (".jsonl", ".json", ".csv", ".parquet", ".txt")


def _there(name: str, file: str | Path) -> Path:
    if Path(file).suffix not in _ROWS:
        raise InputError(f"--fake-data {name}={file}: give a file of rows ({', '.join(_ROWS)})")
    if not Path(file).is_file():
        raise InputError(
            f"--fake-data {name}={file}: no such file: give one of rows (.jsonl, .csv, .parquet, .txt)"
        )
    return Path(file).absolute()


def _configuration(name: str, model: str | Path | None) -> Mapping[str, Any]:
    """What config.json would say of a model: that of a folder, or of a model of the zoo."""
    from echograph.models import from_config, get_model
    from echograph.models.build import OWN

    given = name if model is None else model
    if model is not None and os.sep in str(model) and not Path(given).is_dir():
        raise InputError(
            f"--fake-weights {name}={model}: no such folder: give one with the model's config.json, or a model of "
            "the zoo"
        )
    entry = from_config(Path(given)) if Path(given).is_dir() else get_model(str(given))
    if entry.architecture in OWN:
        raise UsageError(
            f"--fake-weights {name}: {entry.name} is no model of transformers: give a folder's config.json"
        )
    return {**entry.config, "architectures": [entry.architecture]}


def parse_fakes(texts: Sequence[str]) -> dict[str, str | None]:
    """What is made in place of a download, from "NAME" or "NAME=WHAT".

    Raises:
        UsageError: there is no name, nothing behind "=", or another thing is said of the same name.
    """
    found: dict[str, str | None] = {}
    for text in texts:
        name, says, what = text.partition("=")
        if not name or (says and not what):
            raise UsageError(f"--fake-data or --fake-weights '{text}': give NAME or NAME=WHAT")
        _say(found, name, what or None, text)
    return found


def parse_decisions(texts: Sequence[str]) -> dict[str, bool | int]:
    """All that `parse_decision` takes.

    Raises:
        UsageError: one says something else, or two differ of the same line.
    """
    found: dict[str, bool | int] = {}
    for text in texts:
        _say(found, *parse_decision(text), text)
    return found


def _say(found: dict[str, Any], name: str, what: Any, text: str) -> None:
    if name in found and (type(found[name]), found[name]) != (type(what), what):  # yes is not 1
        raise UsageError(f"{text}: something else was said of {name} before: say it once")
    found[name] = what


def parse_decision(text: str) -> tuple[str, bool | int]:
    """A line of a script, or all of its lines, and which way it goes, or how many elements are found there.

    From "train.py:12=no", "train.py=no" or "train.py:14=64".

    Raises:
        UsageError: the text says something else.
    """
    where, _, which = text.rpartition("=")
    name, _, line = where.rpartition(":")
    named = bool(name) and line.isdecimal() if ":" in where else where.endswith(".py")
    if not named or not (which in ("yes", "no") or which.isdecimal()):
        raise UsageError(
            f"--decide {text}: give a line of the script, or a file for all of its lines, and which way it goes, "
            "as train.py:12=no, or how many elements values find there, as train.py:14=64"
        )
    return where, int(which) if which.isdecimal() else which == "yes"
