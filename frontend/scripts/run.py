"""Runs a script as one rank, unedited, and records a step of it."""

from __future__ import annotations

import argparse
import builtins
import importlib
import multiprocessing.context
import os
import re
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _device

from echograph.errors import CaptureError, EchoError, InputError, OtherFrameworkError
from echograph.frontend.pytorch.capture import fake_mode, plain_attention_masks, quiet_fakes
from echograph.frontend.pytorch.device_ops import cuda_operators
from echograph.frontend.pytorch.rounding import settings_kept
from echograph.frontend.pytorch.shapes import Results
from echograph.frontend.pytorch.userfile import reason, without_bytecode
from echograph.frontend.scripts import (
    counts,
    environments,
    fakes,
    hub,
    imports,
    launchers,
    network,
    older,
    stand_ins,
)
from echograph.frontend.scripts.adapter import Adapter, once_imported, patched, replaced, unpatched
from echograph.frontend.scripts.device import remedy
from echograph.frontend.scripts.host_work import CountingRecorder, HostPrice
from echograph.frontend.scripts.installed import package_of
from echograph.frontend.scripts.recorder import PassingRecorder, ScriptRecorder, StepRecorded
from echograph.frontend.scripts.world import World

_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
_RAISED = "the script raised it, with no values in its tensors; echoc --debug capture shows how it came there"
_UNSUPPORTED = (UnsupportedFakeTensorException, UnsupportedOperatorException)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script and how it is run.

    Attributes:
        path: the file.
        module: its dotted name, where it is run as `python -m` does; "": as a file.
        arguments: what it finds behind its name in `sys.argv`.
        step: which training step is recorded, counted from 1.
        moves: whether it is the next one, if that one evaluates or samples first, as none before it, or makes the
            state of one of several optimizers.
        whole: whether it goes on after that step.
        host: prices what the script's own work is for the host; None: that is not counted.
        strict: whether what is unlikely to be meant (`checks`) is an error.
        fakes: what is made in place of what it would download.
    """

    path: Path
    module: str = ""
    arguments: Sequence[str] = ()
    step: int = 2
    moves: bool = False
    whole: bool = False
    host: HostPrice | None = None
    strict: bool = False
    fakes: fakes.Fakes = field(default_factory=fakes.Fakes)

    @classmethod
    def of_module(cls, name: str, **fields: Any) -> Script:
        """The script that `python -m name` runs, from the working directory or what is installed.

        Raises:
            InputError: there is no such module.
        """
        parts = name.split(".")
        for folder in (Path.cwd(), *map(Path, sys.path)):
            for file in (folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__main__.py")):
                if file.is_file():
                    return cls(path=file, module=name, **fields)
        raise InputError(f"--module {name}: no such module here, nor among those that are installed")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScriptRun:
    """What a run left.

    Attributes:
        world: which rank it was.
        recorder: holds the recorded step.
        meshes: what the mesh may be, as the adapter tells it.
    """

    world: World
    recorder: ScriptRecorder
    meshes: list[dict[str, int]]


@contextmanager
def _algorithms_of_its_own() -> Iterator[None]:
    """What a script sets of deterministic algorithms ends with it: it changes what the next one launches."""
    before = _deterministic()
    try:
        yield
    finally:
        if before != _deterministic():  # to set them imports PyTorch's compiler
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def _optimizers_as_new() -> Iterator[None]:
    """Classes of optimizers as if none had been made in this process, and afterwards as they were.

    PyTorch writes to a class what calls hooks of its step, where the first optimizer of it is made. `AdamW` then
    has a step of its own, and what stands in for `Adam`'s is not asked any more.
    """
    before = _unhooked()
    try:
        yield
    finally:
        _unhooked()
        for kind, step in before.items():
            kind.step = step


def _unhooked() -> dict[Any, Any]:
    """Takes the hooks from all classes of optimizers; returns the steps that they had with them."""
    kinds: list[Any] = [torch.optim.Optimizer]
    for kind in kinds:
        kinds += kind.__subclasses__()
    found = {kind: vars(kind)["step"] for kind in kinds if getattr(vars(kind).get("step"), "hooked", False)}
    for kind, step in found.items():
        if step.__wrapped__.__qualname__ == f"{kind.__qualname__}.step":
            kind.step = step.__wrapped__
        else:  # of a class that it is derived from
            del kind.step
    return found


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def run_script(
    script: Script,
    world: World,
    adapter: Adapter,
    results: Results | None = None,
    passing: type[PassingRecorder] | None = None,
) -> ScriptRun:
    """Runs a script as a rank and records its step.

    Args:
        script: what is run.
        world: and as which rank.
        adapter: of the framework.
        results: of operators, as runs of other ranks learnt them; this run adds its own.
        passing: goes through the step in place of a recorder: it is not written down, nor the host's work counted.

    Raises:
        InputError: there is no such file.
        CaptureError: the script raised, needs what a capture does not have, or ended before the step; one line
            with file and line. Its `exit_code` is the script's, where that ended with one.
    """
    if not script.path.is_file():
        raise InputError(f"{script.path}: no such file: give a Python script")
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(_as_main(script, adapter.launched(script.path, script.arguments, world)))
        enter(_settings_kept())
        enter(world.entered(lambda: recorder.place))
        enter(_algorithms_of_its_own())
        enter(_optimizers_as_new())
        if script.host is not None:
            importlib.import_module("torch._dynamo")  # on a real host it is there, and what it wraps is work
        mode = enter(fake_mode(unpatched))
        kind = CountingRecorder if script.host is not None else ScriptRecorder
        recorder = (passing or kind)(
            mode, step=script.step, moves=script.moves, whole=script.whole,
            counts_optimizer_steps=adapter.counts_optimizer_steps, results=results,
        )  # fmt: skip
        if isinstance(recorder, CountingRecorder) and script.host is not None:
            recorder.counter.stands_in = script.host.stands_in
        enter(patched(os, "_exit", _exit_as_sys))
        enter(replaced(torch, "compile", _left_out))
        enter(stand_ins.standing_in(recorder.note))
        enter(older.installed(recorder.note))
        enter(environments.acting(recorder.note))
        enter(imports.put_off(recorder.note))
        enter(counts.followed(recorder.warn))
        enter(hub.installed(recorder.note))
        enter(fakes.installed(script.fakes, recorder.note))
        enter(network.not_waited_for())
        enter(quiet_fakes())
        enter(cuda_operators())
        enter(plain_attention_masks())
        enter(recorder.hooked())
        enter(adapter.installed(world, recorder))
        stand_ins.ask_anew()  # what the adapter imported found no GPU yet
        started: list[tuple[Any, Callable[[], Any]]] = []
        enter(patched(BaseProcess, "start", lambda f: _writing_down(started, f)))
        enter(_forked())
        launched: list[Path] = []
        enter(launchers.in_place(world, launched))
        _run(script, recorder, started, launched, world.local_rank)
        meshes = list(map(dict, adapter.meshes(world)))
    return ScriptRun(world=world, recorder=recorder, meshes=meshes)


def _left_out(model: Any = None, *_: Any, **__: Any) -> Any:
    """`torch.compile`, for what frameworks compile where they are imported: its own import takes seconds."""
    return (lambda function: function) if model is None else model


def _exit_as_sys(leave: Callable[[int], NoReturn]) -> Callable[[int], NoReturn]:
    """`os._exit` that ends the script alone, as `sys.exit` does; a child of the script ends as it would."""
    here = os.getpid()

    def ended(status: int) -> NoReturn:
        if os.getpid() != here or threading.current_thread() is not threading.main_thread():
            leave(status)
        raise SystemExit(status)

    return ended


@contextmanager
def _children_end_here() -> Iterator[None]:
    """A process that the script forks ends where the script ends, as it would without a capture."""
    here, failed = os.getpid(), 1
    try:
        yield
        failed = 0
    except StepRecorded:
        failed = 0
        raise
    except SystemExit as error:
        failed = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    except BaseException:
        if os.getpid() != here:
            traceback.print_exc()
        raise
    finally:
        if os.getpid() != here:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError, AttributeError):  # closed, or none
                    stream.flush()
            os._exit(failed)


def _writing_down(
    started: list[tuple[Any, Callable[[], Any]]], original: Callable[[Any], None]
) -> Callable[[Any], None]:
    """`Process.start` that writes down what is started, of this process alone."""
    here = os.getpid()

    def start(process: Any) -> None:
        if os.getpid() == here:
            # What it is to do is forgotten where it is started.
            target = getattr(process, "_target", None)
            own = process.run if target is None else partial(target, *process._args, **process._kwargs)
            if not getattr(target, "__module__", "").startswith("multiprocessing"):  # a manager of shared objects
                started.append((process, own))
        original(process)

    return start


@contextmanager
def _forked() -> Iterator[None]:
    """Processes of the script are forked, however it wants them: a fresh one would find no GPU, no stand-ins.

    It chooses among them as the first to do so, whatever this process chose before.
    """
    kinds: dict[str, Any] = vars(multiprocessing.context)["_concrete_contexts"]
    before, chosen = dict(kinds), multiprocessing.get_start_method(allow_none=True)
    if "fork" in kinds:
        kinds.update(dict.fromkeys(kinds, kinds["fork"]))
    multiprocessing.set_start_method(None, force=True)
    try:
        yield
    finally:
        kinds.update(before)
        multiprocessing.set_start_method(chosen, force=True)


def _as_one_of(started: Sequence[tuple[Any, Callable[[], Any]]], local_rank: int) -> None:
    """Does what one of the processes was started for, which a script left its steps to, one for each rank."""
    for process, _ in started:
        with suppress(ValueError):  # closed
            process.kill()
    _, work = started[local_rank if local_rank < len(started) else 0]
    work()


def _run(
    script: Script,
    recorder: ScriptRecorder,
    started: Sequence[tuple[Any, Callable[[], Any]]],
    launched: Sequence[Path],
    local_rank: int,
) -> None:
    status: object = 0
    reported: list[BaseException] = []
    refused: list[str] = []

    def told() -> Script:
        """Whose lines errors name: of a launcher, those of what it launched."""
        return replace(script, path=launched[-1]) if launched else script

    try:
        with (
            recorder, _children_end_here(), once_imported("loguru", partial(_reporting, reported)),
            patched(argparse.ArgumentParser, "error", partial(_refusing, refused)),
        ):  # fmt: skip
            if script.module == launchers.DEEPSPEED:  # run as a module it is made anew, as is what it starts
                launchers.run(script.module, sys.argv[1:])
            elif script.module:
                runpy.run_module(script.module, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(script.path), run_name="__main__")
            if started and not recorder.steps:
                _as_one_of(started, local_rank)
    except StepRecorded:
        return
    except CaptureError as error:
        raise _placed(told(), error) from error
    except EchoError:
        raise
    except SystemExit as error:
        status = error.code
        if error.__context__ is not None:  # it left for what it caught and printed
            reported.append(error.__context__)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a script may raise what is no Exception
        raise _explained(told(), error, list(recorder.warnings)[-1:]) from error
    if not recorder.recorded:
        raise _too_short(told(), recorder, status, reported, refused)


@contextmanager
def _reporting(reported: list[BaseException]) -> Iterator[None]:
    """In the context, what `loguru.logger.catch` logs and keeps from its caller is written down."""
    kind = type(importlib.import_module("loguru").logger)

    def catching(original: Callable[..., Any]) -> Callable[..., Any]:
        def catch(logger: Any, /, *args: Any, onerror: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
            def told(error: BaseException) -> None:
                reported.append(error)
                if onerror is not None:
                    onerror(error)

            return original(logger, *args, onerror=told, **kwargs)

        return catch

    with patched(kind, "catch", catching):
        yield


def _refusing(refused: list[str], original: Callable[..., Any]) -> Callable[..., Any]:
    """`ArgumentParser.error`, whose words are kept: it ends the script."""

    def error(parser: argparse.ArgumentParser, message: str) -> Any:
        refused.append(message)
        return original(parser, message)

    return error


def _too_short(
    script: Script,
    recorder: ScriptRecorder,
    status: object,
    reported: Sequence[BaseException],
    refused: Sequence[str],
) -> CaptureError:
    if refused and status == 2:
        said = refused[-1].rstrip(".")
        error = CaptureError(f"{script.path.name}: {said}: its arguments stand behind --, as it takes them")
        return _with_status(error, status)
    if reported:
        error = _explained(script, reported[-1])
        error.__cause__ = reported[-1]
        return _with_status(error, status)
    ended = "" if status in (0, None) else f" with exit status {status}"
    did = f"{recorder.steps} training step{'' if recorder.steps == 1 else 's'}"
    left = status not in (0, None)
    remedy = (
        f"give --step {recorder.steps}" if recorder.steps
        else "it left by itself, and what it printed says why" if left
        else "a step ends where torch.optim's step does"
    )  # fmt: skip
    error = CaptureError(f"{script.path.name} ended{ended} after {did}, before step {script.step}: {remedy}")
    return _with_status(error, status)


def _with_status(error: CaptureError, status: object) -> CaptureError:
    if isinstance(status, int) and status:
        error.exit_code = status
    return error


def _explained(script: Script, error: BaseException, warned: Sequence[str] = ()) -> CaptureError:
    """What a script raised, in a line: with what to do, and what was warned of before, which may be why."""
    if isinstance(error.__context__, AttributeError) and isinstance(error.__context__.__cause__, ImportError):
        error = error.__context__  # of what an import lacks that was put off, as `dataclasses.fields` asks it
    while isinstance(error.__cause__, ImportError):  # who imports by name says so in words of its own
        error = error.__cause__
    where = script_line(script.path, error) or script.path.name
    if isinstance(error, SyntaxError) and error.filename is not None:
        where = f"{Path(error.filename).name}:{error.lineno}"
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, CaptureError):
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        return _placed(script, cause)
    if isinstance(error, _DATA_DEPENDENT):
        what = str(error.args[0]).strip().splitlines()[0]
        return CaptureError(
            f"{where}: '{what}' makes control flow or a shape depend on the values of a tensor, which a capture "
            "without data does not have: decide on shapes or settings instead"
        )
    if isinstance(error, _UNSUPPORTED):
        return CaptureError(
            f"{where}: {reason(error)}: PyTorch has no shape rule for it, so register a fake implementation "
            "(torch.library.register_fake)"
        )
    parts = [remedy(error, script.path) or _RAISED, *(f"what led to it may be that {line}" for line in warned)]
    return CaptureError(f"{where}: {reason(error)}: {'; '.join(parts)}")


def _placed(script: Script, error: BaseException) -> CaptureError:
    """An error of a capture with the line of the script that led to it in front, where it does not say one."""
    if isinstance(error, OtherFrameworkError):
        return error
    where = script_line(script.path, error)
    text = str(error)
    placed = not where or re.match(r"[^\s:]+\.py:\d+: ", text) or text.startswith(where.partition(":")[0])
    return CaptureError(text if placed else f"{where}: {text}")


def script_line(path: Path, error: BaseException) -> str:
    """`name.py:line` of the innermost frame in the script's folder; "" if there is none."""
    folder = path.resolve().parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        here = Path(frame.filename).resolve()
        if not frame.filename.startswith("<") and here.is_relative_to(folder) and not package_of(str(here)):
            return f"{here.relative_to(folder)}:{frame.lineno}"
    return ""


