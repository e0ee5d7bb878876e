"""PyTorch's profiler over a window of steps."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from echograph.errors import UsageError
from echograph.profiler.record.window import Window


class Profile:
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
