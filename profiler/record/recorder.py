"""`record`: two lines in a training script, or none, and a window of its steps stands in a folder.

Which steps, and where to, is said by arguments or by the environment.

PyTorch tells of every step of every `torch.optim.Optimizer`. A framework's own optimizer or engine calls those
from a method `step` of its own, several times a step where it cuts parameters into parts, and gathers them
afterwards; so a step ends where the outermost `step` method on the stack returns. It is looked for once, and
wrapped.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import json
import os
import platform
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from msgspec import structs

from echograph.errors import EchoError, MissingExtraError, UsageError
from echograph.profiler.record.folder import (
    COMMS,
    DAG,
    TRACE,
    Hooks,
    Metadata,
    StepTimes,
    write_hooks,
    write_metadata,
)

FOLDER, START, END = "recording", 10, 13


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The steps `start` to `end - 1`; a step's number is how many had ended when it began.

    Attributes:
        folder: where the ranks' folders go.
        start: first step, at least 1: where step 0 began nobody knows.
        end: the step before which recording ends.
        shapes: whether the trace has the shapes of operators' inputs, which costs some microseconds an operator.

    Raises:
        UsageError: the steps are no window.
    """

    folder: Path
    start: int
    end: int
    shapes: bool = True

    def __post_init__(self) -> None:
        if self.start < 1:
            raise UsageError(f"start step {self.start}: give 1 or more; where step 0 begins is not known")
        if self.end <= self.start:
            raise UsageError(
                f"end step {self.end}: give more than the start step, {self.start}; it is not recorded"
            )

    def environment(self) -> dict[str, str]:
        """The variables that say the same to another process."""
        return {
            "ECHOGRAPH_RECORD": "1",
            "ECHOGRAPH_RECORD_DIR": str(self.folder.absolute()),
            "ECHOGRAPH_RECORD_START_STEP": str(self.start),
            "ECHOGRAPH_RECORD_END_STEP": str(self.end),
            "ECHOGRAPH_RECORD_SHAPES": str(int(self.shapes)),
        }


