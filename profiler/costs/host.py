"""What the host takes to issue an operation: a framework's work, measured on one processor, on another one.

Python, autograd and the framework are work of one thread, which takes longer in proportion to how slow a thread of
the processor is. A launch and a collective are work of the driver and of the communication library, and stand with
the processor as they were traced.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from echograph.errors import DataError, UnknownNameError
from echograph.ir.types import Phase

T = TypeVar("T")
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=1)]

RATED_SPREAD = 0.38
"""Relative standard error of a framework's time on a processor that only its rating stands for: the root of the
mean square of the logarithm by which two platforms' traces take longer than told so (`benchmarks.host_traces`:
V100 hosts -27 %, an MI300X host -29 to -40 %)."""


class HostProcessor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A processor of hosts.

    Attributes:
        single_thread: published rating of one thread; only ratios of it count.
        launch_s: seconds of one launch.
        communication_s: seconds of one collective or message, from the call into the process group to its return.
        source: whether the seconds were measured on such a host.
        basis: where all of it comes from.
    """

    single_thread: Annotated[float, msgspec.Meta(gt=0)]
    launch_s: _Seconds
    communication_s: _Seconds
    source: Literal["measured", "assumed"]
    basis: str


class Framework(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a framework takes for an operation, a view as much as a kernel, in seconds without the launch.

    Attributes:
        forward_s: of a forward pass, and of what is neither of the others.
        recompute_s: of a forward pass that runs again, with what that takes beside it (saved random states).
        backward_s: of a backward pass.
        processor: on which it was measured.
        basis: how it was measured.
    """

    forward_s: _Seconds
    recompute_s: _Seconds
    backward_s: _Seconds
    processor: str
    basis: str

    def on(self, processor: HostProcessor) -> dict[Phase, float]:
        """Seconds of an operation by phase on a processor.

        Raises:
            UnknownNameError: it was measured on a processor that no table has.
        """
        slower = load_processor(self.processor).single_thread / processor.single_thread
        others = dict.fromkeys(Phase, self.forward_s)
        own = {Phase.RECOMPUTE: self.recompute_s, Phase.BACKWARD: self.backward_s}
        return {phase: slower * seconds for phase, seconds in (others | own).items()}


def load_processor(name: str) -> HostProcessor:
    """The processor of that name.

    Raises:
        UnknownNameError: no such processor; lists the choices and the nearest.
    """
    return _named("processor", name, processors())


def load_framework(name: str) -> Framework:
    """The framework of that name.

    Raises:
        UnknownNameError: no such framework; lists the choices and the nearest.
    """
    return _named("framework", name, frameworks())


@cache
def processors() -> dict[str, HostProcessor]:
    """All processors, by name."""
    return _read("processors.toml", dict[str, HostProcessor])


@cache
def frameworks() -> dict[str, Framework]:
    """All frameworks, by name."""
    return _read("frameworks.toml", dict[str, Framework])


def _named(kind: str, name: str, table: dict[str, T]) -> T:
    if name not in table:
        raise UnknownNameError(kind, name, table)
    return table[name]


def _read(file: str, type_: type[T]) -> T:
    path = Path(__file__).parent.parent / "devices" / file
    try:
        return msgspec.toml.decode(path.read_bytes(), type=type_)
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(f"{file}: {error}") from error
