"""A user's own training script as a job graph, without its ranks."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from echograph.errors import InputError, OtherFrameworkError, UnknownNameError, UsageError
from echograph.ir.files import read_whole
from echograph.ir.graph import JobGraph
from echograph.notes import tell, warn
from echograph.options import option, parse_ranks
from echograph.progress import Progress, silent

if TYPE_CHECKING:
    from echograph.frontend.scripts.fakes import Fakes
    from echograph.ir.formats import Imported
    from echograph.models import ModelEntry
    from echograph.profiler.costs.host import HostUnits

_NOTHING: Mapping[str, Any] = {}
_DEVICES = ("cuda", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """How a script is captured. The text of each field is its help on the command line.

    Raises:
        UsageError: a field is misspelt, or there is neither a script nor a module, or both.
        UnknownNameError: no such device.
    """

    script: Path | None = option(None, "The training script; it is not edited.")
    module: str = option("", "In place of a script: a module, run as python -m does.", letter="m")
    world_size: int = option(8, "Ranks of the job.", least=1)
    local_size: int = option(8, "Ranks of a machine.", least=1)
    device: str = option("cuda", "What the script finds: a GPU for each rank (cuda), or none (cpu).")
    decide: tuple[str, ...] = option(
        (),
        "Which way the script goes where a tensor's value decides: train.py:12=no, train.py=no; or how many "
        "elements its values find: train.py:14=64",
    )
    ranks: str = option("roles", "Which ranks to run: roles (one of each that differ), or numbers as 0,5.")
    step: int | None = option(None, "Which training step to record.", "the first steady one", least=1)
    whole: bool = option(False, "Let the script go on after that step.")
    config: Path | None = option(None, "DeepSpeed: the configuration, for scripts that take one.")
    measure_host: bool = option(False, "Count what the script's own work is for the host, for each operation.")
    strict: bool = option(False, "End where anything captured is unlikely to be meant.")
    fake_data: tuple[str, ...] = option(
        (),
        "A data set that is made and not downloaded, as published or with the columns of a file: MNIST, "
        "nyu-mll/glue, NAME=rows.jsonl; any number.",
    )
    fake_weights: tuple[str, ...] = option(
        (),
        "A model of the Hugging Face hub whose weights have shapes alone, as in the zoo or a folder with its "
        "config.json: bert-base-uncased, NAME=DIR; any number.",
    )
    timeout: float | None = option(None, "Seconds after which the script is ended.", "never")

    def __post_init__(self) -> None:
        if self.device not in _DEVICES:
            raise UnknownNameError("device", self.device, _DEVICES)
        if (self.script is None) == (not self.module):
            raise UsageError("give a script by --script, or a module by --module: one of them")
        if self.timeout is not None and not 0 < self.timeout < _MOST_S:
            raise UsageError(f"--timeout {self.timeout:g}: give seconds above 0, or leave it out")
        _ = self.decided, self.chosen_ranks  # what is misspelt is said before anything runs

    @property
    def decided(self) -> dict[str, bool | int]:
        """Which way the script goes at lines, or how many elements it finds there."""
        return parse_decisions(self.decide)

    @property
    def chosen_ranks(self) -> tuple[int, ...]:
        """Ranks that are run; () where it is one of each that differ."""
        return () if self.ranks == "roles" else parse_ranks("--ranks", self.ranks)

    @property
    def fakes(self) -> Fakes:
        """What is made in place of what the script would download.

        Raises:
            InputError: a file of rows is not there.
            UnknownNameError: no such model.
            UsageError: a model that is none of transformers.
        """
        from echograph.frontend.scripts.fakes import Fakes

        data, weights = parse_fakes(self.fake_data), parse_fakes(self.fake_weights)
        return Fakes(
            data={name: None if file is None else _there(name, file) for name, file in data.items()},
            weights={name: _configuration(name, model) for name, model in weights.items() if not _is_file(name)},
            files=frozenset(_alone(name, model) for name, model in weights.items() if _is_file(name)),
        )


_MOST_S = 1e9
"""Of a timeout: thirty years."""


def capture(
    script: str | Path | None = None,
    framework: str = "torch",
    arguments: Sequence[str] = (),
    *,
    world_size: int = 8,
    local_size: int = 8,
    gpus: bool = True,
    decided: Mapping[str, bool | int] = _NOTHING,
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
    progress: Progress = silent,
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
        progress: told what goes on.

    Returns:
        What all ranks execute in the step, with their groups.

    Raises:
        UnknownNameError: no such framework.
        CaptureError: the script cannot be captured; names its line.
        MissingExtraError: the framework, or PyTorch, is not installed.
    """
    options = CaptureOptions(
        script=None if script is None else Path(script),
        module=module,
        world_size=world_size,
        local_size=local_size,
        device="cuda" if gpus else "cpu",
        decide=tuple(f"{where}={_said(which)}" for where, which in decided.items()),
        ranks=",".join(map(str, ranks)) or "roles",
        step=step,
        whole=whole,
        config=None if config is None else Path(config),
        measure_host=measure_host,
        strict=strict,
        fake_data=_texts(fake_data),
        fake_weights=_texts(fake_weights),
        timeout=timeout_s,
    )
    captured = capture_script_file(framework, arguments, options, showing=lambda: nullcontext(progress))
    tell(captured.notes)
    warn(captured.warnings)
    return cast(JobGraph, captured.graph)


