"""Invocations of a captured step: what it takes to run an operation of a graph again, on its own.

A graph says what an operation costs, not how to invoke it: scalars, strides and the order of arguments are not in
it. A capture has them, and hands them over as plain data beside the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from echograph.ir.profile import Signature


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A tensor that an invocation is given.

    Attributes:
        number: which of the invocation's distinct tensors it is; the same number is the same tensor.
        dtype: element type, as PyTorch names it ("float32").
        shape: extents.
        strides: elements between neighbours along each dimension.
        resident: whether the step leaves it in the device's cache until this invocation.
        maker: the invocation that makes it, and which result it is, where no other value will do (the random
            state of an attention, and what was made with it).
    """

    number: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    resident: bool = False
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
        return f"{self.dtype}[{sizes}{strides}]#{self.number}{' resident' if self.resident else ''}"


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
    """

    operator: str
    overload: str = "default"
    arguments: tuple[Argument, ...] = ()
    keywords: tuple[tuple[str, Argument], ...] = ()
    parts: tuple[Part, ...] = ()
    products: bool = False

    @cached_property
    def text(self) -> str:
        """The invocation as text; invocations with the same text do the same work."""
        given = [_text(a) for a in self.arguments]
        given += [f"{name}={_text(a)}" for name, a in self.keywords]
        return f"{self.operator}.{self.overload}({', '.join(given)})"

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
