"""Every error a user can cause, as one tree.

EchoError                  exit 1: one line saying what, where, and what to do
├── UsageError             exit 2: an option or argument is wrong
│   ├── UnknownNameError   a name that is in no table; lists the choices and the nearest
│   └── UnavailableError   a known name that means nothing here; says why, and lists what does
├── MissingExtraError      an optional dependency is not installed; names the extra
├── InputError             a file cannot be read, or does not hold what it should
│   ├── FormatError        a graph or profile file is truncated, corrupted or of a newer version
│   └── DataError          a measurement table, cluster or device file breaks a rule
├── OutputError            a result cannot be written where it was asked for
├── GraphError             a graph breaks an invariant (`ir.verify`); names the op or tensor
├── PlanError              a parallel plan does not fit the model or the cluster
├── CaptureError           a model cannot be captured; names the module or the op
│   └── OtherFrameworkError  a script trains with another framework than was said; names it
└── SimulationError        a graph that verifies cannot run
    └── DeadlockError      programs wait for each other for ever; names who waits at which operation
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EchoError(Exception):
    """Root of the tree: `str(error)` is the one line that a user reads."""

    exit_code = 1


class UsageError(EchoError):
    """An option or argument is wrong."""

    exit_code = 2


class UnknownNameError(UsageError):
    """A name that is in no table."""

    def __init__(self, kind: str, name: str, choices: Iterable[str], hint: str = "") -> None:
        known = sorted(choices)
        near = difflib.get_close_matches(name.lower(), [c.lower() for c in known], n=1, cutoff=0.5)
        nearest = next((c for c in known if near and c.lower() == near[0]), None)
        shown = ", ".join(known[:12]) + (f", ... ({len(known)} in all)" if len(known) > 12 else "")
        line = f"unknown {kind} '{name[:80]}'"
        line += f": did you mean '{nearest}'?" if nearest else ":"
        super().__init__(f"{line} known: {shown}" + (f" ({hint})" if hint else ""))
        self.nearest = nearest


class UnavailableError(UsageError):
    """A known name that is not available where it is asked for.

    Args:
        why: what is asked for, and why it is not there ("device a100-sxm-80 has no FP8 units").
        available: what is there instead.
    """

    def __init__(self, why: str, available: Iterable[str]) -> None:
        shown = list(available)
        most = ", ".join(shown[:12]) + (f", ... ({len(shown)} in all)" if len(shown) > 12 else "")
        super().__init__(f"{why}; available: {most or 'nothing'}")


class MissingExtraError(EchoError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}: install it with pip install 'echograph[{extra}]'")


class InputError(EchoError):
    """A file cannot be read, or does not hold what it should."""


class FormatError(InputError):
    """A graph or profile file is truncated, corrupted or of a newer version."""


class DataError(InputError):
    """A measurement table, cluster or device file breaks a rule."""


class OutputError(EchoError):
    """A result cannot be written where it was asked for."""


class GraphError(EchoError):
    """A graph breaks an invariant."""


class PlanError(EchoError):
    """A parallel plan does not fit the model or the cluster."""


class CaptureError(EchoError):
    """A model cannot be captured."""


class OtherFrameworkError(CaptureError):
    """A script trains with another framework than was said.

    Attributes:
        framework: that one.
    """

    framework = ""


class SimulationError(EchoError):
    """A graph that verifies cannot run."""


class DeadlockError(SimulationError):
    """Tasks wait for each other for ever.

    Attributes:
        tasks: the tasks first in line on the resources that stand still.
    """

    def __init__(self, message: str, tasks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.tasks = tasks