def _said(decision: bool | int) -> str:
    """A decision as `parse_decision` reads it."""
    return ("yes" if decision else "no") if isinstance(decision, bool) else str(decision)


def _texts(fakes: Mapping[str, str | Path | None]) -> tuple[str, ...]:
    """What is made in place of a download, as `parse_fakes` reads it."""
    return tuple(name if what is None else f"{name}={what}" for name, what in fakes.items())


def capture_script_file(
    framework: str,
    arguments: Sequence[str],
    asked: CaptureOptions,
    *,
    showing: Callable[[], AbstractContextManager[Progress]],
    quiet: bool = False,
) -> Imported:
    """`capture` with what the graph cannot hold.

    Args:
        framework: framework that the script uses.
        arguments: command-line arguments of the script.
        asked: which script, and how it is captured.
        showing: opens the display of progress, which has threads, once the script's process has been forked.
        quiet: whether what the script prints goes to stderr.

    Raises:
        UsageError: a device or a configuration that the framework does not have.
        EchoError: as `capture`.
    """
    try:
        return _captured(framework, arguments, asked, showing=showing, quiet=quiet)
    except OtherFrameworkError as error:
        other = error.framework
    found = _captured(other, arguments, asked, showing=showing, quiet=quiet)
    line = f"the script trains with {other}, and is captured as by 'echoc capture {other}'"
    return replace(found, notes=(line, *found.notes))


def _captured(
    framework: str,
    arguments: Sequence[str],
    asked: CaptureOptions,
    *,
    showing: Callable[[], AbstractContextManager[Progress]],
    quiet: bool,
) -> Imported:
    """`capture_script_file` of a script that trains with no other framework."""
    from echograph.frontend.scripts import ADAPTERS
    from echograph.frontend.scripts.process import CaptureProcess
    from echograph.frontend.scripts.run import Script
    from echograph.frontend.scripts.world import World

    adapter, gpus = ADAPTERS[framework](), asked.device == "cuda"
    if not gpus and framework != "torch":
        raise UsageError(
            f"--device cpu is for scripts of plain PyTorch: {framework} is captured as it runs on GPUs"
        )
    run: dict[str, Any] = {
        "arguments": adapter.arguments(tuple(arguments), asked.config),
        "step": asked.step or adapter.steady_step,
        "moves": asked.step is None,
        "whole": asked.whole,
        "host": _units(adapter.host) if asked.measure_host else None,
        "strict": asked.strict,
        "fakes": asked.fakes,
    }
    script = Script.of_module(asked.module, **run) if asked.script is None else Script(path=asked.script, **run)
    world = World(size=asked.world_size, local_size=asked.local_size, gpus=gpus, decided=asked.decided)
    ranks, timeout_s = asked.chosen_ranks, asked.timeout
    with (
        CaptureProcess(script, world, adapter, ranks=ranks, quiet=quiet, timeout_s=timeout_s) as running,
        showing() as progress,
    ):
        return running.result(progress)


def _units(framework: str) -> HostUnits:
    from echograph.profiler.costs.host import load_units

    return load_units(framework)


def _is_file(name: str) -> bool:
    """Whether it names a file of weights, and not a model of the hub."""
    from echograph.frontend.scripts.fakes import WEIGHTS

    return name.endswith(WEIGHTS)


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
    from echograph.models import from_config
    from echograph.models.build import OWN

    given = name if model is None else model
    if (config := _of_diffusers(Path(given))) is not None:
        return config
    try:
        entry = from_config(Path(given)) if Path(given).is_dir() else _of_the_zoo(str(given))
    except UnknownNameError as error:
        if model is not None and os.sep in str(model):
            raise InputError(
                f"--fake-weights {name}={model}: no such folder: give one with the model's config.json, or a "
                "model of the zoo"
            ) from None
        raise UsageError(f"{error}; any other: --fake-weights {name}=DIR, a folder with its config.json") from None
    if entry.architecture in OWN:
        raise UsageError(
            f"--fake-weights {name}: {entry.name} is no model of transformers: give a folder's config.json"
        )
    return {**entry.config, "architectures": [entry.architecture]}


_TUNED = re.compile(r"-(base|chat|instruct|it|sft)(?=-|$)", re.IGNORECASE)
"""What a model's name says of how it was trained on, which leaves its shapes as they are."""


def _of_the_zoo(name: str) -> ModelEntry:
    """A model by its name, or by that of the one that it was trained from, which is told.

    Raises:
        UnknownNameError: there is neither.
    """
    from echograph.models import get_model

    try:
        return get_model(name)
    except UnknownNameError:
        plain = _TUNED.sub("", name)
        with suppress(UnknownNameError):
            entry = get_model(plain)
            tell([f"--fake-weights {name}: taken to have the shapes of {plain}, from which its name comes"])
            return entry
        raise


def _of_diffusers(folder: Path) -> Mapping[str, Any] | None:
    """The configuration in a folder, where it is that of a model of diffusers; None: it is another, or none."""
    from echograph.frontend.scripts.fakes import OF_DIFFUSERS
    from echograph.models.catalog import MAX_CONFIG_BYTES

    try:
        config = json.loads(read_whole(folder / "config.json", "", MAX_CONFIG_BYTES))
    except (ValueError, RecursionError, InputError):
        return None
    return config if isinstance(config, dict) and isinstance(config.get(OF_DIFFUSERS), str) else None


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