@contextmanager
def _as_main(script: Script, arguments: Sequence[str]) -> Iterator[None]:
    """The interpreter as a script finds it, then as it was; what was imported from beside it is forgotten."""
    folder = str(script.path.resolve().parent)
    argv, path, before, here = sys.argv, list(sys.path), set(sys.modules), Path.cwd()
    hook = sys.excepthook
    sys.argv = [str(script.path), *arguments]
    sys.path.insert(0, str(here) if script.module else folder)
    try:
        with without_bytecode():
            yield
    finally:
        sys.argv, sys.path[:], sys.excepthook = argv, path, hook
        os.chdir(here)
        roots = (Path(folder), here) if script.module else (Path(folder),)
        # A package without a file asks its parent where it lies: all are asked before any is gone.
        for name in [name for name in sys.modules.keys() - before if _is_of(sys.modules[name], roots)]:
            del sys.modules[name]


@contextmanager
def _settings_kept() -> Iterator[None]:
    """Puts back what a script sets for the whole process: the next rank begins as this one did."""
    limit, dtype, grad = sys.getrecursionlimit(), torch.get_default_dtype(), torch.is_grad_enabled()
    default = torch._GLOBAL_DEVICE_CONTEXT
    device, context = _device.CURRENT_DEVICE, getattr(default, "device_context", None)
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    names = vars(builtins)
    before = dict(names)
    try:
        with settings_kept():
            yield
    finally:
        for name in names.keys() - before.keys():
            del names[name]
        names.update(before)
        sys.setrecursionlimit(limit)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        # The mode of a default device went with those that the script ran under.
        _device.CURRENT_DEVICE, default.device_context = device, context
        for number, handler in handlers.items():
            # None: no handler of Python's; signals are the main thread's.
            if handler is not None and signal.getsignal(number) is not handler:
                with suppress(ValueError):
                    signal.signal(number, handler)


def _is_of(module: Any, roots: Sequence[Path]) -> bool:
    """Whether a module lies in some folders, and is not installed there; one without a file has folders itself."""
    with suppress(TypeError, ValueError, AttributeError):  # a stand-in, or what a script puts there
        named = getattr(module, "__file__", None)
        try:
            places = [Path(named)] if named else [Path(place) for place in getattr(module, "__path__", ())]
        except KeyError:  # its parent is gone, whose import failed
            return True
        return any(
            place.is_relative_to(root) and "site-packages" not in place.relative_to(root).parts
            for place in places
            for root in roots
        )
    return False
