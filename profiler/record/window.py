"""Which steps are recorded, and where to: from arguments, or from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from echograph.errors import UsageError

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