def choose_window(
    folder: Path | None = None,
    start: int | None = None,
    end: int | None = None,
    shapes: bool | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Window:
    """What is given; what is not, from `ECHOGRAPH_RECORD_*`, else from ByteProfile's variables, else as usual.

    Args:
        folder: where the ranks' folders go (usual: `recording`).
        start: first step (usual: 10).
        end: the step before which recording ends (usual: three steps).
        shapes: whether the trace has shapes (usual: it has).
        environment: variables; those of ByteProfile count where `BYTEPS_TRACE_ON` is 1.

    Raises:
        UsageError: a variable is no number, or the steps are no window.
    """
    prefixes = ["ECHOGRAPH_RECORD", *(["BYTEPS_TRACE"] if environment.get("BYTEPS_TRACE_ON") == "1" else [])]

    def said(what: str) -> tuple[str, str] | None:
        names = (f"{prefix}_{what}" for prefix in prefixes)
        return next(((name, environment[name]) for name in names if environment.get(name)), None)

    def number(what: str) -> int | None:
        found = said(what)
        if found is None:
            return None
        try:
            return int(found[1])
        except ValueError:
            raise UsageError(f"{found[0]}: '{found[1]}' is no number of a step") from None

    if folder is None:
        named = said("DIR")
        folder = Path(named[1]) if named else Path(FOLDER)
    if start is None:
        start = number("START_STEP")
    if end is None:
        end = number("END_STEP")
    if start is None:
        start = START if end is None else max(1, min(START, end - 1))
    if shapes is None:
        shapes = number("SHAPES") != 0
    return Window(folder=folder, start=start, end=start + END - START if end is None else end, shapes=shapes)


class StepEnds:
    """Tells of each end of a training step: of the optimizer that stepped first, where a script has several.

    Args:
        ended: told, on the thread that trains.
        lost: told when a step could not be followed: called by a name that was taken before its first time.
        within: told 1 where the outermost `step` is entered, -1 where it is left.
    """

    def __init__(self, ended: Callable[[], None], lost: Callable[[], None], within: Callable[[int], None]) -> None:
        self._ended = ended
        self._lost = lost
        self._within = within
        self._depth = 0
        self._outer = 0
        self._stepped = False
        self._first: Any = None
        self._wrapped = False
        self._unwrapped: FrameType | None = None
        self._restore: list[Callable[[], None]] = []

    def install(self) -> None:
        """Listens from now on."""
        from torch.optim import optimizer

        self._restore += [
            optimizer.register_optimizer_step_pre_hook(self._begins).remove,
            optimizer.register_optimizer_step_post_hook(self._steps).remove,
        ]

    def remove(self) -> None:
        """Stops listening and puts back what was wrapped."""
        while self._restore:
            self._restore.pop()()
        self._unwrapped = self._first = None

    def _begins(self, optimizer: Any, *_: Any) -> None:
        if self._first is None:
            self._first = optimizer
        self._depth += 1

    def _steps(self, optimizer: Any, *_: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if optimizer is not self._first:
            return
        if self._depth or self._outer:
            self._stepped = True
        elif not self._wrapped:
            # This once the end is taken where the optimizer stepped; from the next call on it is seen.
            frame, owner = _outermost_step(sys._getframe(1)) or (None, optimizer)
            self._unwrapped = frame
            self._wrap(owner)
            self._ended()
        elif self._unwrapped is None or not _on_stack(self._unwrapped, sys._getframe(1)):
            self._lost()

    def _wrap(self, owner: Any) -> None:
        original: Callable[..., Any] = owner.step
        own = "step" in vars(owner)
        # Learning rate schedulers take the method of an optimizer apart, and leave a function in its place.
        method = isinstance(original, types.MethodType)
        function = original.__func__ if isinstance(original, types.MethodType) else original

        @functools.wraps(original)
        def step(*arguments: Any, **named: Any) -> Any:
            self._unwrapped = None
            self._outer += 1
            self._within(1)
            try:
                return function(*arguments, **named)
            finally:
                self._outer -= 1
                self._within(-1)
                if self._outer == 0 and self._stepped:
                    self._stepped = False
                    self._ended()

        owner.step = types.MethodType(step, owner) if method else step
        self._restore.append(lambda: setattr(owner, "step", original) if own else delattr(owner, "step"))
        self._wrapped = True


def _outermost_step(frame: FrameType | None) -> tuple[FrameType, type] | None:
    """The outermost frame of a method `step`, and the class that has it."""
    found = None
    while frame is not None:
        code = frame.f_code
        if code.co_name == "step" and code.co_argcount:
            owner = _owner(type(frame.f_locals.get(code.co_varnames[0])), code)
            if owner is not None:
                found = frame, owner
        frame = frame.f_back
    return found


def _owner(kind: type, code: Any) -> type | None:
    for owner in kind.__mro__:
        method = owner.__dict__.get("step")
        if callable(method) and getattr(inspect.unwrap(method), "__code__", None) is code:
            return owner
    return None


def _on_stack(sought: FrameType, frame: FrameType | None) -> bool:
    while frame is not None and frame is not sought:
        frame = frame.f_back
    return frame is sought


class ProfiledWindow:
    """Warms up before the window and marks its steps, `ProfilerStep#N` with the window's numbers.

    Args:
        window: which steps.
        file: where the trace goes.
    """

    def __init__(self, window: Window, file: Path) -> None:
        self._window = window
        self._file = file
        self._profile: Any = None
        self._marks: list[Any] = []

    def begin(self, step: int) -> None:
        """Starts in the step before the window, or in its first.

        Raises:
            UsageError: another profiler is at work; beginning would end it.
        """
        import torch
        from torch.profiler import ProfilerActivity, profile

        if torch._C._autograd._profiler_enabled():
            raise UsageError("no trace: the script's own profiler is at work: record other steps")

        activities = [ProfilerActivity.CPU]
        if sees_cuda():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, schedule=self._action, record_shapes=self._window.shapes)
        self._profile.step_num = step
        self._profile.current_action = self._action(step)
        self._profile.start()

    def step(self) -> None:
        """The next step begins."""
        if self._profile is not None:
            self._profile.step()

    def optimizing(self, entered: int) -> None:
        """Marks a step around PyTorch's own, as PyTorch marks those: entered (1) or left (-1)."""
        from torch.profiler import record_function

        if entered > 0:
            mark = record_function("Optimizer.step#outermost")
            mark.__enter__()  # type: ignore[no-untyped-call]
            self._marks.append(mark)
        elif self._marks:
            self._marks.pop().__exit__(None, None, None)

    def finish(self, rank: int, world: int) -> bool:
        """Stops, and writes what was seen; false where there is nothing.

        Args:
            rank: of this process; the file says it where PyTorch does not.
            world: number of ranks.
        """
        if self._profile is None:
            return False
        profile, self._profile = self._profile, None
        recording = profile.current_action.name in ("RECORD", "RECORD_AND_SAVE")
        if recording:
            self._add_rank(profile, rank, world)
        profile.stop()
        if recording:
            # Written whole or not at all.
            scratch = self._file.with_name(f".{self._file.name}")
            profile.export_chrome_trace(str(scratch))
            scratch.replace(self._file)
        return recording

    def _add_rank(self, profile: Any, rank: int, world: int) -> None:
        with suppress(RuntimeError):
            if profile._get_distributed_info() is None:
                profile.add_metadata_json("distributedInfo", json.dumps({"rank": rank, "world_size": world}))

    def _action(self, step: int) -> Any:
        from torch.profiler import ProfilerAction

        if step < self._window.start:
            return ProfilerAction.WARMUP
        # Ended by hand, so that the last step's mark closes where the step does.
        return ProfilerAction.RECORD


def sees_cuda() -> bool:
    """Whether there is a CUDA device that this PyTorch can profile; scripts may have been told so of a CPU."""
    import torch
    from torch.profiler import ProfilerActivity, supported_activities

    activities = supported_activities()  # type: ignore[no-untyped-call]
    return torch.cuda.is_available() and ProfilerActivity.CUDA in activities


_recorder: JobRecorder | None = None


def record(
    folder: str | os.PathLike[str] | None = None,
    *,
    start_step: int | None = None,
    end_step: int | None = None,
    shapes: bool | None = None,
    enabled: bool = True,
) -> JobRecorder:
    """Records a window of the training steps that follow, on every rank that runs this line.

    A step ends with the step of the optimizer; it is found, whatever framework calls it. Each rank writes a folder
    of its own, `<folder>/<rank>`.

    Args:
        folder: where those go; what is not given comes from `ECHOGRAPH_RECORD_DIR`, `_START_STEP`, `_END_STEP`,
            else from `BYTEPS_TRACE_DIR` and so on where `BYTEPS_TRACE_ON` is 1.
        start_step: first step that is recorded, at least 1: as many have ended before (usual: 10).
        end_step: the step before which recording ends (usual: three steps).
        shapes: whether the trace has the shapes of operators' inputs (usual: it has); they cost some microseconds
            an operator, and tell the bytes of collectives.
        enabled: False does nothing at all, so that a script can leave the line where it is.

    Raises:
        MissingExtraError: PyTorch is not installed.
        UsageError: the steps are no window, or this process is being recorded already.
    """
    global _recorder
    window = choose_window(None if folder is None else Path(folder), start_step, end_step, shapes)
    recorder = JobRecorder(window)
    if not enabled:
        return recorder
    if _recorder is not None and _recorder.running:
        raise UsageError("record: this process is being recorded already: leave out the line, or echoprof record")
    try:
        import torch.optim  # noqa: F401
    except ImportError:
        raise MissingExtraError("PyTorch", "torch", "recording a job") from None
    _recorder = recorder
    recorder._begin()
    return recorder


class JobRecorder:
    """A recording that goes on; made by `record`.

    Attributes:
        window: what is recorded.
        running: whether steps are still counted.
        steps: steps that have ended.
        folder: of this rank, None before the window is near.
    """

    def __init__(self, window: Window) -> None:
        self.window = window
        self.running = False
        self.steps = 0
        self.folder: Path | None = None
        self._seen: list[StepTimes] = []
        self._began_ns = self._spent_ns = 0
        self._ends = StepEnds(self._step_ended, self._lost, self._in_step)
        self._by_hand = False
        self._observer: Any = None
        self._profile: Any = None
        self._tracer: Any = None
        self._traced = False
        self._entered: list[int] = []
        self._complete = False
        self._problems: list[str] = []
        self._about: Any = None
        self._overhead: Any = None
        self._signal: Any = None

    def step(self) -> None:
        """Says that a step has ended; from its first call on, only these count."""
        self._by_hand = True
        if self.running:
            self._next()

    def stop(self) -> None:
        """Ends recording, writes what there is and leaves PyTorch as it was; twice does nothing."""
        if not self.running:
            return
        self.running = False
        atexit.unregister(self.stop)
        self._ends.remove()
        self._close()

    def __enter__(self) -> JobRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _begin(self) -> None:
        self.running = True
        self._ends.install()
        atexit.register(self.stop)
        os.register_at_fork(after_in_child=self._forget)
        if self.window.start == 1:
            self._try(self._observe)

    def _step_ended(self) -> None:
        if self.running and not self._by_hand:
            self._next()

    def _in_step(self, entered: int) -> None:
        """An outermost step is entered or left: what runs in it belongs to the optimizer."""
        if self._tracer is not None:
            self._tracer.optimizing(entered)
        if self._profile is not None:
            self._profile.optimizing(entered)

    def _lost(self) -> None:
        if self.running and not self._by_hand:
            self._by_hand = True
            self._note("steps of the optimizer are called past its method: call step() of the recorder after each")

    def _next(self) -> None:
        """Between two steps: what the next one needs is turned on or off."""
        ended, window = self.steps, self.window
        if ended:
            seconds = (time.perf_counter_ns() - self._began_ns) / 1e9
            spent = (time.thread_time_ns() - self._spent_ns) / 1e9
            self._seen.append(
                StepTimes(number=ended, seconds=seconds, processor_s=spent, state=self._state(ended))
            )
        self.steps = step = ended + 1
        if step == window.start - 1:
            self._try(self._prepare)
        elif step == window.start:
            self._try(self._record)
        elif window.start < step < window.end:
            self._try(self._profile_step)
        elif step == window.end:
            self._complete = True
            self._close()
        self._began_ns, self._spent_ns = time.perf_counter_ns(), time.thread_time_ns()

    def _state(self, step: int) -> str:
        window = self.window
        if window.start <= step < window.end:
            return "recorded"
        return {window.start - 1: "observed", window.end: "after"}.get(step, "free")

    def _observe(self) -> None:
        from echograph.profiler.comms.tracer import shared_capture
        from echograph.profiler.record.dependencies import StepObserver

        self._observer = StepObserver()
        self._observer.install()
        shared_capture().add(self._observer)

    def _prepare(self) -> None:
        self._try(self._measure_overhead)
        self._observe()
        self._try(self._start_profile)

    def _measure_overhead(self) -> None:
        """Before anything is on: hooks that look at all modules would see the measuring."""
        from torch import distributed

        from echograph.profiler.record.overhead import measure_overhead

        here = distributed.is_available() and distributed.is_initialized()
        self._overhead = measure_overhead(shapes=self.window.shapes, collectives=here)

    def _start_profile(self) -> None:

        profile = ProfiledWindow(self.window, (self.folder or self._open()) / TRACE)
        profile.begin(self.steps)
        self._profile = profile

    def _record(self) -> None:
        from echograph.profiler.comms.tracer import shared_capture, trace_collectives

        roots = self._observed()
        folder = self.folder or self._open()
        if self.window.start == 1:
            self._try(self._measure_overhead)
            self._try(self._start_profile)
        else:
            self._profile_step()
        self._tracer = trace_collectives(folder.parent / "{rank}" / COMMS)
        # In the first step that is seen to end, hooks of optimizers are being run, and must not be added to.
        for root in roots if self.window.start > 1 else []:
            self._tracer.attach(root)
        self._entered = shared_capture().phases.entered = []

    def _profile_step(self) -> None:
        if self._profile is not None:
            self._profile.step()

    def _observed(self) -> list[Any]:
        """Ends the look at a step, and writes what it saw; the models that ran."""
        from echograph.profiler.comms.tracer import shared_capture
        from echograph.profiler.record.dependencies import write_dependencies

        observer, self._observer = self._observer, None
        if observer is None:
            return []
        shared_capture().remove(observer)
        observer.remove()
        roots: list[Any] = observer.roots
        write_dependencies(observer, self.folder or self._open())
        return roots

    def _close(self) -> None:
        self._try(self._finish)
        self._try(self._write_metadata)
        # It takes longest, and a launcher that ends the job does not wait.
        self._try(self._add_durations)
        self._try(self._write_metadata)

    def _write_trace(self, profile: Any, about: Metadata) -> None:
        self._traced = profile.finish(about.rank, about.world_size)

    def _finish(self) -> None:
        tracer, self._tracer = self._tracer, None
        profile, self._profile = self._profile, None
        if self._observer is not None:
            self._try(self._observed)
        if profile is not None:
            about = self._about
            self._try(lambda: self._write_trace(profile, about))
        if tracer is not None:
            tracer.stop()
            self._try(self._write_hooks)
        if self._signal is not None:
            signal.signal(signal.SIGTERM, self._signal)
            self._signal = None

    def _write_hooks(self) -> None:
        from echograph.profiler.comms.call import WALL_NS

        if self.folder is not None and self._entered:
            write_hooks(self.folder, Hooks(entered_ns=[time_ns + WALL_NS for time_ns in self._entered]))

    def _add_durations(self) -> None:
        traced, self._traced = self._traced, False
        if traced and self.folder is not None and (self.folder / DAG).is_file():
            # Not where nothing was recorded: a process that ends may no longer import everything.
            from echograph.profiler.record.dependencies import add_durations

            problem = add_durations(self.folder)
            if problem:
                self._note(problem)

    def _open(self) -> Path:
        """Makes this rank's folder."""
        # Asked once: a script may take its process group down before it ends.
        about = self._about = _about(self.window)
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        folder = self.window.folder / (f"restart{restart}" if restart != "0" else "") / str(about.rank)
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._write_metadata()
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            # Launchers end the other ranks of a job that failed with this signal.
            self._signal = signal.signal(signal.SIGTERM, self._terminated)
        return folder

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        self.stop()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _write_metadata(self) -> None:
        if self.folder is not None and self._about is not None:
            now = {
                "complete": self._complete, "problems": self._problems, "steps": self._seen,
                "overhead": self._overhead,
            }  # fmt: skip
            write_metadata(self.folder, structs.replace(self._about, **now))

    def _forget(self) -> None:
        """In a forked child: nothing is recorded there, and the parent's files are left alone."""
        self.running = False
        self._tracer = self._profile = self._observer = None
        atexit.unregister(self.stop)
        self._ends.remove()

    def _try(self, action: Callable[[], object]) -> None:
        """Training goes on, whatever recording meets; what it met is said once and stands in the metadata."""
        try:
            action()
        except Exception as error:
            line = f"{error}" if isinstance(error, EchoError) else f"{type(error).__name__}: {error}"
            self._note(" ".join(line.split())[:300])

    def _note(self, line: str) -> None:
        self._problems.append(line)
        sys.stderr.write(f"echograph: recording: {line}\n")


def _about(window: Window) -> Metadata:
    """What is known of this process before anything is recorded."""
    import torch
    from torch import distributed

    here = distributed.is_available() and distributed.is_initialized()
    return Metadata(
        rank=distributed.get_rank() if here else int(os.environ.get("RANK", "0")),
        world_size=distributed.get_world_size() if here else int(os.environ.get("WORLD_SIZE", "1")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        host=socket.gethostname(),
        pid=os.getpid(),
        command=list(sys.orig_argv),
        python=platform.python_version(),
        torch=str(torch.__version__),
        backend=str(distributed.get_backend()) if here else "",
        device=torch.cuda.get_device_name() if sees_cuda() else "cpu",
        threads=torch.get_num_threads(),
        start_step=window.start,
        end_step=window.end,
    )
