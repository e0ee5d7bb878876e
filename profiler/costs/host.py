"""What the host takes to issue an operation: a framework's work, measured on one processor, on another one.

Python, autograd and the framework are work of one thread, which takes longer in proportion to how slow a thread of
the processor is. A launch and a collective are work of the driver and of the communication library, and stand with
the processor as they were traced.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Literal, Protocol, TypeVar

import msgspec

from echograph.errors import DataError, UnknownNameError
from echograph.ir.types import SCRIPT, Phase

T = TypeVar("T")


class CountedWork(Protocol):
    """Work of a host, counted (`frontend.scripts.host_work`)."""

    @property
    def instructions(self) -> int:
        """Of the interpreter."""

    @property
    def modules(self) -> int:
        """Calls of modules."""

    @property
    def light(self) -> int:
        """Operators that launch nothing."""

    @property
    def gradients(self) -> int:
        """Operators that autograd takes note of."""

    @property
    def nodes(self) -> int:
        """Nodes of a backward pass."""

    @property
    def functions(self) -> int:
        """Those of them that are written in Python."""

    @property
    def compiled(self) -> int:
        """Calls of something compiled."""

    @property
    def compiled_backward(self) -> int:
        """Their backward passes."""

    @property
    def batches(self) -> int:
        """That worker processes of a loader hand over."""

    @property
    def handed_over(self) -> int:
        """Tensors of these."""

    @property
    def hashed(self) -> int:
        """Bytes that are hashed."""

    @property
    def stood_in(self) -> tuple[str, ...]:
        """Calls of layers that stand in for others, as "Linear.forward"."""


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


_ON = "@"
"""In a name, between a framework and the processor that its work is priced on."""


class HostUnits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a unit of a host's work takes, in seconds, on one processor.

    Attributes:
        instruction_s: of the interpreter.
        module_s: a module's call, beyond its instructions.
        operator_s: an operator that computes, from the call to its return, without the launch.
        view_s: one that makes another handle of memory.
        gradient_s: what autograd adds to a call that it takes note of.
        node_s: a node of a backward pass, beyond its operators.
        function_s: such a node that is written in Python, with its forward pass, beyond these.
        compiled_s: a call of something compiled (`torch.compile`) between others of a step: guards, wrappers.
        compiled_backward_s: its backward pass.
        batch_s: taking a batch from a worker process of a loader, without its tensors.
        handed_over_s: a tensor of it.
        hashed_s: a byte of weights as fp32, cast and hashed (SHA-1).
        in_place: how many times as long units take between others of a step, where caches hold all of it, by the
            framework whose layers were measured so.
        in_training: how many times as long operators take in traces of training jobs as ratings say.
        alone_s: what an operator takes more where it is called by itself, as a profile of a CPU has it.
        processor: on which it was measured.
        basis: how.
        framework: whose code it is that runs; "": anyone's.
    """

    instruction_s: _Seconds
    module_s: _Seconds
    operator_s: _Seconds
    view_s: _Seconds
    gradient_s: _Seconds
    node_s: _Seconds
    function_s: _Seconds
    compiled_s: _Seconds
    compiled_backward_s: _Seconds
    batch_s: _Seconds
    handed_over_s: _Seconds
    hashed_s: _Seconds
    in_place: dict[str, Annotated[float, msgspec.Meta(ge=1)]]
    in_training: Annotated[float, msgspec.Meta(ge=1)]
    alone_s: _Seconds
    processor: str
    basis: str
    framework: str = ""

    @property
    def times_in_place(self) -> float:
        """`in_place` of the framework; of one that was not measured, the geometric mean."""
        return self.in_place.get(self.framework) or geometric_mean(self.in_place.values())

    @property
    def name(self) -> str:
        """The name under which graphs have what they price: where it was measured, and whose code does it."""
        whose = f"{self.framework}{_ON}" if self.framework else ""
        return f"{whose}{self.processor}{SCRIPT}"

    def seconds(self, work: CountedWork) -> float:
        """What work takes on that processor, without the operators that compute."""
        known = calls_of_modules(self.processor)
        whole = sum(known[name] for name in work.stood_in)
        whole += work.compiled * self.compiled_s + work.compiled_backward * self.compiled_backward_s
        whole += work.batches * self.batch_s + work.handed_over * self.handed_over_s
        whole += work.hashed * self.hashed_s
        return whole + self.times_in_place * (
            work.instructions * self.instruction_s
            + work.modules * self.module_s
            + work.light * self.view_s
            + work.gradients * self.gradient_s
            + work.nodes * self.node_s
            + work.functions * self.function_s
        )

    @property
    def stands_in(self) -> frozenset[str]:
        """Layers whose calls are known as a whole."""
        return frozenset(name.partition(".")[0] for name in calls_of_modules(self.processor))


class ModuleCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call of a layer, or what some do besides, in seconds of the host, without launches and collectives."""

    forward_s: _Seconds
    backward_s: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0


class Library(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A library whose layers others stand in for in a capture.

    Attributes:
        version: version of the library.
        processor: processor on which its calls were measured.
        basis: how they were measured.
        calls: what a call of a layer takes, by the layer's name.
    """

    version: str
    processor: str
    basis: str
    calls: dict[str, ModuleCall]


@cache
def calls_of_modules(processor: str) -> dict[str, float]:
    """Seconds of calls of layers that others stand in for, on a processor, by "Linear.forward"."""
    found = {}
    for library in _read("host_modules.toml", dict[str, Library]).values():
        times = slower(library.processor, processor)
        for name, call in library.calls.items():
            found[f"{name}.forward"] = times * call.forward_s
            found[f"{name}.backward"] = times * call.backward_s
    return found


def load_units(framework: str = "") -> HostUnits:
    """What units of work take on the processor where they were measured.

    Args:
        framework: whose code does the work; "": anyone's.
    """
    return msgspec.structs.replace(_read("host_work.toml", HostUnits), framework=framework)


def told_by(name: str) -> tuple[HostUnits, str]:
    """The units by which a graph's host work was priced, and the processor that it was priced on.

    Args:
        name: `HostUnits.name`.
    """
    framework, _, processor = name.removesuffix(SCRIPT).rpartition(_ON)
    return load_units(framework), processor


def slower(than: str, processor: str) -> float:
    """How many times as long a thread of one processor takes as one of another.

    Args:
        than: the other one.
        processor: the one that takes longer.

    Raises:
        UnknownNameError: no such processor.
    """
    return load_processor(than).single_thread / load_processor(processor).single_thread


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
