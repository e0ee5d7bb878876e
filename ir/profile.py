"""A measured profile: how long operations and collectives took on one device, and how each is run again.

Mirrors `proto/profile.proto`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path

from echograph.ir.columns import NONE
from echograph.ir.graph import Graph
from echograph.ir.types import Attributes, DType, MultiTensor, OpKind
from echograph.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where and when a profile was measured.

    Attributes:
        device: the name under which graphs find the durations ("h100").
        hardware: the product's own name, as its driver reports it.
        driver: driver version.
        torch: PyTorch version.
        cuda: CUDA version.
        date: day of the measurement, ISO 8601.
        sm_clock_mhz: clock of the compute units during the measurement, MHz; 0 when unknown.
        memory_clock_mhz: clock of the memory, MHz; 0 when unknown.
        threads: of a processor that computes itself; 0 where a device does.
        host_op_picoseconds: what the host takes to issue an operation, beyond what its measurement holds; 0 when
            not measured.
        host_view_picoseconds: what it takes to issue a view.
        memory_bytes: memory of the device; 0 when unknown.
    """

    device: str
    hardware: str = ""
    driver: str = ""
    torch: str = ""
    cuda: str = ""
    date: str = ""
    sm_clock_mhz: int = 0
    memory_clock_mhz: int = 0
    threads: int = 0
    host_op_picoseconds: int = 0
    host_view_picoseconds: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorType:
    """Element type and extents of an operand."""

    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """What a graph knows of an operation that decides its time: the key by which measurements are found.

    Attributes:
        operator: the operator ("aten.mm") or the collective's kind.
        inputs: types of the tensors read.
        outputs: types of the tensors made.
        attributes: what else decides its time; which part of a shared launch leads it does not.
    """

    operator: str
    inputs: tuple[TensorType, ...] = ()
    outputs: tuple[TensorType, ...] = ()
    attributes: Attributes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One invocation, and how long it took. Invocations that a graph cannot tell apart have one signature.

    Attributes:
        operator: the operator ("aten.mm") or the collective's kind.
        inputs: types of the tensors read.
        outputs: types of the tensors made.
        attributes: what else decides its time.
        mean_picoseconds: mean over the samples.
        median_picoseconds: median over the samples.
        samples: number of timed runs.
        spread: relative standard error (one sigma) of the mean; kept in single precision.
        kernels: names of the device kernels that it launched, in order.
        arguments: what the invocation was given, as text: strides, numbers, what lay in the cache.
        runs: how often the step that it was taken from runs it.
        peak_bytes: memory that it allocates at its peak, results included.
    """

    operator: str
    inputs: tuple[TensorType, ...] = ()
    outputs: tuple[TensorType, ...] = ()
    attributes: Attributes | None = None
    mean_picoseconds: int = 0
    median_picoseconds: int = 0
    samples: int = 0
    spread: float = 0.0
    kernels: tuple[str, ...] = ()
    arguments: str = ""
    runs: int = 0
    peak_bytes: int = 0

    @property
    def signature(self) -> Signature:
        """What a graph knows of it."""
        return Signature(
            operator=self.operator, inputs=self.inputs, outputs=self.outputs, attributes=unled(self.attributes)
        )


def unled(attributes: Attributes | None) -> Attributes | None:
    """Attributes without what a measurement does not tell: which part of a shared launch leads it."""
    return replace(attributes, leads=False) if isinstance(attributes, MultiTensor) else attributes


def signatures(graph: Graph) -> Iterator[Signature | None]:
    """The signature of every row of the operation table; None for views and what is no computation."""
    ops, tensors = graph.ops, graph.tensors
    shapes = [tuple(tensors.shape[i].tolist()) for i in range(len(tensors))]
    types = [TensorType(dtype=DType(d), shape=s) for d, s in zip(tensors.dtype.tolist(), shapes, strict=True)]
    attributes = {NONE: None, **dict(enumerate(map(unled, ops.attribute_values)))}
    works = (ops.kind == OpKind.COMPUTE) & ~ops.is_view
    for row, is_work in enumerate(works.tolist()):
        if not is_work:
            yield None
            continue
        inputs, outputs = (tuple(types[i] for i in side[row].tolist()) for side in (ops.inputs, ops.outputs))
        yield Signature(
            operator=ops.strings[ops.name[row]],
            inputs=inputs,
            outputs=outputs,
            attributes=attributes[int(ops.attributes[row])],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measurements of one device.

    Attributes:
        environment: where and when they were made.
        measurements: one for each invocation.
        unknown: encoded fields of a newer minor version, kept as they are.
    """

    environment: Environment
    measurements: tuple[Measurement, ...] = ()
    unknown: bytes = b""


def save_profile(profile: Profile, path: Path | str) -> int:
    """Writes a profile whole or not at all; returns the bytes written.

    Raises:
        OutputError: the path cannot be written.
    """
    from echograph.ir.files import write_whole
    from echograph.ir.serde.profile import encode_profile

    return write_whole(Path(path), encode_profile(profile))


def load_profile(path: Path | str) -> Profile:
    """Reads a profile.

    Raises:
        InputError: the file does not exist or cannot be read.
        FormatError: it is not a profile, is truncated or corrupted, or of a newer format.
    """
    from echograph.errors import FormatError
    from echograph.ir.files import read_whole
    from echograph.ir.serde.profile import decode_profile

    path = Path(path)
    data = read_whole(path, f"measure one with: echoprof ops -o {path.name}")
    try:
        return decode_profile(data)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None


# -- what it takes to run an operation again ------------------------------------------------------------------
# Invocations of a captured step: what it takes to run an operation of a graph again, on its own.
#
# A graph says what an operation costs, not how to invoke it: scalars, strides and the order of arguments are
# not in it. A capture has them, and hands them over as plain data beside the graph.


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A tensor that an invocation is given.

    Attributes:
        number: which of the invocation's distinct tensors it is; the same number is the same tensor.
        dtype: element type, as PyTorch names it ("float32").
        shape: extents.
        strides: elements between neighbours along each dimension.
        since: bytes of other tensors that the step has used since it last used this one, to a power of two; None:
            more than the device's cache holds.
        maker: the invocation that makes it, and which result it is, where no other value will do (the random
            state of an attention, and what was made with it).
    """

    number: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    since: int | None = None
    maker: tuple[Invocation, int] | None = None

    @property
    def extent(self) -> int:
        """Elements of memory from its first to its last."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def text(self) -> str:
        """As it stands in the text of an invocation."""
        sizes = ",".join(map(str, self.shape))
        strides = "" if self.strides == contiguous(self.shape) else f":{','.join(map(str, self.strides))}"
        since = "" if self.since is None else f" {format_bytes(self.since)} ago"
        return f"{self.dtype}[{sizes}{strides}]#{self.number}{since}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A constant of the framework: kind "dtype", "device", "layout" or "memory_format", and its name."""

    kind: str
    name: str


Argument = Operand | Named | None | bool | int | float | str | tuple["Argument", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Operations of the graph that are one thing to a measurement.

    Attributes:
        signature: what the graph knows of them.
        share: of the invocation's time, each.
        runs: how many the step runs.
    """

    signature: Signature
    share: float
    runs: int


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """An operator with its arguments.

    Attributes:
        operator: as in the graph, "aten.mm".
        overload: which of its overloads, "default".
        arguments: those given by position.
        keywords: those given by name.
        parts: the operations that it is in the graph: one, or those of a launch that they share.
        products: whether it multiplies matrices, whose power depends on the numbers.
        since: as of an operand, of the operator's code.
        tf32: whether operands of fp32 may be rounded to TF32; None: as PyTorch does by default, or there are none.
    """

    operator: str
    overload: str = "default"
    arguments: tuple[Argument, ...] = ()
    keywords: tuple[tuple[str, Argument], ...] = ()
    parts: tuple[Part, ...] = ()
    products: bool = False
    since: int | None = None
    tf32: bool | None = None

    @cached_property
    def text(self) -> str:
        """The invocation as text; invocations with the same text do the same work."""
        given = [_text(a) for a in self.arguments]
        given += [f"{name}={_text(a)}" for name, a in self.keywords]
        since = "" if self.since is None else f" {format_bytes(self.since)} ago"
        rounding = {True: " tf32", False: " ieee", None: ""}[self.tf32]
        return f"{self.operator}.{self.overload}({', '.join(given)}){since}{rounding}"

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        """Its distinct tensors, by number."""
        found = {o.number: o for a in (*self.arguments, *(v for _, v in self.keywords)) for o in _operands(a)}
        return tuple(found[number] for number in sorted(found))


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor that lies in memory row by row."""
    return tuple(prod(max(1, size) for size in shape[i + 1 :]) for i in range(len(shape)))


def _operands(argument: Argument) -> Iterator[Operand]:
    if isinstance(argument, Operand):
        yield argument
    elif isinstance(argument, tuple):
        for item in argument:
            yield from _operands(item)


def _text(argument: Argument) -> str:
    if isinstance(argument, Operand):
        return argument.text
    if isinstance(argument, Named):
        return argument.name
    if isinstance(argument, tuple):
        return f"[{', '.join(map(_text, argument))}]"
    return repr(argument)
